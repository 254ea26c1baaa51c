"""The network-status annotation, against values that upstream v4.3.0 wrote for recorded results."""

import json

import pytest

from multus_daemon.spec.cni.errors import DecodingFailureError
from multus_daemon.spec.cni.result import Dns, Interface, IpConfig, Result, Route
from multus_daemon.spec.nad import device_info, network_status

NETNS = "/var/run/netns/rec2"


def ptp(mac: str, ifname: str, address: str, gateway: str, *routes: Route) -> Result:
    """Return the result of the reference ptp plugin."""
    return Result(
        interfaces=(Interface("vethaabe14cb", "be:1e:66:3b:90:09"), Interface(ifname, mac, sandbox=NETNS)),
        ips=(IpConfig(address, gateway, 1),),
        routes=routes,
    )


# Record `two-networks/ADD` of upstream v4.3.0, without the gateway "<nil>" that it wrote for the cluster network.
TWO_NETWORKS = """\
[{
    "name": "cluster",
    "interface": "eth0",
    "ips": [
        "10.244.0.3"
    ],
    "mac": "66:d7:cd:f4:ed:10",
    "default": true,
    "dns": {}
},{
    "name": "web/ptp-a",
    "interface": "net1",
    "ips": [
        "10.201.0.2"
    ],
    "mac": "ae:78:00:8d:5f:c0",
    "dns": {}
},{
    "name": "infra/other-ns",
    "interface": "extra0",
    "ips": [
        "10.204.0.2"
    ],
    "mac": "5e:38:b6:c5:37:b2",
    "dns": {}
}]"""


@pytest.mark.npwg("5")
@pytest.mark.conformance("config-18")
def test_the_bytes_of_upstream() -> None:
    entries = [
        *network_status.entries_for(
            "cluster",
            "eth0",
            ptp("66:d7:cd:f4:ed:10", "eth0", "10.244.0.3/24", "10.244.0.1", Route("0.0.0.0/0")),
            cluster_network=True,
        ),
        *network_status.entries_for(
            "web/ptp-a",
            "net1",
            ptp("ae:78:00:8d:5f:c0", "net1", "10.201.0.2/24", "10.201.0.1"),
            cluster_network=False,
        ),
        *network_status.entries_for(
            "infra/other-ns",
            "extra0",
            ptp("5e:38:b6:c5:37:b2", "extra0", "10.204.0.2/24", "10.204.0.1"),
            cluster_network=False,
        ),
    ]
    # `default` is required (SPEC 5.3.5), and upstream leaves a false one out; its readers take absent for false.
    text = network_status.render(entries)
    assert [entry["default"] for entry in network_status.parse(text)] == [True, False, False]
    assert text.replace('    "default": false,\n', "") == TWO_NETWORKS


@pytest.mark.npwg("5.3", "5.3.6", "DI 3.1.3")
def test_every_key_in_the_order_of_the_go_struct() -> None:
    device = device_info.parse(
        b'{"version":"1.1.0","pci":{"rdma-device":"mlx5_0","pci-address":"0000:01:00.1","x":"y"},"type":"pci"}'
    )
    result = Result(
        interfaces=(Interface("eth0", "02:00:00:00:00:01", mtu=1400, sandbox=NETNS),),
        ips=(IpConfig("10.1.0.2/24", "10.1.0.1"), IpConfig("fd00::2/64")),
        routes=(Route("0.0.0.0/0", "10.1.0.1"), Route("10.9.0.0/16", "10.1.0.9"), Route("::/0", "fd00::1")),
        dns=Dns(("10.1.0.53",), "example.org", ("a", "b"), ("ndots:5",)),
    )
    (entry,) = network_status.entries_for(
        "n<s>", "eth0", result, cluster_network=True, device_info=device, default_route=("10.1.0.1", "fd00::1")
    )
    assert entry == {
        "name": "n<s>",
        "interface": "eth0",
        "ips": ["10.1.0.2", "fd00::2"],
        "mac": "02:00:00:00:00:01",
        "mtu": 1400,
        "default": True,
        "dns": {"nameservers": ["10.1.0.53"], "domain": "example.org", "search": ["a", "b"], "options": ["ndots:5"]},
        "device-info": {
            "type": "pci",
            "version": "1.1.0",
            "pci": {"pci-address": "0000:01:00.1", "rdma-device": "mlx5_0"},
        },
        "gateway": ["10.1.0.1", "fd00::1"],
        "default-route": ["10.1.0.1", "fd00::1"],
    }
    assert list(entry) == [
        "name", "interface", "ips", "mac", "mtu", "default", "dns", "device-info", "gateway", "default-route"
    ]  # fmt: skip
    assert network_status.render([entry]).startswith('[{\n    "name": "n\\u003cs\\u003e",\n    "interface"')


@pytest.mark.npwg("5.3.2")
def test_one_interface_outside_the_pod_shows_addresses_only() -> None:
    result = Result(interfaces=(Interface("br0", "02:00:00:00:00:01", mtu=9000),), ips=(IpConfig("10.1.0.2/24"),))
    assert network_status.entries_for("n", "net1", result, cluster_network=False) == [
        {"name": "n", "ips": ["10.1.0.2"], "default": False, "dns": {}}
    ]


@pytest.mark.npwg("5.3.4")
def test_a_hardware_address_stands_beside_the_interfaces_name_only() -> None:
    """SPEC 5.3.4."""
    result = Result(interfaces=(Interface("", "02:00:00:00:00:01", sandbox=NETNS),))
    assert network_status.entries_for("n", "net1", result, cluster_network=False) == [
        {"name": "n", "default": False, "dns": {}}
    ]


def several(*ips: IpConfig) -> Result:
    return Result(
        interfaces=(Interface("host0"), Interface("a", sandbox=NETNS), Interface("b", sandbox=NETNS)), ips=ips
    )


@pytest.mark.npwg("5.3.5")
@pytest.mark.parametrize(
    ("ips", "default"),
    [
        ((), "a"),
        ((IpConfig("10.1.0.1/24", interface=2),), "a"),
        ((IpConfig("10.1.0.1/24", "10.1.0.9"), IpConfig("10.2.0.1/24", "10.2.0.9", 2)), "b"),
        ((IpConfig("10.1.0.1/24", "10.1.0.9", 0), IpConfig("10.2.0.1/24", "10.2.0.9", 2)), "b"),
    ],
)
def test_one_interface_of_the_cluster_network_is_the_default(ips: tuple[IpConfig, ...], default: str) -> None:
    entries = network_status.entries_for("n", "net1", several(*ips), cluster_network=True)
    assert [entry["interface"] for entry in entries if entry["default"]] == [default]
    others = network_status.entries_for("n", "net1", several(*ips), cluster_network=False)
    assert [entry["default"] for entry in others] == [False, False]


@pytest.mark.npwg("5.3.6.4")
@pytest.mark.parametrize(("asked", "shown"), [((), []), (("10.1.0.9",), ["10.1.0.9"])])
def test_default_route_is_shown_as_it_was_asked_for_an_empty_list_too(asked: tuple[str, ...], shown: list[str]) -> None:
    """SPEC 5.3.6.4."""
    (entry,) = network_status.entries_for(
        "n", "net1", Result(interfaces=(Interface("net1", sandbox=NETNS),)), cluster_network=False, default_route=asked
    )
    assert entry["default-route"] == shown


def test_render_nothing() -> None:
    assert network_status.render([]) == "[]"


@pytest.mark.parametrize("text", ["{}", "[1]", "x", "null"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(DecodingFailureError):
        network_status.parse(text)


def test_parse_of_foreign_text() -> None:
    assert network_status.parse("") == []
    assert network_status.parse(json.dumps([{"name": "x", "gateway": ["<nil>"]}])) == [
        {"name": "x", "gateway": ["<nil>"]}
    ]
