"""A burst of ADDs with large plugins under a memory limit: all succeed, and the kernel ends nothing.

    python -m tests.soak.memory [--limit 128] [--adds 60] [--beside 30] [--processes 0]

The daemon and its plugins share a control group of so many MiB; each plugin takes 40 MB (tests/soak/big_plugin.py).
`--beside`: MiB that another process in the group holds, far more than a cluster adds to a standalone daemon.
`--processes`: `maxDelegateProcesses`, 0 for the daemon's own choice. Exit status 1, with a line for each thing wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.memory_group import MemoryGroup, NoMemoryGroupError
from tests.e2e.node import Node
from tests.soak.churn import Outcome, end_in_good_order, report
from tests.soak.disturbance import Repeated

MIB = 1024 * 1024
BIG = Path(__file__).with_name("big_plugin.py")
REPEATS = 20
"""A kubelet repeats what was too early for ever."""


def prepare(node: Node) -> None:
    """Declare a cluster network of the large plugin."""
    shutil.copy(BIG, node.bin_dir / "big")
    (node.bin_dir / "big").chmod(0o755)
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "big"})


class _Watch(Repeated):
    """The most memory that was in use, looked at a hundred times a second."""

    def __init__(self, group: MemoryGroup) -> None:
        super().__init__("memory", (0.01, 0.01))
        self._group = group
        self.most = 0

    def work(self) -> None:
        self.most = max(self.most, self._group.anonymous())


@contextlib.contextmanager
def held(group: MemoryGroup, mib: int) -> Iterator[None]:
    """A process in the group that has so many MiB, its interpreter's included."""
    own = 8
    program = f"memory = bytearray(b'x') * ({max(0, mib - own)} << 20); print('.', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", f"open({str(group.path / 'cgroup.procs')!r}, 'w').write('0')\n{program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        process.stdout.read(1)
        yield
    finally:
        process.kill()
        process.communicate()


def run(node: Node, group: MemoryGroup, adds: int) -> Outcome:
    """So many ADDs at once, each followed by its DEL, on a node that is prepared and whose daemon is in the group."""
    wrong: list[str] = []
    repeated = 0
    for number in range(adds):
        node.pod(f"p{number}")
    node.start(timeout=60)
    assert node.daemon is not None
    before = group.anonymous()
    netns = node.add_netns()

    def until_done(verb: str, number: int) -> None:
        """Repeat a call that is answered with "try again later", as a kubelet does."""
        nonlocal repeated
        for left in reversed(range(REPEATS)):
            answer = node.cni(verb, f"c{number}", netns, f"p{number}", timeout=300)
            if answer.code == 0:
                return
            if answer.json["code"] != 11 or not left or group.killed():
                wrong.append(f"{verb} of c{number}: {answer.json}")
                return
            repeated += 1

    def one(number: int) -> None:
        until_done("ADD", number)
        until_done("DEL", number)

    began = time.monotonic()
    with _Watch(group) as watch, ThreadPoolExecutor(adds) as pool:
        for done in [pool.submit(one, number) for number in range(adds)]:
            done.result()
    seconds = time.monotonic() - began
    if killed := group.killed():
        wrong.insert(0, f"the kernel has ended {killed} processes for want of memory")
    if node.daemon.poll() is not None:
        wrong.append(f"the daemon has ended: {node.daemon.returncode}")
    wrong += [f"file {name}" for name in node.leftovers()]
    places = re.search(r"at most \d+ plugin processes at once: .*", node.log.read_text())
    after = group.anonymous()
    node.kill()
    text = (
        f"{adds} pairs in {seconds:.0f} s, {places[0] if places else ''}; anonymous memory: {before / MIB:.0f} MiB "
        f"before, {watch.most / MIB:.0f} MiB at most, {after / MIB:.0f} MiB after; told to come back later {repeated}"
    )
    return Outcome(text, wrong)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=128, help="MiB")
    parser.add_argument("--adds", type=int, default=60)
    parser.add_argument("--beside", type=int, default=30, help="MiB")
    parser.add_argument("--processes", type=int, default=0)
    given = parser.parse_args()
    end_in_good_order()
    try:
        group = MemoryGroup(given.limit * MIB)
    except NoMemoryGroupError as error:
        print(f"memory: not run: {error}")
        return 1
    settings = {"maxDelegateProcesses": given.processes}
    with group, held(group, given.beside), Node(settings=settings, group=group) as node:
        prepare(node)
        outcome = run(node, group, given.adds)
    return report(f"memory, limit {given.limit} MiB, cgroup v{group.version}", outcome)


if __name__ == "__main__":
    sys.exit(main())
