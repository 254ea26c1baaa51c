"""When the loop that keeps running pods serves which container, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Changes
from multus_daemon.node import containers, converge
from multus_daemon.node.converge import Converge
from multus_daemon.plugins.plugin import Difference
from multus_daemon.pod import changes
from multus_daemon.pod.converge import Converged
from multus_daemon.pod.drift import Finding
from multus_daemon.runtime import portal
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni.conf import parse
from multus_daemon.spec.cni.errors import TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION
from tests import virtual_time

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

    def follow(self, path: str, identity: str) -> int:
        return self.followed.setdefault(path, len(self.followed))

    def changes(self) -> Changes:
        found, self.found = self.found, Changes()
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
        self.work: Callable[[str], Awaitable[Any]] = self.nothing
        self.records: dict[ContainerId, ContainerRecord | None] = {}
        self.unlistable = 0
        """How often the records cannot be listed."""
        self.conditions: list[float] = []
        self.events: list[str] = []
        self.kernel = Kernel()
        self.controller = ""
        self.faults: list[str] = []
        """What the loop itself did wrong."""
        monkeypatch.setattr(converge.log, "error", self._error)
        events = SimpleNamespace(
            event=lambda pod, kind, reason, message: self.events.append(reason),
            node_event=lambda kind, reason, message: self.events.append(reason),
        )
        cluster = SimpleNamespace(
            hotplug_controller=lambda: self.controller,
            condition=lambda pod, **_: self.conditions.append(loop.time()),
        )
        engine: Any = SimpleNamespace(
            policy=SimpleNamespace(**{"hotplug": "on", "ready_condition": True, "keep": "report"} | policy),
            cluster=cluster,
            locks=KeyedLock(),
            gates=Gates(),
            records=SimpleNamespace(read_all=self._read_all),
        )
        self.loop = Converge(engine, events, lambda: b"{}", kernel=lambda: self.kernel)  # type: ignore[arg-type,return-value]  # what the loop needs of them
        monkeypatch.setattr(time, "monotonic", loop.time)
        monkeypatch.setattr(portal, "run", self._run)
        # There is no descriptor.
        monkeypatch.setattr(self.loop, "_listen", lambda: None)
        monkeypatch.setattr(loop, "remove_reader", lambda descriptor: None)
        self._root: asyncio.Task[None] | None = None

    def _error(self, text: str, *arguments: object, exc_info: object = None) -> None:
        if exc_info:
            self.faults.append(f"{text % arguments}: {exc_info!r}")

    async def __aenter__(self) -> Node:
        self._root = asyncio.create_task(self.loop.run())
        await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._root is not None
        if self._root.done():
            self._root.result()
        assert self.faults == []
        self._root.cancel()
        await asyncio.wait([self._root])

    def _read_all(self) -> Mapping[ContainerId, ContainerRecord | None]:
        if self.unlistable:
            self.unlistable -= 1
            raise OSError(5, "Input/output error")
        return self.records

    async def _run(self, limit: object, work: Any, *, name: str = "") -> Any:
        if work == self._read_all:
            return self._read_all()
        _, container = work.args
        self.compared.append((asyncio.get_running_loop().time(), container.pod))
        container.cost = 0.003
        return await self.work(container.pod)

    async def nothing(self, name: str) -> Converged:
        return Converged(record(name), pod(name))

    def add(self, name: str) -> None:
        """An ADD has ended."""
        self.loop.watch(record(name).sandbox.container_id, record(name))

    def changed(self, *names: str) -> None:
        """The kernel reports a change in the namespaces of pods."""
        numbers = {self.kernel.followed[record(name).sandbox.netns] for name in names}
        self.kernel.found.namespaces |= numbers
        self.loop._read_in_time()

    def times(self, name: str, since: float = 0.0) -> list[float]:
        """When comparisons of the pod began."""
        return [at for at, of in self.compared if of == name and at >= since]


def broken(name: str, text: str) -> Converged:
    """A comparison that finds a difference."""
    item = record(name)
    finding = Finding(item.attachments[0], Difference(text), "report")
    return Converged(item, pod(name), [finding], [finding])


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_pod_that_flaps_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Node(monkeypatch) as node:
            state = iter(range(10**9))

            async def flap(name: str) -> Converged:
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

    virtual_time.run(scenario())


def test_changes_without_news_take_a_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Node(monkeypatch) as node:
            node.add("web/busy")
            await asyncio.sleep(5)
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

    virtual_time.run(scenario())


@pytest.mark.parametrize("pods", [4, 8, 40])
def test_pods_whose_plugin_hangs_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, pods: int) -> None:
    async def scenario() -> None:
        async with Node(monkeypatch) as node:
            names = [f"bad/p{number}" for number in range(pods)]
            for name in (*names, "good/annotated", "good/repaired"):
                node.add(name)
            await asyncio.sleep(5)

            async def hang(name: str) -> Converged:
                if name.startswith("bad/"):
                    await asyncio.sleep(60)
                    raise TryAgainLaterError("hangs")
                return Converged(record(name), pod(name))

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

    virtual_time.run(scenario())


def test_repairs_have_their_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside plugins that hang for pods that have nothing in common."""

    async def scenario() -> None:
        async with Node(monkeypatch) as node:
            names = [f"bad{number}/p{number}" for number in range(2 * converge.AT_ONCE)]
            for name in (*names, "good/repaired"):
                node.add(name)
            await asyncio.sleep(5)

            async def hang(name: str) -> Converged:
                if name != "good/repaired":
                    await asyncio.sleep(3600)
                return Converged(record(name), pod(name))

            node.work = hang
            for number, name in enumerate(names):
                node.loop.pod_changed(pod(name, f"hanging{number}"))
            await asyncio.sleep(1)
            began = now()
            node.changed("good/repaired")
            await asyncio.sleep(0.5)
            assert node.times("good/repaired", began)

    virtual_time.run(scenario())


def test_a_large_annotation_is_not_parsed_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        parsed = []
        real: Callable[[str, str], tuple[str, ...]] = changes.wanted

        def wanted(annotation: str, namespace: str) -> tuple[str, ...]:
            parsed.append(len(annotation))
            return real(annotation, namespace)

        monkeypatch.setattr(changes, "wanted", wanted)
        async with Node(monkeypatch) as node:
            node.add("web/large")
            await asyncio.sleep(5)
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

    virtual_time.run(scenario())


def test_a_record_that_cannot_be_read_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        node = Node(monkeypatch)
        good, bad = record("web/good"), record("web/bad")
        node.records = {good.sandbox.container_id: good, bad.sandbox.container_id: None}
        node.unlistable = 1
        async with node:
            await asyncio.sleep(deadlines.PREDECESSOR_SECONDS + deadlines.CONVERGE_START_SECONDS + 1)
            assert node.times("web/good")
            assert not node.times("web/bad")
            await asyncio.sleep(20 * deadlines.RECONCILE_RETRY_SECONDS[1])
            node.records[bad.sandbox.container_id] = bad
            await asyncio.sleep(deadlines.RECONCILE_RETRY_SECONDS[1] + deadlines.CONVERGE_START_SECONDS + 1)
            assert node.times("web/bad")

    virtual_time.run(scenario())
