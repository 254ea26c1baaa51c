"""The node's shim is upstream's v4.3.1, its daemon is not: an image under a moving name, an update half done.

Without the program (UPSTREAM_NEW_SHIM), its requests: `/readyz` every 0.1 s, then `/cni`. It gives up after 60 s.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from typing import Final

from tests.e2e.upstream import NEW, shim_of
from tests.record.incident import Incident, Seen
from tests.record.side import Side

PATIENCE: Final = 15.0
"""Seconds."""


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web")
    health, ready = (side.node.ask("POST", path, b"null")[0] for path in ("/healthz", "/readyz"))
    added = attached(side, ready)
    outcome = "the pod is attached" if added else f"no pod is attached in {PATIENCE:.0f} s"
    return Seen(not added, f"/healthz {health}, /readyz {ready}: {outcome}")


def attached(side: Side, ready: int) -> bool:
    side.spaces["web"] = netns = side.node.add_netns()
    environment = side.node.environment("ADD", "c-web", netns, "web", side.namespace, side.uids["web"])
    stdin = side.upstream.stdin()
    if os.environ.get("UPSTREAM_NEW_SHIM"):
        try:
            command = [str(shim_of(NEW))]
            done = subprocess.run(command, env=environment, input=stdin, capture_output=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
    end = time.monotonic() + PATIENCE
    while ready != 200 and time.monotonic() < end:
        time.sleep(0.1)
        ready = side.node.ask("POST", "/readyz", b"null")[0]
    if ready != 200:
        return False
    request = {"env": environment, "config": base64.b64encode(stdin).decode()}
    return side.node.ask("POST", "/cni", json.dumps(request).encode())[0] == 200


ROW = Incident(
    __name__,
    "A shim of v4.3.1 and an older daemon: no sandbox starts, and the DaemonSet counts as healthy",
    "https://github.com/keiretsu-labs/kubernetes-manifests/pull/2903",
    show,
    mended_in=NEW,
)
