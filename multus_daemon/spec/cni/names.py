"""Names of the CNI specification and their validity (containernetworking/cni `pkg/utils`)."""

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
"""NAME_MAX of linux/limits.h, the limit of ext4, xfs, btrfs and tmpfs."""
# The store, the result cache and host-local use it in file names of up to FILE_NAME_MAX_BYTES.
CONTAINER_ID_MAX_BYTES = 128


def container_id_problem(value: str) -> str:
    """Return the reason why `value` is not a container id, in the Go library's words; empty if it is one."""
    if not value:
        return "missing containerID"
    if not _IDENTIFIER.fullmatch(value):
        return "invalid characters in containerID"
    if len(value) > CONTAINER_ID_MAX_BYTES:
        return f"containerID is longer than {CONTAINER_ID_MAX_BYTES} bytes"
    return ""


def network_name_problem(value: str) -> str:
    """Return the reason why `value` is not a network name, in the Go library's words; empty if it is one."""
    if not value:
        return "missing network name"
    if not _IDENTIFIER.fullmatch(value):
        return "invalid characters found in network name"
    return ""


def ifname_problem(value: str) -> str:
    """Return the reason why `value` is not an interface name, in the Go library's words; empty if it is one."""
    if not value:
        return "interface name is empty"
    if len(value.encode("utf-8", "surrogatepass")) > IFNAME_MAX_BYTES:
        return "interface name is too long"
    if value in (".", ".."):
        return "interface name is . or .."
    if _NOT_IN_IFNAME.search(value):
        return "interface name contains / or : or whitespace characters"
    return ""
