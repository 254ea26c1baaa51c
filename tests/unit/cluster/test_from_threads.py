"""The engine's threads answer from known state without the event loop, and ask it everything else by one call."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import pytest

from multus_daemon.cluster.devices import Devices
from multus_daemon.cluster.kube.store import Cluster
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Allocation, Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import (
    DevicesUnavailableError,
)
from tests.waiting import eventually

P = ParamSpec("P")
T = TypeVar("T")


WEB, P1, U1 = Namespace("web"), PodName("p1"), PodUid("u1")
POD = Pod(WEB, P1, U1)
NETWORK = NetworkAttachmentDefinition("web", "n1", '{"type": "ptp"}', {})


async def as_a_request(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread of its own."""
    return await portal.run(Deadline(), functools.partial(work, *args, **kwargs))


class Loop:
    """A service on the event loop. It notes each call and its thread; it raises `error`, or hangs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[threading.Thread] = set()
        self.error: Exception | None = None
        self.hangs = False
        self.cancelled = 0

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    async def answer(self, *call: Any) -> None:
        self.note(*call)
        try:
            await asyncio.sleep(60 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error


class Store(Loop):
    """`known` pods and networks are told without a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.known_pods: dict[tuple[str, str], Pod] = {}
        self.networks: dict[tuple[str, str], NetworkAttachmentDefinition] = {}
        self.statuses = self.conditions = self.devices = self.events = self

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        found = self.known_pods.get((namespace, name))
        return found if found and uid in ("", found.uid) else None

    def namespaces_with_network(self, name: str) -> list[str]:
        return [namespace for namespace, found in self.networks if found == name]

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        await self.answer("pod", namespace, name, uid)
        return POD

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        await self.answer("network", namespace, name)
        return NETWORK

    async def node_pods(self) -> list[Pod]:
        await self.answer("node_pods")
        return [POD]

    async def write(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        await self.answer("write_network_status", pod, value, keep_trying)

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        await self.answer("namespace_labels", name)
        return {"team": "web"}

    def hotplug_controller(self) -> str:
        return "kube-system/dnc"

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        raise AssertionError("the composition root asks the store itself")

    def put_condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        self.note("condition", pod, ready, reason, message)

    def put_report(self, pod: Pod, report: DeviceReport) -> None:
        self.note("device_status", pod, report)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        self.note("event", pod, kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        self.note("node_event", kind, reason, message)


class CountingPortal(LoopPortal):
    """Counts how often it is crossed."""

    def __init__(self) -> None:
        super().__init__()
        self.called = self.told = 0

    def call(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        self.called += 1
        return super().call(work, *args, **kwargs)

    def tell(self, work: Any, *args: Any, **kwargs: Any) -> None:
        self.told += 1
        super().tell(work, *args, **kwargs)


@pytest.fixture
async def way() -> CountingPortal:
    return CountingPortal()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store()
    yield store
    assert store.threads <= {threading.main_thread()}, "the loop's own thread"


# --- the cluster -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", ["u1", ""])
async def test_what_is_known_is_read_without_crossing(store: Store, way: CountingPortal, uid: str) -> None:
    store.known_pods["web", "p1"] = POD
    store.networks["web", "n1"] = NETWORK
    cluster = Cluster(cast(Any, store), way)
    assert await as_a_request(cluster.pod, WEB, P1, PodUid(uid)) is POD
    assert await as_a_request(cluster.network, "web", "n1") is NETWORK
    assert store.calls == []
    assert (way.called, way.told) == (0, 0)


async def test_what_is_unknown_crosses_once(store: Store, way: CountingPortal) -> None:
    cluster = Cluster(cast(Any, store), way)
    assert await as_a_request(cluster.pod, WEB, P1, U1) is POD
    assert await as_a_request(cluster.network, "web", "n1") is NETWORK
    assert store.calls == [("pod", "web", "p1", "u1"), ("network", "web", "n1")]
    assert way.called == 2


async def test_another_incarnation_than_is_known_is_asked_for(store: Store, way: CountingPortal) -> None:
    store.known_pods["web", "p1"] = POD
    await as_a_request(Cluster(cast(Any, store), way).pod, WEB, P1, PodUid("u2"))
    assert store.calls == [("pod", "web", "p1", "u2")]


async def test_the_pods_of_the_node_and_the_status_cross_once(store: Store, way: CountingPortal) -> None:
    cluster = Cluster(cast(Any, store), way)
    assert await as_a_request(cluster.node_pods) == [POD]
    for keep_trying in (True, False):
        await as_a_request(cluster.write_network_status, POD, "[]", keep_trying=keep_trying)
    assert store.calls == [
        ("node_pods",),
        ("write_network_status", POD, "[]", True),
        ("write_network_status", POD, "[]", False),
    ]
    assert way.called == 3


async def test_events_are_told_in_their_order_and_not_waited_for(store: Store, way: CountingPortal) -> None:
    cluster = Cluster(cast(Any, store), way)
    ended = threading.Event()

    def thread() -> None:
        cluster.event(POD, "Normal", "AddedInterface", "net1")
        cluster.node_event("Warning", "OrphanNotDeleted", "c1")
        cluster.event(POD, "Normal", "AddedInterface", "net2")
        ended.set()

    running = threading.Thread(target=thread)
    running.start()
    # The loop is not available, and the thread ends all the same.
    assert ended.wait(10)
    running.join(10)
    assert store.calls == []
    await eventually(lambda: len(store.calls) == 3)
    assert store.calls == [
        ("event", POD, "Normal", "AddedInterface", "net1"),
        ("node_event", "Warning", "OrphanNotDeleted", "c1"),
        ("event", POD, "Normal", "AddedInterface", "net2"),
    ]
    assert (way.called, way.told) == (0, 3)


# --- devices ---------------------------------------------------------------------------------------------------------


class Kubelet:
    def __init__(self) -> None:
        self.calls: list[Pod] = []
        self.error: Exception | None = None

    def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        self.calls.append(pod)
        if self.error:
            raise self.error
        return {"vendor.com/vf": ["0000:03:02.0"]}


class Claims(Loop):
    """What it knows without being asked, and what it gives when it is."""

    known_devices: Allocation | None = None

    def known(self, pod: Pod) -> Allocation | None:
        return self.known_devices

    async def allocated(self, pod: Pod) -> Allocation:
        await self.answer(pod)
        return Allocation({"vendor.com/vf": ["0000:03:02.1"]}, left_out=("a GPU",))


async def test_devices_of_claims_are_asked_for_only_where_they_are_not_known(way: CountingPortal) -> None:
    claims, pod = Claims(), replace(POD, asks_for_extended_resources=True)
    devices = Devices(Kubelet().allocated, way, cast(Any, claims))
    found = Allocation({"vendor.com/vf": ["0000:03:02.0", "0000:03:02.1"]}, left_out=("a GPU",))
    assert await as_a_request(devices.allocated, pod, ["vendor.com/vf"]) == found
    assert claims.calls == [(pod,)]
    claims.known_devices = Allocation({"vendor.com/other": ["x"]})
    found = Allocation({"vendor.com/other": ["x"], "vendor.com/vf": ["0000:03:02.0"]})
    assert await as_a_request(devices.allocated, pod, ["vendor.com/vf"]) == found
    assert claims.calls == [(pod,)]
    claims.known_devices, claims.error = None, DevicesUnavailableError("away")
    with pytest.raises(DevicesUnavailableError, match="away"):
        await as_a_request(devices.allocated, pod, ["vendor.com/vf"])


@pytest.mark.parametrize(
    ("may_have", "resources", "is_asked"),
    [
        (False, ["vendor.com/vf"], False),
        (True, ["vendor.com/vf"], True),
        # A claim by its name, as the kubelet knows it.
        (False, ["vendor.com/vf", "nic"], True),
    ],
)
async def test_the_kubelet_is_asked_only_where_it_may_know_more(
    way: CountingPortal, may_have: bool, resources: list[str], is_asked: bool
) -> None:
    kubelet, claims = Kubelet(), Claims()
    claims.known_devices = Allocation({"vendor.com/vf": ["0000:03:02.1"]})
    devices = Devices(kubelet.allocated, way, cast(Any, claims))
    found = await as_a_request(devices.allocated, replace(POD, asks_for_extended_resources=may_have), resources)
    assert bool(kubelet.calls) is is_asked
    assert found.devices == {"vendor.com/vf": ["0000:03:02.0", "0000:03:02.1"] if is_asked else ["0000:03:02.1"]}
    assert way.called == 0
