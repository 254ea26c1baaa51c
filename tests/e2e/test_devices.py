"""Networks of a device plugin's resource: a kubelet that answers on its socket, plugins that are programs."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import NAD, Node
from tests.e2e.test_standalone import status_of
from tests.fakes.kubelet import FakeKubelet, container

# Where plugins of this host have them.
DEVICE_INFO = Path("/var/run/k8s.cni.cncf.io/devinfo")
# A resource of this run only: the files of device plugins carry its name.
VF = f"vendor.com/vf{os.getpid()}"
DEVICES = ["0000:03:02.0", "0000:03:02.3"]


@pytest.fixture
def device_plugin() -> Iterator[None]:
    """The files that a device plugin writes; what had to be made for them goes again."""
    made = [
        path for path in (DEVICE_INFO.parent, DEVICE_INFO, DEVICE_INFO / "dp", DEVICE_INFO / "cni") if not path.exists()
    ]
    (DEVICE_INFO / "dp").mkdir(parents=True, exist_ok=True)
    files = {DEVICE_INFO / "dp" / f"{VF}-{device}-device.json".replace("/", "-"): device for device in DEVICES}
    for path, device in files.items():
        path.write_text(json.dumps(info(device)))
    yield
    for path in files:
        path.unlink()
    for path in reversed(made):
        if path.exists():
            path.rmdir()


def info(device: str) -> dict[str, Any]:
    return {"type": "pci", "version": "1.1.0", "pci": {"pci-address": device}}


@pytest.fixture
def kubelet(node: Node) -> Iterator[FakeKubelet]:
    node.settings["kubeletDir"] = str(node.root / "kubelet")
    found = FakeKubelet(node.root / "kubelet")
    with found:
        yield found


@pytest.fixture
def vf_network(node: Node) -> Callable[[str], None]:
    """Declares networks whose plugin keeps what it was called with, at `calls/<VERB>-<interface>`."""
    calls = node.root / "calls"
    calls.mkdir()
    result = '{"cniVersion":"1.0.0","interfaces":[{"name":"%s","sandbox":"%s"}]}'
    node.plugin("vf", "")
    (node.bin_dir / "vf").write_text(
        f'#!/bin/sh\ncat >"{calls}/$CNI_COMMAND-$CNI_IFNAME"\nprintf \'{result}\' "$CNI_IFNAME" "$CNI_NETNS"\n'
    )

    def declare(name: str) -> None:
        capabilities = {"deviceID": True, "CNIDeviceInfoFile": True}
        config = {"cniVersion": "1.0.0", "name": name, "type": "vf", "capabilities": capabilities}
        metadata = {"namespace": "default", "name": name, "annotations": {"k8s.v1.cni.cncf.io/resourceName": VF}}
        node.manifest({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})

    return declare


def stdin(node: Node, verb: str, ifname: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.root / "calls" / f"{verb}-{ifname}").read_text())
    return found


@pytest.mark.weak_spot(14)
@pytest.mark.npwg("DI 4.2-4.2.1")
@pytest.mark.conformance("config-14")
def test_two_networks_of_one_resource_get_two_devices(
    node: Node, kubelet: FakeKubelet, vf_network: Callable[[str], None], device_plugin: None
) -> None:
    vf_network("fast")
    node.pod("hello", "fast,fast")
    kubelet.add("hello", container("a", {VF: DEVICES[1:]}), container("b", {VF: DEVICES[:1]}), namespace="default")
    node.start()
    netns = node.add_netns()
    added = node.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout

    files = [DEVICE_INFO / "cni" / f"default-fast-c1_{ifname}" for ifname in ("net1", "net2")]
    for ifname, device, file in zip(("net1", "net2"), DEVICES, files, strict=True):
        told = stdin(node, "ADD", ifname)
        assert (told["deviceID"], told["pciBusID"]) == (device, device)
        assert told["runtimeConfig"] == {"deviceID": device, "CNIDeviceInfoFile": str(file)}
        assert json.loads(file.read_text()) == info(device)
        assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert {item["interface"]: item.get("device-info") for item in status_of(node, "hello")} == {
        "eth0": None,
        "net1": info(DEVICES[0]),
        "net2": info(DEVICES[1]),
    }

    # The kubelet has forgotten the pod: nobody asks it any more.
    kubelet.pods.clear()
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    for ifname, device in zip(("net1", "net2"), DEVICES, strict=True):
        told = stdin(node, "DEL", ifname)
        assert (told["deviceID"], told["runtimeConfig"]["deviceID"]) == (device, device)
    assert not any(file.exists() for file in files)
    assert node.leftovers() == []


@pytest.mark.conformance("pods-25")
def test_a_node_without_a_kubelet(node: Node, vf_network: Callable[[str], None]) -> None:
    node.settings["kubeletDir"] = str(node.root / "no-kubelet")
    vf_network("fast")
    node.pod("hello", "fast")
    node.pod("plain")
    node.start()
    answer = node.cni("ADD", "c1", node.add_netns(), "hello")
    assert (answer.code, answer.json["code"]) == (1, 11)
    assert "neither the kubelet's podresources socket nor its checkpoint can be read" in answer.json["msg"]
    assert node.cni("ADD", "c2", node.add_netns(), "plain").code == 0
