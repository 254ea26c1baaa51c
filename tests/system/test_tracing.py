"""A trace goes from the caller through the shim and the daemon to the plugins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import multus_shim
from tests.e2e.server_process import free_port
from tests.real_daemon import RealDaemon

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE = {
    "TRACEPARENT": f"00-{TRACE_ID}-{SPAN_ID}-01",
    "TRACESTATE": "vendor=1",
    "BAGGAGE": "token=hunter2",
}


class Node:
    """A daemon whose cluster network is a program that writes its environment down."""

    def __init__(self, root: Path, netns: str) -> None:
        self.root, self.netns = root, netns
        self.log = root / "log"
        self.port = free_port()
        settings = {"logFormat": "json", "logLevel": "debug", "logToStderr": False, "logFile": str(self.log)}
        settings |= {"metricsPort": self.port}
        self.daemon = RealDaemon(root, settings, env={**os.environ, "MULTUS_NODE_NAME": "node-a"})
        self.seen = root / "seen"
        answer = f"""env >{self.seen}
            test $CNI_COMMAND = DEL && exit
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


def test_the_trace_is_passed_on(tmp_path: Path, netns: str) -> None:
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
    # Baggage may be private.
    assert "hunter2" not in node.log.read_text()
    ends = [line for line in node.lines() if line["msg"].endswith(" finished")]
    assert sorted(exemplars, key=str) == sorted(
        ({"request_id": line["request"], "trace_id": TRACE_ID} for line in ends[:2]), key=str
    )
    ids = [(line["verb"], line.get("trace_id"), line.get("span_id")) for line in ends]
    assert ids == [("ADD", TRACE_ID, SPAN_ID), ("DEL", TRACE_ID, SPAN_ID), ("ADD", None, None), ("DEL", None, None)]
