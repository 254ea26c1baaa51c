"""Approve CertificateSigningRequests for per-node client certificates.

The API server sets `spec.username` and `spec.groups`. A node may get a certificate for itself only, with its kubelet's
identity or with its present certificate. Requests that differ from the daemon's are denied.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
from typing import Final

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from multus_daemon import deadlines
from multus_daemon.cluster.kube import client, connect, objects
from multus_daemon.cluster.kube.csr import (
    CSR_PATH,
    DURATION_MAX,
    ORGANIZATION,
    SIGNER,
    USAGES,
    USER_PREFIX,
    CertificateSigningRequest,
    Condition,
    Spec,
    decode_request,
    long_names,
)
from multus_daemon.cluster.kube.errors import KubeError, from_watch_event
from multus_daemon.runtime.aio import end, until_signal
from multus_daemon.runtime.deadline import backoff
from multus_daemon.settings import Settings

log = logging.getLogger(__name__)

GROUPS: Final = frozenset({"system:nodes", "system:multus", "system:authenticated"})
_SELECTOR: Final = {"fieldSelector": f"spec.signerName={SIGNER}"}
TRIES: Final = 6
RETRY_SECONDS: Final = (0.5, 8.0)
ROUND_RETRY_SECONDS: Final = (1.0, 60.0)

_REQUESTER = re.compile(
    r"system:(?:node|multus):([a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*)"
)
_NODE_MAX_LENGTH = 253
# Exactly one block: with several, or with parts of one, the signer might read another request than the approver.
_PEM = re.compile(
    rb"-----BEGIN CERTIFICATE REQUEST-----\n([A-Za-z0-9+/\n]+={0,2})\n-----END CERTIFICATE REQUEST-----\s*"
)


def run(settings: Settings) -> None:
    """Approve the nodes' certificate requests until SIGTERM or SIGINT. Raises StartError."""

    async def work() -> None:
        async with client.ApiClient(connect.source_of(settings.kubernetes)) as api:
            await api.load()
            await end(await until_signal({"approver": Approver(api).run()}))

    asyncio.run(work())


@long_names()
def judge(csr: CertificateSigningRequest) -> Condition | None:
    """Return the condition for the request; None if it is decided, or not for a per-node certificate. Never raises."""
    spec = csr.spec
    if spec.signer_name != SIGNER or csr.status.conditions or csr.status.certificate:
        return None
    request = _parse(spec.request)
    if request is None:
        return None
    common_names = [str(item.value) for item in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if not any(name.startswith(ORGANIZATION) for name in common_names):
        return None
    requester = _REQUESTER.fullmatch(spec.username) if len(spec.username) < _NODE_MAX_LENGTH + 15 else None
    node = requester[1] if requester else ""
    if not node or len(node) > _NODE_MAX_LENGTH:
        problem = f"the requester {spec.username!a} is not a node"
    else:
        problem = _problem_of_requester(spec) or _problem_of_subject(request, common_names, node)
    if problem:
        return Condition("Denied", "True", "CSRDenied", problem)
    return Condition("Approved", "True", "AutoApproved", f"{csr.metadata.name} is node {node}'s own")


def _parse(pem: bytes) -> x509.CertificateSigningRequest | None:
    """Return the PKCS#10 request, None if a part of it can't be read."""
    block = _PEM.fullmatch(pem)
    if not block:
        return None
    try:
        request = x509.load_der_x509_csr(base64.b64decode(block[1].replace(b"\n", b""), validate=True))
        # The library parses both on access.
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
        return f"expirationSeconds is {spec.expiration_seconds}, which is not between 1 and 365 days"
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
    """Approves and denies requests according to `judge`."""

    def __init__(self, client: client.ApiClient) -> None:
        self._client = client

    async def run(self) -> None:
        """List and watch for ever."""
        log.info("requests for per-node certificates of %s<node> are approved from now on", USER_PREFIX)
        delays = backoff(*ROUND_RETRY_SECONDS, jitter=0.2)
        while True:
            try:
                await self.round()
                delays = backoff(*ROUND_RETRY_SECONDS, jitter=0.2)
                # An API server may end each watch at once.
                await asyncio.sleep(ROUND_RETRY_SECONDS[0])
            except Exception as error:
                delay = next(delays)
                log.warning("CertificateSigningRequests can't be watched: %s; next attempt in %.0f s", error, delay)
                log.debug("approver", exc_info=True)
                await asyncio.sleep(delay)

    async def round(self) -> None:
        """List and decide, then watch and decide until the watch ends. Raises the client's errors."""
        listing = objects.decode_page(await self._client.request("GET", CSR_PATH, query=_SELECTOR))
        for item in listing.items or ():
            await self.decide(item)
        query = {
            **_SELECTOR,
            "watch": "true",
            "resourceVersion": listing.metadata.resource_version,
            "timeoutSeconds": str(deadlines.APPROVER_WATCH_SECONDS),
        }
        # The API server's own limit does not end a dead connection.
        watch = contextlib.aclosing(self._client.lines(CSR_PATH, query))
        async with asyncio.timeout(deadlines.APPROVER_WATCH_SECONDS * 1.1), watch as lines:
            async for line in lines:
                event = objects.decode_event(line)
                if event.type == "ERROR":
                    log.info("%s; listing again", from_watch_event(bytes(event.object), request=f"watch of {CSR_PATH}"))
                    return
                if event.type in ("ADDED", "MODIFIED"):
                    await self.decide(event.object)

    async def decide(self, item: bytes | msgspec.Raw) -> None:
        """Decide about one object and update it at the API server, in up to TRIES attempts. Never raises."""
        delays = backoff(*RETRY_SECONDS, jitter=0.2)
        name = ""
        for attempt in range(1, TRIES + 1):
            try:
                if name and attempt > 1:
                    item = await self._client.request("GET", f"{CSR_PATH}/{name}")
                csr = decode_request(item)
                name = csr.metadata.name
                condition = judge(csr)
                if condition is None:
                    return
                body = _with_condition(item, condition)
                await self._client.request("PUT", f"{CSR_PATH}/{name}/approval", body=body)
            except objects.DECODE_ERRORS as error:
                log.error("CertificateSigningRequest %r is skipped, it does not match the API: %s", name, error)
                return
            except Exception as error:
                if isinstance(error, KubeError) and error.status == 404:
                    return
                log.warning("CertificateSigningRequest %s, attempt %d of %d: %s", name, attempt, TRIES, error)
                if attempt < TRIES:
                    await asyncio.sleep(next(delays))
            else:
                level = logging.INFO if condition.type == "Approved" else logging.WARNING
                verdict = f"{condition.type.lower()}: {condition.message}"
                log.log(level, "CertificateSigningRequest %s of %a %s", name, csr.spec.username, verdict)
                return
        log.error("CertificateSigningRequest %s is given up for now", name)


def _with_condition(item: bytes | msgspec.Raw, condition: Condition) -> bytes:
    fields = msgspec.json.decode(item)
    fields |= {"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest"}
    fields["status"] = {**(fields.get("status") or {}), "conditions": [condition]}
    return msgspec.json.encode(fields)
