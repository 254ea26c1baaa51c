"""Find what deleted pods have left on a node: links, addresses, files, rules, processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.node import Node
from tests.programs import needed

_RULES = (["iptables-save"], ["ip6tables-save"], ["nft", "-s", "list", "ruleset"])


@dataclass
class Remains:
    """Compares the node with what it was when this was made, after each kind of pod had been there once."""

    node: Node
    links: frozenset[str] = field(init=False)
    """Bridges stay."""
    routes: frozenset[str] = field(init=False)
    rules: frozenset[str] = field(init=False)
    """Chains that plugins make once for the whole node stay."""
    waited: float = 0.0
    """Seconds that `settled` waited."""

    def __post_init__(self) -> None:
        self.links = frozenset(self.node.links())
        self.routes = frozenset(routes(self.node))
        self.rules = frozenset(rules(self.node))

    def now(self, namespaces: Iterable[str] = ()) -> list[str]:
        """A line for each thing that is there and was not; `namespaces`: of pods that are gone."""
        node = self.node
        found = [f"link {name} on the host" for name in set(node.links()) - self.links]
        for netns in namespaces:
            found += [f"link {name} in {Path(netns).name}" for name in node.links(netns) if name != "lo"]
        found += [f"route {route}" for route in set(routes(node)) - self.routes]
        found += [f"rule {rule}" for rule in set(rules(node)) - self.rules]
        found += [f"file {name}{_content(node.root / name)}" for name in node.leftovers()]
        found += [f"process {name}" for name in processes(node)]
        return sorted(found)

    def settled(
        self,
        namespaces: Iterable[str] = (),
        seconds: float = 180,
        *,
        staying: Callable[[list[str]], Collection[str]] = lambda left: (),
    ) -> list[str]:
        """`now`, once it is empty or so much time is over: what waits in the spool is the daemon's to do.

        `staying`: returns which of the lines are not waited for.
        """
        kept = list(namespaces)
        began = time.monotonic()
        left = self.now(kept)
        while time.monotonic() < began + seconds and set(left).difference(staying(left)):
            time.sleep(0.2)
            left = self.now(kept)
        self.waited = time.monotonic() - began
        return left


def _content(path: Path) -> str:
    """The beginning of an address file, whose name does not tell whose it is; empty for others."""
    try:
        return f": {path.read_bytes()[:80]!r}" if path.name[0].isdecimal() else ""
    except OSError:
        return ""


def routes(node: Node) -> list[str]:
    """The host's routes, without those of links that `Remains` counts by themselves."""
    return [f"{route['dst']} dev {route.get('dev')}" for route in node.ip("route")]


def rules(node: Node) -> list[str]:
    """Every rule and chain of the host's packet filter, counters left out."""
    found = []
    for command in _RULES:
        inside = [needed("ip"), "netns", "exec", Path(node.host).name, *command]
        text = subprocess.run(inside, check=False, capture_output=True, text=True, timeout=60).stdout
        lines = (line.strip() for line in text.splitlines())
        found += [f"{command[0]}: {line.partition(' [')[0]}" for line in lines if line and line[0] not in "#}"]
    return found


def processes(node: Node) -> list[str]:
    """Processes of plugins, wherever they are, and whatever else runs in the host's network but the daemon."""
    host = os.stat(node.host).st_ino
    daemon = node.daemon.pid if node.daemon else 0
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in (daemon, os.getpid()):
            continue
        try:
            environ = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            is_inside = (entry / "ns" / "net").stat().st_ino == host
        except OSError:
            continue
        if is_inside or f"CNI_PATH={node.bin_dir}".encode() in environ:
            found.append(f"{entry.name}: {command or 'a zombie'}")
    return found
