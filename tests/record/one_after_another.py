"""A pod has four networks, each of which takes two seconds."""

from __future__ import annotations

from typing import Final

from tests.record.incident import Incident, Seen
from tests.record.side import Side

NETWORKS: Final = ("a", "b", "c", "d")
SECONDS: Final = 2.0


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    program = side.node.bin_dir / "slow"
    program.write_text(f'#!/bin/sh\n[ "$CNI_COMMAND" != ADD ] || sleep {SECONDS}\nexec {side.node.bin_dir}/ptp\n')
    program.chmod(0o755)
    for number, name in enumerate(NETWORKS):
        side.lan(name, "slow", f"10.97.{number}.0/24")
    side.serve()
    side.pod("web", ",".join(NETWORKS))
    added = side.call("ADD", "web")
    assert added.code == 0, added
    assert len(side.pod_links()["web"]) == len(NETWORKS) + 2
    text = f"the ADD of {len(NETWORKS)} networks of {SECONDS:.0f} s each takes {added.seconds:.0f} s"
    return Seen(added.seconds > len(NETWORKS) * SECONDS, text)


ROW = Incident(
    __name__,
    "Networks of a pod are attached one after the other",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1016",
    show,
)
