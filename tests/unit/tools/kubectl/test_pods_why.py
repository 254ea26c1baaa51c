"""`kubectl multus why`: the cause that the node names, and what to do."""

import json

import pytest

from multus_tools.command_line import NotThereError
from multus_tools.kubectl import pods, show
from tests.unit.tools.kubectl.conftest import explain_reply, hang, status_reply, trace_reply
from tests.unit.tools.kubectl.test_nodes_leaks import leak

MISSING = "cannot find a network-attachment-definition (blue) in namespace (default)"
HINT = "; more: kubectl -n kube-system exec kube-multus-ds-x -- multusctl explain default/web"
ATTACHED = json.dumps([{"name": "cluster", "interface": "eth0"}, {"name": "default/blue", "interface": "net1"}])


def node_of(explained, *requests, leaks=(), differences=()):
    """A daemon that explains, traces, and knows what is left over and what is broken."""

    async def program(execution):
        if execution.words[1] == "explain":
            await execution.answer(explained, 1 if explained["problem"] else 0)
        elif execution.words[1] == "attachments":
            await execution.answer({"schema": "multusctl.attachments/v1", "containers": list(leaks)})
        elif execution.words[1] == "status":
            await execution.answer(status_reply(broken=len(differences), differences=list(differences)))
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
    bench.event("web", uid, f"{problem}{HINT}")
    bench.event("web", uid, "scheduled", type="Normal", reason="Scheduled", source=None, reportingComponent="scheduler")
    found = await look()
    assert found["schema"] == "kubectl-multus.why/v1"
    assert (found["cause"], found["text"], found["source"]) == (MISSING, problem, "explain")
    assert found["advice"] == "there is one in namespace x"
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


async def test_a_command_of_the_node_is_shown_as_it_works_from_here(bench, look):
    bench.node("node-a", node_of(explain_reply(problem="no plugin; `multusctl doctor` names others")))
    bench.pod("web", "blue")
    words = "kubectl -n kube-system exec kube-multus-ds-node-a -c kube-multus -- multusctl doctor"
    assert (await look())["advice"] == f"`{words}` names others"


SHIM = 'plugin type="multus-shim" name="multus" failed (add): '


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ('failed to find plugin "multus-shim" in path [/opt/cni/bin]', "delete pod kube-multus-ds-node-a"),
        (
            f"{SHIM}netplugin failed with no error message: signal: segmentation fault",
            "delete pod kube-multus-ds-node-a",
        ),
        (f"{SHIM}multus daemon does not listen on /run/multus/multus.sock", "describe pod kube-multus-ds-node-a"),
    ],
)
async def test_the_runtime_does_not_reach_the_daemon(bench, look, message, advice):
    """The daemon knows nothing of it: the kubelet's Event is the newest."""
    bench.node("node-a", node_of(explain_reply()))
    uid = bench.pod("web", "blue")
    bench.event("web", uid, "an error of the daemon, before that")
    bench.event("web", uid, f"rpc error: {message}", reason="FailedCreatePodSandBox", source={"component": "kubelet"})
    found = await look()
    assert (found["source"], advice in found["advice"]) == ("event", True), found


async def test_an_add_that_runs_is_told_at_once(bench, look):
    doing = {"what": 'plugin "fabric" of network default/blue', "seconds": 7.2, "limit": 120.0}
    running = {"verb": "ADD", "began": 5.0, "seconds": 7.4, "step": "planned and recorded", "doing": [doing]}
    bench.node("node-a", node_of(explain_reply(running=[running])))
    bench.pod("web", "blue")
    found = await look()
    assert found["cause"] == 'ADD has run for 7 s, in plugin "fabric" of network default/blue for 7 s, up to 120 s'
    running["doing"] = []
    assert (await look())["cause"] == "ADD has run for 7 s, since the step: planned and recorded"


@pytest.mark.parametrize(
    ("annotations", "cause"),
    [
        ({"k8s.v1.cni.cncf.io/network": "blue"}, "annotation k8s.v1.cni.cncf.io/network has no meaning: is "),
        ({}, "network default/blue: key 'interfce' is unknown"),
    ],
)
async def test_what_was_not_asked_as_it_was_meant(bench, look, annotations, cause):
    bench.node("node-a", node_of(explain_reply(attached=True)))
    metadata = {"namespace": "default", "name": "web", "uid": "u", "annotations": annotations}
    bench.server.put("pods", {"metadata": metadata, "spec": {"nodeName": "node-a"}, "status": {"phase": "Running"}})
    if not annotations:
        bench.event("web", "u", f"{cause} (pod default/web)", reason="UnknownKey")
    assert (await look())["cause"].startswith(cause)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (11, "the runtime tries again by itself"),
        (5, "-- multusctl doctor` checks"),
        (100, "own log says more; kubectl -n kube-system exec kube-multus-ds-node-a -c kube-multus -- multusctl trace"),
    ],
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
    bench.event(
        "web",
        uid,
        f"{MISSING} (pod default/web){HINT}",
    )
    found = await look(node_seconds=3.0)
    assert (found["cause"], found["source"], found["daemons"]) == (MISSING, "event", 0)
    assert found["unanswered"][0]["problem"] == "no answer within 3 s"


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


async def test_an_attachment_that_differs_from_its_record(bench, look):
    def of(pod, interface):
        text = f'interface "{interface}" is not there'
        return {"pod": pod, "network": "default/blue", "interface": interface, "difference": text}

    differences = (of("default/other", "net7"), of("default/web", "net1"))
    bench.node("node-a", node_of(explain_reply(attached=True), differences=differences))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    assert found["text"] == 'network default/blue, interface net1: interface "net1" is not there'
    assert (found["source"], found["lacks"]) == ("drift", [])
    assert "-- multusctl repair default/web` brings back" in found["advice"]


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
    with pytest.raises(NotThereError, match="^there is no pod default/web$"):
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
    assert second == "  -> correct the network's configuration"
    assert "ADD: runs, at: plugin x" in shown
    assert "(4 times)" in shown
    assert [line for line in shown.splitlines() if line.endswith("only once")] != []
    assert "\x1b[2J" not in shown
