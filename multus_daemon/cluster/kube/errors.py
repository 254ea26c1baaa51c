"""What can go wrong with the API server. Branch on the type or on `status`, never on the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

_MESSAGE_MAX: Final = 1000


class KubeError(Exception):
    """The root of this package's errors; no message has a credential in it."""

    status: int | None = None
    """The HTTP status, where there was an answer."""


class ConfigurationError(KubeError):
    """How to reach the API server is not to be learned; the message names the file or variable."""


class ApiError(KubeError):
    """The API server refused the request, and would again."""

    def __init__(self, status: int, reason: str, message: str, *, request: str, fields: tuple[str, ...] = ()) -> None:
        """`reason`: the machine-readable one, such as NotFound; `fields`: paths in the object that are at fault."""
        super().__init__(f"{request}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.fields = fields


class GoneError(ApiError):
    """410: the asked-for resourceVersion, or the list's next page, is no longer to be had: list again."""


class ApiUnavailableError(KubeError):
    """No answer, or one that says to come back: connection, deadline, 429, 5xx."""

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        """`retry_after`: seconds that the server asks to wait, where it did."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NoAnswerError(ApiUnavailableError):
    """The API server can't be reached, or does not answer in time."""


class _Cause(msgspec.Struct):
    field: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct):
    """meta/v1 Status."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None


_decode_status: Final = msgspec.json.Decoder(_Status).decode


def from_answer(
    status: int, phrase: str, body: bytes, headers: Mapping[str, str] | None = None, *, request: str
) -> ApiError | ApiUnavailableError:
    """The error that an answer with `status` is; `phrase` is HTTP's reason, `request` names what was asked."""
    try:
        found = _decode_status(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _Status(message=body[:200].decode("utf-8", "replace"))
    reason, message = found.reason or phrase, found.message[:_MESSAGE_MAX].strip()
    if status == 429 or status >= 500:
        return ApiUnavailableError(
            f"{request}: {status} {reason}: {message}", status=status, retry_after=_seconds(headers or {})
        )
    causes = (found.details.causes if found.details else None) or []
    fields = tuple(cause.field for cause in causes if cause.field)
    return (GoneError if status == 410 else ApiError)(status, reason, message, request=request, fields=fields)


def from_watch_event(status_object: bytes, *, request: str) -> ApiError | ApiUnavailableError:
    """The error that a watch's ERROR event carries."""
    try:
        code = _decode_status(status_object).code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        code = 0
    return from_answer(code or 500, "watch error", status_object, request=request)


def _seconds(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        # Absent, or a date; the API server sends seconds.
        return None
