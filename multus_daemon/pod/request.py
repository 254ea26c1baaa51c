"""A request on the daemon's socket as a typed value: `api.wire` decodes it, the verbs use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multus_daemon.spec.cni.names import ContainerId, IfName, KubernetesArgs


@dataclass(frozen=True, slots=True)
class CniRequest:
    """A request about one container. Its values are valid according to `cni.names`."""

    verb: str
    """ADD, DEL or CHECK."""
    container_id: ContainerId
    netns: str
    """Path of the network namespace; empty only for DEL."""
    ifname: IfName
    args: KubernetesArgs
    stdin: bytes
    """The network configuration that the runtime gave, byte for byte."""
    spooled: float = field(default=0.0, kw_only=True)
    """Unix time in seconds at which a DEL from the spool was written; 0 for any other request."""
    netns_override: bool = field(default=False, kw_only=True)
    """CNI_NETNS_OVERRIDE: `netns` may be the daemon's own namespace."""


@dataclass(frozen=True, slots=True)
class DelegateRequest(CniRequest):
    """A request about one network of a running container (hot-plug).

    `stdin` is that network's own configuration, single or list; `ifname` may be empty.
    """

    network: str
    """The name in the configuration, which is valid; the rest of the configuration is not checked yet."""
    ips: tuple[str, ...] = ()
    mac: str = ""
    cni_args: Mapping[str, Any] | None = None
