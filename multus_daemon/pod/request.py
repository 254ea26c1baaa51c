"""A call on the socket, typed: `api.wire` makes it of the JSON, and the verbs take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multus_daemon.spec.cni.names import ContainerId, IfName, KubernetesArgs


@dataclass(frozen=True, slots=True)
class CniRequest:
    """One call for one container. The values have passed the validators of `cni.names`."""

    verb: str
    """ADD, DEL or CHECK."""
    container_id: ContainerId
    netns: str
    """Empty only for DEL."""
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
    """One call about one network of a running container (hot-plug).

    `stdin` is that network's own configuration, single or list; `ifname` may be empty.
    """

    network: str
    """The name in the configuration, checked; the rest of it is not."""
    ips: tuple[str, ...] = ()
    mac: str = ""
    cni_args: Mapping[str, Any] | None = None
