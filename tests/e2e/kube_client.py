"""A small client of the Kubernetes API for tests: JSON over the standard library's HTTPS, one connection a thread.

Not the daemon's client on purpose: a fault there must not hide itself from the tests.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from tests.e2e.certificates import Pair

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"

MANAGER: Final = "tests"
"""Field manager of what tests write."""


class ApiError(Exception):
    """The server answered with an error; `code` is the HTTP status, `status` the body."""

    def __init__(self, request: str, code: int, status: Any) -> None:
        self.code = code
        self.status = status
        message = status.get("message", status) if isinstance(status, dict) else status
        super().__init__(f"{request}: {code} {message}")


@dataclass(frozen=True)
class Resource:
    """How a kind is reached."""

    prefix: str
    """Such as `/api/v1` or `/apis/apps/v1`."""
    plural: str
    namespaced: bool

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Path of a collection, an object, or a part of one."""
        middle = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(part for part in (f"{self.prefix}{middle}/{self.plural}", name, subresource) if part)


class Client:
    """Requests of one user: a client certificate, a bearer token, or nothing."""

    def __init__(
        self, url: str, ca_file: Path, *, pair: Pair | None = None, token: str | None = None, timeout: float = 30
    ) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 443)
        self._timeout = timeout
        self._token = token
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        if pair is not None:
            self._tls.load_cert_chain(pair.certificate, pair.key)
        self._local = threading.local()
        self._connections: set[http.client.HTTPSConnection] = set()
        self._resources: dict[tuple[str, str], Resource] = {}

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._local = threading.local()

    def request(self, method: str, path: str, body: Any = None, *, content_type: str = JSON, **query: Any) -> Any:
        """The answer's JSON (or text, where it is none).

        Raises ApiError for an answer of 400 and above, OSError or http.client.HTTPException where there is none.
        """
        if query:
            path += ("&" if "?" in path else "?") + urlencode(query)
        headers = {"Accept": JSON, "User-Agent": "multus-daemon-tests"}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers["Content-Type"] = content_type
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        answer, content = self._exchange(method, path, data, headers)
        kind = answer.headers.get_content_type()
        value: Any = json.loads(content) if kind == JSON and content else content.decode(errors="replace")
        if answer.status >= 400:
            raise ApiError(f"{method} {path}", answer.status, value)
        return value

    def _exchange(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        kept: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if kept is not None:
            try:
                return self._send(kept, method, path, data, headers)
            except (ConnectionError, ssl.SSLEOFError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
                pass  # The server has been restarted since.
        connection = http.client.HTTPSConnection(*self._address, timeout=self._timeout, context=self._tls)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(connection)
        self._local.connection = connection
        return self._send(connection, method, path, data, headers)

    def _send(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read()
        except BaseException:
            connection.close()
            self._connections.discard(connection)
            self._local.connection = None
            raise

    def get(self, path: str, **query: Any) -> Any:
        """GET."""
        return self.request("GET", path, **query)

    def merge(self, path: str, patch: Any) -> Any:
        """PATCH with a JSON merge patch."""
        return self.request("PATCH", path, patch, content_type=MERGE_PATCH)

    def resource(self, api_version: str, kind: str) -> Resource:
        """Where objects of a kind are, as the server tells. Raises LookupError where it serves no such kind."""
        key = (api_version, kind)
        if key not in self._resources:
            prefix = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
            for item in self.get(prefix)["resources"]:
                if item["kind"] == kind and "/" not in item["name"]:
                    self._resources[key] = Resource(prefix, item["name"], item["namespaced"])
                    break
            else:
                raise LookupError(f"the server has no {kind} in {api_version}")
        return self._resources[key]

    def path(self, manifest: dict[str, Any], subresource: str = "") -> str:
        """The object's path; a namespaced one without a namespace is in `default`."""
        metadata = manifest["metadata"]
        resource = self.resource(manifest["apiVersion"], manifest["kind"])
        return resource.path(metadata.get("namespace", "default"), metadata["name"], subresource)

    def apply(self, manifest: dict[str, Any], subresource: str = "") -> dict[str, Any]:
        """Create the object, or make it what the manifest says: server-side apply, conflicts forced."""
        path = self.path(manifest, subresource)
        made: dict[str, Any] = self.request(
            "PATCH", path, manifest, content_type=APPLY_PATCH, fieldManager=MANAGER, force="true"
        )
        return made
