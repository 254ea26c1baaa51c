"""The table of variables, over the two implementations in Python; `tests.shim.test_variables` has the shim."""

from __future__ import annotations

import base64
import json

import pytest

from multus_daemon.api import wire
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_tools import builtin
from tests.spec import requests
from tests.spec.requests import CASES, Case, Outcome, Refusal

CONFIGURATION = b'{"cniVersion":"1.1.0","name":"net"}'


def configuration(case: Case) -> bytes:
    return b"{nope" if case.broken_configuration else CONFIGURATION


def by_wire(case: Case) -> None:
    config = base64.b64encode(configuration(case)).decode()
    wire.decode(json.dumps({"env": case.environ, "config": config}).encode())


def by_skel(case: Case) -> None:
    verb = builtin.environment(case.environ)["verb"]
    if verb != "VERSION":
        conf.configuration(verb, configuration(case))


JUDGES = {"wire": by_wire, "skel": by_skel}


def outcome(case: Case, implementation: str) -> Outcome:
    try:
        JUDGES[implementation](case)
    except CniError as error:
        return Refusal(error.msg, error.explanation, error.code)
    return requests.ACCEPTED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", JUDGES)
def test_request(case: Case, implementation: requests.Implementation) -> None:
    assert outcome(case, implementation) == case.expected(implementation)


def test_names_are_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_differences_differ_and_say_why() -> None:
    for case in CASES:
        for implementation, difference in case.but.items():
            assert implementation in requests.IMPLEMENTATIONS
            assert difference.outcome != case.outcome, case.name
            assert difference.why, case.name


def test_each_variable_is_left_out_of_each_verb() -> None:
    alone = {(case.verb, *case.changes) for case in CASES if list(case.changes.values()) == [None]}
    assert alone >= {(verb, variable) for verb in requests.VERBS for variable in requests.VARIABLES}


@pytest.mark.parametrize("implementation", requests.IMPLEMENTATIONS)
def test_every_refusal_is_seen_and_every_verb_accepted(implementation: requests.Implementation) -> None:
    """A table that only accepts, or only refuses, would not notice what is never looked at."""
    outcomes = [(case.verb, case.expected(implementation)) for case in CASES]
    assert {verb for verb, expected in outcomes if expected is None} >= set(requests.VERBS)
    refused = {verb for verb, expected in outcomes if expected is not None}
    assert refused >= set(requests.CONTAINER_VERBS)
