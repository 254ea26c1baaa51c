"""A kubelet's podresources API: a real gRPC server on a unix socket with every message and field of the public v1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from tests.fakes.protobuf import messages

# kubernetes/kubelet pkg/apis/podresources/v1/api.proto, by message: "<number> <name> <type>", `*` for repeated.
SCHEMA = {
    "ListPodResourcesRequest": [],
    "ListPodResourcesResponse": ["1 pod_resources *PodResources"],
    "GetPodResourcesRequest": ["1 pod_name string", "2 pod_namespace string"],
    "GetPodResourcesResponse": ["1 pod_resources PodResources"],
    "PodResources": ["1 name string", "2 namespace string", "3 containers *ContainerResources"],
    "ContainerResources": [
        "1 name string",
        "2 devices *ContainerDevices",
        "3 cpu_ids *int64",
        "4 memory *ContainerMemory",
        "5 dynamic_resources *DynamicResource",
    ],
    "ContainerDevices": ["1 resource_name string", "2 device_ids *string", "3 topology TopologyInfo"],
    "ContainerMemory": ["1 memory_type string", "2 size uint64", "3 topology TopologyInfo"],
    "TopologyInfo": ["1 nodes *NUMANode"],
    "NUMANode": ["1 ID int64"],
    "DynamicResource": ["2 claim_name string", "3 claim_namespace string", "4 claim_resources *ClaimResource"],
    "ClaimResource": [
        "1 cdi_devices *CDIDevice",
        "2 driver_name string",
        "3 pool_name string",
        "4 device_name string",
        "5 share_id string",
    ],
    "CDIDevice": ["1 name string"],
}

MESSAGES = messages(SCHEMA)


def container(
    name: str, devices: Mapping[str, Sequence[str]] = {}, claims: Mapping[str, Sequence[str]] = {}
) -> dict[str, Any]:
    """A ContainerResources: device ids by resource, names of CDI devices by claim, and all that is around them."""
    numa = {"nodes": [{"ID": 1}]}
    return {
        "name": name,
        "cpu_ids": [0, 3],
        "memory": [{"memory_type": "hugepages-1Gi", "size": 2**30, "topology": numa}],
        "devices": [
            {"resource_name": resource, "device_ids": list(ids), "topology": numa} for resource, ids in devices.items()
        ],
        "dynamic_resources": [
            {
                "claim_name": claim,
                "claim_namespace": "web",
                "claim_resources": [
                    {
                        "cdi_devices": [{"name": device}],
                        "driver_name": "dra.vendor.com",
                        "pool_name": "node-a",
                        "device_name": device.rpartition("=")[2],
                        "share_id": "s1",
                    }
                    for device in names
                ],
            }
            for claim, names in claims.items()
        ],
    }


@dataclass
class FakeKubelet:
    """Use it as a context manager. `pods` as the kubelet lists them; `calls` has the method of each call.

    `get`: answers, `unimplemented` (a kubelet of before 1.27), or `disabled` (its feature gate is off). `hangs`: no
    call is answered until the server stops. `refuses`: the status code of every call.
    """

    directory: Path
    pods: list[dict[str, Any]] = field(default_factory=list)
    get: str = "answers"
    hangs: bool = False
    refuses: grpc.StatusCode | None = None
    calls: list[str] = field(default_factory=list)

    def add(self, name: str, *containers: dict[str, Any], namespace: str = "web") -> None:
        self.pods.append({"name": name, "namespace": namespace, "containers": list(containers)})

    @property
    def socket(self) -> Path:
        return self.directory / "pod-resources" / "kubelet.sock"

    def __enter__(self) -> FakeKubelet:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._stopping = threading.Event()
        self._workers = ThreadPoolExecutor(4)
        self._server = grpc.server(self._workers)
        handlers = {"List": self._handler("List", self._list)}
        if self.get != "unimplemented":
            handlers["Get"] = self._handler("Get", self._get)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)])
        self._server.add_insecure_port(f"unix:{quote(str(self.socket))}")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.stop(0).wait()
        self._workers.shutdown()

    def _handler(self, name: str, answer: Callable[[Any, grpc.ServicerContext], Any]) -> Any:
        def serve(request: Any, context: grpc.ServicerContext) -> Any:
            self.calls.append(name)
            if self.hangs:
                self._stopping.wait(30)
            if self.refuses is not None:
                context.abort(self.refuses, "as the test wants")
            return answer(request, context)

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=MESSAGES[f"{name}PodResourcesRequest"].FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    def _list(self, request: Any, context: grpc.ServicerContext) -> Any:
        return MESSAGES["ListPodResourcesResponse"](pod_resources=self.pods)

    def _get(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.get == "disabled":
            context.abort(grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")
        for pod in self.pods:
            if (pod["namespace"], pod["name"]) == (request.pod_namespace, request.pod_name):
                return MESSAGES["GetPodResourcesResponse"](pod_resources=pod)
        name, namespace = request.pod_name, request.pod_namespace
        return context.abort(grpc.StatusCode.UNKNOWN, f"pod {name} in namespace {namespace} not found")
