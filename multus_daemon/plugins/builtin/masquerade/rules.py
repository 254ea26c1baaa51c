"""Adding and removing the rules of one attachment, by iptables or nftables."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from multus_daemon.plugins.builtin import nftables
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.masquerade import iptables, nft
from multus_daemon.plugins.builtin.masquerade.owner import IpInterface, Owner
from multus_daemon.plugins.builtin.veth import Removed
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

log = logging.getLogger(__name__)

KEYS: Final = ("ipMasq", "ipMasqBackend")
IPTABLES: Final = "iptables"
NFTABLES: Final = "nftables"


def owner_of(call: Call) -> Owner:
    """The owner that a call is about."""
    return Owner(call.name, call.invocation.container_id, call.invocation.ifname)


def is_wanted(call: Call) -> bool:
    """`ipMasq`. Raises JsonError, for what `ipMasqBackend` is too."""
    gojson.get_str(call.fields, "ipMasqBackend")
    return bool(gojson.get_bool(call.fields, "ipMasq"))


def unsupported(call: Call) -> str:
    """What the call asks for that can't be done here; empty if nothing. Raises JsonError."""
    if not is_wanted(call):
        return ""
    if call.tools is None:
        return "ipMasq: true"
    backend = gojson.get_str(call.fields, "ipMasqBackend")
    return "" if backend in (None, IPTABLES, NFTABLES) else f'ipMasqBackend: "{backend}"'


def add(call: Call, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses, by the backend that the configuration names, else iptables if the host has it.

    What is there already counts as done. Raises CniError; `remove` undoes what was made until then.
    """
    tools, owner = _tools(call), owner_of(call)
    backend = _backend(call)
    try:
        if backend == NFTABLES:
            nft.add(tools, owner, addresses)
            return
        try:
            for version in (4, 6):
                iptables.add(tools, version, owner, [item for item in addresses if item.version == version])
        except (ToolNotFoundError, CniError):
            if backend == IPTABLES or iptables.is_usable(tools) or not nftables.is_usable(tools):
                raise
            nft.add(tools, owner, addresses)
    except ToolNotFoundError as error:
        raise InternalError(
            f"failed to masquerade: {error}", "install it on the host, or choose the other ipMasqBackend"
        ) from error


def remove(call: Call, addresses: Sequence[IpInterface] | None, *, spared: Sequence[IpInterface] = ()) -> None:
    """Remove the rules of both backends; none is done.

    `addresses`: those that were masqueraded. None where they are not known: by the names of chain and comments, all
    rules of the container on the network but those of the addresses that are `spared`. Both backends are tried. Then
    it is a failure, raised as CniError, where the rules may still be there: a program that fails, for want of the lock
    or whatever else, has not said that there are none.
    """
    tools, owner, backend = _tools(call), owner_of(call), _backend(call)
    versions = (4, 6) if addresses is None else sorted({item.version for item in addresses})
    attempts = [
        *(
            _tried(
                IPTABLES,
                partial(iptables.remove, tools, version, owner, addresses, spared, is_other=backend == NFTABLES),
            )
            for version in versions
        ),
        _tried(NFTABLES, partial(nft.remove, tools, owner)),
    ]
    failures = [str(attempt.error) for attempt in attempts if attempt.error and _counts(attempt, attempts, backend)]
    # The tool existed when ADD succeeded.
    asked = [attempt for attempt in attempts if backend in ("", attempt.backend)]
    if call.prev_result is not None and not failures and all(attempt.is_missing for attempt in asked):
        failures = [str(attempt.error) for attempt in asked]
    if failures:
        raise InternalError(
            f"failed to stop masquerading: {'; '.join(dict.fromkeys(failures))}",
            f"its rules are those with {owner.chain} or {owner.nft_prefix} in them",
        )


def forget(call: Call, removed: Removed) -> None:
    """`remove`, for a DEL which has found or removed the interface; nothing without `ipMasq`. Raises CniError.

    By the addresses that the ADD reported, whatever the interface has now, and by those that it had.
    """
    if not _may_be(call):
        return
    recorded = _recorded(call)
    remove(call, (*recorded, *(removed.addresses or ())) if recorded else None, spared=removed.living)


def goes_by_name(call: Call) -> bool:
    """Whether a DEL has rules to remove and no result that has their addresses: the ADD was cut off, as a rule.

    Then the container's other interfaces are to be spared, so their addresses have to be known.
    """
    return _may_be(call) and not _recorded(call)


def _may_be(call: Call) -> bool:
    try:
        return call.tools is not None and is_wanted(call)
    except gojson.JsonError:
        # No ADD has come past this either.
        return False


def _recorded(call: Call) -> tuple[IpInterface, ...]:
    result = call.prev_result
    return () if result is None else tuple(ipaddress.ip_interface(ip.address) for ip in result.ips)


def _backend(call: Call) -> str:
    """The one that the configuration names; empty where it leaves that to the host."""
    try:
        return gojson.get_str(call.fields, "ipMasqBackend") or ""
    except gojson.JsonError:
        return ""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """To remove the rules of one backend, and of one family where there is a program for each."""

    backend: str
    found: bool = False
    """There were rules, which are gone."""
    error: Exception | None = None
    is_missing: bool = False
    """There is no such program."""


def _tried(backend: str, removal: Callable[[], bool]) -> _Attempt:
    try:
        return _Attempt(backend, found=removal())
    except ToolNotFoundError as error:
        return _Attempt(backend, error=error, is_missing=True)
    except CniError as error:
        return _Attempt(backend, error=error)


def _counts(attempt: _Attempt, attempts: Sequence[_Attempt], backend: str) -> bool:
    """Whether the rules may still be there by this failure. An ADD makes all of them in one backend."""
    if attempt.is_missing:
        return False
    if backend:
        is_other = attempt.backend != backend
    else:
        is_other = any(other.found for other in attempts if other.backend != attempt.backend)
    if is_other:
        log.warning("masquerading was by another backend, so this is no failure: %s", attempt.error)
    return not is_other


def _tools(call: Call) -> HostTools:
    assert call.tools is not None, "asked of `unsupported` first"
    return call.tools
