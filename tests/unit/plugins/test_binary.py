"""A binary, and a program of the host: the event loop runs the process, the calling thread waits."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import pytest

from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.plugins.tools import ToolRunner
from multus_daemon.runtime import deadline, portal
from multus_daemon.runtime.deadline import Deadline, ExpiredError
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, TryAgainLaterError
from multus_daemon.spec.cni.result import Interface, Result
from tests.calls import run

P = ParamSpec("P")
T = TypeVar("T")


async def as_a_request(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread of its own."""
    return await portal.run(Deadline(), functools.partial(work, *args, **kwargs))


class Runner(ProcessRunner):
    """Prints `stdout`, raises `error`, or hangs."""

    stdout = b'{"cniVersion": "0.4.0", "interfaces": [{"name": "net1"}]}'

    def __init__(self) -> None:
        super().__init__(["/opt/cni/bin"], portal=LoopPortal())
        self.calls: list[tuple[str, Invocation, str]] = []
        self.threads: set[threading.Thread] = set()
        self.error: CniError | None = None
        self.hangs = self.is_cancelled = False

    async def execute(self, plugin_type: str, invocation: Invocation, path: str = "") -> bytes:
        self.calls.append((plugin_type, invocation, path))
        self.threads.add(threading.current_thread())
        try:
            await asyncio.sleep(60 if self.hangs else 0)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        if self.error:
            raise self.error
        return self.stdout


def invocation(verb: str = "ADD", path: str = "") -> Invocation:
    served_by = {"ptp": path} if path else {}
    fields = {"cniVersion": "1.0.0"}
    return Invocation(verb, "c1", "/run/netns/p1", "net1", "", "/opt/cni/bin", fields, served_by=served_by)


def call(runner: Runner, invocation: Invocation) -> Result:
    return run(Plugins(runner, "off").recorded("ptp", invocation), invocation)


@pytest.fixture
async def runner() -> Runner:
    return Runner()


@pytest.mark.parametrize("path", ["", "/elsewhere/ptp"])
async def test_it_is_run_on_the_loop_and_its_result_read(runner: Runner, path: str) -> None:
    assert await as_a_request(call, runner, invocation(path=path)) == Result((Interface("net1"),))
    assert runner.calls == [("ptp", invocation(), path)]
    assert runner.threads == {threading.main_thread()}


@pytest.mark.parametrize("stdout", [b"", b"garbage", b"[]", b'{"ips": 3}'])
async def test_an_add_that_prints_no_result_has_failed(runner: Runner, stdout: bytes) -> None:
    runner.stdout = stdout
    with pytest.raises(DecodingFailureError):
        await as_a_request(call, runner, invocation())


@pytest.mark.parametrize("verb", ["DEL", "CHECK", "STATUS", "GC"])
@pytest.mark.parametrize("stdout", [b"", b"garbage", Runner.stdout])
async def test_of_other_verbs_nothing_that_is_printed_counts(runner: Runner, verb: str, stdout: bytes) -> None:
    runner.stdout = stdout
    assert await as_a_request(call, runner, invocation(verb)) == Result()
    assert len(runner.calls) == 1


async def test_the_error_of_a_binary_is_raised(runner: Runner) -> None:
    runner.error = TryAgainLaterError("no address left")
    with pytest.raises(TryAgainLaterError) as raised:
        await as_a_request(call, runner, invocation())
    assert raised.value is runner.error


async def test_it_is_ended_with_the_time_of_its_request(runner: Runner) -> None:
    runner.hangs = True

    def thread() -> bool:
        with pytest.raises(ExpiredError), deadline.within(0.05):
            call(runner, invocation())
        return runner.is_cancelled

    assert await as_a_request(thread), "when the caller goes on, the process has ended"


class Tools(ToolRunner):
    async def execute(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        if tool != "nft":
            raise ToolNotFoundError(f"no {tool}")
        return ToolExit(1, stdin, " ".join(arguments))


async def test_a_tool() -> None:
    tools: Any = Tools(portal=LoopPortal())
    assert await as_a_request(tools.run, "nft", ["-f", "-"], b"flush") == ToolExit(1, b"flush", "-f -")
    with pytest.raises(ToolNotFoundError, match="no iptables"):
        await as_a_request(tools.run, "iptables", [])
