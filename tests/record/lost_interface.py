"""The link below a macvlan goes and comes back, as in a restart of the host's network."""

from __future__ import annotations

import time

from tests.record.incident import Incident, Seen
from tests.record.side import Side


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web", "macvlan", **{"multus.io/keep": "repair"})
    added = side.call("ADD", "web")
    assert added.code == 0, added
    side.node.ip("link", "delete", "up0")
    assert "net1" not in side.pod_links()["web"]
    side.node.ip("link", "add", "up0", "type", "veth", "peer", "name", "up1")
    for name in ("up0", "up1"):
        side.node.ip("link", "set", name, "up")
    begin = time.monotonic()
    while not (is_back := "net1" in side.pod_links()["web"]) and time.monotonic() < begin + 10:
        time.sleep(0.1)
    if not is_back:
        return Seen(True, f"10 s later net1 is missing; CHECK answers status {side.call('CHECK', 'web').code}")
    return Seen(False, f"with `keep: repair` net1 is back within {time.monotonic() - begin + 0.5:.0f} s")


ROW = Incident(
    __name__,
    "After a restart of the host's network a pod's macvlan interface is gone for good",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1008",
    show,
)
