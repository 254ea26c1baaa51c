"""Pods start at once, in the memory that our manifest gives: ten times that of upstream's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Final

from tests.e2e.build_tools import ToolError
from tests.e2e.memory_group import MemoryGroup, NoMemoryGroupError
from tests.e2e.rights import SHIPPED, Container
from tests.record.incident import Incident, Seen
from tests.record.side import Side

PODS: Final = 30
SECONDS: Final = 40.0
PLUGIN: Final = """\
#!/usr/bin/python3 -IS
import sys, time
from pathlib import Path
sys.stdin.read()
memory = bytearray(b"x") * (32 << 20)
begun = Path("{begun}")
with begun.open("a") as file:
    file.write(".")
end = time.monotonic() + 4
while begun.stat().st_size < 16 and time.monotonic() < end:
    time.sleep(0.05)
print('{{"cniVersion": "1.0.0"}}')
"""
"""It has 40 MB, less than the 55 of the report, and asks an agent that answers late at first."""


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    program = side.node.bin_dir / "big"
    program.write_text(PLUGIN.format(begun=side.node.root / "begun"))
    program.chmod(0o755)
    side.definition("big", json.dumps({"cniVersion": "1.0.0", "name": "big", "type": "big"}))
    pods = [f"web-{number}" for number in range(PODS)]
    for pod in pods:
        side.pod(pod, "big")
        side.spaces[pod] = side.node.add_netns()
    with grouped(side) as group:
        side.serve()
        begin = time.monotonic()
        started = attach(side, pods)
        seconds, killed = time.monotonic() - begin, group.killed()
        text = f"{started} of {PODS} pods start within {seconds:.0f} s; the kernel kills {killed} processes"
        if not side.runs:
            text += ", the daemon among them"
    return Seen(killed > 0 or started < PODS, text)


def attach(side: Side, pods: Sequence[str]) -> int:
    """How many of the pods are attached, all at once; as long as the daemon runs."""
    waiting, started = {pod: start(side, pod) for pod in pods}, 0
    end = time.monotonic() + SECONDS
    while waiting and side.runs and time.monotonic() < end:
        for pod, shim in list(waiting.items()):
            if shim.poll() is not None:
                del waiting[pod]
                started += shim.returncode == 0
                # A kubelet repeats what is told to come back later.
                if shim.returncode and json.loads(shim.communicate()[0])["code"] == 11:
                    waiting[pod] = start(side, pod)
        time.sleep(0.05)
    for shim in waiting.values():
        shim.kill()
        shim.communicate()
    return started


def start(side: Side, pod: str) -> subprocess.Popen[bytes]:
    """Start the ADD of a pod."""
    environment = side.node.environment("ADD", f"c-{pod}", side.spaces[pod], pod, side.namespace, side.uids[pod])
    shim = subprocess.Popen(
        [str(side.shim)],
        env=environment | {"PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert shim.stdin is not None
    shim.stdin.write(side.upstream.stdin())
    shim.stdin.close()
    shim.stdin = None
    return shim


@contextlib.contextmanager
def grouped(side: Side) -> Iterator[MemoryGroup]:
    """Put the daemon and its plugins into a control group of that size."""
    try:
        made = MemoryGroup(SHIPPED.memory)
    except NoMemoryGroupError as error:
        raise ToolError(str(error)) from error
    with made as group:
        side.node.container = Container(side.node.root, SHIPPED, group)
        enter = f'echo $$ >{group.path}/cgroup.procs; exec "$@"'
        side.upstream.process.command = ["sh", "-ec", enter, "sh", *side.upstream.process.command]
        yield group


ROW = Incident(
    __name__,
    f"A burst of pods in {SHIPPED.memory >> 20} MiB: the kernel kills the daemon or its plugins",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1346",
    show,
)
