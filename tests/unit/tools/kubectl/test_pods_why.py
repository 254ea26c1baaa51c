"""`kubectl multus why`: the cause that the node names, and what to do."""

import json

import pytest

from multus_daemon.cluster.kube.errors import ApiUnavailableError
from multus_daemon.tools.kubectl import pods, show
from tests.unit.tools.kubectl.conftest import explain_reply, hang, trace_reply
from tests.unit.tools.kubectl.test_nodes_leaks import leak

MISSING = "cannot find a network-attachment-definition (blue) in namespace (default)"
ATTACHED = json.dumps([{"name": "cluster", "interface": "eth0"}, {"name": "default/blue", "interface": "net1"}])


def node_of(explained, *requests, leaks=()):
    """A daemon that explains, traces, and knows what is left over."""

    async def program(execution):
        if execution.words[1] == "explain":
            await execution.answer(explained, 1 if explained["problem"] else 0)
        elif execution.words[1] == "attachments":
            await execution.answer({"schema": "multusctl.attachments/v1", "containers": list(leaks)})
        else:
            await execution.answer(trace_reply(*requests))

    return program


def failed(text, verb="ADD", code=7):
    return {"verb": verb, "began": 5.0, "code": code, "text": text}


@pytest.fixture
def look(bench):
    async def run(name="web", namespace="default", **options):
        return await pods.why(bench.cluster(**options), namespace=namespace, name=name)

    return run


async def test_what_explain_says_is_the_cause(bench, look):
    problem = f"{MISSING} (pod default/web); there is one in namespace x"
    request = {
        "verb": "ADD",
        "began": 5.0,
        "seconds": 0.1,
        "error": {"code": 7, "text": problem},
        "steps": [{"what": "its turn", "at": 0.0, "seconds": 0.0}],
    }
    bench.node("node-a", node_of(explain_reply(problem=problem), request))
    uid = bench.pod("web", "blue")
    bench.event("web", uid, f"{problem}; on the node, `multusctl explain default/web` says more")
    bench.event("web", uid, "scheduled", type="Normal", reason="Scheduled", source=None, reportingComponent="scheduler")
    found = await look()
    assert found["schema"] == "kubectl-multus.why/v1"
    assert (found["cause"], found["text"], found["source"]) == (MISSING, problem, "explain")
    assert found["advice"].startswith("there is one in namespace x; kubectl get network-attachment-definitions -n ")
    assert (found["node"], found["daemon"], found["daemons"]) == ("node-a", "kube-system/kube-multus-ds-node-a", 1)
    assert (found["lacks"], found["attached"]) == (["default/blue"], [])
    assert found["steps"] == [{"what": "networks", "result": "", "problem": problem}]
    assert found["requests"] == [{"verb": "ADD", "began": 5.0, "seconds": 0.1, "error": problem, "step": "its turn"}]
    events = [(event["reason"], event["component"]) for event in found["events"]]
    assert events == [("NoNetworkFound", "multus"), ("Scheduled", "scheduler")]
    assert bench.asked[0] == ("node-a", ["multusctl", "explain", "default/web", "--json"])
    assert sorted(bench.asked[1:]) == [
        ("node-a", ["multusctl", "attachments", "default/web", "--leaks", "--json"]),
        ("node-a", ["multusctl", "trace", "default/web", "--last", "5", "--json"]),
    ]
    assert (found["leftovers"], found["notes"]) == ([], [])


async def test_what_a_container_before_has_left_is_told(bench, look, capsys):
    """The port, or address, that the pod waits for is its predecessor's."""
    left = leak("default/web", advice="free by hand what it holds, then: multusctl attachments forget 0123456789abcdef")
    bench.node("node-a", node_of(explain_reply(errors=[failed("port 7 is taken")]), leaks=[left]))
    bench.pod("web", "blue")
    found = await look()
    (entry,) = found["leftovers"]
    assert (entry["container"], entry["problem"], entry["advice"]) == (
        *("0123456789abcdef", "its pod is gone"),
        left["advice"],
    )
    show.why(found)
    assert (
        "  left over of container 0123456789abc: its pod is gone\n"
        "    -> free by hand what it holds, then: multusctl attachments forget 0123456789abcdef\n"
    ) in capsys.readouterr().out


async def test_a_daemon_that_does_not_tell_what_is_left(bench, look):
    async def program(execution):
        if execution.words[1] == "attachments":
            await execution.end(1)
        else:
            found = explain_reply(problem=MISSING) if execution.words[1] == "explain" else trace_reply()
            await execution.answer(found)

    bench.node("node-a", program)
    bench.pod("web", "blue")
    found = await look()
    assert (found["cause"], found["leftovers"]) == (MISSING, [])
    assert found["notes"][0].startswith("cannot determine the pod's leftovers: ")


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        (
            {
                "steps": [{"what": "plugins of b/blue", "problem": "no plugin"}],
                "networks": [{"network": "b/blue", "interface": "net1", "problem": "no plugin"}],
            },
            "kubectl get network-attachment-definitions -n b blue -o yaml; kubectl multus networks b/blue",
        ),
        (
            {
                "steps": [{"what": "plugins of primary", "problem": "no plugin"}],
                "networks": [{"network": "primary", "interface": "eth0", "problem": "no plugin"}],
            },
            "kubectl -n kube-system exec kube-multus-ds-node-a -c kube-multus -- multusctl plugins",
        ),
        ({"steps": [{"what": "pod", "problem": "no"}]}, "does the daemon of node node-a reach the API server?"),
        (
            {"steps": [{"what": "configuration", "problem": "no"}]},
            "kubectl -n kube-system exec kube-multus-ds-node-a -c kube-multus -- multusctl doctor",
        ),
    ],
)
async def test_advice_by_the_step_that_failed(bench, look, fields, advice):
    bench.node("node-a", node_of(explain_reply(problem="x", **fields)))
    bench.pod("web", "blue")
    assert advice in (await look())["advice"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [(11, "the runtime tries again by itself"), (5, "multusctl doctor"), (100, "kubectl multus leaks")],
)
async def test_what_could_be_planned_and_failed(bench, look, code, advice):
    """IPAM without addresses: no plan shows it."""
    errors = [failed("the first"), failed("no addresses left (pod default/web)", code=code), failed("x", "DEL")]
    bench.node("node-a", node_of(explain_reply(errors=errors)))
    bench.pod("web", "blue")
    found = await look()
    assert (found["cause"], found["source"]) == ("no addresses left", "request")
    assert advice in found["advice"]


async def test_a_pod_that_does_not_go(bench, look):
    errors = [failed("could not be removed (pod default/web)", "DEL"), failed("an ADD")]
    bench.node("node-a", node_of(explain_reply(problem="its network is gone", attached=True, errors=errors)))
    bench.server.put("pods", {
        "metadata": {"namespace": "default", "name": "web", "deletionTimestamp": "2026-11-22T10:00:00Z"},
        "spec": {"nodeName": "node-a"},
    })  # fmt: skip
    found = await look()
    assert (found["cause"], found["source"]) == ("could not be removed", "request")


async def test_a_node_without_an_answer_leaves_the_event(bench, look):
    bench.node("node-a", hang)
    uid = bench.pod("web", "blue")
    bench.event("web", uid, f"{MISSING} (pod default/web); on the node, `multusctl explain default/web` says more")
    found = await look(node_seconds=0.2)
    assert (found["cause"], found["source"], found["daemons"]) == (MISSING, "event", 0)
    assert found["unanswered"][0]["problem"] == "no answer within 0.2 s"


async def test_a_node_without_an_answer_and_no_event(bench, look):
    bench.node("node-a")
    bench.daemon("node-a", hang, waiting={"reason": "CrashLoopBackOff"})
    bench.pod("web", "blue")
    found = await look()
    assert found["source"] == "daemon"
    assert found["cause"] == (
        "the daemon of node node-a can't be asked: the daemon's pod kube-system/kube-multus-ds-node-a is Running: "
        "CrashLoopBackOff"
    )
    assert "kubectl -n kube-system logs kube-multus-ds-node-a -c kube-multus" in found["advice"]


async def test_a_pod_that_asks_for_nothing_and_has_no_cluster_network(bench, look):
    bench.node("node-a", node_of(explain_reply(problem="no cluster network")))
    bench.pod("web")
    found = await look()
    assert (found["cause"], found["source"], found["lacks"]) == ("no cluster network", "explain", [])


@pytest.mark.parametrize(("address", "source"), [("", "daemon"), ("10.1.0.2", "")])
async def test_a_pod_that_asks_for_nothing_on_a_node_without_a_daemon(bench, look, address, source):
    """Its address says that it has the cluster network."""
    bench.node("node-a")
    bench.pod("web", status={"phase": "Running", "podIP": address})
    assert (await look())["source"] == source


async def test_nothing_is_wrong(bench, look):
    bench.node("node-a", node_of(explain_reply(attached=True, errors=[failed("of the last container")])))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    assert (found["cause"], found["advice"], found["lacks"], found["notes"]) == ("", "", [], [])
    assert found["attached"] == ["cluster@eth0", "default/blue@net1"]


async def test_attached_and_not_again(bench, look):
    bench.node("node-a", node_of(explain_reply(problem=MISSING, attached=True)))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    assert found["cause"] == ""
    assert found["notes"] == [f"attached, but an ADD of a new container would fail: {MISSING}"]


async def test_attached_and_not_told(bench, look):
    bench.node("node-a", node_of(explain_reply(attached=True)))
    uid = bench.pod("web", "blue")
    assert "network-status does not say so" in (await look())["cause"]
    bench.event("web", uid, "network-status: 403", reason="NetworkStatusNotWritten")
    assert (await look())["cause"] == "network-status: 403"


async def test_the_runtime_has_not_asked(bench, look):
    bench.node("node-a", node_of(explain_reply()))
    bench.pod("web", "blue")
    found = await look()
    assert found["cause"].startswith("no network has been asked for yet")
    assert found["advice"] == "kubectl -n default describe pod web"


async def test_a_pod_on_no_node(bench, look):
    uid = bench.pod("web", "blue", node="")
    bench.event("web", uid, "0/3 nodes", reason="FailedScheduling", source={"component": "default-scheduler"})
    found = await look()
    assert (found["cause"], found["source"]) == ("the pod is on no node yet: 0/3 nodes", "pod")
    assert bench.asked == []


async def test_an_annotation_that_can_not_be_read(bench, look):
    bench.node("node-a", hang)
    bench.pod("web", "[")
    found = await look()
    assert found["source"] == "annotation"
    assert found["advice"].startswith("correct the annotation in the pod's template")


@pytest.mark.parametrize(
    ("fields", "note"),
    [({"hostNetwork": True}, "host's network"), ({"status": {"phase": "Failed"}}, "has finished (Failed)")],
)
async def test_pods_that_have_no_networks(bench, look, fields, note):
    bench.node("node-a", hang)
    bench.pod("web", "blue", **fields)
    found = await look()
    assert (found["cause"], found["lacks"]) == ("", [])
    assert note in found["notes"][0]


async def test_no_such_pod(bench, look):
    with pytest.raises(ApiUnavailableError, match="there is no pod default/web"):
        await look()


async def test_what_people_see(bench, look, capsys):
    running = {"verb": "ADD", "began": 5.0, "seconds": None, "error": None, "steps": [{"what": "plugin x"}]}
    bench.node("node-a", node_of(explain_reply(problem=f"{MISSING} (pod default/web)"), running))
    uid = bench.pod("web", "blue")
    bench.event("web", uid, f"{MISSING} \x1b[2J", count=4)
    bench.event("web", uid, "only once", count=1)
    show.why(await look())
    shown = capsys.readouterr().out
    first, second = shown.splitlines()[:2]
    assert first == f"default/web on node node-a: {MISSING} (pod default/web)"
    assert second.startswith("  -> kubectl get network-attachment-definitions -n default")
    assert "ADD: runs, at: plugin x" in shown
    assert "(4 times)" in shown
    assert [line for line in shown.splitlines() if line.endswith("only once")] != []
    assert "\x1b[2J" not in shown
