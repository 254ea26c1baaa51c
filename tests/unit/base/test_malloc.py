import platform
import subprocess
import sys
import textwrap

import pytest

# As a daemon's threads do it with the table of interned strings: each copies it in turn, and frees the one before.
PROGRAM = """
    import pathlib, re, sys, threading
    from multus_daemon.base import malloc

    if sys.argv[1] == "set":
        assert malloc.settle()

    def anonymous():
        return int(re.search(r"(?m)^Anonymous: +(\\d+)", pathlib.Path("/proc/self/smaps_rollup").read_text())[1])

    go_on, arrived = threading.Event(), threading.Semaphore(0)
    table = bytearray(2_000_000)

    def copy():
        global table
        small = [bytes(1000) for _ in range(100)]
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


def grown(how: str) -> int:
    """KiB by which a process has grown after eight threads have replaced a block of 2 MB."""
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), how]
    return int(subprocess.run(program, stdout=subprocess.PIPE, check=True, timeout=30).stdout)


def test_a_large_block_that_is_freed_goes_back_whichever_thread_made_it() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc: other C libraries have no mallopt")
    by_default, settled = grown("default"), grown("set")
    assert settled < 2000
    # What is mended is there at all.
    assert by_default > settled + 4000, (by_default, settled)
