"""`/admin/v1/<name>`: the requests of `multusctl` (GET for questions, POST for changes), for root only.

The answer is a JSON object, or a CNI error. These requests do not count as CNI requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web

from multus_daemon import deadlines
from multus_daemon.answers.questions import SHOWN, Asked, ByMethod, QuestionError
from multus_daemon.api.wire import encode_error, read_body, to_cni_error
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, Origin, TryAgainLaterError

ROOT: Final = "/admin"
PATH: Final = ROOT + "/{path:.*}"
_VERSION: Final = "v1/"
BODY_LIMIT: Final = 2 * 1024 * 1024
"""Maximum bytes of a body, a pod's manifest."""
AT_ONCE: Final = 2
"""Maximum number of concurrent requests: requests for pods have priority."""

log = logging.getLogger(__name__)


class AdminApi:
    """Serves `/admin/v1`."""

    def __init__(self, load: Callable[[], ByMethod]) -> None:
        """`load` returns the functions. The first request calls it in a thread, as it may import modules."""
        self._load = functools.cache(load)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def handle(self, request: web.Request) -> web.Response:
        """Serve a request of any HTTP method."""
        path = request.match_info["path"]
        name = path.removeprefix(_VERSION)
        seconds = deadlines.ADMIN_SECONDS
        try:
            async with asyncio.timeout(seconds):
                by_method = await portal.run(Deadline(seconds), self._load, name="admin")
                answer = by_method.get(request.method, {}).get(name) if path != name else None
                if answer is None:
                    return _unknown(request.method, path, by_method)
                asked = Asked(dict(request.query), await read_body(request, BODY_LIMIT))
                async with self._turns:
                    work = functools.partial(answer, asked)
                    result = await portal.run(Deadline(seconds), work, name=f"admin {name}")
        except TimeoutError:
            return encode_error(
                TryAgainLaterError(f"no answer to {name} within {seconds:g} s", origin=Origin.DAEMON), status=504
            )
        except (CniError, NoThreadError) as error:
            return encode_error(to_cni_error(error))
        if request.method == "POST":
            log.info("admin %s: done", name)
        return web.Response(body=gojson.dumps(result, sort_keys=False), content_type="application/json")


def _unknown(method: str, path: str, by_method: ByMethod) -> web.Response:
    for other, answers in by_method.items():
        if path in {_VERSION + name for name in answers}:
            error = QuestionError(f"{path} needs method {other}, not {method[:SHOWN]}")
            response = encode_error(error, status=405)
            response.headers["Allow"] = other
            return response
    known = ", ".join(sorted(_VERSION + name for answers in by_method.values() for name in answers))
    error = QuestionError(f"{path[:SHOWN]!r} is not known to this daemon", f"it knows {known}")
    return encode_error(error, status=404)
