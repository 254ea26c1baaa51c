"""Check kernel settings and disk, and search for records, addresses, links and rules that no container uses."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from multus_daemon.diagnosis.doctor.finding import Finding, Node
from multus_daemon.runtime import fs
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError

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


def kernel(node: Node) -> Iterator[Finding]:
    """Check that the kernel forwards."""
    for family, name in _IP_FORWARD.items():
        path = node.proc / "sys" / name
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


# --- leftovers -------------------------------------------------------------------------------------------------------


def records(node: Node) -> Iterator[Finding]:
    """Check for records that are damaged, are not deleted, or are set aside."""
    readable = []
    for container_id in node.store.containers(foreign=False):
        try:
            record = node.store.load(container_id)
        except CorruptRecordError as error:
            yield Finding("records", "error", f"container {container_id}", str(error), _forget(container_id))
            continue
        if record is not None:
            readable.append(record)
    vanished = node.vanished({record.sandbox.netns for record in readable if record.sandbox.netns})
    for record in readable:
        subject = f"pod {record.pod}, container {record.sandbox.container_id}"
        if record.sandbox.netns in vanished:
            evidence = "its network namespace is gone, and its networks are on record: addresses and links may be held"
            advice = "the daemon deletes them within reconcileSeconds; its log says why not"
            yield Finding("records", "warning", subject, evidence, advice)
        elif record.given_up:
            evidence = f"its DEL failed {record.deletes_failed} times and was given up"
            yield Finding("records", "warning", subject, evidence, "multusctl attachments --leaks says why")
    for item in node.store.aside():
        subject, advice = f"container {item.container_id}", _forget(item.container_id)
        yield Finding("records", "warning", subject, f"was set aside, its DEL is not retried: {item.why}", advice)


def _forget(container_id: ContainerId) -> str:
    return f"free by hand what it held, then: multusctl attachments forget {container_id}"


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
    for path in sorted((node.sys / "class/net").iterdir()):
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
