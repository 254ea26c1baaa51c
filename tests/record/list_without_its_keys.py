"""Pods come and go on a cluster network that is a list with a range of three addresses."""

from __future__ import annotations

from typing import Final

from tests.e2e.upstream import NEW
from tests.record.incident import Incident, Seen
from tests.record.side import Side, told

PODS: Final = 5


def show(side: Side) -> Seen:
    ranges = [[{"subnet": "10.91.0.0/24", "rangeStart": "10.91.0.2", "rangeEnd": "10.91.0.4"}]]
    ipam = {**side.ipam(""), "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
    plugins = [{"type": "ptp", "ipam": ipam}, {"type": "portmap", "capabilities": {"portMappings": True}}]
    side.primary({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins})
    side.serve()
    for number in range(PODS):
        pod = f"pod-{number}"
        side.pod(pod)
        if (added := side.call("ADD", pod)).code:
            return Seen(True, f"each DEL is a success; after {number} pods no ADD succeeds: {told(added)}")
        side.end_pod(pod)
    return Seen(False, f"{PODS} pods, one after the other, on 3 addresses")


ROW = Incident(
    __name__,
    "DEL of a list has not the keys of its ADD: addresses leak until none is left",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1449",
    show,
    mended_in=NEW,
)
