import json

import pytest

from multus_daemon.builtin.runner import BuiltinRunner
from multus_daemon.ports import Invocation


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"master": "m", "mode": "vepa", "mtu": 1, "mac": "x", "linkInContainer": True, "bcqueuelen": 1}, ""),
        ({"mode": ""}, ""),
        ({"mode": 5}, ""),
        ({"mode": "source"}, 'mode: "source"'),
        ({"bccutoff": 5}, "bccutoff: 5"),
    ],
)
async def test_keys(tmp_path, keys, expected):
    stdin = json.dumps({"cniVersion": "1.0.0", "name": "n", **keys}).encode()
    invocation = Invocation("ADD", "c1", "/nowhere", "eth0", "", "/nowhere", stdin)
    assert await BuiltinRunner(tmp_path).unsupported("macvlan", invocation) == expected
