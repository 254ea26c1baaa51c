"""A real node for the tests of a run, for modules that say `pytest_plugins = ["tests.e2e.cluster.fixtures"]`.

Where a program is missing the tests are skipped and say how to get it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
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

Pod = TypeVar("Pod", bound=MultusPod)


class _LogsOfTheNode:
    """Adds the ends of the logs to the report of a failed test that used the node."""

    def __init__(self, node: RealNode) -> None:
        self._node = node

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and {"real_node", "nodes"}.intersection(getattr(item, "fixturenames", ())):
            report.sections.append((self._node.name, self._node.logs()))
        return report


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
        logs = _LogsOfTheNode(node)
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
