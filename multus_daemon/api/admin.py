"""`/admin/v1/<name>`: questions (GET) and orders (POST) of a person to the daemon, for root only.

The answer is a JSON object, or a CNI error. The runtime uses none of it, so it does not count as CNI requests.
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
"""Maximum bytes of a body, a pod's manifest."""
SHOWN: Final = 40
"""Maximum characters of a wrong value in an error."""
AT_ONCE: Final = 2
"""Maximum number of concurrent answers: pods have priority."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """The parameters of a question or an order."""

    query: Mapping[str, str]
    """Value of each key, the last one if it is repeated."""
    body: bytes = b""

    def flag(self, key: str) -> bool:
        """Return True if `key` is "true". Raises InvalidEnvironmentError for other values than "true" and "false"."""
        text = self.query.get(key, "")
        if text not in ("", "true", "false"):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: true or false is needed")
        return text == "true"

    def pod(self) -> str:
        """Return the key `pod`, `namespace/name`; empty if absent. Raises InvalidEnvironmentError."""
        text = self.query.get("pod", "")
        if text and (text.count("/") != 1 or not all(text.split("/"))):
            raise InvalidEnvironmentError(f"pod is {text[:SHOWN]!r}: NAMESPACE/POD is needed")
        return text

    def number(self, key: str, default: int, *, most: int) -> int:
        """Return the value of `key`, from 1 to `most`. Raises InvalidEnvironmentError."""
        text = self.query.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: a number from 1 to {most} is needed")
        return int(text)


Answer = Callable[[Asked], Mapping[str, Any]]
"""Returns the answer. Blocks, in a thread of its own. Raises CniError."""
ByMethod = Mapping[str, Mapping[str, Answer]]
"""Questions under GET and orders under POST, by name."""


class AdminApi:
    """The answers of `/admin`, by name."""

    def __init__(self, load: Callable[[], ByMethod], *, seconds: float = deadlines.ADMIN_SECONDS) -> None:
        """`load` returns the answers. It is called with the first request, in a thread: it may import modules.

        `seconds`: limit for one answer, including the wait for its turn.
        """
        self._load = functools.cache(load)
        self._seconds = seconds
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def handle(self, request: web.Request) -> web.Response:
        """Serve every method."""
        path = request.match_info["path"]
        name = path.removeprefix(_VERSION)
        try:
            async with asyncio.timeout(self._seconds):
                by_method = await portal.run(Deadline(self._seconds), self._load, name="admin")
                answer = by_method.get(request.method, {}).get(name) if path != name else None
                if answer is None:
                    return _unknown(request.method, path, by_method)
                asked = Asked(dict(request.query), await _body(request))
                async with self._turns:
                    work = functools.partial(answer, asked)
                    result = await portal.run(Deadline(self._seconds), work, name=f"admin {name}")
        except TimeoutError:
            return _error(TryAgainLaterError(f"no answer to {name} within {self._seconds:g} s"), 504)
        except (CniError, NoThreadError) as error:
            return _error(to_cni_error(error), 400)
        if request.method == "POST":
            log.info("admin %s: done", name)
        return web.Response(body=gojson.dumps(result, sort_keys=False), content_type="application/json")


def _unknown(method: str, path: str, by_method: ByMethod) -> web.Response:
    for other, answers in by_method.items():
        if path in {_VERSION + name for name in answers}:
            response = _error(InvalidEnvironmentError(f"{path} is asked by {other}, not by {method[:SHOWN]}"), 405)
            response.headers["Allow"] = other
            return response
    known = ", ".join(sorted(_VERSION + name for answers in by_method.values() for name in answers))
    error = InvalidEnvironmentError(f"{path[:SHOWN]!r} is not known to this daemon", f"it knows {known}")
    return _error(error, 404)


async def _body(request: web.Request) -> bytes:
    try:
        if (size := request.content_length or 0) > BODY_LIMIT:
            raise web.HTTPRequestEntityTooLarge(BODY_LIMIT, size)
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise DecodingFailureError(f"the body is larger than {BODY_LIMIT} bytes") from error
    except Exception as error:
        # A cut connection or bad chunks, for which aiohttp has no common base class.
        raise IoFailureError(f"the body can't be read: {type(error).__name__}: {error}") from error


def _error(error: CniError, status: int) -> web.Response:
    return web.Response(status=status, body=error.to_json(), content_type="application/json")
