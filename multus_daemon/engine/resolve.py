"""From a pod to its attachments: which networks, in which order, under which interface names, with which requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multus_daemon.cni import args, conf
from multus_daemon.cni.conf import NetworkConfig
from multus_daemon.cni.errors import CniError, InvalidNetworkConfigError, TryAgainLaterError, UnsupportedFieldError
from multus_daemon.cni.names import IfName
from multus_daemon.engine.request import CniRequest, DelegateRequest
from multus_daemon.nad import selection
from multus_daemon.nad.selection import NetworkSelection
from multus_daemon.netconf.model import NetConf
from multus_daemon.ports import (
    Attachment,
    ClusterStore,
    ConfFiles,
    NetworkNotFoundError,
    Pod,
    PodNotFoundError,
    StoreUnavailableError,
)


class MissingDefinitionError(LookupError):
    """There is no such NetworkAttachmentDefinition; the message is that of upstream's event."""


@dataclass(frozen=True, slots=True)
class _Network:
    """A network that the pod gets, before it has an interface name."""

    name: str
    config: NetworkConfig
    request: NetworkSelection | None = None
    capability_args: Mapping[str, Any] = field(default_factory=dict)


class Resolver:
    """Asks the cluster store and the node's files what a pod's networks are. Changes nothing."""

    def __init__(self, cluster: ClusterStore, files: ConfFiles) -> None:
        self._cluster = cluster
        self._files = files

    async def pod(self, request: CniRequest) -> Pod:
        """The pod that the request is for, the same incarnation. Raises TryAgainLaterError (11)."""
        named = request.args
        try:
            pod = await self._cluster.pod(named.namespace, named.name, named.uid)
        except PodNotFoundError as error:
            raise TryAgainLaterError(
                f"pod {named.namespace}/{named.name} is not known", f"{error}; its networks can't be told"
            ) from error
        except StoreUnavailableError as error:
            raise TryAgainLaterError(f"pod {named.namespace}/{named.name} can't be looked up: {error}") from error
        # The UID of a static pod in the API is that of its mirror, another than the kubelet's.
        if named.uid and pod.uid != named.uid and not pod.is_static:
            raise TryAgainLaterError(
                f"pod {pod} has UID {pod.uid}, and the request is for {named.uid}",
                "the pod has been created anew under the same name",
            )
        return pod

    async def attachments(self, request: CniRequest, pod: Pod, net_conf: NetConf) -> tuple[Attachment, ...]:
        """What to attach, in order; the cluster network first. Raises CniError whose first words are the cause."""
        try:
            networks = [*await self._networks_of_every_pod(pod, net_conf), *await self._selected(pod, net_conf)]
            return _name_interfaces(request, networks)
        except CniError as error:
            raise error.with_context(f"pod {pod}") from error

    async def _networks_of_every_pod(self, pod: Pod, net_conf: NetConf) -> list[_Network]:
        chosen = pod.annotations.get(selection.DEFAULT_NETWORK_ANNOTATION)
        if chosen is not None:
            element = selection.parse_default_network(chosen, default_namespace=net_conf.multus_namespace)
            cluster_network = await self._element(
                pod, element, net_conf, isolated=element.namespace != net_conf.multus_namespace
            )
        elif net_conf.cluster_network:
            cluster_network = await self._by_reference(net_conf.cluster_network, net_conf, "clusterNetwork")
        elif net_conf.delegates:
            first, *others = net_conf.delegates
            networks = [_Network(first.name, first), *(_Network(other.name, other) for other in others)]
            return [replace(networks[0], capability_args=net_conf.runtime_config), *networks[1:]]
        else:
            raise InvalidNetworkConfigError(
                "no cluster network: neither clusterNetwork nor delegates is set",
                "set clusterNetwork in the daemon's configuration",
            )
        cluster_network = replace(
            cluster_network, capability_args={**net_conf.runtime_config, **cluster_network.capability_args}
        )
        if pod.namespace in net_conf.system_namespaces:
            return [cluster_network]
        return [
            cluster_network,
            *[await self._by_reference(name, net_conf, "defaultNetworks") for name in net_conf.default_networks],
        ]

    async def _selected(self, pod: Pod, net_conf: NetConf) -> list[_Network]:
        annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
        elements = selection.parse(annotation, pod_namespace=pod.namespace)
        return [await self._element(pod, element, net_conf, isolated=True) for element in elements]

    async def _element(self, pod: Pod, element: NetworkSelection, net_conf: NetConf, *, isolated: bool) -> _Network:
        if isolated and not net_conf.allows(pod.namespace, element.namespace):
            raise InvalidNetworkConfigError(
                f"network {element.namespace}/{element.name} is out of reach for namespace {pod.namespace}",
                "namespaceIsolation is on; networks of the pod's namespace and of "
                f"{', '.join(sorted(net_conf.global_namespaces))} may be used",
            )
        _refuse_unsupported(element)
        try:
            network = await self._definition(element.namespace, element.name, net_conf)
        except MissingDefinitionError as error:
            raise InvalidNetworkConfigError(
                f"network {element.namespace}/{element.name} does not exist",
                "no NetworkAttachmentDefinition of that name is known",
            ) from error
        config = _with_requests(network.config, element)
        return replace(network, config=config, request=element, capability_args=element.capability_args())

    async def _by_reference(self, reference: str, net_conf: NetConf, key: str) -> _Network:
        """A network that the configuration names: a NetworkAttachmentDefinition, a name in confDir, or a path."""
        try:
            if "/" in reference:
                config = await self._files.at_path(reference)
                return _Network(config.name, config)
            try:
                return await self._definition(net_conf.multus_namespace, reference, net_conf)
            except MissingDefinitionError as error:
                missing = error
            if on_disk := await self._files.by_name(net_conf.conf_dir, reference):
                return _Network(reference, on_disk)
        except CniError as error:
            raise error.with_context(f"{key} {reference!r}") from error
        raise InvalidNetworkConfigError(
            f"{key} {reference!r} does not exist",
            f"neither a NetworkAttachmentDefinition {net_conf.multus_namespace}/{reference} "
            f"nor a configuration with that name in {net_conf.conf_dir}",
        ) from missing

    async def _definition(self, namespace: str, name: str, net_conf: NetConf) -> _Network:
        """The network of a NetworkAttachmentDefinition. Raises MissingDefinitionError, CniError."""
        try:
            definition = await self._cluster.network(namespace, name)
        except NetworkNotFoundError as error:
            raise MissingDefinitionError(
                f"cannot find a network-attachment-definition ({name}) in namespace ({namespace}): {error}"
            ) from error
        except StoreUnavailableError as error:
            raise TryAgainLaterError(f"network {namespace}/{name} can't be looked up: {error}") from error
        if definition.resource_name:
            raise UnsupportedFieldError(
                f"network {definition} needs the resource {definition.resource_name}",
                "this release does not allocate devices",
            )
        try:
            if definition.config.strip():
                # What JSON let in as half a surrogate pair is no text; the parser says so.
                config = conf.parse(definition.config.encode("utf-8", "surrogatepass"), default_name=name)
            else:
                on_disk = await self._files.by_name(net_conf.conf_dir, name)
                if on_disk is None:
                    raise InvalidNetworkConfigError(
                        "spec.config is empty", f"and no configuration named {name!r} is in {net_conf.conf_dir}"
                    )
                config = on_disk
        except CniError as error:
            raise error.with_context(f"network {definition}") from error
        return _Network(str(definition), config)


def _refuse_unsupported(element: NetworkSelection) -> None:
    if element.default_route is not None:
        raise UnsupportedFieldError(
            f"network {element.namespace}/{element.name}: default-route {list(element.default_route)}",
            "this release does not move default routes",
        )


def plugged(request: DelegateRequest, config: NetworkConfig, namespace: str, ifname: IfName) -> Attachment:
    """The attachment that a hot-plug request describes; `namespace` is the pod's. Raises CniError."""
    element = NetworkSelection(
        namespace=namespace, name=config.name, ips=request.ips, mac=request.mac, cni_args=request.cni_args
    )
    # Clients do not say it, and it is what the runtime's ADD was called with.
    pod = replace(request.args, infra_container_id=request.args.infra_container_id or request.container_id)
    return Attachment(
        name=str(element) if namespace else config.name,
        config=_with_requests(config, element),
        ifname=ifname,
        capability_args=element.capability_args(),
        cni_args=args.for_delegate(pod, _deprecated_args(element)),
        hot_plugged=True,
    )


def _with_requests(config: NetworkConfig, element: NetworkSelection) -> NetworkConfig:
    """The configuration with what has no capability: cni-args under `args.cni`, and the device id, as upstream does."""
    extra: dict[str, Any] = {}
    if element.device_id:
        extra |= {"deviceID": element.device_id, "pciBusID": element.device_id}
    return conf.with_plugin_fields(config, extra, element.cni_args or {})


def _name_interfaces(request: CniRequest, networks: Sequence[_Network]) -> tuple[Attachment, ...]:
    """`eth0` for the cluster network, `net<position>` for the others, but what a selection asks for comes first."""
    attachments: list[Attachment] = []
    taken: dict[str, str] = {}
    for position, network in enumerate(networks):
        wanted = network.request.interface if network.request else ""
        ifname = IfName(wanted or (request.ifname if position == 0 else f"net{position}"))
        if ifname in taken:
            raise InvalidNetworkConfigError(
                f"interface name {ifname!r} of network {network.name} is taken by network {taken[ifname]}",
                "each network of a pod needs a name of its own",
            )
        taken[ifname] = network.name
        attachments.append(
            Attachment(
                name=network.name,
                config=network.config,
                ifname=ifname,
                cluster_network=position == 0,
                capability_args=network.capability_args,
                cni_args=args.for_delegate(request.args, _deprecated_args(network.request)),
            )
        )
    return tuple(attachments)


def _deprecated_args(element: NetworkSelection | None) -> list[tuple[str, str]]:
    """MAC and IP in CNI_ARGS too: plugins of before capabilities read them only there (upstream does the same)."""
    if element is None:
        return []
    found = [("MAC", element.mac)] if element.mac else []
    return [*found, ("IP", ",".join(element.ips))] if element.ips else found
