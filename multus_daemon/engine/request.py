"""A call of the runtime, typed: what `server.wire` makes of the JSON on the socket and the verbs take."""

from __future__ import annotations

from dataclasses import dataclass

from multus_daemon.cni.args import KubernetesArgs
from multus_daemon.cni.names import ContainerId, IfName
from multus_daemon.ports import Sandbox


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

    @property
    def sandbox(self) -> Sandbox:
        """The container as the delegates see it."""
        return Sandbox(self.container_id, self.netns)
