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
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    IoFailureError,
    TryAgainLaterError,
)

ROOT: Final = "/admin"
PATH: Final = ROOT + "/{path:.*}"
_VERSION: Final = "v1/"
BODY_LIMIT: Final = 2 * 1024 * 1024
"""Bytes: a manifest of a pod."""
SHOWN: Final = 40
"""Characters of a wrong value that an error shows."""
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
        """Return whether `key` is "true". Raises InvalidEnvironmentError for what is neither "true" nor "false"."""
        text = self.query.get(key, "")
        if text not in ("", "true", "false"):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: true or false is needed")
        return text == "true"

    def pod(self) -> str:
        """Return `namespace/name` of the key `pod`; empty if absent. Raises InvalidEnvironmentError."""
        text = self.query.get("pod", "")
        if text and (text.count("/") != 1 or not all(text.split("/"))):
            raise InvalidEnvironmentError(f"pod is {text[:SHOWN]!r}: NAMESPACE/POD is needed")
        return text

    def number(self, key: str, default: int, *, most: int) -> int:
        """Return the number from 1 to `most` that `key` stands for. Raises InvalidEnvironmentError."""
        text = self.query.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: a number from 1 to {most} is needed")
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
        path = request.match_info["path"]
        name = path.removeprefix(_VERSION)
        answer = self._answers.get(request.method, {}).get(name) if path != name else None
        if answer is None:
            return self._unknown(request.method, path)
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

    def _unknown(self, method: str, path: str) -> web.Response:
        for other, answers in self._answers.items():
            if path in {_VERSION + name for name in answers}:
                response = _error(InvalidEnvironmentError(f"{path} is asked by {other}, not by {method[:SHOWN]}"), 405)
                response.headers["Allow"] = other
                return response
        known = ", ".join(sorted(_VERSION + name for answers in self._answers.values() for name in answers))
        error = InvalidEnvironmentError(f"{path[:SHOWN]!r} is not known to this daemon", f"it knows {known}")
        return _error(error, 404)


async def _body(request: web.Request) -> bytes:
    """Raises CniError."""
    if (request.content_length or 0) > BODY_LIMIT:
        raise DecodingFailureError(f"the body is larger than {BODY_LIMIT} bytes")
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise DecodingFailureError(f"the body is larger than {BODY_LIMIT} bytes") from error
    except Exception as error:
        # A cut connection, bad chunks or bad compression: the client's fault, and aiohttp has no one base for it.
        raise IoFailureError(f"the body can't be read: {type(error).__name__}: {error}") from error


def _error(error: CniError, status: int) -> web.Response:
    return web.Response(status=status, body=error.to_json(), content_type="application/json")
