"""What an ADD would do, and what keeps the runtime from asking for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.base.timeline import Timelines
from multus_daemon.cni.errors import InvalidNetworkConfigError
from multus_daemon.diagnosis.answers import Answers
from multus_daemon.server.admin_api import Asked
from tests.unit.engine.conftest import Engine


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
