"""The node's own client certificate: asked for by CertificateSigningRequest, kept in a file, renewed without a gap.

The file is `multus-client-current.pem` in `certDir`, certificate first, then its key. As in client-go's file store it
is a link to a dated file, so that upstream's daemon can take over: client-go refuses to renew what is no link. The
key that waits for its certificate is kept beside it, and the request's name is derived from that key: after a crash,
or an attempt that took too long, the same request is found again, and requests do not pile up in the cluster.
Needs the package `cryptography`; import this module only where the key `perNodeCertificate` asks for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import hashlib
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import NameOID

from multus_daemon import deadlines
from multus_daemon.cluster.kube import approver
from multus_daemon.cluster.kube.approver import CertificateError, Client, DeniedError, WaitingError
from multus_daemon.runtime import fs
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
FILE_MAX_BYTES = 256 * 1024

_DATED = re.compile(r"multus-client-[0-9]{4}(-[0-9]{2}){5}\.pem")

Connect = Callable[[Path | None], AbstractAsyncContextManager[Client]]
"""A client for the cluster of the bootstrap kubeconfig, whose file, and CA, is read again with every call.

With None it has the credentials of that kubeconfig, with a path the certificate and key in that file alone.
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, fit for this node; times are Unix seconds."""

    pem: bytes
    not_before: float
    not_after: float


@approver.long_names()
def read_pair(pem: bytes, node: str) -> Pair:
    """The certificate and key in `pem`, judged but for the time. Raises CertificateError."""
    try:
        leaf = x509.load_pem_x509_certificates(pem)[0]
        key = serialization.load_pem_private_key(pem, None).public_key()
        matches = _public_bytes(leaf.public_key()) == _public_bytes(key)
        common_names = [item.value for item in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        organizations = [item.value for item in leaf.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
        pair = Pair(pem, leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp())
    except Exception as error:  # the library raises ValueError, TypeError and several of its own
        raise CertificateError(f"not a certificate with its key: {error}") from error
    if not matches:
        raise CertificateError("the key is not the certificate's")
    if common_names != [approver.USER_PREFIX + node] or organizations != [approver.ORGANIZATION]:
        raise CertificateError(f"the certificate is for {leaf.subject.rfc4514_string()!a}, not for node {node}")
    return pair


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(slots=True)
class Pending:
    """A key that has no certificate yet, and the request for one."""

    key: ec.EllipticCurvePrivateKey
    posted: float | None = None
    """When this process made the request, on the loop's clock."""

    @classmethod
    def from_pem(cls, pem: bytes) -> Pending | None:
        """The key that an earlier process left; None if it can't be used."""
        try:
            key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError):
            return None
        return cls(key) if isinstance(key, ec.EllipticCurvePrivateKey) else None

    @property
    def pem(self) -> bytes:
        """The key, in the form that client-go writes."""
        form = serialization.PrivateFormat.TraditionalOpenSSL
        return self.key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    def name(self, node: str, seconds: int) -> str:
        """Of the CertificateSigningRequest: the same as long as what is asked for is the same."""
        about = _public_bytes(self.key.public_key()) + f"\0{approver.SIGNER}\0{node}\0{seconds}".encode()
        return f"multus-{hashlib.sha256(about).hexdigest()[:40]}"

    @approver.long_names()
    def request(self, node: str, seconds: int) -> bytes:
        """The CertificateSigningRequest object as JSON."""
        names = ((NameOID.ORGANIZATION_NAME, approver.ORGANIZATION), (NameOID.COMMON_NAME, approver.USER_PREFIX + node))
        subject = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in names])
        signed = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(self.key, hashes.SHA256())
        spec = {
            "request": base64.b64encode(signed.public_bytes(serialization.Encoding.PEM)).decode(),
            "signerName": approver.SIGNER,
            "usages": sorted(approver.USAGES, reverse=True),
            "expirationSeconds": seconds,
        }
        kind = {"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest"}
        return msgspec.json.encode({**kind, "metadata": {"name": self.name(node, seconds)}, "spec": spec})


class CertificateFiles:
    """The files in `certDir`, all of mode 0600. Its methods block and raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.current = directory / "multus-client-current.pem"
        self._pending = directory / "multus-client-pending.key"

    def prepare(self) -> None:
        """Make the directory where it is missing, remove what killed writers left."""
        fs.ensure_directory(self._directory)
        fs.sweep(self._directory)

    def load(self) -> tuple[bytes, bytes]:
        """The certificate and key in use, and the key that waits for its certificate; empty where there is none."""
        return self._read(self.current), self._read(self._pending)

    def _read(self, path: Path) -> bytes:
        try:
            return fs.read_limited(path, limit=FILE_MAX_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("%s is not used, it will be replaced: %s", path, error)
            return b""

    def install(self, pem: bytes, now: float) -> None:
        """Put `pem` in place in one step; of the older ones the last stays, for a reader that is halfway."""
        stamp = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%d-%H-%M-%S")
        dated = self._directory / f"multus-client-{stamp}.pem"
        last = self.current.readlink().name if self.current.is_symlink() else ""
        fs.write_atomic(dated, pem)
        # The name is one that `sweep` knows. The target is relative: the directory may be mounted elsewhere.
        link = self._directory / f".{self.current.name}.{os.getpid()}-{secrets.token_hex(6)}"
        link.symlink_to(dated.name)
        link.replace(self.current)
        fs.fsync_directory(self._directory)
        fs.remove(self._pending)
        for path in list(self._directory.iterdir()):
            if _DATED.fullmatch(path.name) and path.name not in (dated.name, last):
                fs.remove(path)

    def keep(self, key: bytes | None) -> None:
        """The key that waits for its certificate from now on; None: none does."""
        if key:
            fs.write_atomic(self._pending, key)
        else:
            fs.remove(self._pending)


async def ask(client: Client, pending: Pending, node: str, seconds: int) -> bytes:
    """Make the request, or find it made, and wait for its certificates, PEM.

    Raises DeniedError, WaitingError, and what the client raises.
    """
    name, now = pending.name(node, seconds), _loop_time()
    try:
        await client.request(
            "POST", approver.CSR_PATH, body=pending.request(node, seconds), timeout=deadlines.APPROVER_REQUEST_SECONDS
        )
        pending.posted = now
    except Exception as error:
        if getattr(error, "status", None) != 409:
            raise
        log.info("CertificateSigningRequest %s exists already, its certificate is waited for", name)
    for delay in backoff(0.25, 10.0, jitter=0.2):
        answer = await client.request("GET", f"{approver.CSR_PATH}/{name}", timeout=deadlines.APPROVER_REQUEST_SECONDS)
        if chain := approver.decode_request(answer).issued():
            return chain
        if _loop_time() - now > deadlines.CERTIFICATE_SECONDS:
            break
        await asyncio.sleep(delay)
    raise WaitingError(
        f"CertificateSigningRequest {name} has no certificate after {deadlines.CERTIFICATE_SECONDS:.0f} s: is it"
        " approved (kubectl get csr), does the approver run (multus-daemon cert-approver)?"
    )


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
        if self._held and not self._refused and _loop_time() - self._held.since > REJECTION_SECONDS:
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
            left = min(held.renew[0] - self.now(), held.renew[1] - _loop_time())
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
        now, loop_now, life = self.now(), _loop_time(), pair.not_after - pair.not_before
        share = random.uniform(*RENEW_AT)
        left, renew_in = min(pair.not_after - now, life), pair.not_before + share * life - now
        if posted is not None and loop_now - posted < self.seconds / 2:
            left = min(life, self.seconds) - (loop_now - posted)
            renew_in = min(max(renew_in, left / 3), left * share)
        elif now < pair.not_before:
            renew_in = 0.0
        return _Held(pair, loop_now, (now + renew_in, loop_now + renew_in), (now + left, loop_now + left))

    def _passed(self, moment: tuple[float, float]) -> bool:
        return self.now() >= moment[0] or _loop_time() >= moment[1]

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


def _loop_time() -> float:
    """Seconds on a clock that does not jump."""
    return asyncio.get_running_loop().time()
