"""List the attachments of this node's pods from the records; `multusctl` uses it also without a daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.pod.records import by_hand
from multus_daemon.pod.store import FileStore
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import parted
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.ports import CorruptRecordError

_PARENT_KEYS: Final = {"bridge": "bridge", "macvlan": "master", "ipvlan": "master", "vlan": "master", "ovs": "bridge"}
_DEFAULT_PARENTS: Final = {"bridge": "cni0"}


ORPHAN_ADVICE: Final = "nothing: the daemon deletes what is left with its next comparison (reconcileSeconds)"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a container should be, but is not deleted, and what to do; empty if nothing is wrong."""

    text: str = ""
    advice: str = ""


def of(
    store: FileStore,
    namespaces: NodeNamespaces,
    *,
    source: str,
    pod: str = "",
    leaks: bool = False,
    problems: Mapping[str, Problem] | None = None,
    last_errors: Mapping[str, str] | None = None,
    check: Callable[[ContainerRecord], str] | None = None,
) -> dict[str, Any]:
    """Return all containers on record, or those of `pod` (`namespace/name`), sorted by pod.

    `leaks`: only those with a problem, and those set aside. `problems`: of orphans that the daemon found; others follow
    from record and namespace. `last_errors`: the containers' last failed DELs. `check` runs CHECK and returns its
    error, empty if it succeeds. Raises OSError if the records can't be listed.
    """
    known, errors = problems or {}, last_errors or {}
    found = []
    for item in store.aside() if leaks else ():
        if not pod or (item.record is not None and item.record.pod == pod):
            problem = Problem(f"set aside: {item.why}", by_hand(item.container_id, item.record))
            rest = item.record or _empty(item.container_id)
            found.append(_container(rest, problem, namespaces) | {"setAside": item.since})
    for container_id in store.containers(foreign=True):
        try:
            record = store.load(container_id)
        except (CorruptRecordError, OSError) as error:
            if not pod:
                problem = Problem(str(error), by_hand(container_id))
                found.append(_container(_empty(container_id), problem, namespaces))
            continue
        if record is None or (pod and record.pod != pod):
            continue
        problem = _problem(record, namespaces, known.get(container_id, Problem()), errors.get(container_id, ""))
        if problem.text or not leaks:
            found.append(_container(record, problem, namespaces) | {"check": check(record) if check else None})
    found.sort(key=lambda item: (item["pod"], item["since"]))
    return {"schema": "multusctl.attachments/v1", "source": source, "containers": found}


def _problem(record: ContainerRecord, namespaces: NodeNamespaces, known: Problem, last_error: str) -> Problem:
    if record.failing_since or record.given_up:
        times = "once" if record.deletes_failed == 1 else f"{record.deletes_failed} times"
        left = [
            f"network {item.name} ({item.config.plugins[0].type})" for item in record.attachments if item.config.plugins
        ]
        failed = f"its DEL failed {times}" if record.deletes_failed else "it can't be deleted"
        tried = "and was given up" if record.given_up else "and is tried again"
        cause, remedy = parted(last_error)
        remedy = remedy or ("remove the cause" if cause else "remove the cause, which the daemon's log names")
        return Problem(
            f"{failed} {tried}: {cause or ', '.join(left)}",
            f"{remedy}; the daemon goes on trying; or {by_hand(record.sandbox.container_id, record)}",
        )
    if record.sandbox.netns and namespaces.vanished({record.sandbox.netns}):
        return Problem("its network namespace is gone", ORPHAN_ADVICE)
    return known


def _empty(container_id: ContainerId) -> ContainerRecord:
    """Return a record without attachments, in place of one that can't be read."""
    return ContainerRecord(Sandbox(container_id, ""), IfName(""), Namespace(""), PodName(""), PodUid(""), ())


def _container(record: ContainerRecord, problem: Problem, namespaces: NodeNamespaces) -> dict[str, Any]:
    netns = record.sandbox.netns
    return {
        "container": record.sandbox.container_id,
        "pod": record.pod if record.pod_name else "",
        "podUid": record.pod_uid,
        "netns": netns,
        "netnsExists": bool(netns) and namespaces.is_netns(netns),
        "since": record.created,
        "complete": record.complete,
        "failedDeletes": record.deletes_failed,
        "problem": problem.text,
        "advice": problem.advice,
        "setAside": 0.0,
        "check": None,
        "attachments": [_attachment(item) for item in record.attachments],
    }


def forgotten(container_id: ContainerId, record: ContainerRecord | None) -> dict[str, Any]:
    """Return the answer of `multusctl forget` (schema `multusctl.forget/v1`)."""
    return {
        "schema": "multusctl.forget/v1",
        "container": container_id,
        "pod": record.pod if record and record.pod_name else "",
        "attachments": [_attachment(item) for item in (record.attachments if record else ())],
    }


def _attachment(item: Attachment) -> dict[str, Any]:
    interfaces = item.result.interfaces if item.result else ()
    chain = [plugin.type for plugin in item.config.plugins]
    return {
        "network": item.name,
        "interface": item.ifname,
        "addresses": [ip.address for ip in (item.result.ips if item.result else ())],
        "mac": next((link.mac for link in interfaces if link.sandbox and link.name == item.ifname), ""),
        # The plugins of the chain, then those that built-ins call.
        "plugins": [
            {"type": name, "servedBy": item.served_by.get(name, "")}
            for name in dict.fromkeys([*chain, *item.served_by])
        ],
        "attached": item.is_attached,
        "hotPlugged": item.hot_plugged,
        "clusterNetwork": item.cluster_network,
        "auxiliary": item.auxiliary,
        "device": item.device_id,
        "parent": _parent(item),
        "hostInterfaces": [link.name for link in interfaces if not link.sandbox],
    }


def _parent(item: Attachment) -> str:
    """Return the bridge or master in the first plugin's configuration; empty if it names none."""
    if not item.config.plugins:
        return ""
    plugin = item.config.plugins[0]
    key = _PARENT_KEYS.get(plugin.type)
    found = gojson.get(plugin.fields, key) if key else None
    return found if isinstance(found, str) and found else _DEFAULT_PARENTS.get(plugin.type, "")
