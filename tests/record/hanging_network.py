"""Pods of a network whose plugin hangs, and then one of another network, with the same limit of connections."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.record.incident import Incident, Seen
from tests.record.side import Side

LIMIT: Final = 8
SECONDS: Final = 6.0


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.configure(connectionLimit=LIMIT)
    go, begun = side.node.root / "go", side.node.root / "begun"
    side.node.plugin(
        "hangs", f'[ "$CNI_COMMAND" = ADD ] || exit 0; echo >>{begun}; while [ ! -e {go} ]; do sleep 0.1; done'
    )
    side.definition("bad", json.dumps({"cniVersion": "1.0.0", "name": "bad", "type": "hangs"}))
    side.serve()
    side.pod("web")
    bad = [f"bad-{number}" for number in range(2 * LIMIT)]
    for pod in bad:
        side.pod(pod, "bad")
    with ThreadPoolExecutor(len(bad) + 1) as pool:
        try:
            for pod in bad:
                pool.submit(side.call, "ADD", pod)
            side.node.wait_until(begun.exists, "a plugin hangs")
            time.sleep(2)
            added = pool.submit(side.call, "ADD", "web")
            time.sleep(SECONDS)
            waits = not added.done()
        finally:
            go.touch()
        answer = added.result()
    assert answer.code == 0 or waits, answer
    text = (
        f"an ADD of another network waits for more than {SECONDS:.0f} s"
        if waits
        else f"an ADD of another network takes {answer.seconds:.1f} s"
    )
    return Seen(waits, text)


ROW = Incident(
    __name__,
    f"With `connectionLimit` {LIMIT}, {2 * LIMIT} pods of a network that hangs keep all other pods from starting",
    "https://github.com/k8snetworkplumbingwg/multus-cni/pull/1510",
    show,
)
