"""`kubectl multus why`: the cause that the node names, and what to do."""

import json

import pytest

from multus_daemon.answers import status
from multus_tools.command_line import NotThereError
from multus_tools.kubectl import pods, show
from tests.unit.tools.kubectl.conftest import explain_reply, hang, status_reply
from tests.unit.tools.kubectl.test_nodes_leaks import leak

NODE_PROBLEM = "/etc/cni/net.d is missing on the node; delete the daemon's pod"

MISSING = "cannot find a network-attachment-definition (blue) in namespace (default)"
HINT = "; more: kubectl -n kube-system exec kube-multus-ds-x -- multusctl explain default/web"
ATTACHED = json.dumps([{"name": "cluster", "interface": "eth0"}, {"name": "default/blue", "interface": "net1"}])


def node_of(explained):
    """A daemon that explains."""

    async def program(execution):
        assert execution.words[1] == "explain"
        await execution.answer(explained, 1 if explained["problem"] else 0)

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
    request = {"verb": "ADD", "began": 5.0, "seconds": 0.1, "error": problem, "step": "its turn"}
    bench.node("node-a", node_of(explain_reply(problem=problem, requests=[request])))
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
    assert found["requests"] == [request]
    events = [(event["reason"], event["component"]) for event in found["events"]]
    assert events == [("NoNetworkFound", "multus"), ("Scheduled", "scheduler")]
    assert bench.asked == [("node-a", ["multusctl", "explain", "default/web", "--json"])]
    assert (found["leftovers"], found["notes"]) == ([], [])


async def test_what_a_container_before_has_left_is_told(bench, look, capsys):
    """The port, or address, that the pod waits for is its predecessor's."""
    left = leak("default/web", advice="free by hand what it holds, then: multusctl attachments forget 0123456789abcdef")
    bench.node("node-a", node_of(explain_reply(errors=[failed("port 7 is taken")], leftovers=[left])))
    bench.pod("web", "blue")
    found = await look()
    (entry,) = found["leftovers"]
    assert (entry["node"], entry["container"], entry["problem"], entry["advice"]) == (
        *("node-a", "0123456789abcdef", "its pod is gone"),
        left["advice"],
    )
    show.why(found)
    assert (
        "  left over of container 0123456789abc: its pod is gone\n"
        "    -> free by hand what it holds, then: multusctl attachments forget 0123456789abcdef\n"
    ) in capsys.readouterr().out


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


async def test_an_address_that_another_pod_has_too(bench, look):
    bench.node("node-a", node_of(explain_reply(attached=True)))
    metadata = {"namespace": "default", "name": "web", "uid": "u"}
    bench.server.put("pods", {"metadata": metadata, "spec": {"nodeName": "node-a"}, "status": {"phase": "Running"}})
    bench.event("web", "u", "10.9.0.1 is also that of pod default/other; delete one of them", reason="AddressTaken")
    found = await look()
    assert found["cause"].startswith("10.9.0.1 is also that of pod")
    assert found["advice"] == "delete one of them"


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


async def test_nothing_is_wrong(bench, look, capsys):
    attached = explain_reply(attached=True, errors=[failed("of the last container")])
    bench.node("node-a", node_of({**attached, "compared": 1}))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    assert (found["cause"], found["advice"], found["lacks"], found["notes"]) == ("", "", [], [])
    assert found["attached"] == ["cluster@eth0", "default/blue@net1"]
    show.why(found)
    shown = capsys.readouterr().out
    assert "has its networks: its interfaces were compared with the kernel just now" in shown
    assert "  looked at: annotations, 0 Events, plan, 0 requests, records, the kernel\n" in shown


@pytest.mark.parametrize("passed_over", [[], [{"pod": "default/web", "problem": "a request is at work on it"}]])
async def test_without_a_look_at_the_kernel_nothing_is_called_in_order(bench, look, capsys, passed_over):
    """As of a daemon of an earlier version, or while an ADD or DEL runs."""
    bench.node("node-a", node_of(explain_reply(attached=True, passedOver=passed_over)))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    show.why(found)
    shown = capsys.readouterr().out
    assert "no fault was found; its interfaces were not compared with the kernel" in shown
    assert ("a request is at work on it" in shown) is bool(passed_over)
    assert "  looked at: annotations, 0 Events, plan, 0 requests, records\n" in shown


def differing(repairable=True, by_pod=False, certain=True):
    where = {"pod": "default/web", "network": "default/blue", "interface": "net1"}
    return {
        **where,
        "difference": 'interface "net1" is not there',
        "repairable": repairable,
        "byPod": by_pod,
        "certain": certain,
    }


@pytest.mark.parametrize(
    ("repairable", "advice"), [(True, "-- multusctl repair default/web` brings it back"), (False, "recreate the pod")]
)
async def test_an_attachment_that_differs_from_its_record(bench, look, capsys, repairable, advice):
    bench.node("node-a", node_of(explain_reply(attached=True, compared=1, differences=[differing(repairable)])))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    assert found["text"] == 'network default/blue, interface net1: interface "net1" is not there'
    assert (found["source"], found["lacks"]) == ("drift", [])
    assert advice in found["advice"]
    show.why(found)
    assert capsys.readouterr().out.count("is not there") == 1


@pytest.mark.parametrize("how", [{"by_pod": True}, {"certain": False}])
async def test_what_a_program_in_the_pod_did_or_only_a_check_says_is_a_remark(bench, look, how):
    """KubeVirt renames interfaces; some plugins' CHECK fails right after their own ADD."""
    bench.node("node-a", node_of(explain_reply(attached=True, compared=1, differences=[differing(**how)])))
    bench.pod("web", "blue", attached=ATTACHED)
    found = await look()
    assert (found["cause"], found["notes"]) == (
        "",
        ['network default/blue, interface net1: interface "net1" is not there'],
    )


LACKS = "the pod runs without networks that it asked for: default/blue: its annotation was changed; make it anew"


@pytest.mark.parametrize("problem", ["", MISSING])
async def test_a_network_that_was_added_to_the_annotation_of_a_running_pod(bench, look, problem):
    """Not that the status does not say so, nor what an ADD would say: a running pod has none."""
    bench.node("node-a", node_of(explain_reply(attached=True, compared=1, problem=problem, lacks=LACKS)))
    bench.pod("web", "blue", attached="[]")
    found = await look()
    assert (found["text"], found["advice"]) == (LACKS, "make it anew")


async def test_a_pod_that_was_started_without_multus(bench, look):
    bench.node("node-a", node_of(explain_reply(lacks=LACKS)))
    bench.pod("web", "blue", status={"phase": "Running", "podIP": "10.0.0.2"})
    assert (await look())["text"] == LACKS
    bench.node("node-a", node_of(explain_reply(lacks=LACKS, errors=[failed("no addresses left")])))
    assert (await look())["text"] == "no addresses left", "it was asked, and has failed"
    bench.node("node-a", node_of(explain_reply()))
    bench.pod("web", status={"phase": "Running", "podIP": "10.0.0.2"})
    found = await look()
    assert (found["cause"], found["notes"]) == (
        "",
        ["nothing of it is on record: it was started without Multus, or by another daemon"],
    )


async def test_a_del_that_goes_on_failing_is_told_with_the_count(bench, look):
    """Also of a daemon that has started anew, whose last requests do not have it."""
    left = leak("default/web", problem="its DEL failed 3 times and is tried again: port 7", advice="unlock it")
    bench.node("node-a", node_of(explain_reply(leftovers=[left])))
    metadata = {"namespace": "default", "name": "web", "deletionTimestamp": "2026-11-22T10:00:00Z"}
    bench.server.put("pods", {"metadata": metadata, "spec": {"nodeName": "node-a"}})
    found = await look()
    assert (found["cause"], found["advice"]) == (left["problem"], "unlock it")
    bench.node("node-a", node_of(explain_reply()))
    assert (await look())["cause"] == "the pod is being deleted, and no DEL of it has failed or runs"


async def test_events_about_something_else_are_not_shown(bench, look, capsys):
    bench.node("node-a", node_of(explain_reply(attached=True, compared=1)))
    uid = bench.pod("web", "blue", attached=ATTACHED)
    bench.event("web", uid, "probe failed", reason="Unhealthy", source={"component": "kubelet"})
    bench.event("web", uid, "no sandbox", reason="FailedCreatePodSandBox", source={"component": "kubelet"})
    show.why(await look())
    shown = capsys.readouterr().out
    assert ("probe failed" in shown, "no sandbox" in shown) == (False, True)


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


@pytest.mark.parametrize(
    "reply",
    [
        {"ready": False, "podsGetNetworks": "no", "because": NODE_PROBLEM},
        {"podsGetNetworks": "yes", "degraded": {"startup-taint": NODE_PROBLEM, "certificate": "it ends tomorrow"}},
    ],
    ids=["gives no networks", "can't remove its taint"],
)
async def test_a_pod_on_no_node_as_the_only_node(bench, look, reply):
    async def program(execution):
        assert execution.words[1] == "status"
        await execution.answer(status_reply(**reply), 1)

    bench.node("node-a", program)
    uid = bench.pod("web", "blue", node="")
    message = "0/1 nodes are available: 1 node(s) had untolerated taint(s). preemption: 0/1"
    bench.event("web", uid, message, reason="FailedScheduling", source={"component": "default-scheduler"})
    found = await look()
    assert found["cause"] == "node node-a: /etc/cni/net.d is missing on the node"
    assert found["text"].endswith(f"; the pod is on no node yet: {message}")
    assert (found["source"], found["advice"]) == ("daemon", "delete the daemon's pod")


async def test_an_annotation_that_can_not_be_read(bench, look):
    bench.node("node-a", hang)
    bench.pod("web", "[")
    found = await look()
    assert found["source"] == "annotation"
    assert found["advice"].startswith("correct the annotation in the pod's template")


async def test_a_pod_that_has_finished(bench, look):
    bench.node("node-a", hang)
    bench.pod("web", "blue", status={"phase": "Failed"})
    found = await look()
    assert (found["cause"], found["lacks"]) == ("", [])
    assert "has finished (Failed)" in found["notes"][0]


@pytest.mark.parametrize("networks", ["blue", ""])
async def test_a_pod_of_the_hosts_network(bench, look, networks):
    bench.node("node-a", hang)
    bench.pod("web", networks, hostNetwork=True)
    found = await look()
    told = (found["cause"] if networks else found["notes"][0], found["lacks"])
    assert told == (status.ON_HOST, ["default/blue"] if networks else [])


async def test_no_such_pod(bench, look):
    with pytest.raises(NotThereError, match="^there is no pod default/web$"):
        await look()


async def test_what_people_see(bench, look, capsys):
    running = {"verb": "ADD", "began": 5.0, "seconds": None, "error": "", "step": "plugin x"}
    bench.node("node-a", node_of(explain_reply(problem=f"{MISSING} (pod default/web)", requests=[running])))
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
