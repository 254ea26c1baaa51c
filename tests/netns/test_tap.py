"""The built-in tap against the kernel and beside the reference plugin."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel import kinds
from multus_daemon.kernel.links import Rtnl
from multus_daemon.plugins.builtin import tap as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import to_object
from tests import programs
from tests.netns import beside, outcome, reference
from tests.netns.beside import DEFAULTS, MAC, V4, V6, link_of
from tests.netns.direct import Direct, in_pod

MakeCall = Callable[..., Call]

pytestmark = pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no /dev/net/tun: modprobe tun")

TAP = Direct(plugin)


def tap(addresses: Any = None, routes: Any = (), **keys: Any) -> dict[str, Any]:
    return beside.config("tap", addresses, routes, **keys)


def bridged(host: Any, pod: Any) -> None:
    """Both sides of a comparison have a bridge, which few cases use."""
    pod.batch("link add br0 type bridge")


@pytest.fixture
def call(make_call: MakeCall) -> MakeCall:
    """Makes a call of tap; keywords as for `make_call`."""
    return lambda verb, path, **keys: make_call(verb, path, **{"type": "tap", **keys})


def test_a_program_can_open_it(netns: Any, call: MakeCall) -> None:
    TAP.add(call("ADD", netns.path))

    def opened(_netns: Any) -> str:
        with open("/dev/net/tun", "r+b", buffering=0) as device:
            fcntl.ioctl(device, 0x400454CA, b"eth0".ljust(16, b"\0") + b"\2\x10".ljust(24, b"\0"))
            return str(link_of(netns)["operstate"])

    assert in_pod(netns.path, opened) == "UP"
    assert netns.links() == {"eth0"}


def test_mtu_and_mac_address_hold_with_owner_and_group(netns: Any, call: MakeCall) -> None:
    """The reference loses both."""
    TAP.add(call("ADD", netns.path, ipam={}, mtu=1300, mac=MAC, owner=2**32 - 2, group=7))
    link = link_of(netns)
    assert (link["mtu"], link["address"]) == (1300, MAC)
    assert link["linkinfo"]["info_data"]["user"] in (2**32 - 2, str(2**32 - 2))


def test_an_address_of_ipv6_is_not_waited_for(netns: Any, call: MakeCall, ipam: Any) -> None:
    """Its detection does not begin before a program opens the link; the reference waits five seconds."""
    ipam.result = {"ips": [V6], "routes": DEFAULTS[1:]}
    netns.detect_duplicates()
    began = time.monotonic()
    TAP.add(call("ADD", netns.path))
    assert time.monotonic() - began < 3
    assert any(route["dst"] == "default" for route in netns.ip("-6", "route"))


@pytest.mark.parametrize("where", ["add_tap", "change", "batch"])
def test_a_failed_step_leaves_nothing(
    host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = beside.everything(host, netns)

    def fail(*_arguments: Any, **_keys: Any) -> None:
        raise OSError(5, "no luck")

    monkeypatch.setattr(kinds if where == "add_tap" else Rtnl, where, fail)
    with pytest.raises(InternalError, match="no luck"):
        TAP.add(call("ADD", netns.path))
    assert beside.everything(host, netns) == before
    assert ipam.verbs == (["ADD", "DEL"] if where == "batch" else [])


def test_the_device_is_that_of_the_host(netns: Any, call: MakeCall, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="failed to create tap: No such file"):
        TAP.add(replace(call("ADD", netns.path), host_root=tmp_path))
    assert netns.links() == set()


class Tools:
    """Programs of a host with SELinux, which run without it here."""

    def __init__(self, tools: Any, end: ToolExit | None = None) -> None:
        self.tools, self.end, self.calls = tools, end, list[list[str]]()

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        self.calls.append([tool, *arguments])
        at = arguments.index("runcon")
        found: ToolExit = self.end or self.tools.run(tool, [*arguments[:at], *arguments[at + 3 :]], stdin)
        return found


@programs.needs("ip", "nsenter")
def test_a_selinux_context_is_that_of_the_program_that_makes_it(netns: Any, call: MakeCall, tools: Any) -> None:
    context, host = "system_u:system_r:container_t:s0", Tools(tools)
    made = call("ADD", netns.path, ipam={}, selinuxContext=context, multiQueue=True, owner=5, group=7)
    TAP.add(replace(made, tools=host))
    assert host.calls[0][:6] == ["nsenter", f"--net={netns.path}", "--", "runcon", "--", context]
    info = link_of(netns)["linkinfo"]["info_data"]
    assert info["multi_queue"] is True
    assert {"user", "group"} <= info.keys()


def test_a_context_with_a_nul_is_refused(netns: Any, call: MakeCall, tools: Any) -> None:
    made = call("ADD", netns.path, selinuxContext="system_u:\0")
    with pytest.raises(InvalidNetworkConfigError, match="^selinuxContext: .* has a NUL byte"):
        TAP.add(replace(made, tools=tools))
    assert netns.links() == set()


def test_a_host_without_selinux(netns: Any, call: MakeCall, tools: Any) -> None:
    made = call("ADD", netns.path, selinuxContext="x")
    refused = Tools(tools, ToolExit(1, b"", "runcon: may be used only on a SELinux kernel"))
    with pytest.raises(InternalError, match="selinuxContext: runcon: may be used only on a SELinux kernel") as caught:
        TAP.add(replace(made, tools=refused))
    assert caught.value.origin is Origin.NODE
    assert netns.links() == set()

    class NoTools:
        def run(self, tool: str, *_: Any) -> ToolExit:
            raise ToolNotFoundError(f"{tool} is not in /usr/sbin")

    with pytest.raises(InternalError, match="selinuxContext: nsenter is not in /usr/sbin"):
        TAP.add(replace(made, tools=NoTools()))


def test_without_the_programs_of_the_host_a_binary_does_the_context(host: Any, netns: Any) -> None:
    made = outcome.builtin("tap", "ADD", netns.path, tap(selinuxContext="x"))
    assert (made.code, "selinuxContext" in made.msg) == (2, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (f"link set eth0 address {MAC}", 'MAC address of "eth0" is'),
        ("link set eth0 down", '"eth0" is down'),
        ("addr flush dev eth0", 'address 10.213.7.2/24 is not on "eth0"'),
        ("link del eth0", 'interface "eth0" is not there'),
    ],
)
def test_check_sees_what_has_changed(netns: Any, call: MakeCall, ipam: Any, change: str, words: str) -> None:
    previous = to_object(TAP.add(call("ADD", netns.path)), "1.0.0")
    TAP.check(call("CHECK", netns.path, prevResult=previous))
    netns.batch(change)
    with pytest.raises(CniError, match=words):
        TAP.check(call("CHECK", netns.path, prevResult=previous))


def test_check_sees_that_it_is_no_port(netns: Any, call: MakeCall) -> None:
    bridged(None, netns)
    keys: dict[str, Any] = {"ipam": {}, "bridge": "br0"}
    previous = to_object(TAP.add(call("ADD", netns.path, **keys)), "1.0.0")
    TAP.check(call("CHECK", netns.path, prevResult=previous, **keys))
    netns.batch("link set eth0 nomaster")
    with pytest.raises(CniError, match='"eth0" is not a port of bridge "br0"'):
        TAP.check(call("CHECK", netns.path, prevResult=previous, **keys))


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": tap(),
    "mtu": tap(mtu=1300, ipam={}, dns={"search": ["example.com"]}),
    "mac": tap(mac=MAC),
    "mac-runtime": tap(mac="02:00:00:00:00:11", runtimeConfig={"mac": MAC}),
    "multi-queue": tap(multiQueue=True),
    "owner": tap(owner=0),
    "group": tap(group=1000),
    "owner-and-group": tap(owner=1000, group=0),
    "all-queues": tap(owner=0, group=0, multiQueue=True),
    "bridge": tap(bridge="br0"),
    "v4": tap([V4], DEFAULTS[:1]),
    "dual": tap([V4, {"address": "fd21:7::2/64"}], DEFAULTS[:1], dns={"nameservers": ["192.0.2.53"]}),
    "1.1.0": tap([V4], cniVersion="1.1.0"),
}
needs = [reference.needs("tap", "static"), reference.needs_new()]


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
def test_both_leave_the_same(case: str, another_host: Any, make_netns: Any) -> None:
    beside.same(CASES[case], bridged, another_host, make_netns, ifname="net1")


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, host: Any, netns: Any) -> None:
    beside.each_other(CASES[case], bridged, host, netns, ours_adds=ours_adds)


@pytest.mark.parametrize(
    ("keys", "args"),
    [
        *(({"mtu": value}, "") for value in (10, 70000, "1400")),
        *(({"mac": value}, "") for value in ("nonsense", "01:00:5e:00:00:01")),
        *(({"owner": value}, "") for value in (-1, 2**32, "root")),
        ({"group": -1}, ""),
        ({"bridge": "gone0"}, ""),
        ({}, "MAC=nonsense"),
        ({}, "FOO=1"),
        ({"ipam": {"type": "static", "addresses": []}}, ""),
        ({"ipam": {"type": "no-such-plugin"}}, ""),
    ],
)
@pytest.mark.parametrize("_", [pytest.param("", marks=needs)])
def test_both_refuse(_: str, keys: dict[str, Any], args: str, host: Any, make_netns: Any) -> None:
    """The reference often says what the program `ip` says."""
    ours = []
    for call in (outcome.builtin, outcome.of_reference):
        netns = make_netns()
        made = call("tap", "ADD", netns.path, tap([V4]) | keys, args=args)
        assert made.failed
        ours.append(netns.links())
    assert ours[0] == set()
