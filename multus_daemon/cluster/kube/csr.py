"""CertificateSigningRequests (certificates.k8s.io/v1) for per-node client certificates: their content and limits."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterator
from typing import Final

import msgspec

from multus_daemon.cluster.kube import objects

SIGNER: Final = "kubernetes.io/kube-apiserver-client"
ORGANIZATION: Final = "system:multus"
USER_PREFIX: Final = "system:multus:"
USAGES: Final = frozenset({"digital signature", "client auth"})
DURATION_MIN: Final = 600  # the API server's minimum, in seconds
DURATION_MAX: Final = 365 * 86400
CSR_PATH: Final = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")


class CertificateError(Exception):
    """There is no usable certificate; the message says why."""


class DeniedError(CertificateError):
    """The request was denied, or its signer failed."""


class Condition(msgspec.Struct):
    """A condition `Approved`, `Denied` or `Failed`."""

    type: str
    status: str = "True"
    reason: str = ""
    message: str = ""


class Status(msgspec.Struct):
    """certificates.k8s.io/v1 CertificateSigningRequestStatus; the certificates are in PEM."""

    conditions: list[Condition] | None = None
    certificate: bytes | None = None


class Spec(msgspec.Struct, rename="camel"):
    """certificates.k8s.io/v1 CertificateSigningRequestSpec; the request is PKCS#10 in PEM."""

    request: bytes = b""
    signer_name: str = ""
    usages: tuple[str, ...] | None = None
    username: str = ""
    groups: tuple[str, ...] | None = None
    expiration_seconds: int | None = None


class CertificateSigningRequest(objects.Versioned):
    """The used parts of a certificates.k8s.io/v1 CertificateSigningRequest."""

    spec: Spec = msgspec.field(default_factory=Spec)
    status: Status = msgspec.field(default_factory=Status)

    def issued(self) -> bytes:
        """Return the certificates, PEM; empty while there is none. Raises DeniedError."""
        for condition in self.status.conditions or ():
            if condition.type in ("Denied", "Failed") and condition.status != "False":
                why = f"{condition.reason}: {condition.message}".strip(": ") or "no reason given"
                raise DeniedError(f"CertificateSigningRequest {self.metadata.name} is {condition.type.lower()}: {why}")
        return self.status.certificate or b""


decode_request: Final = msgspec.json.Decoder(CertificateSigningRequest).decode


@contextlib.contextmanager
def long_names() -> Iterator[None]:
    """Suppress the warning about names above X.520's limit of 64 characters: node names may be longer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attribute's length must be", UserWarning)
        yield


def parse_duration(text: str) -> float:
    """Return the seconds of a duration in the format of Go's time.ParseDuration: `10m`, `1.5h`. Raises ValueError."""
    unsigned = text[1:] if text[:1] in ("+", "-") else text
    parts = list(_DURATION_PART.finditer(unsigned))
    if unsigned != "0" and (not parts or "".join(part[0] for part in parts) != unsigned):
        raise ValueError(f"{text!r} is not a duration such as 10m or 1h30m")
    seconds = math.fsum(float(part[1]) * _UNITS[part[2]] for part in parts)
    return -seconds if text.startswith("-") else seconds


def certificate_seconds(text: str) -> int:
    """Return the value of `certDuration` in seconds. Raises ValueError for an unsupported lifetime."""
    seconds = parse_duration(text)
    if not DURATION_MIN <= seconds <= DURATION_MAX:
        raise ValueError(f"{text!r} is not between 10m, the API server's minimum, and 8760h (365 days)")
    return int(seconds)
