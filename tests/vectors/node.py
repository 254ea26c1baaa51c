"""A node on which the recorded paths are the real ones: `/opt/cni/bin`, `/etc/cni/net.d`, `/var/lib/cni`, `/run/netns`.

It is a mount and a network namespace, kept by a process that ends with this one. `/etc`, `/opt`, `/run` and `/var/lib`
are file systems of its own there, whose other content is linked to the machine's. So requests, configurations and
files can be taken from the records and compared with them byte for byte, and nothing is left behind.
"""

from __future__ import annotations

import http.client
import json
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

import multus_shim
from tests.programs import needed
from tests.vectors.records import CONF_DIR, Message

_OWN = {"/etc": ("cni",), "/opt": ("cni",), "/run": ("multus", "netns"), "/var/lib": ("cni",)}
_MADE = f"{CONF_DIR} /opt/cni/bin /run/netns /var/lib/cni"
STATUS_ANNOTATION = "k8s.v1.cni.cncf.io/network-status"
DEADLINE = 20.0
"""Seconds that a call, and the daemon's start, may take."""


def _script(machine: Path, plugins: Path) -> str:
    """Makes the node in fresh namespaces. `machine` is where the machine's own directories are to be seen there."""
    shadows = [
        f"""
mkdir -p {machine}{parent}
mount --rbind {parent} {machine}{parent}
mount -t tmpfs -o mode=0755 node {parent}
for found in {machine}{parent}/*; do
    case "${{found##*/}}" in {" | ".join(own)}) ;; *) ln -s "$found" {parent}/ ;; esac
done
"""
        for parent, own in _OWN.items()
    ]
    return f"""
set -e
mount -t tmpfs machine {machine}
{"".join(shadows)}
mkdir -p {_MADE}
ln -s {shlex.quote(str(plugins))}/* /opt/cni/bin/
ip link set lo up
echo ready
exec cat >/dev/null
"""


class RecordedNode:
    """The node of one session; use it as a context manager."""

    def __init__(self, plugins: Path) -> None:
        """`plugins` is the directory of the reference plugins."""
        self._root = Path(tempfile.mkdtemp(prefix="multus-vectors-"))
        self._machine = self._root / "machine"
        self._machine.mkdir()
        self.manifests = self._root / "manifests"
        self.manifests.mkdir()
        self.log = self._root / "daemon.log"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._keeper = subprocess.Popen(
            [
                needed("unshare"),
                "--mount",
                "--net",
                "--propagation=private",
                "sh",
                "-c",
                _script(self._machine, plugins),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n", "the node's namespaces could not be made"

    def __enter__(self) -> RecordedNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
        self._keeper.communicate()
        # Empty, as the machine's directories are mounted in the node's namespace only; else nothing must be removed.
        self._machine.rmdir()
        shutil.rmtree(self._root)

    # --- what there is before the daemon starts --------------------------------------------------------------------

    def path(self, inside: str) -> Path:
        """A path of the node as this process sees it."""
        return Path(f"/proc/{self._keeper.pid}/root{inside}")

    def add_netns(self, paths: Iterable[str]) -> None:
        """Make network namespaces below /run/netns."""
        names = sorted({Path(path).name for path in paths})
        self._run(["sh", "-c", 'for name; do ip netns add "$name"; done', "sh", *names]).check_returncode()

    def declare(self, item: Mapping[str, Any]) -> None:
        """A Pod or a NetworkAttachmentDefinition."""
        metadata = item["metadata"]
        path = self.manifests / f"{item['kind']}-{metadata['namespace']}-{metadata['name']}.yaml".lower()
        path.write_text(yaml.safe_dump(dict(item)))

    def plugin(self, name: str, script: str) -> None:
        """A plugin that is a shell script, in place of what is there under its name."""
        path = self.path(f"/opt/cni/bin/{name}")
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def set_status(self, pod: str, text: str) -> None:
        """The network-status that a pod of the namespace `web` has from before."""
        path = self._status_file(pod)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"namespace": "web", "name": pod, "annotations": {STATUS_ANNOTATION: text}}
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata}))

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the daemon and wait until it is ready."""
        path = self._root / "daemon-config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "multus_daemon.cli", "run", "--config", str(path)]
        with self.log.open("wb") as log:
            self._daemon = subprocess.Popen(
                [*self._inside(), *command, "--standalone", str(self.manifests)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + DEADLINE
        while not self._ready():
            assert self._daemon.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def _ready(self) -> bool:
        try:
            return self.send(Message("GET /readyz?gates HTTP/1.1", (), "")).line.split()[1] == "200"
        except OSError:
            return False

    # --- calls -----------------------------------------------------------------------------------------------------

    def shim(self, env: Mapping[str, str], stdin: bytes) -> tuple[int, str]:
        """Run the shim as the runtime does: exit code and stdout."""
        done = self._run([str(multus_shim.binary())], env=dict(env), stdin=stdin)
        return done.returncode, done.stdout.decode()

    def send(self, request: Message) -> Message:
        """One request, as it was recorded, over the socket."""
        method, target, _ = request.line.split()
        body = request.body.encode()
        connection = http.client.HTTPConnection("dummy", timeout=DEADLINE)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(DEADLINE)
            connection.sock.connect(str(self.path("/run/multus/multus.sock")))
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for header in request.headers or ("Host: dummy", f"Content-Length: {len(body)}"):
                connection.putheader(*header.split(": ", 1))
            connection.endheaders(body)
            answer = connection.getresponse()
            headers = tuple(f"{key}: {value}" for key, value in answer.getheaders())
            return Message(f"HTTP/1.1 {answer.status} {answer.reason}", headers, answer.read().decode())
        finally:
            connection.close()

    def _inside(self) -> list[str]:
        return ["nsenter", "--target", str(self._keeper.pid), "--mount", "--net", "--wd=/", "--"]

    def _run(
        self, command: list[str], env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        if env is not None:
            # The variables are the program's alone, and complete: nsenter is found before.
            command = ["env", "-i", *(f"{key}={value}" for key, value in env.items()), *command]
        return subprocess.run([*self._inside(), *command], input=stdin, capture_output=True, timeout=DEADLINE)

    # --- what there is afterwards ----------------------------------------------------------------------------------

    def status(self, pod: str) -> str:
        """The network-status of a pod of the namespace `web`; empty where it has none."""
        try:
            text = self._status_file(pod).read_text()
        except FileNotFoundError:
            return ""
        return str(yaml.safe_load(text)["metadata"]["annotations"][STATUS_ANNOTATION])

    def _status_file(self, pod: str) -> Path:
        return self.manifests / "status" / "web" / f"{pod}.yaml"

    def files(self) -> dict[str, str]:
        """Everything below /var/lib/cni."""
        top = self.path("/var/lib/cni")
        found = [path for path in top.rglob("*") if path.is_file()]
        return {f"/var/lib/cni/{path.relative_to(top)}": path.read_text() for path in found}
