"""DEL per network, its end where it never succeeds, and DELs that come late."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Progress
from multus_daemon.pod.detach import detach
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId
from tests.unit.pod.conftest import NETNS, Engine

OTHER = "/run/netns/other"


def add(engine: Engine) -> None:
    engine.declare("n1,n2")
    engine.verbs.add(engine.request())
    engine.runner.calls.clear()


def on_record(engine: Engine) -> list[str]:
    return [attachment.name for attachment in engine.store.records["c1"].attachments]


def spooled(engine: Engine, written: float) -> CniRequest:
    return replace(engine.request("DEL"), spooled=written)


# --- per network -----------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(3)
def test_a_retry_runs_only_what_failed(engine: Engine) -> None:
    add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy", code=11)
    with pytest.raises(CniError, match="^busy"):
        engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order == [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert on_record(engine) == ["web/n1"]
    engine.runner.fail.clear()
    engine.runner.calls.clear()
    # The daemon restarts.
    engine.verbs = engine.make_verbs()
    engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order == [("DEL", "web/n1")]
    assert engine.store.records == {}


def test_a_torn_container_does_not_pass_for_a_whole_one(engine: Engine) -> None:
    """Else a repeated ADD would return the result of a network that has been detached."""
    add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    with pytest.raises(CniError):
        engine.verbs.delete(engine.request("DEL"))
    with pytest.raises(CniError, match="never finished"):
        engine.verbs.check(engine.request("CHECK"))
    engine.runner.fail.clear()
    engine.runner.calls.clear()
    engine.verbs.add(engine.request())
    assert engine.runner.order == [
        ("DEL", "web/n1"), ("ADD", "kube-system/cluster"), ("ADD", "web/n1"), ("ADD", "web/n2"),
    ]  # fmt: skip
    assert engine.store.records["c1"].complete
    assert engine.store.records["c1"].deletes_failed == 0


def test_one_that_hangs_leaves_the_others_their_share(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(engine)
    monkeypatch.setattr(detach, "__kwdefaults__", {"seconds": 0.3, "counts": False})
    real = engine.runner.delete

    def delete(sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> None:
        real(sandbox, attachment, netns)
        if attachment.name == "web/n2":
            deadline.pause(30)

    monkeypatch.setattr(engine.runner, "delete", delete)
    with pytest.raises(TryAgainLaterError, match=r"^DEL of network web/n2 did not end within 0\.(1|09\d+) s"):
        engine.verbs.delete(engine.request("DEL"))
    assert on_record(engine) == ["web/n2"]


def test_those_side_by_side_share_the_time_as_if_they_came_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three may take a third of 12 s, the next a half of the rest, the last all that is left."""
    engine.attach_concurrency = 4
    engine.verbs = engine.make_verbs()
    add(engine)
    monkeypatch.setattr(detach, "__kwdefaults__", {"seconds": 12.0, "counts": False})
    shares, both, real = [], threading.Barrier(2), engine.runner.delete

    def delete(sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> None:
        shares.append(deadline.current().left)
        if attachment.name != "kube-system/cluster":
            both.wait(30)
        real(sandbox, attachment, netns)

    monkeypatch.setattr(engine.runner, "delete", delete)
    engine.verbs.delete(engine.request("DEL"))
    assert sorted(shares) == pytest.approx([4, 6, 12], abs=1)


def test_a_record_that_cannot_be_written_is_an_error_and_nothing_is_forgotten(engine: Engine) -> None:
    add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    # After the look for the record, the mark, and the look for other containers at its path.
    engine.store.fail_at = {len(engine.store.calls) + 4: OSError("disk full")}
    with pytest.raises(CniError, match="^busy.*") as caught:
        engine.verbs.delete(engine.request("DEL"))
    assert "disk full" in caught.value.details
    assert on_record(engine) == ["kube-system/cluster", "web/n1", "web/n2"]


# --- what never succeeds ---------------------------------------------------------------------------------------------


def test_after_so_many_tries_the_pod_may_go_and_the_rest_stays_on_record(engine: Engine) -> None:
    engine.delete_tries = 3
    engine.verbs = engine.make_verbs()
    add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    for _ in range(2):
        with pytest.raises(CniError, match="^pool is away"):
            engine.verbs.delete(engine.request("DEL"))
        # The count outlives the daemon.
        engine.verbs = engine.make_verbs()
    engine.verbs.delete(engine.request("DEL"))
    assert on_record(engine) == ["web/n1"]
    assert engine.store.records["c1"].given_up
    [(reason, message)] = engine.warnings
    assert reason == "NetworkNotReleased"
    assert "3 times" in message
    assert "pool is away" in message
    engine.verbs.delete(engine.request("DEL"))
    assert len(engine.warnings) == 1, "told once"
    assert engine.given_up == 1
    engine.runner.fail.clear()
    engine.verbs.delete(engine.request("DEL"))
    assert engine.store.records == {}


def test_without_a_bound_every_try_is_an_error(engine: Engine) -> None:
    add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    for _ in range(20):
        with pytest.raises(CniError):
            engine.verbs.delete(engine.request("DEL"))
    assert not engine.store.records["c1"].given_up


@pytest.mark.weak_spot(28)
def test_a_damaged_record_does_not_keep_a_pod_for_ever_either(engine: Engine) -> None:
    engine.delete_tries = 3
    engine.verbs = engine.make_verbs()
    engine.store.corrupt.add("c1")
    for _ in range(2):
        with pytest.raises(IoFailureError, match="^record of container c1 is damaged"):
            engine.verbs.delete(engine.request("DEL"))
    engine.verbs.delete(engine.request("DEL"))
    assert engine.store.corrupt == {"c1"}, "what it held is still to be freed"
    [(reason, message)] = engine.warnings
    assert reason == "NetworkNotReleased"
    assert "c1 is damaged" in message


def test_a_disk_that_takes_nothing_does_not_keep_a_pod_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.delete_tries = 2
    engine.verbs = engine.make_verbs()
    add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")

    def save(_record: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(engine.store, "save", save)
    with pytest.raises(CniError):
        engine.verbs.delete(engine.request("DEL"))
    engine.verbs.delete(engine.request("DEL"))
    assert "c1" in engine.store.records


# --- DELs that come late ---------------------------------------------------------------------------------------------


def test_a_del_of_before_the_add_does_not_undo_it(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    add(engine)
    engine.verbs.delete(spooled(engine, engine.clock - 5))
    assert engine.runner.calls == []
    assert engine.store.records["c1"].complete
    assert "spooled DEL of container c1 is dropped" in caplog.text


def test_a_clock_that_was_behind_loses_no_del(engine: Engine) -> None:
    """The machine has no clock of its own: after its restart the DEL seems to be older than the ADD."""
    add(engine)
    engine.links.namespaces.clear()
    engine.verbs.delete(spooled(engine, 1.0))
    assert engine.store.records == {}


@pytest.mark.parametrize("inhabited", [True, False])
def test_a_del_of_the_future_counts_only_where_nothing_lives(engine: Engine, inhabited: bool) -> None:
    add(engine)
    if not inhabited:
        engine.links.unused.add(NETNS)
    engine.clock += 10
    engine.verbs.delete(spooled(engine, engine.clock + 3600))
    assert ("c1" in engine.store.records) is inhabited


def test_a_late_del_does_not_reach_into_the_namespace_of_a_newer_container(engine: Engine) -> None:
    add(engine)
    engine.clock += 10
    newer = replace(engine.store.records["c1"], sandbox=Sandbox(ContainerId("c2"), NETNS), created=engine.clock)
    engine.store.save(newer)
    engine.verbs.delete(spooled(engine, engine.clock - 5))
    assert {call.sandbox for call in engine.runner.calls} == {Sandbox(ContainerId("c1"), "")}
    assert list(engine.store.records) == ["c2"]


def test_late_dels_look_through_all_records_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a thousand records for each of a thousand entries took two minutes."""
    engine.declare("n1")
    for number in range(20):
        netns = f"/run/netns/p{number}"
        engine.links.namespaces[netns] = {"lo"}
        engine.verbs.add(engine.request(container=f"c{number}", netns=netns))
    engine.clock += 10
    engine.store.calls.clear()
    for number in range(20):
        late = engine.request("DEL", container=f"c{number}", netns=f"/run/netns/p{number}")
        engine.verbs.delete(replace(late, spooled=engine.clock - 5))
    assert engine.store.records == {}
    reads = [method for method, _ in engine.store.calls if method == "load"]
    assert len(reads) <= 20 + 3 * 20


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_who_comes_between_two_late_dels_is_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(deadlines, "PREDECESSOR_SECONDS", seconds)
    engine.verbs = engine.make_verbs()
    other = "/run/netns/other"
    engine.links.namespaces[other] = {"lo"}
    add(engine)
    engine.verbs.add(engine.request(container="c0", netns=other))
    engine.clock += 10
    late = replace(engine.request("DEL", container="c0", netns=other), spooled=engine.clock - 5)
    engine.verbs.delete(late)
    engine.verbs.add(engine.request(container="c2"))
    engine.runner.calls.clear()
    engine.verbs.delete(spooled(engine, engine.clock - 5))
    assert {call.sandbox for call in engine.runner.calls} == {Sandbox(ContainerId("c1"), "")}
    assert list(engine.store.records) == ["c2"]
