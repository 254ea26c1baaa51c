"""Our whereabouts beside the binary: the same answers and the same objects for the same state of the cluster."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from multus_daemon.plugins.builtin import whereabouts
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.addresses import Owner, Reservation, split_name
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson, result
from multus_daemon.spec.cni.errors import CniError
from tests import calls as plugin_calls
from tests.e2e import build_tools
from tests.fakes.addresses import FakeAddressBook
from tests.fakes.apiserver import POOLS, RESERVATIONS, FakeApiServer

RUNS: Final = ("whereabouts",)
NAMESPACE = "kube-system"
SMALL = {"range": "10.9.0.0/29"}
SIX = {"range": "fd00:9::/125"}


def binary() -> Path | None:
    try:
        return build_tools.find("whereabouts")
    except (KeyError, build_tools.ToolError):
        return None


pytestmark = pytest.mark.skipif(binary() is None, reason=f"no whereabouts: {build_tools.COMMAND} whereabouts")


@dataclass(frozen=True)
class Step:
    """A call, for a pod."""

    verb: str
    pod: str
    args: str = ""
    container: str = ""

    @property
    def environ(self) -> dict[str, str]:
        return {
            "CNI_COMMAND": self.verb,
            "CNI_CONTAINERID": self.container or f"id-{self.pod}",
            "CNI_NETNS": "/run/netns/none",
            "CNI_IFNAME": "net1",
            "CNI_PATH": "/opt/cni/bin",
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=apps;K8S_POD_NAME={self.pod}{self.args}",
        }


def add(*pods: str) -> list[Step]:
    return [Step("ADD", pod) for pod in pods]


def delete(*pods: str) -> list[Step]:
    return [Step("DEL", pod) for pod in pods]


@dataclass
class Case:
    """A network, and calls for it; `others`: names of reservations that other pods have before."""

    ipam: Mapping[str, Any]
    steps: Sequence[Step]
    version: str = "1.0.0"
    others: Sequence[str] = ()
    entries: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Addresses that pods have in pools only, by the name of the pool."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """More keys of the node's file."""


FULL = [*add("a", "b", "c", "d", "e", "f", "g"), *delete("c", "a", "nobody"), *add("h", "i", "j")]
CASES: dict[str, Case] = {
    "a range": Case(SMALL, FULL),
    "ipv6": Case(SIX, FULL),
    "ipv6 large": Case({"range": "fd00:9::/64"}, add("a", "b")),
    "an address of the range": Case({"range": "10.9.0.4/29"}, add("a")),
    "leading zeros": Case({"range": "010.09.0.0/29", "gateway": "010.9.0.1"}, add("a")),
    "start and end": Case({"range": "10.9.0.0/24", "range_start": "10.9.0.9", "range_end": "10.9.0.10"}, FULL),
    "start and end in the range": Case({"range": "10.9.0.9-10.9.0.10/24"}, FULL),
    "start outside": Case({"range": "10.8.0.9-10.9.0.10/24"}, add("a")),
    "end outside": Case({**SMALL, "range_start": "10.9.0.3", "range_end": "10.9.0.7"}, FULL),
    "end before start": Case({**SMALL, "range_start": "10.9.0.4", "range_end": "10.9.0.2"}, add("a")),
    "ends that are none": Case({**SMALL, "range_start": "x", "range_end": "10.9.0"}, FULL[:2]),
    "ends of the other family": Case({**SMALL, "range_start": "fd00::1", "range_end": "fd00::2"}, FULL[:2]),
    "end before start of a range": Case({"range": "10.9.0.4-10.9.0.2/29"}, add("a")),
    "end before start of ranges": Case(
        {"ipRanges": [{**SIX, "range_start": "fd00:9::4", "range_end": "fd00:9::2"}]}, add("a", "b")
    ),
    "the start is the end": Case({**SMALL, "range_start": "10.9.0.3", "range_end": "10.9.0.3"}, add("a", "b")),
    "a mapped range": Case({"range": "::ffff:10.9.0.0/125"}, add("a", "b")),
    "a mapped range with a length of IPv4": Case({"range": "::ffff:10.9.0.0/29"}, add("a", "b")),
    "mapped ends": Case({**SMALL, "range_start": "::ffff:10.9.0.3", "range_end": "::ffff:10.9.0.4"}, FULL[:4]),
    "mapped ends of ranges": Case({"ipRanges": [{**SMALL, "range_start": "::ffff:10.9.0.3"}]}, add("a")),
    "a mapped start in a range": Case({"range": "::ffff:10.9.0.3-10.9.0.5/29"}, add("a")),
    "a mapped range of hexadecimal": Case({"range": "::ffff:a09:0/125"}, add("a", "b")),
    "mapped ends of ipv6": Case({**SIX, "range_start": "::ffff:10.9.0.3"}, add("a")),
    "mapped and excluded": Case({**SMALL, "exclude": ["::ffff:10.9.0.1/128", "::ffff:10.9.0.4/127"]}, FULL),
    "a mapped gateway": Case({**SMALL, "gateway": "::ffff:10.9.0.6"}, add("a")),
    "excluded": Case({**SMALL, "exclude": ["10.9.0.1/32", "10.9.0.3", "10.9.0.4/31"]}, FULL),
    "excluded at the end": Case({**SMALL, "exclude": ["10.9.0.4/30", "fd00::/64"]}, FULL),
    "all excluded": Case({**SMALL, "exclude": ["10.9.0.0/24"]}, add("a")),
    "excluded ipv6": Case({**SIX, "exclude": ["fd00:9::1", "fd00:9::4/126"]}, FULL),
    "excluded without sense": Case({**SMALL, "exclude": ["10.9.0.300"]}, add("a")),
    "too small": Case({"range": "10.9.0.0/31"}, add("a")),
    "no network": Case({"range": "10.9.0.0"}, add("a")),
    "both families": Case({"ipRanges": [SMALL, SIX], "gateway": "10.9.0.1"}, FULL),
    "range and ranges": Case({**SMALL, "ipRanges": [{"range": "10.8.0.0/30"}]}, FULL),
    "ranges with ends": Case(
        {
            "ipRanges": [
                {**SMALL, "range_start": "10.9.0.4", "exclude": ["10.9.0.5"]},
                {**SIX, "range_end": "fd00:9::2"},
            ]
        },
        FULL,
    ),
    "an end of ranges that is none": Case({"ipRanges": [{**SMALL, "range_end": "10.9.0.06"}]}, add("a")),
    # With sixteen the binary's limit of requests a second fails it.
    "four ranges": Case({"ipRanges": [{"range": f"10.{number}.0.0/28"} for number in range(4)]}, add("a", "b")),
    "routes, dns, gateway": Case(
        {
            **SMALL,
            "gateway": "10.9.0.6",
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.9.0.1"}, {"dst": "10.0.0.7/8"}],
            "dns": {"nameservers": ["10.9.0.53"], "search": ["a.b"], "options": ["ndots:1"], "domain": "b"},
        },
        add("a"),
    ),
    "no gateway": Case({**SMALL, "gateway": "here"}, add("a")),
    "fixed addresses": Case(
        {
            **SMALL,
            "addresses": [
                {"address": "192.0.2.7/24", "gateway": "192.0.2.1"},
                {"address": "fd00:7::7/64", "gateway": "fd00:7::1"},
            ],
        },
        add("a", "b"),
    ),
    "only fixed addresses": Case({"addresses": [{"address": "192.0.2.7/24"}]}, [*add("a", "b"), *delete("a")]),
    "a fixed address without a length": Case({**SMALL, "addresses": [{"address": "192.0.2.7"}]}, add("a")),
    "two fixed addresses of a family": Case(
        {"addresses": [{"address": "192.0.2.7/24"}, {"address": "192.0.2.8/24"}]}, add("a"), version="0.2.0"
    ),
    "addresses of CNI_ARGS": Case(
        {**SMALL, "addresses": [{"address": "198.51.100.9/24"}]},
        [
            Step("ADD", "a", ";IP=192.0.2.7/24, fd00:7::7/64;GATEWAY=192.0.2.1,203.0.113.1,fd00:7::1"),
            Step("ADD", "b", ";IP=192.0.2.8"),
            Step("ADD", "c", ";GATEWAY=here"),
        ],
    ),
    "older version": Case({"ipRanges": [SMALL, SIX], "gateway": "10.9.0.1"}, add("a"), version="0.2.0"),
    "a name": Case({**SMALL, "network_name": "red"}, FULL, others=("10.9.0.1", "red-10.9.0.2", "blue-10.9.0.3")),
    "held by other ranges": Case(SMALL, FULL, others=("10.9.0.1", "10.9.0.4")),
    "entries of the pool": Case(SMALL, add("a", "b"), entries={"10.9.0.0-29": ("10.9.0.1", "10.9.0.3")}),
    "entries of a pool with a name": Case(
        {**SIX, "network_name": "red"},
        add("a", "b"),
        entries={"red-fd00-9---125": ("fd00:9::1",), "fd00-9---125": ("fd00:9::2",)},
    ),
    "an end that is an entry": Case({**SIX, "range_start": "fd00:9::3"}, FULL[:4], others=("fd00-9--4",)),
    "the same container again": Case(SMALL, add("a", "b", "b")),
    "the node's file": Case({}, add("a", "b"), file={"range": "10.8.0.0/24", "gateway": "10.8.0.1"}),
    "both have a range": Case(
        {**SMALL, "dns": {"domain": "b"}},
        add("a"),
        file={
            "range": "10.8.0.0/24",
            "range_start": "10.9.0.3",
            "exclude": ["10.9.0.3/32"],
            "dns": {"nameservers": ["10.9.0.53"]},
            "routes": [{"dst": "10.0.0.0/8"}],
            "enable_overlapping_ranges": False,
        },
        others=("10.9.0.4",),
    ),
    "nothing": Case({}, add("a")),
}


class Reference:
    """The binary, with an API server."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server

    def prepare(self, case: Case) -> None:
        for name in case.others:
            metadata = {"name": name, "namespace": NAMESPACE}
            self.server.put(RESERVATIONS, {"metadata": metadata, "spec": {"podref": "apps/other", "ifname": "net1"}})
        for pool, addresses in case.entries.items():
            network = "fd00:9::/125" if "fd00" in pool else "10.9.0.0/29"
            first = int(ipaddress.ip_network(network).network_address)
            held = {"id": "id-other", "ifname": "net1", "podref": "apps/other"}
            allocations = {str(int(ipaddress.ip_address(address)) - first): held for address in addresses}
            spec = {"range": network, "allocations": allocations}
            self.server.put(POOLS, {"metadata": {"name": pool, "namespace": NAMESPACE}, "spec": spec})

    def call(self, step: Step, config: Mapping[str, Any]) -> tuple[bool, Any]:
        done = subprocess.run(
            [str(binary())], env=step.environ, input=json.dumps(config).encode(), capture_output=True, timeout=60
        )
        answer = json.loads(done.stdout) if done.stdout else None
        return done.returncode == 0, answer if done.returncode == 0 else None

    def held(self) -> dict[str, tuple[str, str]]:
        found = self.server.objects[RESERVATIONS]
        return {name: (item["spec"]["podref"], item["spec"]["ifname"]) for (_, name), item in found.items()}


class Ours:
    """The built-in, with a book in memory."""

    def __init__(self) -> None:
        self.book = FakeAddressBook()
        self.builtin = Builtin("whereabouts", Path("/"), addresses=self.book, module=whereabouts)
        self.errors: list[CniError] = []

    def prepare(self, case: Case) -> None:
        owner = Owner("", "net1", "")
        for name in case.others:
            scope, address = split_name(name, ("red", "blue")) or pytest.fail(name)
            self.book.cluster.reservations[name] = Reservation(address, scope, "apps/other", owner)
        for pool, addresses in case.entries.items():
            known = [Reservation(ipaddress.ip_address(address), "", "apps/other", owner) for address in addresses]
            self.book.cluster.pools[pool] = {int(item.address): item for item in known}

    def call(self, step: Step, config: Mapping[str, Any]) -> tuple[bool, Any]:
        fields = gojson.loads_object(json.dumps(config))
        at = {name.removeprefix("CNI_").lower(): value for name, value in step.environ.items()}
        call = Invocation(at["command"], at["containerid"], at["netns"], at["ifname"], at["args"], at["path"], fields)
        try:
            made = plugin_calls.run(self.builtin, call)
            return True, json.loads(result.to_stdout(made, config["cniVersion"])) if step.verb == "ADD" else None
        except CniError as error:
            self.errors.append(error)
            return False, None

    def held(self) -> dict[str, tuple[str, str]]:
        return {name: (item.podref, item.owner.ifname) for name, item in self.book.cluster.reservations.items()}


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    made = FakeApiServer()
    await made.start()
    yield made
    await made.stop()


async def same(server: FakeApiServer, folder: Path, case: Case) -> list[CniError]:
    """Make the calls of a case with both, and compare after each; return our errors."""
    file = folder / "whereabouts.conf"
    access = {"kubernetes": {"kubeconfig": str(server.kubeconfig(folder / "kubeconfig"))}, "log_level": "error"}
    file.write_text(json.dumps({**access, **case.file}))
    ipam = {"type": "whereabouts", "configuration_path": str(file), **case.ipam}
    config = {"cniVersion": case.version, "name": "lan", "type": "macvlan", "ipam": ipam}
    reference, ours = Reference(server), Ours()
    for side in (reference, ours):
        side.prepare(case)
    for step in case.steps:
        expected = await asyncio.to_thread(reference.call, step, config)
        found = await asyncio.to_thread(ours.call, step, config)
        assert (step, found) == (step, expected), ours.errors
        if not expected[0] and step.verb == "ADD":
            # The binary leaves what it has reserved to the DEL that follows.
            await asyncio.to_thread(reference.call, replace(step, verb="DEL"), config)
        assert (step, ours.held()) == (step, reference.held())
    return ours.errors


@pytest.mark.parametrize("name", CASES)
async def test_the_same_answers_and_objects(server: FakeApiServer, tmp_path: Path, name: str) -> None:
    errors = await same(server, tmp_path, CASES[name])
    assert all(error.code in (4, 6, 7, 999) for error in errors)


@pytest.mark.parametrize("seed", range(6))
async def test_the_same_for_any_network(server: FakeApiServer, tmp_path: Path, seed: int) -> None:
    await same(server, tmp_path, drawn(Random(seed)))


def drawn(random: Random) -> Case:
    """A network of a few addresses, and pods that come and go."""

    networks = ["10.9.0.0/29", "10.9.0.8/29", "10.8.0.0/30", "fd00:9::/124"]
    random.shuffle(networks)

    def a_range() -> dict[str, Any]:
        network = networks.pop()
        hosts = [str(address) for address in ipaddress.ip_network(network)]
        keys = random.sample(["range_start", "range_end", "exclude"], random.randrange(3))
        found: dict[str, Any] = {"range": network}
        for key in keys:
            some = random.sample(hosts, 2)
            length = random.choice(["", "/31" if "." in some[0] else "/127"])
            found[key] = some[0] if key != "exclude" else [f"{some[0]}{length}", some[1]]
        return found

    ipam: dict[str, Any] = a_range() if random.random() < 0.7 else {}
    ipam["ipRanges"] = [a_range() for _ in range(random.randrange(0 if ipam else 1, 3))]
    if random.random() < 0.3:
        ipam["network_name"] = "red"
    steps, pods = [], [f"pod-{number}" for number in range(8)]
    living: set[str] = set()
    for _ in range(14):
        pod = random.choice(pods)
        steps.append(Step("DEL" if pod in living else "ADD", pod))
        living ^= {pod}
    others = random.sample([f"10.9.0.{number}" for number in range(1, 16)] + ["red-10.9.0.2", "fd00-9--1"], 3)
    return Case(ipam, steps, others=others)
