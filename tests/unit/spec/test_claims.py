"""The devices of ResourceClaims, from the values that the API gives."""

from __future__ import annotations

import pytest

from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, ClaimedDevice, ExtendedClaim, Pod
from multus_daemon.spec.claims import Pools, ResourceClaim, ResourceSlice, SliceDevice
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid

POD = Pod(Namespace("web"), PodName("p1"), PodUid("u1"))
VF = "vendor.com/vf"
POOL = ("nic.example.com", "pool")


def device(name: str) -> ClaimedDevice:
    return ClaimedDevice("c1", "uid-c1", *POOL, name)


def part(name: str, generation: int, slices: int, *devices: str) -> ResourceSlice:
    return ResourceSlice(name, POOL, generation, slices, {item: SliceDevice(f"{item}@{name}", VF) for item in devices})


@pytest.mark.parametrize(
    ("parts", "expected", "is_complete"),
    [
        ([], None, False),
        ([part("a", 1, 1, "d")], "d@a", True),
        ([part("a", 1, 2, "d")], "d@a", False),
        ([part("a", 1, 2, "d"), part("b", 1, 2)], "d@a", True),
        # The newest generation is whole: what it lacks is gone.
        ([part("a", 1, 1, "d"), part("b", 2, 1, "d")], "d@b", True),
        ([part("b", 2, 1, "d"), part("a", 1, 1, "d")], "d@b", True),
        ([part("a", 1, 1, "d"), part("b", 2, 1)], None, True),
        ([part("a", 1, 1, "d"), part("b", 2, 2), part("c", 2, 2)], None, True),
        # It is being published.
        ([part("a", 1, 1, "d"), part("b", 2, 2)], "d@a", False),
        ([part("a", 1, 1, "d"), part("b", 2, 2, "d")], "d@b", False),
    ],
)
def test_the_newest_generation_of_a_pool_counts(
    parts: list[ResourceSlice], expected: str | None, is_complete: bool
) -> None:
    for order in (parts, parts[::-1]):
        pools = Pools(order)
        found = pools.device(device("d"))
        assert (found and found.device_id) == expected
        assert pools.is_complete(POOL) is is_complete
        claim = ResourceClaim("c1", "uid-c1", (("r", device("d")),))
        assert claims.unknown_pools([claim], pools) == (set() if is_complete or expected else {POOL})


def test_the_names_of_a_pods_claims_each_once() -> None:
    pod = Pod(
        *(POD.namespace, POD.name, POD.uid),
        claims={"own": ("p1-own",), "template": ("p1-own", "p1-other"), "shared": ("team",)},
        extended_claim=ExtendedClaim("p1-extended", ()),
    )
    assert claims.names_of(pod) == ["p1-own", "p1-other", "team", "p1-extended"]
    assert claims.names_of(POD) == []


def test_both_sources_of_devices() -> None:
    key = (VF, "b")
    first = Allocation({VF: ["c", "a"], "x": ["1"]}, {}, ("one",))
    second = Allocation({VF: ["b", "a"]}, {key: device("d")}, ("two",))
    assert claims.merged(first, second) == Allocation(
        {VF: ["a", "b", "c"], "x": ["1"]}, {key: device("d")}, ("one", "two")
    )
