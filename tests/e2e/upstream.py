"""The daemon that ours takes over from: upstream's own programs, on a scratch node."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from tests.e2e import build_tools
from tests.e2e.node import Answer, Node
from tests.e2e.server_process import ServerProcess
from tests.programs import given

OLD: Final = "v4.3.0"
"""The newest release that the Go module proxy has; see `build_tools`."""
NEW: Final = "v4.3.1"
"""The newest release, or a later state; its programs are given by variables."""


def daemon_of(release: str) -> Path:
    """Path of a release's daemon. Raises `build_tools.ToolError`; skips the test without the variable."""
    return build_tools.find("upstream-multus-daemon") if release == OLD else given("UPSTREAM_NEW_DAEMON")


def shim_of(release: str) -> Path:
    """Path of a release's shim, like `daemon_of`."""
    return build_tools.find("upstream-multus-shim") if release == OLD else given("UPSTREAM_NEW_SHIM")


class StandIn:
    """The requests of upstream's v4.3.1 shim, without the program; docs/protocol.md has them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def cni(self, verb: str, container: str, netns: str, pod: str) -> bool:
        """Send one request when the daemon is ready; True if it succeeds. A DEL asks once."""
        deadline = time.monotonic() + 60
        while self._node.ask("POST", "/healthz" if verb == "DEL" else "/readyz", b"null")[0] != 200:
            if verb == "DEL" or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        request = {
            "env": self._node.environment(verb, container, netns, pod),
            "config": base64.b64encode(self._node.stdin).decode(),
        }
        return self._node.ask("POST", "/cni", json.dumps(request).encode())[0] == 200


class Upstream:
    """Upstream's daemon and shim on a node, with the node's settings.

    The settings are those of upstream's configuration map; it passes over the keys that only we know.
    """

    def __init__(self, node: Node, node_name: str, release: str = OLD) -> None:
        """Raises `build_tools.ToolError` where a program is missing."""
        self.release = release
        daemon = daemon_of(release)
        self._node = node
        self._generated = Path(node.settings["cniConfigDir"]) / "00-multus.conf"
        self._config = b""
        # Its own manifest makes it privileged: it runs without a container, in which the node's root has another path.
        config = node.root / "upstream-config.json"
        config.write_text(json.dumps(node.settings | {"chrootDir": "/"}))
        inside = ["ip", "netns", "exec", Path(node.host).name, "env", f"MULTUS_NODE_NAME={node_name}"]
        self.process = ServerProcess("upstream", [*inside, str(daemon), "-config", str(config)], node.root)

    def start(self, timeout: float = 60) -> None:
        """Start it; back when it has written the runtime's configuration, which it does once it serves."""
        self._generated.unlink(missing_ok=True)
        self.process.start()
        deadline = time.monotonic() + timeout
        while not (self._generated.exists() and self._generated.stat().st_size):
            assert self.process.running, f"upstream's daemon has ended\n{self.process.tail()}"
            assert time.monotonic() < deadline, f"upstream's daemon is not ready\n{self.process.tail()}"
            time.sleep(0.02)
        self._config = self._generated.read_bytes()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        self.process.stop(number)

    def stdin(self, **keys: Any) -> bytes:
        """The runtime's configuration, with keys that the runtime adds, such as `runtimeConfig`.

        It is the file that whichever daemon generated; where that is gone, as upstream's is when it ends in good order,
        what the runtime has read of it. What only keeps the place of a configuration has no type; no runtime reads it.
        """
        found = json.loads(self._generated.read_bytes()) if self._generated.exists() else {}
        return json.dumps((found if found.get("type") else json.loads(self._config)) | keys).encode()

    def cni(
        self,
        verb: str,
        container: str,
        netns: str,
        pod: str,
        namespace: str,
        uid: str,
        stdin: bytes,
        release: str = "",
    ) -> Answer:
        """Run upstream's shim, by default of the daemon's release, as the runtime does, whoever serves its socket."""
        start = time.perf_counter()
        done = subprocess.run(
            [str(shim_of(release or self.release))],
            env=self._node.environment(verb, container, netns, pod, namespace, uid) | {"PATH": os.environ["PATH"]},
            input=stdin,
            capture_output=True,
            timeout=120,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)
