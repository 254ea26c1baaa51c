"""The recorded behaviour of upstream v4.3.0 (tests/data/upstream-v4.3.0.json), typed.

A record is one call: what came in, what went over the socket, what the runtime got back, and what there was on the node
afterwards. Records of one session were made one after the other on the same node; a session begins with the record
of the CNI configuration that upstream generated for it.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "upstream-v4.3.0.json"

CNI_DIR = "/var/lib/cni/multus"
CONF_DIR = "/etc/cni/net.d"
NETWORKS_DIR = "/var/lib/cni/networks"
POD_UID = "11111111-2222-3333-4444-555555555555"
"""The UID of every pod, as the API server had it."""


@dataclass(frozen=True)
class Message:
    """A request or a response: its first line, its headers (none where they were not recorded), its body."""

    line: str
    headers: tuple[str, ...]
    body: str


@dataclass(frozen=True, eq=False)
class Record:
    """One record; `id` is its name, numbered where a scenario has the same call twice."""

    id: str
    fields: Mapping[str, Any]

    @property
    def scenario(self) -> str:
        """Return the name of the scenario, without version and verb."""
        parts = self.id.split("/")
        return parts[1] if len(parts) == 3 else parts[0]

    @property
    def generated(self) -> bool:
        """Return whether the record is about the CNI configuration that upstream generates."""
        return "content" in self.fields

    @property
    def by_runtime(self) -> bool:
        """Return whether the record is a call of the shim; otherwise it is a request on the socket."""
        return "stdin" in self.fields

    @property
    def env(self) -> dict[str, str]:
        """CNI variables that the runtime set."""
        return dict(self.fields["env"])

    @property
    def stdin(self) -> bytes:
        """Return the bytes that the runtime wrote to the shim."""
        text: str = self.fields["stdin"]
        return text.encode()

    @cached_property
    def request(self) -> Message | None:
        """Return the request to the daemon; None where the shim refused by itself."""
        found = self.fields["exchanges"][0] if self.fields.get("exchanges") else self.fields
        return _message(found["request"], "line") if "request" in found else None

    @cached_property
    def response(self) -> Message | None:
        """Return the daemon's answer; None where it got no request."""
        found = self.fields["exchanges"][0] if self.fields.get("exchanges") else self.fields
        return _message(found["response"], "status") if "response" in found else None

    @property
    def pod(self) -> str:
        """Name of the pod that the call is for, empty where none is told. All are in the namespace `web`."""
        env = self.fields.get("env") or {}
        if not self.by_runtime and self.request and self.request.body:
            env = json.loads(self.request.body)["env"]
        pairs = [pair.partition("=") for pair in env.get("CNI_ARGS", "").split(";")]
        return next((value for key, _, value in pairs if key == "K8S_POD_NAME"), "")

    @property
    def netns(self) -> str:
        """CNI_NETNS of the call, empty where there is none."""
        if self.by_runtime:
            return self.env.get("CNI_NETNS", "")
        if self.request and self.request.body:
            return str(json.loads(self.request.body)["env"]["CNI_NETNS"])
        return ""

    @property
    def network_status(self) -> str:
        """The pod's annotation after the call; empty where there is none."""
        return self.fields.get("networkStatus") or ""

    @property
    def files(self) -> Mapping[str, str]:
        """Everything below /var/lib/cni after the call."""
        return self.fields.get("files") or {}


def _message(found: Mapping[str, Any], first: str) -> Message:
    return Message(found[first], tuple(found.get("headers") or ()), found.get("body") or "")


@dataclass(frozen=True, eq=False)
class Session:
    """Records that were made on one node, in their order."""

    name: str
    records: tuple[Record, ...]

    @property
    def daemon_config(self) -> dict[str, Any]:
        """The daemon's configuration."""
        return dict(self.records[0].fields["daemonConfig"])

    @property
    def primary(self) -> dict[str, Any]:
        """The cluster network's configuration."""
        return dict(self.records[0].fields["primary"])

    @property
    def primary_file(self) -> str:
        """Where it was."""
        return f"{CONF_DIR}/10-cluster.conf" + ("list" if "plugins" in self.primary else "")

    @property
    def networks(self) -> dict[str, bytes]:
        """Configurations of the pods' networks, by `<namespace>/<name>`: those that upstream's delegate cache held."""
        return {
            delegate["Name"]: base64.b64decode(delegate["Bytes"])
            for record in self.records
            for path, content in record.files.items()
            if is_delegate_cache(path)
            for delegate in json.loads(content)
            if "/" in delegate["Name"]
        }


def is_delegate_cache(path: str) -> bool:
    """Return whether a file is upstream's list of a container's networks, `<cniDir>/<container>`."""
    return path.startswith(f"{CNI_DIR}/") and path.count("/") == CNI_DIR.count("/") + 1


def load() -> tuple[Session, ...]:
    """All sessions. The records of `/delegate` and of plain HTTP belong to the session in which they were made."""
    return tuple(_sessions(_records(json.loads(FILE.read_text()))))


def _records(found: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    seen: Counter[str] = Counter()
    for fields in found:
        seen[fields["name"]] += 1
        again = seen[fields["name"]]
        yield Record(fields["name"] + (f"#{again}" if again > 1 else ""), fields)


def _sessions(records: Iterable[Record]) -> Iterator[Session]:
    begun: list[Record] = []
    for record in records:
        if record.generated and begun:
            yield Session(begun[0].id.partition("/")[0], tuple(begun))
            begun = []
        begun.append(record)
    yield Session(begun[0].id.partition("/")[0], tuple(begun))


SESSIONS = load()
RECORDS = tuple(record for session in SESSIONS for record in session.records)
