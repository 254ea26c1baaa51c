"""A request that no plugin can serve gets a clear error with the expected code, and leaves nothing behind.

One table for all types. The reference has one code, 999, for nearly all; ours say more where the CNI SPEC (section 5)
has a code for it, and never anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.plugins.plugin import HostTools
from tests.netns import outcome, reference

ADDRESS = {"address": "10.89.0.2/24", "gateway": "10.89.0.1"}
STATIC = {"type": "static", "addresses": [ADDRESS]}
ONE_PORT = {"runtimeConfig": {"portMappings": [{"hostPort": 8089, "containerPort": 80, "protocol": "tcp"}]}}
BEHIND = {"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.89.0.2/24"}]}}
UNKNOWN = 999
RESULT = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/nowhere"}]}

MAKES: dict[str, dict[str, Any]] = {
    "ptp": {},
    "bridge": {"bridge": "br89", "isGateway": True},
    "macvlan": {"master": "up0"},
    "tap": {},
}
"""Maps each plugin that makes an interface to the keys that it needs."""

VANISHING = """#!/bin/sh
test "$CNI_COMMAND" = ADD || exit 0
umount -l "$CNI_NETNS" && rm "$CNI_NETNS" || exit 1
echo '{"cniVersion":"1.0.0","ips":[{"address":"10.89.0.2/24","gateway":"10.89.0.1"}]}'
"""
"""An IPAM plugin, before whose eyes the pod is deleted."""


def leases(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and path.name[0].isdecimal())


SUBNET_ENV = """FLANNEL_NETWORK=10.244.0.0/16
FLANNEL_SUBNET=10.244.7.1/24
FLANNEL_MTU=1450
FLANNEL_IPMASQ=false
"""


@dataclass(frozen=True)
class Case:
    """`keys` of the configuration; `code`: ours; `prepare`: a command in the host's namespace, `in_pod`: in the pod's.

    `reference`: its code where it is neither ours nor 999; 0: it does not notice.
    """

    plugin: str
    keys: dict[str, Any]
    words: str
    code: int = UNKNOWN
    _: KW_ONLY
    prepare: str = ""
    in_pod: str = ""
    args: str = ""
    netns: str = ""
    reference: int | None = None


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, needed in MAKES.items():
        keys = {**needed, "ipam": STATIC}
        found |= {
            f"{name}-unknown-ipam": Case(name, {**needed, "ipam": {"type": "no-such"}}, "no-such", 7),
            f"{name}-ipam-without-ranges": Case(name, {**needed, "ipam": {"type": "host-local"}}, "range", 7),
            f"{name}-exhausted": Case(name, {**needed, "ipam": "exhausted"}, "no IP addresses available"),
            f"{name}-address-twice": Case(name, {**needed, "ipam": STATIC | {"addresses": [ADDRESS] * 2}}, "exists"),
            f"{name}-bad-address": Case(
                name, {**needed, "ipam": STATIC | {"addresses": [{"address": "10.89.0.2"}]}}, "10.89.0.2", 7
            ),
            f"{name}-name-taken": Case(
                name,
                keys,
                "exist",
                in_pod="ip link add eth0 type veth peer name other0",
                reference=0 if name == "tap" else None,
            ),
            f"{name}-no-namespace": Case(name, keys, "failed to open netns", 8, netns="/run/netns/mlt-of-nobody"),
            f"{name}-no-namespace-file": Case(name, keys, "netns", 8, netns="/etc/hostname"),
            f"{name}-namespace-gone-half-way": Case(
                name,
                {**needed, "ipam": {"type": "vanishing"}},
                "failed to open netns",
                8,
                reference=UNKNOWN if name == "ptp" else 0,
            ),
            f"{name}-mtu-no-number": Case(name, keys | {"mtu": "big"}, "mtu", 6),
            f"{name}-mtu-out-of-range": Case(
                name, keys | {"mtu": 2**40}, f"mtu: {2**40}|MTU {2**40}", 7, reference=UNKNOWN
            ),
            f"{name}-priority-out-of-range": Case(
                name,
                {**needed, "ipam": STATIC | {"routes": [{"dst": "10.9.0.0/16", "priority": 2**40}]}},
                f"routes: priority: {2**40} is out of range",
                7,
                reference=0,
            ),
            f"{name}-mtu-tiny": Case(name, keys | {"mtu": 10}, "mtu|Invalid argument"),
        }
    for name in ("bridge", "macvlan", "tap"):
        found[f"{name}-args"] = Case(name, {**MAKES[name], "ipam": STATIC}, "FOO", 4, args="FOO=1")
    bridge = {**MAKES["bridge"], "ipam": STATIC}
    ranges = {"type": "host-local", "subnet": "10.89.1.0/24"}
    found |= {
        "ptp-mtu-huge": Case("ptp", {"mtu": 70000, "ipam": STATIC}, "MTU 70000, must be [0, veth MTU(65535)]", 7),
        "bridge-mtu-huge": Case("bridge", bridge | {"mtu": 70000}, "MTU 70000, must be [0, veth MTU(65535)]", 7),
        "bridge-no-bridge": Case("bridge", bridge, "bridge", prepare="ip link add br89 type veth peer name br90"),
        "bridge-other-address": Case(
            "bridge", bridge, "address", prepare="ip link add br89 type bridge && ip addr add 10.9.9.9/24 dev br89"
        ),
        "bridge-name-with-percent": Case("bridge", bridge | {"bridge": "br%d"}, "contains %", 7, reference=UNKNOWN),
        "bridge-vlan-out-of-range": Case("bridge", bridge | {"vlan": 4095}, "4095", 7),
        "bridge-contradiction": Case("bridge", bridge | {"hairpinMode": True, "promiscMode": True}, "promiscuous", 7),
        "macvlan-no-master": Case("macvlan", {"master": "gone0", "ipam": STATIC}, "gone0"),
        "macvlan-mtu-over-master": Case("macvlan", {"master": "up0", "mtu": 9000, "ipam": STATIC}, "MTU", 7),
        "macvlan-mode": Case("macvlan", {"master": "up0", "mode": "sideways", "ipam": STATIC}, "sideways", 2),
        "vlan-no-master": Case("vlan", {"ipam": STATIC}, "master", 7),
        "vlan-id": Case("vlan", {"master": "up0", "vlanId": 4095, "ipam": STATIC}, "4095", 7),
        "vlan-mtu-over-master": Case("vlan", {"master": "up0", "mtu": 9000, "ipam": STATIC}, "MTU", 7),
        "ipvlan-mode": Case("ipvlan", {"master": "up0", "mode": "sideways", "ipam": STATIC}, "sideways", 2),
        "dummy-no-ipam": Case("dummy", {}, "requires an IPAM configuration", 7),
        "tap-owner": Case("tap", {"owner": -1}, "owner", 6),
        "tap-no-bridge": Case("tap", {"bridge": "gone0"}, "gone0"),
        "vrf-no-prev-result": Case("vrf", {"vrfname": "red"}, "prevResult", 7),
        "vrf-no-name": Case("vrf", {"prevResult": RESULT}, "vrf name", 7),
        "loopback-no-namespace": Case("loopback", {}, "failed to open netns", 8, netns="/run/netns/mlt-of-nobody"),
        "loopback-no-namespace-file": Case("loopback", {}, "netns", 8, netns="/etc/hostname"),
        "loopback-another-address": Case("loopback", {}, "loopback", in_pod="ip addr add 192.0.2.1/24 dev lo"),
        "tuning-no-prev-result": Case("tuning", {"mtu": 1400}, "prevResult", 7),
        "tuning-no-link": Case("tuning", {"mtu": 1400, "prevResult": {"cniVersion": "1.0.0"}}, "eth0"),
        "tuning-foreign-sysctl": Case(
            "tuning", {"sysctl": {"kernel.hostname": "x"}, "prevResult": {"cniVersion": "1.0.0"}}, "kernel", 7
        ),
        "tuning-mtu-tiny": Case(
            "tuning",
            {"mtu": 10, "prevResult": {"cniVersion": "1.0.0"}},
            "mtu|Invalid argument",
            in_pod="ip link add eth0 type veth peer name other0",
        ),
        "bandwidth-alone": Case("bandwidth", {"ingressRate": 8000, "ingressBurst": 8000}, "chained plugin", 7),
        "bandwidth-no-pair": Case(
            "bandwidth",
            {"ingressRate": 8000, "ingressBurst": 8000, "prevResult": RESULT},
            "not a veth interface",
            7,
            in_pod="ip link add eth0 type bridge",
        ),
        "bandwidth-no-burst": Case(
            "bandwidth", {"egressRate": 8000, "prevResult": RESULT}, "burst must also be set", 7
        ),
        "portmap-no-prev-result": Case("portmap", ONE_PORT, "chained plugin", 7),
        "portmap-bit": Case("portmap", ONE_PORT | {"markMasqBit": 32} | BEHIND, "MasqMarkBit", 7),
        "portmap-bit-and-chain": Case(
            "portmap", ONE_PORT | {"markMasqBit": 5, "externalSetMarkChain": "X"} | BEHIND, "externalSetMarkChain", 7
        ),
        "portmap-no-chain": Case(
            "portmap", ONE_PORT | BEHIND | {"externalSetMarkChain": "X"}, "X", prepare="ip addr add 10.89.0.1/24 dev lo"
        ),
        "host-local-exhausted": Case("host-local", {"ipam": "exhausted"}, "no IP addresses available"),
        "host-local-no-ranges": Case("host-local", {"ipam": {"type": "host-local"}}, "range", 7),
        "host-local-too-small": Case("host-local", {"ipam": ranges | {"subnet": "10.89.1.0/31"}}, "too small", 7),
        "host-local-requested-elsewhere": Case("host-local", {"ipam": ranges}, "10.1.1.1", args="IP=10.1.1.1"),
        "host-local-directory-is-a-file": Case(
            "host-local", {"ipam": ranges | {"dataDir": "/etc/hostname"}}, "/etc/hostname", 5
        ),
        "static-bad-address": Case("static", {"ipam": {"type": "static", "addresses": [{"address": "x"}]}}, "x", 7),
        "static-bad-gateway": Case(
            "static", {"ipam": {"type": "static", "addresses": [ADDRESS | {"gateway": "x"}]}}, "x", 6
        ),
        "flannel-no-subnets": Case("flannel", {"subnetFile": "/nowhere/subnet.env"}, "/nowhere/subnet.env"),
        "flannel-delegate-has-a-name": Case("flannel", {"delegate": {"name": "x"}}, "name", 7),
    }
    return found


CASES = cases()


class Side:
    """Files, namespace and configuration of one of the two."""

    def __init__(self, directory: Path, netns: Any, case: Case) -> None:
        self.leases = directory / "leases"
        self.netns = netns
        self.path = case.netns or netns.path
        self.bin_dir = directory / "bin"
        self.bin_dir.mkdir(parents=True)
        for plugin in reference.DIRECTORY.iterdir():
            (self.bin_dir / plugin.name).symlink_to(plugin)
        (self.bin_dir / "vanishing").write_text(VANISHING)
        (self.bin_dir / "vanishing").chmod(0o755)
        ipam = case.keys.get("ipam")
        if ipam == "exhausted":
            ipam = {"type": "host-local", "subnet": "10.89.0.0/30"}
        self.config: dict[str, Any] = {"cniVersion": "1.0.0", "name": "testnet", "type": case.plugin, **case.keys}
        if ipam is not None and ipam["type"] == "host-local":
            ipam = {"dataDir": str(self.leases)} | ipam
        if ipam is not None:
            self.config["ipam"] = ipam
        if case.plugin in ("tuning", "flannel"):
            self.config |= {"dataDir": str(directory / "data")}
        if case.plugin == "flannel":
            (directory / "subnet.env").write_text(SUBNET_ENV)
            self.config = {"subnetFile": str(directory / "subnet.env")} | self.config
        if case.keys.get("ipam") == "exhausted":
            reference.run("host-local", "ADD", "/nowhere", self.config, container="another")

    def left(self, host: Any) -> list[Any]:
        """Return what the call left; links that go with their namespace get a moment to disappear."""
        pod = sorted(self.netns.links()) if Path(self.netns.path).exists() else []
        return [sorted(host.links() - {"br89"}), pod, leases(self.leases), reference.rules(host)]


@pytest.mark.parametrize("name", CASES)
def test_a_clear_error_and_nothing_left(
    name: str, host: Any, another_host: Callable[[], Any], make_netns: Any, tmp_path: Path, tools: HostTools
) -> None:
    case = CASES[name]
    if not reference.has(case.plugin, "host-local", "static"):
        pytest.skip(f"no reference plugin {case.plugin}: {reference.HOW}")
    found = []
    for ours in (True, False):
        with another_host() as side_host:
            side_host.batch("link add up0 type veth peer name up1", "link set up0 up")
            side = Side(tmp_path / ("ours" if ours else "theirs"), make_netns(), case)
            if case.prepare:
                side_host.run("sh", "-c", case.prepare)
            if case.in_pod:
                side.netns.run("sh", "-c", case.in_pod)
            if ours:
                before = side.left(side_host)
                runner = outcome.dispatched("prefer", tools, bin_dirs=[side.bin_dir])
                made = outcome.builtin(
                    case.plugin, "ADD", side.path, side.config, args=case.args, ipam=runner.recorded, tools=tools
                )
                after = side.left(side_host)
                for _ in range(600):
                    if after == before or "half-way" not in name:
                        break
                    time.sleep(0.05)
                    after = side.left(side_host)
                if "half-way" in name:
                    before[1] = []
                assert after == before
            else:
                made = outcome.of_reference(
                    case.plugin, "ADD", side.path, side.config, args=case.args, bin_dir=side.bin_dir
                )
            found.append(made)
    ours_said, theirs_said = found
    assert ours_said.code == case.code, ours_said.msg
    assert any(word.lower() in ours_said.msg.lower() for word in case.words.split("|")), ours_said.msg
    assert theirs_said.code == (UNKNOWN if case.reference is None else case.reference), theirs_said.msg


@pytest.mark.parametrize("name", MAKES)
def test_mtu_0_is_the_default(name: str, host: Any, make_netns: Any, tools: HostTools) -> None:
    """So it is no bad input: both take it as not said."""
    if not reference.has(name, "static"):
        pytest.skip(f"no reference plugin {name}: {reference.HOW}")
    host.batch("link add up0 type veth peer name up1", "link set up0 up")
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": name, **MAKES[name], "ipam": STATIC, "mtu": 0}
    mtus = []
    for ours in (True, False):
        netns = make_netns()
        if ours:
            made = outcome.builtin(name, "ADD", netns.path, config, tools=tools)
        else:
            made = outcome.of_reference(name, "ADD", netns.path, config)
        assert not made.failed, made.msg
        mtus.append(netns.ip("link", "show", "eth0")[0]["mtu"])
        assert not outcome.of_reference(name, "DEL", netns.path, config).failed
    assert mtus[0] == mtus[1] == 1500
