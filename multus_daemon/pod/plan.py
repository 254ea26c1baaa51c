"""The plan of an ADD: a value. ADD executes it, hot-plug too, `explain` shows it, tests compare it.

Pure: from what `gather` found to interface names, devices, requests and the plugins that serve them. Planning sends
nothing, counts nothing, logs nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from multus_daemon.pod import devices, networks, schedule, unsupported
from multus_daemon.pod.engine import DelegateRunner
from multus_daemon.pod.gather import Inputs
from multus_daemon.pod.networks import Network
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.pod.unsupported import Notice
from multus_daemon.spec.attachment import Attachment, Pod, Sandbox
from multus_daemon.spec.cni import args, conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.ports import DeviceFiles

REQUEST_MAX_BYTES: Final = 64 * 1024
"""What one request may ask of its networks, as JSON, `cni-args` once for each plugin: the container's record keeps it,
and a pod's author writes it."""


@dataclass(frozen=True, slots=True)
class PlannedNetwork:
    """One network of the pod, with the plugins that serve it."""

    attachment: Attachment
    """The attachment that goes on record, without a result."""
    why: str = ""
    """Who asks for it, for people."""
    refusal: CniError | None = None
    """Why its plugins cannot attach it."""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What an ADD attaches, in which order, by which plugins; or why it is refused."""

    pod: Pod
    networks: tuple[PlannedNetwork, ...] = ()
    before: tuple[frozenset[int], ...] = ()
    """For each network the numbers of those that must be attached when it begins."""
    here: frozenset[int] = frozenset()
    """The numbers of those that the request's own thread runs (`ports.DelegateRunner.runs_here`)."""
    notices: tuple[Notice, ...] = ()
    """What the pod's author should know although nothing fails."""
    refusal: CniError | None = None
    """Why nothing is attached."""
    is_invalid: bool = False
    """The refusal is about the annotations or the networks, and not about plugins."""

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Those of the networks."""
        return tuple(network.attachment for network in self.networks)


def plan_pod(request: CniRequest, inputs: Inputs, runner: DelegateRunner, device_files: DeviceFiles) -> PodPlan:
    """Return the plan of the pod's ADD. Never raises CniError: see `PodPlan.refusal`."""
    pod = inputs.pod
    notices = unsupported.unknown_keys(pod, inputs.elements)
    if inputs.refusal:
        return _refused(pod, notices, inputs.refusal)
    try:
        attachments = _attachments(request, inputs, device_files)
    except CniError as error:
        return _refused(pod, notices, error)
    refusal: CniError | None = None
    try:
        notices += unsupported.before_add(pod, attachments, strict=inputs.net_conf.strict_requests)
    except CniError as error:
        refusal = error
    planned = tuple(
        _with_plugins(runner, inputs, request.sandbox, item, _why(inputs, network, number))
        for number, (network, item) in enumerate(zip(inputs.networks, attachments, strict=True))
    )
    refusal = refusal or next((network.refusal for network in planned if network.refusal), None)
    return _in_order(PodPlan(pod, planned, notices=notices, refusal=refusal), runner)


def plan_network(
    request: DelegateRequest, config: NetworkConfig, ifname: IfName, inputs: Inputs, runner: DelegateRunner
) -> PodPlan:
    """Return the plan of a hot-plug: one network more for a pod that runs. Never raises CniError."""
    pod = inputs.pod
    notices: tuple[Notice, ...] = ()
    try:
        attachment = _hot_plugged(request, config, pod.namespace, ifname)
        notices = unsupported.before_add(pod, (attachment,), strict=inputs.net_conf.strict_requests)
    except CniError as error:
        return PodPlan(pod, notices=notices, refusal=error)
    planned = _with_plugins(runner, inputs, request.sandbox, attachment, "asked for by /delegate")
    return _in_order(PodPlan(pod, (planned,), notices=notices, refusal=planned.refusal), runner)


def _refused(pod: Pod, notices: tuple[Notice, ...], error: CniError) -> PodPlan:
    context = error.with_context(f"pod {pod}")
    context.__cause__ = error
    return PodPlan(pod, notices=notices, refusal=context, is_invalid=True)


def _in_order(plan: PodPlan, runner: DelegateRunner) -> PodPlan:
    if plan.refusal:
        return plan
    attachments = plan.attachments
    here = frozenset(number for number, item in enumerate(attachments) if runner.runs_here(item, "ADD"))
    return replace(plan, before=schedule.predecessors(attachments), here=here)


def _with_plugins(
    runner: DelegateRunner, inputs: Inputs, sandbox: Sandbox, attachment: Attachment, why: str
) -> PlannedNetwork:
    try:
        return PlannedNetwork(runner.plan(sandbox, attachment, inputs.programs), why)
    except CniError as error:
        refusal = error.with_context(f"pod {inputs.pod}")
        refusal.__cause__ = error
        return PlannedNetwork(attachment, why, refusal)


def _attachments(request: CniRequest, inputs: Inputs, device_files: DeviceFiles) -> tuple[Attachment, ...]:
    """Return what to attach, in order; the cluster network first. Raises CniError whose first words are the cause."""
    chosen = inputs.networks
    ifnames = interface_names(request.ifname, chosen)
    device_ids = devices.deal(inputs.pod, chosen, inputs.devices)
    made: list[Attachment] = []
    room = REQUEST_MAX_BYTES
    for network, ifname, device_id in zip(chosen, ifnames, device_ids, strict=True):
        element = network.request
        room = _room_after(element, network.config, room)
        # What has no capability goes under `args.cni`.
        attachment = Attachment(
            name=network.name,
            config=conf.with_plugin_fields(
                network.config, devices.fields(device_id), (element and element.cni_args) or {}
            ),
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
        made.append(devices.with_info_file(device_files, attachment, request.container_id))
    return tuple(made)


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


def _hot_plugged(request: DelegateRequest, config: NetworkConfig, namespace: str, ifname: IfName) -> Attachment:
    """Return the attachment that a hot-plug request describes; `namespace` is the pod's. Raises CniError."""
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


def _why(inputs: Inputs, network: Network, number: int) -> str:
    annotations, net_conf = inputs.pod.annotations, inputs.net_conf
    if network.auxiliary:
        return "the auxiliary chain, for every pod"
    if number == 0:
        if selection.DEFAULT_NETWORK_ANNOTATION in annotations:
            return f"the pod's annotation {selection.DEFAULT_NETWORK_ANNOTATION}"
        return "the cluster network, for every pod"
    if network.request is not None:
        return f"the pod's annotation {selection.NETWORKS_ANNOTATION}"
    return "delegates, for every pod" if net_conf.delegates else "defaultNetworks, for every pod"


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
