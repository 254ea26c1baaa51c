"""Choose between iptables and nftables for a plugin's rules: the configured backend, else the one that the host has.

One ADD makes all its rules with one backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from multus_daemon.plugins.builtin import iptables, nftables
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.cni.errors import CniError

log = logging.getLogger(__name__)

IPTABLES: Final = "iptables"
NFTABLES: Final = "nftables"


def make(tools: HostTools, backend: str, *, by_iptables: Callable[[], None], by_nftables: Callable[[], None]) -> None:
    """Make rules with `backend`; if it is empty, with iptables, else nftables. Raises CniError."""
    if backend == NFTABLES:
        by_nftables()
        return
    try:
        by_iptables()
    except CniError:
        if backend or iptables.is_usable(tools) or not nftables.is_usable(tools):
            raise
        by_nftables()


def has(backend: str, *, in_iptables: Callable[[], bool], in_nftables: Callable[[], bool]) -> bool:
    """Return True if `backend` has the rules; if it is empty, True if any backend has. Raises as `make`."""
    if backend != NFTABLES:
        try:
            if in_iptables():
                return True
        except CniError:
            if backend:
                raise
    return backend != IPTABLES and in_nftables()


def remove(
    backend: str, removals: Sequence[tuple[str, Callable[[], bool]]], *, is_added: bool, in_one: bool = False
) -> list[str]:
    """Remove rules of both backends; return the reasons why some may still exist.

    `removals`: pairs of a backend and a function that removes its rules, and returns True if there were any.
    `is_added`: the ADD succeeded. `in_one`: if one backend had rules, do not try the other.
    """
    outcomes: list[tuple[str, bool | CniError]] = []
    for name, removal in removals:
        if in_one and any(outcome is True and name != other for other, outcome in outcomes):
            break
        try:
            outcomes.append((name, removal()))
        except CniError as error:
            outcomes.append((name, error))
    had_rules = {backend} if backend else {name for name, outcome in outcomes if outcome is True}
    failures = []
    for name, outcome in outcomes:
        if isinstance(outcome, CniError) and not isinstance(outcome, ToolNotFoundError):
            if had_rules - {name}:
                log.warning("ignored, as the other backend had the rules: %s", outcome)
            else:
                failures.append(str(outcome))
    # The tool existed when ADD succeeded.
    asked = [outcome for name, outcome in outcomes if backend in ("", name)]
    if is_added and not failures and all(isinstance(item, ToolNotFoundError) for item in asked):
        failures = [str(item) for item in asked]
    return list(dict.fromkeys(failures))
