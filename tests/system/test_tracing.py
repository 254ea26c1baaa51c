"""A trace goes from the caller through the shim and the daemon to the plugins, and to a collector of spans."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import multus_shim
from tests.e2e.server_process import free_port
from tests.real_daemon import RealDaemon

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE = {
    "TRACEPARENT": f"00-{TRACE_ID}-{SPAN_ID}-01",
    "TRACESTATE": "vendor=1",
    "BAGGAGE": "token=hunter2",
}


class Collector:
    """An OTLP/HTTP collector on the loopback interface."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.answers = threading.Event()
        self.answers.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                collector.answers.wait(60)
                collector.take(self.path, ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, request: ExportTraceServiceRequest) -> None:
        assert path == "/v1/traces"
        for part in request.resource_spans:
            self.resource = {item.key: item.value.string_value for item in part.resource.attributes}
            for scope in part.scope_spans:
                self.spans += scope.spans

    def has(self, name: str) -> bool:
        return any(span.name == name for span in tuple(self.spans))

    def named(self, name: str) -> Span:
        [found] = [span for span in self.spans if span.name == name]
        return found

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def netns() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urnm`")
    name = f"mlt-trace-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield f"/run/netns/{name}"
    subprocess.run(["ip", "netns", "delete", name], check=True)


class Node:
    """A daemon whose cluster network is a program that writes its environment down."""

    def __init__(self, root: Path, netns: str, **environ: str) -> None:
        self.root, self.netns = root, netns
        self.log = root / "log"
        self.port = free_port()
        settings = {"logFormat": "json", "logLevel": "debug", "logToStderr": False, "logFile": str(self.log)}
        settings |= {"metricsPort": self.port}
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        self.daemon = RealDaemon(root, settings, env=clean | {"MULTUS_NODE_NAME": "node-a"} | environ)
        self.seen = root / "seen"
        self.fails = root / "fails"
        answer = f"""env >{self.seen}
            test $CNI_COMMAND = DEL && exit
            if [ -e {self.fails} ]; then echo '{{"code":101,"msg":"no address left"}}'; exit 1; fi
            echo '{{"cniVersion":"1.0.0"}}'"""
        self.daemon.plugin("writes", answer)
        self.daemon.network("cluster", "writes")
        self.daemon.pod("p", "web")

    def __enter__(self) -> Node:
        self.daemon.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.__exit__(None, None, None)

    def shim(self, verb: str, **environ: str) -> tuple[int, bytes]:
        """Call the real shim, as libcni does."""
        conf = {"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus-shim"}
        conf |= {"clusterNetwork": "cluster", "daemonSocketDir": str(self.root / "run"), "cniDir": str(self.root)}
        variables = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": self.netns,
            "CNI_IFNAME": "eth0",
            "CNI_PATH": "/nowhere",
            "CNI_ARGS": "K8S_POD_NAMESPACE=web;K8S_POD_NAME=p;K8S_POD_UID=uid-p",
            **environ,
        }
        done = subprocess.run(
            [multus_shim.binary()], input=json.dumps(conf).encode(), env=variables, stdout=subprocess.PIPE, timeout=60,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def plugin_environ(self) -> dict[str, str]:
        pairs = (line.partition("=") for line in self.seen.read_text().splitlines())
        return {key: value for key, _, value in pairs if key in TRACE}

    def exemplars(self) -> list[dict[str, str]]:
        """Labels of the examples of requests in OpenMetrics."""
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics", headers={"Accept": "application/openmetrics-text"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r"(?m)^multus_cni_request_duration_seconds_bucket.* # \{(.*)\}", text)
        return [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in found]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def attributes(span: Span) -> dict[str, str]:
    return {item.key: item.value.string_value for item in span.attributes}


def test_the_spans_of_an_add_are_a_tree_below_the_callers(tmp_path: Path, netns: str, collector: Collector) -> None:
    with Node(tmp_path, netns, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_BSP_SCHEDULE_DELAY="10") as node:
        assert node.shim("ADD", **TRACE)[0] == 0
        node.daemon.until(lambda: collector.has("CNI ADD"), "its span has come, after all others")
        assert node.daemon.stop() == 0
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    root, stage, plugin = (collector.named(name) for name in ("CNI ADD", "plugin", "plugin writes"))
    assert root.parent_span_id.hex() == SPAN_ID
    assert root.kind == Span.SPAN_KIND_SERVER
    within = {span.name for span in collector.spans if span.parent_span_id == root.span_id}
    assert within == {"queue", "gather", "plan", "record", "plugin", "keep", "publish"}
    assert plugin.parent_span_id == stage.span_id
    assert root.start_time_unix_nano <= plugin.start_time_unix_nano <= plugin.end_time_unix_nano
    assert plugin.end_time_unix_nano <= root.end_time_unix_nano
    assert attributes(plugin) == {"multus.verb": "ADD", "multus.network": "kube-system/cluster"}
    assert collector.resource["service.name"] == "multus-daemon"
    assert collector.resource["k8s.node.name"] == "node-a"
    # The plugin's own spans are below ours.
    assert node.plugin_environ() == TRACE | {"TRACEPARENT": f"00-{TRACE_ID}-{plugin.span_id.hex()}-01"}
    [end] = [line for line in node.lines() if line["msg"] == "CNI ADD finished"]
    assert (end["trace_id"], end["span_id"]) == (TRACE_ID, root.span_id.hex())
    named = {"verb": "ADD", "pod": "web/p", "container": "c1", "ifname": "eth0", "request": end["request"]}
    assert attributes(root) == {f"multus.{key}": value for key, value in named.items()}
    # Baggage may be private.
    assert "hunter2" not in node.log.read_text()
    assert all("hunter2" not in str(span) for span in collector.spans)


def test_the_span_of_a_failure_has_the_error(tmp_path: Path, netns: str, collector: Collector) -> None:
    with Node(tmp_path, netns, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_BSP_SCHEDULE_DELAY="10") as node:
        node.fails.touch()
        status, answer = node.shim("ADD")
        node.daemon.until(lambda: collector.has("CNI ADD"), "its span has come, after all others")
        assert node.daemon.stop() == 0
    assert status == 1
    root = collector.named("CNI ADD")
    assert root.parent_span_id == b""
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert root.status.message.startswith("no address left")
    [end] = [line for line in node.lines() if line["level"] == "error" and line.get("verb") == "ADD"]
    assert end["trace_id"] == root.trace_id.hex()
    assert json.loads(answer)["details"].endswith(f"; request {end['request']}")


def test_a_daemon_without_a_collector_passes_the_trace_on(tmp_path: Path, netns: str) -> None:
    with Node(tmp_path, netns) as node:
        for verb in ("ADD", "DEL"):
            assert node.shim(verb, **TRACE)[0] == 0
            assert node.plugin_environ() == TRACE
        exemplars = node.exemplars()
        assert node.shim("ADD", **TRACE | {"TRACEPARENT": "00-0-0-00"})[0] == 0
        assert node.plugin_environ() == {"BAGGAGE": TRACE["BAGGAGE"]}
        assert node.shim("DEL")[0] == 0
        assert node.plugin_environ() == {}
        assert node.daemon.stop() == 0
    ends = [line for line in node.lines() if line["msg"].endswith(" finished")]
    assert sorted(exemplars, key=str) == sorted(
        ({"request_id": line["request"], "trace_id": TRACE_ID} for line in ends[:2]), key=str
    )
    ids = [(line["verb"], line.get("trace_id"), line.get("span_id")) for line in ends]
    assert ids == [("ADD", TRACE_ID, SPAN_ID), ("DEL", TRACE_ID, SPAN_ID), ("ADD", None, None), ("DEL", None, None)]


def test_a_collector_that_hangs_holds_nothing(tmp_path: Path, netns: str, collector: Collector) -> None:
    collector.answers.clear()
    batches = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with Node(tmp_path, netns, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, **batches) as node:

        def complaints() -> list[dict[str, Any]]:
            return [line for line in node.lines() if line["msg"].startswith("spans are dropped until")]

        for _ in range(3):
            assert node.shim("ADD")[0] == 0
            assert node.shim("DEL")[0] == 0
        node.daemon.until(lambda: bool(complaints()), "the log says so")
        assert node.shim("ADD")[0] == 0
        assert node.daemon.stop() == 0
    assert len(complaints()) == 1
    assert not any("traceback" in line for line in node.lines())


def test_a_collector_that_comes_back_gets_spans_again(tmp_path: Path, netns: str, collector: Collector) -> None:
    # Nothing listens on the port of the endpoint until it is told the right one.
    batches = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with Node(tmp_path, netns, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, **batches) as node:
        collector.answers.clear()
        assert node.shim("ADD")[0] == 0
        said = node.log.read_text
        node.daemon.until(lambda: "spans are dropped until" in said(), "the failure is in the log")
        collector.answers.set()
        node.daemon.until(lambda: node.shim("ADD")[0] == 0 and "spans are sent again" in said(), "it goes on")
        assert node.daemon.stop() == 0
