"""What is wrong with this node, with the evidence and the command that mends it. Looks, and changes nothing.

    {"schema": "multusctl.doctor/v1", "findings": [
      {"check": "socket", "severity": "error", "warning" or "info", "subject": "/run/multus/multus.sock",
       "evidence": …, "advice": …, "fix": <what `--fix` would do; empty: nothing is safe to do>}]}

An error keeps pods from starting, or takes their networks; a warning will, or leaks; an info is worth knowing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from multus_daemon.plugins.builtin.runner import PLUGINS
from multus_daemon.runtime import elf, fs
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import BUILT_IN, ContainerRecord
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.netconf import generate, primary
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore

SCHEMA: Final = "multusctl.doctor/v1"
Severity = Literal["error", "warning", "info"]

_RUNTIME_SUFFIXES: Final = (".conf", ".conflist", ".json")
_CONF_MAX_BYTES: Final = 1024 * 1024
_DAEMON_NAMES: Final = ("multus-daemon", "multus-daemon-thick")
_OTHER_COMMANDS: Final = frozenset(
    (b"cert-approver", b"webhook", b"kubeconfig-generator", b"install", b"uninstall", b"check-config", b"version")
)
"""Of the same program, and no daemon of a node."""
_LEAST_FREE_BYTES: Final = 16 * 1024 * 1024
_LEAST_FREE_INODES: Final = 1000
_VETH: Final = re.compile(r"veth[0-9a-f]{8}")
"""What the bridge and ptp plugins, built in or not, call the host's end of a pair."""
_RULES: Final = (
    (
        "iptables",
        ("iptables-save", "-t", "nat"),
        re.compile(r'--comment "name: \\"[^"]*\\" id: \\"(?P<id>[A-Za-z0-9_.-]+)\\""'),
        "if crictl pods does not know it either, delete them; `iptables-save -t nat | grep {}` shows them",
    ),
    (
        "nftables",
        ("nft", "list", "table", "inet", "cni_plugins_masquerade"),
        re.compile(r'net: [^,"]*, if: [^,"]*, id: (?P<id>[A-Za-z0-9_.-]+)'),
        "if crictl pods does not know it either, delete them; "
        "`nft -a list table inet cni_plugins_masquerade | grep {}` shows their handles",
    ),
)
_IP_FORWARD: Final = {"IPv4": "net/ipv4/ip_forward", "IPv6": "net/ipv6/conf/all/forwarding"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    check: str
    severity: Severity
    subject: str
    """A path, a pod, a program."""
    evidence: str
    advice: str
    """A command, or what to do."""
    fix: Callable[[], None] | None = field(default=None, compare=False)
    """What mends it, where that can harm nobody. Raises OSError."""
    fix_is: str = ""
    """In words, what `fix` does."""

    def to_object(self) -> dict[str, str]:
        """As the module's docstring has it."""
        texts = (self.check, self.severity, self.subject, self.evidence, self.advice, self.fix_is)
        return dict(zip(("check", "severity", "subject", "evidence", "advice", "fix"), texts, strict=True))


@dataclass(frozen=True)
class Node:
    """What is looked at."""

    settings: Settings
    store: DelegateStore
    vanished: Callable[[set[str]], set[str]]
    """Which of the network namespaces are certainly gone: `ports.LinkOps` has it."""
    answers: Callable[[], tuple[str, dict[str, str]]]
    """Why no daemon answers, empty where one does; then its closed gates."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    tool: Callable[[Sequence[str]], str] = lambda _: ""
    """Runs a program of the host; what it prints, empty where it is not there or fails."""
    lease_dirs: Sequence[Path] = ()
    """host-local's directories of networks, as we see them."""

    def host(self, path: str) -> Path:
        """`path` of the host, as we see it. Raises OSError where it is not there."""
        return Path(fs.resolve(self.settings.paths.chroot_dir, path))


def examine(node: Node) -> list[Finding]:
    """Every finding, errors first. A check that can't be made is a finding itself."""
    found: list[Finding] = []
    for check in _CHECKS:
        try:
            found += check(node)
        except OSError as error:
            name = check.__name__.strip("_").replace("_", " ")
            subject = str(error.filename or "")
            found.append(
                Finding(name, "warning", subject, f"can't be looked at: {error.strerror or error}", "run it as root")
            )
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda item: order[item.severity])


def to_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """As the module's docstring has it."""
    return {"schema": SCHEMA, "findings": [item.to_object() for item in findings]}


# --- the daemon and its socket ---------------------------------------------------------------------------------------


def _daemon(node: Node) -> Iterator[Finding]:
    problem, gates = node.answers()
    if problem:
        advice = "kubectl -n kube-system get pods -l app=multus -o wide, and the log of the node's pod"
        yield Finding("daemon", "error", "multus-daemon", problem, advice)
    for gate, reason in gates.items():
        yield Finding("daemon", "error", f"readiness gate {gate}", reason, "multusctl status")


def _socket(node: Node) -> Iterator[Finding]:
    directory = Path(node.settings.socket.directory)
    path = directory / "multus.sock"
    try:
        status = path.lstat()
    except FileNotFoundError:
        # That nobody answers has been told.
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield Finding("socket", "error", str(path), "is no socket", f"mv {path} {path}.away, then restart the daemon")
        return
    if stat.S_IMODE(status.st_mode) & 0o077:
        evidence = f"mode {stat.S_IMODE(status.st_mode):04o}: others than its owner may connect"
        yield Finding(
            "socket", "warning", str(path), evidence, f"chmod 600 {path}", lambda: path.chmod(0o600), "chmod 600"
        )
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        evidence = f"mode {mode:04o}: others can replace the socket"
        fix = lambda: directory.chmod(0o700)  # noqa: E731  one line, one place
        yield Finding("socket", "error", str(directory), evidence, f"chmod 700 {directory}", fix, "chmod 700")


# --- what the runtime reads ------------------------------------------------------------------------------------------


def _runtime_configuration(node: Node) -> Iterator[Finding]:
    """Of the files in the runtime's directory the first by name counts, and it has to be ours."""
    wanted = node.settings.primary
    if not wanted.config_dir:
        return
    directory = Path(wanted.config_dir)
    names = sorted(name for name in os.listdir(directory) if name.endswith(_RUNTIME_SUFFIXES) and name[0] != ".")
    ours = generate.FILE_NAME if wanted.config_file == "auto" else Path(wanted.config_file).name
    if wanted.config_file == "auto" and not wanted.autoconfig_dir:
        ours = ""
    for name in names:
        path = directory / name
        data = fs.read_limited(path, limit=_CONF_MAX_BYTES)
        try:
            types = _types(data)
        except (CniError, gojson.JsonError) as error:
            if data != generate.PLACEHOLDER:
                yield Finding("configuration", "warning", str(path), str(error), "correct or remove the file")
            continue
        if name != ours and primary.OWN_TYPES & types:
            before = " and comes first" if not ours or name < ours else ""
            severity: Severity = "error" if before else "warning"
            what = "another Multus (the thin plugin, or a second DaemonSet)" if "multus" in types else "another Multus"
            evidence = f"is a configuration of {what}{before}"
            yield Finding("configuration", severity, str(path), evidence, f"uninstall it, then: rm {path}")
    if not ours:
        return
    if ours not in names:
        evidence = "is not there: pods start without Multus"
        yield Finding(
            "configuration", "error", str(directory / ours), evidence, "multusctl status says what is waited for"
        )
    elif names[0] != ours:
        evidence = f"comes first, so the runtime does not read {ours}: pods start without Multus"
        advice = "remove it, or give it a name that sorts later; its agent's settings say which name it writes"
        yield Finding("configuration", "error", str(directory / names[0]), evidence, advice)
    elif fs.read_limited(directory / ours, limit=_CONF_MAX_BYTES) == generate.PLACEHOLDER:
        evidence = "keeps the place only: the cluster network's configuration has not come yet"
        yield Finding(
            "configuration",
            "error",
            str(directory / ours),
            evidence,
            "install the cluster network (CNI) of the cluster",
        )


def _types(data: bytes) -> set[str]:
    """Raises CniError, gojson.JsonError."""
    return {plugin.type for plugin in conf.parse(data, default_name="unnamed", allow_no_plugins=True).plugins}


# --- programs --------------------------------------------------------------------------------------------------------


def _shim(node: Node) -> Iterator[Finding]:
    path = f"{node.settings.paths.bin_dir}/{node.settings.primary.plugin_type}"
    try:
        problem = _program_problem(node.host(path))
    except FileNotFoundError:
        problem = "is not there: the runtime can't call Multus"
    if problem:
        yield Finding("shim", "error", path, problem, "kubectl -n kube-system rollout restart daemonset/kube-multus-ds")


def _plugins(node: Node) -> Iterator[Finding]:
    """The plugins that have attached what is on record, and any other of another architecture."""
    used: dict[str, str] = {}
    for record in _readable(node.store):
        for item in record.attachments:
            for name, where in item.served_by.items():
                if where != BUILT_IN:
                    used.setdefault(name, record.pod)
    directory = node.host(node.settings.paths.bin_dir)
    present = set(os.listdir(directory))
    for name, pod in sorted(used.items()):
        if name not in present and (name not in PLUGINS or node.settings.plugins.builtin_plugins == "off"):
            evidence = f"is not there, and has attached networks of pod {pod}: its DEL and CHECK fail"
            yield Finding(
                "plugins", "error", f"{node.settings.paths.bin_dir}/{name}", evidence, "install the plugin again"
            )
    for name in sorted(present):
        path = directory / name
        if not path.is_file() or name == node.settings.primary.plugin_type:
            continue
        try:
            with path.open("rb") as file:
                foreign = elf.foreign_machine(file.read(elf.HEAD_BYTES))
        except elf.NoProgramError:
            continue
        if foreign:
            severity: Severity = "error" if name in used else "warning"
            evidence = f"is a program for {foreign}, and this node is {os.uname().machine}"
            advice = "install the plugins of this node's architecture"
            yield Finding("plugins", severity, f"{node.settings.paths.bin_dir}/{name}", evidence, advice)


def _program_problem(path: Path) -> str:
    """Why the program can't be executed; empty where it can. Raises OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if not status.st_mode & 0o111:
        return f"mode {stat.S_IMODE(status.st_mode):04o}: is not executable"
    with path.open("rb") as file:
        try:
            foreign = elf.foreign_machine(file.read(elf.HEAD_BYTES))
        except elf.NoProgramError as error:
            return str(error)
    return f"is a program for {foreign}, and this node is {os.uname().machine}" if foreign else ""


def _others(node: Node) -> Iterator[Finding]:
    """Other daemons on this node: in a pod without hostPID there is nobody to be seen."""
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


# --- the node --------------------------------------------------------------------------------------------------------


def _kernel(node: Node) -> Iterator[Finding]:
    for family, name in _IP_FORWARD.items():
        path = node.proc / "sys" / name
        try:
            is_on = path.read_text().strip() == "1"
        except FileNotFoundError:
            yield Finding("kernel", "info", family, "this kernel has no such networking", "nothing, if no pod needs it")
            continue
        if not is_on:
            evidence = "is 0: pods of routed networks and of bridges reach nobody beyond the node"
            advice = f"sysctl -w {name.replace('/', '.')}=1, if this node routes for pods"
            yield Finding("kernel", "info", str(path), evidence, advice)


def _disk(node: Node) -> Iterator[Finding]:
    directory = Path(node.settings.paths.cni_dir)
    room = os.statvfs(directory)
    if room.f_flag & os.ST_RDONLY:
        yield Finding("disk", "error", str(directory), "is read-only: no pod can be attached", "mount it for writing")
    elif room.f_bavail * room.f_frsize < _LEAST_FREE_BYTES:
        evidence = f"{room.f_bavail * room.f_frsize // 1024} KiB are free: ADDs fail where a record can't be written"
        yield Finding(
            "disk", "error", str(directory), evidence, f"make room; see du -x {directory} and its file system"
        )
    elif room.f_files and room.f_favail < _LEAST_FREE_INODES:
        evidence = f"{room.f_favail} inodes are free: ADDs fail where a record can't be written"
        yield Finding("disk", "error", str(directory), evidence, "remove small files from this file system")
    for path in (directory / "attachments", directory / "results"):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            continue
        if mode & 0o077:
            evidence = f"mode {mode:04o}: others can see, or change, what is attached"
            advice = f"chmod 700 {path}"
            yield Finding("disk", "warning", str(path), evidence, advice, _chmod(path, 0o700), "chmod 700")
    rejected = directory / "spool" / "rejected"
    if rejected.is_dir() and (entries := sorted(os.listdir(rejected))):
        evidence = f"{len(entries)} DELs could not be served, {entries[0]} for one"
        advice = "the daemon's log says why; multusctl attachments --leaks shows what is left, then remove the files"
        yield Finding("spool", "warning", str(rejected), evidence, advice)


def _chmod(path: Path, mode: int) -> Callable[[], None]:
    return lambda: path.chmod(mode)


# --- what is left over -----------------------------------------------------------------------------------------------


def _records(node: Node) -> Iterator[Finding]:
    vanished = node.vanished({record.sandbox.netns for record in _readable(node.store) if record.sandbox.netns})
    for container_id in node.store.containers(foreign=False):
        try:
            record = node.store.load(container_id)
        except CorruptRecordError as error:
            advice = f"free by hand what it held, then: multusctl attachments forget {container_id}"
            yield Finding("records", "error", f"container {container_id}", str(error), advice)
            continue
        if record is None:
            continue
        subject = f"pod {record.pod}, container {container_id}"
        if record.sandbox.netns in vanished:
            evidence = "its network namespace is gone, and its networks are on record: addresses and links may be held"
            yield Finding(
                "records",
                "warning",
                subject,
                evidence,
                "the daemon deletes them within reconcileSeconds; its log says why not",
            )
        elif record.given_up:
            evidence = f"its DEL failed {record.deletes_failed} times and was given up"
            yield Finding("records", "warning", subject, evidence, "multusctl attachments --leaks says why")
    for item in node.store.aside():
        evidence = f"was set aside, nobody tries to delete it any more: {item.why}"
        advice = f"free by hand what it held, then: multusctl attachments forget {item.container_id}"
        yield Finding("records", "warning", f"container {item.container_id}", evidence, advice)


def _leases(node: Node) -> Iterator[Finding]:
    """Addresses of host-local that are held for a container that nobody knows."""
    known = {str(container_id) for container_id in node.store.containers(foreign=True)}
    for directory in node.lease_dirs:
        for network in sorted(entry for entry in directory.iterdir() if entry.is_dir()):
            if not network.joinpath("lock").exists():
                continue
            for lease in sorted(network.iterdir()):
                if not lease.name[0].isalnum() or lease.name == "lock" or lease.name.startswith("last_reserved_ip"):
                    continue
                try:
                    owner = fs.read_limited(lease, limit=4096, follow=False).decode("utf-8", "replace").split()
                except FileNotFoundError:
                    continue
                if owner and owner[0] not in known:
                    evidence = f"is held for container {owner[0][:13]}, which is not on record here"
                    advice = f"if crictl pods does not know that container either: rm {lease}"
                    yield Finding("leases", "info", f"{network.name}: {lease.name}", evidence, advice)


def _links(node: Node) -> Iterator[Finding]:
    """Ends of pairs on the host that are down, and nobody's."""
    known = {
        link.name
        for record in _readable(node.store)
        for item in record.attachments
        for link in (item.result.interfaces if item.result else ())
    }
    for path in sorted((node.sys / "class/net").iterdir()):
        if not _VETH.fullmatch(path.name) or path.name in known:
            continue
        if path.joinpath("operstate").read_text().strip() != "up":
            evidence = "is the host's end of a pair, is down, and is on no record"
            advice = f"if no pod without Multus has it: ip link delete {path.name}"
            yield Finding("links", "info", path.name, evidence, advice)


def _rules(node: Node) -> Iterator[Finding]:
    """Masquerading of the bridge and ptp plugins, built in or not, for a container that nobody knows."""
    known = {str(container_id) for container_id in node.store.containers(foreign=True)}
    for where, command, pattern, advice in _RULES:
        lost = {match["id"] for match in pattern.finditer(node.tool(command))} - known
        for container_id in sorted(lost):
            evidence = f"{where} has masquerade rules for it, and it is not on record here"
            yield Finding("rules", "info", f"container {container_id[:13]}", evidence, advice.format(container_id))


def _readable(store: DelegateStore) -> Iterator[ContainerRecord]:
    """Our own records. Raises OSError."""
    for container_id in store.containers(foreign=False):
        try:
            record = store.load(container_id)
        except CorruptRecordError:
            continue
        if record is not None:
            yield record


_CHECKS: Final = (
    _daemon,
    _socket,
    _runtime_configuration,
    _shim,
    _plugins,
    _others,
    _kernel,
    _disk,
    _records,
    _leases,
    _links,
    _rules,
)
