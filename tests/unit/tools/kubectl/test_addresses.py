"""`kubectl multus addresses`."""

import asyncio
import io
import json
import sys

import pytest

from multus_tools.kubectl import addresses, commands, show
from multus_tools.tables import Listing
from tests.fakes.apiserver import IPAM_CLAIMS, NODES, POOLS, RESERVATIONS

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


async def asked(bench, **of):
    return await addresses.addresses(bench.cluster(), **{"node": "", "address": "", **of})


@pytest.fixture
def fleet(bench):
    """Three nodes, of which one is deleted and one is powered off, and a range that they share."""
    bench.node("node-a")
    bench.node("node-b", ready=False, taint=OUT_OF_SERVICE)
    bench.shared("blue", range="10.9.0.0/29")
    bench.reserve("10.9.0.1", "default/a", "node-a", network="default/blue", range="10.9.0.0/29")
    bench.reserve("10.9.0.2", "default/b", "node-b", network="default/blue", range="10.9.0.0/29")
    bench.reserve("10.9.0.3", "default/c", "node-c", network="default/blue", range="10.9.0.0/29")
    return bench


async def test_what_a_range_has_and_who_holds_it(fleet):
    found = await asked(fleet)
    (shared,) = found["ranges"]
    assert (shared["networks"], shared["size"], shared["held"], shared["free"]) == (["default/blue"], 6, 3, 3)
    assert {item["node"]: item["gone"] for item in shared["nodes"]} == {
        "node-a": "",
        "node-b": "it is tainted out-of-service",
        "node-c": "it has no Node object",
    }
    assert found["addresses"][0] == {
        "address": "10.9.0.1",
        "range": shared["range"],
        "pod": "default/a",
        "interface": "net1",
        "container": "c-a",
        "node": "node-a",
        "gone": "",
        "by": "multus-daemon",
        "network": "default/blue",
        "claim": "",
    }


async def test_of_one_node_or_one_address(fleet):
    fleet.shared("green", range="10.10.0.0/24")
    assert [item["address"] for item in (await asked(fleet, node="node-b"))["addresses"]] == ["10.9.0.2"]
    found = await asked(fleet, address="10.9.0.3")
    assert [item["pod"] for item in found["addresses"]] == ["default/c"]
    assert len(found["ranges"]) == 1


async def test_what_the_binary_holds_is_on_the_node_of_its_pod(bench):
    bench.node("node-a")
    bench.shared("blue", range="10.9.0.0/24")
    bench.pod("a", node="node-a")
    bench.reserve("10.9.0.1", "default/a")
    # Its own reservation, and one that was lost.
    bench.pool("10.9.0.0-24", "10.9.0.0/24", n1="default/a", n2="default/gone")
    found = await asked(bench)
    assert [(item["address"], item["node"], item["by"]) for item in found["addresses"]] == [
        ("10.9.0.1", "node-a", "whereabouts"),
        ("10.9.0.2", "", "whereabouts"),
    ]
    assert (found["ranges"][0]["size"], found["ranges"][0]["held"]) == (254, 2)


async def test_a_named_network_has_addresses_of_its_own(bench):
    bench.shared("blue", range="fd00::/120", network_name="cafe")
    bench.shared("green", range="fd00::/120")
    bench.reserve("cafe-fd00--1", "default/a", "node-a")
    bench.pool("cafe-fd00---120", "fd00::/120", n2="default/b")
    found = {item["networkName"]: item for item in (await asked(bench))["ranges"]}
    assert (found["cafe"]["networks"], found["cafe"]["held"]) == (["default/blue"], 2)
    assert found[""]["held"] == 0


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"range": "x", "allocations": {"1": {"id": "c", "podref": "default/a"}}},
        {"range": "10.8.0.0/24", "allocations": 7},
        {"range": "10.8.0.0/24", "allocations": {"1": None}},
        {"range": "10.8.0.0/24", "allocations": {"x": {"id": "c", "podref": "default/a"}}},
    ],
)
async def test_an_object_that_cannot_be_read_hides_no_other(fleet, spec, tmp_path, capsys):
    fleet.server.put(POOLS, {"metadata": {"namespace": "kube-system", "name": "broken"}, "spec": spec})
    fleet.pool("10.9.0.0-29", "10.9.0.0/29", n5="default/e")
    found = await asked(fleet)
    assert [item["address"] for item in found["addresses"]] == ["10.9.0.1", "10.9.0.2", "10.9.0.3", "10.9.0.5"]
    (note,) = found["notes"]
    assert note.startswith("ippools broken is not read whole: ")
    fleet.path = tmp_path
    await run(fleet, "release", "--node", "node-c")
    assert note.split(":")[0] in capsys.readouterr().err
    assert len(names(fleet)) == 3


async def test_ranges_that_overlap_count_what_they_share(bench):
    bench.shared("blue", range="10.9.0.0/24", range_start="10.9.0.10", range_end="10.9.0.19")
    bench.shared("green", range="10.9.0.0/24", exclude=["10.9.0.0/28"])
    bench.reserve("10.9.0.15", "default/a", "node-a")
    bench.reserve("10.9.0.17", "default/b", "node-a")
    found = {item["networks"][0]: (item["held"], item["free"]) for item in (await asked(bench))["ranges"]}
    assert found == {"default/blue": (2, 8), "default/green": (1, 238)}


async def test_a_range_of_no_network(bench):
    bench.reserve("10.9.0.1", "default/a", "node-a", range="10.9.0.0/24")
    (left,) = (await asked(bench))["ranges"]
    assert (left["range"], left["networks"], left["size"], left["free"], left["held"]) == (
        "10.9.0.0/24", [], None, None, 1,
    )  # fmt: skip


async def test_an_address_that_nothing_else_explains(bench, capsys):
    bench.reserve("10.9.0.1", "default/a")
    found = await asked(bench)
    assert [(item["range"], item["held"]) for item in found["ranges"]] == [("?", 1)]
    show.addresses(found, Listing(wide=True))
    assert "default/a" in capsys.readouterr().out


async def test_a_cluster_without_shared_addresses(bench, capsys):
    bench.server.fail(404, times=2, contains="whereabouts")
    found = await asked(bench)
    assert (found["ranges"], found["addresses"]) == ([], [])
    show.addresses(found, Listing())
    assert capsys.readouterr().err == "No addresses are shared\n"


async def test_what_people_see(fleet, capsys):
    show.addresses(await asked(fleet), Listing())
    printed = capsys.readouterr()
    assert "3 of 6" in printed.out
    assert "node-c: 1 it has no Node object" in printed.out
    assert "`kubectl multus addresses release --node node-c`" in printed.err
    assert "10.9.0.2" not in printed.out
    show.addresses(await asked(fleet), Listing(wide=True))
    assert "10.9.0.2" in capsys.readouterr().out


def run(bench, *words):
    """Run the command; its exit status. Its event loop needs a thread of its own."""
    path = bench.server.kubeconfig(bench.path / "config")

    def main():
        try:
            commands.main(["addresses", "--kubeconfig", str(path), *words])
        except SystemExit as end:
            return end.code
        return 0

    return asyncio.to_thread(main)


async def released(bench, **of):
    return await addresses.release(bench.cluster(), **{"node": "", "address": "", "confirmed": True, **of})


def names(bench, resource=RESERVATIONS):
    return [name for _, name in bench.server.objects[resource]]


@pytest.mark.parametrize(("node", "left"), [("node-b", ["10.9.0.1", "10.9.0.3"]), ("node-c", ["10.9.0.1", "10.9.0.2"])])
async def test_a_node_that_is_gone_is_released(fleet, node, left):
    found = await released(fleet, node=node)
    assert (len(found["released"]), found["kept"]) == (1, [])
    assert names(fleet) == left


async def test_what_others_hold_it_for_stays(fleet):
    item = fleet.server.get(RESERVATIONS, "kube-system", "10.9.0.3")
    item["metadata"]["finalizers"].append("example.com/other")
    assert len((await released(fleet, node="node-c"))["released"]) == 1
    left = fleet.server.get(RESERVATIONS, "kube-system", "10.9.0.3")["metadata"]
    assert left["finalizers"] == ["example.com/other"]
    assert "deletionTimestamp" in left


async def test_a_node_that_does_not_answer_is_for_a_person_to_judge(fleet):
    fleet.server.delete(NODES, "", "node-b")
    fleet.node("node-b", ready=False)
    assert [item["pod"] for item in (await released(fleet, node="node-b"))["released"]] == ["default/b"]


async def test_what_a_live_node_or_a_claim_holds_is_kept(fleet):
    found = await released(fleet, node="node-a")
    assert found["released"] == []
    assert found["kept"][0]["why"] == "node node-a is Ready, and pod default/a has it: delete the pod"
    fleet.reserve("10.9.0.4", "default/vm", "node-c", **{"ipam-claim": "default/vm-blue"})
    fleet.reserve("10.9.0.5", "default/data-0", "node-c", **{"ipam-claim": "statefulset/default/data/0/net1"})
    fleet.server.put(IPAM_CLAIMS, {"metadata": {"namespace": "default", "name": "vm-blue"}})
    # Whoever may not read StatefulSets.
    fleet.server.fail(403, contains="statefulsets")
    found = await released(fleet, node="node-c")
    assert [item["address"] for item in found["released"]] == ["10.9.0.3"]
    assert [item["why"].partition(" holds")[0] for item in found["kept"]] == [
        "IPAMClaim default/vm-blue",
        "statefulset/default/data/0/net1",
    ]
    assert names(fleet) == ["10.9.0.1", "10.9.0.2", "10.9.0.4", "10.9.0.5"]


async def test_what_a_deleted_claim_has_left_on_a_node_that_is_gone_is_released(fleet):
    fleet.reserve("10.9.0.4", "default/vm", "node-c", **{"ipam-claim": "default/vm-blue"})
    fleet.reserve("10.9.0.5", "default/data-0", "node-c", **{"ipam-claim": "statefulset/default/data/0/net1"})
    assert (await released(fleet, node="node-c"))["kept"] == []
    assert names(fleet) == ["10.9.0.1", "10.9.0.2"]


async def test_an_entry_of_a_pool_goes_and_the_others_stay(bench):
    bench.shared("blue", range="10.9.0.0/24")
    bench.reserve("10.9.0.2", "default/gone")
    bench.pool("10.9.0.0-24", "10.9.0.0/24", n1="default/a", n2="default/gone")
    assert len((await released(bench, address="10.9.0.2"))["released"]) == 1
    assert names(bench) == []
    assert list(bench.server.get(POOLS, "kube-system", "10.9.0.0-24")["spec"]["allocations"]) == ["1"]


@pytest.mark.parametrize("address", ["10.9.0.3", "10.9.0.5"])
async def test_what_changes_while_it_is_released_is_kept(fleet, address):
    fleet.pool("10.9.0.0-29", "10.9.0.0/29", n5="default/e")
    client, request = fleet.client, fleet.client.request

    async def changed(method, path, **options):
        """Somebody else is faster."""
        if method in ("DELETE", "PATCH"):
            fleet.server.delete(RESERVATIONS, "kube-system", "10.9.0.3")
            fleet.reserve("10.9.0.3", "default/new", "node-a")
            fleet.pool("10.9.0.0-29", "10.9.0.0/29", n5="default/new")
        return await request(method, path, **options)

    client.request = changed
    found = await released(fleet, address=address)
    assert [item["why"] for item in found["kept"]] == ["it has changed meanwhile: ask again"]
    assert "10.9.0.3" in names(fleet)
    assert fleet.server.get(POOLS, "kube-system", "10.9.0.0-29")["spec"]["allocations"]["5"]["podref"] == "default/new"


async def test_the_command_asks_before_it_releases(fleet, tmp_path, monkeypatch, capsys):
    fleet.path = tmp_path

    class Terminal:
        answer = "n\n"

        def isatty(self):
            return True

        def readline(self):
            return self.answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert await run(fleet, "release", "--node", "node-c") == 1
    assert len(names(fleet)) == 3
    printed = capsys.readouterr()
    assert printed.out == "would be released 10.9.0.3 of pod default/c\n"
    assert printed.err.endswith("Release them? [y/N] ")
    monkeypatch.setattr(Terminal, "answer", "y\n")
    assert await run(fleet, "release", "--node", "node-c") == 0
    assert capsys.readouterr().out.endswith("\nreleased 10.9.0.3 of pod default/c\n")
    assert await run(fleet, "release", "--node", "node-b", "--yes", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["released"][0]["address"] == "10.9.0.2"
    assert names(fleet) == ["10.9.0.1"]


async def test_without_a_terminal_it_needs_yes(fleet, tmp_path, monkeypatch, capsys):
    fleet.path = tmp_path
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert await run(fleet, "release", "--node", "node-c") == 1
    assert "--yes releases" in capsys.readouterr().err
    assert await run(fleet, "release") == 1
    assert "name --node or --address" in capsys.readouterr().err
    assert len(names(fleet)) == 3


async def test_the_exit_status(fleet, tmp_path, capsys):
    fleet.path = tmp_path
    assert await run(fleet) == 1
    for node in ("node-b", "node-c"):
        await released(fleet, node=node)
    assert await run(fleet) == 0
    for number in range(2, 7):
        fleet.reserve(f"10.9.0.{number}", f"default/p{number}", "node-a")
    assert await run(fleet, "-o", "wide") == 1
    assert "0 of 6" in capsys.readouterr().out
