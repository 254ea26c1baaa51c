"""Find faults of this node, each with evidence and the command that repairs it. Changes nothing.

Severities: an error keeps pods from starting or cuts their networks; a warning will do so later, or leaks resources; an
info needs no action.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import multus_shim
from multus_daemon.cluster import conf_files
from multus_daemon.cluster.conf_files import CONF_MAX_BYTES
from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.pod.records import by_hand
from multus_daemon.runtime import elf, fs
from multus_daemon.settings import Settings
from multus_daemon.spec import netconf
from multus_daemon.spec.attachment import BUILT_IN, ContainerRecord
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, as_on_host, parted
from multus_daemon.spec.ports import CorruptRecordError
from multus_tools import deadlines, inventory
from multus_tools.ctl import offline
from multus_tools.inventory import machine_problem

Severity = Literal["error", "warning", "info"]

_LEASES: Final = "/var/lib/cni/networks"
"""Default directory of host-local's reserved addresses."""
_LEAST_FREE_BYTES: Final = 16 * 1024 * 1024
_LEAST_FREE_INODES: Final = 1000
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
    """What the finding is about: a path, a pod or a program."""
    evidence: str
    advice: str
    """A command that repairs it, or a text that says what to do."""
    mode: int = 0
    """The file mode that `--fix` sets if the subject is a path; 0: `--fix` does nothing."""

    @property
    def fix(self) -> str:
        """Text about what `--fix` does; empty if it does nothing."""
        return f"chmod {self.mode:o}" if self.mode else ""


class Node:
    """The node under examination."""

    def __init__(self, settings: Settings, answers: Callable[[], tuple[str, Mapping[str, Any]]]) -> None:
        """`answers` returns why the daemon does not answer (else empty), and its answer to `status` (else empty)."""
        self.settings, self.answers = settings, answers
        self.store = offline.store(Path(settings.paths.cni_dir))
        # A DaemonSet runs the daemon.
        self.in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ

    def host(self, path: str) -> Path:
        """Return where this process sees `path` of the host. Raises OSError if it does not exist."""
        return Path(fs.resolve(self.settings.paths.chroot_dir, path))

    def records(self) -> Iterator[ContainerRecord]:
        """Yield our records, except damaged ones. Raises OSError."""
        for container_id in self.store.containers(foreign=False):
            with contextlib.suppress(CorruptRecordError):
                if record := self.store.load(container_id):
                    yield record


def examine(node: Node) -> list[Finding]:
    """Return all findings, errors first. A check that fails is a finding itself."""
    findings: list[Finding] = []
    checks = (daemon, socket, runtime_configuration, shim, plugins, others, disk, records, leases, links, rules)
    for check in checks:
        try:
            findings += check(node)
        except OSError as error:
            evidence = f"can't be read: {error.strerror or error}"
            advice = "run it as root" if os.geteuid() else "look at the permissions and the disk of that path"
            if isinstance(error, FileNotFoundError):
                who = "the package of the CNI plugins" if check is plugins else "the daemon, at its start,"
                evidence, advice = "does not exist", f"{who} makes it"
            name = check.__name__.replace("_", " ")
            findings.append(Finding(name, "warning", str(error.filename or ""), evidence, advice))
    return sorted(findings, key=lambda item: ("error", "warning", "info").index(item.severity))


def to_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON object of `doctor --json`, with the paths of the host."""
    keys = ("check", "severity", "subject", "evidence", "advice")
    objects = [{key: as_on_host(getattr(item, key)) for key in keys} | {"fix": item.fix} for item in findings]
    return {"schema": "multusctl.doctor/v1", "findings": objects}


def daemon(node: Node) -> Iterator[Finding]:
    """Check that the daemon answers and is ready."""
    severity: Severity
    problem, status = node.answers()
    if problem:
        advice = "start it; its log says why it has ended"
        if node.in_cluster:
            advice = "kubectl get pods -A -l app=multus -o wide, and the log of the node's pod"
        yield Finding("daemon", "error", "multus-daemon", problem, advice)
    for key, severity, what in (("gates", "error", "readiness gate"), ("degraded", "warning", "degraded:")):
        for name, reason in status.get(key, {}).items():
            evidence, advice = parted(reason)
            yield Finding("daemon", severity, f"{what} {name}", evidence, advice or "multusctl status")


def socket(node: Node) -> Iterator[Finding]:
    """Check type and mode of the socket, and the mode of its directory."""
    directory = Path(node.settings.socket.directory)
    path = directory / "multus.sock"
    if not os.path.lexists(path):
        # daemon() reports that it does not answer.
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        advice = f"mv {path} {path}.away, then restart the daemon"
        yield Finding("socket", "error", str(path), "is not a socket", advice)
        return
    yield from _too_open("socket", "warning", path, 0o077, 0o600, "others than its owner may connect")
    if not directory.stat().st_mode & stat.S_ISVTX:
        yield from _too_open("socket", "error", directory, 0o022, 0o700, "others can replace the socket")


def _too_open(
    check: str, severity: Severity, path: Path, mask: int, wanted: int, consequence: str
) -> Iterator[Finding]:
    """Yield a finding if the mode of `path` has a bit of `mask`. Raises OSError."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & mask:
        evidence = f"mode {mode:04o}: {consequence}"
        yield Finding(check, severity, str(path), evidence, f"chmod {wanted:o} {path}", wanted)


def runtime_configuration(node: Node) -> Iterator[Finding]:
    """Check that our configuration is the first by name in the runtime's directory: the runtime uses the first file."""
    wanted = node.settings.primary
    if not wanted.config_dir:
        return
    directory = Path(wanted.config_dir)
    if conf_files.is_missing(directory):
        yield Finding("configuration", "error", str(directory), *parted(conf_files.MISSING))
        return
    names = conf_files.names(directory)
    is_auto = wanted.config_file == "auto"
    ours = netconf.FILE_NAME if is_auto else Path(wanted.config_file).name
    if is_auto and not wanted.autoconfig_dir:
        ours = ""
    for name in names:
        path = directory / name
        data = fs.read_limited(path, limit=CONF_MAX_BYTES)
        try:
            plugins = conf.parse(data, default_name="unnamed", allow_no_plugins=True).plugins
        except CniError as error:
            if data != netconf.PLACEHOLDER:
                yield Finding("configuration", "warning", str(path), str(error), "correct or remove the file")
            continue
        types = {plugin.type for plugin in plugins}
        if name != ours and netconf.OWN_TYPES & types:
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
    elif fs.read_limited(directory / ours, limit=CONF_MAX_BYTES) == netconf.PLACEHOLDER:
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
    """Return how the installed shim differs from that of this release; empty if it does not, or none is here."""
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
    for item in inventory.plugins(node.settings)["plugins"]:
        if item["newer"]:
            advice = "upgrade multus-daemon: until it follows that release, each call of the plugin starts a program"
            yield Finding("plugins", "info", item["servedBy"], f"runs for new networks: {item['newer']}", advice)
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
        with contextlib.suppress(FileNotFoundError):
            consequence = "others can see, or change, what is attached"
            yield from _too_open("disk", "warning", path, 0o077, 0o700, consequence)
    rejected = directory / "spool" / "rejected"
    if rejected.is_dir() and (entries := sorted(os.listdir(rejected))):
        evidence = f"DELs that could not be served: {len(entries)}, {entries[0]} for one"
        advice = "the daemon's log says why; multusctl attachments --leaks shows what is left, then remove the files"
        yield Finding("spool", "warning", str(rejected), evidence, advice)


def records(node: Node) -> Iterator[Finding]:
    """Check for records that are damaged, that are set aside, or whose container's DEL fails."""
    readable: list[ContainerRecord] = []
    for container_id in node.store.containers(foreign=False):
        try:
            readable += filter(None, [node.store.load(container_id)])
        except CorruptRecordError as error:
            yield Finding("records", "error", f"container {container_id}", str(error), by_hand(container_id))
    vanished = NodeNamespaces().vanished({record.sandbox.netns for record in readable if record.sandbox.netns})
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
        subject, advice = f"container {item.container_id}", by_hand(item.container_id, item.record)
        yield Finding("records", "warning", subject, f"was set aside, its DEL is not retried: {item.why}", advice)


def leases(node: Node) -> Iterator[Finding]:
    """Search for addresses that host-local has reserved for containers without a record."""
    known = set(node.store.containers(foreign=True))
    directory = Path(fs.resolve(node.settings.paths.chroot_dir, _LEASES, missing=True))
    networks = [entry for entry in directory.iterdir() if entry.joinpath("lock").exists()] if directory.exists() else []
    for network in sorted(networks):
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
    """Search for host ends of veth pairs that are down and belong to no recorded attachment."""
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
    known = set(node.store.containers(foreign=True))
    for where, command, pattern, advice in _RULES:
        output = offline.output_of(node.settings.paths.chroot_dir, command, deadlines.CTL_PROGRAM_SECONDS)
        unknown = {match["id"] for match in pattern.finditer(output)} - known
        for container_id in sorted(unknown):
            evidence = f"{where} has masquerade rules for it, and it is not on record here"
            yield Finding("rules", "info", f"container {container_id[:13]}", evidence, advice.format(container_id))
