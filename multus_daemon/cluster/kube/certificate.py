"""A node's client certificate with its key, and the CertificateSigningRequest for one.

The name of a request is derived from its key: after a crash, or an attempt that took too long, the same request is
found again, and requests do not pile up in the cluster.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from dataclasses import dataclass

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from multus_daemon import deadlines
from multus_daemon.cluster.kube import approver
from multus_daemon.cluster.kube.approver import CertificateError, Client, WaitingError
from multus_daemon.runtime.backoff import backoff

log = logging.getLogger(__name__)


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
        matches = leaf.public_key() == serialization.load_pem_private_key(pem, None).public_key()
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
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public = self.key.public_key().public_bytes(serialization.Encoding.DER, form)
        about = public + f"\0{approver.SIGNER}\0{node}\0{seconds}".encode()
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


async def ask(client: Client, pending: Pending, node: str, seconds: int) -> bytes:
    """Make the request, or find it made, and wait for its certificates, PEM.

    Raises DeniedError, WaitingError, and what the client raises.
    """
    name, now = pending.name(node, seconds), loop_time()
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
        if loop_time() - now > deadlines.CERTIFICATE_SECONDS:
            break
        await asyncio.sleep(delay)
    raise WaitingError(
        f"CertificateSigningRequest {name} has no certificate after {deadlines.CERTIFICATE_SECONDS:.0f} s: is it"
        " approved (kubectl get csr), does the approver run (multus-daemon cert-approver)?"
    )


def loop_time() -> float:
    """Seconds on a clock that does not jump."""
    return asyncio.get_running_loop().time()
