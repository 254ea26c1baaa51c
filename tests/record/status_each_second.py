"""A runtime asks STATUS each second, of a daemon that serves and of one that is gone."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Final

from tests.record.incident import Incident, Seen
from tests.record.side import Side

TIMES: Final = 10
PATIENCE: Final = 5.0
"""Seconds; upstream's shim gives up after 60."""


def show(side: Side) -> Seen:
    plugins = [{"type": "ptp", "ipam": side.ipam("10.91.0.0/24")}, {"type": "portmap"}]
    side.primary({"cniVersion": "1.1.0", "name": "pods", "plugins": plugins})
    side.serve()
    before = side.processor_time()
    for _ in range(TIMES):
        assert status(side) == 0
    spent = (side.processor_time() - before) / TIMES
    side.end(signal.SIGKILL)
    begin = time.monotonic()
    answer = status(side)
    waited = time.monotonic() - begin
    told = f"no answer in {PATIENCE:.0f} s" if answer is None else f"an error after {waited:.1f} s"
    return Seen(answer is None, f"{spent * 1e3:.0f} ms of processor time each; without a daemon: {told}")


def status(side: Side) -> int | None:
    """The shim's exit status; None if it does not end in time."""
    environment = side.node.environment("STATUS", "", "", "")
    stdin = side.upstream.stdin(cniVersion="1.1.0")
    try:
        done = subprocess.run([str(side.shim)], env=environment, input=stdin, capture_output=True, timeout=PATIENCE)
        return done.returncode
    except subprocess.TimeoutExpired:
        return None


ROW = Incident(
    __name__,
    "STATUS, asked each second, takes processor time, and stands still without a daemon",
    "https://github.com/k8snetworkplumbingwg/multus-cni/pull/1519",
    show,
)
