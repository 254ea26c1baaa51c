"""Pods, plugins and a way to the API server that mean no good, on a real node: what they cost the daemon and others.

The bounds are those of a fault: what is meant is below a tenth of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.cluster.multus import CONFIG, MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.workload import BRIDGE, leftovers, network, two_networks, wait_clean
from tests.e2e.relay import Relay
from tests.programs import needed

pytest_plugins = ["tests.e2e.cluster.fixtures"]

NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"
USER: Final = "system:serviceaccount:kube-system:multus-daemon"
TENANT: Final = "tenant"
ADDRESS: Final = "10.93.0.2"
WATCHED_SECONDS: Final = 10.0
LARGE_BYTES: Final = 230_000
IPTABLES: Final = """#!/bin/sh
input=$(cat)
if [ -e /run/multus/iptables-fails ] && printf '%s' "$input" | grep -q '^-D'; then
  : >/run/multus/iptables-was-asked
  echo 'iptables: out of memory' >&2
  exit 4
fi
printf '%s\\n' "$input" | PROGRAM "$@"
"""
HANGS: Final = '#!/bin/sh\nif [ "$CNI_COMMAND" = ADD ]; then exec sleep 60; fi\n'


@pytest.fixture
def multus(real_node: RealNode) -> Iterator[MultusProcess]:
    with ExitStack() as undo:
        undo.enter_context(iptables_that_can_fail(real_node))
        made = MultusProcess(real_node, hotplug="on", keep="repair", networksReadyCondition=True)
        undo.callback(made.uninstall)
        made.install()
        undo.callback(real_node.remove_pods)
        made.start()
        two_networks(real_node)
        yield made
        real_node.remove_pods()
        wait_clean(real_node)
        if BRIDGE in real_node.links():
            real_node.machine.run("ip", "link", "delete", BRIDGE)
        assert real_node.links() == LINKS


@contextmanager
def iptables_that_can_fail(node: RealNode) -> Iterator[None]:
    """The node has an `iptables-restore` before its own, which does not remove rules while a file is there."""
    place = "/usr/local/sbin"
    tools = node.machine.path("/run/hostile-tools")
    tools.mkdir()
    for name in ("iptables-restore", "ip6tables-restore"):
        (tools / name).write_text(IPTABLES.replace("PROGRAM", str(Path(needed("iptables-restore")).with_name(name))))
        (tools / name).chmod(0o755)
    node.machine.run("mount", "--bind", "/run/hostile-tools", place)
    try:
        yield
    finally:
        node.machine.run("umount", place)
        node.machine.run("rm", "-r", "/run/hostile-tools")


def annotate(node: RealNode, name: str, networks: str, namespace: str = "default") -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    node.server.client.merge(path, {"metadata": {"annotations": {NETWORKS: networks}}})


def addresses(node: RealNode, name: str) -> set[str]:
    """The addresses in a pod's namespace."""
    return {item.get("local", "") for link in node.ip("address", pod=name) for item in link.get("addr_info", ())}


def processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do the work again and again beside the block. Raises what it raises."""
    ending = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            while not ending.is_set():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    if raised:
        raise raised[0]


def test_an_address_that_a_failed_del_has_freed_is_not_taken_back(multus: MultusProcess) -> None:
    node = multus.node
    flag = node.machine.path("/run/multus/iptables-fails")
    ranges = [[{"subnet": "10.93.0.0/24", "rangeStart": ADDRESS, "rangeEnd": ADDRESS}]]
    bridge: dict[str, Any] = {"type": "bridge", "bridge": BRIDGE, "ipMasq": True, "ipMasqBackend": "iptables"}
    network(node, "one", {**bridge, "ipam": {"type": "host-local", "ranges": ranges}})
    node.pod("first", networks="one")
    node.wait_running("first")
    assert ADDRESS in addresses(node, "first")
    flag.touch()
    annotate(node, "first", "green")
    node.wait_until(node.machine.path("/run/multus/iptables-was-asked").exists, "rules are removed")
    node.wait_until(lambda: ADDRESS not in addresses(node, "first"), "the interface is gone")
    node.pod("second", networks="one")
    node.wait_running("second")
    assert ADDRESS in addresses(node, "second")
    end = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        assert ADDRESS not in addresses(node, "first"), multus.log()
        time.sleep(0.2)
    flag.unlink()
    for name in ("first", "second"):
        node.delete_pod(name)
    node.wait_until(lambda: not [item for item in leftovers(node) if "10.93." in item], "the address is free")


def test_large_annotations_that_change_all_the_time(multus: MultusProcess) -> None:
    node = multus.node
    names = [f"large{number}" for number in range(10)]
    for name in names:
        node.pod(name, networks="blue")
    node.wait_running(*names)
    numbers = itertools.count()
    # Legal to the last letter, of a network that does not exist.
    more = ",".join(f"nowhere{number:05d}" for number in range(LARGE_BYTES // 13))

    def change() -> None:
        number = next(numbers)
        annotate(node, names[number % len(names)], f"blue,{more},n{number}")
        time.sleep(0.1)

    before, began = processor(multus.pid), time.monotonic()
    with meanwhile(change):
        for number in range(5):
            node.pod(f"well{number}", networks="blue,green")
            node.wait_running(f"well{number}", timeout=20)
        time.sleep(max(0.0, began + WATCHED_SECONDS - time.monotonic()))
    share = (processor(multus.pid) - before) / (time.monotonic() - began)
    print(f"large annotations: {share:.2f} of a core for {next(numbers)} changes")
    assert share < 1


def test_plugins_that_hang_do_not_stop_hot_plug_and_repair_of_others(multus: MultusProcess) -> None:
    node = multus.node
    program = node.machine.path("/opt/cni/bin/hangs")
    program.write_text(HANGS)
    program.chmod(0o755)
    network(node, "hanging", {"type": "hangs"})
    node.server.create_namespace(TENANT)
    names = [f"bad{number}" for number in range(8)]
    for name in names:
        node.pod(name, networks="default/blue", namespace=TENANT)
    node.pod("good", networks="blue")
    node.wait_running(*names, namespace=TENANT)
    node.wait_running("good")
    numbers = itertools.count()

    def change() -> None:
        for name in names:
            annotate(node, name, f"default/blue,default/hanging@net{2 + next(numbers) % 9}", TENANT)
        time.sleep(1)

    waited = []
    with meanwhile(change):
        time.sleep(5)
        for networks, links in (("blue,green", ["eth0", "lo", "net1", "net2"]), ("blue", ["eth0", "lo", "net1"])):
            began = time.monotonic()
            annotate(node, "good", networks)
            node.wait_until(lambda links=links: node.links("good") == links, f"{networks} is followed", 20)  # type: ignore[misc]
            waited.append(time.monotonic() - began)
        began = time.monotonic()
        node.in_pod("good", "ip", "link", "delete", "net1")
        node.wait_until(lambda: "net1" in node.links("good"), "it is repaired", 20)
        waited.append(time.monotonic() - began)
    print(f"plugins that hang: followed and repaired within {max(waited):.2f} s")
    node.remove_pods(TENANT)
    program.unlink()


def test_a_pod_that_flaps_costs_little(multus: MultusProcess) -> None:
    node = multus.node
    node.pod("flaps", networks="blue")
    node.wait_running("flaps")
    # Once it is no longer young.
    time.sleep(5)
    script = "while :; do ip link set net1 mtu 1400; sleep 0.04; ip link set net1 mtu 1450; sleep 0.04; done"
    mark, before, began = node.server.audit_mark(), processor(multus.pid), time.monotonic()
    with meanwhile(lambda: flap(node, script)):
        time.sleep(40)
    seconds = time.monotonic() - began
    share = (processor(multus.pid) - before) / seconds
    writes = [item for item in node.server.audit(USER, since=mark) if item["verb"] not in ("get", "list", "watch")]
    print(f"a pod that flaps: {share:.3f} of a core, {len(writes)} writes in {seconds:.0f} s")
    assert share < 0.3
    assert len(writes) < 60


def flap(node: RealNode, script: str) -> None:
    node.in_pod("flaps", "timeout", "--preserve-status", "-s", "TERM", "2", "sh", "-c", f"trap 'exit 0' TERM; {script}")


class Cutting(Relay):
    """A way to the API server that ends each connection after a moment."""

    SECONDS: Final = 0.2

    def __init__(self, namespace: str, port: int) -> None:
        super().__init__(namespace, port, at=("127.0.0.1", port + 1))
        self.connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            async with asyncio.timeout(self.SECONDS):
                await super()._serve(reader, writer)
        except TimeoutError:
            writer.close()


def test_a_way_to_the_api_server_that_cuts_each_connection(multus: MultusProcess) -> None:
    node = multus.node
    multus.stop()
    config = node.machine.path(CONFIG)
    before = config.read_text()
    kubeconfig = Path(json.loads(before)["kubeconfig"])
    cut = kubeconfig.with_name("cut.kubeconfig")
    port = node.server.port
    cut.write_text(kubeconfig.read_text().replace(f":{port}", f":{port + 1}"))
    cut.chmod(0o600)
    relay = Cutting(node.machine.netns, port)
    try:
        relay.start()
        config.write_text(json.dumps({**json.loads(before), "kubeconfig": str(cut)}))
        multus.launch()
        node.wait_until(lambda: relay.connections > 0, "the daemon asks the API server")
        # The first second may have more.
        time.sleep(1)
        mark, made, began = node.server.audit_mark(), relay.connections, time.monotonic()
        time.sleep(20)
        seconds = time.monotonic() - began
        rate, asked = (relay.connections - made) / seconds, len(node.server.audit(USER, since=mark)) / seconds
        print(f"each connection is cut: {rate:.2f} connections, {asked:.2f} requests a second")
        assert max(rate, asked) < 4
        multus.stop()
    finally:
        relay.close()
        config.write_text(before)
    multus.start()
    node.pod("well", networks="blue")
    node.wait_running("well")
