"""Find faults of this node, with the evidence and the command that repairs each. Nothing is changed.

An error keeps pods from starting or cuts their networks. A warning will, or resources leak. An info is worth knowing.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import multus_shim
from multus_daemon.cluster import conf_files
from multus_daemon.cluster.conf_files import CONF_MAX_BYTES
from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.pod.records import by_hand
from multus_daemon.runtime import elf, fs
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import BUILT_IN, ContainerRecord
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.remedies import parted
from multus_daemon.spec.netconf import primary
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore
from multus_tools import inventory
from multus_tools.inventory import machine_problem

Severity = Literal["error", "warning", "info"]

_LEAST_FREE_BYTES: Final = 16 * 1024 * 1024
_LEAST_FREE_INODES: Final = 1000
_IP_FORWARD: Final = {"IPv4": "net/ipv4/ip_forward", "IPv6": "net/ipv6/conf/all/forwarding"}
_VETH: Final = re.compile(r"veth[0-9a-f]{8}")
"""Name of the host's end of a pair, as the bridge and ptp plugins (built in or not) choose it."""
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of the node."""

    check: str
    severity: Severity
    subject: str
    """A path, a pod, a program."""
    evidence: str
    advice: str
    """A command, or what to do."""
    fix: Callable[[], None] | None = field(default=None, compare=False)
    """The repair, if it is safe to run unasked. Raises OSError."""
    fix_is: str = ""
    """The repair in words."""


@dataclass(frozen=True)
class Node:
    """The node under examination."""

    settings: Settings
    store: DelegateStore
    vanished: Callable[[set[str]], set[str]]
    """`ports.Namespaces.vanished`: returns the network namespaces that are certainly gone."""
    answers: Callable[[], tuple[str, Mapping[str, Any]]]
    """Returns why the daemon does not answer, empty if it does, and its answer to `status`, empty without one."""
    in_cluster: bool = "KUBERNETES_SERVICE_HOST" in os.environ
    """True if a DaemonSet runs the daemon."""
    tool: Callable[[Sequence[str]], str] = lambda _: ""
    """Runs a program of the host and returns its output; empty if it does not exist or fails."""
    lease_dirs: Sequence[Path] = ()
    """host-local's directories, as this process sees them."""

    def host(self, path: str) -> Path:
        """Return where this process sees `path` of the host. Raises OSError if it does not exist."""
        return Path(fs.resolve(self.settings.paths.chroot_dir, path))

    def records(self) -> Iterator[ContainerRecord]:
        """Yield our records, except damaged ones. Raises OSError."""
        for container_id in self.store.containers(foreign=False):
            with contextlib.suppress(CorruptRecordError):
                record = self.store.load(container_id)
                if record is not None:
                    yield record


def examine(node: Node) -> list[Finding]:
    """Return all findings, errors first. A check that fails is a finding itself."""
    findings: list[Finding] = []
    checks = (daemon, socket, runtime_configuration, shim, plugins, others)
    for check in (*checks, kernel, disk, records, leases, links, rules):
        try:
            findings += check(node)
        except OSError as error:
            name, subject = check.__name__.replace("_", " "), str(error.filename or "")
            evidence = f"can't be read: {error.strerror or error}"
            advice = "run it as root" if os.geteuid() else "look at the permissions and the disk of that path"
            findings.append(Finding(name, "warning", subject, evidence, advice))
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(findings, key=lambda item: order[item.severity])


def to_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON object of `doctor --json`."""
    keys = ("check", "severity", "subject", "evidence", "advice")
    objects = [{key: getattr(item, key) for key in keys} | {"fix": item.fix_is} for item in findings]
    return {"schema": "multusctl.doctor/v1", "findings": objects}


def daemon(node: Node) -> Iterator[Finding]:
    """Check that the daemon answers and is ready."""
    problem, status = node.answers()
    if problem:
        in_cluster = "kubectl get pods -A -l app=multus -o wide, and the log of the node's pod"
        advice = in_cluster if node.in_cluster else "start it; its log says why it has ended"
        yield Finding("daemon", "error", "multus-daemon", problem, advice)
    for gate, reason in status.get("gates", {}).items():
        yield Finding("daemon", "error", f"readiness gate {gate}", reason, "multusctl status")
    for name, reason in status.get("degraded", {}).items():
        evidence, advice = parted(reason)
        yield Finding("daemon", "warning", f"degraded: {name}", evidence, advice or "multusctl status")


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
    names = conf_files.names(directory)
    is_auto = wanted.config_file == "auto"
    ours = primary.FILE_NAME if is_auto else Path(wanted.config_file).name
    if is_auto and not wanted.autoconfig_dir:
        ours = ""
    for name in names:
        path = directory / name
        data = fs.read_limited(path, limit=CONF_MAX_BYTES)
        try:
            plugins = conf.parse(data, default_name="unnamed", allow_no_plugins=True).plugins
        except CniError as error:
            if data != primary.PLACEHOLDER:
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
    first, _ = conf_files.before(directory / ours, wanted.plugin_type)
    if ours not in names:
        evidence, advice = "is not there: pods start without Multus", "multusctl status says what is waited for"
    elif first:
        evidence = f"comes first, so the runtime does not read {ours}: pods start without Multus"
        advice = "remove it, or give it a name that sorts later; its agent's settings say which name it writes"
    elif fs.read_limited(directory / ours, limit=CONF_MAX_BYTES) == primary.PLACEHOLDER:
        evidence = "keeps the place only: the cluster network's configuration has not come yet"
        advice = "install the cluster network (CNI) of the cluster"
    else:
        return
    yield Finding("configuration", "error", str(directory / (first or ours)), evidence, advice)


def shim(node: Node) -> Iterator[Finding]:
    """Check that the runtime can execute the shim, and that it is the one of this release."""
    path = f"{node.settings.paths.bin_dir}/{node.settings.primary.plugin_type}"
    try:
        program = node.host(path)
        mode = program.stat().st_mode
        if not stat.S_ISREG(mode):
            problem = "is not a file"
        elif not mode & 0o111:
            problem = f"mode {stat.S_IMODE(mode):04o}: is not executable"
        else:
            problem = machine_problem(program) or _differs(program)
    except FileNotFoundError:
        problem = "is not there: the runtime can't call Multus"
    except elf.NoProgramError as error:
        problem = str(error)
    if problem:
        in_cluster = "delete the daemon's pod of this node: its start puts the shim there"
        advice = in_cluster if node.in_cluster else "multus-daemon install puts it there"
        yield Finding("shim", "error", path, problem, advice)


def _differs(installed: Path) -> str:
    """Return how the installed shim differs from this program's own, empty if it does not or there is none."""
    try:
        ours = multus_shim.binary().read_bytes()
    except OSError:
        return ""
    theirs = installed.read_bytes()
    if theirs == ours:
        return ""
    return f"is damaged or of another release: {len(theirs)} bytes, and the shim of this release has {len(ours)}"


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
    """Search for other daemons in the network namespace of the node."""
    sockets = inventory.listening()
    if len(sockets) > 1:
        processes = ", ".join(sorted(inventory.holders(sockets), key=int)) or "not visible without hostPID"
        evidence = f"{len(sockets)} daemons run on this node (processes: {processes})"
        advice = "kubectl get daemonsets -A | grep -i multus, and delete the one that is not wanted (docs/migration.md)"
        yield Finding("others", "error", "multus-daemon", evidence, advice)


def kernel(node: Node) -> Iterator[Finding]:
    """Check that the kernel forwards."""
    for family, name in _IP_FORWARD.items():
        path = Path("/proc/sys", name)
        try:
            is_on = path.read_text().strip() == "1"
        except FileNotFoundError:
            yield Finding("kernel", "info", family, "this kernel has no such networking", "nothing, if no pod needs it")
            continue
        if not is_on:
            evidence = "is 0: pods of routed networks and of bridges can't reach anything beyond the node"
            advice = f"sysctl -w {name.replace('/', '.')}=1, if this node routes for pods"
            yield Finding("kernel", "info", str(path), evidence, advice)


def disk(node: Node) -> Iterator[Finding]:
    """Check space and modes of `cniDir`, and DELs that were rejected."""
    directory = Path(node.settings.paths.cni_dir)
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    evidence = advice = ""
    if room.f_flag & os.ST_RDONLY:
        evidence, advice = "is read-only: no pod can be attached", "mount it for writing"
    elif free < _LEAST_FREE_BYTES:
        evidence = f"{free // 1024} KiB are free: ADDs fail where a record can't be written"
        advice = f"make room; see du -x {directory} and its file system"
    elif room.f_files and room.f_favail < _LEAST_FREE_INODES:
        evidence = f"{room.f_favail} inodes are free: ADDs fail where a record can't be written"
        advice = "remove small files from this file system"
    if evidence:
        yield Finding("disk", "error", str(directory), evidence, advice)
    for path in (directory / "attachments", directory / "results"):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            continue
        if mode & 0o077:
            evidence = f"mode {mode:04o}: others can see, or change, what is attached"
            fix = partial(path.chmod, 0o700)
            yield Finding("disk", "warning", str(path), evidence, f"chmod 700 {path}", fix, "chmod 700")
    rejected = directory / "spool" / "rejected"
    if rejected.is_dir() and (entries := sorted(os.listdir(rejected))):
        evidence = f"{len(entries)} DELs could not be served, {entries[0]} for one"
        advice = "the daemon's log says why; multusctl attachments --leaks shows what is left, then remove the files"
        yield Finding("spool", "warning", str(rejected), evidence, advice)


def records(node: Node) -> Iterator[Finding]:
    """Check for records that are damaged, are not deleted, or are set aside."""
    readable = []
    for container_id in node.store.containers(foreign=False):
        try:
            record = node.store.load(container_id)
        except CorruptRecordError as error:
            yield Finding("records", "error", f"container {container_id}", str(error), by_hand(container_id))
            continue
        if record is not None:
            readable.append(record)
    vanished = node.vanished({record.sandbox.netns for record in readable if record.sandbox.netns})
    for record in readable:
        subject = f"pod {record.pod}, container {record.sandbox.container_id}"
        if record.sandbox.netns in vanished:
            evidence = (
                "its network namespace is gone, but its networks are on record: addresses and links may be leaked"
            )
            advice = "the daemon deletes them within reconcileSeconds; its log says why not"
            yield Finding("records", "warning", subject, evidence, advice)
        elif record.given_up:
            evidence = f"its DEL failed {record.deletes_failed} times and was given up"
            yield Finding("records", "warning", subject, evidence, "multusctl attachments --leaks says why")
    for item in node.store.aside():
        subject, advice = f"container {item.container_id}", by_hand(item.container_id)
        yield Finding("records", "warning", subject, f"was set aside, its DEL is not retried: {item.why}", advice)


def leases(node: Node) -> Iterator[Finding]:
    """Search for addresses that host-local holds for containers without a record."""
    known = {str(container_id) for container_id in node.store.containers(foreign=True)}
    for directory in node.lease_dirs:
        for network in sorted(entry for entry in directory.iterdir() if entry.joinpath("lock").exists()):
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


def links(node: Node) -> Iterator[Finding]:
    """Search for host ends of pairs that are down and on no record."""
    known = {
        link.name
        for record in node.records()
        for item in record.attachments
        for link in (item.result.interfaces if item.result else ())
    }
    for path in sorted(Path("/sys/class/net").iterdir()):
        if not _VETH.fullmatch(path.name) or path.name in known:
            continue
        if path.joinpath("operstate").read_text().strip() != "up":
            evidence = "is the host's end of a pair, is down, and is on no record"
            advice = f"if no pod without Multus has it: ip link delete {path.name}"
            yield Finding("links", "info", path.name, evidence, advice)


def rules(node: Node) -> Iterator[Finding]:
    """Search for masquerade rules of the bridge and ptp plugins (built in or not) for containers without a record."""
    known = {str(container_id) for container_id in node.store.containers(foreign=True)}
    for where, command, pattern, advice in _RULES:
        unknown = {match["id"] for match in pattern.finditer(node.tool(command))} - known
        for container_id in sorted(unknown):
            evidence = f"{where} has masquerade rules for it, and it is not on record here"
            yield Finding("rules", "info", f"container {container_id[:13]}", evidence, advice.format(container_id))
