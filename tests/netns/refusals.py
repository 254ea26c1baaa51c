"""Netlink requests that the kernel refuses, one after the other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from multus_daemon.kernel.transport import Socket
from multus_daemon.spec.cni.errors import InternalError

_REASON = os.strerror(errno.EPERM)


class _Refusal:
    """Refuses one request of those that are sent."""

    def __init__(self, at: int, *, is_done_first: bool) -> None:
        self.at, self.is_done_first, self.sent = at, is_done_first, 0

    def instead_of(self, real: Callable[..., int]) -> Callable[..., int]:
        def send(*arguments: Any) -> int:
            self.sent += 1
            if self.sent != self.at:
                return real(*arguments)
            if self.is_done_first:
                real(*arguments)
            raise PermissionError(errno.EPERM, _REASON)

        return send


def refuse_each(attempt: Callable[[], object], check: Callable[[int], object], *, is_done_first: bool) -> int:
    """Return the number of requests that `attempt` makes, after it has failed for the refusal of each one.

    `check` is called after each failure, with the number of the request. `is_done_first`: the refused request is done
    all the same.
    """
    at = 0
    while True:
        at += 1
        refusal = _Refusal(at, is_done_first=is_done_first)
        with mock.patch.object(Socket, "_send", refusal.instead_of(Socket._send)):
            try:
                attempt()
            except InternalError as error:
                if _REASON not in str(error):
                    raise
            else:
                assert refusal.sent == at - 1, "a refusal was passed over"
                return refusal.sent
        check(at)
