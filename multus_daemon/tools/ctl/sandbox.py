"""The runtime's part for one pod: a network namespace, a container id, and the shim called as containerd calls it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import multus_shim
from multus_daemon import deadlines
from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.store import Folder
from multus_daemon.runtime import fs
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import args, errors, gojson
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.nad import status
from multus_daemon.spec.nad.names import label_problem, subdomain_problem
from multus_daemon.tools.ctl import inside, namespaces

DEFAULT_CNI_VERSION: Final = "1.0.0"
_CONTAINER_ID_DIGITS: Final = 64
_LOOK_SECONDS: Final = 0.05


class SandboxError(Exception):
    """The call could not be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are."""

    state: Path
    netns: Path
    shim: Path | None = None
    """None: the installed one."""
    standalone: Path | None = None
    """The daemon's directory of manifests; None: not known, and no network-status can be shown."""
    start: str = "multus-daemon run --standalone DIR"
    """The command that starts the daemon, for messages."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to; what is not known is empty."""

    milliseconds: float = 0.0
    """How long the shim ran, start of the process included."""
    container_id: str = ""
    netns: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    network_status: list[dict[str, Any]] = field(default_factory=list)
    pod: dict[str, Any] = field(default_factory=dict)
    """What the kernel shows in the namespace: see `inside.look`."""
    notes: str = ""
    """What the shim wrote to standard error."""

    def to_object(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "containerId": self.container_id,
            "netns": self.netns,
            "result": self.result,
            "networkStatus": self.network_status,
            "pod": self.pod,
            "milliseconds": round(self.milliseconds, 3),
        }


class Sandboxes:
    """The sandboxes of a node, one for each pod. All methods block and raise CniError and SandboxError."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._settings = settings
        self._places = places

    def up(self, namespace: str, name: str, ifname: str = "eth0") -> Outcome:
        """Namespace, then ADD. When ADD fails, DEL and the namespace's removal follow, as with every runtime."""
        path = self._state_path(namespace, name)
        if path.exists():
            raise SandboxError(f"pod {namespace}/{name} is up; `multusctl sandbox down {namespace}/{name}` first")
        state = self._new_state(namespace, name, ifname)
        self._require_daemon(state)
        self._save(path, state)
        try:
            namespaces.create(Path(state["netns"]))
        except OSError as error:
            fs.remove(path)
            raise SandboxError(f"no network namespace: {error}; root is needed, or `unshare -Urnm`") from error
        try:
            stdout, milliseconds, notes = self._call(state, "ADD")
            state["result"] = gojson.loads_object(stdout)
        except (CniError, SandboxError, gojson.JsonError) as error:
            try:
                self.down(namespace, name)
            except (CniError, SandboxError) as second:
                raise SandboxError(f"{error}; and taking it down again failed: {second}") from error
            if isinstance(error, gojson.JsonError):
                raise SandboxError(f"the shim's result: {error}") from error
            raise
        self._save(path, state)
        return self._outcome(state, milliseconds, notes)

    def check(self, namespace: str, name: str) -> Outcome:
        """CHECK."""
        state = self._load(namespace, name)
        if state is None:
            raise SandboxError(f"pod {namespace}/{name} is not up")
        self._require_daemon(state)
        _, milliseconds, notes = self._call(state, "CHECK")
        return self._outcome(state, milliseconds, notes)

    def down(self, namespace: str, name: str) -> Outcome:
        """DEL, then the namespace and what is remembered go. A pod that is not up is done."""
        state = self._load(namespace, name)
        if state is None:
            return Outcome()
        self._require_daemon(state)
        _, milliseconds, notes = self._call(state, "DEL")
        try:
            namespaces.remove(Path(state["netns"]))
            if state["standalone"]:
                status_file.remove(Path(state["standalone"]), namespace, name)
            fs.remove(self._state_path(namespace, name))
        except OSError as error:
            raise SandboxError(f"detached, but what was left can't be removed: {error}") from error
        return Outcome(milliseconds, state["containerId"], state["netns"], notes=notes)

    # --- what is remembered ---

    def _state_path(self, namespace: str, name: str) -> Path:
        problem = label_problem(namespace) or subdomain_problem(name)
        if problem:
            raise SandboxError(f"{namespace}/{name} can't be a pod: {problem}")
        # Neither name can hold the character in the middle.
        return self._places.state / f"{namespace}_{name}.json"

    def _new_state(self, namespace: str, name: str, ifname: str) -> dict[str, Any]:
        token = secrets.token_hex(16)
        container_id = hashlib.sha256(f"{namespace}/{name} {token}".encode()).hexdigest()[:_CONTAINER_ID_DIGITS]
        return {
            "namespace": namespace,
            "name": name,
            "uid": self._uid(namespace, name),
            "token": token,
            "containerId": container_id,
            "netns": str(self._places.netns.absolute() / f"multus-{namespace}_{name}"),
            "ifname": ifname,
            "config": _configuration(self._settings),
            "path": self._settings.paths.bin_dir,
            "shim": str(self._shim()),
            "standalone": str(self._places.standalone or ""),
            "result": None,
        }

    def _uid(self, namespace: str, name: str) -> str:
        """The pod's UID, which only the manifests know; empty is what a runtime without Kubernetes would say."""
        if self._places.standalone is None:
            return ""
        try:
            view = Folder(self._places.standalone).scan()
        except OSError as error:
            raise SandboxError(f"manifests in {self._places.standalone} can't be read: {error}") from error
        pod = view.pods.get((namespace, name))
        if pod is None:
            broken = "".join(f"; {file}: {problem}" for file, problem in sorted(view.errors.items()))
            raise SandboxError(f"no manifest in {self._places.standalone} declares pod {namespace}/{name}{broken}")
        return pod.uid

    def _shim(self) -> Path:
        if self._places.shim is not None:
            return self._places.shim.absolute()
        try:
            return multus_shim.binary()
        except FileNotFoundError as error:
            raise SandboxError(str(error)) from error

    def _load(self, namespace: str, name: str) -> dict[str, Any] | None:
        path = self._state_path(namespace, name)
        try:
            return gojson.loads_object(fs.read_limited(path))
        except FileNotFoundError:
            return None
        except (OSError, gojson.JsonError) as error:
            raise SandboxError(f"{path} can't be read: {error}") from error

    def _save(self, path: Path, state: dict[str, Any]) -> None:
        try:
            fs.ensure_directory(path.parent)
            fs.write_atomic(path, json.dumps(state, indent=4).encode(), fsync=False)
        except OSError as error:
            raise SandboxError(f"{path} can't be written: {error}; choose another --state-dir") from error

    # --- the call ---

    def _require_daemon(self, state: dict[str, Any]) -> None:
        """Fail soon where nobody listens: the shim would wait for a daemon that restarts, and keep a DEL for it."""
        path = Path(state["config"]["daemonSocketDir"]) / "multus.sock"
        end = time.monotonic() + deadlines.CTL_DAEMON_SECONDS
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(deadlines.CTL_DAEMON_SECONDS)
                    client.connect(str(path))
                    return
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() >= end:
                    raise SandboxError(
                        f"no daemon listens on {path}: {error.strerror}; start one: {self._places.start}"
                    ) from error
            except OSError as error:
                raise SandboxError(f"the daemon's socket {path} can't be used: {error.strerror or error}") from error
            time.sleep(_LOOK_SECONDS)

    def _call(self, state: dict[str, Any], verb: str) -> tuple[bytes, float, str]:
        """Standard output of the shim, milliseconds that it took, and what it wrote to standard error."""
        config = dict(state["config"])
        if verb != "ADD" and state["result"]:
            # libcni hands on what it has cached.
            config["prevResult"] = state["result"]
        start = time.perf_counter()
        try:
            done = subprocess.run(  # noqa: S603 - the shim, with the environment that a runtime gives
                [state["shim"]],
                input=json.dumps(config).encode(),
                env=_environment(state, verb),
                capture_output=True,
                timeout=deadlines.CTL_SHIM_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"the shim can't be run: {error}") from error
        milliseconds = (time.perf_counter() - start) * 1000
        notes = done.stderr.decode(errors="replace").strip()
        if done.returncode:
            raise _failure(done.returncode, done.stdout, notes)
        return done.stdout, milliseconds, notes

    def _outcome(self, state: dict[str, Any], milliseconds: float, notes: str) -> Outcome:
        entries: list[dict[str, Any]] = []
        if state["standalone"]:
            try:
                text = status_file.read(Path(state["standalone"]), state["namespace"], state["name"])
                entries = status.parse(text or "")
            except (OSError, ValueError, CniError) as error:
                notes = f"{notes}\nnetwork-status can't be read: {error}".strip()
        try:
            view = inside.look(state["netns"])
        except OSError as error:
            raise SandboxError(f"{state['netns']} can't be looked into: {error}") from error
        return Outcome(milliseconds, state["containerId"], state["netns"], state["result"] or {}, entries, view, notes)


def _configuration(settings: Settings) -> dict[str, Any]:
    """The CNI configuration that lies in the runtime's directory for a daemon with these settings."""
    config: dict[str, Any] = {
        "cniVersion": settings.networks.cni_version or DEFAULT_CNI_VERSION,
        "name": "multus-cni-network",
        "type": "multus-shim",
        "daemonSocketDir": settings.socket.shim_directory or settings.socket.directory,
        "cniDir": settings.paths.cni_dir,
    }
    if settings.networks.cluster_network:
        config["clusterNetwork"] = settings.networks.cluster_network
    return config


def _environment(state: dict[str, Any], verb: str) -> dict[str, str]:
    pod = (
        ("IgnoreUnknown", "1"),
        ("K8S_POD_NAMESPACE", state["namespace"]),
        ("K8S_POD_NAME", state["name"]),
        ("K8S_POD_INFRA_CONTAINER_ID", state["containerId"]),
        ("K8S_POD_UID", state["uid"]),
    )
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": state["containerId"],
        "CNI_NETNS": state["netns"],
        "CNI_IFNAME": state["ifname"],
        "CNI_ARGS": args.render(pod),
        "CNI_PATH": state["path"],
    }


def _failure(code: int, stdout: bytes, notes: str) -> CniError:
    try:
        return errors.from_object(gojson.loads_object(stdout))
    except gojson.JsonError:
        seen = stdout[:200].decode(errors="replace")
        return InternalError(f"the shim ended with status {code} and printed no CNI error", f"{seen!r} {notes}".strip())
