"""Plays a session of records to our shim and our daemon, in the order in which it was recorded.

Each session is played twice, on a fresh node each time: by our shim, as the runtime would run it, and by the bytes that
upstream's shim sent to the daemon. What a call showed is a `View`: texts by the name of what they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tests.vectors import normalise
from tests.vectors.node import RecordedNode
from tests.vectors.records import POD_UID, Message, Record, Session

Caller: TypeAlias = Literal["shim", "wire"]
View: TypeAlias = dict[str, str]

ANNOTATIONS = {
    "two-networks": "ptp-a,infra/other-ns@extra0",
    "conflist-network": "bridge-b",
    "same-network-twice": "ptp-a,ptp-a",
    "json-ips-mac": '[{"name":"caps","interface":"data0","ips":["10.210.0.7/24"],"mac":"02:00:00:00:00:07"}]',
    "nad-without-name": "noname",
    "default-route": '[{"name":"ptp-a","default-route":["10.201.0.1"]}]',
    "missing-nad": "nope",
    "missing-namespace": "nowhere/ptp-a",
    "broken-nad": "broken",
    "nad-without-type": "untyped",
    "missing-plugin": "nobin",
    "bad-annotation-json": '[{"name":"ptp-a"',
    "bad-annotation-chars": "ptp a!",
    "annotation-empty-list": "[]",
    "annotation-empty": "",
    "duplicate-interface": "ptp-a@x0,ptp-a@x0",
    "bad-interface-name": "ptp-a@this-name-is-much-too-long",
    "exhausted": "exhausted,exhausted",
    "conflist-primary": "ptp-a",
}
"""Maps each scenario to its pod's annotation, taken from upstream's delegate cache and errors."""

FAULTY = {"web/broken": "{", "web/untyped": '{"cniVersion": "1.0.0", "name": "untyped"}'}
"""Definitions that no delegate cache holds, because upstream refused them."""


def callers(record: Record) -> tuple[Caller, ...]:
    """Return the callers that can play the record: a request has no shim, and a refusal by the shim no request."""
    shim: tuple[Caller, ...] = ("shim",) if record.by_runtime or record.generated else ()
    wire: tuple[Caller, ...] = ("wire",) if record.request else ()
    return shim + wire


def upstream(record: Record, caller: Caller) -> View:
    """Return what upstream showed to one of the record's callers."""
    fields = record.fields
    if record.generated:
        return {"content": fields["content"]}
    view: View = {}
    if caller == "shim":
        view |= {"exit": str(fields["exit"]), "stdout": fields["stdout"]}
    elif record.response:
        view |= _answer(record.response)
    if "networkStatus" in fields:
        view["network-status"] = record.network_status
    if "files" in fields:
        view |= _left_behind(record.files)
    return _normal(view)


@dataclass(frozen=True)
class Played:
    """Holds what our programs showed, by the record's id, and what the daemon logged."""

    views: Mapping[str, View]
    log: str


def played(session: Session, caller: Caller, plugins: Path) -> Played:
    """Play those of a session's records that `caller` can."""
    newest = any(b'"1.1.0"' in config for config in session.networks.values())
    with RecordedNode(plugins) as node:
        _prepare(node, session, plugins)
        # As upstream's daemon was configured, but for the recorder's relay, which was at `daemonSocketDir`.
        own = {"socketDir": "/run/multus", "builtinPlugins": "prefer" if newest else "off"}
        node.start(session.daemon_config | own)
        views = dict(_play(node, session, caller))
        return Played(views, node.log.read_text())


def _play(node: RecordedNode, session: Session, caller: Caller) -> Iterator[tuple[str, View]]:
    for record in session.records:
        view: View = {}
        if caller not in callers(record):
            continue
        if record.generated:
            path = node.path(record.fields["file"])
            yield record.id, {"content": path.read_text() if path.exists() else ""}
            continue
        if caller == "shim":
            code, view["stdout"] = node.shim(record.env, record.stdin)
            view["exit"] = str(code)
        elif record.request:
            view |= _answer(node.send(record.request))
        if "networkStatus" in record.fields:
            view["network-status"] = node.status(record.pod) if record.pod else ""
        if "files" in record.fields:
            view |= _left_behind(node.files())
        yield record.id, _normal(view)


def _answer(message: Message) -> View:
    return {"status": message.line, "headers": normalise.headers(message), "body": message.body}


def _left_behind(files: Mapping[str, str]) -> View:
    return {
        "results": normalise.results(files),
        "reservations": normalise.reservations(files),
        "remembered": normalise.remembered(files),
    }


def _normal(view: View) -> View:
    names = normalise.Names()
    order = ("stdout", "body", "network-status", "results", "reservations")
    return {
        part: names.replace(view[part])
        for part in sorted(view, key=lambda part: order.index(part) if part in order else -1)
    }


# --- the node as it was ------------------------------------------------------------------------------------------


def _prepare(node: RecordedNode, session: Session, plugins: Path) -> None:
    # Older releases of it die in CHECK where there is nothing to limit.
    node.plugin("bandwidth", f'[ "$CNI_COMMAND" != CHECK ] || exec cat >/dev/null\nexec {plugins}/bandwidth')
    node.path(session.primary_file).write_text(json.dumps(session.primary))
    calls = [record for record in session.records if not record.generated]
    absent = ("", "/var/run/netns/absent")
    node.add_netns(record.netns for record in calls if record.netns not in absent)
    for name, config in session.networks.items():
        node.declare(_definition(name, _for_plugins(config)))
    for name, text in FAULTY.items():
        node.declare(_definition(name, text))
    known: set[str] = set()
    for record in calls:
        if not record.pod or record.scenario == "pod-unknown" or record.pod in known:
            continue
        known.add(record.pod)
        node.declare(_pod(record.pod, ANNOTATIONS.get(record.scenario)))
        if record.network_status and not _wrote_status(record):
            node.set_status(record.pod, normalise.without_nil_gateway(record.network_status))


def _wrote_status(record: Record) -> bool:
    return bool(record.fields["exit"] == 0 and record.id.endswith("/ADD"))


def _definition(name: str, config: str) -> dict[str, Any]:
    namespace, _, short = name.partition("/")
    return {
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": namespace, "name": short},
        "spec": {"config": config},
    }


def _pod(name: str, networks: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"namespace": "web", "name": name, "uid": POD_UID}
    if networks is not None:
        metadata["annotations"] = {"k8s.v1.cni.cncf.io/networks": networks}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}


def _for_plugins(config: bytes) -> str:
    """The network's configuration as it was declared, in a version that the plugins of this machine know."""
    text = config.decode()
    found = json.loads(text)
    # CNI 1.1.0 came with release 1.6 of the reference plugins, distributions have older ones. ptp is built in there.
    if found.get("type") != "ptp":
        text = text.replace('"cniVersion": "1.1.0"', '"cniVersion": "1.0.0"')
    if found["name"] == "noname":
        # Upstream put the name into what it cached.
        text = json.dumps({key: value for key, value in found.items() if key != "name"}, separators=(",", ":"))
    return text
