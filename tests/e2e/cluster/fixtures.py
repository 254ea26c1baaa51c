"""A real node for the tests of a run, for modules that say `pytest_plugins = ["tests.e2e.cluster.fixtures"]`.

Where a program is missing the tests are skipped and say how to get it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e import build_tools
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.images import ImageError
from tests.e2e.cluster.multus import MultusPod
from tests.e2e.cluster.programs import NodeError
from tests.e2e.cluster.real_node import LINKS, PRIMARY, RealNode
from tests.e2e.cluster.workload import BRIDGE, addresses, forget_events
from tests.e2e.logs import Logs

Pod = TypeVar("Pod", bound=MultusPod)


@pytest.fixture(scope="session")
def real_node_session(pytestconfig: pytest.Config) -> Iterator[RealNode]:
    """One node for all tests of the run, Ready, with PRIMARY; take `real_node` instead."""
    with started(pytestconfig) as node:
        yield node


@contextlib.contextmanager
def started(pytestconfig: pytest.Config, *releases: Path, **arguments: Any) -> Iterator[RealNode]:
    """A node with PRIMARY, Ready. `releases`: directories of `build_tools` that pin other programs for it."""
    try:
        made = RealNode(build_tools.release(*releases), **arguments)
    except (NodeError, ToolError, ImageError, OpensslError) as error:
        pytest.skip(str(error))
    with made as node:
        node.start(PRIMARY)
        logs = Logs(node.name, node.logs, "real_node", "nodes")
        pytestconfig.pluginmanager.register(logs)
        yield node
        pytestconfig.pluginmanager.unregister(logs)


@pytest.fixture
def real_node(real_node_session: RealNode) -> Iterator[RealNode]:
    """The node. Pods of the default namespace that a test leaves are removed after it."""
    yield real_node_session
    real_node_session.remove_pods()


@contextlib.contextmanager
def installed(node: RealNode, kind: Callable[[RealNode, Path], Pod]) -> Iterator[Pod]:
    """Our DaemonSet with our image, by `kind` of installing it; what its pods leave on the node fails the test."""
    try:
        made = kind(node, daemon_image.find())
    except ToolError as error:
        pytest.skip(str(error))
    made.install()
    forget_events(node)
    yield made
    node.remove_pods()
    made.uninstall()
    if BRIDGE in node.links():
        node.machine.run("ip", "link", "delete", BRIDGE)
    assert node.links() == LINKS
    # Else the test that comes next is blamed.
    assert addresses(node) == []


@pytest.fixture
def multus_pod(real_node: RealNode) -> Iterator[MultusPod]:
    """Our DaemonSet, not started."""
    with installed(real_node, MultusPod) as made:
        yield made
