"""Device information files (NPWG device-info SPEC 1.1.0): what a device plugin tells of a device in a pod."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES

_DRIVER: Final = ("vhost", "virtio")
_PCI_EXTRAS: Final = ("pci-address", "pf-pci-address", "representor-device")
# Type -> its keys in the order of the Go structs, and which of them are required.
_KEYS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "pci": (("pci-address", "vhost-net", "rdma-device", "pf-pci-address", "representor-device"), ("pci-address",)),
    "vdpa": (("parent-device", "driver", "path", *_PCI_EXTRAS), ("parent-device", "driver", "path")),
    "vhost-user": (("mode", "path"), ("mode", "path")),
    "memif": (("role", "path", "mode"), ("role", "path", "mode")),
}
_ALLOWED: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("vdpa", "driver"): _DRIVER,
    ("vhost-user", "mode"): ("client", "server"),
    ("memif", "role"): ("master", "slave"),
    # The specification says inject-punt, the client library writes punt.
    ("memif", "mode"): ("ethernet", "ip", "inject-punt", "punt"),
}
_PCI_ADDRESS: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_VERSION: Final = re.compile(r"1\.[0-9]+\.[0-9]+")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device."""

    type: str
    """pci, vdpa, vhost-user or memif."""
    version: str
    """Of the specification that the file follows."""
    device: Mapping[str, str]
    """The keys of its type."""
    fields: Mapping[str, Any]
    """The whole object as it was written."""

    def to_object(self) -> dict[str, Any]:
        """For the network-status: what the specification knows, in the order of the Go structs."""
        device = {key: self.device[key] for key in _KEYS[self.type][0] if key in self.device}
        return {"type": self.type, "version": self.version, self.type: device}


def parse(data: bytes) -> DeviceInfo:
    """The device in a file's content. Raises DecodingFailureError (6) and InvalidNetworkConfigError (7)."""
    try:
        fields = gojson.loads_object(data)
        kind = gojson.get_str(fields, "type") or ""
        if kind not in _KEYS:
            raise InvalidNetworkConfigError(f"device-info: type {kind[:80]!r} is none of {', '.join(_KEYS)}")
        version = gojson.get_str(fields, "version") or ""
        if not _VERSION.fullmatch(version):
            raise InvalidNetworkConfigError(f"device-info: version {version[:80]!r} is not of the form 1.y.z")
        given = gojson.get_object(fields, kind)
        if given is None:
            raise InvalidNetworkConfigError(f"device-info: type is {kind}, and there is no object {kind!r}")
        found = ((key, gojson.get_str(given, key)) for key in _KEYS[kind][0])
        device = {key: value for key, value in found if value}
    except gojson.JsonError as error:
        raise DecodingFailureError(f"device-info: {error}") from error
    _check(kind, device)
    return DeviceInfo(kind, version, device, fields)


def _check(kind: str, device: Mapping[str, str]) -> None:
    for key in _KEYS[kind][1]:
        if key not in device:
            raise InvalidNetworkConfigError(f"device-info: {kind}.{key} is missing")
    for key, value in device.items():
        allowed = _ALLOWED.get((kind, key))
        if allowed and value not in allowed:
            raise InvalidNetworkConfigError(f"device-info: {kind}.{key} {value[:80]!r} is none of {', '.join(allowed)}")
        if key in ("pci-address", "pf-pci-address") and not _PCI_ADDRESS.fullmatch(value):
            raise InvalidNetworkConfigError(f"device-info: {kind}.{key} {value[:80]!r} is no PCI address")


def device_plugin_file(resource_name: str, device_id: str) -> str:
    """The name of the file that a device plugin writes; `/` in both parts becomes `-`, as the client library does."""
    return f"{resource_name}-{device_id}-device.json".replace("/", "-")


def cni_file(network: str, container_id: str, ifname: str) -> str:
    """The name of the file of one attachment; `network` is `<namespace>/<name>`, as upstream names it.

    One that no file system takes, of two long names, ends in its hash: plugins are told the path, not how it is made.
    """
    name = f"{network}-{container_id}_{ifname}".replace("/", "-")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= FILE_NAME_MAX_BYTES:
        return name
    ending = hashlib.sha256(encoded).hexdigest()[:32]
    return f"{encoded[: FILE_NAME_MAX_BYTES - len(ending) - 1].decode('utf-8', 'ignore')}-{ending}"
