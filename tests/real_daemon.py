"""A daemon of its own in a process, standalone, with nothing of a network: for what is seen from outside."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml


def ask(path: Path, method: str, target: str, body: bytes | None = None, *, seconds: float = 30) -> tuple[int, bytes]:
    """Send a request over a socket; status 0 if there is no answer in this time."""
    connection = http.client.HTTPConnection("localhost")
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(seconds)
        connection.sock.connect(str(path))
        connection.request(method, target, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def write_plugin(path: Path, body: str) -> None:
    """A plugin that is a shell script; its configuration is on stdin."""
    path.write_text(f"#!/bin/sh\ncat >/dev/null\n{body}\n")
    path.chmod(0o755)


class RealDaemon:
    """Use it as a context manager; it is killed at the end."""

    def __init__(
        self, root: Path, settings: dict[str, Any] | None = None, wrapper: Sequence[str] = (), **how: Any
    ) -> None:
        """`wrapper`: a program that the command line is given to; `how`: what `subprocess.Popen` gets besides."""
        self.root = root
        self.socket = root / "run" / "multus.sock"
        self.manifests = root / "manifests"
        self.bin_dir = root / "bin"
        for directory in (self.manifests, self.bin_dir):
            directory.mkdir()
        self.settings = {
            "socketDir": str(root / "run"),
            "cniDir": str(root / "cni"),
            "binDir": str(root / "bin"),
            "confDir": str(root / "conf.d"),
            "cniConfigDir": "",
            "clusterNetwork": "cluster",
            **(settings or {}),
        }
        self._wrapper = wrapper
        self._how = how
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        config = self.root / "daemon-config.json"
        config.write_text(json.dumps(self.settings))
        command = [*self._wrapper, sys.executable, "-m", "multus_daemon.cli", "run", "--config", str(config)]
        self.process = subprocess.Popen(
            [*command, "--standalone", str(self.manifests)], stdin=subprocess.DEVNULL, **self._how
        )
        try:
            self.until(lambda: self.get("/readyz?gates")[0] == 200, "ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=30)

    @property
    def pid(self) -> int:
        """Return the process id; a wrapper has become the daemon by `exec`."""
        assert self.process is not None
        return self.process.pid

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Wait for something that the daemon does."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            assert self.process is not None
            assert self.process.poll() is None, "the daemon has ended"
            time.sleep(0.02)

    def network(self, name: str, plugin: str, namespace: str = "kube-system") -> None:
        """Declare a NetworkAttachmentDefinition of one plugin."""
        config = json.dumps({"cniVersion": "1.0.0", "name": name, "type": plugin})
        self._manifest("NetworkAttachmentDefinition", namespace, name, {}, {"config": config}, "k8s.cni.cncf.io/v1")

    def pod(self, name: str, namespace: str, networks: str = "") -> None:
        """Declare a pod."""
        annotations = {"k8s.v1.cni.cncf.io/networks": networks} if networks else {}
        self._manifest("Pod", namespace, name, annotations, {"containers": []}, "v1")

    def _manifest(
        self, kind: str, namespace: str, name: str, annotations: dict[str, str], spec: dict[str, Any], version: str
    ) -> None:
        metadata = {"namespace": namespace, "name": name, "uid": f"uid-{name}", "annotations": annotations}
        item = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
        path = self.manifests / f"{kind}-{namespace}-{name}.yaml".lower()
        # Beside and renamed: the daemon may be looking.
        path.with_suffix(".new").write_text(yaml.safe_dump(item))
        path.with_suffix(".new").rename(path)

    def plugin(self, name: str, body: str) -> None:
        """A plugin that is a shell script."""
        write_plugin(self.bin_dir / name, body)

    def get(self, path: str) -> tuple[int, bytes]:
        """GET over the socket; status 0 if there is no answer within 5 s."""
        return ask(self.socket, "GET", path, seconds=5)

    def cni(self, verb: str, container: str, pod: str, namespace: str, seconds: float = 60) -> tuple[int, bytes]:
        """One verb, as the shim asks for it, of the pod's sandbox in the network namespace `netns`."""
        kubernetes = {"K8S_POD_NAMESPACE": namespace, "K8S_POD_NAME": pod, "K8S_POD_UID": f"uid-{pod}"}
        environment = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": self._path_of(container),
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(self.bin_dir),
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in {"IgnoreUnknown": "1", **kubernetes}.items()),
        }
        names = {"name": "multus-cni-network", "type": "multus-shim", "clusterNetwork": "cluster"}
        config = json.dumps({"cniVersion": "1.0.0", **names}).encode()
        body = {"env": environment, "config": base64.b64encode(config).decode()}
        return ask(self.socket, "POST", "/cni", json.dumps(body).encode(), seconds=seconds)

    netns = ""
    """Path of the network namespace that `cni` names."""

    def _path_of(self, container: str) -> str:
        """A path of the container's own: a runtime never attaches two containers at the same one."""
        if not self.netns:
            return ""
        path = self.root / f"netns-{container}"
        if not path.is_symlink():
            path.symlink_to(self.netns)
        return str(path)


def full_pipe() -> tuple[int, int]:
    """A pipe that takes nothing more: the ends to read and to write."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"." * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    return reading, writing
