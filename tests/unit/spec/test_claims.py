"""The devices of ResourceClaims, from the values that the API gives."""

from __future__ import annotations

import pytest

from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Attachment, ClaimedDevice, ExtendedClaim, Pod
from multus_daemon.spec.claims import Pools, ResourceClaim, ResourceSlice, SliceDevice
from multus_daemon.spec.cni import conf, result
from multus_daemon.spec.cni.names import IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Interface, IpConfig, Result

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
    first = Allocation({VF: ["c", "a"], "x": ["1"]}, left_out=("one",))
    second = Allocation({VF: ["b", "a"]}, {key: device("d")}, left_out=("two",))
    assert claims.merged(first, second) == Allocation(
        {VF: ["a", "b", "c"], "x": ["1"]}, {key: device("d")}, left_out=("one", "two")
    )


# --- reports of devices ----------------------------------------------------------------------------------------------


def attachment(ifname: str, claimed: ClaimedDevice | None, found: Result | None) -> Attachment:
    config = conf.parse(b'{"cniVersion":"1.0.0","name":"n","type":"vf"}')
    return Attachment("web/n", config, IfName(ifname), result=found, claimed=claimed)


RESULT = result.from_object(
    {
        "interfaces": [{"name": "host0"}, {"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/x"}],
        "ips": [{"address": "192.0.2.7/24", "interface": 1}, {"address": "2001:DB8:0::7/64", "interface": 1}],
    },
    "1.0.0",
)


def test_a_report_has_what_the_plugin_has_reported() -> None:
    item = attachment("net1", device("d"), RESULT)
    other = attachment("net2", None, RESULT)
    (report,) = claims.reports([item, other], [item, other], 1_700_000_000)
    assert (report.claim, report.claim_uid) == ("c1", "uid-c1")
    assert report.entries == (
        {
            "driver": "nic.example.com",
            "pool": "pool",
            "device": "d",
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "NetworkDeviceReady",
                    "message": "attached to network web/n",
                    "lastTransitionTime": "2023-11-14T22:13:20Z",
                }
            ],
            "networkData": {
                "interfaceName": "net1",
                "hardwareAddress": "02:00:00:00:00:01",
                "ips": ["192.0.2.7/24", "2001:db8::7/64"],
            },
        },
    )


def test_a_report_of_one_of_two_interfaces() -> None:
    two = Result(
        interfaces=(Interface("net1", "m1", sandbox="/x"), Interface("net1.5", "m2", sandbox="/x")),
        ips=(IpConfig("192.0.2.7/24", interface=0), IpConfig("192.0.2.8/24", interface=1)),
    )
    item = attachment("net1", device("d"), two)
    assert claims.reports([item], [item], 0)[0].entries[0]["networkData"]["ips"] == ["192.0.2.7/24"]


def test_a_report_without_an_interface_and_with_many_addresses() -> None:
    ips = tuple(IpConfig(f"192.0.2.{number}/24") for number in range(20))
    shared = ClaimedDevice("c1", "uid-c1", *POOL, "d", "share")
    item = attachment("net1", shared, Result(ips=ips))
    entry = claims.reports([item], [item], 0)[0].entries[0]
    assert entry["networkData"] == {"interfaceName": "net1", "ips": [ip.address for ip in ips[:16]]}
    assert entry["shareID"] == "share"


def test_only_claims_that_have_changed_are_reported_with_all_their_devices() -> None:
    other = ClaimedDevice("c2", "uid-c2", *POOL, "e")
    first, second, third = (
        attachment(name, claimed, RESULT)
        for name, claimed in (("net1", device("d")), ("net2", device("f")), ("net3", other))
    )
    (report,) = claims.reports([second], [first, second, third], 0)
    assert [item["device"] for item in report.entries] == ["d", "f"]
    assert claims.reports([third], [first], 0) == [claims.DeviceReport("c2", "uid-c2", ())]
    unfinished = attachment("net1", device("d"), None)
    assert claims.reports([unfinished], [unfinished], 0)[0].entries == ()
