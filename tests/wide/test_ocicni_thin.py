"""CRI-O deletes a pod by the configuration of its ADD: of upstream's thin plugin after the way there, of ours after
the way back.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.build_tools import ToolError
from tests.e2e.cluster.multus import GENERATED, MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.thin import PROGRAM, ThinProcess
from tests.e2e.cluster.workload import BRIDGE, leftovers, two_networks
from tests.programs import given

RUNS: Final = ("ocicni, with which CRI-O calls plugins", "Multus, thin")
pytest_plugins = ["tests.e2e.cluster.fixtures"]

INSTALL = (f"{sysconfig.get_path('scripts')}/multus-daemon", "install", "--bin-dir", "/opt/cni/bin")


@pytest.fixture
def thin(real_node: RealNode) -> Iterator[ThinProcess]:
    """The thin plugin, and a pod of two networks that is no kubelet's."""
    try:
        made = ThinProcess(real_node)
    except ToolError as error:
        pytest.skip(str(error))
    made.install()
    made.start()
    two_networks(real_node)
    real_node.pod("p1", networks="blue,green@fast", schedulingGates=[{"name": "example.com/never"}])
    real_node.machine.run("ip", "netns", "add", "p1")
    yield made
    real_node.machine.run("sh", "-c", f"ip netns delete p1; ip link delete {BRIDGE}; true")
    real_node.server.delete_pod("p1", "default", grace=0)
    made.uninstall()
    assert real_node.links() == LINKS


def test_there_and_back(thin: ThinProcess) -> None:
    node, ocicni = thin.node, given("WIDE_OCICNI")

    def call(verb: str) -> str:
        return node.machine.run(str(ocicni), verb, "default", "p1", "c1", "/run/netns/p1")

    added = call("add")
    thin.stop()
    daemon = MultusProcess(node)
    daemon.install()
    node.machine.run(*INSTALL)
    daemon.start()
    try:
        # CHECK and DEL.
        assert call("status") == added
        call("del")
        assert leftovers(node) == []
        call("add")
    finally:
        daemon.stop()
    thin.start()
    node.machine.run("rm", GENERATED)
    # As docs/migration.md says.
    node.machine.run("ln", "-sf", Path(PROGRAM).name, "/opt/cni/bin/multus-shim")
    call("del")
    # What only our daemon reads goes with an uninstall, or by its command on that page.
    assert [name for name in leftovers(node) if "/attachments/" not in name] == []
    daemon.uninstall()
