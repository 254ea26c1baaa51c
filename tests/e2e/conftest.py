"""A scratch node for each test; what the daemon logged is shown where a test fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import memory_group, rights
from tests.e2e.node import Node
from tests.programs import require

pytest.register_assert_rewrite("tests.e2e.takeover", "tests.e2e.cluster.fixtures")

REFERENCE = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))


Report = Generator[None, pytest.TestReport, pytest.TestReport]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Report:
    report = yield
    made = item.funcargs.get("make_node") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and made is not None:
        for node in made.nodes:
            if node.log.exists():
                report.sections.append((f"daemon log {node.root.name}", node.log.read_text()[-8000:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := memory_group.missing():
        terminalreporter.write_line(f"daemons ran without the manifest's memory limit: {reason}")


class NodeFactory:
    """Makes nodes and remembers them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __call__(self, **arguments: Any) -> Node:
        self.nodes.append(Node(**arguments))
        return self.nodes[-1]


@pytest.fixture
def make_node(request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """Make a node that is taken apart after the test."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urnm`")
    require("ip")
    try:
        rights.seccomp_filter(rights.SHIPPED.capabilities)
    except rights.RightsError as error:
        pytest.skip(str(error))
    factory = NodeFactory()
    yield factory
    for node in factory.nodes:
        node.__exit__()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A node with a ptp cluster network of built-in plugins; not started."""
    made = make_node()
    made.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
    return made


@pytest.fixture
def reference() -> Path:
    """The directory of the reference plugins."""
    if not (REFERENCE / "bridge").exists():
        pytest.skip("needs the reference plugins: apt-get install containernetworking-plugins, or CNI_REFERENCE_DIR")
    return REFERENCE
