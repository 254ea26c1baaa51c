"""How a request, a network or a plugin ended, in the words of the metrics."""

from __future__ import annotations

import asyncio
from typing import Final

from multus_daemon.metrics.declared import Outcome
from multus_daemon.plugins.child import DeadlineExceededError
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError

SUCCESS: Final[Outcome] = "success"
_REFUSALS: Final = frozenset({1, 2, 3, 4, 6, 7, 8})
"""Codes of the CNI SPEC that say that the input is at fault."""
_CAUSES_MAX: Final = 16


def of(error: BaseException) -> Outcome:
    """Return the outcome that `error` stands for, with its causes; in the context that it was raised in."""
    if isinstance(error, Interrupted):
        return "cancelled" if deadline.current().stopped else "timeout"
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, CniError) and error.code in _REFUSALS:
        return "refused"
    if isinstance(error, CniError) and error.code == TryAgainLaterError.default_code:
        cause: BaseException | None = error
        for _ in range(_CAUSES_MAX):
            if isinstance(cause, TimeoutError | DeadlineExceededError):
                return "timeout"
            if cause is None:
                break
            cause = cause.__cause__
    return "error"
