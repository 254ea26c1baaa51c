"""Service account tokens that live for seconds: the same key and claims as the API server's own, another end.

The TokenRequest API gives no token for less than ten minutes (`MinTokenAgeSec` in pkg/apis/authentication/validation),
and no flag lowers that. Who holds the server's signing key can write any end into a token.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any, Final

from tests.e2e.certificates import openssl

SHORTEST_REQUEST: Final = 600
"""Seconds; the API server refuses a TokenRequest for less."""

LEEWAY: Final = 60
"""Seconds for which the API server goes on taking a token after its `exp` (`DefaultLeeway` of go-jose's jwt)."""

SUCCESS_CACHE: Final = 10
"""Seconds for which the API server remembers that a token was good (`TokenSuccessCacheTTL`)."""


def new_signing_key(private: Path, public: Path) -> None:
    """Make the pair for `--service-account-signing-key-file` and `--service-account-key-file`."""
    openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(private))
    private.chmod(0o600)
    openssl("pkey", "-in", str(private), "-pubout", "-out", str(public))


def mint(private: Path, issuer: str, account: dict[str, Any], *, seconds: float) -> str:
    """Sign a token for the ServiceAccount object that the server refuses after `seconds`.

    NB: its `exp` is LEEWAY earlier than that, and so may lie in the past; a client that reads `exp` must not get it.
    Where the token is in use, the refusal comes up to SUCCESS_CACHE later.
    """
    now = int(time.time())
    metadata = account["metadata"]
    claims = {
        "iss": issuer,
        "aud": [issuer],
        "sub": f"system:serviceaccount:{metadata['namespace']}:{metadata['name']}",
        # Numbers with a fraction are allowed by RFC 7519, and read by the server.
        "exp": time.time() + seconds - LEEWAY,
        "iat": now - LEEWAY,
        "nbf": now - LEEWAY,
        "kubernetes.io": {
            "namespace": metadata["namespace"],
            "serviceaccount": {"name": metadata["name"], "uid": metadata["uid"]},
        },
    }
    signed = f"{_part(json.dumps({'alg': 'RS256', 'typ': 'JWT'}).encode())}.{_part(json.dumps(claims).encode())}"
    return f"{signed}.{_part(openssl('dgst', '-sha256', '-sign', str(private), stdin=signed.encode()))}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
