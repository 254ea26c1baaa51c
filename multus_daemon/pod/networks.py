"""The networks that a pod gets, in order: by its annotations, the daemon's configuration and the node's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from multus_daemon.pod.engine import Engine
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import conf, gojson, versions
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    from_code,
)
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf.model import NetConf
from multus_daemon.spec.ports import NetworkNotFoundError, StoreUnavailableError

# What a list is called with that names no version, where our own configuration names none either, or one of before
# there were lists (CNI SPEC 0.3.0; 0.3.1 mended its text).
_LIST_VERSION: Final = "0.3.1"
_BEFORE_LISTS: Final = ("", "0.1.0", "0.2.0")
LOOKUP_ADVICE: Final = "bring the API server back, or the node's way to it; the runtime tries again by itself"
_SHOWN_NAMESPACES: Final = 5
_PASSTHRU: Final = {"type": "passthru", "name": "passthru-cni"}

log = logging.getLogger(__name__)


class MissingDefinitionError(LookupError):
    """There is no such NetworkAttachmentDefinition; the message is what upstream's event begins with."""

    def __init__(self, message: str, elsewhere: str) -> None:
        """`elsewhere`: where there is one of the name, to be put behind a message; may be empty."""
        super().__init__(message)
        self.elsewhere = elsewhere


@dataclass(frozen=True, slots=True)
class Network:
    """A network that the pod gets, before it has an interface name."""

    name: str
    config: NetworkConfig
    request: NetworkSelection | None = None
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: bool = False
    resource_name: str = ""


def selections(pod: Pod, net_conf: NetConf) -> tuple[NetworkSelection | None, tuple[NetworkSelection, ...]]:
    """Return the default network that the pod chooses, if any, and the networks of its annotation. Raises CniError."""
    default = pod.annotations.get(selection.DEFAULT_NETWORK_ANNOTATION)
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    chosen = None
    if default is not None:
        chosen = selection.parse_default_network(default, default_namespace=net_conf.multus_namespace)
    return chosen, tuple(selection.parse(annotation, pod_namespace=pod.namespace))


def of_pod(
    engine: Engine,
    pod: Pod,
    net_conf: NetConf,
    chosen: NetworkSelection | None,
    elements: Sequence[NetworkSelection],
) -> tuple[Network, ...]:
    """Look up the networks of the pod, by its `selections`, in order; the cluster network first. Raises CniError."""
    networks = (
        *_of_every_pod(engine, pod.namespace, chosen, net_conf),
        *(_element(engine, pod.namespace, element, net_conf, isolated=True) for element in elements),
        *_auxiliary(engine, net_conf),
    )
    _refuse_two_gateways(networks)
    _bound_port_mappings(pod, networks, net_conf.max_port_mappings)
    return networks


def of_every_pod(engine: Engine, net_conf: NetConf) -> list[NetworkConfig]:
    """What a pod gets that chooses nothing, the cluster network first, without defaultNetworks. Raises CniError."""
    networks = _of_every_pod(engine, "", None, replace(net_conf, default_networks=()))
    return [network.config for network in networks]


def default_networks(engine: Engine, net_conf: NetConf) -> list[NetworkConfig]:
    """Those of defaultNetworks that are there."""
    found = []
    for name in net_conf.default_networks:
        try:
            found.append(_by_reference(engine, name, net_conf, "defaultNetworks").config)
        except CniError as error:
            log.warning("%s", error)
    return found


def _of_every_pod(engine: Engine, namespace: str, chosen: NetworkSelection | None, net_conf: NetConf) -> list[Network]:
    delegates = [
        Network(delegate.name, with_list_version(delegate, net_conf.cni_version)) for delegate in net_conf.delegates
    ]
    if chosen is not None:
        isolated = chosen.namespace != net_conf.multus_namespace
        cluster_network = _element(engine, namespace, chosen, net_conf, isolated=isolated)
    elif net_conf.cluster_network:
        found = _by_reference(engine, net_conf.cluster_network, net_conf, "clusterNetwork")
        cluster_network = replace(found, config=_forced(found.config, net_conf))
    elif delegates:
        cluster_network = replace(delegates[0], config=_forced(delegates[0].config, net_conf))
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
        return [cluster_network, *delegates[1:]]
    if namespace in net_conf.system_namespaces:
        return [cluster_network]
    return [
        cluster_network,
        *[_by_reference(engine, name, net_conf, "defaultNetworks") for name in net_conf.default_networks],
    ]


def _auxiliary(engine: Engine, net_conf: NetConf) -> list[Network]:
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
        plugins = engine.files.plugins_beside(reference, name)
        if not plugins:
            return []
        header = {"cniVersion": _list_version(net_conf.cni_version), "name": name, "plugins": [_PASSTHRU]}
        return [Network(name, conf.with_plugins(conf.parse(gojson.dumps(header)), plugins), auxiliary=True)]
    except CniError as error:
        raise error.with_context(f"auxiliaryCNIChainName {name!r}") from error


def _element(
    engine: Engine, namespace: str, element: NetworkSelection, net_conf: NetConf, *, isolated: bool
) -> Network:
    if isolated and not net_conf.allows(namespace, element.namespace):
        raise InvalidNetworkConfigError(
            f"network {element.namespace}/{element.name} is out of reach for namespace {namespace}",
            "namespaceIsolation is on; networks of the pod's namespace and of "
            f"{', '.join(sorted(net_conf.global_namespaces))} may be used: declare it in one of them, and name that",
        )
    refuse_too_many(str(element), element.ips, element.cni_args, net_conf)
    try:
        network = _definition(engine, element.namespace, element.name, net_conf, asker=namespace)
    except MissingDefinitionError as error:
        raise InvalidNetworkConfigError(
            f"network {element.namespace}/{element.name} does not exist",
            "create it, or correct the pod's annotation; no NetworkAttachmentDefinition of that name is known in "
            f"namespace {element.namespace}{error.elsewhere}",
        ) from error
    return replace(network, request=element, capability_args=element.capability_args())


def refuse_too_many(name: str, ips: Sequence[str], cni_args: Mapping[str, Any] | None, net_conf: NetConf) -> None:
    """Refuse a request for more addresses than one may ask for. Raises InvalidNetworkConfigError (7)."""
    # The plugin `static` takes them from either place.
    by_args = gojson.get(cni_args or {}, "ips")
    for key, addresses in (("ips", ips), ("cni-args.ips", by_args)):
        if isinstance(addresses, list | tuple) and len(addresses) > net_conf.max_requested_addresses:
            raise InvalidNetworkConfigError(
                f"{key}: {len(addresses)} addresses, and at most {net_conf.max_requested_addresses} are allowed "
                f"(network {name})",
                "ask for fewer",
            )


def _by_reference(engine: Engine, reference: str, net_conf: NetConf, key: str) -> Network:
    """A network that the configuration names: a NetworkAttachmentDefinition, a name in confDir, or a path."""
    try:
        if "/" in reference:
            config = with_list_version(engine.files.at_path(reference), net_conf.cni_version)
            return Network(config.name, config)
        try:
            return _definition(engine, net_conf.multus_namespace, reference, net_conf, asker=net_conf.multus_namespace)
        except MissingDefinitionError as error:
            missing = error
        if on_disk := engine.files.by_name(net_conf.conf_dir, reference):
            return Network(reference, with_list_version(on_disk, net_conf.cni_version))
    except CniError as error:
        raise error.with_context(f"{key} {reference!r}") from error
    raise InvalidNetworkConfigError(
        f"{key} {reference!r} does not exist",
        f"neither a NetworkAttachmentDefinition {net_conf.multus_namespace}/{reference} "
        f"nor a configuration with that name in {net_conf.conf_dir}{missing.elsewhere}",
    ) from missing


def _elsewhere(engine: Engine, name: str, net_conf: NetConf, asker: str) -> str:
    """Which namespaces have a network of that name, of those that pods of the namespace `asker` may use.

    Nothing of others: under namespaceIsolation their names are none of a tenant's business.
    """
    found = [space for space in engine.cluster.namespaces_with_network(name) if net_conf.allows(asker, space)]
    shown = ", ".join(found[:_SHOWN_NAMESPACES]) + (", ..." if len(found) > _SHOWN_NAMESPACES else "")
    return f"; there is one of that name in namespace {shown}" if found else ""


def _definition(engine: Engine, namespace: str, name: str, net_conf: NetConf, *, asker: str) -> Network:
    """The network of a NetworkAttachmentDefinition, for `asker`, a namespace.

    Raises MissingDefinitionError, CniError.
    """
    try:
        definition = engine.cluster.network(namespace, name)
    except NetworkNotFoundError as error:
        raise MissingDefinitionError(
            f"cannot find a network-attachment-definition ({name}) in namespace ({namespace})",
            _elsewhere(engine, name, net_conf, asker),
        ) from error
    except StoreUnavailableError as error:
        raise TryAgainLaterError(f"network {namespace}/{name} can't be looked up: {error}", LOOKUP_ADVICE) from error
    try:
        config = definition.network or engine.files.by_name(net_conf.conf_dir, name)
        if config is None:
            raise InvalidNetworkConfigError(
                "spec.config is empty", f"and no configuration named {name!r} is in {net_conf.conf_dir}"
            )
    except CniError as error:
        advice = f"correct spec.config of the NetworkAttachmentDefinition {namespace}/{name}"
        details = "; ".join(filter(None, (error.details, advice)))
        raise from_code(error.code, f"{error.msg} (network {definition})", details) from error
    config = with_list_version(config, net_conf.cni_version)
    return Network(str(definition), config, resource_name=definition.resource_name)


def with_list_version(config: NetworkConfig, top_level: str = "") -> NetworkConfig:
    """A list that names no version gets ours: it can't be one of 0.1.0, as a single configuration without one is.

    The attachment keeps it, so that DEL and CHECK go by the same rules as the ADD did.
    """
    if not config.is_list or config.cni_version:
        return config
    return replace(config, cni_version=_list_version(top_level))


def _list_version(top_level: str) -> str:
    return _LIST_VERSION if top_level in _BEFORE_LISTS else top_level


def _forced(config: NetworkConfig, net_conf: NetConf) -> NetworkConfig:
    """The cluster network in our own version, where that is wanted. Raises IncompatibleVersionError."""
    if not net_conf.force_cni_version:
        return config
    if not net_conf.cni_version or not versions.is_supported(net_conf.cni_version):
        raise IncompatibleVersionError(
            f"forceCNIVersion is set, and cniVersion is {net_conf.cni_version!r}",
            f"set cniVersion to one of {', '.join(versions.SUPPORTED)}",
        )
    return replace(config, cni_version=net_conf.cni_version)


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


def _bound_port_mappings(pod: Pod, networks: Sequence[Network], bound: int) -> None:
    """Each is several rules, which portmap makes one by one, in a time that grows with the square of their number."""
    mappings = [network.capability_args.get("portMappings") for network in networks]
    count = sum(len(found) for found in mappings if isinstance(found, list))
    if count > bound:
        raise InvalidNetworkConfigError(
            f"{count} portMappings of pod {pod}, and at most {bound} are allowed",
            "ask for fewer, in the annotation or as hostPort; hostNetwork takes any number of ports",
        )


def _refuse_two_gateways(networks: Sequence[Network]) -> None:
    """Of both annotations together, one element at most may name gateways (SPEC 4.1.2.1.9)."""
    named = [network.name for network in networks if network.request and network.request.default_route]
    if len(named) > 1:
        raise InvalidNetworkConfigError(
            f"default-route is set twice: for network {named[0]} and for network {named[1]}",
            f"by annotation {selection.DEFAULT_NETWORK_ANNOTATION} and annotation {selection.NETWORKS_ANNOTATION}",
        )
