"""From a pod to its attachments: which networks, in which order, under which interface names, with which requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from multus_daemon.cni import args, conf, gojson, versions
from multus_daemon.cni.conf import NetworkConfig
from multus_daemon.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
)
from multus_daemon.cni.names import IfName, Namespace, PodName, PodUid
from multus_daemon.engine.devices import Devices
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

# What a list is called with that names no version, where our own configuration names none either, or one of before
# there were lists (CNI SPEC 0.3.0; 0.3.1 mended its text).
_LIST_VERSION: Final = "0.3.1"
_BEFORE_LISTS: Final = ("", "0.1.0", "0.2.0")
_PASSTHRU: Final = {"type": "passthru", "name": "passthru-cni"}

log = logging.getLogger(__name__)


class MissingDefinitionError(LookupError):
    """There is no such NetworkAttachmentDefinition; the message is that of upstream's event."""


@dataclass(frozen=True, slots=True)
class _Network:
    """A network that the pod gets, before it has an interface name."""

    name: str
    config: NetworkConfig
    request: NetworkSelection | None = None
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: bool = False
    resource_name: str = ""


class Resolver:
    """Asks the cluster store, the node's files and the kubelet what a pod's networks are. Changes nothing."""

    def __init__(self, cluster: ClusterStore, files: ConfFiles, devices: Devices) -> None:
        self._cluster = cluster
        self._files = files
        self._devices = devices

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
            networks = [
                *await self._networks_of_every_pod(pod, net_conf),
                *await self._selected(pod, net_conf),
                *await self._auxiliary(net_conf),
            ]
            _refuse_two_gateways(networks)
            return await self._devices.allot(pod, request.container_id, _name_interfaces(request, networks))
        except CniError as error:
            raise error.with_context(f"pod {pod}") from error

    async def networks_of_every_pod(self, net_conf: NetConf) -> list[NetworkConfig]:
        """What a pod gets that chooses nothing, the cluster network first, without defaultNetworks. Raises CniError."""
        anyone = Pod(Namespace(""), PodName(""), PodUid(""))
        networks = await self._networks_of_every_pod(anyone, replace(net_conf, default_networks=()))
        return [network.config for network in networks]

    async def default_networks(self, net_conf: NetConf) -> list[NetworkConfig]:
        """Those of defaultNetworks that are there."""
        found = []
        for name in net_conf.default_networks:
            try:
                found.append((await self._by_reference(name, net_conf, "defaultNetworks")).config)
            except CniError as error:
                log.warning("%s", error)
        return found

    async def _networks_of_every_pod(self, pod: Pod, net_conf: NetConf) -> list[_Network]:
        chosen = pod.annotations.get(selection.DEFAULT_NETWORK_ANNOTATION)
        delegates = [_with_list_version(delegate, net_conf.cni_version) for delegate in net_conf.delegates]
        if chosen is not None:
            element = selection.parse_default_network(chosen, default_namespace=net_conf.multus_namespace)
            cluster_network = await self._element(
                pod, element, net_conf, isolated=element.namespace != net_conf.multus_namespace
            )
        elif net_conf.cluster_network:
            found = await self._by_reference(net_conf.cluster_network, net_conf, "clusterNetwork")
            cluster_network = replace(found, config=_forced(found.config, net_conf))
        elif delegates:
            cluster_network = _Network(delegates[0].name, _forced(delegates[0], net_conf))
        else:
            raise InvalidNetworkConfigError(
                "no cluster network: neither clusterNetwork nor delegates is set",
                "set clusterNetwork in the daemon's configuration",
            )
        cluster_network = replace(
            cluster_network, capability_args=_with_runtime_config(net_conf, cluster_network.capability_args)
        )
        if delegates:
            # What the pod has chosen takes the place of the first only; defaultNetworks go with clusterNetwork.
            return [cluster_network, *(_Network(other.name, other) for other in delegates[1:])]
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

    async def _auxiliary(self, net_conf: NetConf) -> list[_Network]:
        """The auxiliary chain, where one is set and its folder holds a plugin. Raises CniError.

        Upstream goes on without it where a file in the folder is broken; here a pod gets all that there is for it.
        """
        name, reference = net_conf.auxiliary_chain, net_conf.cluster_network
        if not name or net_conf.delegates:
            return []
        try:
            if "/" not in reference:
                raise InvalidNetworkConfigError(
                    f"clusterNetwork must be a path for an auxiliary chain, and it is {reference!r}",
                    "the chain's files are looked for beside the file of clusterNetwork",
                )
            plugins = await self._files.plugins_beside(reference, name)
            if not plugins:
                return []
            header = {"cniVersion": _list_version(net_conf.cni_version), "name": name, "plugins": [_PASSTHRU]}
            return [_Network(name, conf.with_plugins(conf.parse(gojson.dumps(header)), plugins), auxiliary=True)]
        except CniError as error:
            raise error.with_context(f"auxiliaryCNIChainName {name!r}") from error

    async def _element(self, pod: Pod, element: NetworkSelection, net_conf: NetConf, *, isolated: bool) -> _Network:
        if isolated and not net_conf.allows(pod.namespace, element.namespace):
            raise InvalidNetworkConfigError(
                f"network {element.namespace}/{element.name} is out of reach for namespace {pod.namespace}",
                "namespaceIsolation is on; networks of the pod's namespace and of "
                f"{', '.join(sorted(net_conf.global_namespaces))} may be used",
            )
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
                config = _with_list_version(await self._files.at_path(reference), net_conf.cni_version)
                return _Network(config.name, config)
            try:
                return await self._definition(net_conf.multus_namespace, reference, net_conf)
            except MissingDefinitionError as error:
                missing = error
            if on_disk := await self._files.by_name(net_conf.conf_dir, reference):
                return _Network(reference, _with_list_version(on_disk, net_conf.cni_version))
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
        return _Network(
            str(definition),
            _with_list_version(config, net_conf.cni_version),
            resource_name=definition.resource_name,
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
        config=_with_requests(_with_list_version(config), element),
        ifname=ifname,
        capability_args=element.capability_args(),
        asked=frozenset(element.capability_args()),
        cni_args=args.for_delegate(pod, _deprecated_args(element, config)),
        hot_plugged=True,
    )


def _with_requests(config: NetworkConfig, element: NetworkSelection) -> NetworkConfig:
    """The configuration with what has no capability: cni-args under `args.cni`, as upstream does."""
    return conf.with_plugin_fields(config, {}, element.cni_args or {})


def _list_version(top_level: str) -> str:
    return _LIST_VERSION if top_level in _BEFORE_LISTS else top_level


def _with_list_version(config: NetworkConfig, top_level: str = "") -> NetworkConfig:
    """A list that names no version gets ours: it can't be one of 0.1.0, as a single configuration without one is.

    The attachment keeps it, so that DEL and CHECK go by the same rules as the ADD did.
    """
    if not config.is_list or config.cni_version:
        return config
    return conf.with_version(config, _list_version(top_level))


def _forced(config: NetworkConfig, net_conf: NetConf) -> NetworkConfig:
    """The cluster network in our own version, where that is wanted. Raises IncompatibleVersionError."""
    if not net_conf.force_cni_version:
        return config
    if not net_conf.cni_version or not versions.is_supported(net_conf.cni_version):
        raise IncompatibleVersionError(
            f"forceCNIVersion is set, and cniVersion is {net_conf.cni_version!r}",
            f"set cniVersion to one of {', '.join(versions.SUPPORTED)}",
        )
    return conf.with_version(config, net_conf.cni_version)


def _with_runtime_config(net_conf: NetConf, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime's capability arguments and those of the pod's default-network element, which wins key by key.

    Of port mappings both stay, since the kubelet has promised its own to the pod too; where both map the same port of
    the host, the element's counts.
    """
    merged = {**net_conf.runtime_config, **asked}
    theirs, own = net_conf.runtime_config.get("portMappings"), asked.get("portMappings")
    if isinstance(theirs, list) and own:
        mapped = {_host_port(item) for item in own}
        merged["portMappings"] = [*(item for item in theirs if _host_port(item) not in mapped), *own]
    return merged


def _host_port(mapping: Any) -> tuple[str, ...]:
    """The port of the host that a mapping is about."""
    if not isinstance(mapping, dict):
        return ()
    protocol = str(gojson.get(mapping, "protocol") or "tcp").lower()
    return str(gojson.get(mapping, "hostIP") or ""), str(gojson.get(mapping, "hostPort")), protocol


def _refuse_two_gateways(networks: Sequence[_Network]) -> None:
    """Of both annotations together, one element at most may name gateways (SPEC 4.1.2.1.9)."""
    named = [network.name for network in networks if network.request and network.request.default_route]
    if len(named) > 1:
        raise InvalidNetworkConfigError(
            f"default-route is set twice: for network {named[0]} and for network {named[1]}",
            f"by annotation {selection.DEFAULT_NETWORK_ANNOTATION} and annotation {selection.NETWORKS_ANNOTATION}",
        )


def _name_interfaces(request: CniRequest, networks: Sequence[_Network]) -> tuple[Attachment, ...]:
    """`eth0` for the cluster network, `net<position>` for the others, but what a selection asks for comes first.

    The auxiliary chain gets the cluster network's interface; upstream gives it a `net<N>` of its own, which no plugin
    ever makes.
    """
    attachments: list[Attachment] = []
    taken: dict[str, str] = {}
    for position, network in enumerate(networks):
        if network.auxiliary:
            attachments.append(_auxiliary_attachment(request, network, attachments[0]))
            continue
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
                resource_name=network.resource_name,
                asked=frozenset(network.request.capability_args()) if network.request else frozenset(),
                cni_args=args.for_delegate(request.args, _deprecated_args(network.request, network.config)),
                default_route=network.request.default_route if network.request else None,
            )
        )
    return tuple(attachments)


def _auxiliary_attachment(request: CniRequest, network: _Network, cluster_network: Attachment) -> Attachment:
    if network.config.name == cluster_network.config.name:
        raise InvalidNetworkConfigError(
            f"auxiliary chain {network.name!r} has the name of the cluster network",
            "its folder completes the cluster network already; give the chain a folder of its own",
        )
    return Attachment(
        name=network.name,
        config=network.config,
        ifname=cluster_network.ifname,
        cni_args=args.for_delegate(request.args),
        auxiliary=True,
    )


def _deprecated_args(element: NetworkSelection | None, config: NetworkConfig) -> list[tuple[str, str]]:
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
