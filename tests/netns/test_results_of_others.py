"""Results of third parties: names, addresses and routes that no namespace can have are no alarm, in CHECK and in drift.

The VPC plugin of EKS reports `dummy` and 11 digits in the sandbox "0" for every pod. MULTUS_RESULTS: number of results,
1,000 by default, spread over the kinds of attachments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from multus_daemon.kernel import inet
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.node.containers import Containers
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod import check, record_format
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.view import Entry
from multus_daemon.spec.attachment import BUILT_IN, Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf, result
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from tests import calls
from tests.netns import outcome
from tests.planning import plan_one

RESULTS = int(os.environ.get("MULTUS_RESULTS", "1000"))
NET1 = IfName("net1")
THIRD = "fabric"
"""The plugin that reports the results. No file has its name: only its results count."""

NAMES = st.one_of(
    st.sampled_from(["dummy12345678901", "", ".", "..", "a/b", "a b", "a:b", "eth%d", "a\0b", "x" * 300, "\u00e4" * 8]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=16, max_size=40),
)
SANDBOXES = st.sampled_from(["0", "host", "netns:[4026531840]", "./x", "4242"])
PATHS = st.sampled_from(["/proc/1/ns/net", "/run/netns/elsewhere", "/"])
MACS = st.one_of(
    st.sampled_from(["", "0", "00:00:00:00:00:00", "0.0.0.0", "a0:36:9f", ":".join(["00"] * 20), "GG:GG:GG:GG:GG:GG"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
ADDRESSES = st.sampled_from(["0.0.0.0/0", "::/0", "224.0.0.5/4", "ff02::1/16", "198.51.100.9/32", "2001:db8::9/128"])
NO_HOSTS = st.sampled_from(["0.0.0.0/0", "::/0", "224.0.0.5/4", "ff02::1/16"])
INDEXES = st.sampled_from([99, 2**31, -1, -(2**40)])
ROUTES = st.sampled_from(
    [
        {"dst": "10.97.0.0/16", "table": 2**40},
        {"dst": "10.97.0.0/16", "table": -1, "priority": -5},
        {"dst": "0.0.0.0/0", "gw": "fd00::1", "table": 2**33},
        {"dst": "fd97::/64", "gw": "10.0.0.1"},
    ]
)

_impossible = st.one_of(
    st.fixed_dictionaries({"name": NAMES}, optional={"mac": MACS, "sandbox": SANDBOXES | PATHS}),
    st.fixed_dictionaries({"name": st.just("eth7"), "sandbox": SANDBOXES}, optional={"mac": MACS}),
    st.fixed_dictionaries({"name": st.sampled_from(["vlan.eth.1", "eniabc", "lo"])}, optional={"mac": MACS}),
)


def spelled(mac: str) -> st.SearchStrategy[str]:
    """Return the ways in which plugins write a MAC address."""
    digits = mac.replace(":", "")
    dotted = ".".join(digits[at : at + 4] for at in (0, 4, 8))
    return st.sampled_from([mac, mac.upper(), mac.replace(":", "-"), dotted])


@st.composite
def reported(draw: Callable[[Any], Any], true: dict[str, Any]) -> bytes:
    """Return the true result, without parts of it and with things that no namespace has in between."""
    interfaces: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    for index, item in enumerate(true.get("interfaces", [])):
        interfaces += draw(st.lists(_impossible, max_size=2))
        if draw(st.integers(0, 9)):
            places[index] = len(interfaces)
            interfaces.append(item | ({"mac": draw(spelled(item["mac"]))} if item.get("mac") else {}))
    interfaces += draw(st.lists(_impossible, max_size=2))
    others = [at for at in range(len(interfaces)) if at not in places.values()]
    ips = []
    for item in true.get("ips", []):
        kept = {key: value for key, value in item.items() if key != "interface"}
        if item.get("interface") in places and draw(st.booleans()):
            kept["interface"] = places[item["interface"]]
        elif draw(st.booleans()):
            kept["interface"] = draw(INDEXES)
        if draw(st.booleans()):
            kept["address"] = f"{item['address'].partition('/')[0]}/{draw(st.integers(0, 32))}"
        ips += [kept] * draw(st.integers(0, 1))
    for _ in range(draw(st.integers(0, 2))):
        ips.append({"address": draw(NO_HOSTS)})
        if others:
            ips.append({"address": draw(ADDRESSES), "interface": draw(st.sampled_from(others))})
    version = draw(st.sampled_from(["0.3.1", "0.4.0", "1.0.0", "1.1.0"]))
    if not version.startswith("1."):
        ips = [item | {"version": "6" if ":" in item["address"] else "4"} for item in ips]
    routes = [*true.get("routes", []), *draw(st.lists(ROUTES, max_size=3))]
    return json.dumps({"cniVersion": version, "interfaces": interfaces, "ips": ips, "routes": routes}).encode()


class World:
    """An attachment whose last plugin reports what it likes, and everything that looks at it later."""

    def __init__(self, chain: ListRunner, netns: Any, plugins: list[dict[str, Any]]) -> None:
        self.chain, self.netns = chain, netns
        self.sandbox = Sandbox(ContainerId("c1"), netns.path)
        self.attachment = Attachment("web/lan", self.config(plugins), NET1)
        if len(plugins) > 1:
            planned = plan_one(chain, self.sandbox, replace(self.attachment, config=self.config(plugins[:-1])))
            made = calls.add(chain, self.sandbox, planned)
            served_by = {**planned.served_by, THIRD: f"/opt/{THIRD}"}
            self.attachment = replace(self.attachment, served_by=served_by, result=made)
        else:
            self.attachment = replace(self.attachment, served_by={THIRD: f"/opt/{THIRD}"})

    @staticmethod
    def config(plugins: list[dict[str, Any]]) -> Any:
        # Without its file the third party has no CHECK that could be called.
        fields = {"cniVersion": "0.3.1", "name": "lan", "plugins": plugins}
        return conf.parse(json.dumps(fields).encode())

    def alarms(self, made: Result, *, looked: bool) -> list[str]:
        """Return what drift and CHECK say of this result, as read from a record; `looked`: after the ADD."""
        attachment = replace(self.attachment, result=made)
        with PodNetns(self.netns.path) as netns:
            if looked:
                (observed,) = netns.observe([(NET1, made)])
                attachment = replace(attachment, observed=observed)
            self.kept = attachment
            return self.again(netns)

    def again(self, netns: PodNetns) -> list[str]:
        names = Namespace("web"), PodName("web"), PodUid("u1")
        record = ContainerRecord(self.sandbox, IfName("eth0"), *names, (self.kept,), complete=True)
        record = record_format.decode(record_format.encode(record))
        Containers().enter(Entry.of(record), 0.0)
        (attachment,) = record.attachments
        engine = cast(Engine, type("Engine", (), {"runner": self.chain}))
        found = [item.text for item in self.chain.differences(self.sandbox, attachment, netns, asks=True)]
        return found + [str(item.error) for item in check.failures(engine, record, [attachment], netns, strict=True)]


@pytest.fixture
def chain(tools: HostTools, tmp_path: Path) -> ListRunner:
    return ListRunner(outcome.dispatched("prefer", tools), ResultCache(tmp_path / "cache"), "/nowhere")


def third(netns: Any, tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The third party alone: it has made a pair with addresses and a route."""
    netns.batch(
        "link add net1 type veth peer name peer1",
        "link set dev net1 up",
        "link set dev peer1 up",
        "address add 10.214.1.2/24 dev net1",
        "address add 10.215.1.2/24 dev net1",
        "address add fd14:1::2/64 dev net1 nodad",
        "route add 10.99.0.0/16 dev net1",
    )
    (link,) = netns.ip("link", "show", "dev", "net1")
    true = {
        "interfaces": [{"name": "net1", "mac": link["address"], "sandbox": netns.path}],
        "ips": [{"address": "10.214.1.2/24", "interface": 0}, {"address": "fd14:1::2/64", "interface": 0}],
        "routes": [{"dst": "10.99.0.0/16", "gw": "0.0.0.0"}],
    }
    return [{"type": THIRD}], true


def behind(plugin: str) -> Callable[[Any, Path], tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The third party behind a built-in, whose result it passes on with its own additions."""

    def make(netns: Any, tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        ipam = {"type": "host-local", "subnet": "10.1.0.0/24", "dataDir": str(tmp_path)}
        keys: dict[str, Any] = {"bridge": "br0", "isGateway": True} if plugin == "bridge" else {}
        return [{"type": plugin, "ipam": ipam, **keys}, {"type": THIRD}], {}

    return make


@pytest.mark.parametrize("looked", [True, False], ids=["looked", "taken over"])
@pytest.mark.parametrize("make", [third, behind("bridge"), behind("ptp")], ids=["alone", "bridge", "ptp"])
def test_what_no_namespace_can_have_is_no_alarm(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, make: Any, looked: bool
) -> None:
    plugins, true = make(netns, tmp_path)
    world = World(chain, netns, plugins)
    if world.attachment.result is not None:
        assert BUILT_IN in world.attachment.served_by.values()
        true = result.to_object(world.attachment.result, "1.0.0")
    count = 0

    @settings(max_examples=RESULTS // 6 + 1, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(reported(true))
    def holds(text: bytes) -> None:
        nonlocal count
        try:
            made = result.decode(text, "")
        except CniError:
            # The ADD fails.
            return
        count += 1
        assert world.alarms(made, looked=looked) == []
        # What is really missing is still found.
        own = [at for at, item in enumerate(made.interfaces) if item.name == NET1]
        present = [ip.address for ip in made.ips if ip.interface in own]
        if present and count % 5 == 0:
            taken = inet.interface_of(present[0])
            with PodNetns(netns.path) as pod:
                index = pod.pod.link(NET1).index
                (taken,) = [item.address for item in pod.pod.addresses(index) if item.address.ip == taken.ip]
                pod.pod.request(inet.delete_address(index, taken))
                alarms = world.again(pod)
                pod.pod.request(inet.add_address(index, taken))
            assert any(f"{taken.ip}/" in alarm for alarm in alarms), text

    holds()
    assert count > RESULTS // 12
