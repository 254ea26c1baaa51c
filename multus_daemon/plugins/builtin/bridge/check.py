"""What CHECK of bridge compares with prevResult."""

from __future__ import annotations

import functools
from collections.abc import Callable

from multus_daemon.kernel.links import Link
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import checks
from multus_daemon.plugins.builtin.bridge.config import BridgeConfig
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.spec.cni.errors import InternalError
from multus_daemon.spec.cni.result import Interface, Result


def comparison(call: Call, config: BridgeConfig) -> Callable[[Session], None]:
    """The work of a CHECK in the pod. Raises CniError for a prevResult that does not fit the call."""
    previous = checks.previous_result(call, "bridge")
    container = checks.container_interface(call, previous)
    bridge = next((item for item in previous.interfaces if item.name == config.bridge and not item.sandbox), None)
    if bridge is None:
        raise InternalError(
            f"CNI created bridge {config.bridge} was not found in prevResult",
            "has the configuration's 'bridge' changed since ADD?",
        )
    return functools.partial(_compare, config=config, previous=previous, bridge=bridge, container=container)


def _compare(
    session: Session, *, config: BridgeConfig, previous: Result, bridge: Interface, container: Interface
) -> None:
    master = _check_bridge(session, bridge, config)
    link = checks.check_link(session, container, "veth")
    _check_port(session, link, master, previous)
    checks.check_addresses(session, link, previous)
    checks.check_routes(session, previous)


def _check_bridge(session: Session, expected: Interface, config: BridgeConfig) -> Link:
    with step(f'find bridge "{expected.name}"'):
        link = session.host.link(expected.name)
    if link.kind != "bridge":
        raise InternalError(f'interface "{expected.name}" does not have link type of bridge')
    if expected.mac and expected.mac.lower() != link.mac.lower():
        raise InternalError(f'bridge "{expected.name}" has MAC {link.mac}, not {expected.mac} as in prevResult')
    if link.is_promiscuous is not config.promiscuous:
        raise InternalError(
            f'bridge "{expected.name}" is {"" if link.is_promiscuous else "not "}promiscuous, '
            f"and promiscMode is {str(config.promiscuous).lower()}"
        )
    return link


def _check_port(session: Session, container: Link, bridge: Link, previous: Result) -> None:
    """The other end of the pair is a port of the bridge, by the name and address that prevResult has."""
    with step("look for the port"):
        # A veth knows its other end by index, which is the same in the namespace of either.
        ports = [
            (expected, link)
            for expected in previous.interfaces
            if not expected.sandbox and (link := session.host.find_link(expected.name)) is not None
        ]
    for expected, link in ports:
        if link.index == container.peer and link.peer == container.index and link.master == bridge.index:
            if expected.mac and expected.mac.lower() != link.mac.lower():
                raise InternalError(f'"{link.name}" has MAC {link.mac}, not {expected.mac} as in prevResult')
            return
    raise InternalError(
        f'the other end of "{container.name}" is no port of bridge "{bridge.name}" by any name in prevResult'
    )
