"""`tuning`: sets sysctls, and attributes of an interface that an earlier plugin of the list has made.

Order, backup file and messages are those of the reference plugin (containernetworking/plugins `plugins/meta/tuning`),
so that either can restore what the other changed; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, interfaces, restore
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
from multus_daemon.plugins.plugin import Aspect
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

KEYS: Final = ("sysctl", "mac", "promisc", "mtu", "allmulti", "txQLen", "dataDir")
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
"""The attributes and their names in messages, in the order in which they are set."""


def add(call: Call, netns: PodNetns) -> Result:
    """Set sysctls and attributes; return prevResult with the new MAC address. If it raises, it has restored all."""
    settings = read(call)
    if settings.sysctls:
        require_allowed([item.key for item in settings.sysctls], call.on_host(ALLOWLIST))
    previous = contract.previous(call)
    with located(call), netns.inside(), Undo() as undo:
        for item in settings.sysctls:
            # A sysctl that can only be written (net.ipv4.route.flush) has no value to restore.
            with contextlib.suppress(OSError, UnicodeDecodeError):
                before = namespaces.read_sysctl(*item.parts)
                undo.arm(f"restore {item.key}", functools.partial(namespaces.write_sysctl, *item.parts, value=before))
            with step(f"set sysctl {item.key}", asked=True):
                namespaces.write_sysctl(*item.parts, value=item.value)
        if settings.attributes != _UNSET:
            _set_all(call, netns, settings, undo)
    mac = settings.attributes.mac
    if not mac:
        return previous
    ifname = call.invocation.ifname
    interfaces = tuple(replace(item, mac=mac) if item.name == ifname else item for item in previous.interfaces)
    return replace(previous, interfaces=interfaces)


def _set_all(call: Call, netns: PodNetns, settings: TuningConfig, undo: Undo) -> None:
    ifname, wanted = call.invocation.ifname, _given(settings.attributes)
    path = _backup_path(call, settings.data_dir)
    with step(f'get "{ifname}"'):
        link = netns.pod.link(ifname)
    present = _present(link)
    before = {name: getattr(present, name) for name in wanted}
    with step(f'save the attributes of "{ifname}"'):
        # No fsync: dataDir is in memory by default, and its files end with the interfaces when the node restarts.
        kept = read_file(path, limit=_BACKUP_LIMIT)
        undo.arm("restore the backup", functools.partial(write_file, path, kept, fsync=False))
        write_file(path, encode(Attributes(**before)), fsync=False)
    for name, value in wanted.items():
        undo.arm(f"restore {_WORDS[name]}", functools.partial(netns.pod.change, link.index, **{name: before[name]}))
        _set(netns, ifname, name, value)


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
        before = decode(content)
        # After one without memory, there is no other attempt, and the next ADD would take the file for its own backup.
        if not call.invocation.netns or all(error.errno in _NO_MEMORY for error in _restore(call, netns, before)):
            write_file(path, None)
    except (OSError, CniError, gojson.JsonError) as error:
        log.warning("network %s: %s can't be restored: %s", call.name, call.invocation.ifname, error)


def _restore(call: Call, netns: PodNetns, before: Attributes) -> list[OSError]:
    """Restore the attributes, if the interface exists; return the errors, which it has logged."""
    ifname, errors = call.invocation.ifname, list[OSError]()
    with ignoring_absent_netns(), located(call), netns.inside():
        for name, value in _given(before).items():
            try:
                _put_back(netns, ifname, name, value)
            except OSError as error:
                errors.append(error)
                what = f"{_WORDS[name]} {value} of {ifname}"
                log.warning("network %s: %s can't be restored: %s", call.name, what, error.strerror)
    return errors


def _put_back(netns: PodNetns, ifname: str, name: str, value: Any) -> None:
    """Restore an attribute, if the interface exists; without memory at the second attempt. Raises OSError."""
    for is_last in (False, True):
        try:
            if link := netns.pod.find_link(ifname):
                netns.pod.change(link.index, **{name: value})
            return
        except OSError as error:
            if is_last or error.errno not in _NO_MEMORY:
                raise


def keeps(call: Call) -> bool:
    """Return True if there is a backup of attributes."""
    return _backup_path(call, data_dir(call)).exists()


def sets(fields: Mapping[str, Any]) -> frozenset[Aspect]:
    """Return the properties of the interface that the plugin sets after an earlier plugin did."""
    with contextlib.suppress(gojson.JsonError):
        if any(gojson.get(section, "mtu") for section in (fields, contract.requests(fields)[1])):
            return frozenset(("mtu",))
    # Also where an ADD refuses the configuration.
    return frozenset()


def _backup_path(call: Call, data_dir: str) -> Path:
    return call.on_host(data_dir) / f"{call.invocation.container_id}_{call.invocation.ifname}.json"


def _present(link: Link) -> Attributes:
    return Attributes(link.mac, link.is_promiscuous, link.mtu, link.is_allmulti, link.tx_queue_length)


def _given(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name in _WORDS if (value := getattr(attributes, name)) != getattr(_UNSET, name)}


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return the sysctls and attributes that are not as configured; none of an absent interface. Raises CniError.

    In a CHECK without `promisc`, promiscuous mode must be off.
    """
    contract.previous(call)
    ifname = call.invocation.ifname
    found: list[Difference] = []
    with located(call), netns.inside():
        settings, link = _compared(call, netns)
        for item in settings.sysctls:
            # One that cannot be read can only be written; that of an absent interface is absent.
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found += restore.sysctl(item.parts, item.value, functools.partial(_write, call, netns, item))
        present = _present(link) if link else None
        for name, wanted in _given(settings.attributes).items() if present else ():
            if wanted != (current := getattr(present, name)):
                text = f'{_WORDS[name]} of "{ifname}" is {current}, not {wanted}'
                found.append(Difference(text, functools.partial(_set, netns, ifname, name, wanted)))
    return found


def _compared(call: Call, netns: PodNetns) -> tuple[TuningConfig, Link | None]:
    """Return the configuration, as far as the pod's whole ADD did not change it, and the interface. Raises CniError.

    A port of a bond has the bond's MAC address and MTU. The interface is None if it is gone or renamed.
    """
    settings, (result, own) = read(call), restore.recorded(call)
    wanted, sysctls = settings.attributes, settings.sysctls
    is_check = call.invocation.verb == "CHECK"
    if is_check:
        wanted = replace(wanted, promiscuous=bool(wanted.promiscuous))
    with step(f'look for "{own.name}"'):
        link = netns.pod.link(own.name) if is_check else netns.pod.find_link(own.name)
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


def _set(netns: PodNetns, ifname: str, name: str, value: Any) -> None:
    """Set an attribute of a link. Raises InternalError."""
    with step(f'set {_WORDS[name]} {value} of "{ifname}"'):
        netns.pod.change(netns.pod.link(ifname).index, **{name: value})
