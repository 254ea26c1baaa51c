"""The container runtime's part for one pod: a namespace, a container id, and the shim called as containerd calls it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import multus_shim
from multus_daemon import deadlines
from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.store import Folder
from multus_daemon.runtime import fs
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import errors, gojson, names
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.names import label_problem, subdomain_problem
from multus_daemon.spec.nad import network_status
from multus_tools.command_line import CommandError, explained
from multus_tools.ctl import namespaces

DEFAULT_CNI_VERSION: Final = "1.0.0"
_CONTAINER_ID_BYTES: Final = 32
_POLL_SECONDS: Final = 0.05


class Outcome(msgspec.Struct, frozen=True, rename="camel"):
    """Result of a verb; unknown values are empty."""

    container_id: str = ""
    netns: str = ""
    result: dict[str, Any] = {}
    network_status: list[dict[str, Any]] = []
    pod: dict[str, Any] = {}
    """Interfaces and routes in the namespace (`namespaces.look`)."""
    milliseconds: float = 0.0
    """Run time of the shim, including the start of its process."""
    notes: str = ""
    """Standard error of the shim; not in the JSON object."""

    def to_object(self) -> dict[str, Any]:
        """Return the JSON object of `--json`."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["notes"]
        return fields


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The sandbox of a pod. All methods block and raise CniError and CommandError."""

    settings: Settings
    namespace: str
    name: str
    state_dir: Path
    netns_dir: Path
    ifname: str
    """Interface of the cluster network, for `up`."""
    shim: Path | None
    """If None, the installed one."""
    standalone: Path | None
    """The daemon's directory of manifests. None: unknown; then no network-status can be shown."""
    start: str
    """The command that starts the daemon, for messages."""

    def __str__(self) -> str:
        """Return `namespace/name`."""
        return f"{self.namespace}/{self.name}"

    def up(self) -> Outcome:
        """Make the namespace, then ADD. After a failed ADD, DEL and remove the namespace, as every runtime does."""
        path = self._state_path()
        if path.exists():
            raise CommandError(f"pod {self} is up; `multusctl sandbox down {self}` first")
        state = self._new_state()
        self._require_daemon(state)
        self._save(state)
        try:
            namespaces.create(Path(state["netns"]))
        except OSError as error:
            fs.remove(path)
            raise CommandError(f"no network namespace: {error}; root is needed, or `unshare -Urnm`") from error
        try:
            stdout, milliseconds, notes = self._call(state, "ADD")
            state["result"] = gojson.loads_object(stdout)
        except (CniError, CommandError, gojson.JsonError) as error:
            try:
                self.down()
            except (CniError, CommandError) as second:
                raise CommandError(f"{error}; and taking it down again failed: {second}") from error
            if isinstance(error, gojson.JsonError):
                raise CommandError(f"the shim has not printed a CNI result: {error}") from error
            raise
        self._save(state)
        return self._outcome(state, milliseconds, notes)

    def check(self) -> Outcome:
        """CHECK."""
        state = self._load()
        if state is None:
            raise CommandError(f"pod {self} is not up")
        self._require_daemon(state)
        _, milliseconds, notes = self._call(state, "CHECK")
        return self._outcome(state, milliseconds, notes)

    def down(self) -> Outcome:
        """DEL, then remove the namespace and the state. A pod that is not up is treated as success."""
        state = self._load()
        if state is None:
            return Outcome()
        self._require_daemon(state)
        _, milliseconds, notes = self._call(state, "DEL")
        with explained("detached, but the leftovers can't be removed"):
            namespaces.remove(Path(state["netns"]))
            if state["standalone"]:
                status_file.remove(Path(state["standalone"]), self.namespace, self.name)
            fs.remove(self._state_path())
        return Outcome(state["containerId"], state["netns"], milliseconds=milliseconds, notes=notes)

    # --- state ---

    def _state_path(self) -> Path:
        if problem := label_problem(self.namespace) or subdomain_problem(self.name):
            raise CommandError(f"{self} can't be a pod: {problem}")
        # Neither name can contain the underscore.
        return self.state_dir / f"{self.namespace}_{self.name}.json"

    def _new_state(self) -> dict[str, Any]:
        with explained("no shim"):
            shim = self.shim.absolute() if self.shim else multus_shim.binary()
        return {
            "uid": self._uid(),
            "containerId": secrets.token_hex(_CONTAINER_ID_BYTES),
            "netns": str(self.netns_dir.absolute() / f"multus-{self.namespace}_{self.name}"),
            "ifname": self.ifname,
            "config": _configuration(self.settings),
            "path": self.settings.paths.bin_dir,
            "shim": str(shim),
            "standalone": str(self.standalone or ""),
            "result": None,
        }

    def _uid(self) -> str:
        """Return the UID of the pod's manifest; empty without manifests, as a runtime without Kubernetes has it."""
        if self.standalone is None:
            return ""
        with explained(f"manifests in {self.standalone} can't be read"):
            view = Folder(self.standalone).scan()
        pod = view.pods.get((self.namespace, self.name))
        if pod is None:
            broken = "".join(f"; {file}: {problem}" for file, problem in sorted(view.errors.items()))
            raise CommandError(f"no manifest in {self.standalone} declares pod {self}{broken}")
        return pod.uid

    def _load(self) -> dict[str, Any] | None:
        path = self._state_path()
        try:
            return gojson.loads_object(fs.read_limited(path))
        except FileNotFoundError:
            return None
        except (OSError, gojson.JsonError) as error:
            raise CommandError(f"{path} can't be read: {error}") from error

    def _save(self, state: dict[str, Any]) -> None:
        path = self._state_path()
        with explained(f"{path} can't be written (--state-dir names another directory)"):
            fs.ensure_directory(path.parent)
            fs.write_atomic(path, json.dumps(state, indent=4).encode(), fsync=False)

    # --- the call of the shim ---

    def _require_daemon(self, state: dict[str, Any]) -> None:
        """Fail early without a daemon: the shim would wait for a restarted one, and spool a DEL."""
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
                    reason = f"no daemon listens on {path}: {error.strerror}"
                    raise CommandError(f"{reason}; start one: {self.start}") from error
            except OSError as error:
                raise CommandError(f"the daemon's socket {path} can't be used: {error.strerror or error}") from error
            time.sleep(_POLL_SECONDS)

    def _call(self, state: dict[str, Any], verb: str) -> tuple[bytes, float, str]:
        """Run the shim. Return its standard output, its run time in milliseconds, and its standard error."""
        config = dict(state["config"])
        if verb != "ADD" and state["result"]:
            # libcni passes its cached result on.
            config["prevResult"] = state["result"]
        start = time.perf_counter()
        try:
            done = subprocess.run(  # noqa: S603 - the shim, with the environment that a runtime gives
                [state["shim"]],
                input=json.dumps(config).encode(),
                env=self._environment(state, verb),
                capture_output=True,
                timeout=deadlines.CTL_SHIM_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CommandError(f"the shim can't be run: {error}") from error
        milliseconds = round((time.perf_counter() - start) * 1000, 3)
        notes = done.stderr.decode(errors="replace").strip()
        if done.returncode:
            raise _failure(done.returncode, done.stdout, notes)
        return done.stdout, milliseconds, notes

    def _environment(self, state: dict[str, Any], verb: str) -> dict[str, str]:
        pod = (
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", self.namespace),
            ("K8S_POD_NAME", self.name),
            ("K8S_POD_INFRA_CONTAINER_ID", state["containerId"]),
            ("K8S_POD_UID", state["uid"]),
        )
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": state["containerId"],
            "CNI_NETNS": state["netns"],
            "CNI_IFNAME": state["ifname"],
            "CNI_ARGS": names.render_args(pod),
            "CNI_PATH": state["path"],
        }

    def _outcome(self, state: dict[str, Any], milliseconds: float, notes: str) -> Outcome:
        entries: list[dict[str, Any]] = []
        if state["standalone"]:
            try:
                text = status_file.read(Path(state["standalone"]), self.namespace, self.name)
                entries = network_status.parse(text or "")
            except (OSError, ValueError, CniError) as error:
                notes = f"{notes}\nnetwork-status can't be read: {error}".strip()
        with explained(f"{state['netns']} can't be looked into"):
            view = namespaces.look(state["netns"])
        result = state["result"] or {}
        return Outcome(state["containerId"], state["netns"], result, entries, view, milliseconds, notes)


def _configuration(settings: Settings) -> dict[str, Any]:
    """Return the CNI configuration that the runtime reads for a daemon with these settings."""
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


def _failure(code: int, stdout: bytes, notes: str) -> CniError:
    try:
        return errors.from_object(gojson.loads_object(stdout))
    except gojson.JsonError:
        seen = stdout[:200].decode(errors="replace")
        return InternalError(f"the shim ended with status {code} and printed no CNI error", f"{seen!r} {notes}".strip())
