"""Election of the primary network's file in real directories, on a fake clock."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary import election
from multus_daemon.node.primary.election import Election, NoPrimaryError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "net.d").mkdir()
    return tmp_path / "net.d"


@pytest.fixture
def vote(directory: Path, clock: Clock) -> Election:
    return by_name(directory, clock, "")


def put(directory: Path, file: str, /, **config: Any) -> Path:
    path = directory / file
    content = {"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "ptp"}]} | config
    path.with_name(".new").write_text(json.dumps(content))
    path.with_name(".new").rename(path)
    return path


def elected(vote: Election) -> str:
    return (vote.primary()).path.name


def reason(vote: Election) -> str:
    with pytest.raises(NoPrimaryError) as caught:
        vote.primary()
    return str(caught.value)


@pytest.mark.conformance("node-10")
def test_what_is_no_primary_is_passed_over_and_named(
    directory: Path, vote: Election, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put(directory, "00-multus.conf", plugins=[{"type": "multus-shim"}])
    put(directory, "01-old.conf.bak")
    put(directory, "05-mine.conf", type="multus-shim")
    put(directory, "06-podman.conflist", name="podman")
    put(directory, "99-net.conflist")
    (directory / "04-folder.conf").mkdir()
    (directory / "03-dangling.conf").symlink_to("nowhere")
    assert elected(vote) == "99-net.conflist"
    assert "passed over: 00-multus.conf (a configuration of Multus), 01-old.conf.bak (ends in" in caplog.text
    assert "06-podman.conflist (podman's default network)" in caplog.text


def test_nothing_fits_and_it_says_why(directory: Path, vote: Election) -> None:
    assert reason(vote) == (
        f"no file in {directory} can be the primary network's configuration; one that ends in .conf or .conflist is "
        "waited for, or name one in multusMasterCNI"
    )
    put(directory, "87-podman-bridge.conflist", name="podman")
    put(directory, "10-net.json")
    found = reason(vote)
    assert "(10-net.json: ends in neither .conf nor .conflist, 87-podman-bridge.conflist: podman's" in found


def test_a_crowded_directory_does_not_make_endless_messages(directory: Path, vote: Election) -> None:
    for number in range(50):
        (directory / f"{number}.txt").touch()
    assert len(reason(vote)) < 1000


def test_a_directory_that_is_not_there(tmp_path: Path, clock: Clock) -> None:
    vote = by_name(tmp_path / "later", clock, "")
    assert reason(vote) == f"{tmp_path}/later (multusAutoconfigDir) can't be listed: No such file or directory"
    (tmp_path / "later").mkdir()
    put(tmp_path / "later", "10-net.conf")
    assert elected(vote) == "10-net.conf"


def test_too_many_files(directory: Path, vote: Election, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "FILES_MAX", 1)
    put(directory, "10-a.conf")
    put(directory, "20-b.conf")
    assert "it has more than 1 files" in reason(vote)


def test_side_loaded_plugins_count(directory: Path, vote: Election) -> None:
    put(directory, "10-net.conflist")
    (directory / "net").mkdir()
    (directory / "net" / "portmap.conf").write_text('{"type":"portmap","capabilities":{"portMappings":true}}')
    assert (vote.primary()).config.capabilities == {"portMappings"}


# --- half-written and broken files -----------------------------------------------------------------------------------


def test_a_file_that_stays_broken_is_passed_over(directory: Path, vote: Election, clock: Clock) -> None:
    put(directory, "99-other.conf")
    (directory / "10-junk.conf").write_text("")
    assert "10-junk.conf" in reason(vote)
    clock.now += deadlines.PRIMARY_SETTLE_SECONDS
    assert elected(vote) == "99-other.conf"


def test_a_broken_file_behind_the_first_does_not_matter(directory: Path, vote: Election) -> None:
    put(directory, "10-net.conf")
    (directory / "20-junk.conf").write_text("{")
    assert elected(vote) == "10-net.conf"


@pytest.mark.weak_spot(47)
def test_the_elected_one_is_kept_while_it_is_broken(directory: Path, vote: Election, clock: Clock) -> None:
    put(directory, "10-net.conf")
    put(directory, "20-other.conf")
    assert elected(vote) == "10-net.conf"
    (directory / "10-net.conf").write_text('{"name"')
    for _ in range(10):
        assert (reason(vote)).startswith(f"{directory}/10-net.conf, the primary network's configuration, can't")
        clock.now += deadlines.PRIMARY_MISSING_SECONDS
    put(directory, "10-net.conf", name="again")
    assert (vote.primary()).config.name == "again"


# --- another takes over ----------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(48)
def test_a_file_that_comes_before_takes_over_when_it_has_settled(directory: Path, vote: Election, clock: Clock) -> None:
    put(directory, "20-old.conf")
    assert elected(vote) == "20-old.conf"
    put(directory, "10-new.conf")
    assert elected(vote) == "20-old.conf"
    clock.now += deadlines.PRIMARY_SETTLE_SECONDS - 1
    put(directory, "10-new.conf", name="rewritten")
    assert elected(vote) == "20-old.conf"
    clock.now += deadlines.PRIMARY_SETTLE_SECONDS - 1
    assert elected(vote) == "20-old.conf", "it has been rewritten"
    clock.now += 1
    assert elected(vote) == "10-new.conf"
    clock.now += 1000
    assert elected(vote) == "10-new.conf"


def test_while_a_file_that_comes_before_is_half_written_nobody_takes_over(
    directory: Path, vote: Election, clock: Clock
) -> None:
    put(directory, "20-old.conf")
    assert elected(vote) == "20-old.conf"
    put(directory, "10-new.conf")
    assert elected(vote) == "20-old.conf"
    clock.now += deadlines.PRIMARY_SETTLE_SECONDS
    (directory / "05-newer.conf").write_text("{")
    assert elected(vote) == "20-old.conf"
    clock.now += deadlines.PRIMARY_SETTLE_SECONDS
    assert elected(vote) == "10-new.conf"


@pytest.mark.weak_spot(48)
def test_one_that_is_gone_is_waited_for_then_replaced(directory: Path, vote: Election, clock: Clock) -> None:
    first = put(directory, "10-net.conf")
    put(directory, "20-other.conf")
    assert elected(vote) == "10-net.conf"
    first.unlink()
    expected = (
        f"{first}, the primary network's configuration, is gone; it is waited for 30 s, then 20-other.conf takes its "
        "place"
    )
    assert reason(vote) == expected
    clock.now += deadlines.PRIMARY_MISSING_SECONDS - 1
    assert reason(vote) == expected
    put(directory, "10-net.conf")
    assert elected(vote) == "10-net.conf"
    clock.now += deadlines.PRIMARY_MISSING_SECONDS
    first.unlink()
    assert reason(vote) == expected, "the wait begins anew"
    clock.now += deadlines.PRIMARY_MISSING_SECONDS
    assert elected(vote) == "20-other.conf"


def test_one_that_is_gone_without_a_successor(directory: Path, vote: Election, clock: Clock) -> None:
    path = put(directory, "10-net.conf")
    vote.primary()
    path.rename(directory / "10-net.conf.cilium_bak")
    clock.now += 1000
    assert (reason(vote)).startswith(f"{path}, the primary network's configuration, is gone; no file in")
    clock.now += 1000
    assert "is gone" in reason(vote)
    put(directory, "30-new.conf")
    assert elected(vote) == "30-new.conf"


def test_one_that_can_no_longer_be_is_left_at_once(directory: Path, vote: Election) -> None:
    put(directory, "10-net.conf")
    put(directory, "20-other.conf")
    vote.primary()
    put(directory, "10-net.conf", plugins=[{"type": "multus-shim"}])
    assert elected(vote) == "20-other.conf"
    put(directory, "20-other.conf", plugins=[{"type": "loopback"}])
    assert (reason(vote)).startswith(f"{directory}/20-other.conf, the primary network's configuration, can no lo")


# --- after a restart -------------------------------------------------------------------------------------------------


def test_after_a_restart_the_former_primary_is_waited_for(directory: Path, vote: Election, clock: Clock) -> None:
    put(directory, "20-other.conf")
    vote.remember(f"{directory}/10-net.conf")
    assert "10-net.conf, the primary network's configuration, is gone" in reason(vote)
    put(directory, "10-net.conf")
    assert elected(vote) == "10-net.conf"


def test_after_a_restart_the_result_is_that_of_the_rule(directory: Path, vote: Election, clock: Clock) -> None:
    put(directory, "10-net.conf")
    put(directory, "20-other.conf")
    vote.remember(f"{directory}/20-other.conf")
    assert elected(vote) == "20-other.conf"
    clock.now += deadlines.PRIMARY_SETTLE_SECONDS
    assert elected(vote) == "10-net.conf"


@pytest.mark.parametrize("path", ["", "cluster", "/elsewhere/10-net.conf", "kube-system/net"])
def test_another_kind_of_cluster_network_is_no_memory(directory: Path, vote: Election, path: str) -> None:
    put(directory, "20-other.conf")
    vote.remember(path)
    assert elected(vote) == "20-other.conf"


# --- named -----------------------------------------------------------------------------------------------------------


def by_name(directory: Path, clock: Clock, name: str) -> Election:
    return Election(directory, NodeConfFiles(), named=name, plugin_type="multus-shim", clock=clock, ours="")


@pytest.mark.conformance("node-8")
@pytest.mark.parametrize("name", ["20-net.conf", "100-crio-bridge.conf", "30-net.json", "sub/net.conf", "/20-net.conf"])
def test_what_is_named_is_taken(directory: Path, clock: Clock, name: str) -> None:
    (directory / "sub").mkdir()
    put(directory, "10-first.conf")
    vote = by_name(directory, clock, name)
    path = directory / name.lstrip("/")
    assert reason(vote) == f"{path} (multusMasterCNI) does not exist; the daemon waits for it"
    put(path.parent, path.name)
    assert (vote.primary()).path == path
    path.write_text("{")
    assert (reason(vote)).startswith(f"{path} (multusMasterCNI) can't be read: ")
    path.unlink()
    clock.now += 1000
    assert "the daemon waits for it" in reason(vote)


@pytest.mark.weak_spot(48)
def test_what_is_named_must_not_lead_back_here(directory: Path, clock: Clock) -> None:
    put(directory, "00-multus.conf", type="multus-shim")
    assert reason(by_name(directory, clock, "00-multus.conf")) == (
        f"{directory}/00-multus.conf (multusMasterCNI) can't be the primary network: a configuration of Multus (type "
        "multus-shim)"
    )
