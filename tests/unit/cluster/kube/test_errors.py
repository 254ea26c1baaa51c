import json

import pytest

from multus_daemon.cluster.kube import errors
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, GoneError


def status(code=404, **more):
    return json.dumps({"kind": "Status", "code": code, "reason": "R", "message": "why", **more}).encode()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, ApiError),
        (403, ApiError),
        (404, ApiError),
        (409, ApiError),
        (410, GoneError),
        (422, ApiError),
        (429, ApiUnavailableError),
        (500, ApiUnavailableError),
        (503, ApiUnavailableError),
    ],
)
def test_kind_by_status(code, kind):
    error = errors.from_answer(code, "phrase", status(code), {}, request="GET /x")
    assert type(error) is kind
    assert error.status == code
    assert "why" in str(error)


def test_causes_name_fields():
    body = status(422, details={"causes": [{"field": "metadata.uid"}, {"reason": "x"}]})
    error = errors.from_answer(422, "", body, request="x")
    assert isinstance(error, ApiError)
    assert error.fields == ("metadata.uid",)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"\xff", b'{"details": 5}', b'{"details": {"causes": null}}'])
def test_bodies_that_are_no_status(body):
    error = errors.from_answer(404, "Not Found", body, request="GET /x")
    assert isinstance(error, ApiError)
    assert error.reason == "Not Found"
    assert isinstance(errors.from_answer(502, "Bad Gateway", body, request="GET /x"), ApiUnavailableError)
    assert isinstance(errors.from_watch_event(body, request="GET /x"), ApiUnavailableError)


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("-1", 0.0), ("soon", None)])
def test_retry_after(value, seconds):
    told = errors.from_answer(429, "", b"", {"Retry-After": value}, request="x")
    untold = errors.from_answer(503, "", b"", request="x")
    assert isinstance(told, ApiUnavailableError)
    assert isinstance(untold, ApiUnavailableError)
    assert (told.retry_after, untold.retry_after) == (seconds, None)


def test_watch_event():
    assert isinstance(errors.from_watch_event(status(410), request="x"), GoneError)
    assert isinstance(errors.from_watch_event(status(504), request="x"), ApiUnavailableError)
