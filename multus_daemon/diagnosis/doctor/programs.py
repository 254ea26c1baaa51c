"""Check the daemon, its socket, the runtime's configuration, the shim and the plugins."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from multus_daemon.diagnosis.doctor.finding import Finding, Node, Severity
from multus_daemon.diagnosis.plugins import machine_problem
from multus_daemon.plugins.builtin.runner import PLUGINS
from multus_daemon.runtime import elf, fs
from multus_daemon.spec.attachment import BUILT_IN
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.netconf import generate, primary

_RUNTIME_SUFFIXES: Final = (".conf", ".conflist", ".json")
_CONF_MAX_BYTES: Final = 1024 * 1024
_DAEMON_NAMES: Final = ("multus-daemon", "multus-daemon-thick")
_OTHER_COMMANDS: Final = frozenset(
    (b"cert-approver", b"webhook", b"kubeconfig-generator", b"install", b"uninstall", b"check-config", b"version")
)
"""Commands of the same program that do not run a node's daemon."""


def daemon(node: Node) -> Iterator[Finding]:
    """Check that the daemon answers and is ready."""
    problem, gates = node.answers()
    if problem:
        advice = "kubectl -n kube-system get pods -l app=multus -o wide, and the log of the node's pod"
        yield Finding("daemon", "error", "multus-daemon", problem, advice)
    for gate, reason in gates.items():
        yield Finding("daemon", "error", f"readiness gate {gate}", reason, "multusctl status")


def socket(node: Node) -> Iterator[Finding]:
    """Check type and mode of the socket, and the mode of its directory."""
    directory = Path(node.settings.socket.directory)
    path = directory / "multus.sock"
    try:
        status = path.lstat()
    except FileNotFoundError:
        # daemon() reports that it does not answer.
        return
    if not stat.S_ISSOCK(status.st_mode):
        advice = f"mv {path} {path}.away, then restart the daemon"
        yield Finding("socket", "error", str(path), "is not a socket", advice)
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        evidence, fix = f"mode {mode:04o}: others than its owner may connect", partial(path.chmod, 0o600)
        yield Finding("socket", "warning", str(path), evidence, f"chmod 600 {path}", fix, "chmod 600")
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        evidence, fix = f"mode {mode:04o}: others can replace the socket", partial(directory.chmod, 0o700)
        yield Finding("socket", "error", str(directory), evidence, f"chmod 700 {directory}", fix, "chmod 700")


def runtime_configuration(node: Node) -> Iterator[Finding]:
    """Check that our configuration is the first by name in the runtime's directory: the runtime uses that one."""
    wanted = node.settings.primary
    if not wanted.config_dir:
        return
    directory = Path(wanted.config_dir)
    names = sorted(name for name in os.listdir(directory) if name.endswith(_RUNTIME_SUFFIXES) and name[0] != ".")
    is_auto = wanted.config_file == "auto"
    ours = generate.FILE_NAME if is_auto else Path(wanted.config_file).name
    if is_auto and not wanted.autoconfig_dir:
        ours = ""
    for name in names:
        path = directory / name
        data = fs.read_limited(path, limit=_CONF_MAX_BYTES)
        try:
            plugins = conf.parse(data, default_name="unnamed", allow_no_plugins=True).plugins
        except (CniError, gojson.JsonError) as error:
            if data != generate.PLACEHOLDER:
                yield Finding("configuration", "warning", str(path), str(error), "correct or remove the file")
            continue
        types = {plugin.type for plugin in plugins}
        if name != ours and primary.OWN_TYPES & types:
            before = " and comes first" if not ours or name < ours else ""
            severity: Severity = "error" if before else "warning"
            what = "another Multus (the thin plugin, or a second DaemonSet)" if "multus" in types else "another Multus"
            evidence = f"is a configuration of {what}{before}"
            yield Finding("configuration", severity, str(path), evidence, f"uninstall it, then: rm {path}")
    if not ours:
        return
    first = ours
    if ours not in names:
        evidence, advice = "is not there: pods start without Multus", "multusctl status says what is waited for"
    elif names[0] != ours:
        first = names[0]
        evidence = f"comes first, so the runtime does not read {ours}: pods start without Multus"
        advice = "remove it, or give it a name that sorts later; its agent's settings say which name it writes"
    elif fs.read_limited(directory / ours, limit=_CONF_MAX_BYTES) == generate.PLACEHOLDER:
        evidence = "keeps the place only: the cluster network's configuration has not come yet"
        advice = "install the cluster network (CNI) of the cluster"
    else:
        return
    yield Finding("configuration", "error", str(directory / first), evidence, advice)


def shim(node: Node) -> Iterator[Finding]:
    """Check that the runtime can execute the shim."""
    path = f"{node.settings.paths.bin_dir}/{node.settings.primary.plugin_type}"
    try:
        program = node.host(path)
        mode = program.stat().st_mode
        if not stat.S_ISREG(mode):
            problem = "is not a file"
        elif not mode & 0o111:
            problem = f"mode {stat.S_IMODE(mode):04o}: is not executable"
        else:
            problem = machine_problem(program)
    except FileNotFoundError:
        problem = "is not there: the runtime can't call Multus"
    except elf.NoProgramError as error:
        problem = str(error)
    if problem:
        yield Finding("shim", "error", path, problem, "kubectl -n kube-system rollout restart daemonset/kube-multus-ds")


def plugins(node: Node) -> Iterator[Finding]:
    """Check that the binaries that attached the networks on record exist, and that all run on this machine."""
    bin_dir = node.settings.paths.bin_dir
    used: dict[str, str] = {}
    for record in node.records():
        for item in record.attachments:
            for name, where in item.served_by.items():
                if where != BUILT_IN:
                    used.setdefault(name, record.pod)
    directory = node.host(bin_dir)
    present = set(os.listdir(directory))
    for name, pod in sorted(used.items()):
        if name not in present and (name not in PLUGINS or node.settings.plugins.builtin_plugins == "off"):
            evidence = f"is not there, and has attached networks of pod {pod}: its DEL and CHECK fail"
            yield Finding("plugins", "error", f"{bin_dir}/{name}", evidence, "install the plugin again")
    for name in sorted(present - {node.settings.primary.plugin_type}):
        path = directory / name
        try:
            problem = machine_problem(path) if path.is_file() else ""
        except elf.NoProgramError:
            continue
        if problem:
            severity: Severity = "error" if name in used else "warning"
            advice = "install the plugins of this node's architecture"
            yield Finding("plugins", severity, f"{bin_dir}/{name}", problem, advice)


def others(node: Node) -> Iterator[Finding]:
    """Search for other daemons on this node. In a pod without hostPID they are not visible."""
    running: list[str] = []
    for process in node.proc.iterdir():
        if process.name.isdecimal():
            try:
                command = process.joinpath("cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            words = [os.path.basename(os.fsdecode(word)) for word in command[:3]]
            if any(word in _DAEMON_NAMES for word in words) and not _OTHER_COMMANDS & set(command):
                running.append(process.name)
    if len(running) > 1:
        evidence = f"{len(running)} daemons run on this node (processes {', '.join(sorted(running, key=int))})"
        advice = "kubectl get daemonsets -A | grep -i multus, and delete the one that is not wanted (docs/migration.md)"
        yield Finding("others", "error", "multus-daemon", evidence, advice)
