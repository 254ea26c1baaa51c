"""What somebody breaks of an attachment is reported, and brought back by the built-in that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.plugins.run import Chain
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName
from tests import calls
from tests.netns import outcome
from tests.planning import plan_one

ROUNDS = 3


class Attached:
    """An attachment of a list of plugins, made by the built-ins."""

    def __init__(self, chain: Chain, path: str, plugins: list[dict[str, Any]]) -> None:
        self._chain = chain
        self._sandbox = Sandbox(ContainerId("container1"), path)
        fields = {"cniVersion": "1.0.0", "name": "testnet", "plugins": plugins}
        attachment = Attachment("web/testnet", conf.parse(json.dumps(fields).encode()), IfName("net1"))
        planned = plan_one(chain, self._sandbox, attachment)
        self.result = calls.add(chain, self._sandbox, planned)
        self._attachment = planned.with_result(self.result)

    def differences(self) -> list[str]:
        with PodNetns(self._sandbox.netns) as netns:
            return [item.text for item in self._chain.differences(self._sandbox, self._attachment, netns)]

    def repair(self) -> list[str]:
        """Repair as the daemon does; return what is still different then."""
        with PodNetns(self._sandbox.netns) as netns:
            for _ in range(ROUNDS):
                for item in self._chain.differences(self._sandbox, self._attachment, netns):
                    if item.repair:
                        item.repair()
        return self.differences()


@pytest.fixture
def chain(tools: HostTools, tmp_path: Path) -> Chain:
    return Chain(outcome.dispatched("prefer", tools), ResultCache(tmp_path / "cache"), "/nowhere")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("link del net1", 'interface "net1" is not there'),
        ("link set net1 down", '"net1" is down'),
        ("addr flush dev net1", 'address 10.1.0.2/24 is not on "net1"'),
        ("link set net1 mtu 1400", 'MTU of "net1" is 1400, not 1500'),
        ("route del default", 'route to 0.0.0.0/0 via 10.1.0.1 is not on "net1"'),
    ],
)
def test_bridge_in_the_pod(host: Any, netns: Any, chain: Chain, tmp_path: Path, change: str, told: str) -> None:
    ipam: dict[str, Any] = {
        "type": "host-local",
        "dataDir": str(tmp_path / "ipam"),
        "ranges": [[{"subnet": "10.1.0.0/24"}]],
    }
    ipam["routes"] = [{"dst": "0.0.0.0/0"}]
    made = Attached(chain, netns.path, [{"type": "bridge", "bridge": "br0", "isGateway": True, "ipam": ipam}])
    assert made.differences() == []
    netns.run("ip", *change.split())
    assert told in made.differences()
    assert made.repair() == []
    assert "1 received" in netns.run("ping", "-c1", "-W2", "10.1.0.1")
