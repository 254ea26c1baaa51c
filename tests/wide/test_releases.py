"""Tests of `tests/e2e/cluster` again, with other releases of Kubernetes and containerd than those of `make e2e`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e import build_tools
from tests.e2e.cluster.fixtures import started
from tests.e2e.cluster.real_node import RealNode

# Each test and fixture runs here with the node below.
from tests.e2e.cluster.test_late_primary import (  # noqa: F401
    test_no_pod_starts_on_the_wrong_network,
    without_primary,
)
from tests.e2e.cluster.test_multus import (  # noqa: F401
    multus,
    test_a_pod_with_two_networks_runs_and_nothing_is_left_of_it,
    test_pods_deleted_while_the_daemon_was_away_leave_nothing,
    test_the_generated_configuration_is_the_runtimes,
)
from tests.e2e.cluster.test_real_node import (  # noqa: F401
    test_a_reboot_leaves_files_and_makes_new_sandboxes,
    test_containers_outlive_containerd_and_the_kubelet,
)
from tests.e2e.cluster.test_release import (  # noqa: F401
    approver,
    release,
    test_kubeconfig_generator_keeps_a_kubeconfig_of_the_nodes_own,
    test_nothing_is_left_on_the_node,
)

RUNS: Final = ("Kubernetes, oldest", "Kubernetes, newest", "containerd 2")

# Also of those that ask for the node while they run.
pytestmark = pytest.mark.usefixtures("real_node_session")
pytest_plugins = ["tests.e2e.cluster.fixtures"]

RELEASES = {
    # The programs of an old cluster, and of a new one.
    "oldest": (build_tools.OLDEST,),
    "newest": (build_tools.NEWEST, build_tools.CONTAINERD),
}


@pytest.fixture(scope="module", params=RELEASES)
def real_node_session(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Iterator[RealNode]:
    """The node of all tests of this module, once with each of the releases."""
    with started(pytestconfig, *RELEASES[request.param]) as node:
        yield node


def test_the_node_says_that_it_is_of_these_releases(real_node: RealNode, request: pytest.FixtureRequest) -> None:
    is_new = "newest" in request.node.name
    kubernetes = build_tools.pinned("k8s.io/kubernetes", build_tools.NEWEST if is_new else build_tools.OLDEST)
    info = real_node.server.get("v1", "Node", real_node.name)["status"]["nodeInfo"]
    assert real_node.server.client.get("/version")["gitVersion"] == kubernetes
    assert info["kubeletVersion"] == kubernetes
    assert info["containerRuntimeVersion"].startswith("containerd://2.") is is_new
