"""The kubelet's podresources API, `v1.PodResourcesLister`, over its unix socket.

Format: kubernetes/kubelet `pkg/apis/podresources/v1/api.proto`, the used parts; protobuf ignores the other fields. The
messages are built here and not generated: generated code works only with certain versions of the protobuf library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from multus_daemon import deadlines
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.ports import DevicesUnavailableError

MESSAGE_MAX_BYTES: Final = 16 * 1024 * 1024  # upstream's limit
# Message -> its fields: name, number, type; `*` marks a repeated field.
_MESSAGES: Final[Mapping[str, tuple[tuple[str, int, str], ...]]] = {
    "GetPodResourcesRequest": (("pod_name", 1, "string"), ("pod_namespace", 2, "string")),
    "GetPodResourcesResponse": (("pod_resources", 1, "PodResources"),),
    "ListPodResourcesRequest": (),
    "ListPodResourcesResponse": (("pod_resources", 1, "*PodResources"),),
    "PodResources": (("name", 1, "string"), ("namespace", 2, "string"), ("containers", 3, "*ContainerResources")),
    "ContainerResources": (("devices", 2, "*ContainerDevices"), ("dynamic_resources", 5, "*DynamicResource")),
    "ContainerDevices": (("resource_name", 1, "string"), ("device_ids", 2, "*string")),
    "DynamicResource": (("claim_name", 2, "string"), ("claim_resources", 4, "*ClaimResource")),
    "ClaimResource": (("cdi_devices", 1, "*CDIDevice"),),
    "CDIDevice": (("name", 1, "string"),),
}


def _make_messages() -> dict[str, type[Any]]:
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        descriptor = file.message_type.add(name=message)
        for name, number, kind in fields:
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            added = descriptor.field.add(name=name, number=number, label=label, type=kinds.TYPE_STRING)
            if not kind.endswith("string"):
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".v1.{kind.removeprefix('*')}"
    # Our own pool: another library in the process may define the same messages.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}")) for name in _MESSAGES}


_CLASSES: Final = _make_messages()


async def ask(socket: Path, pod: Pod) -> list[tuple[str, str]]:
    """Return (resource or claim, device id) of every device of the pod's containers; empty for an unknown pod.

    The device id of a claim is the last part of a CDI device's name, `vendor.com/class=device`; names of another form
    are ignored. Raises DevicesUnavailableError.
    """
    options = (
        ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_http_proxy", 0),
        # One channel per call: a shared one would wait for its backoff after a restart of the kubelet.
        ("grpc.use_local_subchannel_pool", 1),
    )
    try:
        async with (
            asyncio.timeout(deadlines.KUBELET_DEVICES_SECONDS),
            grpc.aio.insecure_channel(f"unix:{quote(str(socket))}", options=options) as channel,
        ):
            resources = await _pod_resources(channel, pod)
    except grpc.aio.AioRpcError as error:
        raise DevicesUnavailableError(
            f"the kubelet's podresources API failed: {error.code().name}: {error.details()} ({socket})"
        ) from error
    except TimeoutError as error:
        raise DevicesUnavailableError(
            f"the kubelet's podresources API did not answer within {deadlines.KUBELET_DEVICES_SECONDS:g} s ({socket})"
        ) from error
    return [pair for container in resources.containers for pair in _devices(container)] if resources else []


async def _pod_resources(channel: grpc.aio.Channel, pod: Pod) -> Any | None:
    """Return the PodResources of the pod, None if the kubelet has none."""
    try:
        answer = await _call(channel, "Get", pod_name=pod.name, pod_namespace=pod.namespace)
        return answer.pod_resources
    except grpc.aio.AioRpcError as error:
        # UNIMPLEMENTED: a kubelet before 1.27. UNKNOWN: its feature gate KubeletPodResourcesGet is off, or it does not
        # know the pod; only the messages differ. List distinguishes the cases.
        if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN):
            raise
    answer = await _call(channel, "List")
    named = [item for item in answer.pod_resources if (item.namespace, item.name) == (pod.namespace, pod.name)]
    if len(named) > 1:
        # The answer has no UID. A pod and its successor must not share devices.
        raise DevicesUnavailableError(
            f"the kubelet lists {len(named)} pods named {pod}: an old one is still terminating, wait for its end"
        )
    return named[0] if named else None


async def _call(channel: grpc.aio.Channel, name: str, **fields: str) -> Any:
    method = channel.unary_unary(
        f"/v1.PodResourcesLister/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=_CLASSES[f"{name}PodResourcesResponse"].FromString,
    )
    return await method(_CLASSES[f"{name}PodResourcesRequest"](**fields))


def _devices(container: Any) -> Iterable[tuple[str, str]]:
    for devices in container.devices:
        for device_id in devices.device_ids:
            yield devices.resource_name, device_id
    for claim in container.dynamic_resources:
        for resource in claim.claim_resources:
            for device in resource.cdi_devices:
                kind, _, device_id = device.name.partition("=")
                if kind and device_id and "=" not in device_id:
                    yield claim.claim_name, device_id
