"""`/admin/v1/<name>`: what a person asks the daemon of a node, or has it do. For root only; never in a request's way.

A question is a GET, an order a POST. The answer is a JSON object, an error that of CNI. Nothing here is for the
runtime, so nothing here counts as a CNI request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from multus_daemon import deadlines
from multus_daemon.api.cni import to_cni_error
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError, TryAgainLaterError

ROOT: Final = "/admin"
PATH: Final = ROOT + "/v1/{name}"
BODY_LIMIT: Final = 2 * 1024 * 1024
"""Bytes: a manifest of a pod."""
AT_ONCE: Final = 2
"""Questions that are worked on side by side: whoever asks waits for pods, not the other way round."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """What came with a question or an order."""

    query: Mapping[str, str]
    """The last value of each key."""
    body: bytes = b""

    def flag(self, key: str) -> bool:
        """Whether `key` is given as true."""
        return self.query.get(key, "") == "true"

    def number(self, key: str, default: int, *, most: int) -> int:
        """The number from 1 that `key` stands for. Raises CniError."""
        text = self.query.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise InternalError(f"{key} is {text[:40]!r}: a number from 1 to {most} is needed")
        return int(text)


Answer = Callable[[Asked], Mapping[str, Any]]
"""Blocks; runs in a thread of its own. Raises CniError."""


class AdminApi:
    """The answers, by name."""

    def __init__(
        self,
        questions: Mapping[str, Answer],
        orders: Mapping[str, Answer],
        *,
        seconds: float = deadlines.ADMIN_SECONDS,
    ) -> None:
        """`seconds`: for one answer, the wait for its turn included."""
        self._answers = {"GET": dict(questions), "POST": dict(orders)}
        self._seconds = seconds
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def handle(self, request: web.Request) -> web.Response:
        """The handler of every method."""
        name = request.match_info["name"]
        answer = self._answers.get(request.method, {}).get(name)
        if answer is None:
            return self._unknown(request.method, name)
        try:
            async with asyncio.timeout(self._seconds):
                asked = Asked(dict(request.query), await _body(request))
                async with self._turns:
                    work = functools.partial(answer, asked)
                    found = await portal.run(Deadline(self._seconds), work, name=f"admin {name}")
        except TimeoutError:
            return _error(TryAgainLaterError(f"no answer to {name} within {self._seconds:g} s"), 504)
        except (CniError, NoThreadError) as error:
            return _error(to_cni_error(error), 400)
        if request.method == "POST":
            log.info("admin %s: done", name)
        return web.Response(body=gojson.dumps(found, sort_keys=False), content_type="application/json")

    def _unknown(self, method: str, name: str) -> web.Response:
        for other, answers in self._answers.items():
            if name in answers:
                return web.Response(status=405, text=f"{name} is a {other}, no {method}\n", headers={"Allow": other})
        known = ", ".join(sorted(name for answers in self._answers.values() for name in answers))
        return _error(InternalError(f"{name!r} is not known to this daemon", f"it knows {known}"), 404)


async def _body(request: web.Request) -> bytes:
    """Raises CniError."""
    if (request.content_length or 0) > BODY_LIMIT:
        raise InternalError(f"the body is larger than {BODY_LIMIT} bytes")
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise InternalError(f"the body is larger than {BODY_LIMIT} bytes") from error


def _error(error: CniError, status: int) -> web.Response:
    return web.Response(status=status, body=error.to_json(), content_type="application/json")
