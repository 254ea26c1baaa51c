"""Names of the CNI specification and what makes one valid (containernetworking/cni `pkg/utils`)."""

from __future__ import annotations

import re
from typing import NewType

ContainerId = NewType("ContainerId", str)
IfName = NewType("IfName", str)
NetworkName = NewType("NetworkName", str)
Namespace = NewType("Namespace", str)
PodName = NewType("PodName", str)
PodUid = NewType("PodUid", str)

_IDENTIFIER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
_NOT_IN_IFNAME = re.compile(r"[/:\0\s]")
IFNAME_MAX_BYTES = 15
FILE_NAME_MAX_BYTES = 255
"""NAME_MAX of linux/limits.h, as ext4, xfs, btrfs and tmpfs have it."""
# The store, the result cache and host-local make file names of it, which end at FILE_NAME_MAX_BYTES.
CONTAINER_ID_MAX_BYTES = 128


def container_id_problem(value: str) -> str:
    """Why `value` is no container id, in the Go library's words; empty if it is one."""
    if not value:
        return "missing containerID"
    if not _IDENTIFIER.fullmatch(value):
        return "invalid characters in containerID"
    if len(value) > CONTAINER_ID_MAX_BYTES:
        return f"containerID is longer than {CONTAINER_ID_MAX_BYTES} bytes"
    return ""


def network_name_problem(value: str) -> str:
    """Why `value` is no network name, in the Go library's words; empty if it is one."""
    if not value:
        return "missing network name"
    if not _IDENTIFIER.fullmatch(value):
        return "invalid characters found in network name"
    return ""


def ifname_problem(value: str) -> str:
    """Why the kernel would not take `value` as an interface name, in the Go library's words; empty if it would."""
    if not value:
        return "interface name is empty"
    if len(value.encode("utf-8", "surrogatepass")) > IFNAME_MAX_BYTES:
        return "interface name is too long"
    if value in (".", ".."):
        return "interface name is . or .."
    if _NOT_IN_IFNAME.search(value):
        return "interface name contains / or : or whitespace characters"
    return ""
