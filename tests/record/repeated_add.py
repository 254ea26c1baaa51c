"""The runtime repeats the ADD of a container that is attached, as when it has lost the answer."""

from __future__ import annotations

from tests.record.incident import Incident, Seen
from tests.record.side import Side, told


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web", "ptp@data0")
    assert side.call("ADD", "web").code == 0
    before = side.pod_links()["web"]
    again = side.call("ADD", "web")
    after = [name for name in side.pod_links()["web"] if name != "lo"]
    text = f"the second ADD: {told(again)}; the pod has {' and '.join(after) or 'no interface'} after it"
    return Seen(again.code != 0 or side.pod_links()["web"] != before, text)


ROW = Incident(
    __name__,
    "A second ADD of a container fails and undoes the first: the pod loses an interface",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1200",
    show,
)
