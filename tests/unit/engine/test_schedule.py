"""Which networks go one after another, and the running of the others."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.cni import conf
from multus_daemon.cni.names import IfName
from multus_daemon.engine.schedule import SERIAL, backwards, in_order, predecessors
from multus_daemon.ports import Attachment


def network(ifname: str, *plugins: dict[str, Any], top: dict[str, Any] | None = None, **fields: Any) -> Attachment:
    """A network of its own name, a list of `plugins`; `top`: keys beside them; `fields`: of the attachment."""
    name = fields.pop("name", f"network-of-{ifname}")
    config = {"cniVersion": "1.0.0", "name": name, "plugins": list(plugins) or [{"type": "ptp"}], **(top or {})}
    return Attachment(
        name=f"web/{name}", config=conf.parse(json.dumps(config).encode()), ifname=IfName(ifname), **fields
    )


def single(ifname: str, **fields: Any) -> Attachment:
    config = {"cniVersion": "1.0.0", "name": f"network-of-{ifname}", "type": "ptp", **fields}
    return Attachment(name=ifname, config=conf.parse(json.dumps(config).encode()), ifname=IfName(ifname))


def apart(one: Attachment, other: Attachment) -> bool:
    """Whether the two go one after the other; the same in both orders."""
    found = {bool(predecessors(pair)[1]) for pair in ([one, other], [other, one])}
    assert len(found) == 1
    return found.pop()


def ipam(**fields: Any) -> dict[str, Any]:
    return {"type": "ptp", "ipam": {"type": "host-local", **fields}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (network("net1"), network("net2")),
        (network("net1", ipam(subnet="10.1.0.0/24")), network("net2", ipam(subnet="10.2.0.0/24"))),
        (network("net1", ipam(dataDir="/var/lib/a")), network("net2", ipam(dataDir="/var/lib/a"))),
        (
            network("net1", {"type": "macvlan", "master": "ens1"}),
            network("net2", {"type": "macvlan", "master": "ens2"}),
        ),
        (network("net1", {"type": "macvlan", "master": "ens1"}), network("net2", {"type": "bridge", "bridge": "br1"})),
        (network("net1", {"type": "bridge"}), network("net2", {"type": "macvlan"})),
        (network("net1", {"type": "sriov", "deviceID": "1"}), network("net2", {"type": "sriov", "deviceID": "2"})),
        (network("net1", resource_name="vendor/nic"), network("net2", resource_name="vendor/nic")),
        (network("net1"), network("net2", {"type": "x", "master": "net10"})),
        (network("net1"), network("net2", {"type": "x", "path": "/sys/my-net1"})),
        (single("net1", name="net2"), single("net2", name="net1")),
        (single("net1"), single("net2")),
        (single("net1"), single("net2", **{SERIAL: False})),
        (network("net1", ipam(gateway="10.1.0.1")), network("net2", ipam(gateway="10.1.0.1"))),
    ],
)
def test_side_by_side(one: Attachment, other: Attachment) -> None:
    assert not apart(one, other)


SLAVES = {"type": "bond", "linksInContainer": True, "links": [{"name": "net1"}, {"name": "net7"}]}


@pytest.mark.npwg("7.3")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        # On top of the other.
        (network("net1"), network("net2", {"type": "vlan", "master": "net1", "linkInContainer": True})),
        (network("net1"), network("net2", {"type": "macvlan", "Master": "net1.100"})),
        (network("net1"), network("net2", SLAVES)),
        (network("net1"), network("net2", {"type": "first"}, SLAVES)),
        (network("net1"), network("net2", {"type": "bond", "links": "net7,net1"})),
        (network("net1"), network("net2", {"type": "tuning", "sysctl": {"net.ipv4.conf.net1.rp_filter": "0"}})),
        (network("net1"), network("net2", {"type": "tuning", "sysctl": {"net/ipv4/conf/net1/rp_filter": "0"}})),
        (network("net1.5"), network("net2", {"type": "x", "args": {"cni": {"on": ["net1.5"]}}})),
        (network("a+b", name="odd"), network("net2", {"type": "x", "over": "a+b"})),
        (single("net1"), single("net2", master="net1")),
        # The same thing used.
        (network("net1", name="same"), network("net2", name="same")),
        (network("net1", {"type": "macvlan", "master": "ens1"}), network("net2", {"type": "ipvlan", "master": "ens1"})),
        (network("net1", {"type": "macvlan", "MASTER": "ens1"}), network("net2", {"type": "vlan", "master": "ens1"})),
        (network("net1", {"type": "macvlan"}), network("net2", {"type": "ipvlan", "master": ""})),
        (network("net1", {"type": "bridge"}), network("net2", {"type": "bridge", "bridge": "cni0"})),
        (network("net1", {"type": "ovs", "bridge": "br1"}), network("net2", {"type": "ovs", "bridge": "br1"})),
        (network("net1", {"type": "x", "deviceID": "03:02.1"}), network("net2", {"type": "y", "deviceID": "03:02.1"})),
        (network("net1", {"type": "vrf", "vrfname": "red"}), network("net2", {"type": "vrf", "vrfname": "red"})),
        (network("net1", {"type": "ptp"}, {"type": "sbr"}), network("net2", {"type": "ptp"}, {"type": "sbr"})),
        # Routes and addresses of the same prefix: the order decides which one counts.
        (
            network("net1", ipam(routes=[{"dst": "10.9.0.0/16"}])),
            network("net2", {"type": "ptp"}, {"type": "route-override", "addroutes": [{"dst": "10.9.0.0/16"}]}),
        ),
        (network("net1", ipam(routes=[{"dst": "::/0"}])), network("net2", {"type": "x", "isDefaultGateway": True})),
        (network("net1", ipam(subnet="10.1.0.0/24")), network("net2", ipam(addresses=[{"address": "10.1.0.9/24"}]))),
        (network("net1", ipam(subnet="10.1.0.0/24")), network("net2", capability_args={"ips": ["10.1.0.9/24"]})),
        (network("net1", ipam(subnet="2001:DB8::/64")), network("net2", ipam(range="2001:db8:0::7/64"))),
        # What nothing may run beside.
        (network("net1", cluster_network=True), network("net2")),
        (network("eth0", auxiliary=True), network("net2")),
        (network("net1"), network("net2", top={SERIAL: True})),
        (network("net1"), network("net2", top={"Multus.io/Serial": "yes"})),
        (network("net1"), network("net2", {"type": "a"}, {"type": "b", SERIAL: True})),
        (single("net1"), single("net2", **{SERIAL: True})),
    ],
)  # fmt: skip
def test_one_after_the_other(one: Attachment, other: Attachment) -> None:
    assert apart(one, other)


def test_the_graph_of_a_whole_pod() -> None:
    pod = [
        network("eth0", cluster_network=True),
        network("net1", {"type": "sriov", "deviceID": "1"}),
        network("net2", {"type": "sriov", "deviceID": "2"}),
        network("net3", {"type": "bond", "links": [{"name": "net1"}, {"name": "net2"}]}),
        network("net4"),
        network("eth0", name="aux", auxiliary=True),
    ]
    before = predecessors(pod)
    assert tuple(map(set, before)) == (set(), {0}, {0}, {0, 1, 2}, {0}, {0, 1, 2, 3, 4})
    # In reverse: the auxiliary chain is number 0, the cluster network the last.
    assert tuple(map(set, backwards(before))) == (set(), {0}, {0}, {0, 2}, {0, 2}, {0, 1, 2, 3, 4})


def test_long_texts_of_networks_are_not_kept() -> None:
    tracemalloc.start()
    try:
        predecessors([network("net1"), network("net2")])
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            predecessors([network("net1", ipam(dataDir=f"/{number}/{'a' * 100_000}")), network("net2")])
        assert tracemalloc.get_traced_memory()[0] - before < 1_000_000
    finally:
        tracemalloc.stop()


def test_none() -> None:
    assert predecessors([]) == backwards([]) == ()


# --- the relation, and its running -----------------------------------------------------------------------------------

NAMES = [f"net{number}" for number in range(6)]
OBJECTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["ptp", "macvlan", "sbr"])},
    optional={
        "master": st.sampled_from([*NAMES, "ens1", "ens2"]),
        "links": st.lists(st.sampled_from(NAMES).map(lambda name: {"name": name}), max_size=2),
        SERIAL: st.booleans(),
    },
)


@st.composite
def pods(draw: st.DrawFn) -> list[Attachment]:
    return [
        network(name, *draw(st.lists(OBJECTS, min_size=1, max_size=2)), cluster_network=number == 0)
        for number, name in enumerate(NAMES[: draw(st.integers(0, len(NAMES)))])
    ]


@given(pods())
def test_only_what_is_earlier_comes_before_and_backwards_mirrors_it(pod: list[Attachment]) -> None:
    before = predecessors(pod)
    assert all(earlier < later for later, found in enumerate(before) for earlier in found)
    last = len(pod) - 1
    mirrored = {(last - later, last - earlier) for later, found in enumerate(before) for earlier in found}
    assert {(one, other) for other, found in enumerate(backwards(before)) for one in found} == mirrored
    assert backwards(backwards(before)) == before


RELATIONS = st.integers(0, 8).flatmap(
    lambda size: st.tuples(
        *(st.frozensets(st.integers(0, max(0, number - 1)), max_size=number) for number in range(size))
    )
)


@given(before=RELATIONS, at_once=st.integers(1, 4), failing=st.frozensets(st.integers(0, 7)), goes_on=st.booleans())
async def test_whatever_runs_keeps_the_order_and_the_bound(
    before: tuple[frozenset[int], ...], at_once: int, failing: frozenset[int], goes_on: bool
) -> None:
    running: set[int] = set()
    over: list[int] = []
    begun: list[int] = []

    async def work(number: int) -> None:
        assert before[number] <= set(over)
        assert goes_on or not failing & set(over), "begun after a failure"
        begun.append(number)
        running.add(number)
        assert len(running) <= at_once
        for _ in range(number % 3 * 5 + 1):
            await asyncio.sleep(0)
        running.remove(number)
        over.append(number)
        if number in failing:
            raise ValueError(str(number))

    failures = await in_order(work, before, at_once=at_once, patience=None if goes_on else 60)
    assert not running
    assert sorted(over) == sorted(begun)
    assert list(failures) == sorted(failing & set(over))
    assert all(str(error) == str(number) for number, error in failures.items())
    if goes_on or not failing & set(range(len(before))):
        assert len(over) == len(before)
    if at_once == 1:
        assert begun == sorted(begun)


def blocked(numbers: set[int], gate: asyncio.Event, ended: list[int]) -> Any:
    """Work of which `numbers` wait for `gate`, and number 9 fails; `ended`: which have come to an end of any kind."""

    async def work(number: int) -> None:
        try:
            if number == 9:
                raise ValueError("9")
            if number in numbers:
                await gate.wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(number)

    return work


async def test_after_a_failure_the_others_come_to_their_end() -> None:
    gate, ended = asyncio.Event(), list[int]()
    running = asyncio.create_task(in_order(blocked({0, 1}, gate, ended), [()] * 10, at_once=10, patience=60))
    await asyncio.sleep(0.05)
    assert not running.done()
    gate.set()
    assert list(await running) == [9]
    assert sorted(ended) == list(range(10))


async def test_after_the_patience_they_are_cancelled_and_waited_for() -> None:
    gate, ended = asyncio.Event(), list[int]()
    failures = await in_order(blocked({0, 1}, gate, ended), [()] * 10, at_once=10, patience=0.05)
    assert list(failures) == [9]
    assert sorted(ended) == list(range(10))


async def test_cancelling_ends_all_first_however_often() -> None:
    gate, ended = asyncio.Event(), list[int]()
    running = asyncio.create_task(in_order(blocked({0, 1, 2}, gate, ended), [()] * 6, at_once=3, patience=60))
    await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == [0, 1, 2]


async def test_what_fails_while_it_is_cancelled_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def work(number: int) -> None:
        if number:
            raise ValueError("first")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("ended") from None

    failures = await in_order(work, [(), ()], at_once=2, patience=0.01)
    assert [str(error) for error in failures.values()] == ["first"]
    assert caplog.records == []


async def test_one_that_cancels_itself_is_no_success() -> None:
    async def work(number: int) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await in_order(work, [(), ()], at_once=2)
