"""A node with whereabouts gets the daemon: its binary runs as long as nobody gives the daemon the right."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.e2e.addresses.fleet import MANIFESTS, Fleet, Pod, Subject, documents
from tests.e2e.addresses.objects import RESERVATIONS
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.waiting import until

BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """One node, whose daemon has no right to reserve addresses, beside whereabouts' binary."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root")
    try:
        made = Fleet(Subject.BINARY)
    except (ToolError, OpensslError) as error:
        pytest.skip(str(error))
    with made:
        node = made.machines[0].node
        made.lan("shared", "10.99.0.0/24")
        made.machines[0].stop_control()
        node.kill()
        del node.settings["builtinPluginsExcept"]
        node.start(timeout=60)
        yield made


def makers(fleet: Fleet) -> list[str]:
    """Who has made each reservation: a node's name, or nothing for the binary."""
    found = fleet.server.request("GET", RESERVATIONS)["items"]
    return sorted(item["metadata"].get("labels", {}).get("multus.io/node", "") for item in found)


def test_networks_are_the_binarys_while_the_daemon_has_no_right(fleet: Fleet) -> None:
    before = fleet.start(0, "before", "shared")
    assert (before.error, makers(fleet)) == ("", [""])

    rights = documents(MANIFESTS / "addresses" / "rbac.yaml")
    fleet.server.apply(*rights)
    pods: list[Pod] = []

    def is_built_in() -> bool:
        # It looks once a minute.
        time.sleep(5 if pods else 0)
        pods.append(fleet.start(0, f"pod{len(pods)}", "shared"))
        assert pods[-1].error == ""
        return "node1" in makers(fleet)

    until(is_built_in, seconds=150, what="the daemon reserves addresses")

    # Somebody takes it away: the daemon notices by the first pod.
    fleet.server.request("DELETE", f"{BINDINGS}/multus-addresses")

    def is_binary() -> bool:
        given = makers(fleet).count("")
        pods.append(fleet.start(0, f"pod{len(pods)}", "shared"))
        return makers(fleet).count("") > given

    until(is_binary, seconds=60, what="whereabouts' binary gives the addresses again")

    # Either is deleted by what attached it; what the daemon has reserved, once it may.
    assert all(fleet.stop(pod) for pod in (before, *pods))
    until(lambda: makers(fleet) == ["node1"], what="the binary's addresses are free")
    fleet.server.apply(*rights)
    until(lambda: makers(fleet) == [], what="all addresses are free")
