"""A container runtime's socket with the two calls by which the namespace of a pod is found: messages by hand.

k8s.io/cri-api pkg/apis/runtime/v1/api.proto: ListPodSandbox by a label, and PodSandboxStatus with `verbose`, whose
`info` has the sandbox's runtime specification as JSON.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

_ITEMS, _ID, _INFO, _KEY, _VALUE = 1, 1, 2, 1, 2
"""Numbers of the fields."""


def _field(number: int, value: bytes) -> bytes:
    """A field that has a length."""
    head, size = bytes([number << 3 | 2]), len(value)
    while size > 0x7F:
        head += bytes([size & 0x7F | 0x80])
        size >>= 7
    return head + bytes([size]) + value


@dataclass
class FakeRuntime:
    """Use it as a context manager. `calls` has the method of each call."""

    socket: Path
    sandboxes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Sandbox id and path of the network namespace by the pod's UID."""
    calls: list[str] = field(default_factory=list)

    def __enter__(self) -> FakeRuntime:
        self._workers = ThreadPoolExecutor(2)
        self._server = grpc.server(self._workers)
        # Without a serializer a message is its bytes.
        handlers = {
            "ListPodSandbox": grpc.unary_unary_rpc_method_handler(self._list),
            "PodSandboxStatus": grpc.unary_unary_rpc_method_handler(self._status),
        }
        generic = grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers)
        self._server.add_generic_rpc_handlers([generic])
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(10)
        self._workers.shutdown()

    def _list(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        """The sandboxes of the pods whose UID is a label of the request's filter."""
        self.calls.append("ListPodSandbox")
        found = [sandbox for uid, (sandbox, _) in self.sandboxes.items() if uid.encode() in request]
        return b"".join(_field(_ITEMS, _field(_ID, sandbox.encode())) for sandbox in found)

    def _status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.calls.append("PodSandboxStatus")
        for sandbox, netns in self.sandboxes.values():
            if sandbox.encode() in request:
                namespaces = [{"type": "pid"}, {"type": "network", "path": netns}]
                info = json.dumps({"runtimeSpec": {"linux": {"namespaces": namespaces}}}).encode()
                return _field(_INFO, _field(_KEY, b"info") + _field(_VALUE, info))
        context.abort(grpc.StatusCode.NOT_FOUND, "no such sandbox")
        raise AssertionError
