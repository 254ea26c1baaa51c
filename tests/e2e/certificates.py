"""A certificate authority for one test server, by the openssl program: certificates that live for as long as asked."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from tests.programs import missing, needed

_LONG: Final = 10 * 24 * 3600.0
_MINUTE: Final = timedelta(minutes=1)

# `openssl x509` counts in days; `openssl ca` takes the second of the end. It wants a database, which nobody reads.
_CONFIGURATION: Final = """\
[req]
distinguished_name = any
x509_extensions = authority
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[ca]
default_ca = test
[test]
dir = {directory}
database = $dir/index
serial = $dir/serial
new_certs_dir = $dir
certificate = $dir/ca.crt
private_key = $dir/ca.key
default_md = sha256
policy = any
preserve = yes
unique_subject = no
email_in_dn = no
[any]
organizationName = optional
commonName = supplied
[client]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = clientAuth
[server]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth,clientAuth
subjectAltName = {names}
"""


class OpensslError(Exception):
    """openssl failed, or is not there."""


def openssl(*arguments: str, stdin: bytes | None = None) -> bytes:
    """Standard output of one run of the program. Raises OpensslError."""
    if reason := missing("openssl"):
        raise OpensslError(reason)
    done = subprocess.run([needed("openssl"), *arguments], input=stdin, capture_output=True, timeout=30, check=False)
    if done.returncode:
        raise OpensslError(f"openssl {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _new_key(path: Path) -> None:
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(path))
    path.chmod(0o600)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs what the server and its clients show each other. All files are in one directory."""

    def __init__(self, directory: Path, server_names: tuple[str, ...]) -> None:
        """Make the authority's own key and certificate.

        `server_names` are the alternative names of `server()`, such as `IP:127.0.0.1`.
        """
        directory.mkdir(mode=0o700)
        self.directory = directory
        self.certificate = directory / "ca.crt"
        self.key = directory / "ca.key"
        self._configuration = directory / "openssl.cnf"
        # The database of `openssl ca` is for one at a time.
        self._lock = threading.Lock()
        self._configuration.write_text(_CONFIGURATION.format(directory=directory, names=",".join(server_names)))
        (directory / "index").touch()
        (directory / "serial").write_text("1000\n")
        _new_key(self.key)
        openssl(
            *("req", "-x509", "-new", "-config", str(self._configuration), "-key", str(self.key)),
            *("-out", str(self.certificate), "-subj", "/CN=test-authority", "-days", "10"),
        )

    def server(self) -> Pair:
        """Issue the serving certificate of the API server."""
        return self._issue("server", "kube-apiserver", (), _LONG, "server")

    def client(self, name: str, user: str, groups: tuple[str, ...] = (), *, seconds: float = _LONG) -> Pair:
        """A client's certificate; its organisations are the user's groups. `name` is that of the files."""
        return self._issue(name, user, groups, seconds, "client")

    def sign(self, request: bytes, *, seconds: float = _LONG, kind: str = "client") -> bytes:
        """The certificate (PEM) for a PKCS#10 request (PEM), as the signer of a CertificateSigningRequest gives it."""
        # A little back, as the signers of Kubernetes do because clocks differ; less where the life is short.
        now = datetime.now(UTC)
        begin, end = (
            moment.strftime("%Y%m%d%H%M%SZ")
            for moment in (now - min(_MINUTE, timedelta(seconds=seconds / 10)), now + timedelta(seconds=seconds))
        )
        with self._lock:
            return openssl(
                *("ca", "-batch", "-notext", "-config", str(self._configuration), "-in", "/dev/stdin"),
                *("-extensions", kind, "-startdate", begin, "-enddate", end),
                stdin=request,
            )

    def _issue(self, name: str, user: str, groups: tuple[str, ...], seconds: float, kind: str) -> Pair:
        pair = Pair(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        _new_key(pair.key)
        parts = [*(("O", group) for group in groups), ("CN", user)]
        subject = "".join(f"/{key}=" + value.replace("\\", "\\\\").replace("/", "\\/") for key, value in parts)
        request = openssl("req", "-new", "-config", str(self._configuration), "-key", str(pair.key), "-subj", subject)
        pair.certificate.write_bytes(self.sign(request, seconds=seconds, kind=kind))
        return pair
