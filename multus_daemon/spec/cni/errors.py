"""CNI errors: the root of everything that the runtime sees, and one subclass for each well-known code.

Format: CNI SPEC, section 5 "Error". Codes: section "Error codes" and containernetworking/cni `pkg/types`. Codes below
100 are reserved by the specification; untyped errors of Go plugins have code 999.
"""

from __future__ import annotations

from typing import Any, ClassVar

from multus_daemon.spec.cni import gojson

_BY_CODE: dict[int, type[CniError]] = {}


class CniError(Exception):
    """An error as CNI defines it: a numeric code, a message whose first words are the cause, optional details."""

    default_code: ClassVar[int] = 999

    def __init_subclass__(cls, *, code: int | None = None) -> None:
        """Register the subclass for `code`; without a code it has that of its base class."""
        if code is not None:
            cls.default_code = code
            _BY_CODE[code] = cls

    def __init__(self, msg: str, details: str = "", *, code: int | None = None) -> None:
        super().__init__(msg)
        self.code = self.default_code if code is None else code
        self.msg = msg
        self.details = details

    def __str__(self) -> str:
        return f"{self.msg}; {self.details}" if self.details else self.msg

    def with_context(self, context: str) -> CniError:
        """Return the same error with its place appended to the message."""
        return from_code(self.code, f"{self.msg} ({context})", self.details)

    def to_object(self) -> dict[str, Any]:
        """Return `{"code": int, "msg": str}`, with `"details"` if there are any."""
        fields: dict[str, Any] = {"code": self.code, "msg": self.msg}
        return fields | {"details": self.details} if self.details else fields

    def to_json(self) -> bytes:
        """Return compact JSON, for the body of an HTTP answer."""
        return gojson.dumps(self.to_object(), sort_keys=False)

    def to_stdout(self) -> bytes:
        """Return the standard output of a plugin: JSON with 4 spaces of indentation, no newline at the end."""
        return gojson.dumps_indented(self.to_object(), sort_keys=False)


class IncompatibleVersionError(CniError, code=1):
    """A CNI version is not supported, or two versions do not fit."""


class UnsupportedFieldError(CniError, code=2):
    """A field of the configuration is not supported; the message names the key."""


class UnknownContainerError(CniError, code=3):
    """The container does not exist; the runtime need not clean up."""


class InvalidEnvironmentError(CniError, code=4):
    """A CNI_* variable is missing or bad; the message names it."""


class IoFailureError(CniError, code=5):
    """Reading or writing failed."""


class DecodingFailureError(CniError, code=6):
    """The JSON is malformed, or has another shape."""


class InvalidNetworkConfigError(CniError, code=7):
    """The network configuration is invalid."""


class InvalidNetnsError(CniError, code=8):
    """The network namespace is unusable."""


class TryAgainLaterError(CniError, code=11):
    """The condition is temporary; the runtime should retry."""


class PluginNotAvailableError(CniError, code=50):
    """STATUS: the plugin can't serve ADD requests."""


class LimitedConnectivityError(CniError, code=51):
    """STATUS: the same, and running containers may have limited connectivity."""


class InternalError(CniError, code=999):
    """The error has no code of its own."""


class UnexpectedError(InternalError):
    """A fault of this program: its cause (`__cause__`) is an exception that no code expects."""


def fault(error: BaseException | None) -> BaseException | None:
    """Return the exception behind the `UnexpectedError` that `error` is, or comes from; None if there is none.

    Its traceback is for the log; an error without one says all that is known.
    """
    looked_at = []
    while error is not None and not isinstance(error, UnexpectedError):
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(fault, error.exceptions)), None)
        # `raise error from error` makes a circle.
        looked_at.append(error)
        error = error.__cause__ if error.__cause__ not in looked_at else None
    return error and error.__cause__


def from_code(code: int, msg: str, details: str = "") -> CniError:
    """Return an error with `code`, of the subclass for the code if there is one."""
    return _BY_CODE.get(code, CniError)(msg, details, code=code)


def from_object(fields: dict[str, Any]) -> CniError:
    """Read the error that a plugin printed, with Go's rules: keys in any case. Raises gojson.JsonError."""
    code = gojson.get_int(fields, "code") or 0
    return from_code(code, gojson.get_str(fields, "msg") or "", gojson.get_str(fields, "details") or "")
