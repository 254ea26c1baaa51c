"""The built-in loopback against the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multus_daemon.plugins.builtin import loopback
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import InternalError
from multus_daemon.spec.cni.result import to_object
from tests.netns.direct import Direct

MakeCall = Callable[..., Call]

LOOPBACK = Direct(loopback)


def test_add_check_delete(netns: Any, make_call: MakeCall, ipam: Any) -> None:
    with pytest.raises(InternalError, match='"lo" is down'):
        LOOPBACK.check(make_call("CHECK", netns.path))
    result = LOOPBACK.add(make_call("ADD", netns.path, ifname="anything"))
    assert to_object(result, "1.0.0") == {
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": netns.path}],
        "ips": [{"interface": 0, "address": "127.0.0.1/8"}, {"interface": 0, "address": "::1/128"}],
    }
    LOOPBACK.check(make_call("CHECK", netns.path))
    assert LOOPBACK.add(make_call("ADD", netns.path)) == result
    for _ in range(2):
        LOOPBACK.delete(make_call("DEL", netns.path))
    assert "UP" not in netns.ip("link", "show", "lo")[0]["flags"]
    LOOPBACK.status(make_call("STATUS", ""))
    assert ipam.calls == []


def test_a_previous_result_is_passed_on(netns: Any, make_call: MakeCall) -> None:
    previous = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]}
    result = LOOPBACK.add(make_call("ADD", netns.path, prevResult=previous))
    assert to_object(result, "1.0.0") == previous
    assert "UP" in netns.ip("link", "show", "lo")[0]["flags"]


@pytest.mark.parametrize("path", ["", "/nonexistent/netns"])
def test_delete_without_namespace_is_done(path: str, make_call: MakeCall) -> None:
    LOOPBACK.delete(make_call("DEL", path))
