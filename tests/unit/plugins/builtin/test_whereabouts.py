"""whereabouts: the configuration, the choice, undo, what an exhausted range does."""

from __future__ import annotations

import ipaddress
import json
import random
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel import probe
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import whereabouts
from multus_daemon.plugins.builtin import whereabouts_config as config
from multus_daemon.plugins.builtin.contract import AddressTakenError, LeftToBinary
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.addresses import Address, Owner, Reservation
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni.errors import (
    ChangedError,
    CniError,
    InternalError,
    IoFailureError,
    PluginNotAvailableError,
    TryAgainLaterError,
    UnsupportedFieldError,
)
from multus_daemon.spec.ports import StoreUnavailableError
from tests import calls
from tests.fakes.addresses import Cluster, FakeAddressBook

SMALL = {"range": "10.9.0.0/29"}
AWAY = StoreUnavailableError("the API server does not answer", "look at it")


class Node:
    """A node of a cluster."""

    def __init__(self, root: Path, book: FakeAddressBook | None) -> None:
        self.root, self.book, self.claim, self.server = root, book, "", "/opt/cni/bin/whereabouts"
        self.builtin = Builtin("whereabouts", root, addresses=book, module=whereabouts)

    def invocation(self, verb: str, pod: str, ipam: dict[str, Any] = SMALL, extra: str = "", **top: Any) -> Invocation:
        fields = {
            "cniVersion": "1.1.0",
            "name": "lan",
            "type": "macvlan",
            "ipam": {"type": "whereabouts", **ipam},
            **top,
        }
        args = f"IgnoreUnknown=1;K8S_POD_NAMESPACE=apps;K8S_POD_NAME={pod};X=y{extra}"
        return Invocation(
            verb,
            f"id-{pod}",
            "/run/netns/x",
            "net1",
            args,
            "/opt/cni/bin",
            fields,
            network="apps/lan",
            address_claim=self.claim,
            served_by={"whereabouts": self.server},
        )

    def call(self, verb: str, pod: str = "web", ipam: dict[str, Any] = SMALL, **top: Any) -> list[str]:
        result = calls.run(self.builtin, self.invocation(verb, pod, ipam, **top))
        return [ip.address for ip in result.ips]

    def file(self, name: str, **keys: Any) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(keys))


@pytest.fixture
def book() -> FakeAddressBook:
    return FakeAddressBook()


@pytest.fixture
def node(tmp_path: Path, book: FakeAddressBook) -> Node:
    return Node(tmp_path, book)


def held(book: FakeAddressBook) -> list[str]:
    return sorted(book.cluster.reservations)


# --- ADD and DEL -----------------------------------------------------------------------------------------------------


def test_the_lowest_free_address_with_one_question(node: Node, book: FakeAddressBook) -> None:
    assert [node.call("ADD", f"web-{number}") for number in range(3)] == [
        ["10.9.0.1/29"],
        ["10.9.0.2/29"],
        ["10.9.0.3/29"],
    ]
    assert book.calls.count(("begin",)) == 3
    assert len(book.calls) == 6
    node.call("DEL", "web-1")
    assert held(book) == ["10.9.0.1", "10.9.0.3"]
    assert node.call("ADD", "web-9") == ["10.9.0.2/29"]
    one = book.cluster.reservations["10.9.0.2"]
    assert (one.podref, one.owner, one.node) == ("apps/web-9", Owner("id-web-9", "net1", "lan"), "here")
    assert (one.network, one.range, one.scope) == ("apps/lan", "10.9.0.0/29", "")


def test_both_families_fixed_addresses_routes_and_dns(node: Node) -> None:
    ipam = {
        "ipRanges": [{"range": "10.9.0.0/16"}, {"range": "fd00:9::/112"}],
        "addresses": [{"address": "192.0.2.9/24", "gateway": "192.0.2.1"}],
        "gateway": "10.9.0.1",
        "routes": [{"dst": "10.0.0.0/8"}],
        "dns": {"nameservers": ["10.9.0.53"]},
    }
    result = calls.run(node.builtin, node.invocation("ADD", "web", ipam, ";IP=198.51.100.7/24;GATEWAY=198.51.100.1"))
    assert [(ip.address, ip.gateway) for ip in result.ips] == [
        ("10.9.0.1/16", "10.9.0.1"),
        ("fd00:9::1/112", "10.9.0.1"),
        ("192.0.2.9/24", "192.0.2.1"),
        ("198.51.100.7/24", "198.51.100.1"),
    ]
    assert [route.dst for route in result.routes] == ["10.0.0.0/8"]
    assert result.dns.nameservers == ("10.9.0.53",)


def test_sixteen_ranges(node: Node, book: FakeAddressBook) -> None:
    many = {"ipRanges": [{"range": f"10.{number}.0.0/28"} for number in range(16)]}
    assert node.call("ADD", ipam=many) == [f"10.{number}.0.1/28" for number in range(16)]
    node.call("DEL", ipam=many)
    assert held(book) == []


def test_a_network_that_is_attached_again_keeps_its_address(node: Node, book: FakeAddressBook) -> None:
    """Its release may still wait for the API server."""
    assert node.call("ADD", "a") == ["10.9.0.1/29"]
    assert node.call("ADD", "b") == ["10.9.0.2/29"]
    assert node.call("ADD", "a") == ["10.9.0.1/29"]
    assert book.calls[-1] == ("create", "10.9.0.1")


def test_without_a_range_nobody_is_asked(node: Node, book: FakeAddressBook) -> None:
    assert node.call("ADD", ipam={"addresses": [{"address": "192.0.2.9/24"}]}) == ["192.0.2.9/24"]
    node.call("STATUS", ipam={})
    assert not book.calls


def test_a_failure_frees_what_the_other_ranges_have_given(node: Node, book: FakeAddressBook) -> None:
    book.fail_at(3, AWAY)
    with pytest.raises(TryAgainLaterError, match="no address can be reserved now: the API server") as caught:
        node.call("ADD", ipam={"ipRanges": [SMALL, {"range": "fd00::/64"}]})
    assert caught.value.remedy == "look at it"
    assert held(book) == []
    assert book.calls[-1] == ("release", "id-web")


def test_an_address_that_another_node_took_meanwhile(tmp_path: Path, node: Node, book: FakeAddressBook) -> None:
    other = Node(tmp_path, FakeAddressBook("other", book.cluster))
    assert other.call("ADD", "other") == ["10.9.0.1/29"]
    book.stale = {int(ipaddress.ip_address("10.9.0.1"))}
    (address,) = node.call("ADD")
    assert book.calls[1] == ("create", "10.9.0.1")
    assert address != "10.9.0.1/29"
    assert book.cluster.reservations["10.9.0.1"].podref == "apps/other"


def test_what_the_binary_has_in_its_pool_is_passed_over(node: Node, book: FakeAddressBook) -> None:
    entry = Reservation(ipaddress.ip_address("10.9.0.1"), "", "apps/old", Owner("", "net1", ""))
    book.cluster.pools["10.9.0.0-29"] = {int(entry.address): entry}
    assert node.call("ADD") == ["10.9.0.2/29"]


def test_the_last_address_of_a_pod_if_it_is_free(node: Node, book: FakeAddressBook) -> None:
    book.lasts["apps/web", "net1"] = ipaddress.ip_address("10.9.0.5")
    assert node.call("ADD") == ["10.9.0.5/29"]
    # A pod of the same name on another node may still live: never shared.
    there = FakeAddressBook("other", book.cluster)
    there.lasts = book.lasts
    twin = Node(node.root, there)
    fields = node.invocation("ADD", "web")
    result = calls.run(twin.builtin, Invocation(**{**vars(fields), "container_id": "other"}))
    assert [ip.ip for ip in result.ips] == ["10.9.0.1"]


def test_an_address_cools_while_another_is_free(node: Node, book: FakeAddressBook) -> None:
    book.cooling = {ipaddress.ip_address(f"10.9.0.{number}") for number in (1, 2, 4, 5, 6)}
    assert node.call("ADD", "a") == ["10.9.0.3/29"]
    assert node.call("ADD", "b") == ["10.9.0.1/29"]


def test_networks_with_a_name_have_addresses_of_their_own(node: Node, book: FakeAddressBook) -> None:
    assert node.call("ADD", "a", {**SMALL, "network_name": "red"}) == ["10.9.0.1/29"]
    assert node.call("ADD", "b", {**SMALL, "network_name": "blue"}) == ["10.9.0.1/29"]
    assert node.call("ADD", "c", {**SMALL, "enable_overlapping_ranges": False}) == ["10.9.0.1/29"]
    assert node.call("ADD", "d", {"range": "10.9.0.0/24", "enable_overlapping_ranges": False}) == ["10.9.0.1/24"]
    # By the pool, as in the binary: two networks with one range are one.
    assert node.call("ADD", "e", {**SMALL, "enable_overlapping_ranges": False}) == ["10.9.0.2/29"]
    assert node.call("ADD", "f") == ["10.9.0.1/29"]
    assert "blue-10.9.0.1" in held(book)


def test_a_range_of_which_everything_is_excluded_does_not_advise_to_delete_pods(node: Node) -> None:
    with pytest.raises(InternalError, match=r"no address in range .*: ipam\.exclude takes all of it") as caught:
        node.call("ADD", "a", {"range": "10.9.0.0/24", "exclude": ["10.9.0.0/24"]})
    assert "'exclude'" in caught.value.remedy


def test_a_node_without_the_right_leaves_networks_to_the_binary(node: Node, book: FakeAddressBook) -> None:
    call = node.invocation("ADD", "web", SMALL)
    assert node.builtin.unsupported(call) == ""
    book.refusal = "403 Forbidden"
    assert node.builtin.unsupported(call) == "no right to reserve addresses: 403 Forbidden"
    assert isinstance(node.builtin.unsupported(call), LeftToBinary)
    # Without a binary the built-in says why.
    assert node.builtin.refusal(call) is None
    book.refusal = ""
    assert node.builtin.unsupported(call) == ""


def test_only_an_add_waits_until_the_right_is_known(
    node: Node, book: FakeAddressBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "ask", lambda: setattr(book, "refusal", "403 Forbidden"))
    assert node.builtin.unsupported(node.invocation("DEL", "web", SMALL)) == ""
    assert "403" in node.builtin.unsupported(node.invocation("ADD", "web", SMALL))


def test_del_without_a_daemon_or_a_configuration(tmp_path: Path, node: Node, book: FakeAddressBook) -> None:
    Node(tmp_path, None).call("DEL")
    node.call("ADD")
    node.call("DEL", ipam={"range": "nonsense", "typo": 1})
    assert held(book) == []


def test_a_release_that_cannot_be_noted(node: Node, book: FakeAddressBook) -> None:
    node.call("ADD")
    book.fail_at(3, OSError(28, "No space left on device"))
    with pytest.raises(IoFailureError, match="No space left"):
        node.call("DEL")
    assert node.builtin.keeps(node.invocation("DEL", "web"))
    node.call("DEL")
    assert not node.builtin.keeps(node.invocation("DEL", "web"))


# --- claims --------------------------------------------------------------------------------------------------------


@pytest.mark.npwg("8-8.1")
def test_a_claim_holds_the_address_and_its_pods_borrow_it(tmp_path: Path, book: FakeAddressBook) -> None:
    """Two pods of a machine that moves have it at once, and no others."""
    here, there = Node(tmp_path, book), Node(tmp_path, FakeAddressBook("there", book.cluster))
    here.claim = there.claim = "apps/vm-a.lan"
    assert here.call("ADD", "vm-a-1") == ["10.9.0.1/29"]
    assert there.call("ADD", "vm-a-2") == ["10.9.0.1/29"]
    assert book.cluster.reservations["10.9.0.1"].claim == "apps/vm-a.lan"
    here.call("DEL", "vm-a-1")
    assert held(book) == ["10.9.0.1"]
    there.call("DEL", "vm-a-2")
    assert held(book) == ["10.9.0.1"]
    assert here.call("ADD", "vm-a-3") == ["10.9.0.1/29"]
    here.claim = "apps/vm-b.lan"
    assert here.call("ADD", "vm-b-1") == ["10.9.0.2/29"]
    here.claim = ""
    assert here.call("ADD", "web") == ["10.9.0.3/29"]


def test_what_a_claim_holds_is_not_taken_from_a_node_that_is_gone(
    tmp_path: Path, node: Node, book: FakeAddressBook, probed: dict[str, str]
) -> None:
    dead = Node(tmp_path, FakeAddressBook("dead", book.cluster))
    dead.claim = "apps/vm"
    ipam = {**SMALL, "range_end": "10.9.0.1"}
    dead.call("ADD", "vm", ipam)
    book.cluster.gone = {"dead": "does not exist any more"}
    with pytest.raises(InternalError, match="no free address"):
        node.call("ADD", "web", ipam)
    assert probed == {}


# --- requests of the pod ---------------------------------------------------------------------------------------------


def test_addresses_of_the_annotation(node: Node, book: FakeAddressBook) -> None:
    asked = {"runtimeConfig": {"ips": ["10.9.0.4/29", "fd00::9"]}}
    ipam = {"ipRanges": [SMALL, {"range": "fd00::/64"}]}
    assert node.call("ADD", "a", ipam, **asked) == ["10.9.0.4/29", "fd00::9/64"]
    with pytest.raises(AddressTakenError, match=r"10.9.0.4 is not available") as caught:
        node.call("ADD", "b", ipam, **asked)
    assert "apps/a has it, on node here" in str(caught.value)
    assert held(book) == ["10.9.0.4", "fd00--9"]
    with pytest.raises(InternalError, match=r"requested IPs: 10.8.0.4") as refused:
        node.call("ADD", "c", ipam, args={"cni": {"ips": ["10.8.0.4"]}})
    assert "10.9.0.0/29" in refused.value.remedy
    with pytest.raises(CniError, match="invalid IP address"):
        node.call("ADD", "c", ipam, args={"cni": {"ips": ["x"]}})
    assert held(book) == ["10.9.0.4", "fd00--9"]


def test_what_an_add_would_take_is_foreseen_and_nothing_is_reserved(node: Node, book: FakeAddressBook) -> None:
    def foreseen(**keys: Any) -> str:
        return node.builtin.foresee(node.invocation("ADD", "web", **keys))

    node.call("ADD", "other")
    before = held(book)
    assert foreseen() == "10.9.0.2"
    ranges = {"ipRanges": [SMALL, {"range": "fd00::/64"}]}
    assert foreseen(ipam=ranges) == "10.9.0.2, fd00::1"
    ips = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": ["10.9.0.1/29"]}}
    assert foreseen(**ips) == "10.9.0.1, which pod apps/other holds"
    assert held(book) == before
    for number in range(5):
        node.call("ADD", f"p{number}")
    assert foreseen() == "none is free in range 10.9.0.0/29 (10.9.0.1-10.9.0.6)"
    book.fail_at(len(book.calls) + 1, AWAY)
    with pytest.raises(TryAgainLaterError, match="the API server does not answer"):
        foreseen()


def test_a_call_without_a_pod(node: Node, book: FakeAddressBook) -> None:
    call = node.invocation("ADD", "web")
    with pytest.raises(CniError, match="no pod name"):
        calls.run(node.builtin, Invocation(**{**vars(call), "args": ""}))
    assert not book.calls


# --- CHECK, STATUS ---------------------------------------------------------------------------------------------------


def test_check_and_differences(node: Node, book: FakeAddressBook) -> None:
    # The binary has attached the pod.
    node.call("CHECK")
    node.server = BUILT_IN
    with pytest.raises(ChangedError, match="no address is reserved"):
        node.call("CHECK")
    node.call("ADD")
    node.call("CHECK")
    served = node.invocation("DEL", "web")
    with PodNetns("") as netns:
        assert node.builtin.differences(served, netns) == []
        book.problems[Owner("id-web", "net1", "lan")] = "10.9.0.1 is apps/thief's, too"
        assert [item.text for item in node.builtin.differences(served, netns) or ()] == [
            "10.9.0.1 is apps/thief's, too"
        ]
    with pytest.raises(ChangedError, match="thief"):
        node.call("CHECK")


def test_status(node: Node, book: FakeAddressBook) -> None:
    node.call("STATUS")
    book.fail_at(2, AWAY)
    with pytest.raises(PluginNotAvailableError, match="does not answer"):
        node.call("STATUS")


# --- an exhausted range ----------------------------------------------------------------------------------------------


def fill(root: Path, cluster: Cluster, *nodes: str) -> None:
    for number, name in enumerate(nodes):
        Node(root, FakeAddressBook(name, cluster)).call("ADD", f"{name}-{number}")


def test_an_exhausted_range_says_who_has_it(tmp_path: Path, node: Node, book: FakeAddressBook) -> None:
    fill(tmp_path, book.cluster, "a", "a", "a", "b", "b", "here")
    with pytest.raises(InternalError, match=r"^no free address in range 10.9.0.0/29 \(10.9.0.1-10.9.0.6\)") as caught:
        node.call("ADD")
    assert "6 of 6 are held: 3 by a, 2 by b, 1 by here" in caught.value.msg
    assert "kubectl multus addresses" in caught.value.remedy


def test_in_a_full_range_what_the_node_has_freed_is_tried_before_the_watch_says_so(
    tmp_path: Path, node: Node, book: FakeAddressBook
) -> None:
    fill(tmp_path, book.cluster, "a", "a", "a", "a", "here", "a")
    node.call("DEL", "here-4")
    freed = ipaddress.ip_address("10.9.0.5")
    # Another node has taken the one that was freed before.
    book.late, book.cooling = {int(freed)}, {ipaddress.ip_address("10.9.0.2"), freed}
    assert node.call("ADD", "b") == ["10.9.0.5/29"]
    with pytest.raises(InternalError, match="6 of 6 are held"):
        node.call("ADD", "c")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The addresses that somebody answers for; asked for each address that is probed."""
    answers: dict[str, str] = {}

    def neighbour(_netns: PodNetns, ifname: str, address: Address, seconds: float) -> str:
        return answers.setdefault(str(address), "")

    monkeypatch.setattr(random, "sample", lambda items, number: items[:number])
    monkeypatch.setattr(probe, "neighbour", neighbour)
    return answers


def test_addresses_of_a_node_that_is_gone_only_if_none_is_free(
    tmp_path: Path, node: Node, book: FakeAddressBook, probed: dict[str, str]
) -> None:
    fill(tmp_path, book.cluster, "live", "dead", "dead", "dead", "live")
    book.cluster.gone = {"dead": "does not exist any more"}
    assert node.call("ADD", "a") == ["10.9.0.6/29"]
    assert probed == {}
    assert node.call("ADD", "b") == ["10.9.0.2/29"]
    probed["10.9.0.3"] = "02:00:00:00:00:07"
    assert node.call("ADD", "c") == ["10.9.0.4/29"]
    assert list(probed) == ["10.9.0.2", "10.9.0.3", "10.9.0.4"]
    with pytest.raises(InternalError, match=r"1 by dead \(does not exist any more\)") as caught:
        node.call("ADD", "d")
    assert caught.value.details == "still in use on the segment: 10.9.0.3"
    assert [book.cluster.reservations[f"10.9.0.{number}"].node for number in range(1, 7)] == [
        *("live", "here", "dead", "here", "live", "here")
    ]


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", config.FILES)
def test_the_file_of_the_node_completes_the_configuration(node: Node, name: str) -> None:
    node.file(name[1:], range="10.8.0.0/24", gateway="10.8.0.1", network_name="n", enable_overlapping_ranges=False)
    assert node.call("ADD", ipam={}) == ["10.8.0.1/24"]
    assert node.call("ADD", "b", ipam={"range": "10.7.0.0/24"}) == ["10.7.0.1/24"]
    # Whether ranges may overlap is of the network only.
    assert node.book is not None
    assert held(node.book) == ["n-10.7.0.1", "n-10.8.0.1"]


def test_the_path_of_the_configuration_comes_first(node: Node) -> None:
    node.file(config.FILES[0][1:], range="10.8.0.0/24")
    node.file("own.conf", range="10.6.0.0/24", kubernetes={"kubeconfig": "/x"}, log_level="debug")
    assert node.call("ADD", ipam={"configuration_path": "/own.conf"}) == ["10.6.0.1/24"]
    node.file("own.conf", range="10.5.0.0/24")
    assert node.call("ADD", "b", ipam={"configuration_path": "/own.conf"}) == ["10.5.0.1/24"]


def test_a_file_with_slices_of_nodes_is_refused(node: Node) -> None:
    node.file(config.FILES[0][1:], node_slice_size="/24")
    with pytest.raises(UnsupportedFieldError, match="node_slice_size"):
        node.call("ADD")


@pytest.mark.parametrize(
    ("ipam", "part"),
    [
        ({"rnage": "10.9.0.0/16"}, "ipam.rnage"),
        ({"ipRanges": [{"range": "10.9.0.0/16", "gateway": "10.9.0.1"}]}, "ipam.ipRanges: gateway"),
        ({"node_slice_size": "/24"}, 'node_slice_size: "/24"'),
        ({"enable_overlapping_ranges": False}, "enable_overlapping_ranges: false"),
        ({"enable_overlapping_ranges": True, "leader_lease_duration": 9, "log_file": "/x", "datastore": "etcd"}, ""),
    ],
)
def test_what_the_built_in_does_not_support(node: Node, ipam: dict[str, Any], part: str) -> None:
    call = node.invocation("ADD", "web", {**SMALL, **ipam})
    assert node.builtin.unsupported(call) == part
    refusal = node.builtin.refusal(call)
    assert bool(refusal) == (bool(part) and "overlapping" not in part)


def test_without_a_daemon_it_is_left_to_the_binary(tmp_path: Path, node: Node) -> None:
    assert "without a daemon" in Node(tmp_path, None).builtin.unsupported(node.invocation("ADD", "web"))


def ranges(**ipam: Any) -> list[list[str]]:
    found = config.read(ipam).ranges
    return [[str(source.address(number)) for number in source.numbers()] for source in found]


def last(*numbers: int) -> list[list[str]]:
    return [[f"10.9.0.{number}" for number in numbers]]


@pytest.mark.parametrize(
    ("ipam", "expected"),
    [
        (SMALL, last(1, 2, 3, 4, 5, 6)),
        ({"range": "10.9.0.3/29"}, last(1, 2, 3, 4, 5, 6)),
        ({"range": "010.09.0.0/29"}, last(1, 2, 3, 4, 5, 6)),
        ({"range": "10.9.0.3-10.9.0.5/29"}, last(3, 4, 5)),
        ({"range": "10.9.0.0/24", "range_start": "10.9.0.9", "range_end": "10.9.0.11"}, last(9, 10, 11)),
        # Outside of the network, of the other family, or no address.
        ({**SMALL, "range_start": "10.8.0.1", "range_end": "10.9.0.7"}, last(1, 2, 3, 4, 5, 6)),
        ({**SMALL, "range_start": "fd00::1", "range_end": "many"}, last(1, 2, 3, 4, 5, 6)),
        ({**SMALL, "range_start": "10.9.0.4", "range_end": "10.9.0.2"}, last(4, 5, 6)),
        ({**SMALL, "exclude": ["10.9.0.2", "10.9.0.4/31", "fd00::/8"]}, last(1, 3, 6)),
        ({**SMALL, "exclude": ["10.9.0.0/29"]}, [[]]),
        ({**SMALL, "exclude": ["10.9.0.0/31", "10.9.0.0/30", "10.9.0.6/32"]}, last(4, 5)),
        ({"ipRanges": [{"range": "10.9.0.0/30"}], **SMALL}, [*last(1, 2, 3, 4, 5, 6), *last(1, 2)]),
        ({"range": "fd00::/125", "exclude": ["fd00::2"]}, [["fd00::1", "fd00::3", "fd00::4", "fd00::5", "fd00::6"]]),
    ],
)
def test_ranges(ipam: dict[str, Any], expected: list[list[str]]) -> None:
    assert ranges(**ipam) == expected


@pytest.mark.parametrize(
    ("ipam", "problem"),
    [
        ({"range": "10.9.0.0"}, 'invalid CIDR "10.9.0.0"'),
        ({"range": "10.9.0.0/31"}, "net mask is too short"),
        ({"range": "10.8.0.3-10.9.0.5/29"}, "invalid range start for CIDR"),
        ({"range": "x-10.9.0.5/29"}, "invalid range start IP"),
        ({"ipRanges": [{}]}, "invalid CIDR"),
        ({"ipRanges": [{**SMALL, "range_end": "many"}]}, "invalid IP address"),
        ({"ipRanges": [7]}, "an object is needed"),
        ({**SMALL, "exclude": ["10.9.0.0/255.255.255.0"]}, "could not parse exclude range"),
        ({**SMALL, "exclude": ["many"]}, "could not parse exclude range"),
        ({**SMALL, "gateway": "many"}, "couldn't parse gateway IP"),
        ({**SMALL, "network_name": "Red_Net"}, "network_name"),
        ({"addresses": [{"address": "192.0.2.1"}]}, "expected to be in CIDR notation"),
    ],
)
def test_what_an_add_would_refuse(node: Node, book: FakeAddressBook, ipam: dict[str, Any], problem: str) -> None:
    refusal = node.builtin.refusal(node.invocation("ADD", "web", ipam))
    assert refusal is not None
    assert problem in refusal.msg
    assert refusal.code in (6, 7)
    assert not book.calls
