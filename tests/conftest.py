"""Guards of the whole suite: no task outlives its test, no call of ours blocks the event loop.

Warnings are errors by `pyproject.toml`.
"""

import asyncio
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from blockbuster import BlockBuster

# `from tests.… import` works with `pytest` as with `python -m pytest`.
if (root := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.insert(0, root)

# Timing on a loaded machine is no property of the code.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


class _Every:
    """All function names of a file."""

    def __contains__(self, name):
        return True


# Short file accesses on the event loop that are meant (measured: 0.34 ms with fsync).
_MAY_BLOCK = (
    "multus_daemon/base/fs.py",
    "multus_daemon/delegates/store.py",
    "multus_daemon/delegates/cache.py",
    # A link in the way to a plugin is followed inside the chroot.
    "multus_daemon/delegates/find.py",
    # A log line is written where it is logged, so that none is lost in a crash.
    "logging/__init__.py",
    "logging/handlers.py",
    # An import in a function, the first time.
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


@pytest.fixture(autouse=True, scope="session")
def no_blocking_calls():
    """A blocking call on the event loop with a frame of `multus_daemon` on its stack raises BlockingError there."""
    guard = BlockBuster(["multus_daemon"])
    for name in [name for name in guard.functions if name.startswith("threading.")]:
        # Locks of libraries (prometheus_client, queues) are held for microseconds; a check would fail by chance.
        del guard.functions[name]
    for function in guard.functions.values():
        for file in _MAY_BLOCK:
            function.can_block_in(file, _Every())
    guard.activate()
    yield
    guard.deactivate()


@pytest.fixture(autouse=True)
def no_leaked_tasks(request):
    """A task that is left when an asynchronous test and its fixtures are through fails the test."""
    if inspect.iscoroutinefunction(getattr(request.node, "function", None)):
        request.getfixturevalue("_task_guard")


@pytest.fixture
async def _task_guard():
    before = asyncio.all_tasks()
    yield
    own = asyncio.current_task()
    for pause in (0, 0, 0, 0.01, 0.05, 0.2):
        left = {task for task in asyncio.all_tasks() - before if task is not own and not task.done()}
        if not left:
            return
        # What has been cancelled or is about to end gets its chance.
        await asyncio.sleep(pause)
    names = sorted(f"{task.get_name()}: {task.get_coro()}" for task in left)
    for task in left:
        task.cancel()
    await asyncio.wait(left, timeout=1)
    pytest.fail("tasks left behind: " + "; ".join(names))


@pytest.fixture
def logging_as_found():
    """For tests that set up logging: it is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("multus_daemon")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB of its own, to be filled or made read-only."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urm`")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "multus-test", str(path)], check=True)
    yield path
    # Lazily: what a failed test left open must not keep it.
    subprocess.run(["umount", "-l", str(path)], check=True)
