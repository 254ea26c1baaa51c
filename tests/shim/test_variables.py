"""The table of variables (`tests.spec.requests`), run over the shim."""

from __future__ import annotations

import json
import typing

import pytest

from tests.spec.requests import CASES, Case, Refusal

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

ANSWERED_ALONE = (None, "", "VERSION")
"""Verbs for which no daemon is asked."""


def stdout(refusal: Refusal) -> bytes:
    """The bytes of that error as Go prints it: indented, no newline at the end, safe inside of HTML."""
    fields = {"code": refusal.code, "msg": refusal.msg, "details": refusal.details}
    text = json.dumps({key: value for key, value in fields.items() if value}, indent=4, ensure_ascii=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}).encode()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_request(shim: Shim, daemon: Stub, case: Case) -> None:
    result = shim(env=case.environ, stdin=b"{nope" if case.broken_configuration else None)
    expected = case.expected("shim")
    if expected is not None:
        assert (result.code, result.out, result.err) == (1, stdout(expected), b"")
        assert daemon.requests == []
    elif case.verb in ANSWERED_ALONE:
        assert result.code == 0
        assert daemon.requests == []
    else:
        assert (result.code, result.out) == (0, b"{}")
        (request,) = daemon.requests
        assert json.loads(request.body)["env"] == case.environ
