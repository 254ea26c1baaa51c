"""Look again and again at what kernels and the API server have of addresses: the histories that `checker` judges."""

from __future__ import annotations

import errno
import functools
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, Final, NamedTuple

from tests import namespaces
from tests.e2e.addresses.checker import Address, Entry, History, Place, Stay
from tests.e2e.kube_client import ApiError, Client
from tests.soak.disturbance import Repeated

KERNELS_SECONDS: Final = 0.1
API_SECONDS: Final = 0.3
API: Final = "/apis/whereabouts.cni.cncf.io/v1alpha1"
NODE_LABEL: Final = "multus.io/node"

_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE = 20, 22, 3
_DUMP: Final = struct.pack("=IHHIIB7x", 24, _RTM_GETADDR, 0x301, 1, 0, socket.AF_UNSPEC)
_IFA_ADDRESS, _IFA_LOCAL = 1, 2


class Held(NamedTuple):
    """What the API server has of one address: in a reservation, or in a pool."""

    address: Address
    pod: str
    node: str
    where: str


def addresses(namespace: str) -> set[Address]:
    """The addresses in a namespace (path), as its kernel has them; none where it is gone."""
    try:
        with namespaces.entered(namespace), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.sendall(_DUMP)
            return set(_answers(kernel))
    except FileNotFoundError:
        return set()
    except OSError as error:
        # The file is there, and no namespace is mounted at it yet or any more.
        if error.errno != errno.EINVAL:
            raise
        return set()


def _answers(kernel: socket.socket) -> Iterable[Address]:
    while True:
        data = kernel.recv(1 << 17)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind == _NLMSG_DONE:
                return
            if kind == _RTM_NEWADDR:
                yield from _local(data[24:length])
            data = data[(length + 3) & ~3 :]


def _local(attributes: bytes) -> Iterable[Address]:
    found: dict[int, bytes] = {}
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        found[kind] = attributes[4:length]
        attributes = attributes[(length + 3) & ~3 :]
    if value := found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS):
        yield ip_address(value)


def _of(place: Place, key: tuple[Place, Address]) -> bool:
    return key[0] == place


class Kernels(Repeated):
    """In its block it reads the namespaces of all nodes ten times a second, one after the other."""

    def __init__(self, places: Callable[[], Mapping[str, Place]]) -> None:
        """`places`: the namespaces of now, by path."""
        super().__init__("kernels", (KERNELS_SECONDS, KERNELS_SECONDS))
        self._places = places
        self._history: History[tuple[Place, Address]] = History()
        self._known: dict[str, Place] = {}
        self._lock = threading.Lock()
        self.looks = 0

    def work(self) -> None:
        places = dict(self._places())
        self._known.update(places)
        for path, place in list(self._known.items()):
            found = addresses(path)
            with self._lock:
                self._history.look(((place, item) for item in found), time.monotonic(), functools.partial(_of, place))
            if path not in places and not found:
                del self._known[path]
        self.looks += 1

    def stays(self, among: Callable[[Address], bool]) -> list[Stay]:
        """What was seen until now of these addresses."""
        with self._lock:
            found = list(self._history.intervals())
        return [Stay(place, item, begin, end) for (place, item), begin, end in found if among(item)]


class Entries(Repeated):
    """In its block it reads the reservations and pools, as long as the API server answers."""

    def __init__(self, client: Client) -> None:
        super().__init__("entries", (API_SECONDS, API_SECONDS))
        self._client = client
        self._history: History[Held] = History()
        self._lock = threading.Lock()
        self.looks = 0

    def work(self) -> None:
        try:
            found = held(self._client)
        except (ApiError, OSError, http.client.HTTPException):
            return
        with self._lock:
            self._history.look(found, time.monotonic())
        self.looks += 1

    def entries(
        self, among: Callable[[Address], bool], kinds: Collection[str] = ("reservation", "pool")
    ) -> list[Entry]:
        """What was seen until now of these addresses, in objects of these kinds."""
        with self._lock:
            found = list(self._history.intervals())
        return [
            Entry(item.address, item.pod, begin, end, item.node)
            for item, begin, end in found
            if among(item.address) and item.where in kinds
        ]


def held(client: Client) -> list[Held]:
    """What the API server has now. Raises ApiError, OSError, HTTPException."""
    found = [_reserved(item) for item in client.get(f"{API}/overlappingrangeipreservations")["items"]]
    for pool in client.get(f"{API}/ippools")["items"]:
        first = ip_network(pool["spec"]["range"], strict=False).network_address
        for offset, item in pool["spec"]["allocations"].items():
            found.append(Held(first + int(offset), item["podref"], "", "pool"))
    return found


def _reserved(item: dict[str, Any]) -> Held:
    name = item["metadata"]["name"]
    # The networks of these tests have no hyphen in their `network_name`.
    text = name if "." not in name else name.rpartition("-")[2]
    node = (item["metadata"].get("labels") or {}).get(NODE_LABEL, "")
    return Held(
        ip_address(text if "." in text else text.replace("-", ":")), item["spec"]["podref"], node, "reservation"
    )
