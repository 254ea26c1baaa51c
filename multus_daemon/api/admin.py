"""`/admin/v1/<name>`: questions (GET) and orders (POST) of a person to the daemon, for root only.

The answer is a JSON object, or a CNI error. The runtime uses none of it, so it does not count as CNI requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web

from multus_daemon import deadlines
from multus_daemon.answers.asked import SHOWN, Asked, ByMethod
from multus_daemon.api.wire import read_body, to_cni_error
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import (
    CniError,
    InvalidEnvironmentError,
    TryAgainLaterError,
)

ROOT: Final = "/admin"
PATH: Final = ROOT + "/{path:.*}"
_VERSION: Final = "v1/"
BODY_LIMIT: Final = 2 * 1024 * 1024
"""Maximum bytes of a body, a pod's manifest."""
AT_ONCE: Final = 2
"""Maximum number of concurrent answers: pods have priority."""

log = logging.getLogger(__name__)


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
                asked = Asked(dict(request.query), await read_body(request, BODY_LIMIT))
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


def _error(error: CniError, status: int) -> web.Response:
    return web.Response(status=status, body=error.to_json(), content_type="application/json")
