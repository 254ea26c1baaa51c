"""The picture of the dashboard, drawn by a browser with the data of real daemons under load.

    python -m tests.e2e.monitoring.picture      # writes docs/monitoring/dashboard.png; as root, two minutes

Needs Debian's chromium and prometheus.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tests.e2e.conftest import NodeFactory
from tests.e2e.monitoring import load, rules
from tests.e2e.monitoring.prometheus import Prometheus
from tests.programs import missing, needed

PICTURE: Final = rules.ROOT / "docs" / "monitoring" / "dashboard.png"
PAGE: Final = Path(__file__).parent / "dashboard.html"
SECONDS: Final = 90
"""Time that the panels show; the load takes as long."""
SIZE: Final = (1300, 1364)


class Site:
    """A loopback port with the page, the dashboard, and the way to Prometheus."""

    def __init__(self, prometheus_port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith("/api/"):
                    status, kind, body = _fetched(f"http://127.0.0.1:{prometheus_port}{self.path}")
                elif self.path == "/dashboard.json":
                    status, kind, body = 200, "application/json", (rules.MONITORING / "dashboard.json").read_bytes()
                else:
                    status, kind, body = 200, "text/html; charset=utf-8", PAGE.read_bytes()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/?seconds={SECONDS}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _fetched(url: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, "application/json", answer.read()
    except urllib.error.HTTPError as error:
        return error.code, "application/json", error.read()


def draw(url: str, target: Path) -> None:
    """Let headless Chromium draw the page into a PNG."""
    if reason := missing("chromium"):
        sys.exit(f"{reason} fonts-dejavu-core")
    browser = needed("chromium")
    with tempfile.TemporaryDirectory() as profile:
        quiet = (
            "disable-gpu",
            "disable-quic",
            "no-first-run",
            "disable-background-networking",
            "disable-sync",
            "disable-lcd-text",
        )
        options = [f"--{name}" for name in (*quiet, "disable-component-update", "headless", "no-sandbox")]
        options += [f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}", "--hide-scrollbars"]
        command = [browser, *options, f"--screenshot={target}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    """The command."""
    factory = NodeFactory()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        rule_file = rules.write(directory / "rules.yaml", rules.hurried())
        try:
            with Prometheus(directory, rule_file, list(load.NODES)) as prometheus:
                made: Any = factory
                with load.running(made, directory, prometheus), Site(prometheus.port) as site:
                    time.sleep(SECONDS + 10)
                    PICTURE.parent.mkdir(exist_ok=True)
                    draw(site.url, PICTURE)
        finally:
            for node in factory.nodes:
                node.__exit__()
    print(f"{PICTURE.relative_to(rules.ROOT)}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
