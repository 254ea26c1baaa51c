"""Networks of virtual functions, by sriov-cni, and what its device plugin says of them: on a card with SR-IOV."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from tests.e2e.node import NAD, Node
from tests.e2e.test_devices import DEVICE_INFO
from tests.e2e.test_standalone import status_of
from tests.fakes.kubelet import FakeKubelet, container
from tests.programs import given, needed
from tests.waiting import PATIENCE, until

RUNS: Final = ("sriov-cni", "sriov-network-device-plugin")

RESOURCE = "example.com/vf"
NAMES = Path("/usr/share/misc/pci.ids")


def _card() -> Path:
    # Not by its link, which comes back a moment after the namespace of an earlier test.
    for found in Path("/sys/bus/pci/devices").glob("*/sriov_totalvfs"):
        if (found.parent / "class").read_text().startswith("0x0200"):
            return found.parent.resolve()
    pytest.skip("needs a card with SR-IOV: `make kernels` with QEMU 8 or newer has one")


def _has_files(directory: Path) -> bool:
    return directory.exists() and any(directory.iterdir())


@pytest.fixture
def functions(make_node: Callable[..., Node], reference: Path) -> Iterator[tuple[Node, list[str]]]:
    """A node with two virtual functions, and their addresses on the bus."""
    plugin = given("WIDE_SRIOV_CNI")
    card = _card()
    (card / "sriov_numvfs").write_text("2")
    addresses = [(card / f"virtfn{number}").resolve().name for number in range(2)]
    node = make_node(node_name="node")
    node.ptp("cluster", "10.81.0.0/24")
    shutil.copy(plugin, node.bin_dir / "sriov")
    shutil.copy(reference / "static", node.bin_dir / "static")
    for device in (card.name, *addresses):
        place = Path("/sys/bus/pci/devices", device, "net")
        until(functools.partial(_has_files, place), 60, f"{device} has no link")
        (link,) = place.iterdir()
        subprocess.run([needed("ip"), "link", "set", link.name, "netns", Path(node.host).name, "up"], check=True)
    yield node, addresses
    (card / "sriov_numvfs").write_text("0")


def test_a_pod_gets_a_virtual_function_and_gives_it_back(functions: tuple[Node, list[str]]) -> None:
    node, addresses = functions
    node.settings["kubeletDir"] = str(node.root / "kubelet")
    ipam = {"type": "static", "addresses": [{"address": "10.91.0.7/24"}]}
    config = {"cniVersion": "1.0.0", "name": "fast", "type": "sriov", "vlan": 7, "spoofchk": "off", "ipam": ipam}
    metadata = {"namespace": "default", "name": "fast", "annotations": {"k8s.v1.cni.cncf.io/resourceName": RESOURCE}}
    node.manifest({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})
    node.pod("hello", "fast")
    with FakeKubelet(node.root / "kubelet") as kubelet:
        kubelet.add("hello", container("a", {RESOURCE: addresses[:1]}), namespace="default")
        node.start()
        before, netns = node.links(), node.add_netns()
        added = node.cni("ADD", "c1", netns, "hello")
        assert added.code == 0, added.stdout
        assert node.links(netns) == ["eth0", "lo", "net1"]
        (link,) = node.ip("address", "show", "net1", netns=netns)
        assert [item["local"] for item in link["addr_info"] if item["family"] == "inet"] == ["10.91.0.7"]
        (status,) = [item for item in status_of(node, "hello") if item.get("interface") == "net1"]
        assert status["mac"] == link["address"]
        assert node.cni("CHECK", "c1", netns, "hello").code == 0
        deleted = node.cni("DEL", "c1", netns, "hello")
    assert deleted.code == 0, deleted.stdout
    assert node.links(netns) == ["lo"]
    assert node.links() == before, "the virtual function is on the node again, under its old name"
    assert node.leftovers() == []


def allocate(socket: Path, devices: list[str]) -> None:
    """Ask a device plugin for devices, as the kubelet does: deviceplugin/v1beta1, DevicePlugin.Allocate."""

    def first_field(data: bytes) -> bytes:
        return b"\n" + bytes([len(data)]) + data

    request = first_field(b"".join(first_field(device.encode()) for device in devices))
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        channel.unary_unary("/v1beta1.DevicePlugin/Allocate")(request, timeout=PATIENCE)


@pytest.mark.skipif(not NAMES.exists(), reason=f"the device plugin reads {NAMES}: apt-get install pci.ids")
def test_the_device_plugin_finds_them(functions: tuple[Node, list[str]]) -> None:
    node, addresses = functions
    selectors = [{"vendors": ["8086"], "drivers": ["igbvf"]}]
    resource = {"resourcePrefix": "example.com", "resourceName": "vf", "selectors": selectors}
    config = node.root / "sriovdp.json"
    config.write_text(json.dumps({"resourceList": [resource]}))
    socket = Path("/var/lib/kubelet/plugins_registry/example.com_vf.sock")
    socket.parent.mkdir(parents=True, exist_ok=True)
    command = [needed("ip"), "netns", "exec", Path(node.host).name, str(given("WIDE_SRIOV_DEVICE_PLUGIN"))]
    log = node.root / "sriovdp.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--config-file", str(config), "--logtostderr", "-v", "10"], stdout=output, stderr=output
        ) as program,
    ):
        try:
            files = [
                DEVICE_INFO / "dp" / f"{RESOURCE}-{address}-device.json".replace("/", "-") for address in addresses
            ]
            node.wait_until(socket.exists, "the socket of the device plugin")
            allocate(socket, addresses)
            assert [json.loads(file.read_text())["pci"]["pci-address"] for file in files] == addresses
        finally:
            program.kill()
            print(log.read_text())
