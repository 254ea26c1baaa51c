"""The built-in host-device against the kernel and beside the reference plugin.

Pairs stand for devices here. The kernel removes them with a namespace, and returns real ones, with their alias, to the
first namespace of the node, where no test may be: a test moves the link as the kernel would.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.node import orphans
from multus_daemon.plugins.builtin import host_device as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.runtime import deadline
from tests.namespaces import remove_netns
from tests.netns import outcome, reference
from tests.netns.direct import Direct
from tests.netns.refusals import refuse_each
from tests.netns.test_malformed import Node
from tests.programs import needed
from tests.waiting import PATIENCE

MakeCall = Callable[..., Call]
HOST_DEVICE = Direct(plugin)
MAC = "02:00:5e:10:00:01"
PCI = "0000:41:00."
V4 = {"address": "10.1.2.3/24", "gateway": "10.1.2.1"}
OTHER = {"address": "10.6.0.3/24", "gateway": "10.6.0.1"}
V6 = {"address": "fd00::3/64", "gateway": "fd00::1"}
ROUTES = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "192.0.2.0/24", "gw": "10.1.2.9"}]


def static(*addresses: dict[str, str], routes: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {"ipam": {"type": "static", "addresses": list(addresses), "routes": routes or []}}


def host_device(**keys: Any) -> dict[str, Any]:
    return {"cniVersion": "1.0.0", "name": "testnet", "type": "host-device", **keys}


@pytest.fixture(autouse=True)
def device(host: Any) -> None:
    with_device(host)


def with_device(host: Any) -> None:
    host.batch(f"link add up0 address {MAC} type veth peer name up1", "link set up0 up", "link set up1 up")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return make_sysfs(tmp_path / "sys")


def make_sysfs(root: Path) -> Path:
    """The devices of a host with the drivers of network cards, and of user space."""
    pci = root / "bus/pci/devices"
    for number, driver, link in (
        ("0", "mlx5_core", "net/up0"), ("1", "virtio-pci", "virtio3/net/up0"), ("2", "vfio-pci", ""),
        ("3", "uio_pci_generic", ""), ("4", "igb_uio", ""), ("5", "mlx5_core", "net"), ("6", "mlx5_core", "net/no0"),
        ("7", "mlx5_core", ""),
    ):  # fmt: skip
        (pci / f"{PCI}{number}" / link).mkdir(parents=True)
        drivers = root / "bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        (pci / f"{PCI}{number}" / "driver").symlink_to(f"../../drivers/{driver}")
    (root / "bus/auxiliary/devices/mlx5_core.sf.4/net/up0").mkdir(parents=True)
    (root / "devices/system/nic/net/up0").mkdir(parents=True)
    return root


def both_sides(host: Any, pod: Any) -> list[str]:
    return [*(f"host {line}" for line in reference.state(host)), *(f"pod {line}" for line in reference.state(pod))]


def known(host: Any) -> dict[str, tuple[str, str]]:
    """MAC address and alias of each link of the host."""
    return {
        link["ifname"]: (link["address"], link.get("ifalias", ""))
        for link in host.ip("link", "show")
        if link["ifname"] != "lo"
    }


CASES: dict[str, dict[str, Any]] = {
    "no-ipam": host_device(device="up0"),
    "dual": host_device(device="up0", **static(V4, V6, routes=ROUTES)),
    "hwaddr": host_device(hwaddr=MAC.upper().replace(":", "-"), **static(V4)),
    "0.3.1": host_device(device="up0", cniVersion="0.3.1", **static(V4, V6, routes=ROUTES)),
    "dns": host_device(device="up0", dns={"nameservers": ["192.0.2.53"]}, **static(V4)),
    "device-first": host_device(device="up0", hwaddr="02:00:5e:10:00:99", kernelpath="/nowhere"),
    "1.1.0": host_device(device="up0", cniVersion="1.1.0", **static(V4)),
    "own-network": host_device(device="up0", useInterfaceNetwork=True),
    "own-network-and-ipam": host_device(
        device="up0", useInterfaceNetwork=True, **static(OTHER, routes=[{"dst": "192.0.9.0/24"}])
    ),
}
OWN_NETWORK = (
    "addr add 10.1.2.3/24 dev up0", "addr add 10.1.2.4/24 dev up0", "addr add 10.9.9.9 peer 10.9.9.1 dev up0",
    "addr add 10.4.0.1/24 dev up0 scope link", "addr add fd00::5/64 dev up0 nodad",
    "addr add fd00:2::5/64 dev up0 nodad valid_lft 1000 preferred_lft 1000",
    "route add 192.0.2.0/24 via 10.1.2.1", "route add 192.0.4.0/24 dev up0 scope link src 10.1.2.4",
    "route add 192.0.5.0/24 dev up0 proto static metric 7", "route add 192.0.6.0/24 via 10.77.0.1 dev up0 onlink",
    "route add default via 10.1.2.1 metric 100", "route add default via 10.1.2.9 metric 200",
    "route add 192.0.8.0/24 via 10.1.2.1 table 77", "-6 route add fd77::/64 via fd00::1",
    "-6 route add fd78::/64 dev up0 table 99",
)  # fmt: skip
ALL_CASES = [pytest.param(case, marks=reference.needs_newest()) if "own-network" in case else case for case in CASES]
needs = reference.needs("host-device", "static")


RULES = (
    "from 10.1.2.0/24 lookup 77 pref 30000", "from 10.1.2.3 lookup 78", "from 10.99.9.9 lookup 77 pref 29999",
    "to 10.1.2.3 lookup 77", "from 10.1.2.3 lookup main pref 500", "from 10.1.2.3 blackhole pref 600",
    "from all lookup 77 pref 29000", "from 10.1.2.4 fwmark 5 lookup 77 pref 700",
)  # fmt: skip


def rules(netns: Any) -> list[str]:
    return [*netns.run("ip", "-d", "rule").splitlines(), *netns.run("ip", "-d", "-6", "rule").splitlines()]


def prepared(host: Any, case: str) -> None:
    if CASES[case].get("useInterfaceNetwork"):
        host.batch(*(line for line in OWN_NETWORK if not line.startswith("-6")))
        host.batch(*(line.removeprefix("-6 ") for line in OWN_NETWORK if line.startswith("-6")), options=["-6"])
        host.batch(*(f"rule add {line}" for line in RULES))
        host.run("ip", "-6", "rule", "add", "from", "fd00::5", "lookup", "99")


def comparable(found: outcome.Outcome) -> Any:
    for item in (found.result or {}).get("interfaces", []):
        assert item.pop("sandbox")
    return found


@needs
@reference.needs_new()
@pytest.mark.parametrize("case", ALL_CASES)
def test_both_leave_the_same(case: str, host: Any, another_host: Any, make_netns: Any) -> None:
    found = []
    for call in (outcome.of_reference, outcome.builtin):
        with another_host() as side:
            with_device(side)
            prepared(side, case)
            pod = make_netns()
            made = call("host-device", "ADD", pod.path, CASES[case], ifname="net1")
            assert not made.failed, made.msg
            added = [*both_sides(side, pod), *rules(side), "pod", *rules(pod)]
            assert not call("host-device", "DEL", pod.path, CASES[case], ifname="net1").failed
            # The other end still sees its carrier go.
            rest = [line for line in both_sides(side, pod) if '"ifname": "up1"' not in line]
            found.append((added, comparable(made), rest, known(side)["up0"]))
    (their_state, theirs, their_rest, their_link), (our_state, ours, our_rest, our_link) = found
    reference.require_same(our_state, their_state)
    reference.require_same(our_rest, their_rest)
    assert (ours, our_link) == (theirs, their_link)


@needs
@reference.needs_new()
@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_gives_back_what_the_other_took(case: str, ours_adds: bool, host: Any, netns: Any) -> None:
    prepared(host, case)
    config = CASES[case]
    for verb, ours in (("ADD", ours_adds), ("CHECK", not ours_adds), ("DEL", not ours_adds)):
        call = outcome.builtin if ours else outcome.of_reference
        # The reference's CHECK fails after its own ADD if a route has no gateway.
        if verb == "CHECK" and (config["cniVersion"] == "0.3.1" or (not ours and "own-network" in case)):
            continue
        made = call("host-device", verb, netns.path, config, ifname="net1")
        assert not made.failed, made.msg
        config = config | ({"prevResult": made.result} if made.result else {})
    assert netns.links() == set()
    assert known(host)["up0"] == (MAC, "")


@needs
@reference.needs_new()
@pytest.mark.parametrize(
    "keys",
    [
        {}, {"device": "gone0"}, {"device": 5}, {"hwaddr": "nonsense"}, {"hwaddr": "02:00:5e:10:00:99"},
        {"kernelpath": "/sys/nowhere"}, {"kernelpath": "devices"},
        {"kernelpath": "/sys/devices/virtual/net/lo"}, {"pciBusID": "0000:99:00.0"}, {"device": "lo"},
        {"device": "up0", "ipam": {"type": "static", "addresses": []}}, {"device": "up0", "ipam": {"type": "no-such"}},
        {"device": "up0", "pod": "ip link add net1 type bridge"},
    ],
)  # fmt: skip
def test_both_refuse_for_the_same_reason(keys: dict[str, Any], host: Any, make_netns: Any) -> None:
    found = []
    for call in (outcome.builtin, outcome.of_reference):
        config, pod = host_device(**keys), make_netns()
        pod.run("sh", "-c", config.pop("pod", "true"))
        before = both_sides(host, pod)
        found.append(call("host-device", "ADD", pod.path, config, ifname="net1"))
        if call is outcome.builtin:
            reference.require_same(both_sides(host, pod), before)
    ours, theirs = found
    if theirs.msg.endswith("Link not found") or "file exists" in theirs.msg:
        assert "No such device" in ours.msg or "already exists" in ours.msg
    else:
        outcome.require_same_failure(ours, theirs)


# --- devices in sysfs ------------------------------------------------------------------------------------------------

BY_SYSFS: dict[str, dict[str, Any]] = {
    "pci": {"pciBusID": f"{PCI}0"},
    "virtio": {"pciBusID": f"{PCI}1"},
    "requested": {"runtimeConfig": {"deviceID": f"{PCI}0"}, "pciBusID": f"{PCI}7"},
    "auxiliary": {"runtimeConfig": {"deviceID": "mlx5_core.sf.4"}},
    "path": {"kernelpath": "/sys/devices/system/../system/nic/"},
    "nothing": {"pciBusID": f"{PCI}7"},
    "no-link": {"pciBusID": f"{PCI}5"},
    "gone-link": {"pciBusID": f"{PCI}6"},
    "vfio": {"pciBusID": f"{PCI}2", **static(V4)},
    "uio": {"runtimeConfig": {"deviceID": f"{PCI}3"}},
    "igb": {"pciBusID": f"{PCI}4"},
    "vfio-own-network": {"pciBusID": f"{PCI}2", "useInterfaceNetwork": True},
}


@pytest.mark.parametrize("case", BY_SYSFS)
def test_a_device_is_found_by_its_address(case: str, host: Any, netns: Any, sysfs: Path) -> None:
    """On the host's root, which is not that of the daemon."""
    config = host_device(**BY_SYSFS[case])
    made = outcome.builtin("host-device", "ADD", netns.path, config, ifname="net1", host_root=sysfs.parent)
    fails = case in ("nothing", "no-link", "gone-link", "vfio-own-network")
    moves = case in ("pci", "virtio", "requested", "auxiliary", "path")
    assert made.failed is fails, made.msg
    assert netns.links() == ({"net1"} if moves else set())
    if made.result:
        (entry,) = made.result["interfaces"]
        assert (entry["name"], entry.get("mac", "")) == ("net1", MAC if moves else "")
        config |= {"prevResult": made.result}
        made = outcome.builtin("host-device", "CHECK", netns.path, config, ifname="net1", host_root=sysfs.parent)
        assert not made.failed, made.msg
    for _ in range(2):
        assert not outcome.builtin("host-device", "DEL", netns.path, config, ifname="net1").failed
    assert known(host)["up0"] == (MAC, "")


@needs
@reference.needs_newest()
@pytest.mark.parametrize("case", BY_SYSFS)
def test_the_reference_finds_the_same(case: str, host: Any, make_netns: Any, tmp_path: Path, sysfs: Path) -> None:
    """The reference knows one place only: it gets a mount namespace with this sysfs."""
    ours_in, theirs_in, config = make_netns(), make_netns(), host_device(**BY_SYSFS[case])
    ours = outcome.builtin("host-device", "ADD", ours_in.path, config, ifname="net1", host_root=sysfs.parent)
    outcome.builtin("host-device", "DEL", ours_in.path, config, ifname="net1", host_root=sysfs.parent)
    names = ("bus", "devices/system")
    script = "; ".join(f"mount --bind {sysfs}/{name} /sys/{name}" for name in names) + '; exec "$@"'
    environ = {
        "CNI_COMMAND": "ADD", "CNI_CONTAINERID": "container1", "CNI_NETNS": theirs_in.path, "CNI_IFNAME": "net1",
        "CNI_PATH": str(reference.DIRECTORY), "PATH": os.environ["PATH"],
    }  # fmt: skip
    command = [
        needed("unshare"),
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        script,
        "sh",
        str(reference.DIRECTORY / "host-device"),
    ]
    done = subprocess.run(
        command, input=json.dumps(config).encode(), env=environ, capture_output=True, timeout=PATIENCE
    )
    told = json.loads(done.stdout)
    if done.returncode:
        assert ours.failed, told
    else:
        assert comparable(ours).result == comparable(outcome.Outcome(told)).result
        assert theirs_in.links() == ({"net1"} if told["interfaces"][0].get("mac") else set())


# --- back ------------------------------------------------------------------------------------------------------------


def added(netns: Any, **keys: Any) -> dict[str, Any]:
    config = host_device(**({"device": "up0"} | keys))
    made = outcome.builtin("host-device", "ADD", netns.path, config, ifname="net1")
    assert not made.failed, made.msg
    return config | {"prevResult": made.result}


def delete(path: str, config: dict[str, Any]) -> outcome.Outcome:
    return outcome.builtin("host-device", "DEL", path, config, ifname="net1")


def to_host(netns: Any, name: str = "net1", link: str = "net1") -> None:
    """Move a link to the host, as the kernel does with a real device: down, and with its alias."""
    with open("/proc/thread-self/ns/net") as file:
        netns.batch(f"link set {link} netns /proc/{os.getpid()}/fd/{file.fileno()} name {name}")


@pytest.mark.parametrize("how", ["device", "hwaddr"])
@pytest.mark.parametrize("path", ["", None])
@pytest.mark.parametrize("name", ["net1", "dev7"])
def test_a_device_that_the_kernel_returned_gets_its_name(
    how: str, path: str | None, name: str, host: Any, netns: Any
) -> None:
    config = added(netns, **({} if how == "device" else {"device": "", "hwaddr": MAC}))
    host.batch("link add other type bridge")
    host.batch("link set other alias up9")
    to_host(netns, name)
    remove_netns(Path(netns.path))
    for _ in range(2):
        assert delete(netns.path if path is None else path, config) == outcome.Outcome()
    assert known(host)["up0"] == (MAC, "")
    assert host.links() == {"up0", "up1", "other"}


def test_a_del_waits_for_the_kernel(host: Any, netns: Any, make_netns: Any, monkeypatch: Any) -> None:
    config, other = added(netns), make_netns()
    netns.batch(f"link set net1 netns {other.path}")
    remove_netns(Path(netns.path))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        if not pauses:
            to_host(other)
        pauses.append(seconds)

    monkeypatch.setattr(deadline, "pause", pause)
    assert not delete("", config).failed
    assert (known(host)["up0"], len(pauses)) == ((MAC, ""), 1)


def test_an_add_finds_a_device_that_came_back_late(host: Any, netns: Any, make_netns: Any) -> None:
    added(netns)
    to_host(netns, "dev9")
    remove_netns(Path(netns.path))
    pod = make_netns()
    config = added(pod)
    assert not delete(pod.path, config).failed
    assert known(host)["up0"] == (MAC, "")


def test_a_device_that_the_pod_has_renamed_comes_back(host: Any, netns: Any) -> None:
    config = added(netns)
    netns.batch("link set net1 down", "link set net1 name eth7", "link add net1 type bridge")
    assert not delete(netns.path, config).failed
    assert (netns.links(), known(host)["up0"]) == ({"net1"}, (MAC, ""))


@pytest.mark.parametrize("has_record", [True, False])
def test_a_link_of_the_pod_stays(has_record: bool, host: Any, netns: Any) -> None:
    """It has the name, and neither alias nor MAC address of the device."""
    config = added(netns) if has_record else host_device(device="up0")
    if has_record:
        to_host(netns)
    netns.batch("link add net1 type bridge")
    assert delete(netns.path, config) == outcome.Outcome()
    assert netns.links() == {"net1"}
    assert known(host)["up0"] == (MAC, "")


def test_a_device_without_its_alias_fails_the_del_until_it_is_known(host: Any, netns: Any) -> None:
    config = added(netns, device="", hwaddr=MAC)
    netns.run("ip", "link", "set", "net1", "alias", "")
    assert "alias is not set" in delete(netns.path, config).msg
    assert not delete(netns.path, config | {"device": "up0"}).failed
    assert known(host)["up0"] == (MAC, "")


def test_a_name_that_is_taken_fails_the_del_until_it_is_free(host: Any, netns: Any) -> None:
    config = added(netns)
    host.batch("link add up0 type bridge")
    assert delete(netns.path, config).failed
    assert netns.links() == {"net1"}
    host.batch("link del up0")
    assert not delete(netns.path, config).failed
    assert known(host)["up0"] == (MAC, "")


def test_names_that_are_taken_on_the_other_side(host: Any, netns: Any) -> None:
    host.batch("link add net1 type bridge")
    netns.batch("link add up0 type bridge")
    config = added(netns)
    assert netns.links() == {"net1", "up0"}
    assert not delete(netns.path, config).failed
    assert host.links() == {"net1", "up0", "up1"}


@pytest.mark.parametrize("keys", [static(V4, V6, routes=ROUTES), {"useInterfaceNetwork": True}])
@pytest.mark.parametrize("is_done_first", [True, False])
def test_a_failed_add_leaves_the_device_as_it_was(
    is_done_first: bool, keys: dict[str, Any], host: Any, netns: Any, make_call: MakeCall
) -> None:
    """For each request; one that fails may have been carried out."""
    host.batch("link set up0 alias uplink", "addr add 10.1.2.3/24 dev up0", "route add 192.0.2.0/24 via 10.1.2.1")

    def state() -> list[Any]:
        links = [known(host), sorted(host.links()), sorted(netns.links())]
        if not keys.get("useInterfaceNetwork"):
            return links
        addresses = [item["local"] for link in host.ip("-4", "addr", "show") for item in link["addr_info"]]
        return [*links, addresses, host.ip("-4", "route")]

    before, config = state(), host_device(device="up0", **keys)

    def add() -> None:
        HOST_DEVICE.add(make_call("ADD", netns.path, ifname="net1", **{"ipam": None} | config))

    def check(at: int) -> None:
        assert state() == before, at

    assert refuse_each(add, check, is_done_first=is_done_first) >= 5


# --- drift -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "ip link set net1 down", "ip addr flush dev net1", "ip route del default",
        "ip link set net1 address 02:00:5e:10:00:77", "ip addr del fd00::3/64 dev net1", "to the host",
    ],
)  # fmt: skip
def test_each_part_comes_back(command: str, host: Any, netns: Any, make_call: MakeCall) -> None:
    config = added(netns, **static(V4, V6, routes=ROUTES))
    before = both_sides(host, netns)
    call = make_call("DEL", netns.path, ifname="net1", **config)
    with PodNetns(netns.path) as opened:
        call = replace(call, netns=opened)
        assert plugin.differences(call, opened) == []
        to_host(netns, "up0") if command == "to the host" else netns.run("sh", "-c", command)
        found = plugin.differences(call, opened)
        assert found
        assert outcome.builtin("host-device", "CHECK", netns.path, config, ifname="net1").failed
        for item in found:
            assert item.repair
            item.repair()
        assert plugin.differences(call, opened) == []
    reference.require_same(both_sides(host, netns), before)


# --- in the daemon ---------------------------------------------------------------------------------------------------


@pytest.fixture
def node(host: Any, tmp_path: Path, tools: HostTools) -> Node:
    """A node whose pod has the device and a bridge network."""
    made = Node(tmp_path, "prefer", tools)
    made.put("web", "n1", [{"type": "bridge", "bridge": "br63"}], "1.0.0")
    made.put("web", "nic", [{"type": "host-device", "device": "up0"}], "1.0.0")
    made.engine.declare("nic,n1")
    return made


def test_links_that_leave_together_leave_without_the_device(node: Node, host: Any, netns: Any) -> None:
    node.engine.verbs.add(node.engine.request(netns=netns.path))
    assert netns.links() == {"net1", "net2"}
    node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    assert netns.links() == set()
    assert known(host)["up0"] == (MAC, "")
    assert node.store.containers() == []


def test_the_daemon_finds_that_the_namespace_is_gone(node: Node, host: Any, netns: Any) -> None:
    node.engine.verbs.add(node.engine.request(netns=netns.path))
    to_host(netns, "dev5")
    remove_netns(Path(netns.path))
    engine = node.engine.verbs.engine
    (orphan,) = orphans.look(engine).orphans.values()
    assert orphans.delete(engine, orphan, 30)
    assert known(host)["up0"] == (MAC, "")
    assert node.store.containers() == []
