"""Convert upstream's files about a container into a record, so that its pods can be deleted, and back.

Two sources, both of Multus v4: the delegate cache `<cniDir>/<containerID>`, a JSON array of its internal
`DelegateNetConf`s in the order of their ADDs, and libcni's result cache (see `cache`). The first has the networks in
their order, the second the arguments of each plugin. `to_delegates` writes a record as a delegate cache, so that
upstream's daemon can delete our pods after a roll-back. Pure, but for log lines.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from multus_daemon.plugins.cache import Entry
from multus_daemon.plugins.select import BINARY
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf, gojson, names, result, versions
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

# CNI_IFNAME of every Kubernetes runtime; upstream does not write it down.
DEFAULT_IFNAME = IfName("eth0")
ELEMENTS_MAX = 1024


def from_delegates(container_id: ContainerId, data: bytes, entries: Sequence[Entry], created: float) -> ContainerRecord:
    """Return the record of a delegate cache file; `entries`: the container's entries in the result cache.

    An unusable element is logged; entries without an element (hot-plugged networks) come last. Raises gojson.JsonError
    if the file is not an array of objects, has too many, or none of them is usable.
    """
    values = gojson.loads(data)
    elements: list[Any] = [] if values is None else values
    if not isinstance(elements, list) or not all(isinstance(element, dict) for element in elements):
        raise gojson.JsonError("the file must contain an array of objects")
    if len(elements) > ELEMENTS_MAX:
        raise gojson.JsonError(f"{len(elements)} elements, and no pod has more than {ELEMENTS_MAX} networks")
    unclaimed, problem = list(entries), ""
    attachments: list[Attachment] = []
    # The first has no interface name of its own and takes an entry that no other element claims.
    for index in [*range(1, len(elements)), *range(min(1, len(elements)))]:
        try:
            attachment, entry = _element(index, elements[index], unclaimed)
        except (CniError, gojson.JsonError) as error:
            problem = f"element {index} can't be used: {error}"
            log.warning("upstream's record of %s: %s", container_id, problem)
            continue
        if entry is not None:
            unclaimed.remove(entry)
        attachments.insert(len(attachments) if index else 0, attachment)
    if elements and not attachments:
        raise gojson.JsonError(f"none of {len(elements)} elements of the file can be used; {problem}")
    complete = all(attachment.result is not None for attachment in attachments)
    attachments += [plugged for entry in unclaimed if (plugged := _of_entry(entry, cluster_network=False))]
    return _record(container_id, attachments, entries, created, complete=complete)


def from_entries(container_id: ContainerId, entries: Sequence[Entry]) -> ContainerRecord | None:
    """Return a record made from the result cache only; None if no entry is usable.

    The network on eth0, if any, is the cluster network and comes first; the others follow in the order of their
    interfaces. With a result of the cluster network the record counts as complete: a running pod must not be undone,
    and the delegate cache, which upstream writes before the first ADD, is what is damaged.
    """
    # net10 behind net9.
    ordered = sorted(entries, key=lambda entry: (entry.ifname != DEFAULT_IFNAME, len(entry.ifname), entry.ifname))
    found = [_of_entry(entry, cluster_network=entry.ifname == DEFAULT_IFNAME) for entry in ordered]
    attachments = [attachment for attachment in found if attachment]
    if not attachments:
        return None
    complete = attachments[0].cluster_network and attachments[0].result is not None
    return _record(container_id, attachments, entries, 0.0, complete=complete)


def _record(
    container_id: ContainerId,
    attachments: list[Attachment],
    entries: Sequence[Entry],
    created: float,
    *,
    complete: bool,
) -> ContainerRecord:
    known = next((entry.cni_args for entry in entries if entry.cni_args), ())
    # If the failed ADD of a network left no entry, its DEL gets at least the pod.
    pod_args = tuple(pair for pair in known if pair[0] in names.KUBERNETES_KEYS)
    pod = dict(pod_args)
    with_args = [item if item.cni_args else replace(item, cni_args=pod_args) for item in attachments]
    cluster = next((item.ifname for item in attachments if item.cluster_network), DEFAULT_IFNAME)
    return ContainerRecord(
        sandbox=Sandbox(container_id, next((entry.netns for entry in entries if entry.netns), "")),
        ifname=cluster,
        pod_namespace=Namespace(pod.get("K8S_POD_NAMESPACE", "")),
        pod_name=PodName(pod.get("K8S_POD_NAME", "")),
        pod_uid=PodUid(pod.get("K8S_POD_UID", "")),
        attachments=tuple(with_args),
        complete=complete,
        created=created,
    )


def to_delegates(record: ContainerRecord) -> bytes:
    """Return the delegate cache file of the container for an upstream daemon; empty without a cluster network.

    Upstream's DEL uses the configuration in `Bytes`, and the runtime's interface for the first element. `ConfList` is
    only set to show whether it is a list or a single plugin.
    """
    if not any(attachment.cluster_network for attachment in record.attachments):
        return b""
    attachments = (item for item in record.attachments if not item.detached)
    ordered = sorted(attachments, key=attrgetter("cluster_network"), reverse=True)
    return gojson.dumps([_delegate(attachment) for attachment in ordered], sort_keys=False)


def _delegate(attachment: Attachment) -> dict[str, Any]:
    config = attachment.config
    # An upstream daemon that finds no version of a list writes its bytes anew, from the struct.
    header = {"cniVersion": config.cni_version or versions.IMPLIED, "name": config.name}
    types = [plugin.type for plugin in config.plugins]
    asked = attachment.capability_args
    requests = {
        "ifnameRequest": attachment.ifname,
        "macRequest": asked.get("mac"),
        "infinibandGUIDRequest": asked.get("infinibandGUID"),
        "ipRequest": asked.get("ips"),
        "deviceID": attachment.device_id,
        "resourceName": attachment.resource_name,
    }
    return {
        "Conf": {} if config.is_list else {**header, "type": config.type},
        "ConfList": {**header, "plugins": [{"type": name} for name in types]} if config.is_list else {},
        "Name": attachment.name,
        **{key: value for key, value in requests.items() if value},
        "Bytes": base64.b64encode(_raw(config)).decode("ascii"),
    }


def _raw(config: NetworkConfig) -> bytes:
    """Return the bytes of the configuration with the CNI version that its plugins are called with."""
    if conf.parse(config.raw).cni_version == config.cni_version:
        return config.raw
    fields = gojson.with_keys(gojson.loads_object(config.raw), {"cniVersion": config.cni_version})
    return gojson.dumps(fields, sort_keys=False)


def _element(index: int, fields: Mapping[str, Any], entries: Sequence[Entry]) -> tuple[Attachment, Entry | None]:
    """Return the attachment of an element, and its entry in the result cache, if any. Raises CniError, JsonError."""
    network = _network_name(fields)
    requested = gojson.get_str(fields, "ifnameRequest") or (f"net{index}" if index else "")
    entry = next((item for item in entries if item.network == network and requested in ("", item.ifname)), None)
    ifname = requested or (entry.ifname if entry else DEFAULT_IFNAME)
    if problem := names.ifname_problem(ifname):
        raise gojson.JsonError(f"ifnameRequest: {problem}")
    try:
        config = _config(fields)
    except (CniError, gojson.JsonError):
        if entry is None:
            raise
        config = conf.parse(entry.config)
    attachment = Attachment(
        name=gojson.get_str(fields, "Name") or config.name,
        config=config,
        ifname=IfName(ifname),
        cluster_network=index == 0,
        capability_args=entry.capability_args if entry else _requested_capabilities(fields),
        cni_args=entry.cni_args if entry else (),
        result=_result(entry, config) if entry else None,
        # Upstream has no built-ins.
        served_by={name: BINARY for plugin in config.plugins for name in (plugin.type, plugin.ipam_type) if name},
    )
    return attachment, entry


def _network_name(fields: Mapping[str, Any]) -> str:
    for key in ("CNINetworkConfigList", "ConfList", "Conf"):
        if name := gojson.get_str(gojson.get_object(fields, key) or {}, "name"):
            return name
    return gojson.get_str(fields, "Name") or ""


def _config(fields: Mapping[str, Any]) -> NetworkConfig:
    """Return the configuration of the ADD. Raises CniError, JsonError.

    A list from a file is in `CNINetworkConfigList`; its `Bytes` has lost every key that upstream's structs do not know
    (upstream issue 1449). All others were run from `Bytes`.
    """
    listed = gojson.get_object(fields, "CNINetworkConfigList") or {}
    whole = gojson.get_bytes(listed, "Bytes")
    entries = [item for item in gojson.get_list(listed, "Plugins") or [] if isinstance(item, dict)]
    plugins = [gojson.loads_object(_bytes(item)) for item in entries]
    if whole:
        return _complete(whole, plugins)
    if plugins:
        header = {
            "name": gojson.get_str(listed, "Name"),
            "cniVersion": gojson.get_str(listed, "CNIVersion"),
            "disableCheck": gojson.get_bool(listed, "DisableCheck"),
        }
        return conf.parse(gojson.dumps(header | {"plugins": plugins}))
    return conf.parse(_bytes(fields))


def _complete(raw: bytes, plugins: list[dict[str, Any]]) -> NetworkConfig:
    """Return the list `raw` with its plugins replaced by `plugins`: some may be from a folder beside the file."""
    header = gojson.loads_object(raw)
    if not plugins or gojson.get_list(header, "plugins") == plugins:
        return conf.parse(raw)
    return conf.parse(gojson.dumps(gojson.with_keys(header, {"plugins": plugins})))


def _bytes(fields: Mapping[str, Any]) -> bytes:
    found = gojson.get_bytes(fields, "Bytes")
    if not found:
        raise gojson.JsonError("the key Bytes is missing")
    return found


def _requested_capabilities(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capability args of the element; portMappings and bandwidth are in the result cache only."""
    wanted = {
        "ips": gojson.get_strings(fields, "ipRequest"),
        "mac": gojson.get_str(fields, "macRequest"),
        "infinibandGUID": gojson.get_str(fields, "infinibandGUIDRequest"),
        "deviceID": gojson.get_str(fields, "deviceID"),
    }
    return {key: value for key, value in wanted.items() if value}


def _of_entry(entry: Entry, *, cluster_network: bool) -> Attachment | None:
    try:
        config = conf.parse(entry.config, default_name=entry.network)
    except CniError as error:
        log.warning("cached result of %s for %s can't be used: %s", entry.network, entry.container_id, error)
        return None
    if names.ifname_problem(entry.ifname) or config.name != entry.network:
        log.warning(
            "cached result of network %s for container %s is ignored: its names differ from those in its configuration",
            entry.network,
            entry.container_id,
        )
        return None
    return Attachment(
        name=entry.network,
        config=config,
        ifname=IfName(entry.ifname),
        cluster_network=cluster_network,
        capability_args=entry.capability_args,
        cni_args=entry.cni_args,
        result=_result(entry, config),
    )


def _result(entry: Entry, config: NetworkConfig) -> Result | None:
    if entry.result is None:
        return None
    try:
        return result.from_object(entry.result, config.cni_version or versions.IMPLIED)
    except CniError as error:
        log.warning("cached result of %s for %s can't be read: %s", entry.network, entry.container_id, error)
        return None
