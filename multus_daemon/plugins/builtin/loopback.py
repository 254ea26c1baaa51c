"""`loopback`: brings up the container's `lo` (containernetworking/plugins `plugins/main/loopback`)."""

from __future__ import annotations

from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import interfaces
from multus_daemon.plugins.builtin.configuration import COMMON_KEYS, unknown_key
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.spec.cni.errors import InternalError, InvalidNetnsError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result

_NAME = "lo"
_MAC = "00:00:00:00:00:00"


def unsupported(call: Call) -> str:
    """See `contract.Plugin`."""
    return unknown_key(call.fields, COMMON_KEYS)


def validate(call: Call) -> None:
    """Nothing is configured."""


def add(call: Call, session: Session) -> Result:
    """Bring `lo` up. The result is prevResult where there is one, else `lo` and its addresses."""
    with interfaces.inside(call, session):
        ips = _bring_up(session)
    if call.prev_result is not None:
        return call.prev_result
    return Result(interfaces=(Interface(_NAME, _MAC, sandbox=call.invocation.netns),), ips=ips)


def delete(call: Call, session: Session) -> None:
    """Take `lo` down. A namespace that is gone is done."""
    if not call.invocation.netns:
        return
    try:
        with interfaces.inside(call, session):
            _take_down(session)
    except InvalidNetnsError as error:
        if not (isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent):
            raise


def check(call: Call, session: Session) -> None:
    """`lo` is up."""
    with interfaces.inside(call, session):
        _require_up(session)


def status(call: Call) -> None:
    """Always ready: nothing outside the container is needed."""


def _bring_up(session: Session) -> tuple[IpConfig, ...]:
    """`lo` up; its first address of each family."""
    with step(f'set "{_NAME}" up'):
        link = session.pod.link(_NAME)
        session.pod.set_up(link.index)
    with step(f'read the addresses of "{_NAME}"'):
        addresses = [item.address for item in session.pod.addresses(link.index)]
    for address in addresses:
        if not address.is_loopback:
            raise InternalError(f'loopback interface "{_NAME}" has the non-loopback address {address}')
    firsts = [next((item for item in addresses if item.version == version), None) for version in (4, 6)]
    return tuple(IpConfig(str(item), interface=0) for item in firsts if item is not None)


def _take_down(session: Session) -> None:
    with step(f'set "{_NAME}" down'):
        session.pod.set_down(session.pod.link(_NAME).index)


def _require_up(session: Session) -> None:
    with step(f'find "{_NAME}"'):
        link = session.pod.link(_NAME)
    if not link.is_up:
        raise InternalError(f'loopback interface "{_NAME}" is down')
