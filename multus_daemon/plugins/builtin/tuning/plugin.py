"""The verbs of tuning."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from multus_daemon.kernel import sysctl
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import interfaces
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.plugins.builtin.tuning import allowlist, backup, config
from multus_daemon.plugins.builtin.tuning.config import Attributes, Sysctl, TuningConfig
from multus_daemon.plugins.builtin.undo import Undo
from multus_daemon.runtime import fs
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Changed:
    """What an ADD has changed so far, for who undoes it."""

    sysctls: list[tuple[Sysctl, str]] = field(default_factory=list)
    """Each with its value before."""
    attributes: Attributes | None = None
    """Those of before; None while no attribute has been touched."""


def unsupported(call: Call) -> str:
    """See `contract.Plugin`."""
    return config.unsupported(call)


def validate(call: Call) -> None:
    """See `contract.Plugin`."""
    call.once(config.read)


def add(call: Call, session: Session) -> Result:
    """Set what is configured; prevResult, with the new MAC address. Raises CniError; all is as it was then."""
    settings = call.once(config.read)
    if settings.sysctls:
        allowlist.require_allowed([item.key for item in settings.sysctls], call.on_host(allowlist.PATH))
    previous = _previous(call)
    path = backup.path_of(call, settings.data_dir)
    with Undo() as undo:
        if settings.attributes != Attributes():
            with step("read the attributes of before"):
                before = backup.read(path)
            undo.arm("put the backup back", functools.partial(backup.write, path, before))
        changed = _Changed()
        undo.arm("put attributes and sysctls back", functools.partial(_put_back, call, session, changed))
        with interfaces.inside(call, session):
            _apply(session, settings=settings, ifname=call.invocation.ifname, path=path, changed=changed)
    mac = settings.attributes.mac
    if not mac:
        return previous
    return previous.replace_interfaces(
        tuple(replace(item, mac=mac) if item.name == call.invocation.ifname else item for item in previous.interfaces)
    )


def delete(call: Call, session: Session) -> None:
    """Make the attributes what they were. Nothing that fails then is a failure, as with the reference plugin.

    Sysctls stay: they end with the namespace.
    """
    path = backup.path_of(call, config.data_dir(call))
    try:
        content = backup.read(path)
        if content is None:
            # Its ADD may have ended as it wrote.
            fs.sweep(path.parent, name=path.name)
        elif _restored(call, session, backup.decode(content)):
            backup.write(path, None)
    except (OSError, CniError, gojson.JsonError) as error:
        log.warning("network %s: %s is not restored: %s", call.name, call.invocation.ifname, error)


def check(call: Call, session: Session) -> None:
    """Compare sysctls and attributes with the configuration; promiscuous mode is off where it is not configured."""
    settings = config.read(call)
    _previous(call)
    with interfaces.inside(call, session):
        _compare(session, settings=settings, ifname=call.invocation.ifname)


def status(call: Call) -> None:
    """Always ready."""


def _previous(call: Call) -> Result:
    if call.prev_result is None:
        raise InvalidNetworkConfigError(
            "Required prevResult missing", f"network {call.name!r}: tuning stands behind other plugins in a list"
        )
    return call.prev_result


def _restored(call: Call, session: Session, before: Attributes) -> bool:
    """Whether nothing is left to restore: it is done, or there is no interface any more. Raises CniError."""
    if not call.invocation.netns:
        return True
    try:
        with interfaces.inside(call, session):
            failures = _restore(session, ifname=call.invocation.ifname, before=before)
    except InvalidNetnsError as error:
        if isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent:
            return True
        raise
    if failures:
        raise InternalError("; ".join(failures))
    return True


def _put_back(call: Call, session: Session, changed: _Changed) -> None:
    if not (changed.sysctls or changed.attributes):
        return
    failures: list[str] = []
    with interfaces.inside(call, session):
        if changed.attributes is not None:
            failures = _restore(session, ifname=call.invocation.ifname, before=changed.attributes)
        for item, value in reversed(changed.sysctls):
            with _noted(failures, f"sysctl {item.key}"):
                sysctl.write(*item.parts, value=value)
    if failures:
        raise InternalError("; ".join(failures))


# --- in the pod's namespace ------------------------------------------------------------------------------------------


def _apply(session: Session, *, settings: TuningConfig, ifname: str, path: Path, changed: _Changed) -> None:
    for item in settings.sysctls:
        # One that can only be written (net.ipv4.route.flush) is nothing that could be put back.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            changed.sysctls.append((item, sysctl.read(*item.parts)))
        with step(f"set sysctl {item.key}"):
            sysctl.write(*item.parts, value=item.value)
    if settings.attributes == Attributes():
        return
    with step(f'get "{ifname}"'):
        link = session.pod.link(ifname)
    before = backup.of(link, settings.attributes)
    with step(f'save the attributes of "{ifname}"'):
        backup.write(path, backup.encode(before))
    changed.attributes = before
    for what, change in backup.changes(session.pod, link, settings.attributes):
        with step(f'set {what} of "{ifname}"'):
            change()


def _restore(session: Session, *, ifname: str, before: Attributes) -> list[str]:
    """Restore what can be; what could not. Nothing to do where there is no such interface."""
    failures: list[str] = []
    with _noted(failures, f'find "{ifname}"'):
        link = session.pod.find_link(ifname)
        for what, change in backup.changes(session.pod, link, before) if link else ():
            with _noted(failures, what):
                change()
    return failures


@contextlib.contextmanager
def _noted(failures: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failures.append(f"failed to restore {what}: {error.strerror or error}")


def _compare(session: Session, *, settings: TuningConfig, ifname: str) -> None:
    for item in settings.sysctls:
        with step(f"read sysctl {item.key}"):
            value = sysctl.read(*item.parts)
        if value.split() != item.value.split():
            raise InternalError(
                f"Error: Tuning configured value of {item.key} is {item.value}, current value is {value}"
            )
    with step(f'find "{ifname}"'):
        link = session.pod.link(ifname)
    wanted = settings.attributes
    compared = [
        ("Ethernet", wanted.mac or None, link.mac),
        ("promiscuous mode", bool(wanted.promiscuous), link.is_promiscuous),
        ("MTU", wanted.mtu or None, link.mtu),
        ("all-multicast mode", wanted.allmulti, link.is_allmulti),
        ("Transmit Queue Length", wanted.tx_queue_length, link.tx_queue_length),
    ]
    for what, configured, current in compared:
        if configured is not None and configured != current:
            raise InternalError(
                f"Error: Tuning configured {what} of {ifname} is {configured}, current value is {current}"
            )
