"""Make, remove and examine network namespaces that outlive the process, like those of `ip netns`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from multus_daemon.kernel.links import Rtnl
from multus_daemon.kernel.pod_netns import PodNetns

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2

# os.unshare is new in Python 3.12; `os` has no mount.
_libc = ctypes.CDLL(None, use_errno=True)


def create(path: Path) -> None:
    """Make a network namespace at `path`, its loopback interface up. Raises OSError, and then leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(exist_ok=False)
    try:
        # In a thread that ends here: the namespace of the other threads must stay.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(_make, path).result()
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _make(path: Path) -> None:
    _checked(_libc.unshare(_CLONE_NEWNET), "unshare", path)
    with contextlib.closing(Rtnl()) as kernel:
        kernel.change(kernel.link("lo").index, up=True)
    _checked(_libc.mount(b"/proc/thread-self/ns/net", os.fsencode(path), None, _MS_BIND, None), "mount", path)


def remove(path: Path) -> None:
    """Remove the namespace if it exists. Raises OSError."""
    if not path.exists():
        return
    try:
        _checked(_libc.umount2(os.fsencode(path), _MNT_DETACH), "umount", path)
    except OSError as error:
        # EINVAL: not mounted, a file from before a reboot.
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)


def _checked(outcome: int, call: str, path: Path) -> None:
    if outcome:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}", str(path))


def look(netns: str) -> dict[str, Any]:
    """Return `{"interfaces": [{name, mac, mtu, up, addresses}], "routes": [{dst, gw, interface}]}`, without loopback.

    Raises OSError if the namespace can't be entered.
    """
    with PodNetns(netns) as opened, opened.inside():
        names = {index: name for index, name in socket.if_nameindex() if name != "lo"}
        interfaces = []
        for name in names.values():
            link = opened.pod.link(name)
            # Every IPv6 interface has a link-local address, whatever its network.
            addresses = (item.address for item in opened.pod.addresses(link.index) if not item.address.is_link_local)
            entry = {"name": name, "mac": link.mac, "mtu": link.mtu, "up": link.is_up}
            interfaces.append({**entry, "addresses": list(map(str, addresses))})
        routes = [
            {"dst": str(route.dst), "gw": str(route.gateway or ""), "interface": names[route.oif]}
            for route in opened.pod.routes()
            if route.oif in names and not (route.dst.is_link_local or route.dst.is_multicast)
        ]
    return {"interfaces": interfaces, "routes": routes}
