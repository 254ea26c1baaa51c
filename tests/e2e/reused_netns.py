"""A network namespace that is made anew under the path and the inode of one that has gone, and a DEL that comes late.

The kernel gives the lowest free inode to the next namespace, so `ip netns add` after `ip netns del` soon gets the same.
"""

from __future__ import annotations

import base64
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from multus_daemon.pod import record_format
from multus_daemon.runtime import fs
from tests.e2e.node import Node
from tests.namespaces import add, remove_netns

SECONDS = 5.0
"""For the kernel to free the inode: it takes the namespaces of the machine apart one after the other."""


def identity(netns: str) -> str:
    """Return what versions before the cookie have in `netnsId`: boot, device and inode."""
    status = os.stat(netns)
    return f"{fs.boot()}-{status.st_dev}-{status.st_ino}"


def remake(netns: str, seconds: float = SECONDS) -> bool:
    """Remove the namespace and make another one at the same path; True if it has the same inode.

    An attempt that gets another inode is removed. The kernel frees that inode later, so the next attempt gets the next
    one, until the right one is free. False if another process has got it: the namespace is new, its inode is another.
    """
    name, wanted = Path(netns).name, os.stat(netns).st_ino
    deadline = time.monotonic() + seconds
    while True:
        remove_netns(Path(netns))
        add(name)
        if os.stat(netns).st_ino == wanted:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def spool_entry(node: Node, container_id: str, netns: str, pod: str) -> Path:
    """Write a DEL into the spool as the shim does; the path of the file, which the daemon removes when it is served."""
    body = {
        "env": node.environment("DEL", container_id, netns, pod),
        "config": base64.b64encode(node.stdin).decode(),
    }
    spool = node.cni_dir / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)
    path = spool / f"{time.time_ns():020}-{os.getpid()}.json"
    temporary = spool / f".{path.name}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(body))
    temporary.rename(path)
    return path


def change_identity(node: Node, container_id: str, netns_id: str) -> None:
    """Write another `netnsId` into the record of a container that no request works on."""
    path = node.cni_dir / "attachments" / f"{container_id}.json"
    record = record_format.decode(path.read_bytes())
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.touch(mode=0o600)
    temporary.write_bytes(record_format.encode(replace(record, netns_id=netns_id)) + b"\n")
    temporary.rename(path)


def leases(node: Node, container_id: str) -> list[str]:
    """Return the addresses that host-local has leased to the container."""
    files = (path for path in node.networks_dir.rglob("*") if path.is_file() and path.name[0].isdecimal())
    owned = []
    for path in files:
        try:
            owner = path.read_text().split()
        except FileNotFoundError:
            continue
        if owner[:1] == [container_id]:
            owned.append(path.name)
    return sorted(owned)


def interfaces(node: Node, netns: str) -> dict[str, tuple[int, str, list[str]]]:
    """Return index, MAC address and IPv4 addresses of each link of a namespace but `lo`, as the kernel has them."""
    return {
        link["ifname"]: (
            link["ifindex"],
            link["address"],
            sorted(item["local"] for item in link["addr_info"] if item["family"] == "inet"),
        )
        for link in node.ip("address", netns=netns)
        if link["ifname"] != "lo"
    }
