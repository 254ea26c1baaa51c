import pytest

from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.attachment import Invocation


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"master": "m", "mode": "vepa", "mtu": 1, "mac": "x", "linkInContainer": True, "bcqueuelen": 1}, ""),
        ({"mode": ""}, ""),
        ({"mode": 5}, ""),
        ({"mode": "source"}, 'mode: "source"'),
        ({"bccutoff": 5}, "bccutoff"),
    ],
)
def test_keys(tmp_path, keys, expected):
    fields = {"cniVersion": "1.0.0", "name": "n", **keys}
    invocation = Invocation("ADD", "c1", "/nowhere", "eth0", "", "/nowhere", fields)
    assert Builtin("macvlan", tmp_path).unsupported(invocation) == expected
