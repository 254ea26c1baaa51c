"""What is wrong between objects: networks that pods name, requests, isolation, ranges of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.diagnosis.validate import configs, known
from multus_daemon.diagnosis.validate.configs import Network, Plugins
from multus_daemon.diagnosis.validate.objects import Objects
from multus_daemon.diagnosis.validate.pods import Element
from multus_daemon.diagnosis.validate.report import Report, Severity, innermost
from multus_daemon.plugins.builtin.host_local.config import Range
from multus_daemon.pod import gather, plan, unsupported
from multus_daemon.runtime.jsontext import Path
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.netconf.load import load
from multus_daemon.spec.netconf.model import NetConf

_IFNAME: Final = IfName("eth0")
"""What containerd and CRI-O call the cluster network's interface."""
_OVERLAPS_MAX: Final = 100


def check(report: Report, objects: Objects, plugins: Plugins) -> None:
    """Report on what only several objects show."""
    overlay = objects.settings.overlay
    net_conf = load(b"{}", {key: value for key, value in overlay.items() if key != "delegates"})
    names = objects.names
    for elements in objects.pods:
        _check_interfaces(report, elements)
        for element in elements:
            _check_isolation(report, element, net_conf)
            key = (element.selection.namespace, element.selection.name)
            if key not in names:
                _check_reference(report, element, names, net_conf)
            elif network := objects.network(*key):
                _check_request(report, plugins, element, network, strict=net_conf.strict_requests)
    # Not those that pods have led to: others of them are not looked at either.
    found = [network for network in objects.networks.values() if network and network.located.source.name]
    _check_ranges(report, [*found, *objects.configs])


def _tell(
    report: Report, severity: Severity, check: str, element: Element, problem: str, advice: str, about: str = ""
) -> None:
    place = element.place(about)
    path: Path = ("metadata", "annotations", element.annotation)
    report.add_at(severity, check, element.subject, element.located.source, place, problem, advice, path=path)


def _check_interfaces(report: Report, elements: Sequence[Element]) -> None:
    """The names of interfaces, as an ADD gives them where every pod gets the cluster network and no other besides."""
    cluster = next((element for element in elements if element.is_default), None)
    rest = [element for element in elements if not element.is_default]
    config = conf.parse(b'{"cniVersion": "1.0.0", "name": "cluster-network", "type": "passthru"}')
    chosen = [gather.Network(str(element.selection), config, element.selection) for element in rest]
    chosen.insert(0, gather.Network("the cluster network", config, cluster.selection if cluster else None))
    try:
        plan.interface_names(_IFNAME, chosen)
    except CniError as error:
        named = [element for element in rest if element.selection.interface] or rest
        guilty = next((one for one in named if f"{one.selection.interface!r}" in error.msg), named[-1])
        _tell(report, "error", "interface", guilty, error.msg, error.details, "interface")


def _check_isolation(report: Report, element: Element, net_conf: NetConf) -> None:
    wanted = element.selection
    if element.is_default and wanted.namespace == net_conf.multus_namespace:
        return
    if not net_conf.allows(element.namespace, wanted.namespace):
        allowed = ", ".join(sorted({element.namespace, *net_conf.global_namespaces}))
        _tell(
            report, "error", "isolation", element,
            f"network {wanted} is out of reach for namespace {element.namespace}",
            f"namespaceIsolation is on; networks of {allowed} may be used", "namespace",
        )  # fmt: skip


def _check_reference(report: Report, element: Element, names: set[tuple[str, str]], net_conf: NetConf) -> None:
    """A network that none of the objects is: where there are any at all, it is misspelt, or forgotten.

    Of networks that the pod may not use nothing is said: their names are none of a tenant's business.
    """
    if not names:
        return
    wanted = element.selection
    allowed = [key for key in names if net_conf.allows(element.namespace, key[0])]
    elsewhere = sorted(namespace for namespace, name in allowed if name == wanted.name)
    here = [name for namespace, name in allowed if namespace == wanted.namespace]
    if elsewhere:
        advice = f"is {elsewhere[0]}/{wanted.name} meant?"
    elif near := known.near(wanted.name, here):
        advice = f"is {near} meant?"
    else:
        advice = "give its file too, or apply it before the pod"
    problem = f"network {wanted} does not exist: no NetworkAttachmentDefinition that is known here has that name"
    _tell(report, "warning", "reference", element, problem, advice, "name")


def _check_request(report: Report, plugins: Plugins, element: Element, network: Network, *, strict: bool) -> None:
    try:
        attachment = configs.asked_of(network, element.selection, IfName(element.selection.interface or "net1"))
        if network.is_usable:
            plugins.plan(attachment)
    except CniError as error:
        error = innermost(error)
        problem = f"network {network.name} can't take what is asked of it: {error.msg}"
        _tell(report, "error", "request", element, problem, error.details, error.msg)
        return
    wanted = unsupported.KEYS.keys() if strict else unsupported.KEYS.keys() - _taken_from_args(attachment)
    for found in unsupported.undeclared(attachment, wanted & attachment.capability_args.keys()):
        severity: Severity = "error" if strict else "warning"
        _tell(report, severity, "request", element, found.problem, found.advice, found.key)


def _taken_from_args(attachment: Attachment) -> set[str]:
    """Requests that a plugin of the network takes from CNI_ARGS."""
    types = {name for plugin in attachment.config.plugins for name in (plugin.type, plugin.ipam_type)}
    found = {capability for capability, readers in known.READS_ARGS.items() if types & readers}
    if len(attachment.capability_args.get("ips", ())) > 1 and "static" not in types:
        # host-local takes one there.
        found.discard("ips")
    return found


# --- ranges ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pool:
    range: Range
    kept_in: str
    """host-local's directory: networks that share it never give an address away twice."""
    network: Network
    path: Path


def _check_ranges(report: Report, found: Sequence[Network]) -> None:
    """Two networks that give away the same addresses, each by itself."""
    pools = [
        _Pool(one, kept_in, network, path) for network in found for one, kept_in, path in configs.ranges_of(network)
    ]
    told: set[frozenset[str]] = set()
    open_pools: list[_Pool] = []
    for pool in sorted(pools, key=lambda item: (item.range.version, item.range.first)):
        open_pools = [other for other in open_pools if other.range.overlaps(pool.range)]
        for other in open_pools:
            pair = frozenset({pool.network.name, other.network.name})
            if other.kept_in == pool.kept_in or pair in told or len(told) >= _OVERLAPS_MAX:
                continue
            told.add(pair)
            _tell_overlap(report, *sorted((other, pool), key=lambda item: found.index(item.network)))
        open_pools.append(pool)


def _tell_overlap(report: Report, first: _Pool, second: _Pool) -> None:
    report.add(
        "warning", "overlap", second.network.subject, second.network.located,
        f"addresses {second.range} overlap with {first.range} of network {first.network.name}: "
        "host-local gives them away in each by itself",
        "give each network addresses of its own, or both the same \"name\", so that they share what is taken",
        path=second.path,
    )  # fmt: skip
