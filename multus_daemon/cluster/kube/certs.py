"""The node's own client certificate: asked for by CertificateSigningRequest, kept in a file, renewed without a gap.

Needs the package `cryptography`; import this module only where the key `perNodeCertificate` asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from multus_daemon import deadlines
from multus_daemon.cluster.kube.approver import CertificateError, Client, DeniedError, WaitingError
from multus_daemon.cluster.kube.certificate import Pair, Pending, ask, loop_time, read_pair
from multus_daemon.cluster.kube.certificate_files import CertificateFiles
from multus_daemon.runtime.backoff import backoff
from multus_daemon.runtime.gates import Gates

log = logging.getLogger(__name__)

GATE: Final = "certificate"
DEFAULT_DURATION = 600
RENEW_AT = (0.7, 0.9)
RETRY_SECONDS = (1.0, 30.0)
DENIED_SECONDS = (30.0, 300.0)
REJECTION_SECONDS = 30.0
"""After a certificate was put in place: a 401 in this time may be the answer to its predecessor."""
CLOCK_SECONDS = 60.0
"""How often the wall clock is looked at, which may jump."""
Connect = Callable[[Path | None], AbstractAsyncContextManager[Client]]
"""A client for the cluster of the bootstrap kubeconfig, whose file, and CA, is read again with every call.

With None it has the credentials of that kubeconfig, with a path the certificate and key in that file alone.
"""


@dataclass(frozen=True, slots=True)
class _Held:
    """The certificate in use. What comes first counts: the wall clock may jump, the loop's clock stops in a suspend."""

    pair: Pair
    since: float
    renew: tuple[float, float]
    """By the wall clock, by the loop's clock."""
    expires: tuple[float, float]


@dataclass(eq=False, kw_only=True)
class CertificateManager:
    """Sees to it that the node has a certificate, for as long as `run` runs."""

    node: str
    files: CertificateFiles
    connect: Connect
    on_renewed: Callable[[Path], None]
    """Gets the file's path whenever it has a new certificate; must not block."""
    gates: Gates
    seconds: int = DEFAULT_DURATION
    now: Callable[[], float] = time.time
    _held: _Held | None = field(default=None, init=False)
    _pending: Pending | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    _refused: bool = field(default=False, init=False)
    _failure: str = field(default="none was issued yet", init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _usable: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def expires(self) -> float | None:
        """When the certificate in use ends, Unix time; None where there is none."""
        held = self._held
        return held.pair.not_after if held else None

    @property
    def problem(self) -> str:
        """Why there is no certificate that can be used; empty where there is one."""
        if self._held and not self._refused and not self._passed(self._held.expires):
            return ""
        state = "refused by the API server" if self._refused else "expired" if self._held else "missing"
        return f"the client certificate of node {self.node} is {state}: {self._failure}"

    async def usable(self) -> Path:
        """Wait for the first certificate that can be used; its file."""
        await self._usable.wait()
        return self.files.current

    def rejected(self) -> None:
        """Tell that the API server answered 401 to the certificate in use: another one is asked for at once."""
        if self._held and not self._refused and loop_time() - self._held.since > REJECTION_SECONDS:
            self._refused = True
            self._failure = "it answered 401 to a request"
            self._show()
            self._wake.set()

    async def run(self) -> None:
        """Have a certificate, renew it in time, for ever."""
        retries: dict[tuple[float, float], Iterator[float]] = {}
        while True:
            try:
                if not self._begun:
                    await self._begin()
                await self._until_due()
                await self._renew()
                retries.clear()
            except Exception as error:
                # Whatever it is: another attempt may do, and there is nothing better to fall back to.
                span = DENIED_SECONDS if isinstance(error, DeniedError) else RETRY_SECONDS
                delay = next(retries.setdefault(span, backoff(*span, jitter=0.2)))
                self._failure = str(error) or repr(error)
                self._show()
                log.warning("client certificate of %s: %s; tried again in %.0f s", self.node, self._failure, delay)
                await self._pause(delay)

    async def _begin(self) -> None:
        """Take over what an earlier process left."""
        await asyncio.to_thread(self.files.prepare)
        current, key = await asyncio.to_thread(self.files.load)
        self._begun = True
        self._pending = Pending.from_pem(key) if key else None
        if current:
            try:
                pair = read_pair(current, self.node)
                if pair.not_after <= self.now():
                    raise CertificateError("it has expired")
                self._held = self._schedule(pair, None)
            except CertificateError as error:
                self._failure = f"that in {self.files.current.parent} is not used: {error}"
        if self._held:
            # The cluster may have another CA by now. No answer counts as yes.
            try:
                async with self.connect(self.files.current) as client:
                    await client.request("GET", "/version", timeout=deadlines.APPROVER_REQUEST_SECONDS)
            except Exception as error:
                self._refused, self._failure = getattr(error, "status", None) == 401, str(error)
        self._show()

    async def _until_due(self) -> None:
        while (held := self._held) and not self._refused and not self._passed(held.renew):
            left = min(held.renew[0] - self.now(), held.renew[1] - loop_time())
            await self._pause(min(max(left, 0.1), CLOCK_SECONDS))

    async def _renew(self) -> None:
        pending = self._pending or Pending(ec.generate_private_key(ec.SECP256R1()))
        if not self._pending:
            await asyncio.to_thread(self.files.keep, pending.pem)
            self._pending = pending
        try:
            pair = read_pair((await self._ask(pending)).rstrip() + b"\n" + pending.pem, self.node)
            held = self._schedule(pair, pending.posted)
            if self._passed(held.renew):
                raise CertificateError("the certificate of an earlier request is too old to begin with")
        except CertificateError:
            # Nothing more can come of this request.
            self._pending = None
            await asyncio.to_thread(self.files.keep, None)
            raise
        await asyncio.to_thread(self.files.install, pair.pem, self.now())
        self._held, self._pending, self._refused, self._failure = held, None, False, "it was not renewed in time"
        self._show()
        log.info(
            "client certificate of %s: a new one is in place, good for %d s", self.node, held.expires[0] - self.now()
        )
        try:
            self.on_renewed(self.files.current)
        except Exception:
            log.exception("the new client certificate was not taken into use")

    async def _ask(self, pending: Pending) -> bytes:
        """The certificates, PEM; with the certificate in use, or where that can't be, the bootstrap credentials."""
        if self._held and not self._refused and not self._passed(self._held.expires):
            try:
                async with self.connect(self.files.current) as client:
                    return await ask(client, pending, self.node, self.seconds)
            except (DeniedError, WaitingError):
                raise
            except Exception as error:
                status = getattr(error, "status", None)
                if status not in (None, 401, 403):
                    raise
                self._refused = status == 401
                log.info("client certificate of %s: renewed with the bootstrap credentials: %s", self.node, error)
        async with self.connect(None) as client:
            return await ask(client, pending, self.node, self.seconds)

    def _schedule(self, pair: Pair, posted: float | None) -> _Held:
        """When `pair` is renewed: between 70 and 90 % of its life, and when it ends.

        `posted`: when this process asked for it, on the loop's clock. Where that is not long ago the wall clock need
        not be right: the API server knows better, and a wrong clock must not ask again and again.
        """
        now, loop_now, life = self.now(), loop_time(), pair.not_after - pair.not_before
        share = random.uniform(*RENEW_AT)
        left, renew_in = min(pair.not_after - now, life), pair.not_before + share * life - now
        if posted is not None and loop_now - posted < self.seconds / 2:
            left = min(life, self.seconds) - (loop_now - posted)
            renew_in = min(max(renew_in, left / 3), left * share)
        elif now < pair.not_before:
            renew_in = 0.0
        return _Held(pair, loop_now, (now + renew_in, loop_now + renew_in), (now + left, loop_now + left))

    def _passed(self, moment: tuple[float, float]) -> bool:
        return self.now() >= moment[0] or loop_time() >= moment[1]

    def _show(self) -> None:
        if problem := self.problem:
            self.gates.close(GATE, problem)
        else:
            self.gates.open(GATE)
            self._usable.set()

    async def _pause(self, seconds: float) -> None:
        """Sleep, at most until the certificate is rejected."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
