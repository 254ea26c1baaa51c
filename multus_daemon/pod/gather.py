"""The one step of planning that waits: what the stores, the kubelet and the disk know about a pod's networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multus_daemon.plugins.plugin import Program
from multus_daemon.pod import devices, networks
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import Network
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.args import KubernetesArgs
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf.model import NetConf
from multus_daemon.spec.ports import DevicesUnavailableError, PodNotFoundError, StoreUnavailableError


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that `plan.plan_pod` needs to know. A `refusal` ends the search: what follows it is not looked for."""

    pod: Pod
    net_conf: NetConf
    elements: tuple[NetworkSelection, ...] = ()
    """What the pod's annotations select."""
    networks: tuple[Network, ...] = ()
    """The networks of the pod in order, the cluster network first."""
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ids of the pod's devices by their resource or claim; empty if no network needs one."""
    programs: Mapping[str, Program] = field(default_factory=dict)
    """The files of the plugins that the networks name, by plugin type."""
    refusal: CniError | None = None


def find_pod(engine: Engine, named: KubernetesArgs) -> Pod:
    """Return the pod that the request is for, the same incarnation. Raises TryAgainLaterError (11)."""
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


def gather(engine: Engine, pod: Pod, net_conf: NetConf) -> Inputs:
    """Look up the pod's networks, its devices and the plugins. Never raises CniError: see `Inputs.refusal`."""
    elements: tuple[NetworkSelection, ...] = ()
    found: tuple[Network, ...] = ()
    try:
        chosen, selected = networks.selections(pod, net_conf)
        elements = (chosen, *selected) if chosen else selected
        found = networks.of_pod(engine, pod, net_conf, chosen, selected)
        allocated: Mapping[str, Sequence[str]] = {}
        if any(network.resource_name for network in found):
            allocated = engine.devices.allocated(pod)
    except CniError as error:
        return Inputs(pod, net_conf, elements, found, refusal=error)
    except DevicesUnavailableError as error:
        refusal = TryAgainLaterError(f"the pod's devices cannot be determined: {error}")
        refusal.__cause__ = error
        return Inputs(pod, net_conf, elements, found, refusal=refusal)
    programs = engine.runner.programs(_with_device(network) for network in found)
    return Inputs(pod, net_conf, elements, found, allocated, programs)


def _with_device(network: Network) -> NetworkConfig:
    """Return the configuration as its plugins get it: a built-in may not know the keys of a device."""
    if not network.resource_name and not network.capability_args.get(devices.DEVICE_ID):
        return network.config
    return conf.with_plugin_fields(network.config, devices.fields("any"), {})
