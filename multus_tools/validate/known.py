"""Types of plugins, to detect misspelt names.

Sources: the reference plugins (containernetworking/plugins v1.10.0) and the documentation of others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from multus_daemon.plugins.builtin.registry import PLUGINS

_NEAR: Final = 0.7
"""Similarity, from 0 to 1, above which one name may be a misspelling of the other."""
_NAME_MAX: Final = 64
"""Maximum characters of a name for which a similar one is searched."""

READS_ARGS: Final[Mapping[str, frozenset[str]]] = {
    "ips": frozenset({"host-local", "static"}),
    "mac": frozenset({"bridge", "macvlan", "tap", "tuning"}),
}
"""Plugins that read a pod's request from CNI_ARGS without declaring the capability, by request."""

_OTHERS: Final = frozenset(
    {
        *("accelerated-bridge", "afxdp", "antrea", "aws-cni", "azure-cns", "azure-ipam", "azure-vnet", "bond"),
        *("calico", "calico-ipam", "cilium-cni", "cnv-bridge", "cnv-tuning", "coordinator", "dpdk", "egress-cni"),
        *("galaxy", "ib-sriov", "ib-sriov-cni", "istio-cni", "kube-ovn", "linkerd-cni", "multus", "multus-cni"),
        *("multus-shim", "nv-ipam", "ovn-k8s-cni-overlay", "ovs", "ovs-mirror-consumer", "ovs-mirror-producer", "rdma"),
        *("route-override", "spiderpool", "sriov", "sriov-cni", "tc-redirect-tap", "terway", "userspace", "weave-ipam"),
        *("weave-net", "whereabouts", "win-bridge", "win-overlay"),
    }
)
TYPES: Final = frozenset({*PLUGINS, *_OTHERS})


def near(name: str, names: Iterable[str], *, alike: float = _NEAR) -> str:
    """Return the most similar of `names`, ignoring case; empty if none is similar."""
    if len(name) > _NAME_MAX:
        return ""
    spelling = {item.lower(): item for item in names}
    found = difflib.get_close_matches(name.lower(), spelling, n=1, cutoff=alike)
    return spelling[found[0]] if found else ""


def meant(name: str, names: Iterable[str]) -> str:
    """Return the text `is NAME meant?` with the most similar of `names`; empty if none is similar."""
    found = near(name, names)
    return f"is {found} meant?" if found else ""
