"""The verbs of flannel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from multus_daemon.base import fs
from multus_daemon.base.aio import in_thread
from multus_daemon.builtin import configuration, interfaces
from multus_daemon.builtin.contract import Call
from multus_daemon.builtin.flannel import delegate, subnet
from multus_daemon.builtin.interfaces import step
from multus_daemon.builtin.undo import Undo
from multus_daemon.cni import gojson, result
from multus_daemon.cni.errors import DecodingFailureError, InternalError
from multus_daemon.cni.result import Result
from multus_daemon.netlink.ops import Session

log = logging.getLogger(__name__)

DEFAULT_SUBNET_FILE: Final = "/run/flannel/subnet.env"
DEFAULT_DATA_DIR: Final = "/var/lib/cni/flannel"
_KEYS: Final = ("subnetFile", "dataDir", "delegate")
_SUBNET_LIMIT: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Delegate:
    """What has been composed, for the plugin that does the work."""

    plugin_type: str
    stdin: bytes


class Flannel:
    """The plugin. The file that it saves is of a container, not of an interface, as the reference's."""

    def unsupported(self, call: Call) -> str:
        """As BuiltinPlugin; the delegate's own keys are for the delegate."""
        return configuration.unknown_key(call.fields, configuration.COMMON_KEYS.union(_KEYS))

    async def add(self, call: Call) -> Result:
        """Compose the delegate's configuration, save it for DEL, run the delegate. Raises CniError, CancelledError."""
        composed = await _compose(call)
        path = _saved_at(call)
        there_before = await interfaces.in_pod(call, functools.partial(_has_link, ifname=call.invocation.ifname))
        async with Undo() as undo:
            with step("save the delegate's configuration for DEL"):
                before = await in_thread(_load, path)
                undo.arm("put the saved configuration back", functools.partial(in_thread, _save, path, before))
                await in_thread(_save, path, composed.stdin)
            if not there_before:
                undo.arm("remove what the delegate has made", functools.partial(_delete, call, composed))
            return result.decode(await _run(call, "ADD", composed), call.cni_version)

    async def delete(self, call: Call) -> None:
        """Run the delegate's DEL with the saved configuration. Without one there is nothing to remove."""
        path = _saved_at(call)
        with step("read the delegate's configuration"):
            saved = await in_thread(_load, path)
        if saved is None:
            return
        try:
            composed = _Delegate(delegate.type_of(saved), saved)
        except gojson.JsonError as error:
            # Refused, the DEL would come back for ever.
            log.warning("network %s: failed to parse netconf %s: %s", call.name, path, error)
            return
        await _delete(call, composed)
        with step("remove the delegate's configuration"):
            await in_thread(_save, path, None)

    async def check(self, call: Call) -> None:
        """Always well, as with the reference plugin."""

    async def status(self, call: Call) -> None:
        """Always ready, as with the reference plugin."""


async def _run(call: Call, verb: str, composed: _Delegate) -> bytes:
    """Raises CniError, the delegate's own unchanged."""
    invocation = replace(call.invocation, verb=verb, stdin=composed.stdin)
    return await call.ipam.run(composed.plugin_type, invocation)


async def _delete(call: Call, composed: _Delegate) -> None:
    await _run(call, "DEL", composed)


async def _compose(call: Call) -> _Delegate:
    try:
        path = gojson.get_str(call.fields, "subnetFile")
        subnets = await _subnets(call, DEFAULT_SUBNET_FILE if path is None else path)
        composed: Mapping[str, Any] = delegate.compose(call, subnets)
    except gojson.JsonError as error:
        raise DecodingFailureError(
            f"failed to load flannel netconf file: failed to load netconf: {error}", f"network {call.name!r}"
        ) from error
    return _Delegate(composed["type"], delegate.encode(composed))


async def _subnets(call: Call, path: str) -> subnet.Subnets:
    try:
        content = await in_thread(fs.read_limited, call.on_host(path), limit=_SUBNET_LIMIT)
        return subnet.read(content.decode("utf-8", "replace"), path)
    except (OSError, subnet.SubnetError) as error:
        reason = f"open {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise InternalError(
            f"failed to load flannel 'subnet.env' file: {reason}. Check the flannel pod log for this node.",
            f"network {call.name!r}",
        ) from error


def _saved_at(call: Call) -> Path:
    try:
        directory = gojson.get_str(call.fields, "dataDir")
    except gojson.JsonError as error:
        raise DecodingFailureError(f"failed to load netconf: {error}", f"network {call.name!r}") from error
    return call.on_host(DEFAULT_DATA_DIR if directory is None else directory) / call.invocation.container_id


def _load(path: Path) -> bytes | None:
    """The saved configuration, None where there is none. Raises OSError. Blocks."""
    try:
        return fs.read_limited(path)
    except FileNotFoundError:
        return None


def _save(path: Path, content: bytes | None) -> None:
    """Save it so that it survives a crash right after; None: remove it. Raises OSError. Blocks."""
    if content is None:
        fs.remove(path)
        return
    fs.ensure_directory(path.parent)
    fs.write_atomic(path, content)


def _has_link(session: Session, *, ifname: str) -> bool:
    with step("look for the interface"):
        return session.pod.find_link(ifname) is not None
