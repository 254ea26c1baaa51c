"""CNI errors: the root of everything that the runtime gets to see, one subclass for each well-known code.

Format: CNI SPEC, section 5 "Error"; codes: section "Error codes" and containernetworking/cni `pkg/types`.
Codes below 100 are reserved by the specification, 999 is what every untyped error of the Go plugins becomes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from multus_daemon.spec.cni import gojson


class CniError(Exception):
    """An error as CNI defines it: a numeric code, a message whose first words are the cause, optional details."""

    default_code: ClassVar[int] = 999

    def __init__(self, msg: str, details: str = "", *, code: int | None = None) -> None:
        super().__init__(msg)
        self.code = self.default_code if code is None else code
        self.msg = msg
        self.details = details

    def __str__(self) -> str:
        """Message and details in one line, as the Go library joins them."""
        return f"{self.msg}; {self.details}" if self.details else self.msg

    def with_context(self, context: str) -> CniError:
        """The same error, code and details kept, its message followed by where it happened."""
        return from_code(self.code, f"{self.msg} ({context})", self.details)

    def to_object(self) -> dict[str, Any]:
        """`{"code": int, "msg": str}` and `"details"` where there are any."""
        fields: dict[str, Any] = {"code": self.code, "msg": self.msg}
        if self.details:
            fields["details"] = self.details
        return fields

    def to_json(self) -> bytes:
        """Compact, for the body of an HTTP answer."""
        return gojson.dumps(self.to_object(), sort_keys=False)

    def to_stdout(self) -> bytes:
        """What a plugin prints on standard output: 4 spaces of indentation, no newline at the end."""
        return gojson.dumps_indented(self.to_object(), sort_keys=False)


class IncompatibleVersionError(CniError):
    """Code 1: a CNI version that is not supported, or two that do not fit."""

    default_code = 1


class UnsupportedFieldError(CniError):
    """Code 2: a field of the configuration that can't be honoured; the message names key and value."""

    default_code = 2


class UnknownContainerError(CniError):
    """Code 3: the container does not exist; the runtime need not clean up."""

    default_code = 3


class InvalidEnvironmentError(CniError):
    """Code 4: a CNI_* variable is missing or bad; the message names it."""

    default_code = 4


class IoFailureError(CniError):
    """Code 5: reading or writing failed."""

    default_code = 5


class DecodingFailureError(CniError):
    """Code 6: something that should be JSON is not, or has another shape."""

    default_code = 6


class InvalidNetworkConfigError(CniError):
    """Code 7: the network configuration can't be used."""

    default_code = 7


class InvalidNetnsError(CniError):
    """Code 8: the network namespace can't be used."""

    default_code = 8


class TryAgainLaterError(CniError):
    """Code 11: a passing condition; the runtime should retry."""

    default_code = 11


class PluginNotAvailableError(CniError):
    """Code 50 (STATUS): the plugin can't take ADD requests."""

    default_code = 50


class LimitedConnectivityError(CniError):
    """Code 51 (STATUS): as 50, and running containers may have limited connectivity."""

    default_code = 51


class InternalError(CniError):
    """Code 999: anything that has no code of its own."""

    default_code = 999


_BY_CODE: dict[int, type[CniError]] = {
    kind.default_code: kind
    for kind in (
        IncompatibleVersionError,
        UnsupportedFieldError,
        UnknownContainerError,
        InvalidEnvironmentError,
        IoFailureError,
        DecodingFailureError,
        InvalidNetworkConfigError,
        InvalidNetnsError,
        TryAgainLaterError,
        PluginNotAvailableError,
        LimitedConnectivityError,
        InternalError,
    )
}


def from_code(code: int, msg: str, details: str = "") -> CniError:
    """The error with `code`, of the subclass that the code has, else a plain `CniError`."""
    return _BY_CODE.get(code, CniError)(msg, details, code=code)


def from_object(fields: dict[str, Any]) -> CniError:
    """The error that a plugin printed, read as Go does: keys in any case, wrong types an error of their own.

    Raises gojson.JsonError.
    """
    code = gojson.get_int(fields, "code") or 0
    return from_code(code, gojson.get_str(fields, "msg") or "", gojson.get_str(fields, "details") or "")
