"""`tuning`: sysctls and attributes of an interface that an earlier plugin of the list has made.

Order, backup file and messages are those of the reference plugin (containernetworking/plugins `plugins/meta/tuning`),
so that either can restore what the other changed; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration, interfaces, restore
from multus_daemon.plugins.builtin.contract import Call, Undo, read_file, write_file
from multus_daemon.plugins.builtin.interfaces import ignoring_absent_netns, located, step
from multus_daemon.plugins.builtin.tuning_config import (
    ALLOWLIST,
    Attributes,
    Sysctl,
    TuningConfig,
    data_dir,
    decode,
    encode,
    read,
    require_allowed,
)
from multus_daemon.plugins.plugin import Aspect, Difference
from multus_daemon.runtime import fs
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

_KEYS: Final = configuration.COMMON_KEYS.union(("sysctl", "mac", "promisc", "mtu", "allmulti", "txQLen", "dataDir"))
_BACKUP_LIMIT: Final = 64 * 1024


_UNSET: Final = Attributes()
_NO_MEMORY: Final = frozenset({errno.ENOBUFS, errno.ENOMEM})
_WORDS: Final = {
    "mac": "MAC address",
    "promiscuous": "promiscuous mode",
    "mtu": "MTU",
    "allmulti": "all-multicast mode",
    "tx_queue_length": "Transmit Queue Length",
}
"""The attributes in messages, in the order in which they are set."""


@dataclass(slots=True)
class _Changed:
    """State needed to undo an ADD."""

    sysctls: list[tuple[Sysctl, str]] = field(default_factory=list)
    """Each with its previous value."""
    attributes: Attributes = _UNSET
    """Their previous values."""


def unsupported(call: Call) -> str:
    """Name the first key that this plugin does not know."""
    return configuration.unknown_key(call.fields, _KEYS)


def validate(call: Call) -> None:
    """Read the configuration."""
    read(call)


def add(call: Call, netns: PodNetns) -> Result:
    """Set sysctls and attributes; return prevResult with the new MAC address. If it raises, all is as before."""
    settings = read(call)
    if settings.sysctls:
        require_allowed([item.key for item in settings.sysctls], call.on_host(ALLOWLIST))
    previous = _previous(call)
    path = _backup_path(call, settings.data_dir)
    with Undo() as undo:
        if settings.attributes != _UNSET:
            with step("read the backup of the attributes"):
                before = read_file(path, limit=_BACKUP_LIMIT)
            # No fsync: dataDir is in memory by default, and its files end with the interfaces when the node restarts.
            undo.arm("restore the backup", functools.partial(write_file, path, before, fsync=False))
        changed = _Changed()
        undo.arm("restore attributes and sysctls", functools.partial(_restore, call, netns, changed))
        with located(call), netns.inside():
            _apply(netns, settings=settings, ifname=call.invocation.ifname, path=path, changed=changed)
    mac = settings.attributes.mac
    if not mac:
        return previous
    return previous.replace_interfaces(
        tuple(replace(item, mac=mac) if item.name == call.invocation.ifname else item for item in previous.interfaces)
    )


def delete(call: Call, netns: PodNetns) -> None:
    """Restore the attributes. An error is logged and does not fail the DEL, as with the reference plugin.

    Sysctls are not restored: they end with the namespace.
    """
    try:
        path = _backup_path(call, data_dir(call))
        content = read_file(path, limit=_BACKUP_LIMIT)
        if content is None:
            # An ADD may have ended while it wrote the file.
            fs.sweep(path.parent, name=path.name)
            return
        before = _Changed(attributes=decode(content))
        try:
            if call.invocation.netns:
                with ignoring_absent_netns():
                    _restore(call, netns, before)
        except CniError as error:
            if not _lacked_memory(error):
                raise
            # There is no other attempt, and the next ADD would take the file for a backup of its own.
            log.warning("network %s: %s is not restored: %s", call.name, call.invocation.ifname, error)
        write_file(path, None)
    except (OSError, CniError, gojson.JsonError) as error:
        log.warning("network %s: %s is not restored: %s", call.name, call.invocation.ifname, error)


def keeps(call: Call) -> bool:
    """Report whether there is a backup of attributes."""
    return _backup_path(call, data_dir(call)).exists()


def sets(fields: Mapping[str, Any]) -> frozenset[Aspect]:
    """Return what the plugin sets in place of the one before it."""
    with contextlib.suppress(gojson.JsonError):
        if any(gojson.get(section, "mtu") for section in (fields, configuration.requests(fields)[1])):
            return frozenset(("mtu",))
    # Also where an ADD refuses the configuration.
    return frozenset()


def _lacked_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in _NO_MEMORY


def check(call: Call, netns: PodNetns) -> None:
    """Compare sysctls and attributes with the configuration; without `promisc` the mode must be off."""
    _previous(call)
    with located(call), netns.inside():
        settings, _ = _compared(call, netns)
        _compare(netns, settings=settings, ifname=call.invocation.ifname)


def _previous(call: Call) -> Result:
    if call.prev_result is None:
        advice = f"network {call.name!r}: tuning must follow other plugins in a list"
        raise InvalidNetworkConfigError("Required prevResult missing", advice)
    return call.prev_result


def _backup_path(call: Call, data_dir: str) -> Path:
    return call.on_host(data_dir) / f"{call.invocation.container_id}_{call.invocation.ifname}.json"


def _apply(netns: PodNetns, *, settings: TuningConfig, ifname: str, path: Path, changed: _Changed) -> None:
    for item in settings.sysctls:
        # A sysctl that can only be written (net.ipv4.route.flush) has no value to restore.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            changed.sysctls.append((item, namespaces.read_sysctl(*item.parts)))
        with step(f"set sysctl {item.key}"):
            namespaces.write_sysctl(*item.parts, value=item.value)
    wanted = settings.attributes
    if wanted == _UNSET:
        return
    with step(f'get "{ifname}"'):
        link = netns.pod.link(ifname)
    present = _present(link)
    before = Attributes(**{name: getattr(present, name) for name in _set_ones(wanted)})
    with step(f'save the attributes of "{ifname}"'):
        write_file(path, encode(before), fsync=False)
    changed.attributes = before
    _set(netns, ifname, wanted)


def _changes(kernel: Rtnl, link: Link, attributes: Attributes) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a name and a request for each attribute; the request raises OSError."""
    for name in _set_ones(attributes):
        value = getattr(attributes, name)
        yield f"{_WORDS[name]} {value}", functools.partial(getattr(kernel, f"set_{name}"), link.index, value)


def _restore(call: Call, netns: PodNetns, before: _Changed) -> None:
    """Restore the attributes, if the interface exists, and the sysctls. Raises InternalError with all failures."""
    if before == _Changed():
        return
    failures: dict[str, OSError] = {}
    with located(call), netns.inside():
        with _noted(failures, "attributes"):
            link = netns.pod.find_link(call.invocation.ifname)
            for what, change in _changes(netns.pod, link, before.attributes) if link else ():
                with _noted(failures, what):
                    change()
        for item, value in reversed(before.sysctls):
            with _noted(failures, f"sysctl {item.key}"):
                namespaces.write_sysctl(*item.parts, value=value)
        for first in failures.values():
            raise InternalError("; ".join(failures)) from first


@contextlib.contextmanager
def _noted(failures: dict[str, OSError], what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failures[f"failed to restore {what}: {error.strerror or error}"] = error


def _compare(netns: PodNetns, *, settings: TuningConfig, ifname: str) -> None:
    for item in settings.sysctls:
        with step(f"read sysctl {item.key}"):
            value = namespaces.read_sysctl(*item.parts)
        if value.split() != item.value.split():
            problem = f"value of {item.key} is {item.value}, current value is {value}"
            raise InternalError(f"Error: Tuning configured {problem}")
    with step(f'find "{ifname}"'):
        link = netns.pod.link(ifname)
    # Without `promisc` the mode must be off.
    wanted = replace(settings.attributes, promiscuous=bool(settings.attributes.promiscuous))
    for name, value, current in _differing(link, wanted):
        what = "Ethernet" if name == "mac" else _WORDS[name]
        problem = f"{what} of {ifname} is {value}, current value is {current}"
        raise InternalError(f"Error: Tuning configured {problem}")


def _differing(link: Link, wanted: Attributes) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, wanted and present value of each attribute that is set and is not as wanted."""
    present = _present(link)
    for name in _set_ones(wanted):
        value, current = getattr(wanted, name), getattr(present, name)
        if value != current:
            yield name, value, current


def _present(link: Link) -> Attributes:
    return Attributes(link.mac, link.is_promiscuous, link.mtu, link.is_allmulti, link.tx_queue_length)


def _set_ones(attributes: Attributes) -> list[str]:
    return [name for name in _WORDS if getattr(attributes, name) != getattr(_UNSET, name)]


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return the sysctls and attributes that are not as configured; none of an absent interface. Raises CniError."""
    ifname = call.invocation.ifname
    found: list[Difference] = []
    with located(call), netns.inside():
        settings, link = _compared(call, netns)
        for item in settings.sysctls:
            # One that cannot be read can only be written; that of an absent interface is absent.
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found += restore.sysctl(item.parts, item.value, functools.partial(_write, call, netns, item))
        for name, wanted, current in _differing(link, settings.attributes) if link else ():
            text = f'{_WORDS[name]} of "{ifname}" is {current}, not {wanted}'
            found.append(Difference(text, functools.partial(_set, netns, ifname, Attributes(**{name: wanted}))))
    return found


def _compared(call: Call, netns: PodNetns) -> tuple[TuningConfig, Link | None]:
    """Return the configuration as the pod's whole ADD left it, and the interface. Raises CniError.

    A port has MAC address and MTU of its bond. If the pod has renamed the interface, another one has its name.
    """
    settings, (result, own) = read(call), restore.recorded(call)
    wanted, sysctls = settings.attributes, settings.sysctls
    with step(f'look for "{own.name}"'):
        link = netns.pod.find_link(own.name)
        if interfaces.find_renamed(netns, own, link, result.interfaces) is not None:
            wanted, sysctls = _UNSET, tuple([item for item in sysctls if own.name not in item.parts])
    if link and link.master:
        wanted = replace(wanted, mac="", mtu=0)
    elif call.invocation.observed is not None:
        wanted = replace(wanted, mac=wanted.mac and own.mac, mtu=wanted.mtu and own.mtu)
    return TuningConfig(sysctls, wanted, settings.data_dir), link


def _write(call: Call, netns: PodNetns, item: Sysctl) -> None:
    require_allowed([item.key], call.on_host(ALLOWLIST))
    with located(call), netns.inside(), step(f"set sysctl {item.key}"):
        namespaces.write_sysctl(*item.parts, value=item.value)


def _set(netns: PodNetns, ifname: str, attributes: Attributes) -> None:
    with step(f'get "{ifname}"'):
        link = netns.pod.link(ifname)
    for what, change in _changes(netns.pod, link, attributes):
        with step(f'set {what} of "{ifname}"'):
            change()
