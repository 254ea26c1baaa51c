"""What is attached to the pods of this node, from the records: with the daemon or without it.

{"schema": "multusctl.attachments/v1", "source": "daemon" or "store", "containers": [
  {"container": …, "pod": "default/web", "podUid": …, "netns": …, "netnsExists": true, "since": <Unix time>,
   "complete": true, "failedDeletes": 0, "problem": <why nobody will delete it as it is; empty: nothing is wrong>,
   "advice": <what to do about the problem>, "setAside": <Unix time since when nobody tries any more; 0: not so>,
   "check": <not asked: null; done: "" where all is as it should be, else the error>,
   "attachments": [
     {"network": "default/blue", "interface": "net1", "addresses": ["10.1.0.2/24"], "mac": …,
      "plugins": [{"type": "ptp", "servedBy": "built-in" or a path}], "attached": true, "hotPlugged": false,
      "clusterNetwork": false, "auxiliary": false, "device": "",
          "parent": <the bridge or the master of the host that it is on; empty: not known>,
          "hostInterfaces": [<links of the host that its plugins have made>]}]}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.pod.engine import LinkOps
from multus_daemon.spec.attachment import Attachment, ContainerRecord, SetAside
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore

SCHEMA: Final = "multusctl.attachments/v1"
_PARENT_KEYS: Final = {"bridge": "bridge", "macvlan": "master", "ipvlan": "master", "vlan": "master", "ovs": "bridge"}
_DEFAULT_PARENTS: Final = {"bridge": "cni0"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why nobody will delete a container as it is, and what to do about it; empty: nothing is wrong."""

    text: str = ""
    advice: str = ""


ORPHAN_ADVICE: Final = "nothing: the daemon deletes what is left with its next comparison (reconcileSeconds)"


def of(
    store: DelegateStore,
    links: LinkOps,
    *,
    source: str,
    pod: str = "",
    leaks: bool = False,
    problems: Mapping[str, Problem] | None = None,
    last_errors: Mapping[str, str] | None = None,
    check: Callable[[ContainerRecord], str] | None = None,
) -> dict[str, Any]:
    """All containers on record, by pod; those of `pod` (`namespace/name`) alone; with `leaks` those with a problem.

    What is set aside is a leak too. `problems`: why nobody will delete a container, as the daemon's own comparison has
    found; what the record and the namespace show is added here. `last_errors`: of the DELs of containers. `check`: runs
    CHECK, and says what is wrong. Raises OSError where the records can't be listed.
    """
    known = problems or {}
    found = []
    for item in store.aside() if leaks else ():
        if not pod or (item.record is not None and item.record.pod == pod):
            found.append(_set_aside(item, links))
    for container_id in store.containers(foreign=True):
        try:
            record = store.load(container_id)
        except (CorruptRecordError, OSError) as error:
            if not pod:
                found.append(_unreadable(container_id, str(error)))
            continue
        if record is None or (pod and record.pod != pod):
            continue
        problem = _problem(record, links, known.get(container_id, Problem()), (last_errors or {}).get(container_id, ""))
        if leaks and not problem.text:
            continue
        found.append(_container(record, problem, links, check))
    found.sort(key=lambda item: (item["pod"], item["since"]))
    return {"schema": SCHEMA, "source": source, "containers": found}


def _problem(record: ContainerRecord, links: LinkOps, known: Problem, last_error: str) -> Problem:
    """`known`: as the daemon's comparison has it; `last_error`: of its DELs."""
    if record.failing_since or record.given_up:
        times = "once" if record.deletes_failed == 1 else f"{record.deletes_failed} times"
        failed = f"its DEL failed {times}" if record.deletes_failed else "it can't be deleted"
        tried = "and was given up" if record.given_up else "and is tried again"
        text = f"{failed} {tried}{f': {last_error}' if last_error else ''}"
        cause = "remove the cause" if last_error else "remove the cause, which the daemon's log names"
        return Problem(text, f"{cause}: the daemon goes on trying; or {_by_hand(record.sandbox.container_id)}")
    if record.sandbox.netns and links.vanished({record.sandbox.netns}):
        return Problem("its network namespace is gone", ORPHAN_ADVICE)
    return known


def _by_hand(container_id: ContainerId) -> str:
    return f"free by hand what it holds, then: multusctl attachments forget {container_id}"


def _set_aside(item: SetAside, links: LinkOps) -> dict[str, Any]:
    record = item.record
    found = _unreadable(item.container_id) if record is None else _container(record, Problem(), links, None)
    return found | {"problem": f"set aside: {item.why}", "advice": _by_hand(item.container_id), "setAside": item.since}


def _unreadable(container_id: ContainerId, problem: str = "") -> dict[str, Any]:
    return {
        "container": container_id,
        "pod": "",
        "podUid": "",
        "netns": "",
        "netnsExists": False,
        "since": 0.0,
        "complete": False,
        "failedDeletes": 0,
        "problem": problem,
        "advice": _by_hand(container_id),
        "setAside": 0.0,
        "check": None,
        "attachments": [],
    }


def _container(
    record: ContainerRecord,
    problem: Problem,
    links: LinkOps,
    check: Callable[[ContainerRecord], str] | None,
) -> dict[str, Any]:
    netns = record.sandbox.netns
    return {
        "container": record.sandbox.container_id,
        "pod": record.pod if record.pod_name else "",
        "podUid": record.pod_uid,
        "netns": netns,
        "netnsExists": bool(netns) and links.is_netns(netns),
        "since": record.created,
        "complete": record.complete,
        "failedDeletes": record.deletes_failed,
        "problem": problem.text,
        "advice": problem.advice,
        "setAside": 0.0,
        "check": None if check is None else check(record),
        "attachments": [_attachment(item) for item in record.attachments],
    }


def forgotten(container_id: ContainerId, record: ContainerRecord | None) -> dict[str, Any]:
    """`{"schema": "multusctl.forget/v1", "container": …, "pod": …, "attachments": [as above]}`: what was known."""
    attachments = record.attachments if record else ()
    return {
        "schema": "multusctl.forget/v1",
        "container": container_id,
        "pod": record.pod if record and record.pod_name else "",
        "attachments": [_attachment(item) for item in attachments],
    }


def _attachment(item: Attachment) -> dict[str, Any]:
    result = item.result
    own = [link for link in (result.interfaces if result else ()) if link.sandbox and link.name == item.ifname]
    return {
        "network": item.name,
        "interface": item.ifname,
        "addresses": [ip.address for ip in (result.ips if result else ())],
        "mac": own[0].mac if own else "",
        "plugins": [{"type": name, "servedBy": item.served_by.get(name, "")} for name in _plugins(item)],
        "attached": result is not None,
        "hotPlugged": item.hot_plugged,
        "clusterNetwork": item.cluster_network,
        "auxiliary": item.auxiliary,
        "device": item.device_id,
        "parent": _parent(item),
        "hostInterfaces": [link.name for link in (result.interfaces if result else ()) if not link.sandbox],
    }


def _parent(item: Attachment) -> str:
    """By the first plugin's configuration, in the words of the reference plugins."""
    if not item.config.plugins:
        return ""
    plugin = item.config.plugins[0]
    key = _PARENT_KEYS.get(plugin.type)
    found = gojson.get(plugin.fields, key) if key else None
    return found if isinstance(found, str) and found else _DEFAULT_PARENTS.get(plugin.type, "")


def _plugins(item: Attachment) -> Iterable[str]:
    """The types, in the order of the chain; then those that built-ins call."""
    chain = [plugin.type for plugin in item.config.plugins]
    return dict.fromkeys([*chain, *item.served_by])
