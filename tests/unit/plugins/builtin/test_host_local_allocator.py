"""The order of addresses, on a dict in place of the directory, and invariants of any sequence of ADD and DEL."""

import ipaddress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from multus_daemon.plugins.builtin import host_local as plugin
from multus_daemon.plugins.builtin import host_local_config as config
from multus_daemon.spec.cni.errors import CniError


class DictLeases:
    """Leases of one container's interface in a dict that is shared by all."""

    def __init__(self, owners, marks, container_id, *, refuse=()):
        self.owners, self.marks, self.container_id, self.refuse = owners, marks, container_id, refuse

    @property
    def taken(self):
        return self.owners

    def refresh(self):
        return False

    def owned(self):
        return [address for address, owner in self.owners.items() if owner == self.container_id]

    def holder(self, address):
        return self.owners.get(address, "")

    def last_reserved(self, index):
        return self.marks.get(index, "")

    def reserve(self, address, index):
        if address in self.refuse:
            return False
        assert address not in self.owners
        self.owners[address] = self.container_id
        self.marks[index] = address
        return True

    def release(self, address):
        self.owners.pop(address, None)


class Node:
    def __init__(self, *sets, ips=(), **ipam):
        self.owners, self.marks = {}, {}
        self.sets = [[{"subnet": text} if isinstance(text, str) else text for text in item] for item in sets]
        self.ipam = ipam
        self.ips = list(ips)

    def add(self, container_id, *ips, refuse=()):
        fields = {"ipam": {"ranges": self.sets}, "runtimeConfig": {"ips": list(ips)}}
        settings = config.read(fields, name="n", cni_version="1.0.0")
        leases: Any = DictLeases(self.owners, self.marks, container_id, refuse=refuse)
        return [item.ip for item in plugin.allocate(settings, leases, container_id)]

    def delete(self, container_id):
        for address in DictLeases(self.owners, self.marks, container_id).owned():
            del self.owners[address]


def refused(node, *args, **kwargs):
    with pytest.raises(CniError) as caught:
        node.add(*args, **kwargs)
    assert caught.value.code == 999
    return caught.value.msg


def test_round_robin_and_wrap():
    node = Node(["10.0.0.0/29"])
    assert [node.add(name)[0] for name in "abc"] == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    node.delete("a")
    # A released address is used again only after the pool has been walked through.
    assert [node.add(name)[0] for name in "def"] == ["10.0.0.5", "10.0.0.6", "10.0.0.2"]


def test_exhaustion_names_the_ranges():
    node = Node(["10.0.0.0/30", "10.1.0.0/30"])
    assert [node.add(name)[0] for name in "ab"] == ["10.0.0.2", "10.1.0.2"]
    assert refused(node, "c") == (
        "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.2,10.1.0.1-10.1.0.2"
    )
    node.delete("a")
    assert node.add("c") == ["10.0.0.2"]


def test_the_last_address_can_be_given_again_when_it_is_the_only_one():
    node = Node(["10.0.0.0/30"])
    assert node.add("a") == ["10.0.0.2"]
    node.delete("a")
    assert node.add("b") == ["10.0.0.2"]


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("", "10.0.0.2"),
        ("10.0.0.254", "10.0.0.2"),
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.100", "10.0.0.101"),
        ("10.0.0.255", "10.0.0.2"),
        ("192.168.0.1", "10.0.0.2"),
        ("garbage", "10.0.0.2"),
        ("fd00::5", "10.0.0.2"),
    ],
)
def test_where_the_walk_begins(mark, expected):
    node = Node(["10.0.0.0/24"])
    node.marks[0] = mark
    assert node.add("a") == [expected]


def test_the_gateway_is_passed_over_in_each_range():
    node = Node([{"subnet": "10.0.0.0/29", "gateway": "10.0.0.3"}, {"subnet": "10.1.0.0/29", "rangeEnd": "10.1.0.2"}])
    got = [node.add(name)[0] for name in "abcdef"]
    assert got == ["10.0.0.1", "10.0.0.2", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.1.0.2"]
    refused(node, "g")


def test_a_range_of_only_its_gateway():
    node = Node([{"subnet": "10.0.0.0/29", "rangeStart": "10.0.0.1", "rangeEnd": "10.0.0.1"}])
    assert "no IP addresses available" in refused(node, "a")


def test_a_gateway_of_the_other_family_hides_nothing():
    # 10.0.0.2 and ::a00:2 are the same number.
    node = Node([{"subnet": "10.0.0.0/29", "gateway": "::a00:2"}])
    assert [node.add(name)[0] for name in "ab"] == ["10.0.0.1", "10.0.0.2"]


def test_a_huge_range_costs_nothing():
    node = Node(["fd00::/64"])
    assert [node.add(name)[0] for name in "ab"] == ["fd00::2", "fd00::3"]
    node.marks[0] = "fd00::ffff:ffff:ffff:ffff"
    assert node.add("c") == ["fd00::4"]


def test_one_address_from_each_set():
    node = Node(["10.0.0.0/24"], ["fd00::/64"], ["10.1.0.0/24"])
    assert node.add("a") == ["10.0.0.2", "fd00::2", "10.1.0.2"]
    assert node.marks == {0: "10.0.0.2", 1: "fd00::2", 2: "10.1.0.2"}


def test_a_second_add_is_refused():
    node = Node(["10.0.0.0/24"])
    node.add("a")
    assert refused(node, "a") == (
        "failed to allocate for range 0: 10.0.0.2 has been allocated to a, duplicate allocation is not allowed"
    )


def test_a_failed_add_takes_nothing_and_leaves_what_is_older():
    node = Node(["10.0.0.0/24"], ["10.1.0.0/30"])
    assert node.add("a") == ["10.0.0.2", "10.1.0.2"]
    # A request may give an interface more than one address of a set; then the second set has none left.
    before = dict(node.owners)
    assert "failed to allocate for range 1: 10.1.0.2 has been allocated to a" in refused(node, "a", "10.0.0.77")
    assert node.owners == before
    assert "failed to allocate for range 1: no IP addresses" in refused(node, "b")
    assert node.owners == before


def test_requested():
    node = Node(["10.0.0.0/24"], ["10.1.0.0/24"])
    assert node.add("a", "10.1.0.9", "10.0.0.7") == ["10.0.0.7", "10.1.0.9"]
    assert node.add("b", "10.1.0.10") == ["10.0.0.8", "10.1.0.10"]
    assert node.add("a", "10.1.0.20", "10.0.0.20") == ["10.0.0.20", "10.1.0.20"]


@pytest.mark.parametrize(
    ("ips", "message"),
    [
        (["10.0.0.1"], "failed to allocate for range 0: requested ip 10.0.0.1 is subnet's gateway"),
        (
            ["10.0.0.50"],
            "failed to allocate for range 0: requested IP address 10.0.0.50 is not available in range set "
            "10.0.0.1-10.0.0.254",
        ),
        (["10.9.0.5", "10.0.0.77"], "failed to allocate all requested IPs: 10.9.0.5"),
        (["10.0.0.77", "10.0.0.78", "10.0.0.77"], "failed to allocate all requested IPs: 10.0.0.78"),
    ],
)
def test_requested_refused(ips, message):
    node = Node(["10.0.0.0/24"])
    node.add("other", "10.0.0.50")
    before = dict(node.owners)
    assert refused(node, "a", *ips) == message
    assert node.owners == before


def test_an_address_that_somebody_took_past_the_lock_is_passed_over():
    node = Node(["10.0.0.0/24"])
    assert node.add("a", refuse=("10.0.0.2", "10.0.0.3")) == ["10.0.0.4"]


SUBNETS = st.sampled_from(["10.0.0.0/29", "10.0.0.0/30", "fd00::/125", "10.0.0.64/28"])


@st.composite
def range_sets(draw):
    network = ipaddress.ip_network(draw(SUBNETS))
    hosts = list(network)[1:-1]
    first, last = sorted((draw(st.sampled_from(hosts)), draw(st.sampled_from(hosts))))
    gateway = draw(st.sampled_from([*hosts, ipaddress.ip_address("192.168.0.1")]))
    return {"subnet": str(network), "rangeStart": str(first), "rangeEnd": str(last), "gateway": str(gateway)}


class Allocator(RuleBasedStateMachine):
    """ADD and DEL in any order against the simplest model: a list that is walked round and round."""

    def __init__(self):
        super().__init__()
        self.node = None
        self.names = 0

    @rule(spec=range_sets())
    def begin(self, spec):
        if self.node is not None:
            return
        self.node = Node([spec])
        first, last = (ipaddress.ip_address(spec[key]) for key in ("rangeStart", "rangeEnd"))
        everything = (first + step for step in range(int(last) - int(first) + 1))
        self.ring = [str(address) for address in everything if str(address) != spec["gateway"]]
        self.all = [str(first + step) for step in range(int(last) - int(first) + 1)]
        self.position = 0
        self.mine = {}

    @rule()
    def add(self):
        if self.node is None:
            return
        self.names += 1
        name = f"c{self.names}"
        order = self.ring[self.position :] + self.ring[: self.position]
        expected = next((address for address in order if address not in self.mine.values()), None)
        if expected is None:
            assert "no IP addresses available" in refused(self.node, name)
            return
        assert self.node.add(name) == [expected]
        self.mine[name] = expected
        self.position = (self.ring.index(expected) + 1) % len(self.ring)

    @rule(data=st.data())
    def delete(self, data):
        if self.node is None or not self.mine:
            return
        name = data.draw(st.sampled_from(sorted(self.mine)))
        self.node.delete(name)
        del self.mine[name]

    @rule(data=st.data())
    def request(self, data):
        if self.node is None:
            return
        self.names += 1
        wanted = data.draw(st.sampled_from(self.all))
        name = f"c{self.names}"
        if wanted not in self.ring or wanted in self.mine.values():
            refused(self.node, name, wanted)
            return
        assert self.node.add(name, wanted) == [wanted]
        self.mine[name] = wanted
        self.position = (self.ring.index(wanted) + 1) % len(self.ring)

    @invariant()
    def the_leases_are_those_of_the_model(self):
        if self.node is not None:
            assert self.node.owners == {address: name for name, address in self.mine.items()}


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(stateful_step_count=40, deadline=None)
