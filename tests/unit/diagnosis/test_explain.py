"""What an ADD would do, and what keeps the runtime from asking for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.api.admin import Asked
from multus_daemon.api.answers import Answers
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from tests.unit.pod.conftest import Engine


def test_a_runtime_without_a_configuration_is_the_problem() -> None:
    """It asks for nothing, whatever is wrong with the pod's networks besides."""
    engine = Engine()
    engine.declare("nope")

    def none() -> bytes:
        raise InvalidNetworkConfigError("10-cluster.conf can't be read", "the runtime has no configuration")

    answers = Answers(engine.verbs.engine, Timelines(), pytest.fail, none, Path("/no/spool"))
    found = answers.questions["explain"](Asked({"pod": "web/p1"}))
    problem = "10-cluster.conf can't be read; the runtime has no configuration"
    assert (found["problem"], found["code"]) == (problem, InvalidNetworkConfigError.default_code)
    assert found["steps"] == [{"what": "configuration", "result": "", "problem": problem}]
