"""Print how much code a reader of one ADD and one DEL has to know: files, functions, depth of the stack.

`python -m tests.netns.trace`, as root, traces the first ADD of ptp with host-local in a new daemon, and its DEL, from
the decoded request down. With `--list` it names the functions. `make check` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import multus_daemon
from multus_daemon import settings
from multus_daemon.api import wire
from multus_daemon.cluster.kube.store import Cluster
from multus_daemon.daemon import Daemon
from multus_daemon.metrics import Metrics
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from tests import namespaces
from tests.fakes.cluster import WarmStore
from tests.unit.api.harness import body

_OURS = str(Path(multus_daemon.__file__).parent)
POD = Pod(Namespace("web"), PodName("web-1"), PodUid("u-1"))


@dataclass
class Trace:
    """The functions of ours that are entered, lambdas included; a comprehension is part of its function."""

    functions: set[CodeType] = field(default_factory=set)
    deepest: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trace the calling thread, and those that it starts."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not _is_function(frame.f_code):
            return
        stack = []
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename != __file__:
            if caller.f_code.co_name == "<module>":
                # A module that is imported now runs code of its own, once.
                return
            if _is_function(caller.f_code):
                stack.append(f"{_file(caller.f_code)}:{caller.f_code.co_qualname}")
            caller = caller.f_back
        self.functions.add(frame.f_code)
        if len(stack) > len(self.deepest):
            self.deepest = stack[::-1]

    @property
    def names(self) -> list[str]:
        """`<file>:<function>` of each."""
        return sorted(f"{_file(code)}:{code.co_qualname}:{code.co_firstlineno}" for code in self.functions)


def _is_function(code: CodeType) -> bool:
    # Bodies of modules and classes run at the import. Comprehensions have names that are no identifiers.
    is_body = not code.co_flags & inspect.CO_OPTIMIZED
    is_ours = code.co_filename.startswith(_OURS)
    return is_ours and not is_body and code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(_OURS))


def ptp(name: str, directory: Path, number: int = 0) -> str:
    """Return the configuration of a network with host-local; `number` (0 to 9) distinguishes subnets."""
    ipam = {"type": "host-local", "dataDir": str(directory / "leases"), "subnet": f"10.7{number}.0.0/24"}
    return json.dumps({"cniVersion": "1.0.0", "name": name, "type": "ptp", "ipam": ipam})


def make_daemon(directory: Path, store: WarmStore) -> Daemon:
    """Make a whole daemon that does not listen; its cluster network is `cluster`."""
    found = {
        "cniDir": str(directory / "cni"),
        "binDir": str(directory / "bin"),
        "chrootDir": "",
        "socketDir": str(directory / "run"),
        "clusterNetwork": "cluster",
        "multusAutoconfigDir": "",
        "builtinPlugins": "prefer",
        "maxDelegateProcesses": 4,
        "connectionLimit": 256,
    }
    parsed = settings.parse(json.dumps(found).encode(), "the test")
    return Daemon(parsed, Cluster(cast(Any, store), LoopPortal()), Gates(), Metrics(version="test"))


async def trace(netns: str, directory: Path) -> tuple[Trace, Trace]:
    """Trace one ADD and its DEL by a daemon that has served nothing yet."""
    (directory / "run").mkdir()
    verbs = make_daemon(directory, WarmStore({"cluster": ptp("cluster", directory)}, POD))._api._routes
    added, deleted = Trace(), Trace()

    def traced(found: Trace, work: Callable[[CniRequest], Any], verb: str) -> None:
        request = wire.decode(body(verb, CNI_NETNS=netns)).request
        assert isinstance(request, CniRequest)
        with found.running():
            work(request)

    await portal.run(Deadline(), lambda: traced(added, verbs["ADD"], "ADD"), name="ADD")
    await portal.run(Deadline(), lambda: traced(deleted, verbs["DEL"], "DEL"), name="DEL")
    return added, deleted


def main() -> None:
    """Print the figures, and what is entered if that is asked for."""
    if os.geteuid() != 0:
        print("how much code one ADD and one DEL enter: as root only")
        return
    with tempfile.TemporaryDirectory() as directory, namespaces.named("trace") as netns:
        found = asyncio.run(trace(netns, Path(directory)))
    for verb, traced in zip(("ADD", "DEL"), found, strict=True):
        files = {name.partition(":")[0] for name in traced.names}
        print(f"{verb} enters {len(files)} files, {len(traced.names)} functions, depth {len(traced.deepest)}")
        if "--list" in sys.argv:
            print("\n".join([*traced.names, "-- deepest", *traced.deepest, ""]))


if __name__ == "__main__":
    main()
