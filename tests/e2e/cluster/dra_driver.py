"""A DRA driver on a real node: it registers with the kubelet, publishes its devices, and prepares claims.

It does what sigs.k8s.io/dra-example-driver does, with the devices and attributes that a test wants: containers get an
environment variable for each device, by the Container Device Interface (CDI). Formats: kubernetes/kubelet
`pkg/apis/pluginregistration/v1` and `pkg/apis/dra/v1`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from tests.claims import API, Manifest, resource_slice
from tests.e2e.cluster.real_node import RealNode
from tests.fakes.protobuf import messages

_REGISTRATION: Final = "pluginregistration.Registration"
_PLUGIN: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_CDI: Final = "/run/cdi"
_SECONDS: Final = 30.0
_MESSAGES: Final = messages(
    {
        "InfoRequest": [],
        "PluginInfo": ["1 type string", "2 name string", "3 endpoint string", "4 supported_versions *string"],
        "RegistrationStatus": ["1 plugin_registered bool", "2 error string"],
        "RegistrationStatusResponse": [],
        "Claims": ["1 claims *Claim"],
        "Claim": ["1 namespace string", "2 uid string", "3 name string"],
        # A map from UIDs, as it is on the wire.
        "Answers": ["1 claims *Answer"],
        "Answer": ["1 key string", "2 value Prepared"],
        "Prepared": ["1 devices *Device", "2 error string"],
        "Device": [
            "1 request_names *string",
            "2 pool_name string",
            "3 device_name string",
            "4 cdi_device_ids *string",
        ],
    }
)


class DraDriver:
    """Use it as a context manager; the kubelet must run. Inside of it the scheduler can allocate the devices."""

    def __init__(self, node: RealNode, name: str, *devices: Manifest, extended_resource: str = "") -> None:
        """`name`: of the driver and of the class of its devices. `devices`: as a ResourceSlice has them.

        `extended_resource`: the name by which pods can ask for the devices without a claim.
        """
        self._node, self.name = node, name
        self._devices, self._extended_resource = devices, extended_resource
        root = node.layout.kubelet_dir
        self._endpoint = f"{root}/plugins/{name}/dra.sock"
        self._sockets = [node.machine.path(path) for path in (self._endpoint, f"{root}/plugins_registry/{name}.sock")]
        self._cdi = node.machine.path(f"{_CDI}/{name}.json")
        self._registered = threading.Event()

    def __enter__(self) -> DraDriver:
        self._workers = ThreadPoolExecutor(4)
        self._server = grpc.server(self._workers)
        services: dict[str, dict[str, tuple[Callable[[Any], Any], str]]] = {
            _REGISTRATION: {
                "GetInfo": (self._info, "InfoRequest"),
                "NotifyRegistrationStatus": (self._told, "RegistrationStatus"),
            },
            _PLUGIN: {
                "NodePrepareResources": (self._prepare, "Claims"),
                "NodeUnprepareResources": (self._unprepare, "Claims"),
            },
        }
        for service, methods in services.items():
            handlers = {method: _handler(answer, _MESSAGES[kind]) for method, (answer, kind) in methods.items()}
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        self._node.machine.path(_CDI).mkdir(exist_ok=True)
        self._cdi.write_text(json.dumps(self._specification()))
        for socket in self._sockets:
            socket.parent.mkdir(parents=True, exist_ok=True)
            self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()
        # Before that the kubelet would delete the slices: they would be of a driver that is gone.
        assert self._registered.wait(_SECONDS), f"the kubelet has not registered {self.name}"
        self._publish()
        return self

    def __exit__(self, *_: object) -> None:
        self._node.server.delete(API, "ResourceSlice", self.name)
        self._node.server.delete(API, "DeviceClass", self.name)
        self._server.stop(None).wait(_SECONDS)
        self._workers.shutdown()
        self._cdi.unlink()

    def _publish(self) -> None:
        selector = {"cel": {"expression": f"device.driver == '{self.name}'"}}
        spec: Manifest = {"selectors": [selector]}
        if self._extended_resource:
            spec["extendedResourceName"] = self._extended_resource
        kind = {"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": self.name}, "spec": spec}
        published = resource_slice(
            self.name, *self._devices, node=self._node.name, driver=self.name, pool=self._node.name
        )
        self._node.server.apply(kind, published)

    def _specification(self) -> Manifest:
        """Its devices, as the container runtime reads them."""
        devices = [
            {"name": device["name"], "containerEdits": {"env": [f"DEVICE_{number}={device['name']}"]}}
            for number, device in enumerate(self._devices)
        ]
        return {"cdiVersion": "0.6.0", "kind": f"{self.name}/device", "devices": devices}

    def _info(self, _: Any) -> Any:
        return _MESSAGES["PluginInfo"](
            type="DRAPlugin", name=self.name, endpoint=self._endpoint, supported_versions=["v1.DRAPlugin"]
        )

    def _told(self, status: Any) -> Any:
        assert status.plugin_registered, status.error
        self._registered.set()
        return _MESSAGES["RegistrationStatusResponse"]()

    def _prepare(self, request: Any) -> Any:
        """Answer with the devices that the scheduler has allocated."""
        answers = []
        for item in request.claims:
            claim = self._node.server.get(API, "ResourceClaim", item.name, item.namespace)
            results = claim["status"]["allocation"]["devices"]["results"]
            devices = [
                {
                    "request_names": [found["request"]],
                    "pool_name": found["pool"],
                    "device_name": found["device"],
                    "cdi_device_ids": [f"{self.name}/device={found['device']}"],
                }
                for found in results
                if found["driver"] == self.name
            ]
            answers.append({"key": item.uid, "value": {"devices": devices}})
        return _MESSAGES["Answers"](claims=answers)

    def _unprepare(self, request: Any) -> Any:
        return _MESSAGES["Answers"](claims=[{"key": item.uid, "value": {}} for item in request.claims])


def _handler(answer: Callable[[Any], Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        lambda message, _: answer(message),
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
