"""`kubectl multus bundle` collects nodes, logs and objects; what is missing is named."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from multus_tools import bundle_file, deadlines
from multus_tools.bundle_file import Archive
from multus_tools.command_line import NotThereError
from multus_tools.kubectl.bundle import Bundle
from multus_tools.scrub import REMOVED
from tests.fakes.apiserver import PODS, Execution
from tests.unit.tools.kubectl.conftest import Bench, hang

SECRET = "s3cr3t-0f-s0meb0dy"


def of_node(daemon: str = "", **files: Any) -> bytes:
    """The archive of a node."""
    output = io.BytesIO()
    archive = Archive(output, "multus-bundle-x", most=bundle_file.NODE_MAX_BYTES)
    for name, value in files.items():
        archive.json(f"{name}.json", value)
    archive.close({"schema": bundle_file.SCHEMA, "node": "x", "daemon": daemon})
    return output.getvalue()


def prints(data: bytes, status: int = 0, stderr: bytes = b"") -> Callable[[Execution], Awaitable[None]]:
    """A `multusctl` that prints this, in pieces as a runtime does."""

    async def program(execution: Execution) -> None:
        for start in range(0, len(data), 30_000):
            await execution.write(data[start : start + 30_000])
        await execution.write(stderr, channel=2)
        await execution.end(status)

    return program


async def collected(bench: Bench, **asked: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The answer, and the files of the archive."""
    output = io.BytesIO()
    archive = Archive(output, "top", most=bundle_file.CLUSTER_MAX_BYTES)
    asked = {"nodes": [], "pod": "", "namespace": "default", **asked}
    answer = await Bundle(bench.cluster(node_seconds=asked.pop("node_seconds", 5.0)), archive).collect(**asked)
    with tarfile.open(fileobj=io.BytesIO(output.getvalue())) as tar:
        files = {item.name.removeprefix("top/"): tar.extractfile(item).read() for item in tar}  # type: ignore[union-attr]
    return answer, files


async def test_all_nodes_are_in_one_archive(bench: Bench) -> None:
    for name in ("node-a", "node-b"):
        bench.node(name, prints(of_node(settings={"node": name, "password": SECRET})))
        bench.server.logs["kube-system", f"kube-multus-ds-{name}"] = f"a line of {name}\n"
    bench.server.logs["kube-system", "kube-multus-ds-node-a-previous"] = f"Fatal token={SECRET}\n"
    bench.network("blue", json.dumps({"type": "x", "psk": SECRET, "master": "eth1"}))
    answer, files = await collected(bench)
    assert (answer["daemons"], answer["unanswered"], answer["missing"]) == (2, [], 0)
    assert sorted(bench.asked) == [(name, ["multusctl", "bundle", "--output", "-"]) for name in ("node-a", "node-b")]
    assert bench.progress[-1] == (2, 2)
    assert json.loads(files["nodes/node-b/settings.json"]) == {"node": "node-b", "password": REMOVED}
    assert files["nodes/node-a/pod.log"] == b"a line of node-a\n"
    assert files["nodes/node-a/previous.log"] == f"Fatal token={REMOVED}\n".encode()
    assert "nodes/node-b/previous.log" not in files
    (network,) = json.loads(files["cluster/networks.json"])
    assert json.loads(network["spec"]["config"]) == {"type": "x", "psk": REMOVED, "master": "eth1"}
    assert json.loads(files["cluster/version.json"])["gitVersion"] == "v1.34.0"
    assert {item["metadata"]["name"] for item in json.loads(files["cluster/nodes.json"])} == {"node-a", "node-b"}
    assert SECRET.encode() not in b"".join(files.values())
    removed = json.loads(files["removed.json"])["removals"]
    assert {(item["file"], item["key"]) for item in removed} >= {
        ("nodes/node-a/settings.json", "password"),
        ("nodes/node-a/previous.log", "line 1: token"),
        ("cluster/networks.json", "[0].spec.config.psk"),
    }
    index = json.loads(files["index.json"])
    assert index["schema"] == "kubectl-multus.bundle/v1"
    assert {item["name"] for item in index["files"]} == files.keys() - {"index.json"}


async def test_nodes_that_do_not_answer_are_named(bench: Bench) -> None:
    bench.node("node-a", hang)
    bench.node("node-b")
    bench.node("node-c", prints(b"", 2, b"usage: multusctl\nmultusctl: error: invalid choice: 'bundle'\n"))
    bench.node("node-d", prints(of_node("no daemon: no socket", records={}), 3))
    bench.node("node-e", prints(of_node(records={})[:-30]))
    bench.node("node-f", prints(bytes(20 * 1024 * 1024)))
    bench.node("node-g", prints(of_node(settings={})))
    answer, files = await collected(bench, node_seconds=4.0)
    assert answer["daemons"] == 1
    problems = {item["node"]: item["problem"] for item in answer["unanswered"]}
    assert problems["node-a"] == "no answer within 4 s"
    assert problems["node-b"].startswith("no daemon:")
    assert problems["node-c"] == "multusctl: error: invalid choice: 'bundle'"
    assert problems["node-d"] == "no daemon: no socket"
    assert problems["node-e"].startswith("not an archive")
    assert problems["node-f"].startswith("the answer is longer than")
    assert problems.keys() == {f"node-{letter}" for letter in "abcdef"}
    # What such a node has without a daemon.
    assert {"nodes/node-d/records.json", "nodes/node-g/settings.json"} <= files.keys()
    assert json.loads(files["index.json"])["unanswered"] == answer["unanswered"]


async def test_only_the_asked_nodes(bench: Bench) -> None:
    for name in ("node-a", "node-b"):
        bench.node(name, prints(of_node(settings={})))
    answer, files = await collected(bench, nodes=["node-b", "node-x"])
    assert [node for node, _ in bench.asked] == ["node-b"]
    assert [(item["node"], item["problem"]) for item in answer["unanswered"]] == [
        ("node-x", "is not a Linux node of this cluster")
    ]
    assert "nodes/node-b/settings.json" in files


async def test_the_node_of_a_pod_explains_it(bench: Bench) -> None:
    for name in ("node-a", "node-b"):
        bench.node(name, prints(of_node(settings={})))
    uid = bench.pod("web", "blue", node="node-b")
    bench.pod("other", "blue", node="node-b")
    bench.event("web", uid, "no such network")
    bench.event("other", "another", "not this one")
    _, files = await collected(bench, pod="default/web")
    assert bench.asked == [("node-b", ["multusctl", "bundle", "--output", "-", "--pod", "default/web"])]
    (pod,) = json.loads(files["cluster/pods.json"])
    assert pod["metadata"]["name"] == "web"
    (event,) = json.loads(files["cluster/events.json"])
    assert event["message"] == "no such network"
    with pytest.raises(NotThereError, match="there is no pod default/nobody"):
        await collected(bench, pod="default/nobody")


async def test_pods_that_lack_networks_are_concerned(bench: Bench) -> None:
    bench.node("node-a", prints(of_node(settings={})))
    bench.pod("fine", "blue", attached='[{"name": "default/blue", "interface": "net1"}]')
    bench.pod(
        "web",
        "blue",
        containers=[
            {"name": "main", "image": "i", "args": [f"--password={SECRET}"], "env": [{"name": "A", "value": SECRET}]}
        ],
        volumes=[{"name": SECRET}],
    )
    bench.server.get(PODS, "default", "web")["metadata"]["annotations"][
        "kubectl.kubernetes.io/last-applied-configuration"
    ] = SECRET
    _, files = await collected(bench)
    assert bench.asked[0][1][-2:] == ["--pod", "default/web"]
    (pod,) = json.loads(files["cluster/pods.json"])
    assert pod["spec"]["containers"] == [{"name": "main", "image": "i"}]
    assert SECRET.encode() not in b"".join(files.values())


async def test_a_user_who_may_not_list_pods_of_the_cluster(bench: Bench) -> None:
    bench.node("node-a", prints(of_node(settings={})))
    bench.pod("web", "blue")
    bench.server.fail(403, times=100, contains="/api/v1/pods")
    bench.server.fail(403, times=100, contains="/api/v1/events")
    answer, files = await collected(bench, pod="default/web")
    assert [item["node"] for item in answer["unanswered"]] == ["node-a"]
    assert len(json.loads(files["cluster/pods.json"])) == 1
    answer, files = await collected(bench)
    assert len(json.loads(files["cluster/pods.json"])) == 1


async def test_the_time_for_all_nodes_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "KUBECTL_BUNDLE_SECONDS", 4.0)
    bench.node("node-a", prints(of_node(settings={})))
    bench.node("node-b", hang)
    async with asyncio.timeout(30):
        answer, files = await collected(bench, node_seconds=60.0)
    (late,) = answer["unanswered"]
    assert (late["node"], late["problem"]) == ("node-b", "no answer within 4 s, the time for all nodes")
    assert "nodes/node-a/settings.json" in files
