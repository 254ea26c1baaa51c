"""Plan an ADD or a hot-plug: the networks, their interfaces, devices, requests and plugins. `explain` shows the plan.

Pure: makes a value from the inputs of `gather`. Planning sends nothing, counts nothing, logs nothing and does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from multus_daemon.cluster.devices import NodeDeviceFiles
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod import schedule, unsupported
from multus_daemon.pod.gather import DEVICE_ID, Inputs, device_fields
from multus_daemon.pod.networks import Network, with_list_version
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.pod.unsupported import Notice
from multus_daemon.spec.addresses import STATEFUL_SET
from multus_daemon.spec.attachment import INFO_FILE, Attachment, ClaimedDevice, Pod, Sandbox
from multus_daemon.spec.cni import conf, gojson, names
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import (
    ASK_INTERFACE,
    CniError,
    InvalidAnnotationError,
    InvalidNetworkConfigError,
    Origin,
    about_pod,
)
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection

REQUEST_MAX_BYTES: Final = 64 * 1024
"""Maximum size of the requests of one pod, as JSON; `cni-args` count once for each plugin. The pod's author writes
them, and the container's record keeps them."""
_SHOWN_NAMES: Final = 10


@dataclass(frozen=True, slots=True)
class PlannedNetwork:
    """One network of the pod, with the plugins that serve it."""

    attachment: Attachment
    """The attachment that goes on record, without a result."""
    why: str = ""
    """Where the network is named, such as an annotation; for people."""
    asked: frozenset[str] = frozenset()
    """The keys of `capability_args` that the pod requests; the other keys are the runtime's."""
    lacks: str = ""
    """Why the network has no device although it names a resource: text for the error of a plugin that needs one."""
    refusal: CniError | None = None
    """The error with which its plugins would certainly fail; None if they may attach it."""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The networks that an ADD attaches, their order and their plugins; or the error with which it is refused."""

    pod: Pod
    networks: tuple[PlannedNetwork, ...] = ()
    before: tuple[frozenset[int], ...] = ()
    """For each network, the numbers of the networks that must be attached before it."""
    here: frozenset[int] = frozenset()
    """The numbers of the networks that the request's own thread attaches (`ListRunner.adds_here`)."""
    notices: tuple[Notice, ...] = ()
    """Warnings for the pod's author; the ADD succeeds nevertheless."""
    refusal: CniError | None = None
    """The error that ADD raises; None if the plan can be executed."""
    is_invalid: bool = False
    """True if `refusal` is about the annotations or the networks, not about the plugins."""
    strict: bool = False
    """True if an attachment fails whose result does not show what the pod requests (`strictRequests`)."""

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The attachments of the networks."""
        return tuple(network.attachment for network in self.networks)


def plan_pod(
    request: CniRequest,
    inputs: Inputs,
    runner: ListRunner,
    files: NodeDeviceFiles,
    *,
    staying: Sequence[Attachment] = (),
    ifnames: Sequence[IfName] | None = None,
) -> PodPlan:
    """Return the plan of the pod's ADD. Never raises CniError: see `PodPlan.refusal`.

    For a running pod: `staying` are its attachments, `ifnames` the interfaces of the new networks.
    """
    notices = unsupported.unknown_keys(inputs.pod, inputs.elements)
    try:
        if inputs.refusal:
            raise inputs.refusal
        if ifnames is None:
            ifnames = interface_names(request.ifname, inputs.networks)
        networks = _networks(request, inputs, files, ifnames, staying)
    except CniError as error:
        refusal = about_pod(error, inputs.pod)
        refusal.__cause__ = error
        return PodPlan(inputs.pod, notices=notices, refusal=refusal, is_invalid=True)
    return _with_plugins(request, inputs, runner, networks, notices)


def plan_network(
    request: DelegateRequest, config: NetworkConfig, ifname: IfName, inputs: Inputs, runner: ListRunner
) -> PodPlan:
    """Return the plan of a hot-plug, one more network for a running pod. Never raises CniError."""
    namespace = inputs.pod.namespace
    element = NetworkSelection(
        namespace=namespace, name=config.name, ips=request.ips, mac=request.mac, cni_args=request.cni_args
    )
    # Clients do not say it; the runtime's ADD was called with it.
    pod = replace(request.args, infra_container_id=request.args.infra_container_id or request.container_id)
    try:
        _room_after(element, config, REQUEST_MAX_BYTES)
        attachment = Attachment(
            name=str(element) if namespace else config.name,
            config=conf.with_plugin_fields(with_list_version(config), {}, element.cni_args or {}),
            ifname=ifname,
            capability_args=element.capability_args(),
            cni_args=names.plugin_args(pod, deprecated_args(element, config)),
            hot_plugged=True,
        )
    except CniError as error:
        return PodPlan(inputs.pod, refusal=error)
    network = PlannedNetwork(attachment, "asked for by /delegate", frozenset(element.capability_args()))
    return _with_plugins(request, inputs, runner, [network], ())


def _with_plugins(
    request: CniRequest,
    inputs: Inputs,
    runner: ListRunner,
    networks: Sequence[PlannedNetwork],
    notices: tuple[Notice, ...],
) -> PodPlan:
    """Return the plan of the networks, with the plugins that serve each, and their order."""
    refusal: CniError | None = None
    try:
        asked = [(network.attachment, network.asked) for network in networks]
        notices += unsupported.before_add(inputs.pod, asked, strict=inputs.net_conf.strict_requests)
    except CniError as error:
        refusal = error
    planned: list[PlannedNetwork] = []
    sandbox = Sandbox(request.container_id, request.netns)
    for network in networks:
        try:
            served = runner.plan(sandbox, network.attachment, inputs.programs)
            planned.append(replace(network, attachment=served))
        except CniError as error:
            problem = about_pod(error, inputs.pod, network.attachment.name)
            problem.__cause__ = error
            planned.append(replace(network, refusal=problem))
            refusal = refusal or problem
    strict = inputs.net_conf.strict_requests
    plan = PodPlan(inputs.pod, tuple(planned), notices=notices, refusal=refusal, strict=strict)
    if refusal:
        return plan
    here = frozenset(number for number, item in enumerate(plan.attachments) if runner.adds_here(item))
    return replace(plan, before=schedule.predecessors(plan.attachments), here=here)


def _networks(
    request: CniRequest,
    inputs: Inputs,
    files: NodeDeviceFiles,
    ifnames: Sequence[IfName],
    staying: Sequence[Attachment],
) -> list[PlannedNetwork]:
    """Return the networks to attach, in order; the cluster network first, unless the pod has it. Raises CniError."""
    planned: list[PlannedNetwork] = []
    held = {item.device_id for item in staying if item.device_id}
    allocated = inputs.allocation.devices
    dealt = {(key, device) for key, devices in allocated.items() for device in devices if device in held}
    room = REQUEST_MAX_BYTES
    for network, ifname in zip(inputs.networks, ifnames, strict=True):
        is_cluster_network = not (planned or staying)
        element, given = network.request, {**network.capability_args}
        room = _room_after(element, network.config, room)
        device_id, claimed = _device(network, inputs, dealt)
        if device_id:
            given[DEVICE_ID] = device_id
        given.pop(INFO_FILE, None)
        # An argument without a capability goes under `args.cni`.
        attachment = Attachment(
            name=network.name,
            config=conf.with_plugin_fields(
                network.config, device_fields(device_id) if device_id else {}, (element and element.cni_args) or {}
            ),
            ifname=ifname,
            cluster_network=is_cluster_network,
            capability_args=given,
            cni_args=names.plugin_args(request.args, deprecated_args(element, network.config)),
            auxiliary=network.auxiliary,
            default_route=element.default_route if element else None,
            selection="" if element is None or is_cluster_network else element.canonical,
            resource_name=network.resource_name,
            device_id=device_id,
            claimed=claimed,
            address_claim="" if is_cluster_network else _address_claim(inputs.pod, ifname, element),
        )
        if device_id or INFO_FILE in attachment.config.capabilities:
            path = files.path(attachment, request.container_id)
            attachment = replace(attachment, capability_args={**given, INFO_FILE: path})
        asked = frozenset(element.capability_args() if element else ())
        lacks = ""
        if network.resource_name and not device_id:
            lacks = f"the pod has no device of {network.resource_name}: {_asked_for(inputs)}"
        planned.append(PlannedNetwork(attachment, _why(inputs, network, is_cluster_network), asked, lacks))
    return planned


def _address_claim(pod: Pod, ifname: IfName, element: NetworkSelection | None) -> str:
    """Return what holds the shared addresses in place of the pod: an IPAMClaim or its StatefulSet; empty if none."""
    if element and element.ipam_claim_reference:
        return f"{pod.namespace}/{element.ipam_claim_reference}"
    owner, _, ordinal = pod.name.rpartition("-")
    is_sticky = pod.annotations.get(selection.STICKY_ANNOTATION) == "true" and owner and ordinal.isdecimal()
    return f"{STATEFUL_SET}/{pod.namespace}/{owner}/{ordinal}/{ifname}" if is_sticky else ""


def interface_names(cluster_ifname: IfName, networks: Sequence[Network]) -> list[IfName]:
    """Name the interfaces: `eth0` for the cluster network, `net<position>` for the others, unless a selection has one.

    The auxiliary chain gets the cluster network's interface. (Upstream names a `net<N>` for it that no plugin makes.)
    Raises InvalidNetworkConfigError (7).
    """
    names: list[IfName] = []
    taken: dict[str, str] = {}
    for position, network in enumerate(networks):
        if network.auxiliary:
            if network.config.name == networks[0].config.name:
                raise InvalidNetworkConfigError(
                    f"auxiliary chain {network.name!r} has the name of the cluster network",
                    remedy="its folder completes the cluster network already; give the chain a folder of its own",
                    origin=Origin.SETTINGS,
                )
            names.append(names[0])
            continue
        wanted = network.request.interface if network.request else ""
        ifname = IfName(wanted or (cluster_ifname if position == 0 else f"net{position}"))
        if ifname in taken:
            raise InvalidAnnotationError(
                f"interface name {ifname!r} of network {network.name} is taken by {taken[ifname]}",
                remedy=ASK_INTERFACE,
            )
        taken[ifname] = f"network {network.name}" if position else "the cluster network"
        names.append(ifname)
    return names


def _device(network: Network, inputs: Inputs, dealt: set[tuple[str, str]]) -> tuple[str, ClaimedDevice | None]:
    """Return the id of the network's device, and the device itself if it is from a ResourceClaim.

    The n-th network of a resource gets its n-th device (NPWG multi-network SPEC 3.3). If none is left, the id that the
    pod requests is used. If the pod has no device at all, the id is empty: a resource without a device plugin only
    directs pods to nodes, such as `bridge.network.kubevirt.io/br1`. `dealt`: resource or claim, and device id, of the
    pod's other networks. Raises InvalidNetworkConfigError (7) if the pod has too few devices.
    """
    asked = network.capability_args.get(DEVICE_ID)
    asked = asked if isinstance(asked, str) else ""
    resource, allocated, claimed = network.resource_name, inputs.allocation.devices, inputs.allocation.claimed
    if not resource:
        return asked, None
    # A pod with a claim from a template knows it by the name in its own spec, or by that of the template; the object's
    # name is generated.
    keys: Sequence[str] = (resource,) if resource in allocated else inputs.pod.claims.get(resource, ())
    devices = [(key, device) for key in keys for device in allocated.get(key, ())]
    for device in devices:
        if device not in dealt:
            dealt.add(device)
            return device[1], claimed.get(device)
    if not devices or (asked and asked not in (device for _, device in devices)):
        return asked, claimed.get((resource, asked))
    raise InvalidAnnotationError(
        f"not enough devices of {resource}: the pod has {len(devices)} of them,"
        f" and network {network.name} is number {len(devices) + 1} that needs one",
        remedy=_asked_for(inputs),
    )


def _asked_for(inputs: Inputs) -> str:
    allocation = inputs.allocation
    has = f"its containers or claims must ask for them; they have devices of: {_shown(allocation.devices)}"
    return "; ".join([has, *allocation.left_out[:_SHOWN_NAMES]])


def _shown(allocated: Mapping[str, Sequence[str]]) -> str:
    names = sorted(allocated)
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "") or "nothing"


def _why(inputs: Inputs, network: Network, is_cluster_network: bool) -> str:
    annotations, net_conf = inputs.pod.annotations, inputs.net_conf
    if network.auxiliary:
        return "the auxiliary chain, for every pod"
    if is_cluster_network:
        if selection.DEFAULT_NETWORK_ANNOTATION in annotations:
            return f"the pod's annotation {selection.DEFAULT_NETWORK_ANNOTATION}"
        return "the cluster network, for every pod"
    if network.request is not None:
        return f"the pod's annotation {selection.NETWORKS_ANNOTATION}"
    return "delegates, for every pod" if net_conf.delegates else "defaultNetworks, for every pod"


def _room_after(element: NetworkSelection | None, config: NetworkConfig, room: int) -> int:
    """Return how many bytes of `room` are left after the element's requests. Raises InvalidNetworkConfigError (7)."""
    if element is None:
        return room
    if element.cni_args:
        room -= len(gojson.dumps(element.cni_args)) * len(config.plugins)
    # Port mappings have a bound of their own (`maxPortMappings`), and each of them is short.
    if asked := {key: value for key, value in element.capability_args().items() if key != "portMappings"}:
        room -= len(gojson.dumps(asked))
    if room < 0:
        raise InvalidAnnotationError(
            f"the pod's requests, up to network {element}, have more than {REQUEST_MAX_BYTES} bytes",
            "cni-args, ips and the like",
            remedy="shorten cni-args, which count once for each plugin of the network",
        )
    return room


def deprecated_args(element: NetworkSelection | None, config: NetworkConfig) -> list[tuple[str, str]]:
    """Return MAC and IP for CNI_ARGS, in addition to runtimeConfig, as upstream: older plugins read only CNI_ARGS.

    Several addresses are returned only if no plugin takes them otherwise: host-local takes any number in runtimeConfig,
    and refuses more than one in CNI_ARGS.
    """
    if element is None:
        return []
    pairs = [("MAC", element.mac)] if element.mac else []
    if not element.ips or (len(element.ips) > 1 and "ips" in config.capabilities):
        return pairs
    return [*pairs, ("IP", ",".join(element.ips))]
