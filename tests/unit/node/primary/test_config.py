"""The node's CNI configuration is written and kept. Directories are real, and watches where they matter."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import settings
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.metrics import Metrics
from multus_daemon.node.primary import config as module
from multus_daemon.node.primary.config import GATE, RUNTIME_GATE, UNUSABLE, PrimaryConfig
from multus_daemon.pod.engine import INDICATOR_GATE
from multus_daemon.runtime import fs
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec import netconf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX
from tests.aside import running
from tests.counted import counted
from tests.fakes.cluster import FakeClusterStore
from tests.waiting import eventually


class Node:
    """A directory of CNI configurations with the task that keeps ours in place."""

    def __init__(self, root: Path, **keys: Any) -> None:
        self.directory = root / "net.d"
        self.directory.mkdir(exist_ok=True)
        self.keys = {"cniConfigDir": str(self.directory), "multusAutoconfigDir": str(self.directory)} | keys
        self.gates = Gates("socket")
        self.gates.open("socket")
        self.cluster = FakeClusterStore()
        self.metrics = Metrics()
        self.now = 1000.0
        self.config = self.restarted()

    def counts(self) -> Counter[str]:
        """Return how often which reason was announced, without the readiness indicator's."""
        names = {"CNIConfigWritten": "generated", "CNIConfigRestored": "restored", "PrimaryNetworkProblem": "problems"}
        return Counter(names[reason] for _, _, reason, _ in self.cluster.events if reason in names)

    def restarted(self, poll_seconds: float = 60.0) -> PrimaryConfig:
        found = settings.from_object(self.keys, "test")
        assert PrimaryConfig.is_wanted(found)
        return PrimaryConfig(
            found,
            NodeConfFiles(),
            self.gates,
            self.cluster,
            self.metrics,
            poll_seconds=poll_seconds,
            clock=lambda: self.now,
        )

    @property
    def ours(self) -> Path:
        return self.directory / "00-multus.conf"

    @property
    def written(self) -> dict[str, Any]:
        found = json.loads(self.ours.read_text())
        assert isinstance(found, dict)
        return found

    def is_generated(self) -> bool:
        """Report whether there is a configuration other than the placeholder."""
        return self.ours.exists() and "type" in self.written

    def put(self, file: str = "10-net.conf", /, **config: Any) -> Path:
        path = self.directory / file
        content = {"cniVersion": "1.0.0", "name": "net", "type": "ptp"} | config
        fs.write_atomic(path, json.dumps(content).encode(), fsync=False)
        return path

    async def looks(self, file: str = "10-net.conf", /, **config: Any) -> Path:
        """There is a file of the primary network; look at it."""
        path = self.put(file, **config)
        await self.config.look()
        return path

    def events(self) -> list[str]:
        return [f"{kind} {reason}" for subject, kind, reason, _ in self.cluster.events if subject == "node"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def unchanged(path: Path) -> tuple[int, int, int]:
    """Return values that any write changes."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


# --- generating ------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("node-8")
async def test_generated_with_mode_0600_and_told(node: Node) -> None:
    primary = await node.looks()
    assert node.ours.read_bytes() == (
        b'{"cniVersion":"1.0.0","name":"multus-cni-network","clusterNetwork":"' + bytes(primary) + b'",'
        b'"type":"multus-shim"}'
    )
    assert stat.S_IMODE(node.ours.stat().st_mode) == 0o600
    assert node.gates.closed == {}
    assert node.events() == ["Normal CNIConfigWritten"]
    assert node.counts() == {"generated": 1}
    assert sorted(os.listdir(node.directory)) == ["00-multus.conf", "10-net.conf"]


async def test_a_new_daemon_that_can_not_serve_yet_goes_by_the_file_of_the_one_before(node: Node) -> None:
    """Else an answer would say that there is no cluster network."""
    node.gates.close("networks", "GET /apis/x: 403 Forbidden: you may not list; give the daemon that verb")
    with pytest.raises(CniError) as caught:
        node.config.configuration()
    assert (
        caught.value.msg == "the runtime has no configuration of Multus: GET /apis/x: 403 Forbidden: you may not list"
    )
    assert caught.value.remedy == "give the daemon that verb"
    node.ours.write_bytes(netconf.PLACEHOLDER)
    with pytest.raises(CniError):
        node.config.configuration()
    node.put("00-multus.conf", type="multus-shim", clusterNetwork="/net.d/10-net.conf")
    assert node.config.configuration() == node.ours.read_bytes()


async def test_a_directory_that_was_removed_from_the_node_is_missing_whoever_asks(tmp_path: Path) -> None:
    """It is mounted, so this process sees it, empty, and can't write there."""
    removed = tmp_path / "removed"
    removed.mkdir()
    mounted = os.open(removed, os.O_RDONLY)
    try:
        path = f"/proc/self/fd/{mounted}"
        node = Node(tmp_path, cniConfigDir=path, multusAutoconfigDir=path)
        removed.rmdir()
        await node.config.look()
        cause = f"{path} is missing on the node; delete the daemon's pod: the kubelet makes the directory"
        assert node.gates.closed[GATE].startswith(cause)
        with pytest.raises(CniError) as caught:
            node.config.configuration(in_place=True)
        assert caught.value.msg == f"the runtime has no configuration of Multus: {path} is missing on the node"
        assert caught.value.remedy.startswith("delete the daemon's pod")
    finally:
        os.close(mounted)


async def test_nothing_is_written_where_nothing_changes(node: Node) -> None:
    await node.looks()
    before = unchanged(node.ours)
    for _ in range(3):
        await node.config.look()
    await node.restarted().look()
    assert unchanged(node.ours) == before
    assert node.counts() == {"generated": 1}


@pytest.mark.weak_spot(48)
@pytest.mark.conformance("node-11")
async def test_generated_anew_as_the_primary_changes(tmp_path: Path) -> None:
    node = Node(tmp_path, overrideNetworkName=True)
    await node.looks(capabilities={"portMappings": True})
    assert (node.written["name"], node.written["capabilities"]) == ("net", {"portMappings": True})
    await node.looks(name="other", capabilities={"mac": True})
    assert (node.written["name"], node.written["capabilities"]) == ("other", {"mac": True})
    assert node.counts() == {"generated": 2}


async def test_the_runtimes_directory_is_made(tmp_path: Path) -> None:
    node = Node(tmp_path, cniConfigDir=str(tmp_path / "etc" / "cni" / "net.d"))
    await node.looks()
    target = tmp_path / "etc" / "cni" / "net.d"
    assert os.listdir(target) == ["00-multus.conf"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


@pytest.mark.weak_spot(49)
@pytest.mark.npwg("6.1.1")
async def test_unclean_and_linked_paths(tmp_path: Path) -> None:
    (tmp_path / "net.d").mkdir()
    (tmp_path / "link").symlink_to("net.d")
    directory = f"{tmp_path}//./link/"
    node = Node(tmp_path, cniConfigDir=directory, multusAutoconfigDir=directory)
    async with running(node.config.run()):
        await asyncio.sleep(0.3)
        node.put()
        await eventually(node.is_generated)
        assert node.written["clusterNetwork"] == f"{tmp_path}/link/10-net.conf"
        node.put(capabilities={"mac": True})
        await eventually(lambda: "capabilities" in node.written)


@pytest.mark.weak_spot(30)
@pytest.mark.conformance("node-9")
async def test_the_primarys_file_is_never_written(tmp_path: Path) -> None:
    node = Node(tmp_path, forceCNIVersion=True, cniVersion="0.3.1")
    primary = node.put(number=12345678901234567890)
    before = (unchanged(primary), primary.read_bytes())
    await node.config.look()
    assert (unchanged(primary), primary.read_bytes()) == before
    assert node.written["cniVersion"] == "0.3.1"


async def test_a_cni_version_that_there_is_not(tmp_path: Path) -> None:
    node = Node(tmp_path, cniVersion="3.0.0")
    await node.looks()
    assert not node.ours.exists()
    assert node.gates.closed[GATE].startswith("cniVersion '3.0.0' is not supported")


# --- what is broken --------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(24, 26, 52)
@pytest.mark.parametrize(
    "content",
    [
        "", "{", '{"name": "net", "ty', "null", "[]", '{"name":"net","plugins":{}}',
        '{"name":"net","type":"ptp","capabilities":{"a":"yes"}}', '{"name":1,"type":"ptp"}', "\x00" * 4096,
    ],
)  # fmt: skip
async def test_a_broken_primary_leaves_the_last_good_configuration(node: Node, content: str) -> None:
    primary = await node.looks()
    good, before = node.ours.read_bytes(), unchanged(node.ours)
    primary.write_text(content)
    for _ in range(3):
        await node.config.look()
    assert (node.ours.read_bytes(), unchanged(node.ours)) == (good, before)
    assert node.gates.closed[GATE].startswith(f"{primary}, the primary network's configuration, can't be read: ")
    assert node.events() == ["Normal CNIConfigWritten", "Warning PrimaryNetworkProblem"]
    assert node.cluster.events[-1][-1].endswith(f"; {node.ours} stays as it is")
    assert node.counts() == {"generated": 1, "problems": 1}
    await node.looks()
    assert node.gates.closed == {}


@pytest.mark.weak_spot(26, 47)
async def test_after_a_restart_with_a_broken_primary_the_former_configuration_stays(node: Node) -> None:
    primary = await node.looks()
    good = node.ours.read_bytes()
    primary.write_text("{")
    async with running(node.restarted().run()):
        await eventually(lambda: "can't be read" in node.gates.closed.get(GATE, ""))
        assert node.ours.read_bytes() == good


async def test_a_directory_that_can_not_be_written_is_named_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = Node(tmp_path, cniConfigDir=str(tmp_path / "file"))
    await node.looks()
    assert node.gates.closed[GATE] == f"{tmp_path}/file/00-multus.conf can't be written: Not a directory"
    (tmp_path / "file").unlink()
    await node.config.look()
    assert node.gates.closed == {}
    assert (tmp_path / "file" / "00-multus.conf").exists()


async def test_a_failed_write_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.looks()
    good = node.ours.read_bytes()
    node.put(capabilities={"mac": True})
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", raising(OSError(28, "No space left on device")))
        await node.config.look()
    assert node.ours.read_bytes() == good
    assert sorted(os.listdir(node.directory)) == ["00-multus.conf", "10-net.conf"]
    assert node.gates.closed[GATE].endswith("can't be written: No space left on device")
    await node.config.look()
    assert node.written["capabilities"] == {"mac": True}


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


async def test_what_a_killed_writer_left_is_removed(node: Node) -> None:
    left = node.directory / ".00-multus.conf.99999999-0123456789ab"
    foreign = node.directory / ".10-net.conf.99999999-0123456789ab"
    left.touch()
    foreign.touch()
    node.put()
    async with running(node.config.run()):
        await eventually(node.ours.exists)
    assert not left.exists()
    assert foreign.exists()


# --- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(26)
@pytest.mark.parametrize("how", ["rename", "remove", "empty", "replace", "append"])
async def test_what_another_program_does_is_undone(node: Node, how: str) -> None:
    await node.looks()
    good = node.ours.read_bytes()
    match how:
        case "rename":
            node.ours.rename(node.directory / "00-multus.conf.cilium_bak")
        case "remove":
            node.ours.unlink()
        case "empty":
            node.ours.write_bytes(b"")
        case "replace":
            node.put("00-multus.conf", type="multus")
        case _:
            node.ours.write_bytes(good + b"\n")
    await node.config.look()
    assert node.ours.read_bytes() == good
    assert node.counts() == {"generated": 1, "restored": 1}
    assert node.events() == ["Normal CNIConfigWritten", "Warning CNIConfigRestored"]
    message = node.cluster.events[-1][-1]
    assert message.startswith(f"{node.ours} was {'removed' if how in ('rename', 'remove') else 'changed'} by another")
    assert ("00-multus.conf.cilium_bak (Cilium's: set cni.exclusive to false)" in message) == (how == "rename")
    assert node.gates.closed == {}


async def test_two_agents_do_not_chase_each_other(node: Node) -> None:
    await node.looks()
    restored = []
    for _ in range(260):
        if node.ours.exists():
            node.ours.unlink()
        await node.config.look()
        if node.ours.exists():
            restored.append(node.now)
        else:
            assert "again; it is put back after a pause" in node.gates.closed[GATE]
        node.now += 1
    gaps = [after - before for before, after in itertools.pairwise(restored)]
    assert gaps[:6] == [1, 2, 4, 8, 16, 32]
    assert set(gaps[6:]) == {60}
    assert counted(node.metrics.configurations_restored) == len(restored)
    node.now += 1000
    node.ours.unlink(missing_ok=True)
    await node.config.look()
    assert node.ours.exists(), "after a while of calm the first time counts as such"


async def test_a_broken_primary_does_not_keep_from_putting_back(node: Node) -> None:
    primary = await node.looks()
    good = node.ours.read_bytes()
    primary.write_text("{")
    node.ours.unlink()
    await node.config.look()
    assert node.ours.read_bytes() == good
    assert "can't be read" in node.gates.closed[GATE]


@pytest.mark.parametrize("name", ["00-a.conf", "00-a.json", "00-a.conflist", ".hidden.conf", "link.conf"])
async def test_a_file_that_the_runtime_takes_instead_closes_the_gate_until_it_goes(node: Node, name: str) -> None:
    await node.looks()
    assert node.gates.closed == {}
    before = node.put(name)
    if name == "link.conf":
        before = node.directory / "00-link.conf"
        before.symlink_to(name)
    for _ in range(3):
        await node.config.look()
    assert node.gates.closed.keys() == {RUNTIME_GATE}
    assert str(before) in node.gates.closed[RUNTIME_GATE]
    assert node.gates.degraded.closed == {}
    assert node.events() == ["Normal CNIConfigWritten", "Warning CNIConfigShadowed"]
    assert node.cluster.events[-1][-1] == node.gates.closed[RUNTIME_GATE]
    before.unlink()
    await node.config.look()
    assert node.gates.closed == {}


async def test_a_file_before_ours_leaves_the_primary_as_it_is(node: Node) -> None:
    """The runtime uses that file itself; once it is gone, everything is as before at once."""
    primary = await node.looks()
    before = node.put("00-a.conf")
    for _ in range(3):
        node.now += 60
        await node.config.look()
    assert node.written["clusterNetwork"] == str(primary)
    before.unlink()
    await node.config.look()
    assert node.gates.closed == {}


async def test_a_primary_that_comes_before_ours_is_what_the_runtime_uses(node: Node) -> None:
    primary = await node.looks("00-a.conf")
    assert node.written["clusterNetwork"] == str(primary)
    assert str(primary) in node.gates.closed[RUNTIME_GATE]


@pytest.mark.parametrize("name", ["00-multus.conflist", "01-a.conf", "00-a.conf.bak", "00-a.txt", "00-shim.conf"])
async def test_a_file_that_does_not_take_our_place(node: Node, name: str) -> None:
    node.put()
    node.put(name, type="multus-shim" if "shim" in name else "bridge")
    (node.directory / "00-folder.conf").mkdir()
    await node.config.look()
    assert (node.gates.closed, node.gates.degraded.closed) == ({}, {})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": "a"}', '{"name": "a", "plugins": []}', None])
async def test_a_file_that_no_runtime_can_use_is_named_until_it_goes(node: Node, content: str | None) -> None:
    """containerd stops at it, CRI-O passes over it: with one of them pods start as they should."""
    await node.looks()
    before = node.directory / "00-a.conf"
    if content is None:
        before.symlink_to("nowhere")
    else:
        before.write_text(content)
    for _ in range(3):
        await node.config.look()
    assert node.gates.closed == {}
    assert str(before) in node.gates.degraded.closed[UNUSABLE]
    assert Counter(node.events())["Warning CNIConfigShadowed"] == 1
    behind = await node.looks("00-b.conf")
    assert str(behind) in node.gates.closed[RUNTIME_GATE]
    before.unlink()
    behind.unlink()
    await node.config.look()
    assert (node.gates.closed, node.gates.degraded.closed) == ({}, {})


async def test_what_comes_before_the_operators_own_file(tmp_path: Path) -> None:
    path = tmp_path / "net.d" / "05-mine.conflist"
    node = Node(tmp_path, multusConfigFile=str(path))
    await node.looks(path.name, type="multus-shim")
    assert node.gates.closed == {}
    node.ours.write_bytes(netconf.PLACEHOLDER)
    await node.config.look()
    assert str(node.ours) in node.gates.degraded.closed[UNUSABLE]
    await node.looks("00-a.conf")
    assert node.gates.closed.keys() == {RUNTIME_GATE}


async def test_the_runtimes_gate_follows_the_watch(node: Node) -> None:
    node.put()
    async with running(node.config.run()):
        await eventually(lambda: not node.gates.closed)
        before = node.put("00-a.conf")
        await eventually(lambda: RUNTIME_GATE in node.gates.closed)
        before.unlink()
        await eventually(lambda: not node.gates.closed)


# --- when it is written ----------------------------------------------------------------------------------------------


async def test_not_before_the_daemon_can_serve(node: Node) -> None:
    node.put()
    node.gates.close("pods", "not listed")
    node.gates.close("networks", "not listed")
    async with running(node.config.run()):
        await asyncio.sleep(0.2)
        assert not node.ours.exists()
        assert node.gates.closed[GATE] == "the configuration is written when the daemon can serve"
        node.gates.open("networks")
        await asyncio.sleep(0.1)
        assert not node.ours.exists()
        node.gates.open("pods")
        await eventually(node.ours.exists)


@pytest.mark.npwg("6.1")
async def test_a_primary_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    node = Node(tmp_path, multusAutoconfigDir=str(tmp_path / "later"))
    async with running(node.restarted(poll_seconds=0.05).run()):
        await eventually(lambda: "can't be listed" in node.gates.closed.get(GATE, ""))
        (tmp_path / "later").mkdir()
        await eventually(lambda: "no file in" in node.gates.closed.get(GATE, ""))
        assert not node.is_generated()
        fs.write_atomic(tmp_path / "later" / "10-net.conf", b'{"name":"net","type":"ptp"}', fsync=False)
        await eventually(node.is_generated)


async def test_an_empty_directory_has_a_placeholder_until_there_is_a_primary(node: Node) -> None:
    node.gates.close("pods", "not listed")
    async with running(node.restarted().run()):
        await eventually(node.ours.exists)
        assert node.ours.read_bytes() == netconf.PLACEHOLDER, "as soon as the daemon starts"
        node.put()
        await asyncio.sleep(0.1)
        assert not node.is_generated(), "not before the daemon can serve"
        node.gates.open("pods")
        # The gate opens last; the file exists before.
        await eventually(lambda: not node.gates.closed)
    assert node.is_generated()
    assert node.events() == ["Normal CNIConfigWritten"]
    assert node.counts() == {"generated": 1}


async def test_a_placeholder_takes_nothing_from_the_runtime(node: Node) -> None:
    """If there is a configuration, even of another engine, pods start with it now."""
    await node.looks("87-podman-bridge.conflist", plugins=[{"type": "bridge"}])
    assert os.listdir(node.directory) == ["87-podman-bridge.conflist"]
    (node.directory / "87-podman-bridge.conflist").unlink()
    await node.config.look()
    assert os.listdir(node.directory) == ["00-multus.conf"]


async def test_the_last_good_configuration_is_no_placeholders_place(node: Node) -> None:
    found = await node.looks()
    good = node.ours.read_bytes()
    for path in (found, node.ours):
        path.unlink()
    await node.config.look()
    assert node.ours.read_bytes() == good
    node.ours.unlink()
    await node.restarted().look()
    assert node.ours.read_bytes() == netconf.PLACEHOLDER, "a daemon that knows of none"


async def test_a_placeholder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = Node(tmp_path, cniConfigDir=str(tmp_path / "file" / "net.d"))
    async with running(node.restarted(poll_seconds=0.05).run()):
        await eventually(lambda: "00-multus.conf can't be kept" in node.gates.closed.get(GATE, ""))


def test_containerd_can_not_take_the_placeholder_for_a_network() -> None:
    """go-cni refuses a file without `type`. It must be JSON, because other readers skip what they do not know."""
    found = json.loads(netconf.PLACEHOLDER)
    assert found["name"] == netconf.NETWORK_NAME
    assert not {"type", "plugins"} & set(found)


@pytest.mark.conformance("node-11")
async def test_changes_are_seen_by_the_watch(node: Node) -> None:
    async with running(node.config.run()):
        await eventually(lambda: "no file in" in node.gates.closed.get(GATE, ""))
        # Wait until the watch is established.
        await asyncio.sleep(0.3)
        start = asyncio.get_running_loop().time()
        node.put()
        await eventually(node.is_generated)
        node.put(capabilities={"portMappings": True})
        await eventually(lambda: "capabilities" in node.written)
        node.ours.rename(node.directory / "00-multus.conf.cilium_bak")
        await eventually(node.ours.exists)
        assert asyncio.get_running_loop().time() - start < 30, "the next look by itself is after 60 s"


async def test_changes_are_seen_without_a_watch(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multus_daemon.runtime.inotify.changes", raising(OSError(28, "inotify limit")))
    async with running(node.restarted(poll_seconds=0.05).run()):
        await eventually(lambda: "no file in" in node.gates.closed.get(GATE, ""))
        node.put()
        await eventually(node.ours.exists)


async def test_a_directory_that_is_replaced_is_followed(node: Node) -> None:
    node.put()
    async with running(node.restarted(poll_seconds=0.1).run()):
        await eventually(node.ours.exists)
        node.directory.rename(node.directory.with_name("old.d"))
        # The daemon may be quicker.
        node.directory.mkdir(exist_ok=True)
        node.put()
        await eventually(lambda: counted(node.metrics.configurations_restored) == 1)
    assert node.ours.exists()


async def test_a_link_in_place_of_the_file_is_replaced(node: Node) -> None:
    elsewhere = node.directory.parent / "elsewhere"
    elsewhere.write_text("precious")
    node.ours.symlink_to(elsewhere)
    await node.looks()
    assert not node.ours.is_symlink()
    assert elsewhere.read_text() == "precious"


# --- the readiness indicator -----------------------------------------------------------------------------------------


@pytest.mark.weak_spot(49)
@pytest.mark.npwg("6.1")
@pytest.mark.conformance("config-12")
async def test_the_indicator_is_waited_for(tmp_path: Path) -> None:
    indicator = tmp_path / "run" / "ready"
    node = Node(tmp_path, readinessindicatorfile=f"{tmp_path}//run/./ready")
    node.put()
    async with running(node.restarted(poll_seconds=0.05).run()):
        await eventually(lambda: "is written when the primary network is ready" in node.gates.closed.get(GATE, ""))
        assert node.gates.closed[INDICATOR_GATE].startswith(
            f"{indicator} (readinessindicatorfile) is not there: the primary network is not ready; "
        )
        assert not node.ours.exists()
        indicator.parent.mkdir()
        indicator.touch()
        await eventually(lambda: not node.gates.closed)
        assert node.ours.exists()


# --- a file of the operator's ----------------------------------------------------------------------------------------


def own_file(tmp_path: Path) -> tuple[Node, Path]:
    source = tmp_path / "config" / "70-mine.conflist"
    source.parent.mkdir()
    source.write_text('{"name":"mine","plugins":[{"type":"multus-shim"}]}\n')
    return Node(tmp_path, multusConfigFile=str(source)), source


@pytest.mark.weak_spot(31, 51)
async def test_a_file_of_the_operators_is_put_in_place_and_kept_up_to_date(tmp_path: Path) -> None:
    node, source = own_file(tmp_path)
    target = node.directory / source.name
    async with running(node.config.run()) as task:
        await eventually(target.exists)
        assert target.read_bytes() == source.read_bytes()
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        await asyncio.sleep(0.3)
        source.write_text('{"name":"changed","plugins":[{"type":"multus-shim"}]}')
        await eventually(lambda: b"changed" in target.read_bytes())
        target.unlink()
        await eventually(target.exists)
        assert not task.done()
    assert os.listdir(node.directory) == [source.name]
    assert node.gates.closed == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name":"mine"}'])
async def test_a_broken_file_of_the_operators_does_not_replace_a_good_one(tmp_path: Path, content: str) -> None:
    node, source = own_file(tmp_path)
    target = node.directory / source.name
    await node.config.look()
    good = target.read_bytes()
    source.write_text(content)
    await node.config.look()
    assert target.read_bytes() == good
    assert node.gates.closed == {}, "what is in place can be served"
    assert node.events() == ["Normal CNIConfigWritten", "Warning PrimaryNetworkProblem"]
    assert str(source) in node.cluster.events[-1][-1]


async def test_the_event_of_a_problem_is_cut(tmp_path: Path) -> None:
    node = Node(tmp_path, multusConfigFile="/" + "x" * 200 + "/" + "/".join(["y" * 200] * 6))
    await node.config.look()
    assert len(node.cluster.events[-1][-1]) == EVENT_MESSAGE_MAX


async def test_a_missing_file_of_the_operators_is_named(tmp_path: Path) -> None:
    node, source = own_file(tmp_path)
    source.unlink()
    await node.config.look()
    assert node.gates.closed[GATE] == f"{source} (multusConfigFile) can't be read: No such file or directory"


async def test_a_file_of_the_operators_that_is_in_place_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.d" / "70-mine.conf"
    node = Node(tmp_path, multusConfigFile=str(path))
    path.write_text('{"name":"mine","type":"multus-shim"}')
    before = unchanged(path)
    await node.config.look()
    assert unchanged(path) == before
    assert node.gates.closed == {}
    # The operator rewrites it between the two reads.
    monkeypatch.setattr(module, "_read", lambda path: b"newer")
    await node.config.look()
    assert unchanged(path) == before


async def test_a_mounted_configmap_is_followed(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    for version in ("v1", "v2"):
        (mount / f"..{version}").mkdir(parents=True)
        (mount / f"..{version}" / "70-mine.conf").write_text(f'{{"name":"{version}","type":"multus-shim"}}')
    (mount / "..data").symlink_to("..v1")
    (mount / "70-mine.conf").symlink_to("..data/70-mine.conf")
    node = Node(tmp_path, multusConfigFile=str(mount / "70-mine.conf"))
    target = node.directory / "70-mine.conf"
    async with running(node.config.run()):
        await eventually(lambda: target.exists() and b"v1" in target.read_bytes())
        await asyncio.sleep(0.3)
        (mount / "..tmp").symlink_to("..v2")
        (mount / "..tmp").rename(mount / "..data")
        await eventually(lambda: b"v2" in target.read_bytes())
    assert not target.is_symlink()


# --- off -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"multusAutoconfigDir": ""},
        {"multusAutoconfigDir": "/etc/cni/net.d", "cniConfigDir": ""},
        {"multusConfigFile": "/x/70-mine.conf", "cniConfigDir": ""},
    ],
)
def test_off_where_a_directory_is_not_set(keys: dict[str, Any]) -> None:
    assert not PrimaryConfig.is_wanted(settings.from_object(keys, "test"))
    # The defaults of upstream are enough.
    assert PrimaryConfig.is_wanted(settings.from_object({"multusAutoconfigDir": "/etc/cni/net.d"}, "test"))


@pytest.mark.parametrize(
    ("keys", "directory"),
    [
        ({"multusConfigFile": "auto"}, "/etc/cni/net.d"),
        ({"multusConfigFile": "auto", "multusAutoconfigDir": "", "cniConfigDir": "/c"}, "/c"),
        ({"multusConfigFile": "auto", "multusAutoconfigDir": "/a", "cniConfigDir": "/c"}, "/a"),
        ({"multusConfigFile": "auto", "cniConfigDir": ""}, ""),
    ],
)
def test_a_file_that_is_to_be_generated_follows_the_runtimes_directory(keys: dict[str, Any], directory: str) -> None:
    """These are the flags of the first thick release: `--multus-conf-file=auto --cni-config-dir=/c`."""
    found = settings.from_object(keys, "test")
    assert found.primary.autoconfig_dir == directory
    assert PrimaryConfig.is_wanted(found) is bool(directory)
    by_flags = {key: (f"--{key}", value) for key, value in keys.items()}
    assert settings.from_object({}, "test", by_flags).primary == found.primary


@pytest.mark.parametrize(
    ("keys", "is_missing"),
    [
        ({}, True),
        ({"multusAutoconfigDir": ""}, True),
        ({"cniConfigDir": "/c"}, True),
        ({"cniConfigDir": ""}, False),
        ({"multusConfigFile": "auto"}, False),
        ({"multusConfigFile": "/x/70-mine.conf"}, False),
        ({"multusAutoconfigDir": "/a"}, False),
    ],
)
def test_a_node_without_a_configuration_is_a_fault_unless_it_is_said(keys: dict[str, Any], is_missing: bool) -> None:
    problem = PrimaryConfig.missing(settings.from_object(keys, "test"))
    assert bool(problem) is is_missing
    assert not problem or ("multusAutoconfigDir" in problem and "cniConfigDir" in problem)


async def test_what_is_said_is_said_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(5):
        await node.config.look()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"], "the place is kept; what is missing"
    assert node.counts() == {"problems": 1}
    assert node.events() == ["Warning PrimaryNetworkProblem"]
