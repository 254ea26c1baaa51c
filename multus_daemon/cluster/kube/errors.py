"""Errors of the API server. Branch on the type or on `status`, never on the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from multus_daemon.cluster.kube.objects import DECODE_ERRORS
from multus_daemon.runtime.aio import StartError

_MESSAGE_MAX: Final = 1000
_ADVICE: Final = {
    401: "give the daemon a valid token: delete its pod, or renew the kubeconfig that it is configured with",
    403: "give the daemon's service account that verb on that resource: its ClusterRole is multus-daemon",
}
"""What to do if the API server refuses a request, by HTTP status."""


class KubeError(Exception):
    """The base of this package's errors; no message contains a credential."""

    status: int | None = None  # HTTP's; None without an answer
    advice: str = ""  # what to do, if that is known
    retry_after: float | None = None  # the seconds that the server asks to wait


class ConfigurationError(KubeError, StartError):
    """The configuration for the API server can't be used; the message names the file or variable."""


class ApiError(KubeError):
    """The API server refused the request and would refuse it again."""

    def __init__(self, status: int, reason: str, message: str, *, request: str, fields: tuple[str, ...] = ()) -> None:
        """`reason` is machine-readable, such as NotFound; `fields` are the paths of the object's faulty fields."""
        super().__init__(f"{request}: {status} {reason}: {message}")
        self.status, self.reason, self.message, self.fields = status, reason, message, fields
        self.advice = _ADVICE.get(status, "")


class GoneError(ApiError):
    """410: the resourceVersion or the list's next page has expired. List again."""


class ApiUnavailableError(KubeError):
    """There is no answer, or an answer that allows a retry (429, 5xx)."""

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class AnswerTooLongError(ApiUnavailableError):
    """The answer is longer than the client reads. A list can be asked for in smaller pages."""


class NoAnswerError(ApiUnavailableError):
    """The API server can't be reached, or does not answer in time."""


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""
    field: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class Status(msgspec.Struct):
    """meta/v1 Status."""

    status: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None

    @property
    def causes(self) -> list[_Cause]:
        """meta/v1 StatusCauses of the details."""
        return (self.details.causes if self.details else None) or []


decode_status: Final = msgspec.json.Decoder(Status).decode


def from_answer(
    status: int, phrase: str, body: bytes, headers: Mapping[str, str] | None = None, *, request: str
) -> ApiError | ApiUnavailableError:
    """Return the error for an answer; `phrase` is HTTP's reason phrase, `request` names the request."""
    try:
        answer = decode_status(body)
    except DECODE_ERRORS:
        answer = Status(message=body[:200].decode("utf-8", "replace"))
    reason, message = answer.reason or phrase, answer.message[:_MESSAGE_MAX].strip()
    if status == 429 or status >= 500:
        return ApiUnavailableError(
            f"{request}: {status} {reason}: {message}", status=status, retry_after=_retry_after(headers or {})
        )
    fields = tuple(cause.field for cause in answer.causes if cause.field)
    return (GoneError if status == 410 else ApiError)(status, reason, message, request=request, fields=fields)


def from_watch_event(status_object: bytes, *, request: str) -> ApiError | ApiUnavailableError:
    """Return the error in a watch's ERROR event."""
    try:
        code = decode_status(status_object).code
    except DECODE_ERRORS:
        code = 0
    return from_answer(code or 500, "watch error", status_object, request=request)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        # Absent, or a date; the API server sends seconds.
        return None
