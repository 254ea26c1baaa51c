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
    """Asks by the first request that needs the right, and goes on while it is refused or nobody answers."""

    def __init__(self, named: asyncio.Event | None) -> None:
        """`named` is set once a network has such addresses; None: nothing is asked."""
        self.refusal = ""
        """Why the cluster lets this node reserve nothing; empty as far as is known."""
        self.has_asked = named is None
        """True once `refusal` is known, or the API server did not say."""
        self._named, self._asked = named, asyncio.Event()

    async def ask(self) -> None:
        """Return once `refusal` is known, or the API server does not say now."""
        if self._named is not None:
            # A pod may be ahead of the watch of networks.
            self._named.set()
            await self._asked.wait()

    async def granted(self, held: Callable[[], Awaitable[Sized]]) -> bool:
        """Return once the right is there: True if `held`, which asks for this node's addresses, returns any."""
        if self._named is None:
            return False
        await self._named.wait()
        while True:
            try:
                found, self.refusal = await held(), ""
                return len(found) > 0
            except StoreRefusesError as error:
                if not self.refusal:
                    log.warning(
                        "networks of whereabouts are left to its binary where there is one: %s; %s", error, ADVICE
                    )
                self.refusal, pause = str(error), deadlines.ADDRESSES_REFUSED_SECONDS
            except StoreUnavailableError as error:
                log.debug("%s", error)
                pause = deadlines.ADDRESSES_LOOK_SECONDS
            finally:
                self.has_asked = True
                self._asked.set()
            await asyncio.sleep(pause)
