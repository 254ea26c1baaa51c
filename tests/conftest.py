"""Tiers and guards of the whole suite.

The tier of a test is a marker that its folder gives it. No task outlives its test, no call of ours blocks the event
loop, and a test of the unit tier starts no process. Warnings are errors by `pyproject.toml`.
"""

import asyncio
import gc
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from blockbuster import BlockBuster

TESTS = Path(__file__).parent

# `from tests.… import` works with `pytest` as with `python -m pytest`.
if (root := str(TESTS.parent)) not in sys.path:
    sys.path.insert(0, root)

# Folders that `make unit`, `make test` (unit and integration), `make e2e` and `make wide` select.
TIERS = {
    "unit": ("unit", "spec", "repo"),
    "integration": ("contract", "fuzz", "netns", "reports", "shim", "system", "vectors"),
    "e2e": ("e2e",),
    "wide": ("wide",),
}
_TIER_OF_FOLDER = {folder: tier for tier, folders in TIERS.items() for folder in folders}

# Timing on a loaded machine is not a property of the code: no deadline for an example.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=15)
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("full" if os.environ.get("CI") else "quick"))


# readline sets it for the processes that pytest starts, its workers too; programs would write as for a terminal.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the thousands of tests out of every collection of garbage, which took a tenth of the unit tier's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the tier of its folder below `tests/`."""
    for item in items:
        if TESTS not in item.path.parents:
            continue  # A sample that a test of these guards has written elsewhere.
        folder = item.path.relative_to(TESTS).parts[0]
        if folder not in _TIER_OF_FOLDER:
            raise pytest.UsageError(f"{item.path}: tests/{folder} is in no tier: add it to TIERS in tests/conftest.py")
        item.add_marker(_TIER_OF_FOLDER[folder])


class ProcessStartedError(AssertionError):
    """A test of the unit tier has started a process."""


_PROCESS_EVENTS = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
_started_in_unit_test: list[str] | None = None


def _forbid_processes(event: str, args: tuple[object, ...]) -> None:
    if event in _PROCESS_EVENTS and _started_in_unit_test is not None:
        _started_in_unit_test.append(f"{event} {args!r:.200}")
        raise ProcessStartedError(_started_in_unit_test[-1])


sys.addaudithook(_forbid_processes)


@pytest.fixture(autouse=True)
def no_processes_in_unit_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the unit tier that starts a process fails, also where the code under test swallows the exception."""
    global _started_in_unit_test
    if request.node.get_closest_marker("unit") is None:
        yield
        return
    started: list[str] = []
    _started_in_unit_test = started
    yield
    _started_in_unit_test = None
    assert not started, "a test of the unit tier starts no process; its place is tests/system"


class _Every(frozenset[str]):
    """All function names of a file."""

    def __contains__(self, name: object) -> bool:
        return True


# Short file accesses on the event loop that are meant (measured: 0.34 ms with fsync).
_MAY_BLOCK = (
    "multus_daemon/runtime/fs.py",
    "multus_daemon/pod/store.py",
    "multus_daemon/plugins/cache.py",
    # It reads /proc, where no disk is waited for.
    "multus_daemon/plugins/strays.py",
    # A loop pauses when its share of processor time is used up.
    "multus_daemon/runtime/side_loop.py",
    # A link in the way to a plugin is followed inside the chroot.
    "multus_daemon/plugins/find.py",
    # An import in a function, the first time.
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


@pytest.fixture(autouse=True, scope="session")
def no_blocking_calls() -> Iterator[None]:
    """A blocking call on the event loop with a frame of the product on its stack raises BlockingError there."""
    guard = BlockBuster(["multus_daemon", "multus_tools"])
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
def no_leaked_tasks(request: pytest.FixtureRequest) -> None:
    """A task that is left when an asynchronous test and its fixtures are through fails the test."""
    if inspect.iscoroutinefunction(getattr(request.node, "function", None)):
        request.getfixturevalue("_task_guard")


@pytest.fixture
async def _task_guard() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    left: set[asyncio.Task[Any]] = set()
    yield
    own = asyncio.current_task()
    for pause in (0, 0, 0, 0.01, 0.05, 0.2, 1, 5, 10, 0):
        left = {task for task in asyncio.all_tasks() - before if task is not own and not task.done()}
        if not left:
            return
        # Cancelled and ending tasks get a chance to finish.
        await asyncio.sleep(pause)
    names = sorted(f"{task.get_name()}: {task.get_coro()}" for task in left)
    for task in left:
        task.cancel()
    await asyncio.wait(left, timeout=1)
    pytest.fail("tasks left behind: " + "; ".join(names))


@pytest.fixture
def logging_as_found() -> Iterator[None]:
    """Restore logging after a test that sets it up."""
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
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB of its own, to be filled or made read-only."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urm`")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "multus-test", str(path)], check=True)
    yield path
    # Lazily: what a failed test left open must not keep it.
    subprocess.run(["umount", "-l", str(path)], check=True)
