"""`host-local`: the IPAM plugin that assigns addresses from ranges, and keeps a file for each on this node.

Configuration, directory and answers are those of the reference plugin (containernetworking/plugins
`plugins/ipam/host-local`), so that both can use one directory. The lock of a network is held for a whole verb.
Addresses are assigned round robin through the ranges of a set, requested ones first; an ADD reserves one of each set,
or none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin import host_local_config as config
from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.host_local_config import Address, HostLocalConfig, Range, RangeSet
from multus_daemon.plugins.builtin.host_local_store import LOCK_NAME, Index, LeaseDirectory, usage
from multus_daemon.runtime import deadline, fs
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import ChangedError, InternalError, IoFailureError, Origin
from multus_daemon.spec.cni.result import Dns, IpConfig, Result

# By directory. Calls of this process take turns; they poll the lock in the directory for other processes.
_locks: Final = KeyedLock()
_index: Final = Index()

_EXHAUSTED_ADVICE: Final = (
    "`multusctl attachments` shows who holds them, with `--leaks` those that nothing will delete; "
    "delete pods, or give the network a larger range"
)


def unsupported(call: Call) -> str:
    """Return the first unknown key of `ipam`, empty if none; keys outside of `ipam` belong to the calling plugin."""
    ipam = gojson.get_object(call.fields, "ipam") or {}
    if unknown := contract.unknown_key(ipam, config.IPAM_KEYS, within="ipam."):
        return unknown
    for entries in gojson.get_list(ipam, "ranges") or ():
        for entry in entries if isinstance(entries, list) else ():
            one = contract.as_object(entry, "ranges")
            if unknown := contract.unknown_key(one, config.RANGE_KEYS, within="ipam.ranges: "):
                return unknown
    return ""


def add(call: Call, netns: PodNetns) -> Result:
    """Reserve one address of each range set. If it raises, none is reserved."""
    settings = read(call)
    resolv_conf = call.on_host(settings.resolv_conf) if settings.resolv_conf else None
    with _locked(call, settings) as leases:
        dns = Dns() if resolv_conf is None else read_resolv_conf(resolv_conf)
        ips = allocate(settings, leases, call.invocation.container_id)
    return Result(ips=ips, routes=settings.routes, dns=dns)


def delete(call: Call, netns: PodNetns) -> None:
    """Release all addresses of the container's interface; it is no error if it has none.

    Raises CniError also if the file of an address of the ADD's result can't be read; without a result, if any can't.
    """
    try:
        with _locked(call, read(call)) as leases:
            for name in leases.files():
                leases.release(name)
            leases.require_readable(_recorded(call))
    except IoFailureError as error:
        # An ADD that failed for the same reason has reserved nothing.
        is_read_only = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EROFS
        if not is_read_only or keeps(call):
            raise


def keeps(call: Call) -> bool:
    """Return True if addresses are reserved for the container's interface."""
    with contract.reading(call.name, "host-local"):
        ipam = gojson.get_object(call.fields, "ipam") or {}
        directory = call.on_host(contract.path(ipam, "dataDir") or config.DEFAULT_DATA_DIR) / call.name
    try:
        return bool(store.held(directory, store.Owner(call.invocation.container_id, call.invocation.ifname)))
    except OSError as error:
        raise IoFailureError(
            f"the reserved addresses of network {call.name} can't be read: {error.strerror or error}"
        ) from error


def check(call: Call, netns: PodNetns) -> None:
    """Raise CniError if no address is reserved for the container's interface."""
    with _locked(call, read(call)) as leases:
        if leases.files() or (leases.refresh() and leases.files()):
            return
        leases.require_readable(_recorded(call))
    raise ChangedError(f"host-local: Failed to find address added by container {call.invocation.container_id}")


@contextlib.contextmanager
def _locked(call: Call, settings: HostLocalConfig) -> Iterator[LeaseDirectory]:
    """Lock the network's directory for the block; OSErrors become IoFailureErrors."""
    directory = str(call.on_host(f"{settings.data_dir}/{settings.name}"))
    owner = store.Owner(call.invocation.container_id, call.invocation.ifname)
    end = time.monotonic() + deadlines.HOST_LOCAL_LOCK_SECONDS
    with contextlib.ExitStack() as stack:
        try:
            with deadline.within(deadlines.HOST_LOCAL_LOCK_SECONDS):
                stack.enter_context(_locks.hold(directory))
        except TimeoutError as error:
            raise store.busy(f"{directory}/{LOCK_NAME}") from error
        try:
            with store.locked(directory, owner, patience=end - time.monotonic(), index=_index) as leases:
                try:
                    yield leases
                finally:
                    usage.served(call.invocation.network or settings.name, settings.range_sets, leases.book)
        except OSError as error:
            place = os.path.join(directory, error.filename or "")
            advice = config.check_directory(settings.data_dir)
            raise IoFailureError(f"host-local: {error.strerror or error}: {place}", remedy=advice) from error


def _recorded(call: Call) -> list[str]:
    return [] if call.prev_result is None else [ip.ip for ip in call.prev_result.ips]


def read(call: Call) -> HostLocalConfig:
    """Read the configuration, with CNI_ARGS. Raises CniError."""
    of_fields = functools.partial(config.read, call.fields, name=call.name, cni_version=call.cni_version)
    settings = conf.once(call.fields, config.read, of_fields)
    if call.invocation.verb == "ADD":
        # A DEL frees what an earlier release, which did not look at the gateway, has given.
        config.require_gateways(settings)
    return config.with_args(settings, call.invocation.args)


def read_resolv_conf(path: Path) -> Dns:
    """Read a resolv.conf(5) file: `search` and `options` accumulate, the last `domain` wins.

    Raises IoFailureError. Blocks.
    """
    try:
        text = fs.read_limited(path).decode("utf-8", "replace")
    except OSError as error:
        raise IoFailureError(f"open {path}: {error.strerror}", "ipam.resolvConf") from error
    values: dict[str, list[str]] = {"nameserver": [], "domain": [""], "search": [], "options": []}
    for line in text.split("\n"):
        # A comment's first word is not a key.
        key, *words = line.split() or [""]
        if key in values:
            values[key] += words if key in ("search", "options") else words[:1]
    return Dns(tuple(values["nameserver"]), values["domain"][-1], tuple(values["search"]), tuple(values["options"]))


# --- allocation ------------------------------------------------------------------------------------------------------


def allocate(settings: HostLocalConfig, leases: LeaseDirectory, container_id: str) -> tuple[IpConfig, ...]:
    """Reserve one address of each set, in the order of the sets, and all requested addresses.

    If it raises, it has released the addresses of this call. Raises InternalError (as the reference), OSError.
    """
    wanted = dict.fromkeys(settings.requested)
    # Read once: sets don't overlap, so an address of this call is in no other set.
    owned = [ipaddress.ip_address(text) for text in leases.owned()]
    ips: list[IpConfig] = []
    with contextlib.ExitStack() as undo:
        for index, range_set in enumerate(settings.range_sets):
            requested = next((address for address in wanted if range_set.range_of(address)), None)
            with contract.prefixed(f"failed to allocate for range {index}"):
                if requested is None:
                    text, source = _take_next(range_set, leases, index, owned, container_id)
                else:
                    del wanted[requested]
                    text, source = _take_requested(range_set, requested, leases, index)
            undo.callback(_release, leases, text)
            ips.append(IpConfig(f"{text}/{source.prefix_length}", str(source.gateway)))
        if wanted:
            rest = " ".join(map(str, wanted))
            advice = config.ask_in_range(settings.range_sets)
            raise InternalError(
                f"failed to allocate all requested IPs: {rest}", remedy=advice, origin=Origin.ANNOTATION
            )
        undo.pop_all()
    return tuple(ips)


def _release(leases: LeaseDirectory, text: str) -> None:
    # The error that led here says more than an error of the clean-up. The DEL that follows releases again.
    with contextlib.suppress(OSError):
        leases.release(text)


def _take_requested(range_set: RangeSet, address: Address, leases: LeaseDirectory, index: int) -> tuple[str, Range]:
    """Reserve a requested address. By request, an interface may get several addresses of a set."""
    source = range_set.range_of(address)
    assert source is not None
    if address == source.gateway:
        raise InternalError(
            f"requested ip {address} is subnet's gateway", remedy=contract.ASK, origin=Origin.ANNOTATION
        )
    text = str(address)
    while text in leases.taken or not leases.reserve(text, index):
        if not leases.refresh():
            problem = f"requested IP address {address} is not available in range set {range_set}"
            holder = leases.holder(text)
            held = f"container {holder} has it" if holder else ""
            raise contract.AddressTakenError(problem, held, remedy=config.ASK_WHO, address=text)
    return text, source


def _take_next(
    range_set: RangeSet, leases: LeaseDirectory, index: int, owned: Sequence[Address], container_id: str
) -> tuple[str, Range]:
    for address in owned:
        if range_set.range_of(address):
            raise InternalError(f"{address} has been allocated to {container_id}, duplicate allocation is not allowed")
    while True:
        for text, source in candidates(range_set, leases.last_reserved(index), leases.taken):
            if leases.reserve(text, index):
                return text, source
        if not leases.refresh():
            raise InternalError(
                f"no IP addresses available in range set: {range_set}", remedy=_EXHAUSTED_ADVICE, origin=Origin.NETWORK
            )


def candidates(range_set: RangeSet, last_reserved: str, taken: Set[str]) -> Iterator[tuple[str, Range]]:
    """Yield each free address of the set, except gateways, from the one after `last_reserved`, cyclically.

    It begins with the first address if `last_reserved` is not in the set. Lazy, so that a large range takes no time.
    """
    ranges = range_set.ranges
    start, resume = 0, ranges[0].first - 1
    with contextlib.suppress(ValueError):
        last = ipaddress.ip_address(last_reserved)
        for position, candidate in enumerate(ranges):
            if last in candidate:
                start, resume = position, int(last)
                break
    first = ranges[start]
    others = [(source, source.first, source.last) for source in ranges[start + 1 :] + ranges[:start]]
    for source, begin, end in ((first, resume + 1, first.last), *others, (first, first.first, resume)):
        gateway = int(source.gateway) if source.gateway.version == source.version else -1
        value = begin
        while value <= end:
            if value != gateway and (text := config.text_of(value, source.version)) not in taken:
                yield text, source
            value += 1
