"""Whether the cluster lets this node reserve addresses: asked once a network, or a pod, wants one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sized

from multus_daemon import deadlines
from multus_daemon.spec.ports import StoreRefusesError, StoreUnavailableError

log = logging.getLogger(__name__)

ADVICE = "bring the API server back; if it refuses, `kubectl apply -k manifests/addresses` (docs/addresses.md)"


class AddressRights:
    """Asks until the right is there, and again once it is in doubt. For the event loop."""

    def __init__(self, named: asyncio.Event | None) -> None:
        """`named` is set once a network has such addresses; None: nothing is asked."""
        self.refusal = ""
        """Why the cluster lets this node reserve nothing; empty as far as is known. Any thread may read it."""
        self.has_asked = named is None
        """True once `refusal` is known, or the API server did not say."""
        self._named, self._asked, self._doubted = named, asyncio.Event(), asyncio.Event()

    async def ask(self) -> None:
        """Return once `refusal` is known, or the API server does not say now."""
        if self._named is not None:
            # A pod may be ahead of the watch of networks.
            self._named.set()
            await self._asked.wait()

    async def run(self, held: Callable[[], Awaitable[Sized]], found: Callable[[], None]) -> None:
        """Ask for this node's addresses by `held`, and call `found` if there are any, for ever."""
        if self._named is None:
            return
        await self._named.wait()
        while True:
            self._doubted.clear()
            try:
                if await held():
                    found()
                self.refusal = ""
            except StoreUnavailableError as error:
                self.doubt(error)
            self.has_asked = True
            self._asked.set()
            await self._doubted.wait()
            await asyncio.sleep(
                deadlines.ADDRESSES_REFUSED_SECONDS if self.refusal else deadlines.ADDRESSES_LOOK_SECONDS
            )

    def doubt(self, error: StoreUnavailableError) -> None:
        """Have the cluster asked again. If `error` is a StoreRefusesError, leave networks to the binary until then."""
        if isinstance(error, StoreRefusesError):
            if not self.refusal:
                log.warning("networks of whereabouts are left to its binary where there is one: %s; %s", error, ADVICE)
            self.refusal = str(error)
        else:
            log.debug("%s", error)
        self._doubted.set()
