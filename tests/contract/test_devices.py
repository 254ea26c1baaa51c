"""Devices and NodeDeviceFiles: the same for the kubelet's API, its checkpoint, the node's files, and the fakes."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from multus_daemon.cluster.devices import Devices, NodeDeviceFiles, of_kubelet
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Allocation, Attachment, Pod
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.nad import device_info
from multus_daemon.spec.ports import DevicesUnavailableError
from tests.contract.conftest import in_thread
from tests.fakes.devices import FakeDeviceFiles, FakeDeviceSource
from tests.fakes.kubelet import FakeKubelet, container

VF = "vendor.com/vf"
GIVEN = {VF: ["0000:03:02.0", "0000:03:02.3"], "vendor.com/gpu": ["g0"]}
POD = Pod(Namespace("web"), PodName("p1"), PodUid("u1"))
OTHER = Pod(Namespace("web"), PodName("p2"), PodUid("u2"))


def of_the_kubelet(directory: Path) -> Devices:
    """Read the kubelet's devices through a portal, as the engine does."""
    way = LoopPortal()
    return Devices(functools.partial(of_kubelet, directory, way), way)


@pytest.fixture(params=["get", "list", "checkpoint", "fake"])
async def source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Devices]:
    """A source that has given `GIVEN` to `POD`."""
    if request.param == "fake":
        fake = FakeDeviceSource()
        fake.pods["web/p1"] = GIVEN
        yield fake
    elif request.param == "checkpoint":
        path = tmp_path / "device-plugins" / "kubelet_internal_checkpoint"
        path.parent.mkdir()
        entries = [{"PodUID": "u1", "ResourceName": name, "DeviceIDs": {"0": ids[::-1]}} for name, ids in GIVEN.items()]
        path.write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))
        yield of_the_kubelet(tmp_path)
    else:
        kubelet = FakeKubelet(tmp_path, get="answers" if request.param == "get" else "unimplemented")
        kubelet.add("p1", container("c", {name: ids[::-1] for name, ids in GIVEN.items()}))
        with kubelet:
            yield of_the_kubelet(tmp_path)


@pytest.mark.conformance("programs-3")
async def test_device_ids_by_resource_sorted(source: Devices) -> None:
    assert (await in_thread(source.allocated, POD, GIVEN)).devices == GIVEN


async def test_a_pod_without_devices(source: Devices) -> None:
    assert await in_thread(source.allocated, OTHER, GIVEN) == Allocation()


@pytest.mark.parametrize("kind", ["kubelet", "fake"])
async def test_a_source_that_is_away(kind: str, tmp_path: Path) -> None:
    fake = FakeDeviceSource()
    fake.fail = DevicesUnavailableError("away")
    source: Devices = fake if kind == "fake" else of_the_kubelet(tmp_path)
    with pytest.raises(DevicesUnavailableError):
        await in_thread(source.allocated, POD, GIVEN)


# --- files -----------------------------------------------------------------------------------------------------------

INFO = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:03:02.0"}}
ATTACHMENT = Attachment(
    "web/sriov",
    conf.parse(b'{"cniVersion":"1.0.0","name":"sriov","type":"sriov"}'),
    IfName("net1"),
    resource_name=VF,
    device_id="0000:03:02.0",
)


@pytest.fixture(params=["node", "fake"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[NodeDeviceFiles, Callable[[bytes], object]]:
    """The files, and how a device plugin writes its own."""
    if request.param == "fake":
        fake = FakeDeviceFiles()
        return fake, lambda data: fake.written.update({(VF, "0000:03:02.0"): data})
    folder = tmp_path / "var" / "run" / "k8s.cni.cncf.io" / "devinfo" / "dp"
    folder.mkdir(parents=True)
    name = device_info.device_plugin_file(VF, "0000:03:02.0")
    return NodeDeviceFiles(tmp_path), lambda data: (folder / name).write_bytes(data)


def test_the_life_of_a_file(files: tuple[NodeDeviceFiles, Callable[[bytes], object]]) -> None:
    found, write = files
    path = found.path(ATTACHMENT, ContainerId("c1"))
    assert path != found.path(ATTACHMENT, ContainerId("c2"))
    assert found.read(path) is None
    found.prepare(ATTACHMENT, path)
    assert found.read(path) is None
    write(json.dumps(INFO).encode())
    found.prepare(ATTACHMENT, path)
    assert found.read(path) == INFO
    for _ in range(2):
        found.remove(path)
        assert found.read(path) is None
