"""The daemon that ours takes over from: upstream's own programs (see `build_tools`), on a scratch node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.e2e import build_tools
from tests.e2e.node import Answer, Node
from tests.e2e.server_process import ServerProcess


class Upstream:
    """Upstream's daemon and shim on a node, with the node's settings.

    The settings are those of upstream's configuration map; it passes over the keys that only we know.
    """

    def __init__(self, node: Node, node_name: str) -> None:
        """Raises `build_tools.ToolError` where a program is missing."""
        daemon, self.shim = (build_tools.find(name) for name in build_tools.PREDECESSOR)
        self._node = node
        self._generated = Path(node.settings["cniConfigDir"]) / "00-multus.conf"
        self._config = b""
        node.config.write_text(json.dumps(node.settings))
        inside = ["ip", "netns", "exec", Path(node.host).name, "env", f"MULTUS_NODE_NAME={node_name}"]
        self.process = ServerProcess("upstream", [*inside, str(daemon), "-config", str(node.config)], node.root)

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

    def cni(self, verb: str, container: str, netns: str, pod: str, namespace: str, uid: str, stdin: bytes) -> Answer:
        """Run upstream's shim as the runtime does, whoever serves its socket."""
        start = time.perf_counter()
        done = subprocess.run(
            [str(self.shim)],
            env=self._node.environment(verb, container, netns, pod, namespace, uid) | {"PATH": os.environ["PATH"]},
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)
