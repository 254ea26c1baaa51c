"""A pod asks that its default route leads over a second network."""

from __future__ import annotations

import json

from tests.record.incident import Incident, Seen
from tests.record.side import Side, told


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web", json.dumps([{"name": "ptp", "default-route": ["10.95.0.1"]}]))
    added = side.call("ADD", "web")
    assert added.code == 0, added
    routes = side.node.ip("route", "show", "default", netns=side.spaces["web"])
    found = " and ".join(f"{route['gateway']} ({route['dev']})" for route in routes)
    return Seen(
        [route["dev"] for route in routes] != ["net1"], f"ADD: {told(added)}; the default route is over {found}"
    )


ROW = Incident(
    __name__,
    "`default-route` has no effect: the default route stays that of the cluster network",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1444",
    show,
)
