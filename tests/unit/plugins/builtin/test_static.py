import pytest

from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.errors import CniError
from tests.calls import run


def invocation(verb, ipam, *, args="", **keys):
    config = {"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": ipam, **keys}
    return Invocation(verb, "c1", "/nowhere", "eth0", args, "/nowhere", config)


@pytest.mark.parametrize(
    ("ipam", "expected"),
    [
        ({"type": "static", "name": "n", "addresses": [], "routes": [{"any": 1}], "dns": {}}, ""),
        ({"addresses": [{"address": "x", "gateway": "y", "VERSION": "4"}, None]}, ""),
        ({"addresses": "nonsense"}, ""),
        ({"type": "static", "ranges": []}, "ipam.ranges"),
        ({"addresses": [{"address": "x"}, {"interface": 1}]}, "ipam.addresses: interface"),
    ],
)
def test_keys(tmp_path, ipam, expected):
    # The keys of the plugin that calls it are not its own.
    found = Builtin("static", tmp_path).unsupported(invocation("ADD", ipam, bridge="b", mtu=5))
    assert found == expected


@pytest.mark.parametrize(
    ("args", "addresses"),
    [
        ("IP=10.0.0.2/24", [{"address": "10.0.0.2/24"}]),
        ("IP=10.0.0.2/24;GATEWAY=10.0.1.1", [{"address": "10.0.0.2/24"}]),
        # The last of several gateways in one network is used.
        ("IP=10.0.0.2/24;GATEWAY=10.0.0.1,10.0.0.9", [{"address": "10.0.0.2/24", "gateway": "10.0.0.9"}]),
        (
            "GATEWAY=fd00::1, 10.0.0.1;IP=10.0.0.2/24 , fd00::2/64",
            [{"address": "10.0.0.2/24", "gateway": "10.0.0.1"}, {"address": "fd00::2/64", "gateway": "fd00::1"}],
        ),
    ],
)
def test_cni_args(tmp_path, args, addresses):
    found = run(Builtin("static", tmp_path), invocation("ADD", {"type": "static"}, args=args))
    assert result.to_object(found, "1.0.0") == {"cniVersion": "1.0.0", "ips": addresses}


@pytest.mark.parametrize(
    ("ipam", "args", "code"),
    [
        (None, "", 7),
        ({"addresses": 5}, "", 6),
        ({"addresses": [{"address": "10.0.0.1"}]}, "", 7),
        ({"addresses": [{"address": "10.0.0.1/8", "gateway": "x"}]}, "", 6),
        ({}, "IP=10.0.0.1", 4),
        ({}, "GATEWAY=10.0.0", 4),
        ({}, "MAC=x", 4),
    ],
)
def test_codes(tmp_path, ipam, args, code):
    with pytest.raises(CniError) as caught:
        run(Builtin("static", tmp_path), invocation("ADD", ipam, args=args))
    assert caught.value.code == code
