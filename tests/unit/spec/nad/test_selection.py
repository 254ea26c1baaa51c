"""The network selection annotations: what is read, and what each bad element is told."""

import json

import pytest

from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InvalidNetworkConfigError
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import (
    HOTPLUG_ANNOTATION,
    KEEP_ANNOTATION,
    NetworkSelection,
    allows_none,
    is_followed,
    keep_of,
)


def parse(text: str) -> tuple[NetworkSelection, ...]:
    return selection.parse(text, pod_namespace="web")


def one(**fields: object) -> NetworkSelection:
    (element,) = parse(json.dumps([{"name": "net1", **fields}]))
    return element


@pytest.mark.conformance("pods-22")
@pytest.mark.parametrize("text", ["", "[]", " [ ] "])
def test_no_networks(text: str) -> None:
    assert parse(text) == ()


@pytest.mark.npwg("3.3", "4.1.1", "4.1.2.1", "4.1.2.1.1-2")
@pytest.mark.conformance("pods-1", "pods-3", "pods-27")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("net1", [("web", "net1", "")]),
        ("net1,net2", [("web", "net1", ""), ("web", "net2", "")]),
        ("net1,net1", [("web", "net1", ""), ("web", "net1", "")]),
        (" ns / net1 @ foo ", [("ns", "net1", "foo")]),
        ("net1@data0,\n infra/net2", [("web", "net1", "data0"), ("infra", "net2", "")]),
        ("net.1", [("web", "net.1", "")]),
        ('[{"name":"net1"}]', [("web", "net1", "")]),
        ('[{"name":"net1","namespace":""}]', [("web", "net1", "")]),
        ('[{"name":"net1","namespace":null,"unknown":{"x":[1]}}]', [("web", "net1", "")]),
        ('[{"NAME":"net1","NameSpace":"ns","INTERFACE":"data0"}]', [("ns", "net1", "data0")]),
        ("default/net1@my_interface", [("default", "net1", "my_interface")]),
        ('[{"name":"net1","interfaceRequest":"old0"}]', [("web", "net1", "old0")]),
        ('[{"name":"net1","interfaceRequest":"old0","interface":"new0"}]', [("web", "net1", "new0")]),
        ('[{"name":"net.1"},{"name":"' + "a" * 253 + '"}]', [("web", "net.1", ""), ("web", "a" * 253, "")]),
    ],
)
def test_names(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert [(found.namespace, found.name, found.interface) for found in parse(text)] == expected


@pytest.mark.npwg("4.1.2.1.8a")
@pytest.mark.conformance("config-20")
def test_every_request_of_an_element() -> None:
    element = one(
        ips=["10.1.0.5/24", "fd00::5"],
        mac="02:00:00:00:00:07",
        portMappings=[
            {"hostPort": 80, "containerPort": 8080},
            {"hostPort": 53, "containerPort": 53, "protocol": "UDP", "hostIP": "192.0.2.1"},
        ],
        bandwidth={"ingressRate": 2048, "ingressBurst": 1600, "egressRate": 0},
        deviceID="0000:01:00.1",
        **{
            "infiniband-guid": "c2:11:22:33:44:55:66:77",
            "cni-args": {"foo": {"bar": 1}},
            "default-route": ["10.1.0.1"],
        },
    )
    assert element.capability_args() == {
        "ips": ["10.1.0.5/24", "fd00::5"],
        "mac": "02:00:00:00:00:07",
        "infinibandGUID": "c2:11:22:33:44:55:66:77",
        "portMappings": [
            {"hostPort": 80, "containerPort": 8080, "protocol": "tcp"},
            {"hostPort": 53, "containerPort": 53, "protocol": "udp", "hostIP": "192.0.2.1"},
        ],
        "bandwidth": {"ingressRate": 2048, "ingressBurst": 1600},
        "deviceID": "0000:01:00.1",
    }
    assert (element.cni_args, element.default_route) == ({"foo": {"bar": 1}}, ("10.1.0.1",))


@pytest.mark.npwg("4.1.2.1.3a")
def test_an_element_that_asks_for_nothing_has_no_capability_args() -> None:
    assert one(ips=[], mac="", portMappings=[], deviceID=None).capability_args() == {}


@pytest.mark.conformance("pods-3")
def test_spellings_of_before_the_specification_ask_for_nothing() -> None:
    assert one(ipRequest="10.1.0.5", macRequest="02:00:00:00:00:07") == one()


@pytest.mark.conformance("config-24")
@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), ([], ()), (["10.1.0.1", "fd00::1"], ("10.1.0.1", "fd00::1"))]
)
def test_default_route_absent_and_empty_differ(value: object, expected: object) -> None:
    assert one(**{"default-route": value}).default_route == expected


@pytest.mark.npwg("4.1.2.1.11")
def test_ipam_claim_reference_is_kept() -> None:
    assert one(**{"ipam-claim-reference": "vm-a.net1"}).ipam_claim_reference == "vm-a.net1"


@pytest.mark.npwg("4.1.2.1.4")
@pytest.mark.parametrize("mac", ["02:00:00:00:00:07", "02-00-00-00-00-0A", "0200.0000.000a"])
def test_every_spelling_of_a_mac_is_taken(mac: str) -> None:
    assert one(mac=mac).mac == mac


@pytest.mark.npwg("3.3")
@pytest.mark.conformance("pods-26")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("net1,", "element 1 ''"),
        (",", "element 0 ''"),
        (" ", "has no name"),
        ("ns/", "has no name"),
        ("/net1", "no namespace before '/'"),
        ("a/b/c", "more than one '/'"),
        ("a@b@c", "more than one '@'"),
        ("net1@", "no interface name after '@'"),
        ("Net1", "name: 'Net1' must consist of"),
        ("a_b", "must consist of"),
        ("net1@a23456789012345x", "interface name is too long"),
        ("net1@a:b", "contains / or :"),
        ("net1@a b", "contains / or :"),
        (f"{'n' * 64}/net1", "longer than 63"),
        ("n.s/net1", "namespace: 'n.s' must consist of"),
    ],
)
def test_short_form_refusals(text: str, problem: str) -> None:
    with pytest.raises(InvalidNetworkConfigError, match=r"annotation k8s\.v1\.cni\.cncf\.io/networks") as caught:
        parse(text)
    assert problem in caught.value.msg
    assert caught.value.code == 7


@pytest.mark.conformance("pods-4")
@pytest.mark.parametrize(
    "text",
    ['{"name":"net1"}', '"net1"', "[net1]", '[{"name":"net1"}] x', '[{"name":', "[null]", "[[]]", '["net1"]', "[1]"],
)
def test_what_is_no_list_of_objects(text: str) -> None:
    with pytest.raises(DecodingFailureError) as caught:
        parse(text)
    assert caught.value.code == 6


@pytest.mark.npwg("3.3", "4.1.2.1.3-10", "4.1.2.1.6")
@pytest.mark.parametrize(
    ("fields", "code", "problem"),
    [
        ({"name": 1}, 6, "name: a string is needed, not a number"),
        ({"name": None}, 7, "a network has no name"),
        ({"name": "Bad Name/../x"}, 7, "name: 'Bad Name/../x' must consist of"),
        ({"name": "a" * 254}, 7, "longer than 253"),
        ({"namespace": "a/b"}, 7, "namespace: 'a/b' must consist of"),
        ({"ipam-claim-reference": "a/../b"}, 7, "ipam-claim-reference: 'a/../b' must consist of"),
        ({"interface": "a/b"}, 7, "interface: 'a/b'"),
        ({"interface": "a" * 16}, 7, "interface name is too long"),
        ({"ips": "10.1.0.5"}, 6, "ips: an array is needed, not a string"),
        ({"ips": [None]}, 6, "ips[0]: a string is needed, not null"),
        ({"ips": ["10.1.0.5", "x"]}, 7, "ips[1]: 'x'"),
        ({"ips": ["10.1.0.5/33"]}, 7, "ips[0]"),
        ({"ips": ["10.1.0.5/255.255.255.0"]}, 7, "ips[0]"),
        ({"ips": ["10.01.0.5"]}, 7, "ips[0]"),
        ({"ips": ["fe80::1%eth0"]}, 7, "ips[0]"),
        ({"mac": "02:00:00:00:00"}, 7, "mac: "),
        ({"mac": "02:00:00:00:00:07:08:09"}, 7, "not an Ethernet address of 6 bytes"),
        ({"mac": "02:00-00:00:00:07"}, 7, "mac: "),
        ({"mac": "zz:00:00:00:00:07"}, 7, "mac: "),
        ({"infiniband-guid": "02:00:00:00:00:07"}, 7, "infiniband-guid: "),
        ({"portMappings": {}}, 6, "portMappings: an array is needed"),
        ({"portMappings": [None]}, 6, "portMappings[0]: an object is needed, not null"),
        ({"portMappings": [{"hostPort": 80}]}, 7, "portMappings[0].containerPort"),
        ({"portMappings": [{"hostPort": 0, "containerPort": 1}]}, 7, "portMappings[0].hostPort"),
        ({"portMappings": [{"hostPort": 65536, "containerPort": 1}]}, 7, "portMappings[0].hostPort"),
        ({"portMappings": [{"hostPort": "80", "containerPort": 1}]}, 6, "portMappings[0].hostPort: an integer"),
        ({"portMappings": [{"hostPort": 8, "containerPort": 1, "protocol": "icmp"}]}, 7, "'icmp'"),
        ({"portMappings": [{"hostPort": 8, "containerPort": 1, "hostIP": "host"}]}, 7, "hostIP"),
        ({"bandwidth": []}, 6, "bandwidth: an object is needed"),
        ({"bandwidth": {}}, 7, "at least one of"),
        ({"bandwidth": {"ingressRate": "1M"}}, 6, "bandwidth.ingressRate: an integer is needed"),
        ({"bandwidth": {"ingressRate": -1}}, 7, "out of range"),
        ({"bandwidth": {"egressBurst": 5}}, 7, "bandwidth.egressBurst needs egressRate"),
        ({"deviceID": 5}, 6, "deviceID"),
        ({"cni-args": []}, 6, "cni-args: an object is needed"),
        ({"default-route": "10.1.0.1"}, 6, "default-route: an array is needed"),
        ({"default-route": ["10.1.0.0/24"]}, 7, "default-route[0]"),
        ({"default-route": ["10.1.0.1", "0.0.0.0"]}, 7, "default-route[1]: '0.0.0.0' can't be a gateway"),
        ({"default-route": ["::1"]}, 7, "default-route[0]: '::1' can't be a gateway"),
        ({"default-route": ["ff02::1"]}, 7, "default-route[0]: 'ff02::1' can't be a gateway"),
        ({"default-route": ["10.1.0.1"] * 17}, 7, "default-route: 17 gateways, and at most 16"),
        ({"ips": ["10.1.0.5"], "ipam-claim-reference": "x"}, 7, "ips and ipam-claim-reference exclude each other"),
    ],
)
def test_json_refusals_name_element_and_reason(fields: dict[str, object], code: int, problem: str) -> None:
    bad = {"name": "net1"} | fields
    with pytest.raises(CniError) as caught:
        parse(json.dumps([{"name": "good"}, bad]))
    assert caught.value.code == code
    assert problem in caught.value.msg
    assert "element 1" in caught.value.msg
    if isinstance(bad["name"], str) and len(bad["name"]) < 80:
        assert repr(bad["name"]) in caught.value.msg


def test_limits() -> None:
    assert len(parse(",".join(["net1"] * 256))) == 256
    with pytest.raises(InvalidNetworkConfigError, match="257 networks, and at most 256"):
        parse(",".join(["net1"] * 257))
    with pytest.raises(InvalidNetworkConfigError, match="257 networks"):
        parse(json.dumps([{"name": "net1"}] * 257))
    with pytest.raises(InvalidNetworkConfigError, match="longer than 262144 bytes"):
        parse("n" * (256 * 1024 + 1))


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        ({"interface": "a", "IPS": ["10.0.0.1"], "interfaceRequest": "b"}, []),
        ({"interfce": "a"}, ["unknown key 'interfce', is interface meant?"]),
        ({"defaultRoute": []}, ["unknown key 'defaultRoute', is default-route meant?"]),
        ({"default_route": [], "Ip": []}, [
            "unknown key 'default_route', is default-route meant?",
            "unknown key 'Ip', is ips meant?",
        ]),
        ({"zzz": 1}, ["unknown key 'zzz'"]),
        ({"bandwidth": {"ingressRate": 1, "egresRate": 1}}, [
            "unknown key bandwidth.'egresRate', is egressRate meant?",
        ]),
        (
            {"portMappings": [{"hostPort": 1, "containerPort": 2, "protcol": "udp"}] * 3},
            ["unknown key portMappings.'protcol', is protocol meant?"],
        ),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_noted_with_the_nearest_one(fields: dict[str, object], unknown: list[str]) -> None:
    assert list(one(**fields).unknown) == unknown


def test_unknown_keys_are_bounded_in_number_and_length() -> None:
    element = one(**{f"{number}{'x' * 5000}": 1 for number in range(30)})
    assert len(element.unknown) == selection.UNKNOWN_MAX
    assert all(len(text) < 200 for text in element.unknown)


@pytest.mark.parametrize(
    ("element", "details"),
    [
        ({"nmae": "net1"}, "unknown key 'nmae', is name meant?"),
        ({"name": 1, "namspace": "a"}, "unknown key 'namspace', is namespace meant?"),
    ],
)
def test_an_element_that_cannot_be_used_has_its_unknown_keys_named(element: dict[str, object], details: str) -> None:
    with pytest.raises(CniError) as caught:
        parse(json.dumps([element]))
    assert caught.value.remedy == details


# --- how a running pod's networks are kept ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "network", "kept"),
    [
        (None, None, "report"),
        ("repair", "off", "repair"),
        ("off", "repair", "off"),
        (None, "repair", "repair"),
        ("Repair", "off", "off"),
        ("true", "", "report"),
        (" repair", None, "report"),
    ],
)
def test_the_pods_word_goes_before_the_networks_and_that_before_the_nodes(
    pod: str | None, network: str | None, kept: str
) -> None:
    of_pod, of_network = ({} if value is None else {KEEP_ANNOTATION: value} for value in (pod, network))
    assert keep_of(of_pod, of_network, "report") == kept


@pytest.mark.parametrize(
    ("value", "followed", "may_be_none"),
    [
        (None, True, False),
        ("true", True, False),
        ("detach-all", True, True),
        ("false", False, False),
        ("False", False, False),
        ("no", False, False),
        ("", False, False),
    ],
)
def test_which_pods_are_followed(value: str | None, followed: bool, may_be_none: bool) -> None:
    annotations = {} if value is None else {HOTPLUG_ANNOTATION: value}
    assert (is_followed(annotations), allows_none(annotations)) == (followed, may_be_none)
