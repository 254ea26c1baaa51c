"""CNI errors: the codes of the CNI SPEC and what a plugin prints."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import errors, gojson
from multus_daemon.spec.cni.errors import CniError

CODES: dict[int, type[CniError]] = {
    1: errors.IncompatibleVersionError,
    2: errors.UnsupportedFieldError,
    3: errors.UnknownContainerError,
    4: errors.InvalidEnvironmentError,
    5: errors.IoFailureError,
    6: errors.DecodingFailureError,
    7: errors.InvalidNetworkConfigError,
    8: errors.InvalidNetnsError,
    11: errors.TryAgainLaterError,
    50: errors.PluginNotAvailableError,
    51: errors.LimitedConnectivityError,
    999: errors.InternalError,
}


@pytest.mark.parametrize(("code", "kind"), CODES.items())
def test_each_code_has_its_class(code: int, kind: type[CniError]) -> None:
    assert kind("x").code == code
    error = errors.from_code(code, "m", "d")
    assert type(error) is kind
    assert (error.code, error.msg, error.details) == (code, "m", "d")


@pytest.mark.parametrize("code", [0, 9, 99, 100, 101, 1000])
def test_other_codes_are_kept(code: int) -> None:
    error = errors.from_code(code, "m")
    assert type(error) is CniError
    assert error.code == code


def test_every_subclass_is_found_by_its_code() -> None:
    assert set(CniError.__subclasses__()) >= set(CODES.values())
    for kind in CODES.values():
        assert CODES[kind.default_code] is kind


def test_untyped_is_999() -> None:
    assert CniError("x").code == 999


def test_text_and_context() -> None:
    error = errors.InvalidNetworkConfigError("cause", "more")
    assert str(error) == "cause; more"
    assert str(errors.IoFailureError("cause")) == "cause"
    placed = error.with_context("network a")
    assert type(placed) is errors.InvalidNetworkConfigError
    assert (placed.msg, placed.details) == ("cause (network a)", "more")


def test_context_keeps_a_plugins_own_code() -> None:
    assert CniError("x", code=123).with_context("y").code == 123


def test_object_has_no_empty_details_and_no_version() -> None:
    assert errors.IoFailureError("m").to_object() == {"code": 5, "msg": "m"}
    assert errors.IoFailureError("m", "d").to_object() == {"code": 5, "msg": "m", "details": "d"}


def test_stdout_is_what_the_go_plugins_print() -> None:
    assert errors.InvalidEnvironmentError("a <b> & c", "d").to_stdout() == (
        b'{\n    "code": 4,\n    "msg": "a \\u003cb\\u003e \\u0026 c",\n    "details": "d"\n}'
    )
    assert errors.InvalidEnvironmentError("a").to_json() == b'{"code":4,"msg":"a"}'


@pytest.mark.parametrize(
    ("fields", "code", "msg", "details"),
    [
        ({"code": 11, "msg": "busy"}, 11, "busy", ""),
        ({"Code": 7, "MSG": "m", "Details": "d", "cniVersion": "1.0.0"}, 7, "m", "d"),
        ({}, 0, "", ""),
        ({"code": None, "msg": None}, 0, "", ""),
        ({"code": 100, "msg": "own"}, 100, "own", ""),
    ],
)
def test_from_object(fields: dict[str, object], code: int, msg: str, details: str) -> None:
    error = errors.from_object(fields)
    assert (error.code, error.msg, error.details) == (code, msg, details)


@pytest.mark.parametrize("fields", [{"code": "7"}, {"code": True}, {"code": 1.5}, {"msg": 1}, {"details": []}])
def test_from_object_refuses_wrong_types(fields: dict[str, object]) -> None:
    with pytest.raises(gojson.JsonError, match="is needed"):
        errors.from_object(fields)


def test_only_a_fault_of_ours_has_a_traceback_for_the_log() -> None:
    reason = ZeroDivisionError("oops")
    ours = errors.UnexpectedError("ZeroDivisionError: oops")
    ours.__cause__ = reason
    assert errors.fault(ours) is reason
    placed = ours.with_context("pod web/p1")
    placed.__cause__ = ours
    assert errors.fault(placed) is reason
    several = CniError("two failures")
    several.__cause__ = ExceptionGroup("DEL", [CniError("no address"), placed])
    assert errors.fault(several) is reason
    of_a_plugin = errors.InternalError("it printed no JSON")
    of_a_plugin.__cause__ = ValueError("Expecting value")
    circle, way = CniError("the disk is full"), CniError("the same")
    circle.__cause__, way.__cause__ = way, circle
    for other in (None, of_a_plugin, CniError("no address"), errors.UnexpectedError("without a cause"), circle):
        assert errors.fault(other) is None


@given(st.integers(0, 2**31), st.text(), st.text())
def test_round_trip(code: int, msg: str, details: str) -> None:
    error = errors.from_object(gojson.loads_object(errors.from_code(code, msg, details).to_stdout()))
    assert (error.code, error.msg, error.details) == (code, msg, details)


def test_an_error_about_a_file_with_a_strange_name_can_be_printed() -> None:
    name = b"/etc/\xff".decode("utf-8", "surrogateescape")
    assert json.loads(errors.IoFailureError(name).to_json())["msg"] == "/etc/\ufffd"
