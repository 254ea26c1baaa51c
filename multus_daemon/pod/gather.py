"""Collect the inputs of a plan: the only step that waits for the API server, the kubelet and the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from multus_daemon.plugins.find import Program
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import Lookup, Network, unavailable
from multus_daemon.spec.attachment import Allocation, Pod
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, Origin, TryAgainLaterError
from multus_daemon.spec.cni.names import KubernetesArgs
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf import NetConf
from multus_daemon.spec.ports import ClusterStore, DevicesUnavailableError, PodNotFoundError, StoreUnavailableError

DEVICE_ID: Final = "deviceID"
"""The capability of a device (NPWG multi-network SPEC 4.1.2.1.11)."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of `plan.plan_pod`. With a `refusal`, later inputs are not collected."""

    pod: Pod
    net_conf: NetConf
    elements: tuple[NetworkSelection, ...] = ()
    """The elements of the pod's annotations."""
    networks: tuple[Network, ...] = ()
    """The networks of the pod in order, the cluster network first."""
    allocation: Allocation = field(default_factory=Allocation)
    """The pod's devices; empty if no network needs one."""
    programs: Mapping[str, Program] = field(default_factory=dict)
    """The files of the plugins that the networks name, by plugin type."""
    refusal: CniError | None = None


def find_pod(cluster: ClusterStore, named: KubernetesArgs) -> Pod:
    """Return the pod that the request is for, with the same UID. Raises TryAgainLaterError (11)."""
    try:
        pod = cluster.pod(named.namespace, named.name, named.uid)
    except PodNotFoundError as error:
        raise TryAgainLaterError(
            f"pod {named.namespace}/{named.name} is not known",
            remedy=f"{error}; if it was not deleted a moment ago, check its namespace and name",
            origin=Origin.API,
        ) from error
    except StoreUnavailableError as error:
        raise unavailable(f"pod {named.namespace}/{named.name}", error) from error
    # The UID of a static pod in the API is that of its mirror, not the kubelet's.
    if named.uid and pod.uid != named.uid and not pod.is_static:
        raise TryAgainLaterError(
            f"pod {pod} has UID {pod.uid}, and the request is for {named.uid}",
            "the pod has been created anew under the same name",
        )
    return pod


def gather(engine: Engine, pod: Pod, net_conf: NetConf, more: Sequence[NetworkSelection] | None = None) -> Inputs:
    """Look up the pod's networks, its devices and the plugins. Never raises CniError: see `Inputs.refusal`.

    `more`: look up only these elements of its annotation, for a running pod that has its other networks.
    """
    lookup = Lookup(engine.cluster, engine.files, net_conf)
    elements: tuple[NetworkSelection, ...] = tuple(more or ())
    networks: tuple[Network, ...] = ()
    allocated = Allocation()
    try:
        if more is None:
            chosen, annotations = None, pod.annotations
            if (default := annotations.get(selection.DEFAULT_NETWORK_ANNOTATION)) is not None:
                chosen = selection.parse_default_network(default, default_namespace=net_conf.multus_namespace)
            networks_asked = annotations.get(selection.NETWORKS_ANNOTATION, "")
            selected = tuple(selection.parse(networks_asked, pod_namespace=pod.namespace))
            elements = (chosen, *selected) if chosen else selected
            networks = lookup.of_pod(pod, chosen, selected)
        else:
            networks = lookup.elements(pod, elements)
        if resources := {network.resource_name for network in networks} - {""}:
            allocated = engine.devices.allocated(pod, resources)
    except CniError as error:
        return Inputs(pod, net_conf, elements, networks, refusal=error)
    except DevicesUnavailableError as error:
        refusal = TryAgainLaterError(f"the pod's devices cannot be determined: {error}", origin=Origin.NODE)
        refusal.__cause__ = error
        return Inputs(pod, net_conf, elements, networks, refusal=refusal)
    return Inputs(pod, net_conf, elements, networks, allocated, engine.runner.programs(_as_called(networks)))


def _as_called(networks: Sequence[Network]) -> list[NetworkConfig]:
    """Return the configurations with the keys that plugins will get, as built-ins may not support the keys of a device.

    It is not decided yet which device a network gets, if any, so all configurations that it may get are returned.
    """
    called = [network.config for network in networks]
    for network in networks:
        if network.resource_name or network.capability_args.get(DEVICE_ID):
            called.append(conf.with_plugin_fields(network.config, device_fields("any"), {}))
    return called


def device_fields(device_id: str) -> dict[str, str]:
    """Return the keys of a device in each plugin's object; the names are upstream's."""
    return {DEVICE_ID: device_id, "pciBusID": device_id}
