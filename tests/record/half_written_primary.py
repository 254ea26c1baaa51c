"""An agent writes the cluster network's file and is interrupted halfway."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.record.incident import Incident, Seen
from tests.record.side import Side


def show(side: Side) -> Seen:
    side.cluster_network("conflist")
    side.serve()
    primary = side.node.root / "net.d" / "10-pods.conflist"
    content = primary.read_bytes()
    primary.write_bytes(content[: len(content) // 2])
    time.sleep(2)
    generated = (Path(side.node.settings["cniConfigDir"]) / "00-multus.conf").read_bytes()
    if not generated:
        return Seen(True, "00-multus.conf is empty: the runtime has no network, and the node is not ready")
    return Seen(False, f"00-multus.conf stays, of type {json.loads(generated)['type']}")


ROW = Incident(
    __name__,
    "A half-written file of the cluster network empties `00-multus.conf`: the node is not ready",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1155",
    show,
)
