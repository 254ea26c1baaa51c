"""The built-in whereabouts below the plugins that call it, and the question for an address on a real segment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel import probe
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import whereabouts
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.plugin import Plugin
from multus_daemon.spec.addresses import Reservation
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni.errors import CniError, InternalError
from tests import calls
from tests.fakes.addresses import FakeAddressBook
from tests.netns import beside

RANGES = [{"range": "10.149.0.0/29"}, {"range": "fd00:149::/124"}]
CALLERS: dict[str, dict[str, Any]] = {
    "bridge": {"bridge": "lan0"},
    "dummy": {},
    "host-device": {"device": "spare0"},
    "ipvlan": {"master": "up0"},
    "macvlan": {"master": "up0"},
    # The gateway of whereabouts is of one family, and ptp needs one for each address.
    "ptp": {"ipam": {"ipRanges": RANGES[:1], "gateway": "10.149.0.6"}},
    "tap": {},
    "vlan": {"master": "up0", "vlanId": 7},
}

MADE = [
    pytest.param(caller, marks=[beside.needs_kind(caller)] if caller in ("dummy", "ipvlan", "macvlan", "vlan") else [])
    for caller in CALLERS
]
SEGMENTS = [pytest.param(name, marks=beside.needs_kind(name)) for name in ("bridge", "macvlan")]


@pytest.fixture(autouse=True)
def segment(host: Any) -> None:
    host.batch(
        "link add lan0 type bridge",
        "link set lan0 up",
        "link add up0 type veth peer name port0",
        "link set port0 master lan0",
        "link set port0 up",
        "link set up0 up",
        "link add spare0 type veth peer name spare1",
        "link set spare1 up",
    )


class Node:
    """The plugins of a node."""

    def __init__(self, book: FakeAddressBook) -> None:
        self.book = book

    def plugin(self, plugin_type: str, call: Invocation | None = None) -> Plugin:
        module = whereabouts if plugin_type == "whereabouts" else None
        options: dict[str, Any] = {"plugin_for": self.plugin, "addresses": self.book, "module": module}
        return Builtin(plugin_type, Path("/"), **options)

    def call(self, verb: str, netns: Any, caller: str, pod: str = "web", **ipam: Any) -> list[str]:
        fields = {"cniVersion": "1.1.0", "name": "lan", "type": caller, **CALLERS[caller]}
        fields["ipam"] = {"type": "whereabouts", "ipRanges": RANGES, **fields.get("ipam", {}), **ipam}
        args = f"IgnoreUnknown=1;K8S_POD_NAMESPACE=apps;K8S_POD_NAME={pod}"
        served = {caller: BUILT_IN, "whereabouts": BUILT_IN}
        made = Invocation(verb, f"id-{pod}", netns.path, "net1", args, "/opt/cni/bin", fields, served_by=served)
        return [ip.address for ip in calls.run(self.plugin(caller), made).ips]

    @property
    def held(self) -> list[str]:
        return sorted(str(item.address) for item in self.book.cluster.reservations.values())


@pytest.fixture
def node() -> Node:
    return Node(FakeAddressBook())


def addresses(netns: Any, ifname: str = "net1") -> list[str]:
    found = [link for link in netns.ip("addr", "show") if link["ifname"] == ifname]
    return [
        f"{item['local']}/{item['prefixlen']}"
        for link in found
        for item in link["addr_info"]
        if item["scope"] == "global"
    ]


@pytest.mark.parametrize("caller", MADE)
def test_the_interface_has_what_is_reserved(node: Node, netns: Any, caller: str) -> None:
    expected = ["10.149.0.1/29", "fd00:149::1/124"][: 1 if caller == "ptp" else 2]
    assert node.call("ADD", netns, caller) == expected
    assert addresses(netns) == expected
    assert node.held == [address.partition("/")[0] for address in expected]
    node.call("DEL", netns, caller)
    assert (addresses(netns), node.held) == ([], [])


@pytest.mark.parametrize("caller", MADE)
def test_an_interface_that_cannot_be_made_holds_no_address(node: Node, netns: Any, caller: str) -> None:
    """The route leads to nowhere, which the kernel says after the addresses are reserved."""
    with pytest.raises(CniError):
        node.call("ADD", netns, caller, routes=[{"dst": "10.0.0.0/8", "gw": "192.0.2.1"}])
    assert node.held == []
    assert ("create", "10.149.0.1") in node.book.calls


class Freed(FakeAddressBook):
    """A book that looks at the interface when an address is released."""

    netns: Any = None

    def release(self, owner: Any, podref: str) -> None:
        assert addresses(self.netns) == []
        super().release(owner, podref)


@pytest.mark.parametrize("caller", MADE)
def test_the_interface_goes_before_its_address(netns: Any, caller: str) -> None:
    book = Freed()
    book.netns = netns
    node = Node(book)
    node.call("ADD", netns, caller)
    node.call("DEL", netns, caller)
    assert book.calls[-1] == ("release", "id-web")


# --- who has an address ----------------------------------------------------------------------------------------------


def asked(netns: Any, address: str, seconds: float = 0.3) -> str:
    from ipaddress import ip_address

    with PodNetns(netns.path) as opened:
        return probe.neighbour(opened, "net1", ip_address(address), seconds)


def mac(netns: Any) -> str:
    (link,) = [link for link in netns.ip("link", "show") if link["ifname"] == "net1"]
    found: str = link["address"]
    return found


@pytest.mark.parametrize("caller", SEGMENTS)
def test_a_pod_answers_for_its_addresses(node: Node, make_netns: Any, caller: str) -> None:
    one, other = make_netns(), make_netns()
    node.call("ADD", one, caller)
    node.call("ADD", other, caller, "two")
    for address in ("10.149.0.1", "fd00:149::1"):
        assert asked(other, address, seconds=3) == mac(one)
    for address in ("10.149.0.2", "fd00:149::2", "10.149.0.3", "fd00:149::3"):
        assert asked(other, address) == ""


def test_without_an_interface_nobody_is_asked(netns: Any) -> None:
    assert asked(netns, "10.149.0.1") == ""


@pytest.mark.parametrize("caller", SEGMENTS)
def test_an_address_of_a_node_that_is_gone_is_taken_only_if_nobody_answers(make_netns: Any, caller: str) -> None:
    lost = Node(FakeAddressBook("lost"))
    first, second = make_netns(), make_netns()
    small = {"ipRanges": [{"range": "10.149.0.0/30"}]}
    lost.call("ADD", first, caller, "first", **small)
    lost.call("ADD", second, caller, "second", **small)
    here = Node(FakeAddressBook("here", lost.book.cluster))
    lost.book.cluster.gone = {"lost": "does not exist any more"}
    # The node is cut off: its first pod lives, the second does not.
    second.batch("link set net1 down")
    third, fourth = make_netns(), make_netns()
    assert here.call("ADD", third, caller, "third", **small) == ["10.149.0.2/30"]
    with pytest.raises(InternalError, match=r"1 by lost \(does not exist any more\)") as caught:
        here.call("ADD", fourth, caller, "fourth", **small)
    assert caught.value.details.startswith("still in use on the segment: 10.149.0.1")
    holders: dict[str, Reservation] = lost.book.cluster.reservations
    assert {name: item.podref for name, item in holders.items()} == {
        "10.149.0.1": "apps/first",
        "10.149.0.2": "apps/third",
    }
