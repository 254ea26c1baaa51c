"""`passthru`: does nothing and returns an empty result, as first plugin of the auxiliary chain (upstream's plugin)."""

from __future__ import annotations

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.result import Result


def add(call: Call, netns: PodNetns) -> Result:
    """Return an empty result."""
    return Result()


def delete(call: Call, netns: PodNetns) -> None:
    """Do nothing."""
