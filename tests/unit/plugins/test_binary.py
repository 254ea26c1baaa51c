"""A binary: what it prints."""

from __future__ import annotations

import pytest

from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import DecodingFailureError
from multus_daemon.spec.cni.result import Result
from tests.calls import run


class Runner(ProcessRunner):
    """Prints `stdout`."""

    stdout = b'{"cniVersion": "0.4.0", "interfaces": [{"name": "net1"}]}'

    def __init__(self) -> None:
        super().__init__(["/opt/cni/bin"])
        self.calls: list[Invocation] = []

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> bytes:
        self.calls.append(invocation)
        return self.stdout


def invocation(verb: str = "ADD") -> Invocation:
    return Invocation(verb, "c1", "/run/netns/p1", "net1", "", "/opt/cni/bin", {"cniVersion": "1.0.0"})


def call(runner: Runner, invocation: Invocation) -> Result:
    return run(Plugins(runner, "off").recorded("ptp", invocation), invocation)


@pytest.mark.parametrize("stdout", [b"", b"garbage", b"[]", b'{"ips": 3}'])
def test_an_add_that_prints_no_result_has_failed(stdout: bytes) -> None:
    runner = Runner()
    runner.stdout = stdout
    with pytest.raises(DecodingFailureError):
        call(runner, invocation())


@pytest.mark.parametrize("verb", ["DEL", "CHECK", "STATUS", "GC"])
@pytest.mark.parametrize("stdout", [b"", b"garbage", Runner.stdout])
def test_of_other_verbs_nothing_that_is_printed_counts(verb: str, stdout: bytes) -> None:
    runner = Runner()
    runner.stdout = stdout
    assert call(runner, invocation(verb)) == Result()
    assert len(runner.calls) == 1
