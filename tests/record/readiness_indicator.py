"""The readiness indicator of the cluster network goes, and a pod with a second network starts meanwhile."""

from __future__ import annotations

import time

from tests.record.incident import Incident, Seen
from tests.record.side import Side, told
from tests.record.vanishing_configuration import add, first


def show(side: Side) -> Seen:
    indicator = side.node.root / "net.d" / "ready"
    side.cluster_network("conf")
    side.configure(readinessindicatorfile=str(indicator))
    indicator.touch()
    side.serve()
    side.pod("web", "macvlan")
    indicator.unlink()
    time.sleep(1)
    found = first(side)
    added = add(side, found)
    links = [name for name in side.pod_links()["web"] if name != "lo"]
    said = told(added).replace(f"{side.node.root}/", "")
    text = f"the runtime finds {found.name}; ADD: {said}; the pod has {' and '.join(links) or 'no interface'}"
    return Seen(added.code == 0 and "net1" not in links, text)


ROW = Incident(
    __name__,
    "The cluster network restarts: the configuration goes with its readiness indicator, and a pod gets `eth0` alone",
    "https://github.com/openshift/machine-config-operator/pull/1623",
    show,
)
