"""`kubectl multus networks`."""

import json

import pytest

from multus_daemon.cluster.kube.errors import ApiUnavailableError
from multus_tools.command_line import CommandError, NotThereError
from multus_tools.kubectl import nodes, show
from multus_tools.tables import Listing
from tests.unit.tools.kubectl.conftest import hang


def node_of(**plugins):
    found = [
        {"type": name.replace("_", "-"), "servedBy": "built-in", "problem": problem}
        for name, problem in plugins.items()
    ]
    return lambda execution: execution.answer({"schema": "multusctl.plugins/v1", "plugins": found})


def config(*plugins):
    return json.dumps({"cniVersion": "1.0.0", "name": "n", "plugins": list(plugins)})


async def test_who_uses_it_and_which_nodes_lack_what(bench):
    bench.node("node-a", node_of(bridge="", host_local="", tuning=""))
    bench.node("node-b", node_of(bridge="", tuning="is a program for aarch64, and this node is x86_64"))
    bench.node("node-c", hang)
    ipam = {"type": "host-local"}
    bench.network("blue", config({"type": "bridge", "ipam": ipam}, {"type": "tuning"}))
    bench.network("green", "", namespace="other")
    bench.network("red", "{")
    bench.pod("web-1", "blue,blue,other/green")
    bench.pod("web-2", "other/green", node="", status={"phase": "Pending"})
    bench.pod("gone", "blue", status={"phase": "Succeeded"})
    found = await nodes.networks(bench.cluster(node_seconds=3.0), namespace="", name="")
    blue, red, green = found["networks"]
    assert blue == {
        "network": "default/blue",
        "problem": "",
        "plugins": ["bridge", "host-local", "tuning"],
        "onNodes": False,
        "pods": ["default/web-1"],
        "missing": [
            {"node": "node-b", "plugin": "host-local", "problem": "is not on the node"},
            {
                "node": "node-b",
                "plugin": "tuning",
                "problem": "is a program for aarch64, and this node is x86_64",
            },
        ],
    }
    assert (red["network"], red["plugins"], red["missing"]) == ("default/red", [], [])
    assert red["problem"]
    assert (green["onNodes"], green["problem"]) == (True, "")
    assert green["pods"] == ["default/web-1", "default/web-2"]
    assert (found["daemons"], [item["node"] for item in found["unanswered"]]) == (2, ["node-c"])


async def test_one_network(bench):
    bench.node("node-a", node_of(ptp=""))
    for name in ("blue", "green"):
        bench.network(name, '{"type": "ptp"}')
    found = await nodes.networks(bench.cluster(), namespace="default", name="blue")
    assert [item["network"] for item in found["networks"]] == ["default/blue"]


async def test_none_needs_no_node(bench):
    bench.node("node-a", hang)
    found = await nodes.networks(bench.cluster(), namespace="", name="")
    assert (found["networks"], bench.asked) == ([], [])


async def test_a_cluster_without_the_definition(bench):
    bench.server.fail(404, contains="network-attachment-definitions")
    with pytest.raises(ApiUnavailableError, match="does not know NetworkAttachmentDefinitions"):
        await nodes.networks(bench.cluster(), namespace="", name="")


async def test_one_that_does_not_exist(bench):
    with pytest.raises(CommandError, match="^there is no NetworkAttachmentDefinition default/red; "):
        await nodes.networks(bench.cluster(), namespace="default", name="red")
    with pytest.raises(CommandError, match="^there is no NetworkAttachmentDefinition red; "):
        await nodes.networks(bench.cluster(), namespace="", name="red")
    with pytest.raises(NotThereError, match="^there is no namespace other$"):
        await nodes.networks(bench.cluster(), namespace="other", name="red")


async def test_wide_shows_all_pods(bench, capsys):
    bench.network("blue", "{}")
    for number in range(7):
        bench.pod(f"web-{number}", "blue")
    found = await nodes.networks(bench.cluster(), namespace="default", name="")
    show.networks(found, Listing())
    assert "default/web-4 and 2 more" in capsys.readouterr().out
    show.networks(found, Listing(wide=True))
    assert "default/web-5, default/web-6" in capsys.readouterr().out


async def test_what_people_see(bench, capsys):
    bench.node("node-a", node_of())
    bench.network("blue", '{"type": "ptp"}')
    bench.network("red", "{")
    bench.pod("web", "blue")
    show.networks(await nodes.networks(bench.cluster(), namespace="", name=""), Listing())
    shown = capsys.readouterr().out
    assert "default/blue" in shown
    assert "node-a" in shown
    assert "1: default/web" in shown
