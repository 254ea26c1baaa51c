"""A pod ends while the API server is away."""

from __future__ import annotations

from tests.record.incident import Incident, Seen
from tests.record.side import Side, told


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web", "macvlan")
    added = side.call("ADD", "web")
    assert added.code == 0, added
    side.server.stop()
    try:
        deleted = side.call("DEL", "web")
        left = [path for path in side.node.leftovers() if path.startswith("networks/")]
    finally:
        side.server.start()
    text = f"DEL: {told(deleted)} after {deleted.seconds:.1f} s; leases left: {len(left)}"
    return Seen(bool(deleted.code or left or deleted.seconds > 5), text)


ROW = Incident(
    __name__,
    "Without the API server a DEL does not end",
    "https://github.com/k8snetworkplumbingwg/multus-cni/pull/1372",
    show,
    upstream_is_right=True,
)
