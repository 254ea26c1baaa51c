"""Built-ins on a kernel that refuses one message, or has no room for its answer: each of an ADD and a DEL in turn.

A run of nft or iptables is a message, too, and ends with the kernel's words. An ADD fails, says that the node is at
fault, and leaves nothing; or it does without the message. A DEL can be repeated.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.transport import NLM_F_DUMP, Socket
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, Origin
from multus_daemon.spec.cni.result import Result, to_object
from tests.calls import run
from tests.netns import beside
from tests.programs import require

ADDRESS = {"address": "10.1.1.2/24", "gateway": "10.1.1.1"}
V6 = {"address": "fd01::2/64", "gateway": "fd01::1"}
PAIR = ("02:00:00:00:00:01", "02:00:00:00:00:02")
ROUTES = [{"dst": "10.5.0.0/16"}]
PORTS = [{"hostPort": 8053, "containerPort": 53, "protocol": "udp"}]
LIMITS = dict.fromkeys(("ingressRate", "ingressBurst", "egressRate", "egressBurst"), 1_000_000)

CASES: dict[str, dict[str, Any]] = {
    "ptp": {"ipMasq": False},
    "bridge": {"bridge": "br9", "isGateway": True},
    "macvlan": {"master": "up0"},
    "ipvlan": {"master": "up0"},
    "vlan": {"master": "up0", "vlanId": 5},
    "dummy": {},
    "tap": {"mac": beside.MAC},
    "host-device": {"device": "card0"},
    "tuning": {"mac": beside.MAC, "mtu": 1400, "promisc": True},
    "bandwidth": LIMITS,
    "sbr": {},
    "vrf": {"vrfname": "red"},
    "portmap nftables": {"runtimeConfig": {"portMappings": PORTS}, "backend": "nftables"},
    "portmap iptables": {"runtimeConfig": {"portMappings": PORTS}, "backend": "iptables"},
    "firewall iptables": {"backend": "iptables", "ingressPolicy": "isolated"},
    "ptp nftables": {"ipMasq": True, "ipMasqBackend": "nftables"},
    "ptp iptables": {"ipMasq": True, "ipMasqBackend": "iptables"},
}
"""The configuration of each plugin; behind its name, what its rules are made with."""
CHAINED = ("tuning", "bandwidth", "sbr", "vrf", "portmap", "firewall")
TOOLS = {"nftables": ("nft",), "iptables": ("iptables", "ip6tables", "iptables-save", "nft")}
# Link-local addresses; a bridge, which stays: its ports are lines of their own.
_OF_KERNEL = re.compile(r"fe80::|ff00::|^\d+: br9|dev br9|^# ")
_COUNTERS = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+")
_CARRIER = re.compile(r"NO-CARRIER,|,LOWER_UP| state \w+| linkdown")
_KINDS = ("macvlan", "ipvlan", "vlan", "dummy", "vrf")


@dataclass
class Kernel:
    """Refuses the message of a number, or (`lost`) does what it says and has no room for the answer."""

    fails: int
    code: int
    lost: bool
    sent: int = 0

    def _is_next(self) -> bool:
        number, self.sent = self.sent, self.sent + 1
        return number == self.fails

    def run(self, original: Callable[..., ToolExit]) -> Callable[..., ToolExit]:
        def run(tools: HostTools, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
            if not self._is_next():
                return original(tools, tool, arguments, stdin)
            if self.lost:
                original(tools, tool, arguments, stdin)
            words = f"Could not fetch rule set generation id: {os.strerror(self.code)}"
            return ToolExit(1, b"", f"netlink: Error: {words}") if tool == "nft" else ToolExit(4, b"", words)

        return run

    def send(self, original: Callable[..., int]) -> Callable[..., int]:
        def send(socket: Socket, requests: Sequence[Any], flags: int, of_last: int = 0) -> int:
            if not self._is_next():
                return original(socket, requests, flags, of_last)
            if self.lost and not flags & NLM_F_DUMP:
                original(socket, requests, flags, of_last)
            raise OSError(self.code, os.strerror(self.code))

        return send


class Place:
    """A plugin, its configuration, and a pod: calls are like the daemon's, with the result of the ADD on record."""

    def __init__(self, case: str, host: Any, pod: Any, tools: HostTools) -> None:
        self._host, self._pod, self.tools = host, pod, tools
        plugin, _, self._rules = case.partition(" ")
        beside.with_master(host)
        host.batch("link add card0 type veth peer name card1", "link set card1 up")
        self._config = {"cniVersion": "1.0.0", "name": "testnet", "type": plugin, **CASES[case]}
        self._is_chained = plugin in CHAINED
        addresses = [ADDRESS, V6] if self._rules else [ADDRESS]
        if self._is_chained:
            interfaces = [{"name": "pair0", "mac": PAIR[0]}, {"name": "eth0", "mac": PAIR[1], "sandbox": pod.path}]
            ips = [{**address, "interface": 1} for address in addresses]
            given = {"interfaces": interfaces, "ips": ips, "routes": ROUTES}
            self._config["prevResult"] = {"cniVersion": "1.0.0", **given}
            self._pair()
        else:
            self._config["ipam"] = {"type": "static", "addresses": addresses, "routes": ROUTES}

    def _pair(self) -> None:
        """Make what the plugin before this one does, with the same numbers each time."""
        end, other = (f"address {mac} index {50 + number}" for number, mac in enumerate(PAIR))
        self._host.batch(
            f"link add pair0 {end} type veth peer name eth0 {other} netns {self._pod.path}",
            "addr add 10.1.1.1/24 dev pair0",
            "link set pair0 up",
        )
        self._pod.batch("addr add 10.1.1.2/24 dev eth0", "link set eth0 up", "route add 10.5.0.0/16 via 10.1.1.1")

    def add(self) -> Result:
        return self.call("ADD")

    def delete(self, made: Result) -> None:
        """Delete what an ADD has made, and what ends with the interface."""
        self.call("DEL", made)
        if self._is_chained:
            # Much ends with the interface.
            self._host.run("ip", "link", "del", "pair0")
            self._pair()

    def call(self, verb: str, made: Result | None = None) -> Result:
        """Raises CniError."""
        config = self._config | ({} if made is None else {"prevResult": to_object(made, "1.0.0")})
        fields = gojson.loads_object(json.dumps(config).encode())
        call = Invocation(verb, "container1", self._pod.path, "eth0", "", "", fields)
        return run(Builtin(self._config["type"], Path("/"), tools=self.tools), call)

    def state(self) -> set[tuple[str, int]]:
        """Links, addresses, routes and rules, each with its number, without what the kernel makes by itself."""
        found = []
        for side in (self._host, self._pod):
            lines = ["-d link show", "addr show", "route show table all", "rule show"]
            with_own = [side.run("ip", "-o", *line.split()) for line in lines]
            found += [_CARRIER.sub("", line).rstrip() for text in with_own for line in text.splitlines()]
        lists = [["nft", "list", "ruleset"]] * bool(self._rules)
        lists += [["iptables-save"], ["ip6tables-save"]] * (self._rules == "iptables")
        found += [_COUNTERS.sub("", line) for command in lists for line in self._host.run(*command).splitlines()]
        return set(Counter(line for line in found if not _OF_KERNEL.search(line)).items())


@pytest.fixture(params=CASES)
def place(request: pytest.FixtureRequest, host: Any, netns: Any, tools: HostTools) -> Place:
    if request.param in _KINDS:
        beside.require_kind(request.param)
    require(*TOOLS.get(request.param.partition(" ")[2], ()))
    made = Place(request.param, host, netns, tools)
    # A bridge, and the chains that all containers share, stay.
    made.delete(made.add())
    return made


FAULTS = pytest.mark.parametrize(("code", "lost"), [(errno.ENOBUFS, False), (errno.EIO, True)], ids=["refused", "lost"])


def attempt(
    call: Callable[[], Any], place: Place, kernel: Kernel, patched: pytest.MonkeyPatch
) -> tuple[Any, CniError | None]:
    """Call on that kernel; return what comes of it, or the error, which must be about the node."""
    patched.setattr(Socket, "_send", kernel.send(Socket._send))
    patched.setattr(type(place.tools), "run", kernel.run(type(place.tools).run))
    try:
        return call(), None
    except CniError as error:
        return None, error
    finally:
        patched.undo()


@FAULTS
def test_add(place: Place, monkeypatch: pytest.MonkeyPatch, code: int, lost: bool) -> None:
    before, errors = place.state(), list[CniError]()
    for number in itertools.count():
        kernel = Kernel(number, code, lost)
        made, error = attempt(place.add, place, kernel, monkeypatch)
        if error:
            errors.append(error)
        else:
            place.delete(made)
        assert place.state() ^ before == set(), f"message {number}: {error!r}"
        if kernel.sent <= number:
            break
    assert errors
    assert [error for error in errors if error.origin is not Origin.NODE] == []
    assert [str(error) for error in errors if os.strerror(code) not in str(error)] == []


@FAULTS
def test_del(place: Place, monkeypatch: pytest.MonkeyPatch, code: int, lost: bool) -> None:
    before, errors = place.state(), list[CniError]()
    for number in itertools.count():
        kernel, made = Kernel(number, code, lost), place.add()
        _, error = attempt(functools.partial(place.call, "DEL", made), place, kernel, monkeypatch)
        errors += [error] if error else []
        place.delete(made)
        assert place.state() ^ before == set(), f"message {number}: {error!r}"
        if kernel.sent <= number:
            break
    assert [error for error in errors if error.origin is not Origin.NODE] == []
