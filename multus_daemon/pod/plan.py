"""From a pod to its attachments: under which interface names, with which devices and requests, by which plugins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from multus_daemon.pod import devices, networks, schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import Network
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni import args, conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError, InvalidNetworkConfigError, TryAgainLaterError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf.model import NetConf
from multus_daemon.spec.ports import PodNotFoundError, StoreUnavailableError

REQUEST_MAX_BYTES: Final = 64 * 1024
"""What one request may ask of its networks, as JSON, `cni-args` once for each plugin: the container's record keeps it,
and a pod's author writes it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one ADD attaches, in which order, and by whom. All that can be refused has been."""

    sandbox: Sandbox
    pod: str
    new: tuple[Attachment, ...]
    before: tuple[frozenset[int], ...]
    """For each of `new` the numbers of those that must be attached when it begins."""
    netns_id: str
    """Of the namespace that was looked at (`ContainerRecord.netns_id`)."""
    here: frozenset[int]
    """The numbers of those that the request's own thread runs (`ports.DelegateRunner.runs_here`)."""


def find_pod(engine: Engine, named: args.KubernetesArgs) -> Pod:
    """The pod that the request is for, the same incarnation. Raises TryAgainLaterError (11)."""
    try:
        pod = engine.cluster.pod(named.namespace, named.name, named.uid)
    except PodNotFoundError as error:
        raise TryAgainLaterError(
            f"pod {named.namespace}/{named.name} is not known", f"{error}; cannot determine the pod's networks"
        ) from error
    except StoreUnavailableError as error:
        raise TryAgainLaterError(
            f"pod {named.namespace}/{named.name} can't be looked up: {error}", networks.LOOKUP_ADVICE
        ) from error
    # The UID of a static pod in the API is that of its mirror, another than the kubelet's.
    if named.uid and pod.uid != named.uid and not pod.is_static:
        raise TryAgainLaterError(
            f"pod {pod} has UID {pod.uid}, and the request is for {named.uid}",
            "the pod has been created anew under the same name",
        )
    return pod


def attachments(engine: Engine, request: CniRequest, pod: Pod, net_conf: NetConf) -> tuple[Attachment, ...]:
    """What to attach, in order; the cluster network first. Raises CniError whose first words are the cause."""
    try:
        chosen = networks.of_pod(engine, pod, net_conf)
        ifnames = interface_names(request.ifname, chosen)
        device_ids = devices.deal(engine, pod, chosen)
        made: list[Attachment] = []
        room = REQUEST_MAX_BYTES
        for network, ifname, device_id in zip(chosen, ifnames, device_ids, strict=True):
            element = network.request
            room = _room_after(element, network.config, room)
            # In each plugin's object, as upstream has it; what has no capability goes under `args.cni`.
            fields = {devices.DEVICE_ID: device_id, "pciBusID": device_id} if device_id else {}
            attachment = Attachment(
                name=network.name,
                config=conf.with_plugin_fields(network.config, fields, (element and element.cni_args) or {}),
                ifname=ifname,
                cluster_network=not made,
                capability_args={**network.capability_args, **({devices.DEVICE_ID: device_id} if device_id else {})},
                cni_args=args.for_delegate(request.args, deprecated_args(element, network.config)),
                auxiliary=network.auxiliary,
                default_route=element.default_route if element else None,
                resource_name=network.resource_name,
                device_id=device_id,
                asked=frozenset(element.capability_args() if element else ()),
            )
            made.append(devices.with_info_file(engine, attachment, request.container_id))
        return tuple(made)
    except CniError as error:
        raise error.with_context(f"pod {pod}") from error


def interface_names(cluster_ifname: IfName, chosen: Sequence[Network]) -> list[IfName]:
    """`eth0` for the cluster network, `net<position>` for the others, but what a selection asks for comes first.

    The auxiliary chain gets the cluster network's interface; upstream gives it a `net<N>` of its own, which no plugin
    ever makes.
    """
    names: list[IfName] = []
    taken: dict[str, str] = {}
    for position, network in enumerate(chosen):
        if network.auxiliary:
            if network.config.name == chosen[0].config.name:
                raise InvalidNetworkConfigError(
                    f"auxiliary chain {network.name!r} has the name of the cluster network",
                    "its folder completes the cluster network already; give the chain a folder of its own",
                )
            names.append(names[0])
            continue
        wanted = network.request.interface if network.request else ""
        ifname = IfName(wanted or (cluster_ifname if position == 0 else f"net{position}"))
        if ifname in taken:
            raise InvalidNetworkConfigError(
                f"interface name {ifname!r} of network {network.name} is taken by network {taken[ifname]}",
                "each network of a pod needs a name of its own",
            )
        taken[ifname] = network.name
        names.append(ifname)
    return names


def plan(engine: Engine, base: ContainerRecord, new: Sequence[Attachment], netns: str) -> Plan:
    """How `new` comes to what the container has. Raises CniError for what can be known to fail; touches nothing."""
    if problem := engine.links.netns_problem(netns):
        raise InvalidNetnsError(f"{netns} {problem}", f"pod {base.pod}: CNI_NETNS must be one")
    owners = {item.ifname: item.name for item in base.attachments if not item.auxiliary}
    networks_in_all = len(base.attachments) + len(new)
    planned = []
    for attachment in new:
        if owner := owners.get(attachment.ifname):
            raise InvalidNetworkConfigError(
                f"interface {attachment.ifname!r} belongs to network {owner}",
                f"network {attachment.name} of pod {base.pod} needs that name",
            )
        try:
            planned.append(engine.runner.plan(base.sandbox, replace(attachment, networks=networks_in_all)))
        except CniError as error:
            raise error.with_context(f"pod {base.pod}") from error
    try:
        taken = engine.links.existing_links(netns, [item.ifname for item in new if not item.auxiliary])
        netns_id = engine.links.netns_id(netns)
    except OSError as error:
        raise InvalidNetnsError(f"{netns} can't be entered: {error}", f"pod {base.pod}") from error
    if taken:
        wanting = next(item for item in new if item.ifname == taken[0])
        raise InvalidNetworkConfigError(
            f"interface {taken[0]!r} already exists in {netns}",
            f"network {wanting.name} of pod {base.pod} needs that name",
        )
    return Plan(
        Sandbox(base.sandbox.container_id, netns),
        base.pod,
        tuple(planned),
        schedule.predecessors(planned),
        netns_id,
        frozenset(number for number, attachment in enumerate(planned) if engine.runner.runs_here(attachment, "ADD")),
    )


def hot_plugged(request: DelegateRequest, config: NetworkConfig, namespace: str, ifname: IfName) -> Attachment:
    """The attachment that a hot-plug request describes; `namespace` is the pod's. Raises CniError."""
    element = NetworkSelection(
        namespace=namespace, name=config.name, ips=request.ips, mac=request.mac, cni_args=request.cni_args
    )
    _room_after(element, config, REQUEST_MAX_BYTES)
    # Clients do not say it, and it is what the runtime's ADD was called with.
    pod = replace(request.args, infra_container_id=request.args.infra_container_id or request.container_id)
    return Attachment(
        name=str(element) if namespace else config.name,
        config=conf.with_plugin_fields(networks.with_list_version(config), {}, element.cni_args or {}),
        ifname=ifname,
        capability_args=element.capability_args(),
        asked=frozenset(element.capability_args()),
        cni_args=args.for_delegate(pod, deprecated_args(element, config)),
        hot_plugged=True,
    )


def _room_after(element: NetworkSelection | None, config: NetworkConfig, room: int) -> int:
    """How much of `room`, in bytes, is left for what else is asked. Raises InvalidNetworkConfigError."""
    if element is None:
        return room
    if element.cni_args:
        room -= len(gojson.dumps(element.cni_args)) * len(config.plugins)
    # Port mappings have a bound of their own (`maxPortMappings`), and nothing in one can be long.
    if asked := {key: value for key, value in element.capability_args().items() if key != "portMappings"}:
        room -= len(gojson.dumps(asked))
    if room < 0:
        raise InvalidNetworkConfigError(
            f"too much is asked of network {element}, or of those before it: more than {REQUEST_MAX_BYTES} bytes of "
            "cni-args, ips and the like",
            "cni-args count once for each plugin of the network; ask for less",
        )
    return room


def deprecated_args(element: NetworkSelection | None, config: NetworkConfig) -> list[tuple[str, str]]:
    """MAC and IP in CNI_ARGS too: plugins of before capabilities read them only there (upstream does the same).

    Several addresses stand there only for a network that has no other way to get them: host-local, which takes one in
    CNI_ARGS and any number in runtimeConfig, refuses to work at all with a list there.
    """
    if element is None:
        return []
    found = [("MAC", element.mac)] if element.mac else []
    if not element.ips or (len(element.ips) > 1 and "ips" in config.capabilities):
        return found
    return [*found, ("IP", ",".join(element.ips))]
