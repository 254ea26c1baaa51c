"""The DELs of the shim's spool, served like its requests."""

from __future__ import annotations

import functools

from multus_daemon.api import wire
from multus_daemon.api.cni import CniApi
from multus_daemon.node.spool import UndecodableEntryError
from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.cni.errors import CniError


class SpooledRequests:
    """The requests that `node.spool` replays."""

    def __init__(self, api: CniApi) -> None:
        self._api = api

    def container_of(self, body: bytes) -> str:
        """See `node.spool`."""
        try:
            request = wire.decode_spooled(body, 0.0).request
        except CniError as error:
            raise UndecodableEntryError(str(error)) from error
        return request.container_id if isinstance(request, CniRequest) else ""

    async def serve(self, body: bytes, written: float) -> None:
        """See `node.spool`. Raises CniError."""
        await self._api.call(body, decode=functools.partial(wire.decode_spooled, written=written))
