"""`kubectl multus pods`."""

import json

import pytest

from multus_daemon.cluster.kube.errors import ApiUnavailableError
from multus_tools.command_line import NotThereError
from multus_tools.kubectl import pods, show
from multus_tools.tables import Listing
from tests.unit.tools.kubectl.conftest import explain_reply, hang

MISSING = "cannot find a network-attachment-definition (blue) in namespace (default)"
HINT = "; more: kubectl -n kube-system exec kube-multus-ds-x -- multusctl explain default/web"
ATTACHED = json.dumps([{"name": "default/blue", "interface": "net1"}])


@pytest.fixture
def look(bench):
    async def run(namespace="", **options):
        return await pods.pods(bench.cluster(**options), namespace=namespace)

    return run


async def test_by_cause_from_the_events(bench, look):
    bench.node("node-a", hang)
    for name in ("web-1", "web-2"):
        uid = bench.pod(name, "blue,green")
        bench.event(name, uid, f"{MISSING} (pod default/{name}){HINT}")
    uid = bench.pod("db", "green")
    bench.event("db", uid, "an old one (pod default/db)")
    bench.event("db", uid, "no address left (pod default/db); look elsewhere")
    found = await look()
    assert found["causes"] == [
        {"cause": MISSING, "count": 2, "pods": ["default/web-1", "default/web-2"]},
        {"cause": "no address left", "count": 1, "pods": ["default/db"]},
    ]
    assert found["pods"][1] == {
        "pod": "default/web-1",
        "node": "node-a",
        "lacks": ["default/blue", "default/green"],
        "cause": MISSING,
        "text": f"{MISSING} (pod default/web-1)",
        "source": "event",
    }
    # No daemon is asked for what Events say.
    assert (bench.asked, found["daemons"], found["unanswered"]) == ([], 0, [])


async def test_what_no_event_tells_is_asked_of_the_node(bench, look):
    async def program(execution):
        problem = "no such plugin (pod x); install it" if "default/web-1" in execution.words else ""
        await execution.answer(explain_reply(problem=problem), 1 if problem else 0)

    bench.node("node-a", program)
    bench.pod("web-1", "blue")
    bench.pod("web-2", "blue")
    found = await look()
    assert [(item["pod"], item["cause"], item["source"]) for item in found["pods"]] == [
        ("default/web-1", "no such plugin", "explain"),
        (
            "default/web-2",
            "no network has been asked for yet: the kubelet waits for something else, or has only just begun",
            "explain",
        ),
    ]
    assert found["daemons"] == 1
    assert sorted(words[2] for _, words in bench.asked) == ["default/web-1", "default/web-2"]


async def test_nodes_that_do_not_answer_are_the_cause_and_named_once(bench, look):
    bench.node("node-a", hang)
    bench.node("node-b")
    bench.pod("web-1", "blue")
    bench.pod("web-2", "blue")
    bench.pod("web-3", "blue", node="node-b")
    bench.pod("web-4", "blue", node="node-c")
    found = await look(node_seconds=3.0)
    assert {item["pod"]: item["cause"] for item in found["pods"]} == {
        "default/web-1": "the daemon of node node-a can't be asked: no answer within 3 s",
        "default/web-2": "the daemon of node node-a can't be asked: no answer within 3 s",
        "default/web-3": "the daemon of node node-b can't be asked: "
        "no daemon: no pod of a DaemonSet with the label app=multus is on the node",
        "default/web-4": "the daemon of node node-c can't be asked: is not a Linux node of this cluster",
    }
    assert [item["node"] for item in found["unanswered"]] == ["node-a", "node-b", "node-c"]


async def test_whose_networks_are_there_is_not_named(bench, look):
    bench.node("node-a", hang)
    bench.pod("has", "blue", attached=ATTACHED)
    bench.pod("none")
    bench.pod("unscheduled", "blue", node="")
    bench.pod("of-the-host", "blue", hostNetwork=True)
    bench.pod("finished", "blue", status={"phase": "Succeeded"})
    uid = bench.pod("mended", attached=ATTACHED)
    bench.event("mended", uid, "an error of before")
    found = await look()
    assert (found["pods"], found["causes"]) == ([], [])


async def test_the_cluster_network_that_the_runtime_tells_of(bench, look):
    """The daemon is away: only the kubelet has an Event."""
    bench.node("node-a", hang)
    uid = bench.pod("web")
    message = (
        'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "0123": '
        'plugin type="multus-shim" name="multus" failed (add): no daemon answers; start it'
    )
    bench.event("web", uid, message, reason="FailedCreatePodSandBox", source={"component": "kubelet"})
    bench.event("web", uid, "no volume", reason="FailedMount", source={"component": "kubelet"})
    (item,) = (await look())["pods"]
    assert (item["lacks"], item["cause"]) == (["(cluster network)"], "no daemon answers")
    # Another plugin of the runtime attached this pod.
    uid = bench.pod("web", status={"phase": "Pending", "podIP": "10.1.0.2"})
    assert (await look())["pods"] == []


async def test_an_annotation_that_can_not_be_read_needs_no_node(bench, look):
    bench.node("node-a", hang)
    bench.pod("web", "[5]")
    (item,) = (await look())["pods"]
    assert item["source"] == "annotation"
    assert "each network must be an object, not" in item["cause"]


async def test_of_one_namespace(bench, look):
    bench.node("node-a", hang)
    bench.pod("web", "blue")
    bench.pod("web", "[", namespace="other")
    assert [item["pod"] for item in (await look("other"))["pods"]] == ["other/web"]
    assert all("/namespaces/other/" in path for _, path in bench.server.requests)


async def test_what_people_see(bench, look, capsys):
    bench.node("node-a", hang)
    uid = bench.pod("web", "blue")
    bench.event("web", uid, f"{MISSING} (pod default/web)")
    found = await look()
    show.pods(found, Listing())
    shown = capsys.readouterr().out
    assert "default/web" in shown
    assert "kubectl multus why" in shown
    show.pods(found, Listing(headers=False, wide=True))
    assert capsys.readouterr().out == f"default/web   node-a   default/blue   {MISSING} (pod default/web)\n"
    bench.server.delete("pods", "default", "web")
    show.pods(await look("default"), Listing())
    assert capsys.readouterr() == ("", "No pods lack networks in namespace default; -A looks in all\n")
    show.pods(await look(), Listing())
    assert capsys.readouterr() == ("", "No pods lack networks\n")


async def test_a_namespace_that_does_not_exist(bench, look):
    with pytest.raises(NotThereError, match="^there is no namespace other$"):
        await look("other")
    # Without the right to look it is an empty table.
    bench.server.fail(403, contains="/api/v1/namespaces/other")
    await bench.cluster().require_namespace("other")
    bench.server.fail(500, times=float("inf"), contains="/api/v1/namespaces/other")
    with pytest.raises(ApiUnavailableError):
        await bench.cluster().require_namespace("other")
