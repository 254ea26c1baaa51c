"""A pod with a fixed address and MAC ends while no daemon is there, and starts again: a virtual machine, say.

The report is of a VF, which keeps its MAC. Without a card for SR-IOV, an address of host-local shows the lost DEL.
"""

from __future__ import annotations

import json
import signal

from tests.record.incident import Incident, Seen
from tests.record.side import Side, told


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    bridge = {"type": "bridge", "bridge": "br-vm", "capabilities": {"ips": True, "mac": True}}
    content = {"cniVersion": "1.0.0", "name": "fixed", **bridge, "ipam": side.ipam("10.97.0.0/24")}
    side.definition("fixed", json.dumps(content))
    side.serve()
    asked = json.dumps([{"name": "fixed", "ips": ["10.97.0.7/24"], "mac": "02:00:00:00:00:07"}])
    side.pod("vm", asked)
    assert side.call("ADD", "vm").code == 0
    side.end(signal.SIGKILL)
    deleted = side.end_pod("vm")
    side.serve()
    side.pod("vm-again", asked)
    # The runtime repeats it.
    added = side.retried("ADD", "vm-again")
    left = sum("c-vm" in line and "c-vm-again" not in line for line in side.rules())
    return Seen(
        added.code != 0,
        f"DEL without a daemon: {told(deleted)}; the pod's next start: {told(added)}; {left} rules of iptables left",
    )


ROW = Incident(
    __name__,
    "A DEL is lost while the daemon is away: what the pod had stays in use",
    "https://github.com/k8snetworkplumbingwg/sriov-network-device-plugin/issues/685",
    show,
)
