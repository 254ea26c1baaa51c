"""When the loop that keeps running pods serves which container, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Changes
from multus_daemon.metrics import Metrics
from multus_daemon.node import at_start, containers, keep, lacking
from multus_daemon.node.keep import Keep
from multus_daemon.pod import annotation, check
from multus_daemon.pod.records import Records
from multus_daemon.pod.upkeep import Compared, Finding
from multus_daemon.runtime import portal
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Difference, Pod, Sandbox
from multus_daemon.spec.cni.conf import parse
from multus_daemon.spec.cni.errors import TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import KEEP_ANNOTATION, NETWORKS_ANNOTATION
from tests.counted import value_of
from tests.fakes.store import FakeDelegateStore
from tests.virtual_time import in_virtual_time

CONFIG = parse(b'{"cniVersion":"1.0.0","name":"n","type":"ptp"}')


def record(pod: str) -> ContainerRecord:
    """A container with one network, `pod` being `namespace/name`."""
    namespace, name = pod.split("/")
    sandbox = Sandbox(ContainerId(f"c-{name}"), f"/run/netns/{name}")
    cluster = Attachment("kube-system/n", CONFIG, IfName("eth0"), cluster_network=True)
    return ContainerRecord(
        sandbox,
        IfName("eth0"),
        Namespace(namespace),
        PodName(name),
        PodUid(f"u-{name}"),
        (cluster,),
        complete=True,
        netns_id=f"id-{name}",
    )


def pod(name: str, annotation: str = "") -> Pod:
    namespace, name = name.split("/")
    return Pod(Namespace(namespace), PodName(name), PodUid(f"u-{name}"), {NETWORKS_ANNOTATION: annotation})


class Kernel:
    """Reports what the test says."""

    def __init__(self) -> None:
        self.followed: dict[str, int] = {}
        self.found = Changes()
        self.reported = asyncio.Event()

    def follow(self, path: str, identity: str, recorded: float) -> int:
        # `recorded` is needed: without, a younger namespace with the same inode is taken for the recorded one.
        return self.followed.setdefault(path, len(self.followed))

    def changes(self) -> Changes:
        found, self.found = self.found, Changes()
        self.reported.clear()
        return found

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Node:
    """The loop with everything around it made up. `work` is what comparing a container does, in virtual time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        loop = asyncio.get_running_loop()
        self.compared: list[tuple[float, str]] = []
        """When the comparison of which container began."""
        self.asked: list[float] = []
        """When a comparison began that may ask the plugins."""
        self.work: Callable[[str], Awaitable[Any]] = self.nothing
        self.store = FakeDelegateStore()
        """The records of earlier daemons."""
        self.records = Records(self.store)
        self.conditions: list[float] = []
        self.events: list[str] = []
        self.kernel = Kernel()
        self.controller = ""
        self._at_work: set[str] = set()
        self.faults: list[str] = []
        """Errors that the loop has logged."""
        monkeypatch.setattr(keep.log, "error", self._error)
        cluster = SimpleNamespace(
            event=lambda pod, kind, reason, message: self.events.append(reason),
            node_event=lambda kind, reason, message: self.events.append(reason),
            hotplug_controller=lambda: self.controller,
            condition=lambda pod, **_: self.conditions.append(loop.time()),
        )
        engine: Any = SimpleNamespace(
            settings=SimpleNamespace(
                attachments=SimpleNamespace(**{"hotplug": "on", "ready_condition": True, "keep": "report"} | policy),
                deletes=SimpleNamespace(reconcile_seconds=300.0),
            ),
            cluster=cluster,
            gates=Gates(),
            records=self.records,
            at_work=self._at_work,
            metrics=Metrics(version="1"),
        )
        self.metrics: Metrics = engine.metrics
        self.loop = Keep(engine, lambda: b"{}", kernel=lambda: self.kernel)  # type: ignore[arg-type,return-value]  # what the loop needs of them
        monkeypatch.setattr(time, "monotonic", loop.time)
        monkeypatch.setattr(portal, "run", self._run)
        # There is no descriptor.
        monkeypatch.setattr(keep, "readable", lambda descriptor: self.kernel.reported.wait())
        monkeypatch.setattr(lacking, "look", lambda engine: ())
        self._root: asyncio.Task[None] | None = None

    def _error(self, text: str, *arguments: object, exc_info: object = None) -> None:
        if exc_info:
            self.faults.append(f"{text % arguments}: {exc_info!r}")

    async def _run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(at_start.load(self.records))
            group.create_task(self.loop.run())

    async def __aenter__(self) -> Node:
        self._root = asyncio.create_task(self._run_all())
        await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._root is not None
        if self._root.done():
            self._root.result()
        assert self.faults == []
        self._root.cancel()
        await asyncio.wait([self._root])

    @contextlib.asynccontextmanager
    async def keeping(self, *names: str) -> AsyncIterator[Node]:
        """Run the loop during the block; it has compared these containers."""
        async with self:
            for name in names:
                self.add(name)
            await asyncio.sleep(5)
            yield self

    async def _run(self, limit: object, work: Any, *, name: str = "") -> Any:
        if name != "keep":
            return work()
        _, container, asks = work.args
        if asks:
            self.asked.append(asyncio.get_running_loop().time())
        self.compared.append((asyncio.get_running_loop().time(), container.pod))
        container.cost = 0.003
        result = await self.work(container.pod)
        # The end of a thread comes to the loop behind what the thread has told it.
        await asyncio.sleep(0)
        return result

    async def nothing(self, name: str) -> Compared:
        return Compared(record(name), pod(name))

    def add(self, name: str) -> None:
        """An ADD has ended."""
        self.records.save(record(name))

    def remove(self, name: str) -> None:
        """A DEL has removed the record."""
        self.records.remove(record(name).sandbox.container_id)

    @contextlib.contextmanager
    def request(self, name: str) -> Iterator[None]:
        """A request is at work on the container during the block."""
        self._at_work.add(record(name).sandbox.container_id)
        yield
        self._at_work.clear()

    def may_repair(self, name: str, item: Finding) -> bool:
        """Return whether the loop lets the comparison repair."""
        container = self.loop._containers.by_id[record(name).sandbox.container_id]
        return self.loop._may_repair(container, item)

    def changed(self, *names: str) -> None:
        """The kernel reports a change in the namespaces of pods."""
        numbers = {self.kernel.followed[record(name).sandbox.netns] for name in names}
        self.kernel.found.namespaces |= numbers
        self.kernel.reported.set()

    def times(self, name: str, since: float = 0.0) -> list[float]:
        """When comparisons of the pod began."""
        return [at for at, of in self.compared if of == name and at >= since]


def broken(name: str, text: str) -> Compared:
    """A comparison that finds a difference."""
    item = record(name)
    finding = Finding(item.attachments[0], Difference(text), "report")
    return Compared(item, pod(name), [finding], [finding])


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_a_pod_that_flaps_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch) as node:
        state = iter(range(10**9))

        async def flap(name: str) -> Compared:
            return broken(name, f"mtu {next(state) % 2}")

        node.add("web/flaps")
        node.add("web/other")
        await asyncio.sleep(5)
        node.work, began = flap, now()
        while now() < began + 600:
            node.changed("web/flaps")
            await asyncio.sleep(0.02)
        in_ten_minutes = len(node.times("web/flaps", began))
        assert in_ten_minutes <= containers.NEWS_AT_ONCE + 10
        assert len([at for at in node.conditions if at > began + 60]) <= 11
        # The others are served as before.
        node.work, at = node.nothing, now()
        node.changed("web/other")
        await asyncio.sleep(1)
        assert node.times("web/other", at)
        # So is the one that flapped, once it is calm.
        await asyncio.sleep(containers.NEWS_AT_ONCE * containers.NEWS_SECONDS)
        node.changed("web/flaps")
        at = now()
        await asyncio.sleep(0.2)
        assert node.times("web/flaps", at)


@in_virtual_time
async def test_changes_without_news_take_a_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/busy") as node:
        began = now()
        while now() < began + 60:
            node.changed("web/busy")
            await asyncio.sleep(0.01)
        # 3 ms each, so 2.5 % of a core.
        assert 60 * 0.02 <= len(node.times("web/busy", began)) * 0.003 <= 60 * 0.026 + 0.003
        # A change of the annotation does not wait as long.
        node.changed("web/busy")
        node.loop.pod_changed(pod("web/busy", "net1"))
        await asyncio.sleep(0.05)
        assert node.times("web/busy", now() - 0.05)


@pytest.mark.parametrize("pods", [4, 8, 40])
@in_virtual_time
async def test_pods_whose_plugin_hangs_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, pods: int) -> None:
    names = [f"bad/p{number}" for number in range(pods)]
    async with Node(monkeypatch).keeping(*names, "good/annotated", "good/repaired") as node:

        async def hang(name: str) -> Compared:
            if name.startswith("bad/"):
                await asyncio.sleep(60)
                raise TryAgainLaterError("hangs")
            return Compared(record(name), pod(name))

        node.work = hang
        for second in range(300):
            for name in names:
                node.loop.pod_changed(pod(name, f"hanging@net{second}"))
            if second % 60 == 30:
                began = now()
                node.loop.pod_changed(pod("good/annotated", f"net{second}"))
                node.changed("good/repaired")
                await asyncio.sleep(0.5)
                assert node.times("good/annotated", began)
                assert node.times("good/repaired", began)
            await asyncio.sleep(1)
        assert max(Counter(of for _, of in node.compared if of.startswith("bad/")).values()) > 1


@in_virtual_time
async def test_repairs_have_their_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside plugins that hang for pods that have nothing in common."""
    names = [f"bad{number}/p{number}" for number in range(2 * keep.AT_ONCE)]
    async with Node(monkeypatch).keeping(*names, "good/repaired") as node:

        async def hang(name: str) -> Compared:
            if name != "good/repaired":
                await asyncio.sleep(3600)
            return Compared(record(name), pod(name))

        node.work = hang
        for number, name in enumerate(names):
            node.loop.pod_changed(pod(name, f"hanging{number}"))
        await asyncio.sleep(1)
        began = now()
        node.changed("good/repaired")
        await asyncio.sleep(0.5)
        assert node.times("good/repaired", began)


@in_virtual_time
async def test_a_large_annotation_is_not_parsed_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    real: Callable[[str, str], tuple[str, ...]] = annotation.wanted

    def wanted(annotation: str, namespace: str) -> tuple[str, ...]:
        parsed.append(len(annotation))
        return real(annotation, namespace)

    monkeypatch.setattr(annotation, "wanted", wanted)
    async with Node(monkeypatch).keeping("web/large") as node:
        large = f'[{{"name":"n","cni-args":{{"x":"{"y" * 200_000}"}}}}]'
        began = now()
        node.loop.pod_changed(pod("web/large", large))
        await asyncio.sleep(1)
        assert len(node.times("web/large", began)) == 1
        # The same text once more, as with each change of the pod's status.
        node.loop.pod_changed(pod("web/large", large))
        node.loop.pod_changed(pod("web/large", "net1"))
        node.loop.pod_changed(pod("web/large", "net1"))
        await asyncio.sleep(1)
        assert len(node.times("web/large", began)) == 2
        assert parsed == [4]


@in_virtual_time
async def test_a_record_that_cannot_be_read_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    good, bad = record("web/good"), record("web/bad")
    node.store.records = {good.sandbox.container_id: good}
    node.store.corrupt = {bad.sandbox.container_id}
    # The records cannot be listed.
    node.store.fail_at[1] = OSError(5, "Input/output error")
    async with node:
        await asyncio.sleep(deadlines.PREDECESSOR_SECONDS + deadlines.KEEP_START_SECONDS + 1)
        assert node.times("web/good")
        assert not node.times("web/bad")
        await asyncio.sleep(20 * deadlines.RECONCILE_RETRY_SECONDS[1])
        node.store.corrupt.clear()
        node.store.records[bad.sandbox.container_id] = bad
        await asyncio.sleep(deadlines.RECONCILE_RETRY_SECONDS[1] + deadlines.KEEP_START_SECONDS + 1)
        assert node.times("web/bad")


@in_virtual_time
async def test_a_container_is_compared_after_its_add_and_then_every_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Node(monkeypatch) as node:
        node.add("web/p")
        began = now()
        await asyncio.sleep(0.5)
        assert len(node.times("web/p", began)) == 1
        await asyncio.sleep(3 * 3600)
        times = node.times("web/p", began)
        pauses = [after - before for before, after in itertools.pairwise(times)]
        interval = deadlines.KEEP_INTERVAL_SECONDS
        assert pauses
        assert all(interval <= pause <= 1.1 * interval + 1 for pause in pauses)
        # Not all containers of a node at the same moment.
        assert max(pauses) - min(pauses) > 1


@in_virtual_time
async def test_plugins_are_asked_once_in_ten_minutes_however_often_the_kernel_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interval = deadlines.KEEP_INTERVAL_SECONDS
    async with Node(monkeypatch).keeping("web/p") as node:
        began = now()
        while now() < began + 3 * 3600:
            node.changed("web/p")
            await asyncio.sleep(30)
        assert node.asked[0] >= interval, "a pod that starts has enough to do"
        pauses = [after - before for before, after in itertools.pairwise(node.asked)]
        assert len(node.times("web/p", began)) > 10 * len(pauses)
        assert all(interval <= pause <= 1.1 * interval + 31 for pause in pauses)


@in_virtual_time
async def test_what_only_a_plugin_says_is_reported_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    item = record("web/p")
    node = Node(monkeypatch)
    node.store.records[item.sandbox.container_id] = item
    said = Finding(item.attachments[0], Difference('CHECK of plugin "sbr": no rule', is_certain=False), "report")

    async def fail(name: str) -> Compared:
        asks = node.asked[-1:] == [now()]
        return Compared(item, pod(name), [said] if asks else [], [said] if asks else [], asks)

    node.work = fail
    async with node:
        # An earlier daemon's pod is asked at once.
        await asyncio.sleep(deadlines.KEEP_START_SECONDS + 1)
        assert len(node.asked) == 1
        for _ in range(100):
            node.changed("web/p")
            await asyncio.sleep(30)
        assert len(node.asked) == value_of(node.metrics, "multus_check_failures_total")
        assert len(node.asked) > 3
        assert node.events == [check.EVENT]
        assert node.loop.differences() == [], "the kernel has everything"


@pytest.mark.parametrize(
    ("hotplug", "least", "most"),
    [
        # The annotation may have changed during the ADD.
        ("on", deadlines.KEEP_YOUNG_SECONDS, deadlines.KEEP_YOUNG_SECONDS + 0.1),
        ("off", deadlines.KEEP_INTERVAL_SECONDS / 2, deadlines.KEEP_INTERVAL_SECONDS + 0.1),
    ],
)
@in_virtual_time
async def test_an_add_is_not_followed_by_a_comparison_at_once(
    monkeypatch: pytest.MonkeyPatch, hotplug: str, least: float, most: float
) -> None:
    async with Node(monkeypatch, hotplug=hotplug, ready_condition=False) as node:
        began = now()
        node.add("web/p")
        await asyncio.sleep(deadlines.KEEP_INTERVAL_SECONDS + 1)
        assert least <= node.times("web/p")[0] - began <= most


@in_virtual_time
async def test_a_change_of_the_kernel_is_compared_at_once_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p", "web/other") as node:
        began = now()
        node.changed("web/p")
        await asyncio.sleep(60)
        [at] = node.times("web/p", began)
        assert at - began <= 0.2
        assert not node.times("web/other", began)


@in_virtual_time
async def test_a_change_after_the_answer_of_an_add_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the next interval: the loop follows the namespace before it sends the answer."""
    async with Node(monkeypatch, hotplug="off", ready_condition=False) as node:
        node.add("web/p")
        answered = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon_threadsafe(answered.set_result, None)
        await answered
        began = now()
        node.changed("web/p")
        await asyncio.sleep(deadlines.KEEP_INTERVAL_SECONDS / 3)
        [at] = node.times("web/p", began)
        assert at - began <= deadlines.KEEP_YOUNG_SECONDS + 0.1
        # While a request is at work on it as well: once, when that has left.
        began = now()
        with node.request("web/p"):
            node.changed("web/p")
            await asyncio.sleep(0.02)
        await asyncio.sleep(deadlines.KEEP_INTERVAL_SECONDS / 3)
        [at] = node.times("web/p", began)
        assert at - began <= deadlines.KEEP_HELD_SECONDS + 0.1


@in_virtual_time
async def test_changes_of_a_young_container_are_compared_when_its_links_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch) as node:
        began = now()
        node.add("web/p")
        await asyncio.sleep(0.2)
        for _ in range(5):
            node.changed("web/p")
            await asyncio.sleep(0.1)
        await asyncio.sleep(60)
        first, second = node.times("web/p")
        assert first - began < 0.2
        assert deadlines.KEEP_YOUNG_SECONDS <= second - began <= deadlines.KEEP_YOUNG_SECONDS + 0.2


@in_virtual_time
async def test_what_changes_during_a_comparison_is_compared_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:

        async def slow(name: str) -> Compared:
            await asyncio.sleep(3)
            return Compared(record(name), pod(name))

        node.work, began = slow, now()
        node.changed("web/p")
        await asyncio.sleep(1)
        for _ in range(3):
            node.changed("web/p")
            node.loop.look("web/p")
            await asyncio.sleep(0.1)
        # Never two at a time.
        assert len(node.times("web/p", began)) == 1
        await asyncio.sleep(60)
        assert len(node.times("web/p", began)) == 2
        assert node.times("web/p", began)[1] - began >= 3


@in_virtual_time
async def test_a_container_that_fails_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/bad") as node:

        async def fail(name: str) -> Compared:
            raise TryAgainLaterError("fails")

        node.work, began = fail, now()
        node.changed("web/bad")
        await asyncio.sleep(1800)
        times = node.times("web/bad", began)
        pauses = [after - before for before, after in itertools.pairwise(times)]
        shortest, longest = deadlines.KEEP_RETRY_SECONDS
        assert all(
            0.9 * min(shortest * 2**number, longest) <= pause <= 1.1 * min(shortest * 2**number, longest) + 0.1
            for number, pause in enumerate(pauses)
        )
        # The kernel's changes are what fails, or its consequence.
        node.changed("web/bad")
        at = now()
        await asyncio.sleep(1)
        assert not node.times("web/bad", at)
        # A change of the pod may be the correction: the pauses begin anew.
        node.loop.pod_changed(pod("web/bad", "net1"))
        await asyncio.sleep(5)
        assert len(node.times("web/bad", at)) == 3
        node.work = node.nothing
        await asyncio.sleep(10)
        at = now()
        await asyncio.sleep(deadlines.KEEP_INTERVAL_SECONDS / 2)
        assert not node.times("web/bad", at)


@pytest.mark.parametrize("repair", ["repair", "report"])
@in_virtual_time
async def test_only_what_is_to_be_repaired_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, repair: selection.Keep
) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:

        async def stays(name: str) -> Compared:
            item = record(name)
            found = [Finding(item.attachments[0], Difference("mtu", lambda: None), repair)]
            return Compared(item, pod(name), found, found)

        node.work, began = stays, now()
        node.changed("web/p")
        await asyncio.sleep(30)
        assert (len(node.times("web/p", began)) > 3) is (repair == "repair")
        assert node.loop.broken() == {"kube-system/n": 1}
        [shown] = node.loop.differences()
        assert shown["difference"] == "mtu"
        assert node.events == ["AttachmentBroken"]


@in_virtual_time
async def test_after_lost_messages_all_containers_are_compared_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"web/p{number}" for number in range(40)]
    async with Node(monkeypatch).keeping(*names) as node:
        began = now()
        node.kernel.found.lost = True
        node.changed("web/p0")
        await asyncio.sleep(deadlines.KEEP_START_SECONDS + 1)
        first = [node.times(name, began)[0] - began for name in names[1:]]
        # Not all of them in the same second.
        assert max(first) - min(first) > 10


@in_virtual_time
async def test_containers_of_an_earlier_daemon_are_compared_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    names = [f"web/p{number}" for number in range(40)]
    for name in names:
        node.store.records[record(name).sandbox.container_id] = record(name)
    unfinished = replace(record("web/unfinished"), complete=False)
    node.store.records[unfinished.sandbox.container_id] = unfinished
    # Pods come with the first list, which may be before the records.
    node.loop.pod_changed(pod("web/p7", "net1"))
    async with node:
        began = now()
        await asyncio.sleep(1)
        assert node.times("web/p7")
        # A DEL has come before the second reading, and an ADD of the predecessor.
        node.remove("web/p1")
        late = record("web/late")
        node.store.records[late.sandbox.container_id] = late
        await asyncio.sleep(deadlines.KEEP_START_SECONDS + 1)
        first = [node.times(name)[0] - began for name in names if name != "web/p1"]
        assert max(first) - min(first) > 10
        at = now()
        await asyncio.sleep(deadlines.PREDECESSOR_SECONDS + deadlines.KEEP_START_SECONDS)
        assert node.times("web/late")
        assert not node.times("web/unfinished")
        assert not node.times("web/p1", at)
        # The others are not compared a second time for that.
        assert all(len(node.times(name)) == 1 for name in names if name not in ("web/p1", "web/p7"))


@in_virtual_time
async def test_a_controller_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:
        node.controller = "kube-system/controller"
        began = now()
        node.loop.pod_changed(pod("kube-system/controller"))
        node.loop.pod_changed(pod("web/p", "net1"))
        await asyncio.sleep(30)
        assert node.events == ["AnnotationsNotFollowed"]
        assert not node.times("web/p", began)
        # A change of the kernel is compared nevertheless.
        node.changed("web/p")
        await asyncio.sleep(1)
        assert len(node.times("web/p", began)) == 1
        node.controller = ""
        began = now()
        node.loop.pod_changed(pod("kube-system/controller"))
        await asyncio.sleep(1)
        assert len(node.times("web/p", began)) == 1
        assert node.events == ["AnnotationsNotFollowed"]


@in_virtual_time
async def test_a_pod_that_is_reported_before_its_record_is_entered_is_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    async with Node(monkeypatch) as node:
        item = record("web/late")
        node.records.save(item)
        [entry] = node.records.view
        node.loop._follow(entry.container_id, None, False)
        await asyncio.sleep(0.1)
        # The record was read; the loop has not heard of it.
        node.loop.pod_changed(pod("web/late", "net1"))
        node.loop._follow(entry.container_id, entry, True)
        began = now()
        await asyncio.sleep(0.1)
        assert node.times("web/late", began)


@in_virtual_time
async def test_an_annotation_is_compared_once_with_what_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch) as node:
        [element] = selection.parse("net1", pod_namespace="web")
        made_for = replace(
            record("web/p").attachments[0], cluster_network=False, selection=element.canonical, result=Result()
        )
        attached = replace(record("web/p"), attachments=(*record("web/p").attachments, made_for))
        node.records.save(attached)

        async def same(name: str) -> Compared:
            return Compared(attached, pod(name, "net1"))

        node.work = same
        await asyncio.sleep(5)
        began = now()
        # It has what it asks for, however that is written.
        node.loop.pod_changed(pod("web/p", "web/net1"))
        node.loop.pod_changed(pod("web/p", '[{"name":"net1"}]'))
        await asyncio.sleep(60)
        assert not node.times("web/p", began)
        node.loop.pod_changed(pod("web/p", "net1,net2"))
        await asyncio.sleep(60)
        assert len(node.times("web/p", began)) == 1
        # What the pod says about repairs is no network.
        annotations = {selection.NETWORKS_ANNOTATION: "net1,net2", KEEP_ANNOTATION: "repair"}
        node.loop.pod_changed(replace(pod("web/p"), annotations=annotations))
        await asyncio.sleep(60)
        assert len(node.times("web/p", began)) == 2


@in_virtual_time
async def test_annotations_are_not_followed_without_hotplug(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch, hotplug="off").keeping("web/p") as node:
        began = now()
        node.loop.pod_changed(pod("web/p", "net1"))
        await asyncio.sleep(60)
        assert not node.times("web/p", began)


@in_virtual_time
async def test_a_container_waits_while_a_request_is_at_work_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:
        began = now()
        with node.request("web/p"):
            node.changed("web/p")
            await asyncio.sleep(10)
            assert not node.times("web/p", began)
        at = now()
        await asyncio.sleep(2 * deadlines.KEEP_HELD_SECONDS)
        assert len(node.times("web/p", at)) == 1


@in_virtual_time
async def test_a_del_ends_the_keeping_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p", "web/q") as node:

        async def is_deleted(name: str) -> Compared | None:
            await asyncio.sleep(1)
            node.remove(name)
            return broken(name, "its link is gone")

        node.work, began = is_deleted, now()
        node.changed("web/p")
        # While it is compared, as much as later.
        await asyncio.sleep(0.5)
        node.changed("web/p")
        await asyncio.sleep(3 * deadlines.KEEP_INTERVAL_SECONDS)
        assert len(node.times("web/p", began)) == 1
        assert node.events == []
        assert node.loop.broken() == {}
        # A new container of the name is a new one.
        node.work, began = node.nothing, now()
        node.add("web/p")
        await asyncio.sleep(1)
        assert len(node.times("web/p", began)) == 1


@in_virtual_time
async def test_a_del_forgets_what_was_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:

        async def differs(name: str) -> Compared:
            return broken(name, "mtu 1500")

        node.work = differs
        node.changed("web/p")
        await asyncio.sleep(1)
        assert node.loop.broken() == {"kube-system/n": 1}
        node.remove("web/p")
        node.add("web/other")
        await asyncio.sleep(1)
        assert node.loop.broken() == {"kube-system/n": 1}
        assert [item["pod"] for item in node.loop.differences()] == ["web/other"]


@in_virtual_time
async def test_a_repair_that_fights_becomes_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:

        async def fought(name: str) -> Compared:
            item = record(name)
            found = [Finding(item.attachments[0], Difference("route is missing", lambda: None), "repair")]
            return Compared(item, pod(name), found, () if node.may_repair(name, found[0]) else found)

        node.work = fought
        for _ in range(20):
            node.changed("web/p")
            await asyncio.sleep(20)
        assert Counter(node.events)["AttachmentRepaired"] == containers.REPAIRS_MAX
        assert Counter(node.events)["AttachmentBroken"] == 1
        assert node.loop.broken() == {"kube-system/n": 1}
        # Somebody else may have stopped by then.
        await asyncio.sleep(2 * deadlines.KEEP_CALM_SECONDS)
        assert Counter(node.events)["AttachmentRepaired"] > containers.REPAIRS_MAX


@in_virtual_time
async def test_a_change_by_the_pod_is_reported_once_and_only_if_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(monkeypatch).keeping("web/p") as node:
        found: list[Finding] = []

        async def renamed(name: str) -> Compared:
            return Compared(record(name), pod(name), tuple(found), tuple(found))

        item = record("web/p").attachments[0]
        node.work = renamed
        # As KubeVirt does: the interface is away for a moment.
        found.append(Finding(item, Difference("renamed", by_pod=True), "report"))
        node.changed("web/p")
        await asyncio.sleep(0.2)
        found.clear()
        await asyncio.sleep(60)
        assert node.events == []
        found.append(Finding(item, Difference("renamed", by_pod=True), "report"))
        for _ in range(10):
            node.changed("web/p")
            await asyncio.sleep(30)
        assert node.events == ["AttachmentChanged"]
        assert node.loop.broken() == {}
