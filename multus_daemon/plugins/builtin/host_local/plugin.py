"""The verbs of host-local. The lock of a network is held for a whole verb."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from multus_daemon import deadlines
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.host_local import allocator, book, config, store
from multus_daemon.plugins.builtin.host_local.index import Index
from multus_daemon.runtime import deadline, fs
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import InternalError, IoFailureError
from multus_daemon.spec.cni.result import Dns, Result

T = TypeVar("T")

# Of the directories. Calls of this process come in turn; between processes the lock in the directory is polled for.
_locks: Final = KeyedLock()
_index: Final = Index()


def unsupported(call: Call) -> str:
    """See `contract.Plugin`; of the section `ipam`, the others are not for this plugin."""
    return config.unsupported(call.fields)


def validate(call: Call) -> None:
    """See `contract.Plugin`."""
    call.once(_settings)


def add(call: Call, session: Session) -> Result:
    """One address from each range set. Raises CniError; nothing is taken then."""
    settings = call.once(_settings)
    resolv_conf = call.on_host(settings.resolv_conf) if settings.resolv_conf else None

    def work(leases: store.LeaseDirectory) -> Result:
        dns = Dns() if resolv_conf is None else read_resolv_conf(resolv_conf)
        ips = allocator.allocate(settings, leases, call.invocation.container_id)
        return Result(ips=ips, routes=settings.routes, dns=dns)

    return _locked(call, settings, work)


def delete(call: Call, session: Session) -> None:
    """Release every address of the container's interface; none is done.

    Raises CniError, also where the file of one can't be read: of those that the ADD answered, or, where that is not
    known, of any.
    """

    def work(leases: store.LeaseDirectory) -> None:
        for name in leases.files():
            leases.release(name)
        leases.require_readable(_recorded(call))

    _locked(call, call.once(_settings), work)


def kept(call: Call) -> str:
    """The addresses of the container's interface, whatever else the configuration says; see `ports.BuiltinPlugins`."""
    try:
        data_dir = gojson.get_str(gojson.get_object(call.fields, "ipam") or {}, "dataDir") or config.DEFAULT_DATA_DIR
    except gojson.JsonError:
        # No ADD has come past this.
        return ""
    directory = call.on_host(data_dir) / call.name
    try:
        held = store.held(directory, store.Owner(call.invocation.container_id, call.invocation.ifname))
    except OSError as error:
        return f"addresses in {directory}, which can't be read: {error.strerror or error}"
    return f"addresses in {directory}: {', '.join(held)}" if held else ""


def check(call: Call, session: Session) -> None:
    """Some address is the container's interface's. Raises CniError."""

    def work(leases: store.LeaseDirectory) -> bool:
        if leases.files() or (leases.refresh() and leases.files()):
            return True
        leases.require_readable(_recorded(call))
        return False

    if not _locked(call, _settings(call), work):
        raise InternalError(f"host-local: Failed to find address added by container {call.invocation.container_id}")


def status(call: Call) -> None:
    """Always well, as with the reference plugin."""


def _locked(call: Call, settings: config.HostLocalConfig, work: Callable[[store.LeaseDirectory], T]) -> T:
    directory = str(call.on_host(f"{settings.data_dir}/{settings.name}"))
    owner = store.Owner(call.invocation.container_id, call.invocation.ifname)
    seconds = deadlines.HOST_LOCAL_LOCK_SECONDS
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            with deadline.within(seconds):
                stack.enter_context(_locks.hold(directory))
        except TimeoutError as error:
            raise store.busy(f"{directory}/{book.LOCK_NAME}") from error
        patience = seconds - (time.monotonic() - began)
        try:
            with store.locked(directory, owner, patience=patience, index=_index) as leases:
                return work(leases)
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
            raise IoFailureError(f"host-local: {reason}", f"data directory {directory}") from error


def _recorded(call: Call) -> list[str]:
    """The addresses that the ADD answered; empty where they are not known."""
    return [] if call.prev_result is None else [ip.ip for ip in call.prev_result.ips]


def _settings(call: Call) -> config.HostLocalConfig:
    settings = conf.once(
        call.fields, config.read, lambda: config.read(call.fields, name=call.name, cni_version=call.cni_version)
    )
    return config.with_args(settings, call.invocation.args)


def read_resolv_conf(path: Path) -> Dns:
    """The settings in a resolv.conf(5) file: `search` and `options` add up, the last `domain` counts.

    Raises IoFailureError. Blocks.
    """
    try:
        text = fs.read_limited(path).decode("utf-8", "replace")
    except OSError as error:
        raise IoFailureError(f"open {path}: {error.strerror}", "ipam.resolvConf") from error
    nameservers: list[str] = []
    search: list[str] = []
    options: list[str] = []
    domain = ""
    for line in text.split("\n"):
        match line.split():
            case ["nameserver", first, *_]:
                nameservers.append(first)
            case ["domain", first, *_]:
                domain = first
            case ["search", _, *_] as words:
                search += words[1:]
            case ["options", _, *_] as words:
                options += words[1:]
            case _:
                # Comments (`#`, `;`) come here as well: their first word is none of the above.
                pass
    return Dns(tuple(nameservers), domain, tuple(search), tuple(options))
