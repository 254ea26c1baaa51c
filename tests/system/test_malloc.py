import ctypes
import platform
import subprocess
import sys
import textwrap
import types

import pytest

from multus_daemon.runtime import malloc

HEAD = """
    import asyncio, contextlib, pathlib, re, sys, threading
    from multus_daemon.runtime import malloc

    def anonymous():
        return int(re.search(r"(?m)^Anonymous: +(\\d+)", pathlib.Path("/proc/self/smaps_rollup").read_text())[1])

    if sys.argv[1] == "settled":
        assert malloc.settle()
"""

# As a daemon's threads do it with the table of interned strings: each copies it in turn, and frees the one before.
COPIES = """
    go_on, arrived = threading.Event(), threading.Semaphore(0)
    table = bytearray(2_000_000)

    def copy():
        global table
        # Smaller each time, as what malloc's bound rises to has whole pages.
        table = bytearray(len(table) - 100)
        arrived.release()
        go_on.wait()

    before = anonymous()
    for _ in range(8):
        threading.Thread(target=copy).start()
        arrived.acquire()
    print(anonymous() - before)
    go_on.set()
"""


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX. An unknown one is no error."""
    calls = []

    def mallopt(*call: int) -> int:
        calls.append(call)
        return 1

    library = types.SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    assert malloc.settle()
    assert calls == [(-3, 128 * 1024), (-1, 128 * 1024), (-8, 1)]


def grown(program: str, how: str) -> int:
    """KiB by which a process has grown at the end of the program."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc: other C libraries are left as they are")
    command = [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(program), how]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=30).stdout)


def test_a_large_block_that_is_freed_goes_back_whichever_thread_made_it() -> None:
    settled = grown(COPIES, "settled")
    assert settled < 2000
    # What is mended is there at all.
    assert grown(COPIES, "default") > settled + 4000
