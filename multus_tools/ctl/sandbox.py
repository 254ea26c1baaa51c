"""Act as the container runtime for one pod: make a namespace, and call the shim as containerd does."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import multus_shim
from multus_daemon import settings
from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.store import Folder
from multus_daemon.runtime import fs
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import errors, gojson, names
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.names import label_problem, subdomain_problem
from multus_daemon.spec.nad import network_status
from multus_tools import deadlines
from multus_tools.command_line import Answer, CommandError, explained
from multus_tools.ctl import namespaces

DEFAULT_CNI_VERSION: Final = "1.0.0"
_CONTAINER_ID_BYTES: Final = 32
_POLL_SECONDS: Final = 0.05
_NOTHING: Final = {"containerId": "", "netns": "", "result": {}, "networkStatus": [], "pod": {}, "milliseconds": 0.0}
"""An empty answer. `pod`: interfaces and routes in the namespace (`namespaces.look`). `milliseconds`: of the shim."""


class Sandbox:
    """The sandbox of a pod. All methods block and raise CniError and CommandError.

    `up`, `check` and `down` return the JSON object of `--json`, and `notes`: standard error of the shim.
    """

    def __init__(self, given: Settings, pod: str, arguments: argparse.Namespace) -> None:
        """`given`: the daemon's settings; `pod`: `namespace/name`; `arguments`: those of the command."""
        self.settings, self.pod, self.arguments = given, pod, arguments
        self.namespace, _, self.name = pod.partition("/")
        self.run_directory = settings.runtime_directory() or Path("/run")
        # None: unknown; then no network-status can be shown.
        self.standalone: Path | None = arguments.standalone and arguments.standalone.absolute()

    def up(self) -> Answer:
        """Make the namespace, then ADD. After a failed ADD, DEL and remove the namespace, as every runtime does."""
        path = self._state_path()
        if path.exists():
            raise CommandError(f"pod {self.pod} is up already; run `multusctl sandbox down {self.pod}` first")
        state = self._new_state()
        self._require_daemon(state)
        self._save(state)
        try:
            namespaces.create(Path(state["netns"]))
        except OSError as error:
            fs.remove(path)
            raise CommandError(
                f"a network namespace can't be made: {error}; run as root, or in `unshare -Urnm`"
            ) from error
        try:
            stdout, done = self._call(state, "ADD")
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
        return self._outcome(state, done)

    def check(self) -> Answer:
        """Run CHECK."""
        state = self._load()
        if state is None:
            raise CommandError(f"pod {self.pod} is not up")
        return self._outcome(state, self._call(state, "CHECK")[1])

    def down(self) -> Answer:
        """Run DEL, then remove namespace and state. Does nothing if the pod is not up."""
        state = self._load()
        if state is None:
            return _NOTHING
        _, done = self._call(state, "DEL")
        with explained("detached, but the leftovers can't be removed"):
            namespaces.remove(Path(state["netns"]))
            if state["standalone"]:
                status_file.remove(Path(state["standalone"]), self.namespace, self.name)
            fs.remove(self._state_path())
        return {**_NOTHING, **done}

    # --- state ---

    def _state_path(self) -> Path:
        if problem := label_problem(self.namespace) or subdomain_problem(self.name):
            raise CommandError(f"{self.pod} can't be a pod: {problem}")
        # Neither name can contain the underscore.
        directory: Path = self.arguments.state_dir or self.run_directory / "multusctl"
        return directory / f"{self.namespace}_{self.name}.json"

    def _new_state(self) -> dict[str, Any]:
        with explained("no shim"):
            shim = self.arguments.shim.absolute() if self.arguments.shim else multus_shim.binary()
        netns_dir: Path = self.arguments.netns_dir or self.run_directory / "netns"
        return {
            "uid": self._uid(),
            "containerId": secrets.token_hex(_CONTAINER_ID_BYTES),
            "netns": str(netns_dir.absolute() / f"multus-{self.namespace}_{self.name}"),
            "ifname": self.arguments.ifname,
            "config": _configuration(self.settings),
            "path": self.settings.paths.bin_dir,
            "shim": str(shim),
            "standalone": str(self.standalone or ""),
            "result": None,
        }

    def _uid(self) -> str:
        """Return the UID in the pod's manifest; empty without `--standalone`, as from a runtime without Kubernetes."""
        if self.standalone is None:
            return ""
        with explained(f"manifests in {self.standalone} can't be read"):
            view = Folder(self.standalone).scan()
        pod = view.pods.get((self.namespace, self.name))
        if pod is None:
            broken = "".join(f"; {file}: {problem}" for file, problem in sorted(view.errors.items()))
            raise CommandError(f"no manifest in {self.standalone} declares pod {self.pod}{broken}")
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
                    options = {"--config": self.arguments.config, "--standalone": self.arguments.standalone or "DIR"}
                    words = [str(word) for item in options.items() if item[1] for word in item]
                    start = shlex.join(["multus-daemon", "run", *words])
                    raise CommandError(f"no daemon listens on {path}: {error.strerror}; start one: {start}") from error
            except OSError as error:
                raise CommandError(f"the daemon's socket {path} can't be used: {error.strerror or error}") from error
            time.sleep(_POLL_SECONDS)

    def _call(self, state: dict[str, Any], verb: str) -> tuple[bytes, Answer]:
        """Run the shim; return its standard output, and the keys of the answer that follow from it."""
        self._require_daemon(state)
        config = dict(state["config"])
        if verb != "ADD" and state["result"]:
            # libcni passes its cached result on.
            config["prevResult"] = state["result"]
        start = time.perf_counter()
        try:
            ended = subprocess.run(  # noqa: S603 - the shim, with the environment that a runtime gives
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
        notes = ended.stderr.decode(errors="replace").strip()
        if ended.returncode:
            try:
                raise errors.from_object(gojson.loads_object(ended.stdout))
            except gojson.JsonError:
                problem = f"the shim ended with status {ended.returncode} and printed no CNI error"
                seen = ended.stdout[:200].decode(errors="replace")
                raise InternalError(problem, f"{seen!r} {notes}".strip()) from None
        names = {key: state[key] for key in ("containerId", "netns")}
        return ended.stdout, {**names, "milliseconds": milliseconds, "notes": notes}

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

    def _outcome(self, state: dict[str, Any], done: Answer) -> Answer:
        entries: list[dict[str, Any]] = []
        if state["standalone"]:
            try:
                text = status_file.read(Path(state["standalone"]), self.namespace, self.name)
                entries = network_status.parse(text or "")
            except (OSError, ValueError, CniError) as error:
                done["notes"] = f"{done['notes']}\nnetwork-status can't be read: {error}".strip()
        with explained(f"{state['netns']} can't be looked into"):
            view = namespaces.look(state["netns"])
        return {**_NOTHING, **done, "result": state["result"] or {}, "networkStatus": entries, "pod": view}


def _configuration(given: Settings) -> dict[str, Any]:
    """Return the CNI configuration that the runtime reads for a daemon with these settings."""
    config: dict[str, Any] = {
        "cniVersion": given.networks.cni_version or DEFAULT_CNI_VERSION,
        "name": "multus-cni-network",
        "type": "multus-shim",
        "daemonSocketDir": given.socket.shim_directory or given.socket.directory,
        "cniDir": given.paths.cni_dir,
    }
    if given.networks.cluster_network:
        config["clusterNetwork"] = given.networks.cluster_network
    return config
