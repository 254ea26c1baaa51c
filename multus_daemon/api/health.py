"""Is the daemon there (`/healthz`), and can it take an ADD (`/readyz`)?"""

from __future__ import annotations

from aiohttp import web

from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.cni import gojson


async def healthz(_request: web.Request) -> web.Response:
    """An empty 200: the event loop runs. The Go shim asks this before every call, with `null` as the body."""
    return web.Response()


class Readiness:
    """`/readyz` over a set of gates."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 `ok`, or 503 and `{"closed": {"<gate>": "<reason>"}}`."""
        closed = self._gates.closed
        if not closed:
            return web.Response(text="ok")
        return web.Response(status=503, body=gojson.dumps({"closed": closed}), content_type="application/json")
