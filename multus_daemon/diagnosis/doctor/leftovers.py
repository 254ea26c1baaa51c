"""Records, addresses, links and rules that belong to no container."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from multus_daemon.diagnosis.doctor.finding import Finding, Node, readable
from multus_daemon.runtime import fs
from multus_daemon.spec.ports import CorruptRecordError

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


def records(node: Node) -> Iterator[Finding]:
    """Check for records that cannot be read, fail to be deleted, or are set aside."""
    vanished = node.vanished({record.sandbox.netns for record in readable(node.store) if record.sandbox.netns})
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


def leases(node: Node) -> Iterator[Finding]:
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


def links(node: Node) -> Iterator[Finding]:
    """Ends of pairs on the host that are down, and nobody's."""
    known = {
        link.name
        for record in readable(node.store)
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
    """Masquerading of the bridge and ptp plugins, built in or not, for a container that nobody knows."""
    known = {str(container_id) for container_id in node.store.containers(foreign=True)}
    for where, command, pattern, advice in _RULES:
        lost = {match["id"] for match in pattern.finditer(node.tool(command))} - known
        for container_id in sorted(lost):
            evidence = f"{where} has masquerade rules for it, and it is not on record here"
            yield Finding("rules", "info", f"container {container_id[:13]}", evidence, advice.format(container_id))
