"""What an interface was like before: a file in dataDir, so that DEL can make it so again.

Format: the reference plugin's, JSON with the attributes that were changed, indented by one space. Blocks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.tuning.config import Attributes, number
from multus_daemon.runtime import fs
from multus_daemon.spec.cni import gojson

_LIMIT: Final = 64 * 1024


def path_of(call: Call, data_dir: str) -> Path:
    """The file of a call's interface."""
    name = f"{call.invocation.container_id}_{call.invocation.ifname}.json"
    return call.on_host(data_dir) / name


def of(link: Link, wanted: Attributes) -> Attributes:
    """The attributes of `link` that `wanted` changes, as they are."""
    return Attributes(
        mac=link.mac if wanted.mac else "",
        promiscuous=link.is_promiscuous if wanted.promiscuous is not None else None,
        mtu=link.mtu if wanted.mtu else 0,
        allmulti=link.is_allmulti if wanted.allmulti is not None else None,
        tx_queue_length=link.tx_queue_length if wanted.tx_queue_length is not None else None,
    )


def encode(attributes: Attributes) -> bytes:
    """The content of a file."""
    fields: dict[str, Any] = {
        "mac": attributes.mac or None,
        "promisc": attributes.promiscuous,
        "mtu": attributes.mtu or None,
        "allmulti": attributes.allmulti,
        "txQLen": attributes.tx_queue_length,
    }
    return json.dumps({key: value for key, value in fields.items() if value is not None}, indent=1).encode()


def decode(content: bytes) -> Attributes:
    """Raises JsonError, InvalidNetworkConfigError."""
    fields = gojson.loads_object(content)
    mac = gojson.get_str(fields, "mac")
    return Attributes(
        mac=configuration.mac_address(mac) if mac else "",
        promiscuous=gojson.get_bool(fields, "promisc"),
        mtu=number(fields, "mtu") or 0,
        allmulti=gojson.get_bool(fields, "allmulti"),
        tx_queue_length=number(fields, "txQLen"),
    )


def read(path: Path) -> bytes | None:
    """The content, None where there is no file. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return fs.read_limited(path, limit=_LIMIT)
    return None


def write(path: Path, content: bytes | None) -> None:
    """Put the content there; None: remove the file. Raises OSError."""
    if content is None:
        fs.remove(path)
        return
    fs.ensure_directory(path.parent)
    # dataDir is in memory by default, and gone with the interfaces when the node restarts.
    fs.write_atomic(path, content, fsync=False)


def changes(kernel: Rtnl, link: Link, attributes: Attributes) -> list[tuple[str, Callable[[], None]]]:
    """What gives `link` the attributes: each what it sets, for messages, and the request, which raises OSError."""
    found: list[tuple[str, Callable[[], None]]] = []
    mac, promiscuous, mtu = attributes.mac, attributes.promiscuous, attributes.mtu
    allmulti, length = attributes.allmulti, attributes.tx_queue_length
    if mac:
        found.append((f"MAC address {mac}", lambda: kernel.set_mac(link.index, mac)))
    if promiscuous is not None:
        found.append((f"promiscuous mode {promiscuous}", lambda: kernel.set_promiscuous(link.index, promiscuous)))
    if mtu:
        found.append((f"MTU {mtu}", lambda: kernel.set_mtu(link.index, mtu)))
    if allmulti is not None:
        found.append((f"all-multicast mode {allmulti}", lambda: kernel.set_allmulti(link.index, allmulti)))
    if length is not None:
        found.append((f"transmit queue length {length}", lambda: kernel.set_tx_queue_length(link.index, length)))
    return found
