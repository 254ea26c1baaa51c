"""Approve CertificateSigningRequests for per-node client certificates.

The API server sets `spec.username` and `spec.groups`. A node may get a certificate for itself only, with its kubelet's
identity or with its present certificate. Requests that differ from the daemon's are denied.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from typing import Final

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from multus_daemon.cluster.kube import client, connect, csr, objects
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.aio import end, until_signal
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.settings import Settings

log = logging.getLogger(__name__)

GROUPS: Final = frozenset({"system:nodes", "system:multus", "system:authenticated"})
_SELECTOR: Final = {"fieldSelector": f"spec.signerName={csr.SIGNER}"}
RETRY_SECONDS: Final = (0.5, 60.0)
AT_ONCE: Final = 4
"""Maximum number of requests that are decided concurrently."""

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


@csr.long_names()
def judge(asked: csr.CertificateSigningRequest) -> csr.Condition | None:
    """Return the condition to set (Approved, Denied); None if it has one, or is not of a node. Never raises."""
    spec = asked.spec
    if spec.signer_name != csr.SIGNER or asked.status.conditions or asked.status.certificate:
        return None
    request = _parse(spec.request)
    if request is None:
        return None
    common_names = [str(item.value) for item in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if not any(name.startswith(csr.ORGANIZATION) for name in common_names):
        return None
    requester = _REQUESTER.fullmatch(spec.username) if len(spec.username) < _NODE_MAX_LENGTH + 15 else None
    node = requester[1] if requester else ""
    if not node or len(node) > _NODE_MAX_LENGTH:
        problem = f"the requester {spec.username!a} is not a node"
    else:
        problem = _problem_of_requester(spec) or _problem_of_subject(request, common_names, node)
    if problem:
        return csr.Condition("Denied", "True", "CSRDenied", problem)
    return csr.Condition("Approved", "True", "AutoApproved", f"{asked.metadata.name} is node {node}'s own")


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


def _problem_of_requester(spec: csr.Spec) -> str:
    groups, usages = spec.groups or (), spec.usages or ()
    if not GROUPS.issuperset(groups):
        return f"the requester is in groups beyond a node's: {sorted(set(groups) - GROUPS)!a}"
    if set(usages) != csr.USAGES:
        return f"the usages are {sorted(usages)!a} instead of {sorted(csr.USAGES)}"
    if spec.expiration_seconds is None:
        return "expirationSeconds is missing"
    if not 0 < spec.expiration_seconds <= csr.DURATION_MAX:
        return f"expirationSeconds is {spec.expiration_seconds}, which is not between 1 and 365 days"
    return ""


def _problem_of_subject(request: x509.CertificateSigningRequest, common_names: list[str], node: str) -> str:
    if common_names != [csr.USER_PREFIX + node]:
        return f"the common name is {common_names!a} instead of {csr.USER_PREFIX + node!r}"
    organizations = [item.value for item in request.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    if organizations != [csr.ORGANIZATION]:
        return f"the organization is {organizations!a} instead of {[csr.ORGANIZATION]}"
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
        # A gate and a metric of its own: the program shows neither.
        resource = objects.Resource("certificate requests", csr.CSR_PATH, _decode, query=_SELECTOR)
        self._requests = Informer(client, resource, Gates(), Metrics())
        self._requests.changed = self._changed
        self._queue = WorkQueue[str](self._decide, retry=RETRY_SECONDS, failed=self._failed, at_once=AT_ONCE)

    async def run(self) -> None:
        """Watch and decide for ever."""
        log.info("requests for per-node certificates of %s<node> are approved from now on", csr.USER_PREFIX)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._requests.run(), name="requests")
            group.create_task(self._queue.run(), name="verdicts")

    def _changed(self, asked: csr.CertificateSigningRequest) -> None:
        if judge(asked):
            self._queue.add(asked.metadata.name)

    async def _decide(self, name: str) -> None:
        """Read a request, decide, and update it at the API server. Raises KubeError, also for a conflict."""
        try:
            item = await self._client.request("GET", f"{csr.CSR_PATH}/{name}")
            asked = csr.decode_request(item)
            condition = judge(asked)
            if condition is None:
                return
            fields = msgspec.json.decode(item)
            fields |= {"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest"}
            fields["status"] = {**(fields.get("status") or {}), "conditions": [condition]}
            body = msgspec.json.encode(fields)
            await self._client.request("PUT", f"{csr.CSR_PATH}/{name}/approval", body=body)
        except KubeError as error:
            if error.status == 404:
                return
            raise
        level = logging.INFO if condition.type == "Approved" else logging.WARNING
        verdict = f"{condition.type.lower()}: {condition.message}"
        log.log(level, "CertificateSigningRequest %s of %a %s", name, asked.spec.username, verdict)

    def _failed(self, name: str, error: Exception, seconds: float) -> None:
        log.warning("CertificateSigningRequest %s: %s; next attempt in %.0f s", name, error, seconds)


def _decode(item: bytes | msgspec.Raw) -> objects.Item[csr.CertificateSigningRequest]:
    asked = csr.decode_request(item)
    return objects.Item(("", asked.metadata.name), asked.metadata.resource_version, asked)
