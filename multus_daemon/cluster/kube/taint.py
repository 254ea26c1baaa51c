"""Remove the startup taint of this node, which keeps pods off it until its daemon is ready."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.cluster.kube.latest import JSON_PATCH
from multus_daemon.cluster.kube.objects import DECODE_ERRORS
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.gates import Gates

log = logging.getLogger(__name__)

DEGRADED: Final = "startup-taint"
"""Key in `degraded` of `/readyz` while the taint can't be removed."""


async def clear(client: ApiClient, node: str, key: str, gates: Gates) -> None:
    """Wait until all gates are open, remove the taint `key`, again and again until it is gone, and return."""
    await gates.wait_open()
    for pause in backoff(*deadlines.CONDITION_RETRY_SECONDS):
        try:
            await _remove(client, node, key)
            break
        except (KubeError, *DECODE_ERRORS) as error:
            problem = f"no pods come to this node, its taint {key} can't be removed: {error}"
            remedy = "let the daemon patch its node (manifests/startup-taint, or startupTaint of the chart)"
            log.warning("%s; %s", problem, remedy)
            gates.degraded.close(DEGRADED, f"{problem}; {remedy}")
        await asyncio.sleep(pause)
    gates.degraded.open(DEGRADED)


async def _remove(client: ApiClient, node: str, key: str) -> None:
    """Remove the taint, if the node has it. Raises DECODE_ERRORS, KubeError, also if the taints change meanwhile."""
    path = objects.node_path(node)
    taints = objects.taints_of(await client.request("GET", path, timeout=deadlines.API_READ_SECONDS))
    left = [taint for taint in taints if taint.get("key") != key]
    if left == taints:
        return
    patch = [
        {"op": "test", "path": "/spec/taints", "value": taints},
        {"op": "replace", "path": "/spec/taints", "value": left},
    ]
    await client.request("PATCH", path, body=msgspec.json.encode(patch), content_type=JSON_PATCH)
    log.info("the taint %s is removed from node %s", key, node)
