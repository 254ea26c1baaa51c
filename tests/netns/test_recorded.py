"""DEL removes what its ADD made, whatever has become of the interface, and tells what it could not remove."""

from __future__ import annotations

import errno
import os
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from multus_daemon.kernel import links
from multus_daemon.kernel.transport import Request, Socket
from multus_daemon.plugins.builtin import bridge, ptp
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import CniError, IoFailureError
from multus_daemon.spec.cni.result import Result, to_object
from tests.namespaces import remove_netns
from tests.netns.direct import Direct
from tests.programs import needed

MakeCall = Callable[..., Call]
PLUGINS = {"bridge": Direct(bridge), "ptp": Direct(ptp)}
V4 = {"address": "10.213.7.2/24", "gateway": "10.213.7.1"}
V6 = {"address": "fd21:7::2/64", "gateway": "fd21:7::1"}
BACKENDS = ("iptables", "nftables")


@pytest.fixture(params=PLUGINS)
def plugin(request: pytest.FixtureRequest) -> Direct:
    """Each plugin that masquerades."""
    return PLUGINS[request.param]


@pytest.fixture
def call(plugin: Direct, make_call: MakeCall) -> MakeCall:
    """Makes a call of the plugin with `ipMasq`."""

    def make(verb: str, path: str, **keys: Any) -> Call:
        made = {"type": "bridge", "bridge": "br-test", "isGateway": True} if plugin is PLUGINS["bridge"] else {}
        return make_call(verb, path, **{**made, "ipMasq": True, **keys})

    return make


def left(host: Any) -> list[str]:
    """Rules and chains of the container."""
    listed = host.run("sh", "-c", "nft list ruleset; iptables -w -t nat -S; ip6tables -w -t nat -S")
    return [line for line in listed.splitlines() if "CNI-" in line or "container1" in line]


def flushed(netns: Any) -> None:
    netns.run("ip", "addr", "flush", "dev", "eth0")


def moved_to_a_guest(netns: Any) -> None:
    """Change the pod like KubeVirt's bridge binding: rename the interface, make it a bridge port, drop its address."""
    netns.batch(
        "link set eth0 down",
        "addr flush dev eth0",
        "link set eth0 name eth0-nic",
        "link add k6t-eth0 type bridge",
        "link set eth0-nic master k6t-eth0",
        "link set eth0-nic up",
    )


def replaced(netns: Any) -> None:
    """Change the pod like later versions of KubeVirt: another interface has the name."""
    moved_to_a_guest(netns)
    netns.batch("link add eth0 type bridge", "addr add 10.213.7.9/24 dev eth0")


def readdressed(netns: Any) -> None:
    netns.batch("addr flush dev eth0", "addr add 10.213.7.77/24 dev eth0")


def gone(netns: Any) -> None:
    remove_netns(Path(netns.path))


CHANGES = [flushed, moved_to_a_guest, replaced, readdressed, gone]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_told", [True, False], ids=["result", "no-result"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_rule_stays(
    change: Callable[[Any], None],
    is_told: bool,
    backend: str,
    plugin: Direct,
    host: Any,
    netns: Any,
    call: MakeCall,
    ipam: Any,
) -> None:
    """Without a result: the ADD was cut off before it could be put down, or the version has none for a DEL."""
    ipam.result = {"ips": [V4, V6]}
    made = plugin.add(call("ADD", netns.path, ipMasqBackend=backend))
    assert left(host)
    change(netns)
    told = {"prevResult": to_object(made, "1.0.0")} if is_told else {}
    plugin.delete(call("DEL", netns.path, ipMasqBackend=backend, **told))
    assert left(host) == []


@pytest.mark.parametrize("change", [moved_to_a_guest, replaced])
def test_the_hosts_end_goes_with_its_routes(
    change: Callable[[Any], None], plugin: Direct, host: Any, netns: Any, call: MakeCall
) -> None:
    """DEL does not depend on the current name of the container's end."""
    made = plugin.add(call("ADD", netns.path, ipMasq=False))
    change(netns)
    plugin.delete(call("DEL", netns.path, ipMasq=False, prevResult=to_object(made, "1.0.0")))
    assert {name for name in host.links() if name.startswith("veth")} == set()
    assert [route for route in host.ip("route") if route["dst"].startswith("10.213.7.2")] == []


def test_a_hosts_end_that_the_kernel_keeps_fails_the_del(
    plugin: Direct, host: Any, netns: Any, call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Success would have the runtime forget a link that stays."""
    made = plugin.add(call("ADD", netns.path, ipMasq=False))
    moved_to_a_guest(netns)
    delete = call("DEL", netns.path, ipMasq=False, prevResult=to_object(made, "1.0.0"))
    ask = Socket.request

    def request(self: Socket, asked: Request) -> list[bytes]:
        if asked.kind == links.RTM_DELLINK:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return ask(self, asked)

    with monkeypatch.context() as patched:
        patched.setattr(Socket, "request", request)
        with pytest.raises(CniError, match='failed to remove "veth[0-9a-f]{8}" on the host: Device or resource busy'):
            plugin.delete(delete)
    plugin.delete(delete)
    assert {name for name in host.links() if name.startswith("veth")} == set()


def test_an_interface_that_the_kernel_keeps_fails_the_del(plugin: Direct, netns: Any, call: MakeCall) -> None:
    """The kernel never removes `lo`."""
    with pytest.raises(CniError, match='failed to remove "lo": Operation not supported'):
        plugin.delete(call("DEL", netns.path, ifname="lo", ipMasq=False))


@pytest.mark.parametrize("changed", [{"mac": "02:00:00:00:00:01"}, {"name": "br-other"}])
def test_somebody_elses_link_is_left_alone(
    changed: dict[str, Any], plugin: Direct, host: Any, netns: Any, call: MakeCall
) -> None:
    """A name that is another's by now, and what the result names but the plugin has not made for the container."""
    made = plugin.add(call("ADD", netns.path))
    host.batch("link add br-other type veth peer name other1")
    peer = next(item for item in made.interfaces if item.name.startswith("veth"))
    if "name" in changed:
        changed = {**changed, "mac": host.ip("link", "show", "dev", "br-other")[0]["address"]}
    interfaces = tuple(structs.replace(item, **changed) if item is peer else item for item in made.interfaces)
    told = structs.replace(made, interfaces=interfaces)
    moved_to_a_guest(netns)
    plugin.delete(call("DEL", netns.path, prevResult=to_object(told, "1.0.0")))
    assert {peer.name, "br-other", "other1"} <= host.links()
    assert left(host) == []


def test_another_interface_of_the_network_keeps_its_rules(
    plugin: Direct, host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    """Also where its address is the guest's, which the interface can't tell."""
    made: dict[str, Result] = {}
    for ifname, number in (("eth0", 7), ("net1", 8)):
        ipam.result = {"ips": [{"address": f"10.213.{number}.2/24", "gateway": f"10.213.{number}.1"}]}
        more = {"bridge": f"br-{ifname}"} if plugin is PLUGINS["bridge"] else {}
        made[ifname] = plugin.add(call("ADD", netns.path, ifname=ifname, **more))
    for ifname in made:
        netns.run("ip", "addr", "flush", "dev", ifname)
    plugin.delete(call("DEL", netns.path, prevResult=to_object(made["eth0"], "1.0.0")))
    kept = "\n".join(left(host))
    assert ("10.213.8.2/32" in kept, "10.213.7.2/32" in kept) == (True, False)
    plugin.delete(call("DEL", netns.path, ifname="net1", prevResult=to_object(made["net1"], "1.0.0")))
    assert left(host) == []


# --- programs that fail ----------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose programs the plugins find first."""
    directory = tmp_path / "programs"
    directory.mkdir()
    found = ("multus_daemon.plugins.process.TOOLS", (str(directory), "/usr/sbin", "/sbin", "/usr/bin", "/bin"))
    monkeypatch.setattr(*found)
    return directory


def fail(programs: Path, tool: str, status: int, text: str, *, unless: str = "no-such-word") -> None:
    """Have `tool` fail, unless its arguments hold the word."""
    real = needed(tool)
    script = f"""\
        #!/bin/sh
        case "$*" in *{unless}*) exec {real} "$@";; esac
        echo {shlex.quote(text)} >&2
        exit {status}
        """
    path = programs / tool
    path.write_text(textwrap.dedent(script))
    path.chmod(0o755)


LOCKED = (
    "Another app is currently holding the xtables lock; still -9s 0us time ahead to have a chance to grab the lock."
)
FAILURES = {
    "locked": (4, LOCKED),
    "other": (1, "iptables: Memory allocation problem."),
    "silent": (1, ""),
    "loader": (
        127,
        "nft: error while loading shared libraries: l.so: cannot open shared object file: No such file or directory",
    ),
    "files": (3, "can't initialize iptables table `nat': Too many open files in system"),
}


@pytest.mark.parametrize("is_gone", [False, True], ids=["lives", "gone"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_a_program_that_fails_fails_the_del(
    backend: str | None,
    failure: str,
    is_gone: bool,
    plugin: Direct,
    host: Any,
    netns: Any,
    call: MakeCall,
    programs: Path,
) -> None:
    """It has not said that there are no rules. The next DEL, once the program works, finds them."""
    made = to_object(plugin.add(call("ADD", netns.path, ipMasqBackend=backend)), "1.0.0")
    before = left(host)
    status, text = FAILURES[failure]
    tools = ["nft"] if backend == "nftables" else ["iptables", "ip6tables"]
    for tool in tools:
        fail(programs, tool, status, text)
    if is_gone:
        gone(netns)
    delete = call("DEL", netns.path, ipMasqBackend=backend, prevResult=made)
    for _ in range(2):
        with pytest.raises(
            CniError, match=rf"^failed to stop masquerading: {tools[0]} failed \(exit status {status}\)"
        ):
            plugin.delete(delete)
        assert left(host) == before
    for tool in tools:
        (programs / tool).unlink()
    plugin.delete(delete)
    assert left(host) == []


@pytest.mark.parametrize("tool", ["iptables-restore", "nft"])
def test_a_removal_that_fails_fails_the_del(
    tool: str, plugin: Direct, host: Any, netns: Any, call: MakeCall, programs: Path
) -> None:
    backend = "nftables" if tool == "nft" else "iptables"
    made = to_object(plugin.add(call("ADD", netns.path, ipMasqBackend=backend)), "1.0.0")
    fail(programs, tool, 4, LOCKED, unless="list")
    delete = call("DEL", netns.path, ipMasqBackend=backend, prevResult=made)
    with pytest.raises(CniError, match=f"^failed to stop masquerading: {tool} failed"):
        plugin.delete(delete)
    (programs / tool).unlink()
    plugin.delete(delete)
    assert left(host) == []


@pytest.mark.parametrize(
    ("backend", "broken"), [("nftables", "iptables"), ("iptables", "nft"), (None, "nft"), (None, "iptables")]
)
def test_a_program_by_which_nothing_was_made_fails_nothing(
    backend: str | None, broken: str, plugin: Direct, host: Any, netns: Any, call: MakeCall, programs: Path
) -> None:
    if backend is None and broken == "iptables":
        # As a host has it whose iptables never worked: the ADD takes nftables then.
        fail(programs, "iptables", 3, "can't initialize")
    made = to_object(plugin.add(call("ADD", netns.path, ipMasqBackend=backend)), "1.0.0")
    fail(programs, broken, 1, "out of order")
    plugin.delete(call("DEL", netns.path, ipMasqBackend=backend, prevResult=made))
    assert left(host) == []


UNSUPPORTED = {
    "iptables": (3, "can't initialize iptables table `nat': Table does not exist (do you need to insmod?)"),
    "nft": (1, "netlink: Error: cache initialization failed: Operation not supported"),
}


@pytest.mark.parametrize("tool", UNSUPPORTED)
def test_a_kernel_without_such_tables_has_no_rules(
    tool: str, plugin: Direct, host: Any, netns: Any, call: MakeCall, programs: Path
) -> None:
    """Also for a DEL that is repeated, which finds nothing in the other backend either."""
    fail(programs, tool, *UNSUPPORTED[tool])
    made = to_object(plugin.add(call("ADD", netns.path)), "1.0.0")
    for _ in range(2):
        plugin.delete(call("DEL", netns.path, prevResult=made))
        assert left(host) == []


class Without:
    """The real tools, but for some."""

    def __init__(self, tools: HostTools, *missing: str) -> None:
        self._tools, self._missing = tools, missing

    def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
        if tool.startswith(self._missing):
            raise ToolNotFoundError(f"{tool} is not in /sbin")
        return self._tools.run(tool, arguments, stdin)


def test_rules_of_a_program_that_has_been_uninstalled(
    plugin: Direct, host: Any, netns: Any, call: MakeCall, tools: HostTools
) -> None:
    made = to_object(plugin.add(call("ADD", netns.path, ipMasqBackend="iptables")), "1.0.0")
    delete = call("DEL", netns.path, ipMasqBackend="iptables", prevResult=made)
    with pytest.raises(CniError, match=r"^failed to stop masquerading: iptables is not in /sbin"):
        plugin.delete(replace(delete, tools=Without(tools, "iptables", "ip6tables")))
    plugin.delete(delete)
    assert left(host) == []


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_an_add_that_found_no_program_can_be_deleted(
    backend: str | None, plugin: Direct, netns: Any, call: MakeCall, tools: HostTools
) -> None:
    without = Without(tools, "iptables", "ip6tables", "nft")
    keys = {} if backend is None else {"ipMasqBackend": backend}
    with pytest.raises(CniError, match="^failed to masquerade: .* is not in /sbin"):
        plugin.add(replace(call("ADD", netns.path, **keys), tools=without))
    plugin.delete(replace(call("DEL", netns.path, **keys), tools=without))


class NoDescriptors:
    """Tools that can't be started."""

    def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
        raise IoFailureError(f"{tool} could not be started: Too many open files", tool)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_that_cannot_be_started_fails_the_del(
    backend: str, plugin: Direct, host: Any, netns: Any, call: MakeCall
) -> None:
    made = to_object(plugin.add(call("ADD", netns.path, ipMasqBackend=backend)), "1.0.0")
    delete = call("DEL", netns.path, ipMasqBackend=backend, prevResult=made)
    with pytest.raises(CniError, match=r"^failed to stop masquerading: .* could not be started: Too many open files"):
        plugin.delete(replace(delete, tools=NoDescriptors()))
    plugin.delete(delete)
    assert left(host) == []


def test_the_chain_of_an_add_that_was_cut_off(plugin: Direct, host: Any, netns: Any, call: MakeCall) -> None:
    """Between the chain and its rules."""
    plugin.add(call("ADD", netns.path))
    host.run("iptables", "-w", "-t", "nat", "-F", "POSTROUTING")
    plugin.delete(call("DEL", netns.path))
    assert left(host) == []


def test_rules_of_others_can_hold_anything(plugin: Direct, host: Any, netns: Any, call: MakeCall) -> None:
    plugin.add(call("ADD", netns.path))
    odd = ["-m", "comment", "--comment", "CNI-" + b"\xff \"' \\".decode(errors="surrogateescape"), "-j", "ACCEPT"]
    host.run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", *odd)
    plugin.delete(call("DEL", netns.path))
    assert host.run("sh", "-c", "iptables -w -t nat -S | grep -c -e '-A POSTROUTING'") == "1\n"


# --- what it costs ---------------------------------------------------------------------------------------------------


class Counting:
    """The real tools, counted."""

    def __init__(self, tools: HostTools) -> None:
        self._tools = tools
        self.calls: list[str] = []

    def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
        self.calls.append(tool)
        return self._tools.run(tool, arguments, stdin)


def test_rules_that_are_there_are_not_made_again(
    plugin: Direct, host: Any, netns: Any, call: MakeCall, ipam: Any, tools: HostTools
) -> None:
    """An ADD reuses rules of an ADD that was cut off; the number of processes does not depend on the rules."""
    ipam.result = {"ips": [V4, V6]}
    plugin.add(call("ADD", netns.path, ipMasqBackend="iptables"))
    before = left(host)
    host.run("iptables", "-w", "-t", "nat", "-D", *_specification(host, "MASQUERADE"))
    for times in (1, 2):
        netns.run("ip", "link", "delete", "eth0")
        counting = Counting(tools)
        plugin.add(replace(call("ADD", netns.path, ipMasqBackend="iptables"), tools=counting))
        assert left(host) == before
        made = ["iptables", "iptables", "iptables", "iptables-restore"]
        assert counting.calls == [*(made if times == 1 else made[:3]), *["ip6tables"] * 3]


def _specification(host: Any, target: str) -> list[str]:
    listed = host.run("iptables", "-w", "-t", "nat", "-S").splitlines()
    return next(shlex.split(line)[1:] for line in listed if "CNI-" in line and f"-j {target}" in line)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"ipMasq": False}, []),
        ({"ipMasqBackend": "iptables"}, ["iptables", "iptables-restore", "nft"]),
        ({"ipMasqBackend": "nftables"}, ["iptables", "nft", "nft"]),
    ],
)
def test_processes_of_a_del(
    keys: dict[str, Any], expected: list[str], plugin: Direct, netns: Any, call: MakeCall, tools: HostTools
) -> None:
    """However many rules others have."""
    made = to_object(plugin.add(call("ADD", netns.path, **keys)), "1.0.0")
    counting = Counting(tools)
    plugin.delete(replace(call("DEL", netns.path, **keys, prevResult=made), tools=counting))
    assert counting.calls == expected
