"""`whereabouts`: the IPAM plugin whose addresses the whole cluster shares.

Configuration, results and objects are those of k8snetworkplumbingwg/whereabouts. The reservation of an address is
created and nothing else is locked; the daemon keeps it as long as the interface has the address (`spec.ports`,
AddressBook).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import probe
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin import whereabouts_config as config
from multus_daemon.plugins.builtin.contract import AddressTakenError, Call, LeftToBinary, Undo
from multus_daemon.plugins.builtin.static import by_args
from multus_daemon.plugins.builtin.whereabouts_config import Config
from multus_daemon.plugins.plugin import NO_NETNS
from multus_daemon.spec.addresses import Address, AddressRange, Owner, Reservation, candidates
from multus_daemon.spec.attachment import BUILT_IN, Difference
from multus_daemon.spec.cni import conf, gojson, names
from multus_daemon.spec.cni.errors import (
    ChangedError,
    CniError,
    InternalError,
    InvalidEnvironmentError,
    IoFailureError,
    Origin,
    PluginNotAvailableError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.result import IpConfig, Result
from multus_daemon.spec.ports import AddressBook, AddressHeldError, StoreUnavailableError

log = logging.getLogger(__name__)

_PROBE_SECONDS: Final = 0.3
_PROBES_MAX: Final = 8
"""Maximum number of addresses of nodes that are gone that one ADD probes: it must end in time."""
_FREED_MAX: Final = 8
"""Maximum number of addresses that this node has freed, and that one ADD tries in a full range."""
_SHOWN: Final = 5
_WHO: Final = "`kubectl multus addresses -o wide` shows who holds them"


def unsupported(call: Call) -> str:
    """Return the first part of `ipam` that this plugin does not support, or leaves to the binary."""
    ipam = gojson.get_object(call.fields, "ipam") or {}
    if found := config.unsupported(ipam):
        return found
    if call.addresses is None:
        return "an address of the cluster without a daemon"
    if refusal := call.addresses.refusal:
        # As before the upgrade, until somebody grants the right.
        return LeftToBinary(f"no right to reserve addresses: {refusal}")
    # The binary does not look at reservations then.
    overlaps = gojson.get_bool(ipam, config.OVERLAPPING) is False
    return LeftToBinary(f"{config.OVERLAPPING}: false") if overlaps else ""


def read(call: Call) -> Config:
    """Read the configuration, and the file of the node that completes it. Raises CniError."""
    with contract.reading(call.name, "whereabouts"):
        ipam, file = gojson.get_object(call.fields, "ipam") or {}, b"{}"
        for path in filter(None, (gojson.get_str(ipam, "configuration_path"), *config.FILES)):
            try:
                content = contract.read_file(call.on_host(path))
            except OSError as error:
                raise IoFailureError(f"open {path}: {error.strerror}", "it completes ipam") from error
            if content is not None:
                file = content
                break
        completed = functools.partial(config.completed, ipam, file)
        return conf.once(call.fields, (config.read, file), lambda: config.read(completed()))


def add(call: Call, netns: PodNetns) -> Result:
    """Reserve one address of each range. If it raises, none is held."""
    settings, book, wanted = read(call), _book(call), _requested(call)
    fixed = (*settings.fixed, *by_args(call.invocation.args))
    contract.require_one_per_family([ip.is_ipv4 for ip in fixed], call.cni_version)
    if _podref(call).endswith("/"):
        raise InvalidEnvironmentError("whereabouts: no pod name", "CNI_ARGS need K8S_POD_NAMESPACE and K8S_POD_NAME")
    ips: list[IpConfig] = []
    with Undo() as undo, _reaching():
        if settings.ranges:
            book.begin()
            undo.arm("free the addresses", lambda: book.release(_owner(call), _podref(call)))
        for source in settings.ranges:
            asked = next((address for address in wanted if address in source), None)
            address = _Choice(call, netns, book, source).take(asked)
            wanted = [item for item in wanted if item != address]
            ips.append(IpConfig(f"{address}/{source.network.prefixlen}", settings.gateway))
        if wanted:
            raise InternalError(
                f"failed to allocate all requested IPs: {' '.join(map(str, wanted))}",
                remedy=f"{contract.ASK}, in the network's range {', '.join(map(str, settings.ranges))}",
                origin=Origin.ANNOTATION,
            )
    return Result(ips=(*ips, *fixed), routes=settings.routes, dns=settings.dns)


def foresee(call: Call) -> str:
    """Return the addresses that an ADD would try first. Raises CniError if none can be reserved now."""
    settings, book, wanted, found = read(call), _book(call), _requested(call), list[str]()
    with _reaching():
        for source in settings.ranges:
            book.begin()
            asked = next((address for address in wanted if address in source), None)
            found.append(_Choice(call, NO_NETNS, book, source).foreseen(asked))
    return ", ".join(found)


def delete(call: Call, netns: PodNetns) -> None:
    """Release the addresses; they are freed when the interface is gone, also if the API server does not answer now."""
    if call.addresses is not None:
        with _reaching():
            call.addresses.release(_owner(call), _podref(call))


def keeps(call: Call) -> bool:
    """Report whether addresses are reserved for the container's interface."""
    return call.addresses is None or bool(call.addresses.held_by(_owner(call)))


def check(call: Call, netns: PodNetns) -> None:
    """Raise ChangedError if an address of the container's interface is not reserved, or another pod has it."""
    book, problem = _book(call), ""
    # What the binary has given has no label of this node, and no file.
    if call.invocation.served_by.get("whereabouts") == BUILT_IN and read(call).ranges:
        problem = "" if book.held_by(_owner(call)) else "no address is reserved for the container"
    if problem := problem or book.problem(_owner(call)):
        raise ChangedError(f"whereabouts: {problem}")


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return that another pod has an address of the container's interface."""
    problem = _book(call).problem(_owner(call))
    return [Difference(problem)] if problem else []


def status(call: Call) -> None:
    """Raise CniError if the configuration is not usable, or if no address can be reserved now."""
    if read(call).ranges:
        with _reaching(PluginNotAvailableError):
            _book(call).begin()


def _book(call: Call) -> AddressBook:
    assert call.addresses is not None, "`unsupported` says so"
    return call.addresses


def _owner(call: Call) -> Owner:
    return Owner(call.invocation.container_id, call.invocation.ifname, call.name)


def _podref(call: Call) -> str:
    args = dict(names.parse_args(call.invocation.args))
    return f"{args.get('K8S_POD_NAMESPACE', '')}/{args.get('K8S_POD_NAME', '')}"


def _requested(call: Call) -> list[Address]:
    """Return the addresses that the pod's annotation asks for. Raises CniError."""
    with contract.reading(call.name, "whereabouts"):
        texts = [text for asked in contract.requests(call.fields) for text in gojson.get_strings(asked, "ips") or ()]
        try:
            return [contract.ip_address(text.partition("/")[0]) for text in texts]
        except ValueError as error:
            raise gojson.JsonError(f"ips: invalid IP address {error}") from error


@contextlib.contextmanager
def _reaching(unavailable: type[CniError] = TryAgainLaterError) -> Iterator[None]:
    """Turn a StoreUnavailableError of the block into `unavailable`, and an OSError into an IoFailureError."""
    try:
        yield
    except OSError as error:
        raise IoFailureError(f"the reservation cannot be noted: {error.strerror or error}") from error
    except StoreUnavailableError as error:
        problem = f"no address can be reserved now: {error}"
        raise unavailable(problem, remedy=error.advice, origin=Origin.API) from error


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of an address of one range."""

    call: Call
    netns: PodNetns
    book: AddressBook
    source: AddressRange

    def take(self, asked: Address | None) -> Address:
        """Reserve the requested address, else a free one, else one of a node that is gone. Raises CniError."""
        self.book.serves(self.call.invocation.network or self.call.name, self.source)
        if asked is not None:
            try:
                return self._create(asked)
            except AddressHeldError as error:
                problem = f"requested IP address {asked} is not available in range {self.source}"
                remedy = f"{_WHO}: {contract.ASK}"
                raise AddressTakenError(problem, str(error), remedy=remedy, address=str(asked)) from error
        for address in self._free():
            with contextlib.suppress(AddressHeldError):
                return self._create(address)
        return self._take_over()

    def foreseen(self, asked: Address | None) -> str:
        """Return the address that would be tried first, as far as the node knows."""
        if asked is not None and (holder := self.book.holder(asked, self.source)):
            return f"{asked}, which pod {holder.podref} holds"
        return str(asked or next(self._free(), f"none is free in range {self.source}"))

    def _free(self) -> Iterator[Address]:
        """Yield what the pod or its claim has already, then free addresses."""
        book, scope = self.book, self.source.scope
        # A network that was detached and is attached again: its release may wait for the API server.
        own, claim = book.held_by(_owner(self.call)), self.call.invocation.address_claim
        known = [*own, *(book.claimed(claim, scope) if claim else ())]
        last = book.last(_podref(self.call), self.call.invocation.ifname, scope)
        cooling, taken = functools.partial(book.is_cooling, scope=scope), book.taken(self.source)
        free = candidates(self.source, taken, cooling, [last] if last else [])
        has = [item.address for item in known if item.scope == scope and item.address in self.source]
        return itertools.chain(has, free)

    def _create(self, address: Address, old: Reservation | None = None) -> Address:
        """Reserve the address; in place of `old`, if it is given. Raises AddressHeldError."""
        call, book, source = self.call.invocation, self.book, self.source
        wish = Reservation(
            address,
            source.scope,
            _podref(self.call),
            _owner(self.call),
            network=call.network,
            range=source.cidr,
            claim=call.address_claim,
            pool=source.pool,
        )
        return (book.create(wish) if old is None else book.take_over(old, wish)).address

    def _take_over(self) -> Address:
        """Take an address of a node that is gone; only if nobody on the segment answers for it. Raises CniError."""
        addresses, answered = [*map(self.source.address, self.source.numbers())], list[str]()
        # What this node frees now, or has freed, may still count as held.
        freed = (address for address in addresses if self.book.is_cooling(address, self.source.scope))
        for address in itertools.islice(freed, _FREED_MAX):
            with contextlib.suppress(AddressHeldError):
                return self._create(address)
        held = [holder for address in addresses if (holder := self.book.holder(address, self.source))]
        gone = self.book.gone({holder.node for holder in held if holder.node})
        lost = [holder for holder in held if holder.node in gone and not holder.claim]
        # Others look for one at the same time, and the next ADD asks for other ones.
        for old in random.sample(lost, min(len(lost), _PROBES_MAX)):
            if mac := probe.neighbour(self.netns, self.call.invocation.ifname, old.address, _PROBE_SECONDS):
                log.warning(
                    "range %s: %s of %s is not given away: %s answers", self.source, old.address, old.podref, mac
                )
                answered.append(str(old.address))
                continue
            with contextlib.suppress(AddressHeldError):
                address, why = self._create(old.address, old), f"its node {old.node} {gone[old.node]}"
                log.warning("range %s is full: %s of %s is given away: %s", self.source, address, old.podref, why)
                return address
        if not self.source.size:
            raise InternalError(
                f"no address in range {self.source}: ipam.exclude takes all of it",
                remedy="correct 'exclude' or 'range' in the network's configuration",
                origin=Origin.NETWORK,
            )
        by_node = Counter(holder.node or "the whereabouts binary" for holder in held).most_common()
        parts = [f"{count} by {node}{f' ({gone[node]})' if node in gone else ''}" for node, count in by_node[:_SHOWN]]
        parts += [f"and {len(by_node) - _SHOWN} nodes more"] if len(by_node) > _SHOWN else []
        raise InternalError(
            f"no free address in range {self.source}: {len(held)} of {self.source.size} are held: {', '.join(parts)}",
            f"still in use on the segment: {', '.join(answered)}" if answered else "",
            remedy=f"{_WHO}; delete pods, or give the network a larger range",
            origin=Origin.NETWORK,
        )
