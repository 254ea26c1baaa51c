"""Read the kubelet's device allocations: podresources over gRPC from a real server, and the checkpoint file."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from multus_daemon import deadlines
from multus_daemon.cluster import devices
from multus_daemon.cluster.devices import of_kubelet
from multus_daemon.cluster.kubelet import podresources
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.ports import DevicesUnavailableError
from tests.fakes.kubelet import MESSAGES, FakeKubelet, container

VF = "vendor.com/vf"
POD = Pod(Namespace("web"), PodName("p1"), PodUid("u1"))
STATIC = {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "h1"}

# A ListPodResourcesResponse with every field, encoded by protoc from the public api.proto of Kubernetes 1.35: pod
# web/p1 has two devices of VF and the claim `nic`, pod web/p2 has nothing.
ENCODED = base64.b64decode(
    "CrUBCgJwMRIDd2ViGqkBCgFjEiMKDXZlbmRvci5jb20vdmYSDDAwMDA6MDM6MDIuMxoECgIIARIdCg12ZW5kb3IuY29tL3ZmEgwwMDAwOjAzOjAy"
    "LjAaAwGsAiIRCgZtZW1vcnkQgCAaBAoCCAEqSBIDbmljGgN3ZWIiPAoYChZ2ZW5kb3IuY29tL2NsYXNzPW5pYy0wEg5kcmEudmVuZG9yLmNvbRoG"
    "bm9kZS1hIgVuaWMtMCoBcwoJCgJwMhIDd2Vi"
)


@pytest.fixture
def kubelet(tmp_path: Path) -> FakeKubelet:
    found = FakeKubelet(tmp_path)
    found.add("other", container("c", {VF: ["0000:99:00.0"]}))
    return found


async def allocated(kubelet: FakeKubelet | Path, pod: Pod = POD) -> dict[str, list[str]]:
    directory = kubelet if isinstance(kubelet, Path) else kubelet.directory
    found = await portal.run(Deadline(), functools.partial(of_kubelet, directory, LoopPortal(), pod))
    return {key: list(value) for key, value in found.items()}


# --- podresources ----------------------------------------------------------------------------------------------------


@pytest.mark.conformance("programs-1", "programs-3")
@pytest.mark.parametrize(
    ("get", "calls"), [("answers", ["Get"]), ("unimplemented", ["List"]), ("disabled", ["Get", "List"])]
)
async def test_devices_and_claims_of_all_containers_sorted(kubelet: FakeKubelet, get: str, calls: list[str]) -> None:
    kubelet.get = get
    kubelet.add(
        "p1",
        container("a", {VF: ["0000:03:02.3"], "vendor.com/gpu": ["g0"]}),
        container("b", {VF: ["0000:03:02.0", "0000:03:01.7"]}, {"nic": ["vendor.com/class=nic-0"]}),
        container("c", {VF: ["0000:03:02.1"]}, {"nic": ["vendor.com/class=nic-0"]}),
    )
    with kubelet:
        found = await allocated(kubelet)
    assert found == {
        VF: ["0000:03:01.7", "0000:03:02.0", "0000:03:02.1", "0000:03:02.3"],
        "vendor.com/gpu": ["g0"],
        "nic": ["nic-0"],  # once, though two containers share the claim
    }
    assert kubelet.calls == calls


@pytest.mark.conformance("programs-4", "e2e-8")
async def test_a_claims_device_is_what_stands_behind_the_equals_sign(kubelet: FakeKubelet) -> None:
    names = ["cdi-kind=cdi-resource", "vendor.com/class=b", "no-equals-sign", "a=b=c", "kind=", "=device", ""]
    kubelet.add("p1", container("c", claims={"resource-claim": names}))
    with kubelet:
        assert await allocated(kubelet) == {"resource-claim": ["b", "cdi-resource"]}


@pytest.mark.conformance("programs-7")
@pytest.mark.parametrize("get", ["answers", "unimplemented", "disabled"])
async def test_a_pod_that_the_kubelet_does_not_know_has_nothing(kubelet: FakeKubelet, get: str) -> None:
    kubelet.get = get
    kubelet.add("p1", container("c", {VF: ["x"]}), namespace="elsewhere")
    with kubelet:
        assert await allocated(kubelet) == {}
    assert kubelet.calls[-1] == "List"


async def test_two_pods_of_one_name_are_not_mixed(kubelet: FakeKubelet) -> None:
    kubelet.get = "unimplemented"
    for device in "ab":
        kubelet.add("p1", container("c", {VF: [device]}))
    with kubelet, pytest.raises(DevicesUnavailableError, match="2 pods named web/p1"):
        await allocated(kubelet)


def test_the_messages_are_those_of_the_public_definition() -> None:
    ours = podresources._CLASSES["ListPodResourcesResponse"].FromString(ENCODED)
    assert [pod.name for pod in ours.pod_resources] == ["p1", "p2"]
    assert list(podresources._devices(ours.pod_resources[0].containers[0])) == [
        (VF, "0000:03:02.3"),
        (VF, "0000:03:02.0"),
        ("nic", "nic-0"),
    ]
    request = podresources._CLASSES["GetPodResourcesRequest"](pod_name="p1", pod_namespace="web")
    assert request.SerializeToString() == base64.b64decode("CgJwMRIDd2Vi")
    # The fake kubelet speaks the same.
    assert MESSAGES["ListPodResourcesResponse"].FromString(ENCODED).SerializeToString() == ENCODED


async def test_a_kubelet_that_hangs_has_a_deadline(kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "KUBELET_DEVICES_SECONDS", 0.3)
    kubelet.hangs = True
    with kubelet, pytest.raises(DevicesUnavailableError, match=r"did not answer within 0\.3 s"):
        await allocated(kubelet)


async def test_a_caller_that_is_cancelled_does_not_wait(kubelet: FakeKubelet) -> None:
    kubelet.hangs = True
    with kubelet, pytest.raises(TimeoutError):
        await asyncio.wait_for(allocated(kubelet), 0.5)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_refusal_is_no_reason_to_take_the_checkpoint(kubelet: FakeKubelet, code: grpc.StatusCode) -> None:
    write_checkpoint(kubelet.directory, [entry({"0": ["stale"]})])
    kubelet.refuses = code
    with kubelet, pytest.raises(DevicesUnavailableError, match=f"{code.name}: as the test wants"):
        await allocated(kubelet)
    assert kubelet.calls == ["Get"]


async def test_an_answer_that_is_too_large(kubelet: FakeKubelet) -> None:
    kubelet.add("p1", container("c", {VF: ["x" * 1_000_000] * 17}))
    with kubelet, pytest.raises(DevicesUnavailableError, match="RESOURCE_EXHAUSTED"):
        await allocated(kubelet)


@pytest.mark.conformance("programs-5")
@pytest.mark.parametrize("kind", ["file", "garbage", "nobody"])
async def test_a_socket_that_no_kubelet_is_behind(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, [entry({"0": ["stale"]})])
    path = tmp_path / "pod-resources" / "kubelet.sock"
    path.parent.mkdir()
    server = None
    if kind == "file":
        path.write_text("no socket")
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        if kind == "nobody":
            listening.close()
        else:
            server = await asyncio.start_unix_server(_garbage, sock=listening)
    with pytest.raises(DevicesUnavailableError, match="podresources API"):
        await allocated(tmp_path)
    if server:
        server.close()


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\ngarbage")
    writer.close()


async def test_an_odd_path(tmp_path: Path) -> None:
    odd = tmp_path / "a %41 b"
    kubelet = FakeKubelet(odd)
    kubelet.add("p1", container("c", {VF: ["x"]}))
    with kubelet:
        assert await allocated(kubelet) == {VF: ["x"]}


@pytest.mark.conformance("programs-6")
@pytest.mark.parametrize(
    "pod", [Pod(Namespace(""), PodName("p1"), PodUid("u1")), Pod(Namespace("web"), PodName(""), PodUid("u1"))]
)
async def test_a_pod_without_a_name_or_namespace(kubelet: FakeKubelet, pod: Pod) -> None:
    with kubelet, pytest.raises(DevicesUnavailableError, match="namespace and name"):
        await allocated(kubelet, pod)


async def test_without_grpcio_the_error_says_what_to_install(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "multus_daemon.cluster.kubelet.podresources", None)
    with kubelet, pytest.raises(DevicesUnavailableError, match=r"install multus-daemon\[devices\]"):
        await allocated(kubelet)


# --- the checkpoint, where there is no socket ------------------------------------------------------------------------


def entry(device_ids: Any, resource: str = VF, uid: str = "u1") -> dict[str, Any]:
    return {
        "PodUID": uid,
        "ContainerName": "c",
        "ResourceName": resource,
        "DeviceIDs": device_ids,
        "AllocResp": "CgUKA2EQYg==",
    }


def write_checkpoint(directory: Path, entries: list[dict[str, Any]] | None) -> Path:
    path = directory / "device-plugins" / "kubelet_internal_checkpoint"
    path.parent.mkdir(parents=True)
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {VF: ["0000:03:02.0", "0000:03:02.3"]}}
    path.write_text(json.dumps({"Data": data, "Checksum": 1933000000}))
    return path


@pytest.mark.conformance("programs-8")
@pytest.mark.parametrize(
    "device_ids",
    [
        {"0": ["0000:03:02.3"], "1": ["0000:03:02.0"]},
        {"-1": ["0000:03:02.3", "0000:03:02.0"], "1": None},
        ["0000:03:02.3", "0000:03:02.0"],
    ],
    ids=["by NUMA node", "no NUMA node", "before 1.20"],
)
async def test_both_forms_of_the_checkpoint(tmp_path: Path, device_ids: Any) -> None:
    entries = [entry(device_ids), entry({"0": ["x"]}, "vendor.com/gpu"), entry({"0": ["another's"]}, uid="u2")]
    write_checkpoint(tmp_path, entries)
    assert await allocated(tmp_path) == {
        VF: ["0000:03:02.0", "0000:03:02.3"],
        "vendor.com/gpu": ["x"],
    }


@pytest.mark.parametrize("entries", [None, [], [entry(None)]])
async def test_a_checkpoint_without_the_pods_devices(tmp_path: Path, entries: list[dict[str, Any]] | None) -> None:
    write_checkpoint(tmp_path, entries)
    assert await allocated(tmp_path) == {}


async def test_a_static_pod_is_known_by_the_kubelets_own_uid(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [entry(["own"], uid="h1"), entry(["of the mirror"], uid="u1")])
    static = Pod(POD.namespace, POD.name, POD.uid, STATIC)
    assert await allocated(tmp_path, static) == {VF: ["own"]}


@pytest.mark.conformance("programs-2", "programs-9")
async def test_neither_socket_nor_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DevicesUnavailableError, match="neither .* set kubeletDir"):
        await allocated(tmp_path)


@pytest.mark.conformance("programs-10")
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"Data":{}}', '{"Data":{"PodDeviceEntries":[{"PodUID":7}]}}', '{"Data":' * 5000, b"\xff"],
)
async def test_a_checkpoint_that_can_not_be_read(tmp_path: Path, content: str | bytes) -> None:
    path = write_checkpoint(tmp_path, [])
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DevicesUnavailableError, match="checkpoint can't be read"):
        await allocated(tmp_path)


async def test_a_checkpoint_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHECKPOINT_MAX_BYTES", 1000)
    path = write_checkpoint(tmp_path, [])
    path.write_bytes(path.read_bytes() + b" " * 1000)
    with pytest.raises(DevicesUnavailableError, match="larger than 1000 bytes"):
        await allocated(tmp_path)


@pytest.mark.conformance("programs-11")
async def test_a_pod_without_a_uid(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [entry(["x"], uid="")])
    with pytest.raises(DevicesUnavailableError, match="lists pods by UID"):
        await allocated(tmp_path, Pod(POD.namespace, POD.name, PodUid("")))
