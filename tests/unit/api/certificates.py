"""A server's certificate and key in files that can be replaced."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

x509 = pytest.importorskip("cryptography.x509", reason="needs cryptography")


class Pair:
    """A certificate for localhost by itself, and its key, in files that can be replaced."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key = directory / "tls.crt", directory / "tls.key"
        self.renew()

    def renew(self, serial: int = 1) -> None:
        """Another certificate, with another key; both are there at once, as the kubelet does it."""
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(serial)
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, hashes.SHA256())
        )
        form = serialization.PrivateFormat.PKCS8
        self._replace(self.certificate, made.public_bytes(serialization.Encoding.PEM))
        self._replace(self.key, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))

    def _replace(self, path: Path, data: bytes) -> None:
        beside = path.with_suffix(".new")
        beside.write_bytes(data)
        beside.rename(path)
