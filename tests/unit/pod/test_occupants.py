from __future__ import annotations

import pytest

from multus_daemon import deadlines
from multus_daemon.pod.attached import Occupants
from multus_daemon.spec.cni.names import ContainerId

A, B = ContainerId("a"), ContainerId("b")
PATH = "/run/netns/p1"


def test_a_container_is_at_its_path_until_it_leaves() -> None:
    occupants = Occupants()
    occupants.enter(PATH, A)
    occupants.enter(PATH, B)
    assert occupants.at(PATH) == {A, B}
    occupants.leave(A)
    assert occupants.at(PATH) == {B}
    occupants.leave(A)
    occupants.leave(B)
    assert occupants.at(PATH) == set()


def test_a_container_that_is_added_anew_elsewhere_has_left_its_path() -> None:
    occupants = Occupants()
    occupants.enter(PATH, A)
    occupants.enter("/run/netns/p2", A)
    assert occupants.at(PATH) == set()
    assert occupants.at("/run/netns/p2") == {A}


def test_records_of_before_are_read_and_what_is_known_counts_more() -> None:
    occupants = Occupants()
    occupants.enter(PATH, A)
    asked: list[str] = []

    def netns_of(container_id: ContainerId) -> str:
        asked.append(container_id)
        return "/run/netns/old"

    occupants.fill(lambda: [A, B], netns_of)
    assert asked == [B]
    assert occupants.at(PATH) == {A}
    assert occupants.at("/run/netns/old") == {B}


def test_it_is_complete_only_once_no_predecessor_can_serve_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    occupants = Occupants()
    occupants.fill(list, lambda _: "")
    assert not occupants.is_complete
    monkeypatch.setattr(deadlines, "PREDECESSOR_SECONDS", 0.0)
    occupants = Occupants()
    assert not occupants.is_complete
    occupants.fill(list, lambda _: "")
    assert occupants.is_complete


def test_a_fill_that_fails_is_no_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "PREDECESSOR_SECONDS", 0.0)
    occupants = Occupants()

    def refuse() -> list[ContainerId]:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        occupants.fill(refuse, lambda _: "")
    assert not occupants.is_complete
