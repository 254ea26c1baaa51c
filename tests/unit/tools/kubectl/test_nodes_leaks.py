"""`kubectl multus leaks`."""

import pytest

from multus_tools.command_line import NotThereError
from multus_tools.kubectl import nodes, show
from multus_tools.tables import Listing
from tests.unit.tools.kubectl.conftest import hang


def leak(pod, **fields):
    attachment = {"network": "default/blue", "interface": "net1", "addresses": ["10.1.0.2/24"], "plugins": []}
    return {
        "container": "0123456789abcdef",
        "pod": pod,
        "podUid": "u",
        "netns": "",
        "since": 5.0,
        "problem": "its pod is gone",
        "failedDeletes": 2,
        "attachments": [attachment],
        **fields,
    }


def node_of(*containers):
    found = {"schema": "multusctl.attachments/v1", "source": "daemon", "containers": list(containers)}
    return lambda execution: execution.answer(found)


async def test_of_all_nodes(bench):
    bench.node("node-a", node_of(leak("default/web"), leak("")))
    bench.node("node-b", node_of())
    bench.node("node-c", hang)
    found = await nodes.leaks(bench.cluster(node_seconds=3.0), namespace="")
    assert (found["schema"], found["daemons"]) == ("kubectl-multus.leaks/v1", 2)
    assert found["containers"][0] == {
        "node": "node-a",
        "daemon": "kube-system/kube-multus-ds-node-a",
        "container": "0123456789abcdef",
        "pod": "default/web",
        "since": 5.0,
        "problem": "its pod is gone",
        "advice": "",
        "failedDeletes": 2,
        "attachments": [{"network": "default/blue", "interface": "net1", "addresses": ["10.1.0.2/24"]}],
    }
    assert len(found["containers"]) == 2
    assert [item["node"] for item in found["unanswered"]] == ["node-c"]
    assert bench.asked[0] == ("node-a", ["multusctl", "attachments", "--leaks", "--json"])


async def test_of_one_namespace(bench):
    bench.node("node-a", node_of(leak("default/web"), leak("other/web"), leak("")))
    found = await nodes.leaks(bench.cluster(), namespace="other")
    assert [item["pod"] for item in found["containers"]] == ["other/web"]


async def test_what_people_see(bench, capsys):
    problem = "its DEL failed twice and is tried again: no such device"
    bench.node("node-a", node_of(leak("default/web"), leak("", since=1e30, problem=problem, advice="free it")))
    found = await nodes.leaks(bench.cluster(), namespace="")
    show.leaks(found, Listing())
    head, web, other = capsys.readouterr().out.splitlines()
    assert head.split() == ["node", "pod", "container", "since", "problem"]
    assert web.split()[:3] == ["node-a", "default/web", "0123456789abc"]
    assert other.endswith("   its DEL failed twice and is tried again")
    show.leaks(found, Listing(wide=True))
    wide = capsys.readouterr().out.splitlines()[2]
    assert wide.split("   ")[-3:] == ["default/blue 10.1.0.2/24", problem, "free it"]


async def test_nothing_is_said_on_standard_error(bench, capsys):
    bench.node("node-a", node_of())
    show.leaks(await nodes.leaks(bench.cluster(), namespace=""), Listing())
    assert capsys.readouterr() == ("", "Nothing is left over\n")
    show.leaks(await nodes.leaks(bench.cluster(), namespace="default"), Listing())
    assert capsys.readouterr() == ("", "Nothing is left over in namespace default; -A looks in all\n")


async def test_what_a_deleted_namespace_has_left(bench):
    bench.node("node-a", node_of(leak("gone/web")))
    assert len((await nodes.leaks(bench.cluster(), namespace="gone"))["containers"]) == 1
    with pytest.raises(NotThereError, match="^there is no namespace other$"):
        await nodes.leaks(bench.cluster(), namespace="other")
