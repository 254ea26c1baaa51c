"""Find the networks that the daemon's configuration and a pod's annotations name.

A name is that of a NetworkAttachmentDefinition, or of a configuration in a file of the node.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import conf, gojson, versions
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidAnnotationError,
    InvalidNetworkConfigError,
    Origin,
    TryAgainLaterError,
)
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf import NetConf
from multus_daemon.spec.ports import ClusterStore, NetworkNotFoundError, StoreUnavailableError

log = logging.getLogger(__name__)

# The version of a list without one, if our own configuration has none either, or one from before there were lists (CNI
# SPEC 0.3.0; 0.3.1 corrected its text).
_LIST_VERSION: Final = "0.3.1"
_BEFORE_LISTS: Final = ("", "0.1.0", "0.2.0")
_LOOKUP_ADVICE: Final = "bring the API server back, or the node's way to it; the runtime tries again by itself"
_SHOWN_NAMESPACES: Final = 3
_PASSTHRU: Final = {"type": "passthru", "name": "passthru-cni"}


class MissingDefinitionError(LookupError):
    """There is no such NetworkAttachmentDefinition; the message is the beginning of upstream's Event."""

    def __init__(self, message: str, elsewhere: Sequence[str], is_isolated: bool) -> None:
        """`elsewhere`: namespaces with one that the pod may use; `is_isolated`: others have one it may not use."""
        super().__init__(message)
        self.elsewhere = elsewhere
        self.is_isolated = is_isolated


@dataclass(frozen=True, slots=True)
class Network:
    """A network that the pod will get, not yet with an interface name."""

    name: str
    config: NetworkConfig
    request: NetworkSelection | None = None
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: bool = False
    resource_name: str = ""


def unavailable(what: str, error: StoreUnavailableError) -> TryAgainLaterError:
    """Return the error that `what`, an object in the cluster, can't be looked up."""
    reason = str(error).partition(": ")[2] or str(error)
    remedy = error.advice or _LOOKUP_ADVICE
    return TryAgainLaterError(f"{what} can't be looked up: {reason}", remedy=remedy, origin=Origin.API)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Finds networks by the names in the daemon's configuration and in a pod's annotations."""

    cluster: ClusterStore
    files: NodeConfFiles
    net_conf: NetConf

    def of_pod(
        self, pod: Pod, chosen: NetworkSelection | None, elements: Sequence[NetworkSelection]
    ) -> tuple[Network, ...]:
        """Return the networks of the pod, in order; the cluster network first. Raises CniError.

        `chosen`: the network of the pod's default-network annotation. `elements`: those of its networks annotation.
        """
        networks = [*self._of_every_pod(pod.namespace, chosen), *self.elements(pod, elements)]
        if self.net_conf.auxiliary_chain and not self.net_conf.delegates:
            networks += self._auxiliary()
        _refuse_conflicts(pod, networks, self.net_conf.max_port_mappings)
        return tuple(networks)

    def elements(self, pod: Pod, elements: Sequence[NetworkSelection]) -> tuple[Network, ...]:
        """Return the networks of `elements` of the pod's annotation, in order. Raises CniError."""
        networks = tuple([self._element(pod.namespace, element, isolated=True) for element in elements])
        _refuse_conflicts(pod, networks, self.net_conf.max_port_mappings)
        return networks

    def of_every_pod(self) -> list[NetworkConfig]:
        """Return the networks of a pod without annotations, except `defaultNetworks`, in order. Raises CniError."""
        without_defaults = replace(self, net_conf=replace(self.net_conf, default_networks=()))
        return [network.config for network in without_defaults._of_every_pod("", None)]

    def default_networks(self) -> list[NetworkConfig]:
        """Return the configurations of `defaultNetworks`. A network that is not found is logged and left out."""
        found = []
        for name in self.net_conf.default_networks:
            try:
                found.append(self._by_reference(name, "defaultNetworks").config)
            except CniError as error:
                log.warning("%s", error)
        return found

    def _of_every_pod(self, namespace: str, chosen: NetworkSelection | None) -> list[Network]:
        net_conf = self.net_conf
        delegates = [
            Network(delegate.name, with_list_version(delegate, net_conf.cni_version)) for delegate in net_conf.delegates
        ]
        if chosen is not None:
            isolated = chosen.namespace != net_conf.multus_namespace
            first = self._element(namespace, chosen, isolated=isolated)
        elif net_conf.cluster_network:
            first = self._by_reference(net_conf.cluster_network, "clusterNetwork")
        elif delegates:
            first = delegates[0]
        else:
            raise InvalidNetworkConfigError(
                "no cluster network: neither clusterNetwork nor delegates is set",
                remedy="set clusterNetwork in the daemon's configuration",
                origin=Origin.SETTINGS,
            )
        if chosen is None and net_conf.force_cni_version:
            first = replace(first, config=_forced(first.config, net_conf))
        if net_conf.runtime_config:
            first = replace(first, capability_args=_with_runtime_config(net_conf, first.capability_args))
        if delegates:
            # The pod's choice replaces the first only; defaultNetworks go with clusterNetwork.
            return [first, *delegates[1:]]
        if namespace in net_conf.system_namespaces:
            return [first]
        return [first, *(self._by_reference(name, "defaultNetworks") for name in net_conf.default_networks)]

    def _auxiliary(self) -> list[Network]:
        """Return the auxiliary chain if its folder has a plugin, else nothing. Raises CniError.

        Upstream goes on without it if a file in the folder is broken; here the ADD fails.
        """
        name, reference = self.net_conf.auxiliary_chain, self.net_conf.cluster_network
        try:
            if "/" not in reference:
                raise InvalidNetworkConfigError(
                    f"clusterNetwork must be a path for an auxiliary chain, and it is {reference!r}",
                    remedy="the chain's files are in a folder beside the file of clusterNetwork",
                    origin=Origin.SETTINGS,
                )
            plugins = self.files.plugins_beside(reference, name)
            if not plugins:
                return []
            header = {"cniVersion": _list_version(self.net_conf.cni_version), "name": name, "plugins": [_PASSTHRU]}
            return [Network(name, conf.with_plugins(conf.parse(gojson.dumps(header)), plugins), auxiliary=True)]
        except CniError as error:
            raise error.with_context(f"auxiliaryCNIChainName {name!r}") from error

    def _element(self, namespace: str, element: NetworkSelection, *, isolated: bool) -> Network:
        if isolated and not self.net_conf.allows(namespace, element.namespace):
            raise InvalidAnnotationError(
                f"network {element.namespace}/{element.name} must not be used from namespace {namespace}",
                remedy="namespaceIsolation is on; networks of the pod's namespace and of "
                f"{', '.join(sorted(self.net_conf.global_namespaces))} may be used: declare it in one of them, and "
                "name that",
            )
        refuse_too_many(str(element), element.ips, element.cni_args, self.net_conf)
        try:
            network = self._definition(element.namespace, element.name, asker=namespace)
        except MissingDefinitionError as error:
            raise InvalidAnnotationError(
                f"network {element.namespace}/{element.name} does not exist", remedy=_in_its_place(element, error)
            ) from error
        return replace(network, request=element, capability_args=element.capability_args())

    def _by_reference(self, reference: str, key: str) -> Network:
        """Return a network that the setting `key` names: NetworkAttachmentDefinition, name in confDir, or path."""
        net_conf = self.net_conf
        try:
            if "/" in reference:
                config = with_list_version(self.files.at_path(reference), net_conf.cni_version)
                return Network(config.name, config)
            try:
                return self._definition(net_conf.multus_namespace, reference, asker=net_conf.multus_namespace)
            except MissingDefinitionError as error:
                missing = error
            if on_disk := self.files.by_name(net_conf.conf_dir, reference):
                return Network(reference, with_list_version(on_disk, net_conf.cni_version))
        except CniError as error:
            raise error.with_context(f"{key} {reference!r}") from error
        raise InvalidNetworkConfigError(
            f"{key} {reference!r} does not exist",
            f"neither a NetworkAttachmentDefinition {net_conf.multus_namespace}/{reference} "
            f"nor a configuration with that name in {net_conf.conf_dir}"
            + (f"; there is one of that name in namespace {', '.join(missing.elsewhere)}" if missing.elsewhere else ""),
            origin=Origin.SETTINGS,
        ) from missing

    def _definition(self, namespace: str, name: str, *, asker: str) -> Network:
        """Return a definition's network for pods of namespace `asker`. Raises MissingDefinitionError, CniError."""
        net_conf = self.net_conf
        try:
            definition = self.cluster.network(namespace, name)
        except NetworkNotFoundError as error:
            # Only what is in memory; the error must not name namespaces that the pod may not use.
            spaces = self.cluster.namespaces_with_network(name)
            allowed = [space for space in spaces if net_conf.allows(asker, space)]
            raise MissingDefinitionError(
                f"cannot find a network-attachment-definition ({name}) in namespace ({namespace})",
                allowed[:_SHOWN_NAMESPACES],
                len(allowed) < len(spaces),
            ) from error
        except StoreUnavailableError as error:
            raise unavailable(f"network {namespace}/{name}", error) from error
        try:
            config = definition.network or self.files.by_name(net_conf.conf_dir, name)
            if config is None:
                raise InvalidNetworkConfigError(
                    "spec.config is empty", f"and {net_conf.conf_dir} has no configuration named {name!r}"
                )
        except CniError as error:
            place = f"spec.config of NetworkAttachmentDefinition {namespace}/{name}"
            raise error.changed(f"{error.msg} (network {definition})", where=place) from error
        config = with_list_version(config, net_conf.cni_version)
        return Network(str(definition), config, resource_name=definition.resource_name)


def _in_its_place(element: NetworkSelection, missing: MissingDefinitionError) -> str:
    """Return the remedy for a missing network: if another namespace has one of this name, what to write instead."""
    if spaces := missing.elsewhere:
        choices = " or ".join(f"{space}/{element.name}" for space in spaces)
        return f"write {choices} in the pod's annotation: namespace {', '.join(spaces)} has it"
    isolated = "; another namespace has one, which cannot be used from here (namespaceIsolation)"
    return (
        "create it, or correct the pod's annotation; no NetworkAttachmentDefinition of that name is known in "
        f"namespace {element.namespace}{isolated if missing.is_isolated else ''}"
    )


def refuse_too_many(name: str, ips: Sequence[str], cni_args: Mapping[str, Any] | None, net_conf: NetConf) -> None:
    """Raise InvalidAnnotationError (7) if `ips`, or those of `cni_args`, are more than the daemon's setting allows."""
    # The plugin `static` takes them from either place.
    by_args = gojson.get(cni_args or {}, "ips")
    for key, addresses in (("ips", ips), ("cni-args.ips", by_args)):
        if isinstance(addresses, list | tuple) and len(addresses) > net_conf.max_requested_addresses:
            raise InvalidAnnotationError(
                f"{key}: {len(addresses)} addresses, and at most {net_conf.max_requested_addresses} are allowed "
                f"(network {name})",
                remedy="ask for fewer",
            )


def with_list_version(config: NetworkConfig, top_level: str = "") -> NetworkConfig:
    """Give a list without a CNI version `top_level` or a default: it can't be 0.1.0, unlike a single configuration.

    The attachment has the version on record, so that DEL and CHECK use that of the ADD.
    """
    if not config.is_list or config.cni_version:
        return config
    return replace(config, cni_version=_list_version(top_level))


def _list_version(top_level: str) -> str:
    return _LIST_VERSION if top_level in _BEFORE_LISTS else top_level


def _forced(config: NetworkConfig, net_conf: NetConf) -> NetworkConfig:
    """Return the cluster network with the `cniVersion` of the settings. Raises IncompatibleVersionError."""
    if not net_conf.cni_version or not versions.is_supported(net_conf.cni_version):
        raise IncompatibleVersionError(
            f"forceCNIVersion is set, and cniVersion is {net_conf.cni_version!r}",
            remedy=f"set cniVersion to one of {', '.join(versions.SUPPORTED)}",
            origin=Origin.SETTINGS,
        )
    return replace(config, cni_version=net_conf.cni_version)


def _with_runtime_config(net_conf: NetConf, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the runtime's capability arguments with those of the pod's default-network annotation, which win by key.

    Port mappings of both stay, as the kubelet has promised its own; for the same host port the annotation's counts.
    """
    merged = {**net_conf.runtime_config, **asked}
    theirs, own = net_conf.runtime_config.get("portMappings"), asked.get("portMappings")
    if isinstance(theirs, list) and own:
        mapped = {_host_port(item) for item in own}
        merged["portMappings"] = [*(item for item in theirs if _host_port(item) not in mapped), *own]
    return merged


def _host_port(mapping: Any) -> tuple[str, ...]:
    """Return the host's address, port and protocol that a mapping uses."""
    if not isinstance(mapping, dict):
        return ()
    protocol = str(gojson.get(mapping, "protocol") or "tcp").lower()
    return str(gojson.get(mapping, "hostIP") or ""), str(gojson.get(mapping, "hostPort")), protocol


def _refuse_conflicts(pod: Pod, networks: Sequence[Network], max_port_mappings: int) -> None:
    """Refuse two networks with gateways (SPEC 4.1.2.1.9), and too many port mappings.

    A port mapping is several rules, which the portmap binary adds one by one: its time grows with the number's square.
    """
    named = [network.name for network in networks if network.request and network.request.default_route]
    if len(named) > 1:
        raise InvalidAnnotationError(
            f"default-route is set twice: for network {named[0]} and for network {named[1]}",
            f"by annotation {selection.DEFAULT_NETWORK_ANNOTATION} and annotation {selection.NETWORKS_ANNOTATION}",
        )
    mappings = [network.capability_args.get("portMappings") for network in networks]
    count = sum(len(found) for found in mappings if isinstance(found, list))
    if count > max_port_mappings:
        raise InvalidAnnotationError(
            f"{count} portMappings of pod {pod}, and at most {max_port_mappings} are allowed",
            remedy="ask for fewer, in the annotation or as hostPort; hostNetwork takes any number of ports",
        )
