"""Records are compared with the node: orphans are deleted, live containers are never touched."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.metrics import Metrics
from multus_daemon.node import orphans
from multus_daemon.node.orphans import Findings, Orphan, Orphans
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import Progress
from multus_daemon.plugins.run import ListRunner
from multus_daemon.runtime import fs, portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni.errors import CniError, IoFailureError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION
from tests.aside import Aside
from tests.counted import counted
from tests.fakes.runner import FakeDelegateRunner, FakePluginRunner
from tests.fakes.store import FakeDelegateStore
from tests.unit.pod.conftest import NETNS, Engine
from tests.waiting import eventually

WHOLE = [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]


class Counts:
    """Metrics as a scrape shows them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @property
    def deleted(self) -> float:
        return counted(self._metrics.orphans, outcome="success")

    @property
    def left(self) -> tuple[float, ...]:
        return tuple(counted(self._metrics.leftovers, kind=kind) for kind in ("orphans", "inhabited", "unreadable"))


class Calls:
    """Runs each call in a thread of its own, like the daemon."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def look(self) -> Findings:
        return await portal.run(Deadline(), partial(orphans.look, self.world.engine.verbs.engine))

    async def delete(self, orphan: Orphan, seconds: float) -> bool:
        return await portal.run(Deadline(), partial(orphans.delete, self.world.engine.verbs.engine, orphan, seconds))


class World:
    """An engine with one container, `c1` of the pod `web/p1`, and the controller."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.counts = Counts(self.engine.metrics)
        self.controller = self.make()

    def make(self, seconds: float = 300) -> Orphans:
        engine = self.engine.verbs.engine
        deletes = replace(engine.settings.deletes, reconcile_seconds=seconds)
        return Orphans(replace(engine, settings=replace(engine.settings, deletes=deletes)))

    def restart(self) -> None:
        """Another daemon takes over."""
        self.engine.verbs = self.engine.make_verbs()
        self.controller = self.make()

    def add(self, networks: str = "n1,n2") -> None:
        self.engine.declare(networks)
        Aside(self.engine.verbs.add, self.engine.request()).result()
        self.engine.runner.calls.clear()
        self.engine.cluster.events.clear()

    async def runs(self, number: int = 1) -> None:
        for _ in range(number):
            await self.controller.delete_orphans()

    @property
    def containers(self) -> list[str]:
        return list(self.engine.store.records)


@pytest.fixture
def world() -> World:
    return World()


# --- orphans ---------------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(32)
@pytest.mark.parametrize("unsynced", [True, False])
async def test_a_container_whose_namespace_is_gone_is_deleted_at_once(world: World, unsynced: bool) -> None:
    world.add()
    world.engine.links.namespaces.clear()
    world.engine.cluster.unsynced = unsynced
    await world.runs()
    assert world.engine.runner.order == WHOLE
    # Another container may have that path.
    assert {call.sandbox for call in world.engine.runner.calls} == {Sandbox(ContainerId("c1"), "")}
    assert world.containers == []
    assert world.counts.deleted == 3
    assert world.counts.left == (0, 0, 0)


class Results:
    """Has a real result cache behind the world's engine, whose files cannot be removed while `sick`."""

    def __init__(self, world: World, cni_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = cni_dir / "results"
        self.plugins = FakePluginRunner()
        world.engine.runner = ListRunner(self.plugins.as_plugins, ResultCache(cni_dir), "/fake")  # type: ignore[assignment]
        world.restart()
        self.sick = True
        remove = fs.remove

        def failing(path: fs.StrPath) -> bool:
            if self.sick and str(path).startswith(str(self.directory)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return remove(path)

        monkeypatch.setattr(fs, "remove", failing)

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def results(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    return Results(world, tmp_path, monkeypatch)


async def test_a_cached_result_that_could_not_be_removed_goes_later(world: World, results: Results) -> None:
    verbs, request = world.engine.verbs, world.engine.request
    world.engine.declare("n1")
    Aside(verbs.add, request()).result()
    Aside(verbs.delete, request("DEL")).result()
    assert results.left == ["cluster-c1-eth0", "n1-c1-net1"]
    # The daemon is killed, and the next one finds the disk still sick.
    world.restart()
    await world.runs()
    assert results.left == ["cluster-c1-eth0", "n1-c1-net1"]
    results.sick = False
    await world.runs()
    assert results.left == []
    assert world.containers == []
    assert [verb for _, verb in results.plugins.order] == ["ADD", "ADD", "DEL", "DEL"], "no plugin runs again"
    assert world.counts.left == (0, 0, 0)


async def test_a_path_of_which_nothing_can_be_told_is_not_gone(world: World) -> None:
    """If /run/netns is missing or not mounted, every pod of the node would lose its networks."""
    world.add()
    world.engine.links.namespaces.clear()
    world.engine.links.unseen.add(NETNS)
    await world.runs(3)
    assert world.containers == ["c1"]


async def test_a_pod_that_is_gone_and_an_empty_namespace_are_an_orphan_at_the_second_look(world: World) -> None:
    world.add()
    world.engine.cluster.pods.clear()
    world.engine.links.unused.add(NETNS)
    await world.runs()
    assert world.containers == ["c1"], "its pod may not be known yet"
    await world.runs()
    assert world.engine.runner.order == WHOLE
    assert {call.sandbox.netns for call in world.engine.runner.calls} == {NETNS}
    assert world.containers == []


@pytest.mark.parametrize("cut_off", [True, False])
async def test_what_a_crash_cut_off_is_an_orphan_likewise(world: World, cut_off: bool) -> None:
    world.add()
    record = world.engine.store.records["c1"]
    torn = replace(record, complete=False, attachments=tuple(item.with_result(None) for item in record.attachments))
    world.engine.store.save(torn if cut_off else record)
    world.engine.cluster.pods.clear()
    world.engine.links.unused.add(NETNS)
    await world.runs(2)
    assert world.containers == []


@pytest.mark.parametrize(
    "spared",
    ["pod known", "inhabited", "store not synced", "static pod", "added anew in between"],
)
async def test_what_may_live_is_never_touched(world: World, spared: str) -> None:
    engine = world.engine
    world.add()
    engine.links.unused.add(NETNS)
    engine.cluster.pods.clear()
    known = Pod(Namespace("web"), PodName("p1"), PodUid("u1"), {NETWORKS_ANNOTATION: "n1,n2"})
    match spared:
        case "pod known":
            engine.cluster.put_pod(known)
        case "inhabited":
            engine.links.unused.clear()
        case "store not synced":
            engine.cluster.unsynced = True
        case "static pod":
            source = {"kubernetes.io/config.source": "file"}
            engine.cluster.put_pod(replace(known, uid=PodUid("mirror"), annotations=source))
        case "added anew in between":
            await world.runs()
            engine.store.save(replace(engine.store.records["c1"], created=engine.clock + 1))
        case _:
            raise AssertionError(spared)
    await world.runs(1 if spared == "added anew in between" else 3)
    assert world.containers == ["c1"]
    assert engine.runner.calls == []
    assert world.counts.left == (0, int(spared == "inhabited"), 0)


@pytest.mark.parametrize("since", ["processes have come", "added anew", "deleted", "nothing"])
async def test_what_was_found_is_judged_again_before_it_is_deleted(world: World, since: str) -> None:
    engine = world.engine
    world.add()
    engine.cluster.pods.clear()
    engine.links.unused.add(NETNS)
    calls = Calls(world)
    [orphan] = (await calls.look()).orphans.values()
    record = engine.store.records["c1"]
    match since:
        case "processes have come":
            engine.links.unused.clear()
        case "added anew":
            engine.store.save(replace(record, created=record.created + 1))
        case "deleted":
            engine.store.remove(record.sandbox.container_id)
        case _:
            assert since == "nothing"
    assert await calls.delete(orphan, 5) is (since == "nothing")
    assert bool(engine.runner.calls) is (since == "nothing")


async def test_what_is_worked_on_is_no_orphan(world: World) -> None:
    engine = world.engine
    world.add()
    engine.cluster.pods.clear()
    engine.links.namespaces.clear()
    calls = Calls(world)
    [orphan] = (await calls.look()).orphans.values()
    engine.runner.waits_for = futures.Future()
    engine.runner.calls.clear()
    deleting = Aside(engine.verbs.delete, engine.request("DEL"))
    await eventually(lambda: engine.runner.calls)
    assert (await calls.look()).orphans == {}
    assert not await calls.delete(orphan, 5)
    assert not deleting.done
    engine.runner.waits_for.set_result(None)
    deleting.result()


async def test_a_new_pod_of_the_same_name_does_not_keep_the_old_ones_container(world: World) -> None:
    world.add()
    world.engine.declare("n1,n2", uid="u2")
    world.engine.links.unused.add(NETNS)
    await world.runs(2)
    assert world.containers == []


async def test_an_add_under_way_is_never_touched(world: World) -> None:
    engine = world.engine
    engine.declare("n1")
    engine.runner.waits_for = futures.Future()
    adding = Aside(engine.verbs.add, engine.request())
    await eventually(lambda: engine.runner.calls)
    assert world.containers == ["c1"]
    engine.cluster.pods.clear()
    engine.links.unused.add(NETNS)
    await world.runs(3)
    assert not adding.done
    engine.runner.waits_for.set_result(None)
    adding.result()
    assert {verb for verb, _ in engine.runner.order} == {"ADD"}


async def test_a_name_that_is_used_again_belongs_to_the_newer_container(world: World) -> None:
    world.add()
    old = world.engine.store.records["c1"]
    newer = replace(old, sandbox=Sandbox(ContainerId("c2"), NETNS), created=old.created + 1)
    world.engine.store.save(newer)
    world.engine.links.unused.add(NETNS)
    await world.runs(2)
    assert {call.sandbox for call in world.engine.runner.calls} == {Sandbox(ContainerId("c1"), "")}
    assert world.containers == ["c2"]


async def test_two_containers_in_one_namespace_may_both_live(world: World) -> None:
    """If their interfaces have different names, neither has replaced the other."""
    world.add()
    old = world.engine.store.records["c1"]
    beside = tuple(replace(item, ifname=IfName(f"x{number}")) for number, item in enumerate(old.attachments))
    newer = replace(
        old, sandbox=Sandbox(ContainerId("c2"), NETNS), created=old.created + 1, attachments=beside, ifname=IfName("x0")
    )
    world.engine.store.save(newer)
    await world.runs(3)
    assert world.containers == ["c1", "c2"]
    assert world.engine.runner.calls == []


@pytest.mark.weak_spot(3)
async def test_what_was_given_up_is_deleted_later(world: World) -> None:
    world.engine.delete_tries = 1
    world.restart()
    world.add()
    world.engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    Aside(world.engine.verbs.delete, world.engine.request("DEL")).result()
    await world.runs()
    assert world.containers == ["c1"], "processes live in it still"
    assert world.counts.left == (0, 1, 0)
    world.engine.links.unused.add(NETNS)
    world.engine.runner.fail.clear()
    world.engine.runner.calls.clear()
    await world.runs()
    assert world.engine.runner.order == [("DEL", "web/n1")]
    assert world.containers == []


@pytest.mark.parametrize("refuses", ["the mark", "the record"])
async def test_what_was_given_up_on_a_sick_disk_is_deleted_once_it_is_well(world: World, refuses: str) -> None:
    """The pod is still known and its namespace is there, so only the DEL that was given up tells that it goes."""
    world.engine.delete_tries = 1
    world.restart()
    world.add()
    world.engine.links.unused.add(NETNS)
    with pytest.MonkeyPatch.context() as sick:
        if refuses == "the mark":
            world.engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
            sick.setattr(world.engine.store, "save", _raise_eio)
        else:
            sick.setattr(world.engine.store, "load", _raise_eio)
        Aside(world.engine.verbs.delete, world.engine.request("DEL")).result()
    world.engine.runner.fail.clear()
    # A predecessor may still be at work for its first minute.
    await world.runs(2)
    assert world.containers == []


async def test_a_del_that_an_earlier_daemon_has_begun_is_ended(world: World) -> None:
    """The earlier one may have answered it as done, and could not write that down."""
    world.engine.delete_tries = 0
    world.engine.verbs = world.engine.make_verbs()
    world.add()
    world.engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    with pytest.raises(CniError):
        Aside(world.engine.verbs.delete, world.engine.request("DEL")).result()
    world.engine.runner.fail.clear()
    world.controller = world.make()
    world.engine.links.unused.add(NETNS)
    await world.runs(3)
    world.engine.links.unused.discard(NETNS)
    assert world.containers == ["c1"], "this daemon's own: the runtime asks again"
    world.restart()
    await world.runs(3)
    assert world.containers == ["c1"], "processes live in it still"
    world.engine.links.unused.add(NETNS)
    await world.runs()
    assert world.containers == ["c1"]
    await world.runs()
    assert world.containers == []


def _raise_eio(*_arguments: object) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


async def test_what_fails_stays_is_tried_again_later_and_told_of_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add()
    world.engine.links.namespaces.clear()
    world.engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    await world.runs(3)
    assert world.engine.runner.order == WHOLE, "not tried again before its time"
    assert [item.name for item in world.engine.store.records["c1"].attachments] == ["web/n1"]
    assert world.counts.left == (1, 0, 0)
    monkeypatch.setattr(deadlines, "RECONCILE_RETRY_SECONDS", (0.0, 0.0))
    world.controller = world.make()
    world.engine.cluster.events.clear()
    await world.runs(3)
    assert world.engine.runner.order == [*WHOLE, *[("DEL", "web/n1")] * 3]
    [(subject, kind, reason, message)] = world.engine.cluster.events
    assert (subject, kind, reason) == ("node", "Warning", "OrphanNotDeleted")
    assert "web/p1" in message
    assert "pool is away" in message
    world.engine.runner.fail.clear()
    await world.runs()
    assert world.containers == []
    assert world.counts.left == (0, 0, 0)


async def test_what_a_sick_disk_held_up_is_deleted_by_the_next_run(world: World) -> None:
    world.add()
    world.engine.links.namespaces.clear()
    world.engine.runner.fail["DEL", "web/n1"] = IoFailureError("Input/output error")
    await world.runs(8)
    assert world.engine.runner.order.count(("DEL", "web/n1")) == 8
    assert [reason for _, _, reason, _ in world.engine.cluster.events] == ["OrphanNotDeleted"]
    world.engine.runner.fail.clear()
    await world.runs()
    assert world.containers == []


async def test_one_that_fails_keeps_no_other_from_being_deleted(world: World) -> None:
    world.engine.attach_concurrency = 1
    world.restart()
    world.add()
    record = world.engine.store.records["c1"]
    for number in range(2, 30):
        world.engine.store.save(replace(record, sandbox=Sandbox(ContainerId(f"c{number}"), f"/run/netns/{number}")))
    world.engine.links.namespaces.clear()
    world.engine.runner.fail_at[1] = CniError("busy")
    world.engine.runner.pause = 0.005
    await world.runs()
    assert len(world.containers) == 1
    assert world.engine.runner.most_at_once == 4


async def test_a_run_has_a_budget(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add()
    world.engine.links.namespaces.clear()
    monkeypatch.setattr(deadlines, "RECONCILE_RUN_SECONDS", 0.0)
    await world.runs()
    assert world.containers == ["c1"]
    assert world.counts.left == (1, 0, 0)


async def test_a_record_that_cannot_be_read_is_counted_and_left(world: World) -> None:
    world.engine.store.corrupt.add("c1")
    await world.runs(2)
    assert world.counts.left == (0, 0, 1)
    assert world.engine.store.corrupt == {"c1"}


@pytest.mark.parametrize("error", [OSError("I/O error"), ValueError("a fault of ours")])
async def test_it_runs_again_and_again_and_survives_what_cannot_be_read(world: World, error: Exception) -> None:
    world.add()
    world.engine.links.namespaces.clear()
    world.engine.store.fail_at[len(world.engine.store.calls) + 1] = error
    controller = world.make(0.01)
    spooled = asyncio.Event()
    running = asyncio.create_task(controller.run(spooled))
    for _ in range(10):
        await asyncio.sleep(0.001)
    # The DELs of the spool come first.
    assert world.containers == ["c1"]
    spooled.set()
    # It is degraded, and is no more when what is left is gone.
    async with asyncio.timeout(30):
        while world.containers or world.engine.verbs.engine.gates.degraded.conditions != {"leftovers": True}:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- all together ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The daemon was killed: nothing more happens."""


class Power:
    """Counts down to the moment at which the daemon is killed."""

    def __init__(self) -> None:
        self.left: int | None = None
        self._guard = threading.Lock()

    def use(self) -> None:
        with self._guard:
            if self.left is not None:
                if self.left <= 0:
                    raise Killed
                self.left -= 1


class Runner(FakeDelegateRunner):
    """Records the attachments of each container, and the changes in each namespace."""

    def __init__(self, power: Power) -> None:
        super().__init__()
        self.power = power
        self.made: set[tuple[str, str]] = set()
        self.deleted_in: list[tuple[str, str]] = []
        self.broken: set[str] = set()

    def add(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        self.power.use()
        self.made.add((sandbox.container_id, attachment.name))
        self.power.use()
        if attachment.name in self.broken:
            raise CniError("broken")
        return Result()

    def delete(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        self.power.use()
        self.deleted_in.append((sandbox.container_id, sandbox.netns))
        if attachment.name in self.broken:
            raise CniError("broken")
        self.made.discard((sandbox.container_id, attachment.name))
        self.power.use()


class Store(FakeDelegateStore):
    def __init__(self, power: Power) -> None:
        super().__init__()
        self.power = power

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        self.power.use()
        super().save(record, durable=durable)

    def remove(self, container_id: ContainerId) -> None:
        self.power.use()
        super().remove(container_id)


class Life(RuleBasedStateMachine):
    """A runtime that adds and deletes, a daemon that is killed and started, plugins that fail for a time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.power = Power()
        engine = self.world.engine
        engine.runner, engine.store = Runner(self.power), Store(self.power)
        self.runner = engine.runner
        engine.delete_tries = 2
        engine.declare("n1,n2")
        self.live: set[str] = set()
        """Containers whose ADD succeeded and whose DEL was not requested."""
        self.number = 0
        self.start()

    def start(self) -> None:
        self.power.left = None
        self.world.restart()

    def do(self, work: Callable[[], object]) -> str:
        """`done`, `failed`, or `killed`, after which the daemon is started anew."""
        outcome = "done"
        try:
            work()
        except* Killed:
            outcome = "killed"
        except* CniError:
            outcome = "failed"
        if outcome == "killed":
            self.start()
        return outcome

    def netns(self, container: str) -> str:
        return f"/run/netns/{container}"

    @rule(steps=st.none() | st.integers(0, 12))
    def add(self, steps: int | None) -> None:
        self.number += 1
        container = f"c{self.number}"
        engine = self.world.engine
        engine.links.namespaces[self.netns(container)] = {"lo"}
        self.power.left = steps
        outcome = self.do(lambda: engine.verbs.add(engine.request(container=container, netns=self.netns(container))))
        self.power.left = None
        if outcome == "done":
            self.live.add(container)
        else:
            # The runtime does not come back for it.
            self.drop(container)

    def drop(self, container: str) -> None:
        self.world.engine.links.namespaces.pop(self.netns(container), None)
        self.live.discard(container)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), steps=st.none() | st.integers(0, 8), late=st.booleans())
    def delete(self, data: st.DataObject, steps: int | None, late: bool) -> None:
        container = data.draw(st.sampled_from(sorted(self.live)))
        engine = self.world.engine
        engine.clock += 1
        request = engine.request("DEL", container=container, netns=self.netns(container))
        self.power.left = steps
        self.live.discard(container)
        self.do(lambda: engine.verbs.delete(replace(request, spooled=engine.clock) if late else request))
        self.power.left = None
        self.drop(container)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def repeated_add(self, data: st.DataObject) -> None:
        container = data.draw(st.sampled_from(sorted(self.live)))
        engine = self.world.engine
        before = set(self.runner.made)
        self.do(lambda: engine.verbs.add(engine.request(container=container, netns=self.netns(container))))
        assert self.runner.made == before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def the_namespace_vanishes(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.live))))

    @rule(steps=st.none() | st.integers(0, 12), times=st.integers(1, 3))
    def reconcile(self, steps: int | None, times: int) -> None:
        self.power.left = steps
        self.do(lambda: asyncio.run(self.world.runs(times)))
        self.power.left = None

    @rule(
        pod=st.booleans(),
        known=st.booleans(),
        broken=st.just(frozenset()) | st.frozensets(st.sampled_from(["web/n1", "web/n2", "kube-system/cluster"])),
    )
    def the_world_changes(self, pod: bool, known: bool, broken: frozenset[str]) -> None:
        """The pod is declared or not, the store knows its pods or not, some plugins fail."""
        self.world.engine.cluster.pods.clear()
        if pod:
            self.world.engine.declare("n1,n2")
        self.world.engine.cluster.unsynced = not known
        self.runner.broken = set(broken)

    @invariant()
    def what_lives_is_whole_and_on_record(self) -> None:
        for container in self.live:
            names = {name for owner, name in self.runner.made if owner == container}
            assert names == {"kube-system/cluster", "web/n1", "web/n2"}, f"{container} lives and lost a network"
            assert self.world.engine.store.records[container].complete

    @invariant()
    def what_is_attached_is_on_record(self) -> None:
        for container, name in self.runner.made:
            record = self.world.engine.store.records.get(container)
            assert record is not None, f"{container} leaks"
            assert name in {item.name for item in record.attachments}, f"{container} leaks"

    def teardown(self) -> None:
        for container in sorted(self.live):
            self.drop(container)
        self.runner.broken.clear()
        # A new daemon does not continue the backoff of its predecessor.
        self.start()
        asyncio.run(self.world.controller.delete_orphans())
        assert self.runner.made == set()
        assert self.world.engine.store.records == {}


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=20, deadline=None)
