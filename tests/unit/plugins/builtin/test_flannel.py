import pytest

from multus_daemon.plugins.builtin import flannel
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.result import Result
from tests.calls import run

V4 = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.7.1/24\n"
REST = "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"


def test_what_flanneld_writes():
    text = V4 + "FLANNEL_IPV6_NETWORK=fd44::/48\nFLANNEL_IPV6_SUBNET=fd44:0:0:7::1/64\n" + REST
    assert flannel.read_subnets(text, "f") == flannel.Subnets(
        networks=["10.244.0.0/16", "fd44::/48"],
        subnets=["10.244.7.0/24", "fd44:0:0:7::/64"],
        mtu=1450,
        masquerades=True,
    )


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("FLANNEL_NETWORK=10.1.0.0/16,10.2.3.4/16,10.1.9.9/16", "networks", ["10.1.0.0/16", "10.2.0.0/16"]),
        ("FLANNEL_NETWORK=fd00::/8", "networks", ["fd00::/8"]),
        ("FLANNEL_SUBNET=10.1.2.3/32", "subnets", ["10.1.2.3/32"]),
        # The last one counts.
        ("FLANNEL_MTU=1\nFLANNEL_MTU=00002", "mtu", 2),
        ("FLANNEL_MTU=4294967295", "mtu", 4294967295),
        ("FLANNEL_IPMASQ=false", "masquerades", False),
        ("FLANNEL_IPMASQ=true ", "masquerades", False),
        ("FLANNEL_IPMASQ=true\r", "masquerades", True),
        (" FLANNEL_MTU=7", "mtu", 1450),
        ("FLANNEL_MTUS=7", "mtu", 1450),
    ],
)
def test_lines(line, key, expected):
    assert getattr(flannel.read_subnets(V4 + REST + line, "f"), key) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "f is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, FLANNEL_MTU"),
        (V4, "f is missing FLANNEL_MTU, FLANNEL_IPMASQ"),
        (V4 + REST + "FLANNEL_MTU", "FLANNEL_MTU has no value"),
        (V4 + "FLANNEL_SUBNET=10.1.2.3/255.255.0.0", "invalid CIDR address: 10.1.2.3/255.255.0.0"),
        (V4 + "FLANNEL_SUBNET=fe80::1%eth0/64", "invalid CIDR address"),
        (V4 + "FLANNEL_NETWORK=", "invalid CIDR address: "),
        (V4 + "FLANNEL_NETWORK=10.0.0.0/8,", "invalid CIDR address: "),
        *((V4 + f"FLANNEL_MTU={value}", "invalid MTU") for value in ("", "-1", "1_0", "4294967296", "٣", "9" * 5000)),
    ],
)
def test_files_that_cannot_be_used(text, words):
    with pytest.raises(flannel.SubnetError, match=words):
        flannel.read_subnets(text, "f")


@pytest.mark.parametrize("saved", [b"", b"{", b"5", b"{}", b'{"type": ""}', b'{"type": []}'])
def test_saved_configurations_that_are_none(saved):
    with pytest.raises(gojson.JsonError):
        flannel.decoded(saved)


def test_what_it_keeps_is_the_saved_configuration_without_which_a_del_does_nothing(tmp_path):
    plugin = Builtin("flannel", tmp_path)

    def asked(directory):
        fields = {"cniVersion": "1.0.0", "name": "n", "dataDir": directory}
        return Invocation("DEL", "c1", "/nowhere", "eth0", "", "/nowhere", fields)

    (tmp_path / "file").touch()
    for directory in ("/none", "/file"):
        assert not plugin.keeps(asked(directory))
        assert run(plugin, asked(directory)) == Result()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "c1").write_text("{}")
    assert plugin.keeps(asked("/data"))
