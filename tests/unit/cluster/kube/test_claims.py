"""The devices of ResourceClaims over an API server, and what it is asked for."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.claims import decode_claim
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.spec.attachment import Allocation, Pod
from multus_daemon.spec.ports import DevicesUnavailableError
from tests.claims import ID, RESOURCE, Manifest, claim, extended, nic, pod_claims, resource_slice, result
from tests.fakes.apiserver import CLAIMS, NETWORKS, PODS, SLICES, FakeApiServer
from tests.waiting import eventually

UID = "11111111-2222-3333-4444-555555555555"
RESERVED = {"web-1": UID}
VF, OTHER_VF = "vendor.com/vf", "vendor.com/other"
GPU = "gpu.example.com"


def put_network(server: FakeApiServer, resource_name: str = VF) -> None:
    annotations = {"k8s.v1.cni.cncf.io/resourceName": resource_name}
    metadata = {"namespace": "web", "name": "fast", "annotations": annotations}
    server.put(NETWORKS, {"metadata": metadata, "spec": {"config": '{"type":"ptp"}'}})


def put_pod(server: FakeApiServer, *names: str, phase: str = "Pending", **status: Any) -> None:
    spec, made = pod_claims(*names)
    metadata = {"namespace": "web", "name": "web-1", "uid": UID}
    item = {"metadata": metadata, "spec": {"nodeName": "node-a", **spec}, "status": {"phase": phase, **made, **status}}
    server.put(PODS, item)


def asked(server: FakeApiServer, what: str = "/apis/resource.k8s.io/") -> list[str]:
    """The requests about claims and slices."""
    return [path for _, path in server.requests if what in path]


async def pod_of(store: KubeStore) -> Pod:
    await eventually(lambda: store.pods.get(("web", "web-1")))
    pod = store.pods.get(("web", "web-1"))
    assert pod is not None
    return pod


@dataclass
class Situation:
    """What there is, and the devices that the pod gets by resource, or words of the refusal."""

    claims: list[Manifest]
    slices: list[Manifest]
    devices: dict[str, list[str]] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """Claims of the pod, if not all of `claims`."""
    status: Manifest = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Words of what is left out, for each."""
    error: str = ""
    is_of_unknown_pool: bool = False
    """The slices of a device are not all there: the next ADD looks again."""


def one(*devices: str, name: str = "c1", **more: Any) -> Manifest:
    return claim(name, *(result(device, **more) for device in devices), pods=RESERVED)


NONE = "is in no ResourceSlice of this node with the attributes"
UNKNOWN_POOL: dict[str, Any] = {"left_out": (NONE,), "is_of_unknown_pool": True}
SITUATIONS = {
    "no claims": Situation([], [resource_slice("s", nic("a"))]),
    "one claim with one device": Situation([one("a")], [resource_slice("s", nic("a"))], {VF: ["id-a"]}),
    "one claim with several devices, sorted by their ids": Situation(
        [one("a", "b", "c")],
        [resource_slice("s", nic("a", "0000:03:02.7"), nic("b", "0000:03:02.1"), nic("c", "0000:03:02.3"))],
        {VF: ["0000:03:02.1", "0000:03:02.3", "0000:03:02.7"]},
    ),
    "two claims of one resource": Situation(
        [one("b"), one("a", name="c2")], [resource_slice("s", nic("a"), nic("b"))], {VF: ["id-a", "id-b"]}
    ),
    "two claims of two resources": Situation(
        [one("a"), one("b", name="c2")],
        [resource_slice("s", nic("a"), nic("b", resource=OTHER_VF))],
        {VF: ["id-a"], OTHER_VF: ["id-b"]},
    ),
    "one claim of two resources": Situation(
        [one("a", "b")],
        [resource_slice("s", nic("a"), nic("b", resource=OTHER_VF))],
        {VF: ["id-a"], OTHER_VF: ["id-b"]},
    ),
    "a claim without a device": Situation([one()], [resource_slice("s", nic("a"))]),
    "a claim that is not allocated": Situation(
        [claim("c1", is_allocated=False)],
        [resource_slice("s", nic("a"))],
        error="ResourceClaim web/c1 is not allocated",
    ),
    "a claim that does not exist": Situation(
        [], [resource_slice("s", nic("a"))], names=("gone",), left_out=("ResourceClaim web/gone can't be read",)
    ),
    "a slice of another node": Situation([one("a")], [resource_slice("s", nic("a"), node="node-b")], **UNKNOWN_POOL),
    "devices of the same name on two nodes": Situation(
        [one("a")],
        [resource_slice("s1", nic("a", "theirs"), node="node-b"), resource_slice("s2", nic("a", "ours"))],
        {VF: ["ours"]},
    ),
    "no slice": Situation([one("a")], [], **UNKNOWN_POOL),
    "no such device in the slice": Situation([one("a")], [resource_slice("s", nic("b"))], left_out=(NONE,)),
    "no such pool": Situation([one("a", pool="x")], [resource_slice("s", nic("a"))], **UNKNOWN_POOL),
    "no attributes": Situation([one("a")], [resource_slice("s", {"name": "a"})], left_out=(NONE,)),
    "no device id": Situation(
        [one("a")],
        [resource_slice("s", {"name": "a", "attributes": {RESOURCE: {"string": VF}}})],
        left_out=(f"has no attribute {ID}",),
    ),
    "no resource name": Situation(
        [one("a")],
        [resource_slice("s", {"name": "a", "attributes": {ID: {"string": "x"}}})],
        left_out=(f"has no attribute {RESOURCE}",),
    ),
    "an attribute of another type": Situation(
        [one("a")],
        [resource_slice("s", {"name": "a", "attributes": {RESOURCE: {"string": VF}, ID: {"int": 7}}})],
        left_out=(f"has no attribute {ID} that is a string",),
    ),
    "one device of two is usable": Situation(
        [one("a", "b")], [resource_slice("s", nic("a"), nic("b", resource=None))], {VF: ["id-a"]}, left_out=(NONE,)
    ),
    "a GPU beside a network": Situation(
        [one("a"), one("gpu-0", name="gpu", driver=GPU)],
        [resource_slice("s", nic("a")), resource_slice("g", nic("gpu-0", resource=None), driver=GPU)],
        {VF: ["id-a"]},
        left_out=(f"device gpu-0 of claim gpu (driver {GPU})",),
    ),
    "a device of the name in two drivers": Situation(
        [one("a"), one("a", name="c2", driver="other.example.com")],
        [
            resource_slice("s1", nic("a", "first")),
            resource_slice("s2", nic("a", "second"), driver="other.example.com"),
        ],
        {VF: ["first", "second"]},
    ),
    "a device of the name in two pools of a driver": Situation(
        [one("a", pool="p1"), one("a", name="c2", pool="p2")],
        [resource_slice("s1", nic("a", "first"), pool="p1"), resource_slice("s2", nic("a", "second"), pool="p2")],
        {VF: ["first", "second"]},
    ),
    "a pool in two slices": Situation(
        [one("a", "b")],
        [resource_slice("s1", nic("a"), count=2), resource_slice("s2", nic("b"), count=2)],
        {VF: ["id-a", "id-b"]},
    ),
    "an obsolete slice": Situation(
        [one("a")],
        [resource_slice("s1", nic("a", "old")), resource_slice("s2", nic("a", "new"), generation=2)],
        {VF: ["new"]},
    ),
    "a shared claim that the pod names twice": Situation(
        [one("a")], [resource_slice("s", nic("a"))], {VF: ["id-a"]}, names=("c1", "c1")
    ),
    "an extended resource": Situation(
        [one("a", request="r0")],
        [resource_slice("s", nic("a"))],
        {VF: ["id-a"]},
        names=(),
        status=extended("c1", ("r0", VF)),
    ),
    "three of an extended resource": Situation(
        [one("c", "a", "b", request="r0")],
        [resource_slice("s", nic("a"), nic("b"), nic("c"))],
        {VF: ["id-a", "id-b", "id-c"]},
        names=(),
        status=extended("c1", ("r0", VF)),
    ),
    "two extended resources": Situation(
        [claim("c1", result("a", request="r0"), result("b", request="r1"), pods=RESERVED)],
        [resource_slice("s", nic("a"), nic("b", resource=OTHER_VF))],
        {VF: ["id-a"], OTHER_VF: ["id-b"]},
        names=(),
        status=extended("c1", ("r0", VF), ("r1", OTHER_VF)),
    ),
    "a device of another extended resource": Situation(
        [one("a", request="r0")],
        [resource_slice("s", nic("a", resource=OTHER_VF))],
        names=(),
        status=extended("c1", ("r0", VF)),
        left_out=(f"is of resource {OTHER_VF}, and its request 'r0' is for {VF}",),
    ),
    "a device of no request of an extended resource": Situation(
        [one("a", request="r9")],
        [resource_slice("s", nic("a"))],
        names=(),
        status=extended("c1", ("r0", VF)),
        left_out=("its request 'r9' is for no extended resource",),
    ),
    "an extended resource without attributes": Situation(
        [one("a", request="r0")],
        [resource_slice("s", nic("a", resource=None))],
        names=(),
        status=extended("c1", ("r0", VF)),
        left_out=(NONE,),
    ),
    "a claim and an extended resource": Situation(
        [one("b"), one("a", name="c2", request="r0")],
        [resource_slice("s", nic("a"), nic("b"))],
        {VF: ["id-a", "id-b"]},
        names=("c1",),
        status=extended("c2", ("r0", VF)),
    ),
}


def arrange(server: FakeApiServer, situation: Situation) -> None:
    for item in situation.slices:
        server.put(SLICES, item)
    for item in situation.claims:
        server.put(CLAIMS, item)
    put_network(server)
    names = situation.names
    put_pod(
        server,
        *([item["metadata"]["name"] for item in situation.claims] if names is None else names),
        **situation.status,
    )


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
async def test_situations(server: FakeApiServer, store: KubeStore, situation: Situation) -> None:
    arrange(server, situation)
    pod = await pod_of(store)
    if situation.error:
        with pytest.raises(DevicesUnavailableError, match=situation.error):
            await store.claims.allocated(pod)
        return
    found = await store.claims.allocated(pod)
    assert found.devices == situation.devices
    assert len(found.left_out) == len(situation.left_out)
    for words, text in zip(situation.left_out, found.left_out, strict=True):
        assert words in text
    assert set(found.claimed) == {(name, item) for name, ids in found.devices.items() for item in ids}
    if "gone" not in (situation.names or ()) and not situation.is_of_unknown_pool:
        await eventually(lambda: store.claims.known(pod) == found)
        before = asked(server)
        assert await store.claims.allocated(pod) == found
        assert asked(server) == before


# --- what the API server is asked ------------------------------------------------------------------------------------


async def test_claims_are_read_ahead_and_an_add_asks_nothing(server: FakeApiServer, store: KubeStore) -> None:
    arrange(server, SITUATIONS["two claims of one resource"])
    pod = await pod_of(store)
    await eventually(lambda: store.claims.known(pod))
    assert len(asked(server, "/resourceclaims/c1")) == len(asked(server, "/resourceclaims/c2")) == 1
    assert len(asked(server, "/resourceslices")) == 1
    put_pod(server, "c1", "c2", phase="Running")
    await eventually(lambda: (known := store.pods.get(("web", "web-1"))) and known.phase == "Running")
    assert store.claims.known(await pod_of(store)) == Allocation(
        {VF: ["id-a", "id-b"]}, (await store.claims.allocated(pod)).claimed
    )
    assert len(asked(server)) == 3


@pytest.mark.parametrize("lacks", ["network", "claim", "start"])
async def test_nothing_is_asked_without_need(server: FakeApiServer, store: KubeStore, lacks: str) -> None:
    if lacks != "network":
        put_network(server)
    server.put(CLAIMS, one("a"))
    put_pod(server, *([] if lacks == "claim" else ["c1"]), phase="Running" if lacks == "start" else "Pending")
    pod = await pod_of(store)
    await eventually(lambda: lacks == "network" or store.networks.get(("web", "fast")))
    # A later pod has come: this one would have been dealt with.
    server.add_pod("web-2")
    await eventually(lambda: store.pods.get(("web", "web-2")))
    assert asked(server) == []
    assert (store.claims.known(pod) == Allocation()) is (lacks == "claim")


async def test_a_network_that_comes_later(server: FakeApiServer, store: KubeStore) -> None:
    server.put(SLICES, resource_slice("s", nic("a")))
    server.put(CLAIMS, one("a"))
    put_pod(server, "c1")
    pod = await pod_of(store)
    put_network(server)
    await eventually(lambda: store.claims.known(pod))


async def test_an_allocation_is_kept_for_the_pod_that_has_it(server: FakeApiServer, store: KubeStore) -> None:
    """A claim by name may be allocated anew for the next pod."""
    server.put(SLICES, resource_slice("s", nic("a"), nic("b")))
    server.put(CLAIMS, one("a"))
    put_network(server)
    put_pod(server, "c1")
    pod = await pod_of(store)
    await eventually(lambda: store.claims.known(pod))
    server.delete(PODS, "web", "web-1")
    await eventually(lambda: not store.pods.get(("web", "web-1")))
    other = "99999999-2222-3333-4444-555555555555"
    server.put(CLAIMS, claim("c1", result("b"), pods={"web-1": other}))
    spec, made = pod_claims("c1")
    metadata = {"namespace": "web", "name": "web-1", "uid": other}
    server.put(PODS, {"metadata": metadata, "spec": {"nodeName": "node-a", **spec}, "status": made})
    await eventually(lambda: store.pods.get(("web", "web-1")))
    pod = await pod_of(store)
    await eventually(lambda: store.claims.known(pod))
    found = store.claims.known(pod)
    assert found is not None
    assert found.devices == {VF: ["id-b"]}


async def test_claims_of_the_same_name_in_two_namespaces(server: FakeApiServer, store: KubeStore) -> None:
    other = "99999999-2222-3333-4444-555555555555"
    theirs = claim("c1", result("b"), namespace="shop", pods={"web-1": other})
    for path, item in ((SLICES, resource_slice("s", nic("a"), nic("b"))), (CLAIMS, one("a")), (CLAIMS, theirs)):
        server.put(path, item)
    put_network(server)
    put_pod(server, "c1")
    spec, made = pod_claims("c1")
    metadata = {"namespace": "shop", "name": "web-1", "uid": other}
    server.put(PODS, {"metadata": metadata, "spec": {"nodeName": "node-a", **spec}, "status": made})
    await eventually(lambda: store.pods.get(("web", "web-1")) and store.pods.get(("shop", "web-1")))
    for _ in range(2):
        for namespace, device in (("web", "id-a"), ("shop", "id-b")):
            pod = store.pods.get((namespace, "web-1"))
            assert pod is not None
            assert (await store.claims.allocated(pod)).devices == {VF: [device]}
            await eventually(functools.partial(store.claims.known, pod))


async def test_a_claim_that_is_not_reserved_for_the_pod_is_asked_for_each_time(
    server: FakeApiServer, store: KubeStore
) -> None:
    server.put(SLICES, resource_slice("s", nic("a")))
    server.put(CLAIMS, claim("c1", result("a")))
    put_network(server)
    put_pod(server, "c1")
    pod = await pod_of(store)
    for _ in range(2):
        assert (await store.claims.allocated(pod)).devices == {VF: ["id-a"]}
    assert store.claims.known(pod) is None


async def test_a_new_slice_is_seen_after_it_was_missed(server: FakeApiServer, store: KubeStore) -> None:
    # Without a network that needs devices, nothing is read ahead, which an ADD at the same time would share.
    server.put(CLAIMS, one("a"))
    put_pod(server, "c1")
    pod = await pod_of(store)
    assert (await store.claims.allocated(pod)).devices == {}
    server.put(SLICES, resource_slice("s", nic("a")))
    assert (await store.claims.allocated(pod)).devices == {VF: ["id-a"]}
    assert store.claims.known(pod) == await store.claims.allocated(pod)


async def test_devices_that_are_known_for_long_are_asked_for_again(
    server: FakeApiServer, store: KubeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may have published other attributes when the containers of an old pod are made anew."""
    arrange(server, SITUATIONS["one claim with one device"])
    pod = await pod_of(store)
    await eventually(lambda: store.claims.known(pod))
    server.put(SLICES, resource_slice("s", nic("a", "changed"), generation=2))
    assert (await store.claims.allocated(pod)).devices == {VF: ["id-a"]}
    later = time.monotonic() + deadlines.CLAIMS_KEPT_SECONDS
    monkeypatch.setattr(store.claims._kept, "_clock", lambda: later)
    assert store.claims.known(pod) is None
    assert (await store.claims.allocated(pod)).devices == {VF: ["changed"]}


async def test_slices_of_other_nodes_are_not_seen(server: FakeApiServer, store: KubeStore) -> None:
    for number in range(100):
        server.put(SLICES, resource_slice(f"s{number}", nic("a"), node=f"node-{number}"))
    arrange(server, SITUATIONS["one claim with one device"])
    pod = await pod_of(store)
    await eventually(lambda: store.claims.known(pod))
    selector = "fieldSelector=spec.nodeName%3Dnode-a"
    assert all(selector in path for _, path in server.requests if "/resourceslices" in path)


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "words"), [(403, "the verb get on resourceclaims"), (404, "Kubernetes 1.34")])
async def test_a_cluster_without_the_api_or_the_right_is_one_line_of_the_log(
    server: FakeApiServer, store: KubeStore, caplog: pytest.LogCaptureFixture, status: int, words: str
) -> None:
    server.fail(status, times=float("inf"), contains="/apis/resource.k8s.io/")
    put_network(server)
    put_pod(server, "c1", "c2")
    pod = await pod_of(store)
    for _ in range(2):
        found = await store.claims.allocated(pod)
        assert found.devices == {}
        assert [words in text for text in found.left_out] == [True, True]
    await eventually(lambda: not store.claims._reads._items)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert not [path for _, path in server.requests if "/resourceslices" in path]


async def test_an_api_server_that_is_away(server: FakeApiServer, store: KubeStore) -> None:
    arrange(server, SITUATIONS["one claim with one device"])
    pod = await pod_of(store)
    await eventually(lambda: store.claims.known(pod))
    server.fail(503, times=float("inf"))
    assert (await store.claims.allocated(pod)).devices == {VF: ["id-a"]}
    store.claims._kept.forget(pod.uid)
    with pytest.raises(DevicesUnavailableError, match="ResourceClaim web/c1 can't be read: .*503"):
        await store.claims.allocated(pod)


async def test_slices_that_must_not_be_read(server: FakeApiServer, store: KubeStore) -> None:
    server.fail(403, times=float("inf"), contains="/resourceslices")
    arrange(server, SITUATIONS["one claim with one device"])
    pod = await pod_of(store)
    with pytest.raises(DevicesUnavailableError, match="list on resourceslices"):
        await store.claims.allocated(pod)


@pytest.mark.parametrize("name", ["../../secrets/x", "", ".."])
async def test_a_name_that_would_be_another_path(server: FakeApiServer, store: KubeStore, name: str) -> None:
    put_network(server)
    put_pod(server, name or "..")
    pod = await pod_of(store)
    found = await store.claims.allocated(pod)
    assert "the name must consist of" in found.left_out[0]
    assert asked(server) == []


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"metadata":{},"status":{"allocation":7}}'])
def test_a_claim_that_is_none(body: bytes) -> None:
    with contextlib.suppress(*objects.DECODE_ERRORS):
        assert decode_claim(body) is None


def test_the_share_of_a_device_is_kept() -> None:
    item = claim("c1", result("a") | {"shareID": "s1"})
    found = decode_claim(json.dumps(item).encode())
    assert found is not None
    assert found.devices[0][1].share_id == "s1"
