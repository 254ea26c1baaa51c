"""How the daemon's memory is laid out."""

from __future__ import annotations

import itertools
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.node import Node

HEAP = 64 * 1024 * 1024
"""Bytes that glibc reserves for the heap of a thread, in use up to some page; it begins at a multiple of them."""

# The daemon after 8 MB of its heap have become free, between small blocks that stay; with another interval.
HOLES = """
import runpy, sys
import multus_daemon.daemon
from multus_daemon.runtime import malloc
blocks = [bytearray(8000 if number % 2 else 600) for number in range(2000)]
del blocks[1::2]
malloc.TRIM_SECONDS = float(sys.argv[1])
sys.argv = sys.argv[4:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_threads_have_no_heaps_of_their_own(node: Node) -> None:
    """Other threads could not use memory that is freed in the heap of one thread (`runtime.malloc`)."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc: other C libraries have no heaps by thread")
    node.pod("one")
    node.start()
    netns = node.add_netns()
    for verb in ("ADD", "CHECK", "DEL"):
        assert node.cni(verb, "one", netns, "one").code == 0
    assert node.daemon is not None
    process = Path(f"/proc/{node.daemon.pid}")
    threads = len(list((process / "task").iterdir()))
    assert threads > 3, "there is nothing to see"
    found = re.findall(r"(?m)^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ 00:00 0 *$", (process / "maps").read_text())
    mappings = [(int(start, 16), int(end, 16), rights) for start, end, rights in found]
    assert mappings
    heaps = [
        hex(start)
        for (start, end, rights), (behind, last, reserved) in itertools.pairwise(mappings)
        if (rights, reserved, behind, last) == ("rw-p", "---p", end, start + HEAP) and start % HEAP == 0
    ]
    assert heaps == []


def test_what_is_free_in_the_middle_of_the_heap_goes_back(make_node: Callable[..., Node]) -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc: other C libraries are left as they are")
    kept, trimmed = (make_node(wrapper=(sys.executable, "-c", HOLES, every)) for every in ("3600", "0.05"))
    for node in (kept, trimmed):
        node.start()
    trimmed.wait_until(lambda: heap(trimmed) < heap(kept) - 3000, "3 MB have gone back")


def heap(node: Node) -> int:
    """KiB of the heap that are in memory."""
    assert node.daemon is not None
    smaps = Path(f"/proc/{node.daemon.pid}/smaps").read_text()
    found = re.search(r"(?s)\[heap\]\n.*?Anonymous: +(\d+)", smaps)
    assert found
    return int(found[1])
