"""Addresses that the whole cluster shares: whereabouts' objects, and who holds an address. Pure.

An address is held by an OverlappingRangeIPReservation (group `whereabouts.cni.cncf.io`, version v1alpha1), whose
creation is the lock. Format of name and spec: k8snetworkplumbingwg/whereabouts `pkg/storage/kubernetes/ipam.go`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import random
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import msgspec

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

API: Final = "/apis/whereabouts.cni.cncf.io/v1alpha1"
RESERVATIONS: Final = "overlappingrangeipreservations"
KIND: Final = "OverlappingRangeIPReservation"
POOLS: Final = "ippools"
NAMESPACE: Final = "kube-system"
"""Namespace of the objects, as whereabouts has it by default."""
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Key of the taint with which a person says that a node is powered off."""

NODE_LABEL: Final = "multus.io/node"
"""The node that holds the address, and that alone may free it. whereabouts' own objects do not have it."""
NETWORK_LABEL: Final = "multus.io/network"
"""`NAMESPACE.NAME` of the NetworkAttachmentDefinition, as far as a label may be that long."""
BOOT_ANNOTATION: Final = "multus.io/boot-id"
NETWORK_ANNOTATION: Final = "multus.io/network"
"""`NAMESPACE/NAME` of the NetworkAttachmentDefinition."""
ADDRESS_ANNOTATION: Final = "multus.io/address"
NAME_ANNOTATION: Final = "multus.io/network-name"
"""`name` of the CNI configuration."""
POOL_ANNOTATION: Final = "multus.io/pool"
RANGE_ANNOTATION: Final = "multus.io/range"
"""The range, as `ipam` has it."""
CLAIM_ANNOTATION: Final = "multus.io/ipam-claim"
"""`Reservation.claim`."""
ALSO_ANNOTATION: Final = "multus.io/also"
"""`Reservation.also`."""
STATEFUL_SET: Final = "statefulset"
FINALIZER: Final = "multus.io/held"
"""On a reservation of ours: who else deletes it only marks it, and its name stays taken, until its node frees it."""
_LABEL_MAX: Final = 63


@dataclass(frozen=True, slots=True)
class Owner:
    """What an address was given to: one interface of one container."""

    container_id: str
    ifname: str
    network: str
    """`name` of the CNI configuration."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """An address that is held."""

    address: Address
    scope: str
    """What stands before the address in the object's name, without the hyphen: a `network_name`, else empty."""
    podref: str
    """`namespace/name` of the pod."""
    owner: Owner
    node: str = ""
    """Empty for what whereabouts' binary has made."""
    network: str = ""
    """`namespace/name` of the NetworkAttachmentDefinition."""
    range: str = ""
    claim: str = ""
    """What holds the address in place of the pod: `namespace/name` of an IPAMClaim, or STATEFUL_SET/namespace/name of a
    StatefulSet, then the pod's ordinal and the interface; empty: the pod does.
    """
    uid: str = ""
    """Of the object; empty for an entry that only a pool has."""
    pool: str = ""
    """Name of the IPPool of the range, in which whereabouts' binary has its entries."""
    also: tuple[Owner, ...] = ()
    """More owners on this node, to which the claim has lent the address."""

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Return all who have the address on this node."""
        return self.owner, *self.also

    @property
    def name(self) -> str:
        """Name of the object."""
        return object_name(self.address, self.scope)

    def is_same(self, there: Reservation) -> bool:
        """Return True if `there` is of the same interface of the same container, or of the same claim."""
        if self.claim and there.claim == self.claim:
            return True
        mine, other = self.owner, there.owner
        return (self.node, mine.container_id, mine.ifname) == (there.node, other.container_id, other.ifname)


@dataclass(frozen=True, slots=True)
class Either(Container[int]):
    """The union of two containers that change."""

    one: Container[int]
    other: Container[int]

    def __contains__(self, item: object) -> bool:
        return item in self.one or item in self.other


def object_name(address: Address, scope: str) -> str:
    """Return the name of the reservation of `address`, as whereabouts writes it."""
    text = str(address)
    text = (f"{text}0" if text.endswith(":") else text).replace(":", "-")
    return f"{scope}-{text}" if scope else text


def split_name(name: str, scopes: Iterable[str] = ()) -> tuple[str, Address] | None:
    """Return scope and address of a reservation's name; None if it has no address.

    A hyphen stands for a colon, and before the address, too: `cafe-fd00--1` may have the scope `cafe`. A scope of
    `scopes` is preferred; otherwise the longest address.
    """
    known = sorted(filter(None, scopes), key=len, reverse=True)
    for scope in [*known, "", *(name[: match.start()] for match in re.finditer("-", name))]:
        if (address := address_of(name, scope)) is not None:
            return scope, address
    return None


def address_of(name: str, scope: str) -> Address | None:
    """Return the address in a reservation's name; None if that is not of the scope."""
    before = f"{scope}-" if scope else ""
    if not name.startswith(before):
        return None
    text = name[len(before) :]
    try:
        return ipaddress.ip_address(text if "." in text else text.replace("-", ":"))
    except ValueError:
        return None


def pool_name(range_: str, network_name: str) -> str:
    """Return the name of the IPPool of a range, as whereabouts writes it; `range_`: as `ipam` has it."""
    text = (f"{range_}0" if range_.endswith(":") else range_).replace(":", "-").replace("/", "-")
    return f"{network_name}-{text}" if network_name else text


def path_of_claim(claim: str) -> str:
    """Return the path of the object at the API server; `claim`: see `Reservation.claim`."""
    path = "/apis/k8s.cni.cncf.io/v1alpha1/namespaces/%s/ipamclaims/%s"
    if claim.startswith(f"{STATEFUL_SET}/"):
        path, claim = "/apis/apps/v1/namespaces/%s/statefulsets/%s", claim.partition("/")[2]
    namespace, name = [quote(part, safe="") for part in claim.split("/")[:2]]
    return path % (namespace, name)


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The addresses that pods get from one range of a configuration."""

    network: Network
    spans: tuple[range, ...]
    """The addresses as numbers, in ascending order; without those that are excluded."""
    scope: str = ""
    """`Reservation.scope` of its addresses."""
    pool: str = ""
    """`Reservation.pool` of its addresses."""

    @property
    def size(self) -> int:
        """Return how many addresses there are."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def cidr(self) -> str:
        """The network with its prefix length, as an IPPool has it in `spec.range`."""
        return str(self.network)

    def __contains__(self, address: Address) -> bool:
        return address.version == self.network.version and any(int(address) in span for span in self.spans)

    def __str__(self) -> str:
        ends = f"{self.address(self.spans[0].start)}-{self.address(self.spans[-1].stop - 1)}" if self.spans else "empty"
        return f"{self.cidr} ({ends})"

    def address(self, number: int) -> Address:
        """Return the address with this number."""
        return type(self.network.network_address)(number)

    def numbers(self, start: int = 0) -> Iterator[int]:
        """Yield each address as a number, from the one at the position `start` on, cyclically."""
        before, after = [], []
        for span in self.spans:
            cut = span.start + min(max(start, 0), span.stop - span.start)
            start -= span.stop - span.start
            before.append(range(span.start, cut))
            after.append(range(cut, span.stop))
        return itertools.chain.from_iterable([*after, *before])


def _without(numbers: Iterator[int], taken: Container[int]) -> Iterator[int]:
    # In C, without a call of `Either` for each of 10,000 numbers.
    if isinstance(taken, Either):
        return _without(_without(numbers, taken.one), taken.other)
    return itertools.filterfalse(taken.__contains__, numbers)


def candidates(
    source: AddressRange,
    taken: Container[int],
    is_cooling: Callable[[Address], bool],
    preferred: Sequence[Address] = (),
    chance: Callable[[int], int] = random.randrange,
) -> Iterator[Address]:
    """Yield each free address of the range once: those that are preferred, then the lowest, then random ones.

    The caller asks for another one if a node has taken the last one meanwhile: then others choose now, too, and a
    random choice (`chance` returns a number below its argument) keeps them apart. Cooling ones come last. `taken`: the
    addresses that are held, as numbers; it may change meanwhile.
    """
    tried: set[int] = set()

    def free(start: int, *, cooling: bool) -> Iterator[int]:
        for value in _without(source.numbers(start), taken):
            if value not in tried and (cooling or not is_cooling(source.address(value))):
                yield value

    for address in preferred:
        if address in source and int(address) not in taken:
            tried.add(int(address))
            yield address
    start = 0
    for cooling in (False, True):
        while (value := next(free(start, cooling=cooling), None)) is not None:
            tried.add(value)
            yield source.address(value)
            start = chance(source.size)


# --- the object of a reservation -------------------------------------------------------------------------------------


class _Metadata(msgspec.Struct):
    name: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815
    annotations: dict[str, str] | None = None


class _Spec(msgspec.Struct):
    podref: str = ""
    ifname: str = ""
    containerid: str = ""


class Object(msgspec.Struct):
    """An OverlappingRangeIPReservation, as far as it is used here."""

    metadata: _Metadata
    spec: _Spec


decode_object: Final = msgspec.json.Decoder(Object).decode


def node_label(node: str) -> str:
    """Return the value of NODE_LABEL; a label is shorter than the name of a node may be."""
    return (
        node
        if len(node) <= _LABEL_MAX
        else f"{node[:40].rstrip('.-')}-{hashlib.sha256(node.encode()).hexdigest()[:16]}"
    )


def encode(reservation: Reservation, boot_id: str = "") -> bytes:
    """Return the object of a reservation."""
    owner = reservation.owner
    annotations = {
        ADDRESS_ANNOTATION: str(reservation.address),
        NODE_LABEL: reservation.node,
        NETWORK_ANNOTATION: reservation.network,
        NAME_ANNOTATION: owner.network,
        RANGE_ANNOTATION: reservation.range,
        POOL_ANNOTATION: reservation.pool,
        CLAIM_ANNOTATION: reservation.claim,
        ALSO_ANNOTATION: " ".join(f"{item.container_id}/{item.ifname}/{item.network}" for item in reservation.also),
        BOOT_ANNOTATION: boot_id,
    }
    network = reservation.network.replace("/", ".")[:_LABEL_MAX].rstrip("-._")
    metadata = {
        "name": reservation.name,
        "finalizers": [FINALIZER],
        "labels": {NODE_LABEL: node_label(reservation.node), NETWORK_LABEL: network},
        "annotations": {key: value for key, value in annotations.items() if value},
    } | ({"uid": reservation.uid} if reservation.uid else {})
    spec = {"podref": reservation.podref, "ifname": owner.ifname, "containerid": owner.container_id}
    found = {"apiVersion": API.removeprefix("/apis/"), "kind": KIND, "metadata": metadata, "spec": spec}
    return msgspec.json.encode(found)


def decode(data: bytes, scopes: Iterable[str] = ()) -> Reservation | None:
    """Return the reservation of an object; None if its name has no address. Raises msgspec.DecodeError.

    `scopes`: see `split_name`.
    """
    item = decode_object(data)
    name, given = item.metadata.name, item.metadata.annotations or {}
    try:
        address = ipaddress.ip_address(given.get(ADDRESS_ANNOTATION, ""))
        found = name.removesuffix(object_name(address, "")).removesuffix("-"), address
    except ValueError:
        if (split := split_name(name, scopes)) is None:
            return None
        found = split
    return Reservation(
        found[1],
        found[0],
        item.spec.podref,
        Owner(item.spec.containerid, item.spec.ifname, given.get(NAME_ANNOTATION, "")),
        given.get(NODE_LABEL, ""),
        given.get(NETWORK_ANNOTATION, ""),
        given.get(RANGE_ANNOTATION, ""),
        given.get(CLAIM_ANNOTATION, ""),
        item.metadata.uid,
        given.get(POOL_ANNOTATION, ""),
        tuple(Owner(*it.split("/")) for it in given.get(ALSO_ANNOTATION, "").split() if it.count("/") == 2),
    )
