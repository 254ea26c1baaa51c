"""Secrets of environments, configurations and arguments must not appear in what others read.

That is the log, even at level debug, an error, a metric, an Event, an answer, and the archive of a bug report.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.exec_kubelet import ExecKubelet
from tests.e2e.node import Node
from tests.e2e.test_ask import multusctl
from tests.e2e.test_bundle import files_in, ran
from tests.e2e.test_kubernetes import Cluster

pytest_plugins = ["tests.e2e.kube_fixtures"]

SECRET = "s3cr3t-0f-s0meb0dy"
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJub2JvZHkifQ.s3cr3t-0f-s0meb0dy"
PEM = f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----\n"
IN_CONFIGURATION = {
    "password": SECRET,
    "apiToken": {"value": SECRET},
    "endpoint": f"https://agent:{SECRET}@192.0.2.1/",
    "header": f"Bearer {SECRET}",
    "certificate": PEM,
    "note": JWT,
    "env": [{"name": "REGION", "value": SECRET}],
    "args": {"cni": {"labels": [{"key": "auth", "value": SECRET}]}},
}
"""A secret in each place of a configuration in which programs of all kinds expect one."""
ASKED = {"cni-args": {"password": SECRET}, "password": SECRET}
"""Keys of an element of a pod's annotation."""
METRICS_PORT = 9911
ANSWERS = (
    "status",
    "attachments",
    "trace",
    "plugins",
    "doctor",
    *(f"explain default/{pod}" for pod in "abcd"),
)


def test_no_output_has_a_secret(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", SECRET)
    settings = {"logLevel": "debug", "metricsPort": METRICS_PORT, "metricsAddress": "127.0.0.1"}
    node = make_node(settings=settings)
    node.settings["logFile"] = node.below_chroot(node.root / "own.log")
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0", args={"cni": {"password": SECRET}})
    node.plugin("failing", 'echo \'{"code": 7, "msg": "no"}\'; exit 1')
    node.network("bad", {"cniVersion": "1.0.0", "name": "bad", "type": "failing", **IN_CONFIGURATION}, "default")
    ipam = {"type": "static", "password": SECRET}
    unknown = {"cniVersion": "1.0.0", "name": "unknown", "type": "static", "ipam": ipam}
    node.network("unknown", unknown, "default")
    node.pod("a")
    node.pod("b", json.dumps([{"name": "bad", **ASKED}]))
    node.pod("c", json.dumps([{"name": "unknown", **ASKED}]))
    node.pod("d", json.dumps([{"name": "bad", **ASKED}])[:-1])
    node.start()
    outputs: dict[str, bytes] = {}
    # Not Multus's own plugin: what it asks for stays a secret.
    extra = {"password": SECRET, "runtimeConfig": {"token": SECRET}}
    stdin = json.dumps({**json.loads(node.stdin), **extra}).encode()
    kept = node.add_netns()
    assert node.cni("ADD", "kept", kept, "a", stdin=stdin).code == 0
    for pod, code in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        netns = node.add_netns()
        for verb in ("ADD", "CHECK", "DEL"):
            environment = node.environment(verb, pod, netns, pod)
            environment["CNI_ARGS"] += f";TOKEN={SECRET}"
            answer = node.run_shim(environment, stdin)
            assert (verb, answer.code) in ((verb, code), ("DEL", 0), ("CHECK", code)), answer.stdout
            outputs[f"{verb} of {pod}"] = answer.stdout + answer.stderr
    outputs["metrics"] = node.metrics(METRICS_PORT).encode()
    for words in ANSWERS:
        for flags in ((), ("--json",)):
            shown = multusctl(node, *words.split(), *flags)
            outputs[" ".join((words, *flags))] = (shown.stdout + shown.stderr).encode()
    done = ran("ctl", "bundle", "--output", "-", "--config", str(node.config), node=node)
    files = files_in(done.stdout)
    outputs |= {f"bundle: {name}": data for name, data in files.items()} | {"bundle": done.stderr}
    node.stop()
    outputs |= {"log": node.log.read_bytes(), "logFile": (node.root / "own.log").read_bytes()}
    assert b"[error] no (plugin type=" in outputs["log"]
    assert b"[error] ipam.password is not supported by the built-in static" in outputs["log"]
    assert b"multus_cni_request_duration_seconds" in outputs["metrics"]
    assert b"failing" in outputs["explain default/b"]
    assert {"bundle: records/attachments/kept.json", "bundle: metrics.txt", "bundle: log.txt"} <= outputs.keys()
    assert with_secrets(outputs) == []
    # It was there, and the list says where.
    listed = {(item["file"], item["key"]) for item in json.loads(files["removed.json"])["removals"]}
    place = "networks[1].plugins[0].config"
    explained = {key.removeprefix(f"{place}.") for file, key in listed if file == "answers/explain/default/b.json"}
    assert {"password", "apiToken", "certificate"} <= explained
    assert any(file == "records/attachments/kept.json" for file, _ in listed)


def with_secrets(outputs: dict[str, bytes]) -> list[str]:
    """Names of the outputs that have the secret, plain or in base64."""
    forms = {base64.b64encode(b"x" * shift + SECRET.encode())[4:-4] for shift in range(3)} | {SECRET.encode()}
    return sorted(name for name, data in outputs.items() if any(form in data for form in forms))


def test_the_archive_has_not_what_a_plugin_tells(make_node: Callable[..., Node]) -> None:
    """The daemon logs a plugin's error in the plugin's words, which may quote its configuration."""
    node = make_node(settings={"logLevel": "debug"})
    node.settings["logFile"] = node.below_chroot(node.root / "own.log")
    node.ptp("cluster", "10.83.0.0/24", cniVersion="1.0.0")
    quoting = "import json, sys\nprint(json.dumps({'code': 7, 'msg': 'refused: ' + sys.stdin.read()}))\nsys.exit(1)\n"
    (node.bin_dir / "quoting").write_text(f"#!{sys.executable}\n{quoting}")
    (node.bin_dir / "quoting").chmod(0o755)
    node.network("bad", {"cniVersion": "1.0.0", "name": "bad", "type": "quoting", **IN_CONFIGURATION}, "default")
    node.pod("a", "bad")
    node.start()
    assert SECRET in node.cni("ADD", "c1", node.add_netns(), "a").stdout.decode()
    node.wait_for_log("refused: ")
    done = ran("ctl", "bundle", "--output", "-", "--config", str(node.config), node=node)
    files = files_in(done.stdout)
    assert b"refused: " in files["log.txt"]
    assert b"refused: " in files["answers/trace.json"]
    assert with_secrets(files) == []


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[Cluster]:
    for item in api_server.request("GET", "/api/v1/nodes")["items"]:
        # Of tests that have ended: nobody answers there.
        api_server.delete("v1", "Node", item["metadata"]["name"])
    made = Cluster(api_server, make_node(standalone=False, settings={"logLevel": "debug"}), api_namespace)
    made.prepare()
    with api_server.reachable_in(made.node.host), ExecKubelet(api_server, made.node, made.name):
        yield made
        made.node.kill()


def test_no_output_of_a_cluster_has_a_secret(cluster: Cluster) -> None:
    node, space = cluster.node, cluster.namespace
    node.plugin("failing", 'echo \'{"code": 7, "msg": "no"}\'; exit 1')
    cluster.definition("bad", json.dumps({"cniVersion": "1.0.0", "name": "bad", "type": "failing", **IN_CONFIGURATION}))
    cluster.pod("a", json.dumps([{"name": "bad", **ASKED}]))
    cluster.pod("b", json.dumps([{"name": "bad", **ASKED}])[:-1])
    node.start()
    for pod in ("a", "b"):
        assert cluster.cni("ADD", pod, node.add_netns()).code == 1
        node.wait_until(lambda pod=pod: bool(cluster.events(pod)), "the Event is there")  # type: ignore[misc]
    flags = ("--namespace", space, "--kubeconfig", str(cluster.server.admin_kubeconfig))
    outputs: dict[str, bytes] = {"Events": json.dumps([cluster.events(pod) for pod in ("a", "b")]).encode()}
    for words in ("why a", "why b", "pods", "networks", "status", "leaks", "why a --json", "pods --json"):
        done = ran("kubectl", *words.split(), *flags)
        outputs[words] = done.stdout + done.stderr
    done = ran("kubectl", "bundle", "--output", "-", *flags)
    files = files_in(done.stdout)
    outputs |= {f"bundle: {name}": data for name, data in files.items()} | {"bundle": done.stderr}
    node.stop()
    outputs["log"] = node.log.read_bytes()
    assert b"failing" in files["cluster/networks.json"]
    assert f"nodes/{cluster.name}/answers/explain/{space}/a.json" in files
    assert {item["metadata"]["name"] for item in json.loads(files["cluster/pods.json"])} >= {"a", "b"}
    assert with_secrets(outputs) == []
    # Nor the daemon's own.
    token = cluster.token.read_bytes()
    assert [name for name, data in outputs.items() if token in data] == []


def test_nothing_from_outside_begins_a_line(make_node: Callable[..., Node]) -> None:
    """A plugin's words and a pod's annotation may hold line ends and what steers a terminal."""
    forged = "\n2026-01-01T00:00:00.000+00:00 [verbose] CNI DEL finished\x1b[2K"
    node = make_node(settings={"logLevel": "debug"})
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
    node.plugin("failing", f"printf '%s' {json.dumps(json.dumps({'code': 7, 'msg': forged}))}; exit 1")
    node.network("bad", {"cniVersion": "1.0.0", "name": "bad", "type": "failing"}, "default")
    node.pod("one", "bad")
    node.pod("two", json.dumps([{"name": forged}]))
    node.start()
    for pod in ("one", "two"):
        answer = node.cni("ADD", pod, node.add_netns(), pod)
        assert answer.code == 1
        assert answer.json["code"] in (6, 7)
    node.stop()
    text = node.log.read_text()
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]
    assert len(re.findall(r"(?m)^\S+ \[error\] .* verb=ADD .* outcome=", text)) == 2
