"""The built-in dummy against the kernel and beside the reference plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multus_daemon.plugins.builtin import dummy as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import ChangedError, InternalError
from multus_daemon.spec.cni.result import to_object
from tests.netns import beside, reference
from tests.netns.beside import DEFAULTS, V4, V6
from tests.netns.direct import Direct

MakeCall = Callable[..., Call]

pytestmark = beside.needs_kind("dummy")

DUMMY = Direct(plugin)


def dummy(addresses: Any = None, routes: Any = (), **keys: Any) -> dict[str, Any]:
    return beside.config("dummy", addresses, routes, **keys)


def nothing(host: Any, pod: Any) -> None:
    """A dummy needs nothing."""


@pytest.fixture
def call(make_call: MakeCall) -> MakeCall:
    """Makes a call of dummy; keywords as for `make_call`."""
    return lambda verb, path, **keys: make_call(verb, path, **{"type": "dummy", **keys})


@pytest.mark.parametrize("method", ["add_link", "change", "batch"])
def test_a_failed_step_leaves_nothing(
    host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    beside.fails_and_leaves_nothing(DUMMY, call("ADD", netns.path), host, netns, ipam, monkeypatch, method)


def test_an_interface_that_exists_stays(netns: Any, call: MakeCall, ipam: Any) -> None:
    DUMMY.add(call("ADD", netns.path))
    before = reference.state(netns)
    with pytest.raises(InternalError, match=r'container dummy name \("eth0"\) already exists'):
        DUMMY.add(call("ADD", netns.path))
    assert reference.state(netns) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("addr flush dev eth0", 'address 10.213.7.2/24 is not on "eth0"'),
        ("link set eth0 down", '"eth0" is down'),
        (f"link set eth0 address {beside.MAC}", 'MAC address of "eth0" is'),
        ("link del eth0", 'interface "eth0" is not there'),
    ],
)
def test_check_sees_what_has_changed(netns: Any, call: MakeCall, ipam: Any, change: str, words: str) -> None:
    previous = to_object(DUMMY.add(call("ADD", netns.path)), "1.0.0")
    DUMMY.check(call("CHECK", netns.path, prevResult=previous))
    netns.batch(change)
    with pytest.raises(ChangedError, match=words):
        DUMMY.check(call("CHECK", netns.path, prevResult=previous))


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "v4": dummy([V4], DEFAULTS[:1]),
    "v4-route": dummy([V4], [{"dst": "198.51.100.0/24", "gw": "10.213.7.9"}]),
    "dual": dummy([V4, V6], DEFAULTS, dns={"nameservers": ["192.0.2.53"]}),
    "1.1.0": dummy([V4], cniVersion="1.1.0"),
}
needs = [reference.needs("dummy", "static"), reference.needs_new()]


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
def test_both_leave_the_same(case: str, another_host: Any, make_netns: Any) -> None:
    beside.same(CASES[case], nothing, another_host, make_netns, ifname="net1")


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, host: Any, netns: Any) -> None:
    beside.each_other(CASES[case], nothing, host, netns, ours_adds=ours_adds)


@pytest.mark.parametrize(
    "ipam", [None, {}, {"type": "static", "addresses": []}, {"type": "no-such-plugin"}, {"type": 5}]
)
@pytest.mark.parametrize("_", [pytest.param("", marks=needs)])
def test_both_refuse_for_the_same_reason(_: str, ipam: Any, host: Any, make_netns: Any) -> None:
    beside.refuse(dummy(ipam=ipam), nothing, host, make_netns)
