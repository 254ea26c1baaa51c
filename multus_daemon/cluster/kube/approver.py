"""CertificateSigningRequests for per-node client certificates: what they look like, which are approved, and by whom.

The API server fills in `spec.username` and `spec.groups` from who makes a request: a node may have a certificate for
itself, with its kubelet's identity or with the certificate that it has, and for nobody else. Everything that the
signer copies or that the daemon would not ask for is refused.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import re
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from multus_daemon import deadlines
from multus_daemon.runtime.backoff import backoff

log = logging.getLogger(__name__)

SIGNER: Final = "kubernetes.io/kube-apiserver-client"
ORGANIZATION: Final = "system:multus"
USER_PREFIX: Final = "system:multus:"
USAGES: Final = frozenset({"digital signature", "client auth"})
GROUPS: Final = frozenset({"system:nodes", "system:multus", "system:authenticated"})
DURATION_MIN: Final = 600
DURATION_MAX: Final = 365 * 86400
"""Seconds. Less is refused by the API server, more by the approver."""
CSR_PATH: Final = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

TRIES: Final = 6
"""One, and five more."""
RETRY_SECONDS: Final = (0.5, 8.0)
ROUND_RETRY_SECONDS: Final = (1.0, 60.0)

_REQUESTER = re.compile(
    r"system:(?:node|multus):([a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*)"
)
_NODE_MAX_LENGTH = 253
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
# One block and nothing beside it: of several, or of what is half a block, the signer might see another than we do.
_PEM = re.compile(
    rb"-----BEGIN CERTIFICATE REQUEST-----\n([A-Za-z0-9+/\n]+={0,2})\n-----END CERTIFICATE REQUEST-----\s*"
)


class CertificateError(Exception):
    """No certificate was had, or one that can't be used; the message says which and why."""


class DeniedError(CertificateError):
    """The request was denied, or its signer failed."""


class WaitingError(Exception):
    """The certificate was not issued in time; the request stands."""


class Client(Protocol):
    """What is needed of the API client. Its errors carry the HTTP status in `status`, where there was an answer."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout: float = deadlines.APPROVER_REQUEST_SECONDS,
    ) -> bytes:
        """One request; the body of the answer."""
        ...


class WatchClient(Client, Protocol):
    """A client that can watch, too."""

    def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The lines of an answer, as they come; it ends when the API server ends it."""
        ...


class Condition(msgspec.Struct, frozen=True):
    """Of a request: `Approved`, `Denied` or `Failed`."""

    type: str
    status: str = "True"
    reason: str = ""
    message: str = ""


class Status(msgspec.Struct, frozen=True):
    """What became of a request."""

    conditions: tuple[Condition, ...] | None = None
    certificate: bytes | None = None
    """The certificates, PEM."""


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """What is asked for, and who asks."""

    request: bytes = b""
    """PKCS#10, PEM."""
    signer_name: str = ""
    usages: tuple[str, ...] | None = None
    username: str = ""
    groups: tuple[str, ...] | None = None
    expiration_seconds: int | None = None


class Metadata(msgspec.Struct, frozen=True):
    """The object's name."""

    name: str = ""


class CertificateSigningRequest(msgspec.Struct, frozen=True):
    """The parts of a certificates.k8s.io/v1 CertificateSigningRequest that count here."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: Spec = msgspec.field(default_factory=Spec)
    status: Status = msgspec.field(default_factory=Status)

    def issued(self) -> bytes:
        """The certificates, PEM; empty while there is none. Raises DeniedError."""
        for condition in self.status.conditions or ():
            if condition.type in ("Denied", "Failed") and condition.status != "False":
                why = f"{condition.reason}: {condition.message}".strip(": ") or "no reason given"
                raise DeniedError(f"CertificateSigningRequest {self.metadata.name} is {condition.type.lower()}: {why}")
        return self.status.certificate or b""


decode_request: Final = msgspec.json.Decoder(CertificateSigningRequest).decode


@contextlib.contextmanager
def long_names() -> Iterator[None]:
    """In here a name of more than 64 characters, X.520's bound, gives no warning: node names may be longer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attribute's length must be", UserWarning)
        yield


def parse_duration(text: str) -> float:
    """Seconds of a duration as Go's time.ParseDuration reads it: `10m`, `1h30m`, `1.5h`. Raises ValueError."""
    unsigned = text[1:] if text[:1] in ("+", "-") else text
    parts = list(_DURATION_PART.finditer(unsigned))
    if unsigned != "0" and (not parts or "".join(part[0] for part in parts) != unsigned):
        raise ValueError(f"{text!r} is no duration such as 10m or 1h30m")
    seconds = math.fsum(float(part[1]) * _UNITS[part[2]] for part in parts)
    return -seconds if text.startswith("-") else seconds


def certificate_seconds(text: str) -> int:
    """The value of `certDuration`, in seconds. Raises ValueError where no certificate can be had for so long."""
    seconds = parse_duration(text)
    if not DURATION_MIN <= seconds <= DURATION_MAX:
        raise ValueError(f"{text!r} is not between 10m, the API server's least, and 8760h (365 days)")
    return int(seconds)


@dataclass(frozen=True, slots=True)
class Approve:
    """It is a node's, for that node."""

    node: str


@dataclass(frozen=True, slots=True)
class Deny:
    """It asks for a per-node certificate and must not have one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """It is no request for a per-node certificate, or is decided already."""


Verdict = Approve | Deny | Ignore


@long_names()
def judge(csr: CertificateSigningRequest) -> Verdict:
    """What to do about `csr`. Pure; never raises."""
    spec = csr.spec
    if spec.signer_name != SIGNER or csr.status.conditions or csr.status.certificate:
        return Ignore()
    request = _parse(spec.request)
    if request is None:
        return Ignore()
    common_names = [str(item.value) for item in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if not any(name.startswith(ORGANIZATION) for name in common_names):
        return Ignore()
    requester = _REQUESTER.fullmatch(spec.username) if len(spec.username) < _NODE_MAX_LENGTH + 15 else None
    if requester is None or len(requester[1]) > _NODE_MAX_LENGTH:
        return Deny(f"the requester {spec.username!a} is no node")
    problem = _problem_of_requester(spec) or _problem_of_subject(request, common_names, requester[1])
    return Deny(problem) if problem else Approve(requester[1])


def _parse(pem: bytes) -> x509.CertificateSigningRequest | None:
    """The PKCS#10 request, None if it isn't one that can be read in full."""
    found = _PEM.fullmatch(pem)
    if not found:
        return None
    try:
        request = x509.load_der_x509_csr(base64.b64decode(found[1].replace(b"\n", b""), validate=True))
        # These are read when they are asked for.
        return request if request.subject is not None and request.extensions is not None else None
    except Exception as error:  # the library raises ValueError, TypeError and several of its own
        log.debug("a certificate request can't be read: %s", error)
        return None


def _problem_of_requester(spec: Spec) -> str:
    groups, usages = spec.groups or (), spec.usages or ()
    if not GROUPS.issuperset(groups):
        return f"the requester is in groups beyond a node's: {sorted(set(groups) - GROUPS)!a}"
    if set(usages) != USAGES:
        return f"the usages are {sorted(usages)!a} instead of {sorted(USAGES)}"
    if spec.expiration_seconds is None:
        return "expirationSeconds is missing"
    if not 0 < spec.expiration_seconds <= DURATION_MAX:
        return f"expirationSeconds is {spec.expiration_seconds}, more than 365 days or none"
    return ""


def _problem_of_subject(request: x509.CertificateSigningRequest, common_names: list[str], node: str) -> str:
    if common_names != [USER_PREFIX + node]:
        return f"the common name is {common_names!a} instead of {USER_PREFIX + node!r}"
    organizations = [item.value for item in request.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    if organizations != [ORGANIZATION]:
        return f"the organization is {organizations!a} instead of {[ORGANIZATION]}"
    if len(list(request.subject)) != 2:
        return f"the subject {request.subject.rfc4514_string()!a} has more than a common name and an organization"
    if len(request.extensions):
        names = sorted(extension.oid._name for extension in request.extensions)
        return f"it asks for extensions, such as other names: {names!a}"
    if not request.is_signature_valid:
        return "its signature is not that of its key"
    return ""


class Approver:
    """Approves and denies as `judge` says, for as long as `run` runs."""

    def __init__(self, client: WatchClient) -> None:
        self._client = client
        self._selector = {"fieldSelector": f"spec.signerName={SIGNER}"}

    async def run(self) -> None:
        """List and watch for ever."""
        delays = None
        while True:
            try:
                await self.round()
                delays = None
                # An API server that ends each watch at once is not to be asked without a rest.
                await asyncio.sleep(ROUND_RETRY_SECONDS[0])
            except Exception as error:
                delays = delays or backoff(*ROUND_RETRY_SECONDS, jitter=0.2)
                delay = next(delays)
                log.warning("CertificateSigningRequests can't be watched: %s; tried again in %.0f s", error, delay)
                log.debug("approver", exc_info=True)
                await asyncio.sleep(delay)

    async def round(self) -> None:
        """List, decide, watch and decide until the watch ends. Raises what the client raises."""
        listing = _decode_list(await self._client.request("GET", CSR_PATH, query=self._selector))
        for item in listing.items or ():
            await self.decide(item)
        query = {
            **self._selector,
            "watch": "true",
            "resourceVersion": listing.metadata.resource_version,
            "timeoutSeconds": str(deadlines.APPROVER_WATCH_SECONDS),
        }
        # The API server's own limit does not help where the connection is dead.
        watch = contextlib.aclosing(self._client.lines(CSR_PATH, query))
        async with asyncio.timeout(deadlines.APPROVER_WATCH_SECONDS * 1.1), watch as lines:
            async for line in lines:
                event = _decode_event(line)
                if event.type == "ERROR":
                    log.info("the watch has ended, everything is listed again: %s", event.object.get("message"))
                    return
                if event.type in ("ADDED", "MODIFIED"):
                    await self.decide(event.object)

    async def decide(self, found: dict[str, Any]) -> None:
        """Decide about one object and say so to the API server; gives up after five retries. Never raises."""
        delays = backoff(*RETRY_SECONDS, jitter=0.2)
        name = ""
        for attempt in range(1, TRIES + 1):
            try:
                if name and attempt > 1:
                    found = msgspec.json.decode(await self._client.request("GET", f"{CSR_PATH}/{name}"))
                csr = msgspec.convert(found, CertificateSigningRequest)
                name = csr.metadata.name
                verdict = judge(csr)
                if isinstance(verdict, Ignore):
                    return
                body = msgspec.json.encode(_decided(found, name, verdict))
                await self._client.request("PUT", f"{CSR_PATH}/{name}/approval", body=body)
            except msgspec.ValidationError as error:
                log.error(
                    "CertificateSigningRequest %r is passed over, it is not as the API defines it: %s", name, error
                )
                return
            except Exception as error:
                if getattr(error, "status", None) == 404:
                    return
                log.warning("CertificateSigningRequest %s, attempt %d of %d: %s", name, attempt, TRIES, error)
                if attempt < TRIES:
                    await asyncio.sleep(next(delays))
            else:
                _report(csr, verdict)
                return
        log.error("CertificateSigningRequest %s is given up for now", name)


async def run_approver(client: WatchClient) -> None:
    """What `multus-daemon cert-approver` does, for ever."""
    log.info("requests for per-node certificates of %s are approved from now on", USER_PREFIX + "<node>")
    await Approver(client).run()


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _List(msgspec.Struct):
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[dict[str, Any]] | None = None


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


_decode_list: Final = msgspec.json.Decoder(_List).decode
_decode_event: Final = msgspec.json.Decoder(_Event).decode


def _decided(found: Mapping[str, Any], name: str, verdict: Approve | Deny) -> dict[str, Any]:
    """The object with the condition that tells the verdict."""
    if isinstance(verdict, Approve):
        condition = {"type": "Approved", "reason": "AutoApproved", "message": f"{name} is node {verdict.node}'s own"}
    else:
        condition = {"type": "Denied", "reason": "CSRDenied", "message": verdict.reason}
    return {
        **found,
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "status": {**(found.get("status") or {}), "conditions": [{**condition, "status": "True"}]},
    }


def _report(csr: CertificateSigningRequest, verdict: Approve | Deny) -> None:
    name, user = csr.metadata.name, csr.spec.username
    match verdict:
        case Approve(node):
            log.info("CertificateSigningRequest %s of %s approved for node %s", name, user, node)
        case Deny(reason):
            log.warning("CertificateSigningRequest %s of %a denied: %s", name, user, reason)
