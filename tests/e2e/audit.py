"""The API server's audit log as a list of requests: so a test counts what a user really asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, TypedDict

POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # What remains: ResponseStarted (only of watches and other long ones), ResponseComplete, Panic.
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


class Request(TypedDict):
    """One request; names as in the audit log. Missing parts are empty strings, a missing code is 0."""

    user: str
    verb: str
    """Kubernetes' own: get, list, watch, create, update, patch, delete."""
    resource: str
    subresource: str
    namespace: str
    name: str
    uri: str
    userAgent: str
    code: int


def parse(data: bytes) -> list[Request]:
    """The requests of a log, in the order in which they were answered; a watch counts once, from its start on."""
    requests: dict[str, Request] = {}
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # Being written.
        event: dict[str, Any] = json.loads(line)
        target = event.get("objectRef", {})
        requests[event["auditID"]] = Request(
            user=event["user"].get("username", ""),
            verb=event["verb"],
            resource=target.get("resource", ""),
            subresource=target.get("subresource", ""),
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            uri=event["requestURI"],
            userAgent=event.get("userAgent", ""),
            code=event.get("responseStatus", {}).get("code", 0),
        )
    return list(requests.values())


def read(path: Path, since: int = 0) -> bytes:
    """The log from an offset on."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(since)
        return file.read()
