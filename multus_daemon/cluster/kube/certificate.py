"""The node's own client certificate: requested by CertificateSigningRequest, kept in a file, renewed in time."""

from __future__ import annotations

import asyncio
import base64
import datetime
import functools
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
from cryptography.x509.oid import NameOID

from multus_daemon import deadlines
from multus_daemon.cluster.kube import csr
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.csr import CertificateError, DeniedError
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.runtime import fs
from multus_daemon.runtime.aio import at_most
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.gates import Gates

log = logging.getLogger(__name__)

GATE: Final = "certificate"
FILE_MAX_BYTES: Final = 256 * 1024
RENEW_AT: Final = (0.7, 0.9)
RETRY_SECONDS: Final = (1.0, 30.0)
DENIED_SECONDS: Final = (30.0, 300.0)
REJECTION_SECONDS: Final = 30.0
"""This long after a new certificate is in use, a 401 may still be an answer to the previous one."""
CLOCK_SECONDS: Final = 60.0  # between two looks at the clock: timers stand still in a suspend
# Opens a client with the credentials of the bootstrap kubeconfig, or with those in the given file only.
Connect = Callable[[Path | None], AbstractAsyncContextManager[ApiClient]]

_since_boot: Final = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""A clock that never jumps, unlike the wall clock, and continues while the machine is suspended."""
_DATED = re.compile(r"multus-client-[0-9]{4}(-[0-9]{2}){5}\.pem")


@csr.long_names()
def _read_validity(pem: bytes, node: str) -> tuple[float, float]:
    """Return notBefore and notAfter in Unix seconds. Raises CertificateError if `pem` is not the node's certificate."""
    try:
        leaf = x509.load_pem_x509_certificates(pem)[0]
        matches = leaf.public_key() == serialization.load_pem_private_key(pem, None).public_key()
        common_names = [item.value for item in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        organizations = [item.value for item in leaf.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    except Exception as error:  # the library raises ValueError, TypeError and several of its own
        raise CertificateError(f"the file is not a certificate with its key: {error}") from error
    if not matches:
        raise CertificateError("the key is not the certificate's")
    if common_names != [csr.USER_PREFIX + node] or organizations != [csr.ORGANIZATION]:
        raise CertificateError(f"the certificate is for {leaf.subject.rfc4514_string()!a}, not for node {node}")
    return leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()


@dataclass(slots=True)
class Pending:
    """A key that has no certificate yet, and the request for the certificate.

    The request's name is derived from the key, so that the same request is found again after a crash or a timeout.
    """

    key: ec.EllipticCurvePrivateKey
    posted: float | None = None  # when this process made the request, on the clock since boot

    @classmethod
    def from_pem(cls, pem: bytes) -> Pending | None:
        """Return the pending key that an earlier process left; None if it can't be used."""
        try:
            key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError):
            return None
        return cls(key) if isinstance(key, ec.EllipticCurvePrivateKey) else None

    @property
    def pem(self) -> bytes:
        """The key in client-go's format."""
        form = serialization.PrivateFormat.TraditionalOpenSSL
        return self.key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    def name(self, node: str, seconds: int) -> str:
        """Return the name of the CertificateSigningRequest; requests with the same content have the same name."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public = self.key.public_key().public_bytes(serialization.Encoding.DER, form)
        content = public + f"\0{csr.SIGNER}\0{node}\0{seconds}".encode()
        return f"multus-{hashlib.sha256(content).hexdigest()[:40]}"

    @csr.long_names()
    def request(self, node: str, seconds: int) -> bytes:
        """Return the CertificateSigningRequest object as JSON."""
        names = {NameOID.ORGANIZATION_NAME: csr.ORGANIZATION, NameOID.COMMON_NAME: csr.USER_PREFIX + node}
        subject = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in names.items()])
        signed = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(self.key, hashes.SHA256())
        return msgspec.json.encode(
            {
                "apiVersion": "certificates.k8s.io/v1",
                "kind": "CertificateSigningRequest",
                "metadata": {"name": self.name(node, seconds)},
                "spec": {
                    "request": base64.b64encode(signed.public_bytes(serialization.Encoding.PEM)).decode(),
                    "signerName": csr.SIGNER,
                    "usages": sorted(csr.USAGES, reverse=True),
                    "expirationSeconds": seconds,
                },
            }
        )


class CertificateFiles:
    """The files in `certDir`, all of mode 0600. All methods block and raise OSError.

    `multus-client-current.pem` has the certificate, then its key. It is a link to a dated file, so that upstream's
    daemon can take over: client-go refuses to renew a plain file. The pending key has a file of its own.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.current = directory / "multus-client-current.pem"
        self.pending = directory / "multus-client-pending.key"

    def load(self) -> tuple[bytes, bytes]:
        """Return the certificate with its key, and the pending key; empty for an unusable file. Makes the directory."""
        fs.ensure_directory(self._directory)
        fs.sweep(self._directory)
        return self._read(self.current), self._read(self.pending)

    def _read(self, path: Path) -> bytes:
        try:
            return fs.read_limited(path, limit=FILE_MAX_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("%s is ignored and will be replaced: %s", path, error)
            return b""

    def install(self, pem: bytes, now: float) -> None:
        """Replace the current file atomically; the previous one stays for its readers. Removes the pending key."""
        stamp = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%d-%H-%M-%S")
        dated = self._directory / f"multus-client-{stamp}.pem"
        last = self.current.readlink().name if self.current.is_symlink() else ""
        fs.write_atomic(dated, pem)
        # `sweep` knows this form of name. The target is relative: the directory may be mounted elsewhere.
        link = self._directory / f".{self.current.name}.{os.getpid()}-{secrets.token_hex(6)}"
        link.symlink_to(dated.name)
        link.replace(self.current)
        fs.fsync_directory(self._directory)
        fs.remove(self.pending)
        for path in list(self._directory.iterdir()):
            if _DATED.fullmatch(path.name) and path.name not in (dated.name, last):
                fs.remove(path)


@dataclass(frozen=True, slots=True)
class _Held:
    """The certificate in use. `not_after` is Unix time; the other times are of the clock since boot."""

    not_after: float
    since: float
    renew: float
    expires: float


@dataclass(eq=False, kw_only=True)
class CertificateManager:
    """Gets and renews the node's certificate while `run` runs."""

    node: str
    files: CertificateFiles
    connect: Connect
    on_renewed: Callable[[], None]  # must not block or raise
    gates: Gates
    seconds: int
    now: Callable[[], float] = time.time
    uptime: Callable[[], float] = _since_boot
    _held: _Held | None = field(default=None, init=False)
    _pending: Pending | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    _refused: bool = field(default=False, init=False)
    _failure: str = field(default="none was issued yet", init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _usable: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def expires(self) -> float | None:
        """The end of the certificate in use, Unix time; None without one."""
        held = self._held
        return held.not_after if held else None

    @property
    def problem(self) -> str:
        """The reason why there is no usable certificate; empty if there is one."""
        if self._held and not self._refused and self.uptime() < self._held.expires:
            return ""
        state = "refused by the API server" if self._refused else "expired" if self._held else "missing"
        return f"the client certificate of node {self.node} is {state}: {self._failure}"

    async def usable(self) -> Path:
        """Wait for the first usable certificate; return its file."""
        await self._usable.wait()
        return self.files.current

    def rejected(self) -> None:
        """Request another certificate at once: the API server answered 401 to the one in use."""
        if self._held and not self._refused and self.uptime() - self._held.since > REJECTION_SECONDS:
            self._refused = True
            self._failure = "it answered 401 to a request"
            self._show()
            self._wake.set()

    async def run(self) -> None:
        """Get a certificate and renew it for ever."""
        retries: dict[tuple[float, float], Iterator[float]] = {}
        while True:
            try:
                if not self._begun:
                    await self._begin()
                await self._until_due()
                await self._renew()
                retries.clear()
            except Exception as error:
                # Any error: a later attempt may succeed, and there is no fallback.
                span = DENIED_SECONDS if isinstance(error, DeniedError) else RETRY_SECONDS
                delay = next(retries.setdefault(span, backoff(*span, jitter=0.2)))
                self._failure = str(error) or repr(error)
                self._show()
                log.warning("client certificate of %s: %s; next attempt in %.0f s", self.node, self._failure, delay)
                await self._pause(delay)

    async def _begin(self) -> None:
        """Use the certificate and the pending key that an earlier process left."""
        current, key = await asyncio.to_thread(self.files.load)
        self._begun = True
        self._pending = Pending.from_pem(key) if key else None
        if current:
            try:
                validity = _read_validity(current, self.node)
                if validity[1] <= self.now():
                    raise CertificateError("the certificate has expired")
                self._held = self._schedule(validity, None)
            except CertificateError as error:
                self._failure = f"the one in {self.files.current.parent} is not used: {error}"
        if self._held:
            # The cluster may have got another CA meanwhile. Only a 401 counts as a refusal.
            try:
                async with self.connect(self.files.current) as client:
                    await client.request("GET", "/version", timeout=deadlines.CERTIFICATE_REQUEST_SECONDS)
            except KubeError as error:
                self._refused, self._failure = error.status == 401, str(error)
        self._show()

    async def _until_due(self) -> None:
        while (held := self._held) and not self._refused and (left := held.renew - self.uptime()) > 0:
            await self._pause(min(max(left, 0.1), CLOCK_SECONDS))

    async def _renew(self) -> None:
        pending = self._pending or Pending(ec.generate_private_key(ec.SECP256R1()))
        if not self._pending:
            await asyncio.to_thread(fs.write_atomic, self.files.pending, pending.pem)
            self._pending = pending
        try:
            pem = (await self._request(pending)).rstrip() + b"\n" + pending.pem
            held = self._schedule(_read_validity(pem, self.node), pending.posted)
            if self.uptime() >= held.renew:
                raise CertificateError("the certificate was issued so late that it is due for renewal already")
        except CertificateError:
            # This request can't succeed any more.
            self._pending = None
            await asyncio.to_thread(fs.remove, self.files.pending)
            raise
        await asyncio.to_thread(self.files.install, pem, self.now())
        self._held, self._pending, self._refused, self._failure = held, None, False, "it was not renewed in time"
        self._show()
        log.info("client certificate of %s: renewed, valid for %d s", self.node, held.expires - self.uptime())
        self.on_renewed()

    async def _request(self, pending: Pending) -> bytes:
        """Return the certificates, PEM. Uses the certificate in use, or else the bootstrap credentials."""
        if not self.problem:
            try:
                async with self.connect(self.files.current) as client:
                    return await self._request_from(client, pending)
            except KubeError as error:
                if error.status not in (None, 401, 403):
                    raise
                self._refused = error.status == 401
                log.info("client certificate of %s: renewing with the bootstrap credentials: %s", self.node, error)
        async with self.connect(None) as client:
            return await self._request_from(client, pending)

    async def _request_from(self, client: ApiClient, pending: Pending) -> bytes:
        """Make or find the request and wait for its certificates, PEM. Raises DeniedError, KubeError, TimeoutError."""
        name, now, timeout = pending.name(self.node, self.seconds), self.uptime(), deadlines.CERTIFICATE_REQUEST_SECONDS
        try:
            body = pending.request(self.node, self.seconds)
            await client.request("POST", csr.CSR_PATH, body=body, timeout=timeout)
            pending.posted = now
        except KubeError as error:
            if error.status != 409:
                raise
            log.info("CertificateSigningRequest %s exists already; waiting for its certificate", name)
        for delay in backoff(0.25, 10.0, jitter=0.2):
            answer = await client.request("GET", f"{csr.CSR_PATH}/{name}", timeout=timeout)
            if chain := csr.decode_request(answer).issued():
                return chain
            if self.uptime() - now > deadlines.CERTIFICATE_SECONDS:
                break
            await asyncio.sleep(delay)
        raise TimeoutError(
            f"CertificateSigningRequest {name} has no certificate after {deadlines.CERTIFICATE_SECONDS:.0f} s: is it"
            " approved (kubectl get csr), does the approver run (multus-daemon cert-approver)?"
        )

    def _schedule(self, validity: tuple[float, float], posted: float | None) -> _Held:
        """Compute when a certificate ends and when it is renewed, between 70 and 90 % of its life.

        For a request that this process has just `posted`, the wall clock, which may be wrong, does not count.
        """
        not_before, not_after = validity
        now, uptime, life = self.now(), self.uptime(), not_after - not_before
        share = random.uniform(*RENEW_AT)
        left, renew_in = min(not_after - now, life), not_before + share * life - now
        if posted is not None and uptime - posted < self.seconds / 2:
            left = min(life, self.seconds) - (uptime - posted)
            renew_in = min(max(renew_in, left / 3), left * share)
        elif now < not_before:
            renew_in = 0.0
        return _Held(not_after, uptime, uptime + renew_in, uptime + left)

    def _show(self) -> None:
        if problem := self.problem:
            self.gates.close(GATE, problem)
        else:
            self.gates.open(GATE)
            self._usable.set()

    async def _pause(self, seconds: float) -> None:
        """Sleep, at most until the certificate is rejected."""
        self._wake.clear()
        await at_most(seconds, self._wake.wait())
