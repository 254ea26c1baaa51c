"""`kubectl multus status`, and with it how nodes are found and asked."""

import asyncio

import pytest

from multus_daemon.cluster.kube.errors import ApiUnavailableError
from multus_tools.command_line import DONE, FAILED, NO_DAEMON
from multus_tools.kubectl import cluster as module
from multus_tools.kubectl import nodes, show
from multus_tools.kubectl.commands import status_of
from multus_tools.tables import Listing
from tests.fakes.apiserver import NODES, PODS
from tests.unit.tools.kubectl.conftest import hang, status_reply


def answering(**fields):
    return lambda execution: execution.answer(status_reply(**fields), 0 if fields.get("ready", True) else 1)


async def test_each_node_by_name(bench, capsys):
    bench.node("node-b", answering(containers=7))
    degraded = {"interfaces": "found late"}
    why = {"podsGetNetworks": "no", "because": "no file yet"}
    bench.node("node-a", answering(ready=False, gates={"primary": "no file yet"}, degraded=degraded, **why))
    found = await nodes.status(bench.cluster())
    assert (found["schema"], found["daemons"], found["unanswered"], found["notes"]) == (
        "kubectl-multus.status/v1",
        2,
        [],
        [],
    )
    first, second = found["nodes"]
    show.status(found, Listing())
    assert "interfaces: found late" in capsys.readouterr().out
    assert first == {
        "node": "node-a",
        "daemon": "kube-system/kube-multus-ds-node-a",
        "podsGetNetworks": "no",
        "because": "no file yet",
        "version": "0.2.0",
        "ready": False,
        "behind": {},
        "gates": {"primary": "no file yet"},
        "degraded": degraded,
        "containers": 3,
        "spooled": 0,
        "leftovers": 0,
        "broken": 0,
        "differences": [],
    }
    assert (second["node"], second["ready"], second["containers"]) == ("node-b", True, 7)
    assert bench.asked == [
        ("node-a", ["multusctl", "status", "--json"]),
        ("node-b", ["multusctl", "status", "--json"]),
    ]
    assert bench.progress == [(0, 2), (1, 2), (2, 2)]


async def test_errors_of_all_nodes_by_cause(bench):
    def error(cause, count, last, pod):
        return {"verb": "ADD", "code": 7, "cause": cause, "count": count, "last": last, "pod": pod}

    bench.node("node-a", answering(errors=[error("x", 1, 5.0, "a/new"), error("y", 2, 1.0, "a/y")]))
    bench.node("node-b", answering(errors=[error("x", 4, 3.0, "a/old")]))
    first, second = (await nodes.status(bench.cluster()))["errors"]
    assert first == {
        "verb": "ADD",
        "code": 7,
        "cause": "x",
        "count": 5,
        "nodes": ["node-a", "node-b"],
        "pod": "a/new",
    }
    assert (second["cause"], second["count"]) == ("y", 2)


async def test_broken_attachments_are_counted_and_named_on_request(bench, capsys):
    found = [
        {"pod": "web/p1", "network": "web/blue", "interface": "net1", "difference": '"net1" is down'},
        {"pod": "web/p2", "network": "web/blue", "interface": "net1", "difference": "address 10.1.0.5/24 is gone"},
    ]
    bench.node("node-a", answering(broken=3, differences=found))
    bench.node("node-b", answering())
    answer = await nodes.status(bench.cluster())
    assert [(node["broken"], node["differences"]) for node in answer["nodes"]] == [(3, found), (0, [])]
    show.status(answer, Listing())
    shown = capsys.readouterr().out
    assert next(line for line in shown.splitlines() if "node-a" in line).split()[-1] == "3"
    assert "is down" not in shown
    show.status(answer, Listing(wide=True))
    shown = capsys.readouterr().out
    assert 'pod web/p1, interface net1 (network web/blue): "net1" is down' in shown
    assert "address 10.1.0.5/24 is gone" in shown
    assert "1 more broken attachments" in shown


async def test_nodes_that_can_not_be_asked_are_named(bench):
    bench.node("crashing")
    bench.daemon("crashing", hang, waiting={"reason": "CrashLoopBackOff", "message": "back-off 5m0s"})
    bench.node("leaving")
    bench.daemon("leaving", hang, deletionTimestamp="2026-11-22T10:00:00Z")
    bench.node("none")
    bench.node("well", answering())
    bench.node("windows", **{"kubernetes.io/os": "windows"})
    found = await nodes.status(bench.cluster())
    assert [node["node"] for node in found["nodes"]] == ["well"]
    problems = {item["node"]: item["problem"] for item in found["unanswered"]}
    assert problems == {
        "crashing": "the daemon's pod kube-system/kube-multus-ds-crashing is Running: CrashLoopBackOff back-off 5m0s",
        "leaving": "the daemon's pod kube-system/kube-multus-ds-leaving is being deleted",
        "none": "no daemon: no pod of a DaemonSet with the label app=multus is on the node",
    }
    assert [node for node, _ in bench.asked] == ["well"]
    assert bench.progress[-1] == (4, 4)


async def test_a_node_that_does_not_answer_holds_up_nobody(bench):
    bench.node("node-a", hang)
    bench.node("node-b", answering())
    async with asyncio.timeout(20):
        found = await nodes.status(bench.cluster(node_seconds=3.0))
    assert [node["node"] for node in found["nodes"]] == ["node-b"]
    assert found["unanswered"] == [
        {
            "node": "node-a",
            "daemon": "kube-system/kube-multus-ds-node-a",
            "problem": "no answer within 3 s",
            "podReady": True,
        }
    ]
    assert status_of(found, wrong=False) == FAILED


async def test_somebody_who_may_not_run_commands_in_pods_sees_which_are_ready(bench, capsys):
    bench.node("node-a", hang)
    show.status(await nodes.status(bench.cluster(node_seconds=3.0)), Listing())
    expected = "pods get their networks on 0 of 1 nodes; 1 did not answer, and the pods of 1 are Ready\n"
    assert capsys.readouterr().out.startswith(expected)


async def test_as_many_at_a_time_as_is_said(bench):
    """The client's connections suffice for them."""
    together = asyncio.Event()

    async def waiting(execution):
        if bench.server.executing == module.AT_ONCE:
            together.set()
        await together.wait()
        await execution.answer(status_reply())

    for number in range(module.AT_ONCE + 8):
        bench.node(f"node-{number:02}", waiting)
    async with asyncio.timeout(30):
        assert (await nodes.status(bench.cluster()))["daemons"] == module.AT_ONCE + 8
    assert bench.server.most_executing == module.AT_ONCE


async def _flood(execution):
    while True:
        await execution.write(b"x" * 65536)


async def _usage(execution):
    await execution.write(b"usage: multusctl\nmultusctl: error: invalid choice: 'status'\n", channel=2)
    await execution.end(2)


async def _garbage(execution):
    await execution.write(b"\x1b[31mhello \xff")
    await execution.end(0)


async def _cut(execution):
    await execution.write(b'{"schema": ')


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (_garbage, r"the answer is not multusctl.status/v1: '\x1b[31mhello �'"),
        (_flood, f"the answer is longer than {module.ANSWER_MAX_BYTES} bytes"),
        (_usage, "multusctl: error: invalid choice: 'status'"),
        (_cut, "the connection ended before the command did"),
        (lambda execution: execution.end(0), "multusctl printed nothing"),
        (lambda execution: execution.answer([1]), "the answer is not multusctl.status/v1: '[1]'"),
        (lambda execution: execution.answer({**status_reply(), "errors": 5}), "the answer is not multusctl.status/v1"),
        (
            lambda execution: execution.answer(status_reply(schema="multusctl.status/v2")),
            "answers 'multusctl.status/v2', not multusctl.status/v1: another version?",
        ),
        (
            lambda execution: execution.fail('exec: "multusctl": executable file not found'),
            'multusctl can\'t be run there (is it another Multus?): exec: "multusctl": executable file not found',
        ),
    ],
)
async def test_a_node_that_answers_something_else(bench, program, problem):
    bench.node("node-a", program)
    bench.node("node-b", answering())
    async with asyncio.timeout(30):
        found = await nodes.status(bench.cluster())
    assert found["daemons"] == 1
    (item,) = found["unanswered"]
    assert (item["node"], item["problem"][: len(problem)]) == ("node-a", problem)
    assert len(item["problem"]) < 400


async def test_exec_that_is_forbidden_says_so_for_each_node(bench):
    bench.node("node-a", answering())
    bench.server.fail(403, contains="/exec")
    (item,) = (await nodes.status(bench.cluster()))["unanswered"]
    assert "403 Injected: as the test wants" in item["problem"]


async def test_nodes_that_may_not_be_listed(bench):
    bench.node("node-a", answering())
    bench.node("node-b")
    bench.server.fail(403, contains="/nodes")
    found = await nodes.status(bench.cluster())
    assert ([node["node"] for node in found["nodes"]], found["unanswered"]) == (["node-a"], [])
    assert found["notes"] == ["nodes without a daemon are not shown: as the test wants"]


async def test_of_several_pods_of_a_node_the_one_that_serves(bench):
    bench.node("node-a")
    bench.daemon("node-a", hang, name="old", deletionTimestamp="2026-11-22T10:00:00Z")
    bench.daemon("node-a", hang, name="uninstall", labels={"app": "multus", "name": "multus-uninstall"})
    bench.daemon("node-a", hang, name="webhook", owner="ReplicaSet")
    bench.daemon("node-a", hang, name="by-hand", ownerReferences=None)
    bench.daemon("node-a", answering(), name="young", containers=("sidecar", "kube-multus"))
    bench.daemon("node-a", hang, name="younger", waiting={"reason": "ContainerCreating"})
    (node,) = (await nodes.status(bench.cluster()))["nodes"]
    assert node["daemon"] == "kube-system/young"


async def test_a_pod_of_a_node_that_is_gone_counts_for_nothing(bench):
    bench.node("node-a", answering())
    bench.daemon("gone", hang)
    found = await nodes.status(bench.cluster())
    assert ([node["node"] for node in found["nodes"]], found["unanswered"]) == (["node-a"], [])


async def test_another_label_finds_other_pods(bench):
    bench.node("node-a")
    bench.daemon("node-a", answering(), labels={"app.kubernetes.io/name": "mine"})
    assert (await nodes.status(bench.cluster()))["daemons"] == 0
    assert (await nodes.status(bench.cluster(selector="app.kubernetes.io/name=mine")))["daemons"] == 1


async def test_more_nodes_than_a_page_has(bench, monkeypatch):
    monkeypatch.setattr(module, "PAGE", "3")
    for number in range(10):
        bench.node(f"node-{number}", answering())
    bench.server.fail(410, contains="continue=")
    assert (await nodes.status(bench.cluster()))["daemons"] == 10


async def test_no_daemon_answers(bench):
    bench.node("node-a")
    found = await nodes.status(bench.cluster())
    assert status_of(found, wrong=False) == NO_DAEMON
    bench.server.delete(NODES, "", "node-a")
    assert status_of(await nodes.status(bench.cluster()), wrong=False) == DONE


async def test_a_node_that_the_api_server_does_not_reach_says_so(bench, capsys):
    late = "not in sync for 90 s: timeout"
    answer = {"podsGetNetworks": "in part", "because": f"networks: {late}", "behind": {"networks": late}}
    bench.node("node-a", answering(**answer))
    show.status(await nodes.status(bench.cluster()), Listing())
    shown = capsys.readouterr().out
    assert "pods get their networks on 0 of 1 nodes, in part on 1\n" in shown
    assert "node-a   in part, networks: not in sync for 90 s: timeout " in shown


async def test_in_a_terminal_wide_is_one_screen_with_the_worst_first(bench, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "30")
    error = {"verb": "ADD", "code": 7, "cause": "no such network", "count": 1, "last": 1.0, "pod": "a/b"}
    for number in range(60):
        bench.node(f"node-{number:02}", answering(errors=[{**error, "cause": f"{number}"} for number in range(6)]))
    bench.node("node-29", answering(ready=False, podsGetNetworks="no", because="no file", gates={"primary": "no file"}))
    bench.node(
        "node-30", answering(podsGetNetworks="in part", because="found late", degraded={"interfaces": "found late"})
    )
    bench.node("node-31", answering(broken=2))
    show.status(await nodes.status(bench.cluster()), Listing(wide=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 30
    assert lines[0] == "pods get their networks on 58 of 60 nodes, in part on 1, not on 1"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:2] for row in rows if row[0]][1:4] == [["node-29", "no"], ["node-30", "in part"], ["node-31", "yes"]]
    assert any(line.startswith("and ") and line.endswith(" more nodes") for line in lines)


async def test_an_answer_of_the_api_server_that_is_none(bench):
    bench.server.put(PODS, {"metadata": {"name": "x", "namespace": "a", "labels": {"app": "multus"}}, "spec": 5})
    with pytest.raises(ApiUnavailableError, match="not that of a Kubernetes API server"):
        await nodes.status(bench.cluster())
