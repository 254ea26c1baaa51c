"""A small API server on a thread of its own, with one node: its daemon follows it, `kubectl multus` asks it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.node import Node
from tests.e2e.relay import Relay
from tests.fakes.apiserver import NODES, PODS, Execution, FakeApiServer

T = TypeVar("T")
DAEMON = ("kube-system", "kube-multus-ds-x")


class Cluster:
    """A context manager; `serve` before the node's daemon starts."""

    def __init__(self, directory: Path, name: str) -> None:
        self.server = FakeApiServer()
        self.name = name
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"api-server of {name}", daemon=True)
        self._relay: Relay | None = None

    def __enter__(self) -> Cluster:
        self._thread.start()
        self._run(self.server.start())
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay:
            self._relay.close()
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(timeout=60)

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig for it, in the node's namespace too."""
        return self.server.kubeconfig(self._directory / "kubeconfig")

    def serve(self, node: Node) -> None:
        """Make `node` a node of it: the daemon reaches it, and its pod runs `multusctl`."""
        self._relay = Relay(node.host, self.server.port)
        self._relay.start()
        node.standalone = False
        node.node_name = self.name
        node.settings["kubeconfig"] = str(self.kubeconfig)
        namespace, pod = DAEMON

        async def multusctl(execution: Execution) -> None:
            words = [*execution.words[1:], "--config", str(node.config)]
            command = node.contained(sys.executable, "-m", "multus_tools.ctl", *words)
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            out, err = await process.communicate()
            await execution.write(out)
            await execution.write(err, channel=2)
            await execution.end(process.returncode or 0)

        def declare() -> None:
            self.server.put(NODES, {"metadata": {"name": self.name}})
            labels = {"app": "multus", "name": "multus"}
            owner = {
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "name": "kube-multus-ds",
                "uid": "u",
                "controller": True,
            }
            self.server.put(
                PODS,
                {
                    "metadata": {
                        "namespace": namespace,
                        "name": pod,
                        "labels": labels,
                        "ownerReferences": [owner | {"controller": True}],
                    },
                    "spec": {"nodeName": self.name, "containers": [{"name": "kube-multus"}]},
                    "status": {
                        "phase": "Running",
                        "conditions": [{"type": "Ready", "status": "True"}],
                        "containerStatuses": [{"name": "kube-multus", "ready": True, "state": {"running": {}}}],
                    },
                },
            )
            self.server.programs[namespace, pod] = multusctl

        self.do(declare)

    def do(self, change: Any) -> None:
        """Call `change` on the server's thread."""

        async def step() -> None:
            change()

        self._run(step())

    def away(self) -> None:
        """The daemon cannot reach it any more."""
        assert self._relay is not None
        self._relay.stop()

    def kubectl_multus(self, *words: str) -> str:
        """What `kubectl multus` prints."""
        call = [sys.executable, "-m", "multus_tools.kubectl", *words, "--kubeconfig", str(self.kubeconfig)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
        return done.stdout + done.stderr
