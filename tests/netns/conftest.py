"""Real network namespaces: one for the host's side of every test, and as many for pods as it asks for.

Root is needed, or a user namespace in which one is root: `unshare -Urnm .venv/bin/python -m pytest tests/netns`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import HostTools, Plugin
from multus_daemon.plugins.process import ToolRunner
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result, decode, from_object
from tests import packets
from tests.fakes.runner import PlayedPlugin
from tests.namespaces import HOW, entered, kept, make_at, remove_netns, set_up, unshare
from tests.programs import PACKAGES, needed, require
from tests.waiting import PATIENCE


def _execute(command: Sequence[str], stdin: str | None = None) -> str:
    if command[0] == "sh":
        # The programs of a script.
        require(*sorted(PACKAGES.keys() & set(re.findall(r"[\w-]+", command[2]))))
    done = subprocess.run(
        [needed(command[0]), *command[1:]], input=stdin, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Netns:
    """A network namespace; `path` is empty for the one that the test itself runs in."""

    path: str

    def run(self, *command: str) -> str:
        """Run `command` in the namespace and return its output; it must succeed."""
        with entered(self.path):
            return _execute(command)

    def ip(self, *arguments: str) -> Any:
        """Run `ip -j` in the namespace and return its decoded output."""
        return json.loads(self.run("ip", "-j", *arguments) or "[]")

    def batch(self, *lines: str, options: Sequence[str] = ()) -> None:
        """Run `ip` for each line, in one process; all must succeed."""
        with entered(self.path):
            _execute(["ip", *options, "-batch", "-"], "".join(f"{line}\n" for line in lines))

    def replies(self, address: str, **options: Any) -> int:
        """Send echo requests from the namespace, and return how many were answered: `packets.replies`."""
        return packets.replies(address, netns=self.path, **options)

    def reaches(self, address: str, **options: Any) -> bool:
        """Return whether one echo request from the namespace is answered."""
        return self.replies(address, **options) == 1

    def links(self) -> set[str]:
        """The names of all links but lo."""
        with entered(self.path):
            return {name for _, name in socket.if_nameindex()} - {"lo"}

    def sysctl(self, name: str) -> str:
        """The value of e.g. `net/ipv4/ip_forward`."""
        with entered(self.path):
            return Path("/proc/sys", name).read_text().strip()

    def files(self, *folders: str) -> dict[str, str]:
        """The content of all files below `folders` that can be read, as the namespace sees them."""
        found = {}
        with entered(self.path):
            for top in folders:
                for folder, _, names, directory in os.fwalk(top):
                    for name in names:
                        try:
                            file = os.open(name, os.O_RDONLY, dir_fd=directory)
                        except OSError:
                            continue
                        try:
                            found[f"{folder}/{name}"] = os.read(file, 65536).decode()
                        except OSError:
                            pass
                        finally:
                            os.close(file)
        return found

    def set_sysctl(self, name: str, value: str) -> None:
        """Write it."""
        with entered(self.path):
            Path("/proc/sys", name).write_text(value)

    def detect_duplicates(self, detect: bool = True) -> None:
        """Turn IPv6 duplicate address detection on or off for links that are made from now on.

        Detection takes a second or two for each address, so it is off in new namespaces unless a test turns it on.
        Without it, an address is still tentative until the kernel's worker has looked at it.
        """
        self.set_sysctl("net/ipv6/conf/default/dad_transmits", "1" if detect else "0")
        self.set_sysctl("net/ipv6/conf/default/router_solicitation_delay", "1" if detect else "0")


@pytest.fixture(autouse=True)
def host() -> Iterator[Netns]:
    """Moves the test into a namespace of its own, which is the host's side for it and vanishes with it."""
    with new_host() as made:
        yield made


@pytest.fixture
def another_host(host: Netns) -> Callable[[], contextlib.AbstractContextManager[Netns]]:
    """For the duration of a block the host's side is a new one."""
    return new_host


@contextlib.contextmanager
def new_host() -> Iterator[Netns]:
    with kept():
        try:
            unshare()
        except OSError as error:
            pytest.skip(f"{error.strerror}: {HOW}")
        made = Netns("")
        set_up("lo")
        # A new namespace begins with what the first one has now.
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            made.set_sysctl(f"net/{name}", "0")
        made.detect_duplicates(False)
        yield made


_numbers = itertools.count(1)


@pytest.fixture
def make_netns(host: Netns, tmp_path: Path) -> Iterator[Callable[[], Netns]]:
    """Makes namespaces, bind-mounted below tmp_path as `ip netns add` would have them below /run/netns."""
    made: list[Path] = []

    def make() -> Netns:
        path = tmp_path / f"netns-test-{os.getpid()}-{next(_numbers)}"
        made.append(path)
        make_at(path)
        netns = Netns(str(path))
        netns.detect_duplicates(False)
        return netns

    yield make
    for path in made:
        remove_netns(path)


@pytest.fixture
def netns(make_netns: Callable[[], Netns]) -> Netns:
    """One pod's namespace."""
    return make_netns()


@dataclass
class StubIpam:
    """An IPAM plugin that answers ADD with `result` and raises for the verbs in `errors`.

    `hook` runs before either. As one that is a process, it is not begun where the deadline is over.
    """

    result: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, CniError] = field(default_factory=dict)
    hook: Callable[[str], None] | None = None
    calls: list[tuple[str, Invocation]] = field(default_factory=list)

    @property
    def verbs(self) -> list[str]:
        return [invocation.verb for _, invocation in self.calls]

    def plugin_for(self, plugin_type: str, invocation: Invocation) -> Plugin:
        """The plugin as a built-in asks for it."""
        return PlayedPlugin(plugin_type, self.run)

    def run(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        deadline.check()
        assert netns.path == invocation.netns, "the namespace of another path"
        self.calls.append((plugin_type, invocation))
        if self.hook is not None:
            self.hook(invocation.verb)
        if invocation.verb in self.errors:
            raise self.errors[invocation.verb]
        if invocation.verb != "ADD":
            return Result()
        return decode(json.dumps(self.result).encode(), invocation.cni_version)


@pytest.fixture
def ipam() -> StubIpam:
    """Assigns 10.213.7.2/24 with the gateway 10.213.7.1 and a default route, until told otherwise."""
    return StubIpam(
        {
            "cniVersion": "1.0.0",
            "ips": [{"address": "10.213.7.2/24", "gateway": "10.213.7.1"}],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
    )


class RealTools:
    """The daemon's own, in the namespace that the calling thread is in; each call has an event loop of its own."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        # As the way to the daemon's event loop does.
        deadline.check()
        require(tool)
        # A new runner for each: its places are those of one event loop.
        return ToolRunner().run(tool, arguments, stdin)


@pytest.fixture
def tools() -> HostTools:
    """Runs the real `nft` and `iptables`, in the test's host."""
    return RealTools()


@pytest.fixture
def make_call(ipam: StubIpam, tools: HostTools) -> Callable[..., Call]:
    """Makes a call of a built-in plugin with `ipam` as its IPAM plugin; keywords are keys of the configuration."""

    def make(
        verb: str, path: str, *, ifname: str = "eth0", container: str = "container1", cni_args: str = "", **keys: Any
    ) -> Call:
        fields = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": {"type": "stub"}, **keys}
        fields = {key: value for key, value in fields.items() if value is not None}
        previous = fields.get("prevResult")
        raw = json.dumps(fields).encode()
        return Call(
            invocation=Invocation(verb, container, path, ifname, cni_args, "/opt/cni/bin", fields, raw=raw),
            name=fields["name"],
            cni_version=fields["cniVersion"],
            prev_result=None if previous is None else from_object(previous, fields["cniVersion"]),
            host_root=Path("/"),
            plugin_for=ipam.plugin_for,
            netns=PodNetns(path),
            tools=tools,
        )

    return make
