"""The name under which the cluster knows this node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.spec.nad import names

VARIABLE: Final = "MULTUS_NODE_NAME"
_REMEDY: Final = f"set {VARIABLE} (fieldRef spec.nodeName in the DaemonSet)"


class NodeNameError(Exception):
    """The node's name is not known; the message says what to set."""


async def resolve_node_name(client: ApiClient, environ: Mapping[str, str], hostname: str) -> str:
    """MULTUS_NODE_NAME, else `hostname` where the API knows a node by it.

    Only the last asks the API server. Raises NodeNameError.
    """
    if value := environ.get(VARIABLE):
        if problem := names.subdomain_problem(value):
            raise NodeNameError(f"{VARIABLE}: {value!r} {problem}")
        return value
    # The kubelet's default is the host's name in lower case.
    name = hostname.strip().lower()
    if names.subdomain_problem(name):
        raise NodeNameError(f"the host's name {hostname!r} can't be a node's: {_REMEDY}")
    try:
        await client.request("GET", f"/api/v1/nodes/{quote(name, safe='')}", timeout=deadlines.NODE_READ_SECONDS)
    except ApiError as error:
        if error.status == 404:
            raise NodeNameError(f"the API server knows no node by the host's name {name}: {_REMEDY}") from error
        raise NodeNameError(f"whether {name} is this node's name can't be told ({error}): {_REMEDY}") from error
    except KubeError as error:
        raise NodeNameError(f"whether {name} is this node's name can't be told ({error}): {_REMEDY}") from error
    return name
