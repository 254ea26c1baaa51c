"""A Prometheus that scrapes the daemons of scratch nodes every second."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from multus_daemon.kernel import netns
from tests.e2e.node import Node
from tests.e2e.server_process import ServerProcess, free_port
from tests.programs import needed

METRICS_PORT = 9900
JOB = "kube-system/multus-daemon"
"""As the Prometheus operator calls the job of the PodMonitor."""


class Scraped:
    """A loopback port, with a path for each node, that leads to the daemon's metrics in the node's namespace."""

    def __init__(self) -> None:
        self._namespaces: dict[str, int] = {}
        found = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, kind, body = found.fetch(self.path.strip("/"), self.headers.get("Accept", ""))
                except OSError as error:
                    status, kind, body = 502, "text/plain", str(error).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def add(self, name: str, node: Node) -> None:
        """Serve the metrics of the node's daemon, while it runs."""
        self._namespaces[name] = netns.open_path(node.host)

    def remove(self, name: str) -> None:
        """Serve them no more."""
        os.close(self._namespaces.pop(name))

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fetch(self, name: str, accept: str) -> tuple[int, str, bytes]:
        """The answer of a daemon, in the format that Prometheus asks for. Call it in a thread that ends then."""
        if name not in self._namespaces:
            return 404, "text/plain", b""
        netns.enter(self._namespaces[name])
        connection = HTTPConnection("127.0.0.1", METRICS_PORT, timeout=5)
        try:
            connection.request("GET", "/metrics", headers={"Accept": accept})
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        finally:
            connection.close()


class Prometheus:
    """A context manager; `names` are the nodes that may come."""

    def __init__(self, directory: Path, rule_file: Path, names: list[str]) -> None:
        self.scraped = Scraped()
        self.port = free_port()
        found = [
            {
                "targets": [f"127.0.0.1:{self.scraped.port}"],
                "labels": {"node": name, "instance": name, "__metrics_path__": f"/{name}"},
            }
            for name in names
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rule_file)],
            "scrape_configs": [{"job_name": JOB, "static_configs": found}],
        }
        path = directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self._process = ServerProcess(
            "prometheus",
            [
                needed("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ],
            directory,
        )

    def __enter__(self) -> Prometheus:
        self._process.start()
        self.until(self._answers, "Prometheus answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()
        self.scraped.close()

    def _answers(self) -> bool:
        try:
            return bool(self.query("vector(1)"))
        except OSError:
            return False

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its HTTP API. Raises OSError."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def firing(self, alert: str, **labels: str) -> list[dict[str, Any]]:
        """The alerts of this name that fire, with these labels."""
        found = [item for item in self.ask("alerts")["alerts"] if item["state"] == "firing"]
        return [item for item in found if item["labels"].items() >= {"alertname": alert, **labels}.items()]

    def until(self, holds: Callable[[], object], what: str, seconds: float = 120) -> None:
        """Wait for something that it finds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not within {seconds:g} s: {what}\n{self._process.tail()}"
            time.sleep(0.2)

    def until_firing(self, alert: str, **labels: str) -> dict[str, Any]:
        """Wait for the alert and return it."""
        found: list[dict[str, Any]] = []

        def fires() -> bool:
            found[:] = self.firing(alert, **labels)
            return bool(found)

        self.until(fires, f"{alert} fires ({labels})")
        return found[0]


def check(command: list[str]) -> None:
    """Run promtool; what it says is the failure."""
    done = subprocess.run([needed("promtool"), *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
