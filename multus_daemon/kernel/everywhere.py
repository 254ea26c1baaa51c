"""All network namespaces of the node: whether one of them has an address."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from typing import Final

from multus_daemon.kernel import netns
from multus_daemon.kernel.inet import IpAddress
from multus_daemon.kernel.links import ANY_LINK, Rtnl
from multus_daemon.runtime import threads

_MOUNTS: Final = "/proc/self/mountinfo"


def has_address(address: IpAddress) -> bool:
    """Return True if a namespace with a process, or with a mount that the daemon sees, has or may have the address.

    True also if not every process can be seen. Blocks; takes 0.2 ms for each namespace. Raises OSError.
    """
    if not netns.sees_every_process():
        return True
    seen: set[tuple[int, int]] = set()
    for path in _paths():
        try:
            with netns.opened(path) as descriptor:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                # The thread ends in the namespace.
                if threads.start(partial(_has, descriptor, address), name="addresses").result():
                    return True
        except netns.NamespaceError as error:
            # ESRCH: the process has ended.
            if error.errno not in netns.NO_NAMESPACE | {errno.ESRCH}:
                return True
    return False


def _paths() -> Iterator[str]:
    yield from (netns.OWN, *netns.of_processes())
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            root, mount_point = line.split()[3:5]
            if root.startswith("net:["):
                yield mount_point


def _has(descriptor: int, address: IpAddress) -> bool:
    netns.enter(descriptor)
    with contextlib.closing(Rtnl()) as kernel:
        return any(item.address.ip == address for item in kernel.addresses(ANY_LINK))
