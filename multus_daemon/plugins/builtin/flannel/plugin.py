"""The verbs of flannel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import configuration, interfaces
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.flannel import delegate, subnet
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.plugins.builtin.undo import Undo
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import DecodingFailureError, InternalError
from multus_daemon.spec.cni.result import Result

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
    fields: Mapping[str, Any]


def unsupported(call: Call) -> str:
    """See `contract.Plugin`; the delegate's own keys are for the delegate."""
    return configuration.unknown_key(call.fields, configuration.COMMON_KEYS.union(_KEYS))


def validate(call: Call) -> None:
    """See `contract.Plugin`; what is composed is for the delegate to read."""
    _saved_at(call)
    call.once(_compose)


def called_by(call: Call) -> Mapping[str, Invocation]:
    """The plugin that does the work, and its IPAM plugin. Raises CniError."""
    composed = call.once(_compose)
    types = (composed.plugin_type, gojson.get_str(gojson.get_object(composed.fields, "ipam") or {}, "type"))
    return dict.fromkeys(filter(None, types), _invocation(call, "ADD", composed))


def add(call: Call, session: Session) -> Result:
    """Compose the delegate's configuration, save it for DEL, run the delegate. Raises CniError, Interrupted."""
    composed = call.once(_compose)
    path = _saved_at(call)
    with interfaces.inside(call, session):
        there_before = _has_link(session, ifname=call.invocation.ifname)
    with Undo() as undo:
        with step("save the delegate's configuration for DEL"):
            before = _load(path)
            undo.arm("put the saved configuration back", functools.partial(_save, path, before))
            _save(path, composed.stdin)
        if not there_before:
            undo.arm("remove what the delegate has made", functools.partial(_delete, call, composed))
        return _run(call, "ADD", composed)


def delete(call: Call, session: Session) -> None:
    """Run the delegate's DEL with the saved configuration. Without one there is nothing to remove."""
    path = _saved_at(call)
    with step("read the delegate's configuration"):
        # What an ADD was writing that was killed; its DEL comes.
        fs.sweep(path.parent, name=path.name)
        saved = _load(path)
    if saved is None:
        return
    try:
        composed = _Delegate(delegate.type_of(saved), saved, gojson.loads_object(saved))
    except gojson.JsonError as error:
        # Refused, the DEL would come back for ever.
        log.warning("network %s: failed to parse netconf %s: %s", call.name, path, error)
        return
    _delete(call, composed)
    with step("remove the delegate's configuration"):
        _save(path, None)


def check(call: Call, session: Session) -> None:
    """Always well, as with the reference plugin."""


def status(call: Call) -> None:
    """Always ready, as with the reference plugin."""


def _run(call: Call, verb: str, composed: _Delegate) -> Result:
    """Raises CniError, the delegate's own unchanged."""
    return call.ipam.run(composed.plugin_type, _invocation(call, verb, composed), call.netns)


def _invocation(call: Call, verb: str, composed: _Delegate) -> Invocation:
    recorded = call.prev_result if verb == "DEL" else None
    return replace(
        call.invocation,
        verb=verb,
        fields=composed.fields,
        prev_result=None,
        raw=composed.stdin,
        recorded=recorded,
    )


def _delete(call: Call, composed: _Delegate) -> None:
    _run(call, "DEL", composed)


def _compose(call: Call) -> _Delegate:
    try:
        path = gojson.get_str(call.fields, "subnetFile")
        subnets = _subnets(call, DEFAULT_SUBNET_FILE if path is None else path)
        composed: Mapping[str, Any] = delegate.compose(call, subnets)
    except gojson.JsonError as error:
        raise DecodingFailureError(
            f"failed to load flannel netconf file: failed to load netconf: {error}", f"network {call.name!r}"
        ) from error
    stdin = delegate.encode(composed)
    return _Delegate(composed["type"], stdin, gojson.loads_object(stdin))


def _subnets(call: Call, path: str) -> subnet.Subnets:
    try:
        content = fs.read_limited(call.on_host(path), limit=_SUBNET_LIMIT)
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
