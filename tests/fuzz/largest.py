"""The largest input that each key of annotation, NetworkAttachmentDefinition and plugin configuration may have.

Each goes through a whole daemon: its socket, its event loop, its plugins, a real network namespace. What is measured is
how long others would have waited meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from multus_daemon import settings
from multus_daemon.cluster.kube.store import Cluster
from multus_daemon.daemon import Daemon
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.conf import CONFIG_MAX_BYTES, CONTAINERS_MAX, PLUGINS_MAX
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import (
    ANNOTATION_MAX_BYTES,
    ELEMENTS_MAX,
    NETWORKS_ANNOTATION,
)
from tests.fakes.cluster import WarmStore
from tests.namespaces import make_at, remove_netns
from tests.netns.conftest import new_host
from tests.unit.api.harness import body, exchange

PAUSE_MAX = 0.3
"""Seconds for which the event loop may stand still. On a slow machine SLOW times the decoding of the largest JSON
object, during which Python runs no other thread."""
ANSWER_MAX = 0.6
"""Seconds that /healthz may take. On a slow machine twice the other bound."""
SLOW = 10
TRIES = 5
"""Measurements of one value, of which the best counts: an input stops the loop each time, other processes do not."""

Piece = Callable[[int], str]
_LEASES = "@LEASES@"
_OBJECTS = CONTAINERS_MAX - 10


@dataclass(frozen=True)
class Largest:
    """A text with as many pieces between head and tail as it may have, in an annotation or in a network."""

    head: str
    piece: Piece
    tail: str
    in_annotation: bool = False
    most: int = 10**9
    """Pieces, where that is limited sooner than their bytes."""

    def text(self, piece: str = "") -> str:
        """The whole; `piece` in place of its own, `#` being its number."""
        limit = ANNOTATION_MAX_BYTES if self.in_annotation else CONFIG_MAX_BYTES - 200
        made: list[str] = []
        length = len((self.head + self.tail).encode())
        while len(made) < self.most:
            one = piece.replace("#", str(len(made))) if piece else self.piece(len(made))
            length += len(one.encode("utf-8", "surrogatepass")) + 1
            if length > limit:
                break
            made.append(one)
        return self.head + ",".join(made) + self.tail


def _ipv4(number: int) -> str:
    return f"10.{1 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"


def _asked(key: str, head: str, piece: Piece, tail: str, most: int = 10**9) -> Largest:
    return Largest(f'[{{"name":"n","{key}":{head}', piece, f"{tail}}}]", True, most)


def _long(key: str) -> Largest:
    return _asked(key, '"', lambda number: "00:" * 5000, '"')


def _plugin(fields: str, head: str, piece: Piece, tail: str, most: int = 10**9) -> Largest:
    return Largest(f'{{"cniVersion":"1.0.0","name":"n",{fields}{head}', piece, f"{tail}}}", most=most)


def _ipam(kind: str, fields: str, head: str, piece: Piece, tail: str, most: int = _OBJECTS) -> Largest:
    ipam = f'"ipam":{{"type":"{kind}",{fields}{head}'
    return _plugin('"type":"bridge","bridge":"br0",', ipam, piece, f"{tail}}}", most)


_LOCAL = f'"dataDir":"{_LEASES}",'
_ONE = '"addresses":[{"address":"10.9.0.2/16","gateway":"10.9.0.1"}],'
_PASSTHRU = '"type":"passthru",'
_CAPABLE = json.dumps(
    {
        "cniVersion": "1.0.0",
        "name": "n",
        "type": "bridge",
        "bridge": "br0",
        "capabilities": dict.fromkeys(("ips", "mac", "portMappings", "bandwidth", "deviceID", "infinibandGUID"), True),
        "ipam": {"type": "static"},
    }
)
_CLUSTER = {
    "cniVersion": "1.0.0",
    "name": "cluster",
    "type": "ptp",
    "ipam": {"type": "static", "addresses": [{"address": "10.99.0.2/24", "gateway": "10.99.0.1"}]},
}

KEYS: dict[str, Largest] = {
    "annotation, short form": Largest("", lambda number: f"n@n{number}", "", True, ELEMENTS_MAX),
    "annotation, too many": Largest("", lambda number: "n", "", True),
    "annotation, elements": Largest("[", lambda number: f'{{"name":"n","interface":"n{number}"}}', "]", True, 256),
    "annotation, unknown key": _asked("foo", "[", lambda number: f'"{number}"', "]"),
    "name": Largest('[{"name":"', lambda number: "n" * 5000, '"}]', True),
    "namespace": _long("namespace"),
    "interface": _long("interface"),
    "ips": _asked("ips", "[", lambda number: f'"{_ipv4(number)}/16"', "]", 256),
    "ips, too many": _asked("ips", "[", lambda number: f'"{_ipv4(number)}/16"', "]"),
    "ips, IPv6": _asked("ips", "[", lambda number: f'"fd00::{number + 1:x}/64"', "]", 256),
    "mac": _long("mac"),
    "infiniband-guid": _long("infiniband-guid"),
    "portMappings": _asked(
        "portMappings", "[", lambda number: f'{{"hostPort":{number % 65535 + 1},"containerPort":80}}', "]"
    ),
    "bandwidth": _asked("bandwidth", "{", lambda number: f'"k{number}":1', "}"),
    "deviceID": _long("deviceID"),
    "cni-args": _asked("cni-args", "{", lambda number: f'"k{number}":[]', "}"),
    "cni-args, ips": _asked("cni-args", '{"ips":[', lambda number: f'"{_ipv4(number)}/16"', "]}", 256),
    "cni-args, ips, too many": _asked("cni-args", '{"ips":[', lambda number: f'"{_ipv4(number)}/16"', "]}"),
    "default-route": _asked("default-route", "[", lambda number: f'"{_ipv4(number)}"', "]"),
    "ipam-claim-reference": _long("ipam-claim-reference"),
    "cniVersions": _plugin(_PASSTHRU, '"cniVersions":[', lambda number: f'"1.0.{number}"', "]"),
    "network name": Largest('{"cniVersion":"1.0.0","type":"passthru","name":"', lambda _: "n" * 5000, '"}'),
    "type": _plugin("", '"type":"', lambda _: "n" * 5000, '"'),
    "plugins": _plugin("", '"plugins":[', lambda _: '{"type":"passthru"}', "]", PLUGINS_MAX),
    "plugins, too many": _plugin("", '"plugins":[', lambda _: '{"type":"passthru"}', "]", _OBJECTS),
    "capabilities": _plugin(_PASSTHRU, '"capabilities":{', lambda number: f'"k{number}":true', "}"),
    "args": _plugin(_PASSTHRU, '"args":{"cni":{', lambda number: f'"k{number}":"v"', "}}"),
    "runtimeConfig": _plugin(_PASSTHRU, '"runtimeConfig":{', lambda number: f'"k{number}":"v"', "}"),
    "dns": _plugin('"type":"bridge",', '"dns":{"search":[', lambda number: f'"s{number}"', "]}"),
    "unknown keys": _plugin(_PASSTHRU, "", lambda number: f'"k{number}":1', ""),
    "objects, too many": _plugin(_PASSTHRU, '"x":[', lambda _: "{}", "]"),
    "numbers": _plugin(_PASSTHRU, '"x":[', lambda _: "1", "]"),
    "words": _plugin(_PASSTHRU, '"x":"', lambda _: "a.b " * 1000, '"'),
    "depth": _plugin(_PASSTHRU, '"x":' + "[" * 190, lambda _: "1", "]" * 190),
    "ipam.type": _plugin('"type":"ptp",', '"ipam":{"type":"', lambda _: "n" * 5000, '"}'),
    "static: addresses": _ipam("static", "", '"addresses":[', lambda number: f'{{"address":"{_ipv4(number)}/8"}}', "]"),
    "static: routes": _ipam("static", _ONE, '"routes":[', lambda number: f'{{"dst":"{_ipv4(number)}/32"}}', "]"),
    "static: dns": _ipam("static", _ONE, '"dns":{"nameservers":[', lambda number: f'"{_ipv4(number)}"', "]}"),
    "host-local: a range set": _ipam(
        "host-local", _LOCAL, '"ranges":[[', lambda number: f'{{"subnet":"10.{number >> 14}.{_quad(number)}/30"}}', "]]"
    ),
    "host-local: range sets": _ipam(
        "host-local",
        _LOCAL,
        '"ranges":[',
        lambda number: f'[{{"subnet":"10.{number >> 14}.{_quad(number)}/30"}}]',
        "]",
        _OBJECTS // 2,
    ),
    "host-local: routes": _ipam(
        "host-local",
        f'{_LOCAL}"subnet":"10.9.0.0/16",',
        '"routes":[',
        lambda number: f'{{"dst":"{_ipv4(number)}/32"}}',
        "]",
    ),
    "bridge: vlanTrunk": _plugin(
        '"type":"bridge","bridge":"br1",',
        '"vlanTrunk":[',
        lambda number: f'{{"minID":1,"maxID":{4094 - number % 99}}}',
        "]",
        _OBJECTS,
    ),
    "tuning: sysctl": Largest(
        '{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"passthru"},{"type":"tuning","sysctl":{',
        lambda number: f'"net.ipv4.conf.IFNAME.k{number}":"1"',
        "}}]}",
    ),
    "portmap: conditions": Largest(
        '{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"passthru"},{"type":"portmap","conditionsV4":[',
        lambda number: f'"-m{number}"',
        "]}]}",
    ),
    "flannel: delegate": _plugin('"type":"flannel",', '"delegate":{', lambda number: f'"k{number}":1', "}"),
}


def _quad(number: int) -> str:
    return f"{number >> 6 & 255}.{(number & 63) * 4}"


@dataclass
class Measured:
    """Measures how a series of requests affects other callers, in seconds."""

    pause: float = 0.0
    """The longest for which the event loop stood still."""
    answer: float = 0.0
    """The longest that /healthz took."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Maps each verb to the HTTP status of its answer."""
    errors: list[dict[str, Any]] = field(default_factory=list)


class _Clock:
    """Seconds that have passed, without those in which the machine was others'."""

    def __init__(self) -> None:
        self._began = time.monotonic(), time.process_time()

    @property
    def passed(self) -> float:
        return min(time.monotonic() - self._began[0], time.process_time() - self._began[1])


def measure(key: str, folder: Path, netns: str, piece: str = "") -> Measured:
    """ADD, CHECK and DEL of a pod whose annotation, or network, has the largest value of `key`."""
    chosen = KEYS[key]
    text = chosen.text(piece)
    annotation = text if chosen.in_annotation else "n"
    network = (_CAPABLE if chosen.in_annotation else text).replace(_LEASES, str(folder / "leases"))
    if key.startswith("annotation"):
        network = '{"cniVersion":"1.0.0","name":"n","type":"passthru"}'
    # What the tests before have made is no daemon's: Python would look through it, and stop for all threads.
    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(_measure(folder, netns, annotation, network))
    finally:
        gc.unfreeze()


async def _measure(folder: Path, netns: str, annotation: str, network: str) -> Measured:
    given = {
        "cniDir": str(folder / "cni"),
        "binDir": str(folder / "bin"),
        "maxDelegateProcesses": 4,
        "connectionLimit": 256,
        "socketDir": str(folder / "run"),
        "clusterNetwork": "cluster",
    }
    pod = Pod(Namespace("web"), PodName("web-1"), PodUid("u-1"), {NETWORKS_ANNOTATION: annotation})
    networks = collections.defaultdict(lambda: network, cluster=json.dumps(_CLUSTER))
    store = WarmStore(networks, pod)
    found = Measured()
    daemon = Daemon(
        settings.parse(json.dumps(given).encode(), "largest"),
        Cluster(cast(Any, store), LoopPortal()),
        Gates(),
        Metrics(version="largest"),
    )
    server = daemon._server
    await server.start()

    async def tick() -> None:
        while True:
            clock = _Clock()
            await asyncio.sleep(0.005)
            found.pause = max(found.pause, clock.passed)

    async def probe() -> None:
        while True:
            clock = _Clock()
            assert (await exchange(server, "GET", "/healthz")).status == 200
            found.answer = max(found.answer, clock.passed)
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        beside = [group.create_task(tick()), group.create_task(probe())]
        for verb in ("ADD", "CHECK", "DEL"):
            if verb == "CHECK" and found.statuses["ADD"] != 200:
                continue
            reply = await exchange(server, "POST", "/cni", body(verb, CNI_NETNS=netns))
            found.statuses[verb] = reply.status
            if reply.status != 200:
                found.errors.append(reply.json)
        for task in beside:
            task.cancel()
    await server.stop(1)
    return found


def run(data: bytes) -> None:
    """The fuzz target: the first byte chooses the key, the rest is the piece that is repeated."""
    keys = list(KEYS)
    key = keys[data[0] % len(keys)] if data else keys[0]
    with new_host(), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        netns = Path(folder) / "netns"
        make_at(netns)
        try:
            piece = data[1:].decode("utf-8", "replace")
            tries = itertools.count()
            require_others_served(key, lambda: measure(key, Path(folder, str(next(tries))), str(netns), piece))
        finally:
            remove_netns(netns)


def require_others_served(key: str, measured: Callable[[], Measured]) -> Measured:
    """Raise AssertionError where others would have waited each time."""
    failed = []
    for _ in range(TRIES):
        unit, found = _decoding(), measured()
        if found.pause <= max(PAUSE_MAX, SLOW * unit) and found.answer <= max(ANSWER_MAX, 2 * SLOW * unit):
            return found
        failed.append(f"{found}, where the largest object was decoded in {unit:.3f} s")
    raise AssertionError(f"{key}: {'; '.join(failed)}")


def _decoding() -> float:
    """Return the seconds that the largest JSON object takes to be decoded on this machine, as busy as it is."""
    text = KEYS["args"].text()
    clock = _Clock()
    msgspec.json.decode(text)
    return clock.passed
