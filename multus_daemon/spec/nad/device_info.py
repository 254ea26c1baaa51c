"""Device information files (NPWG device-info SPEC 1.1.0): a device plugin's description of a pod's device."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES

_DRIVER: Final = ("vhost", "virtio")
_PCI_EXTRAS: Final = ("pci-address", "pf-pci-address", "representor-device")
# Type -> its keys in the order of the Go structs, and its required keys.
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


class DeviceInfoError(InvalidNetworkConfigError, origin=Origin.PLUGIN):
    """A device-info file is invalid."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"device-info: {problem}")


@conf.reads("device-info", Origin.PLUGIN)
def parse(data: bytes) -> dict[str, Any]:
    """Read a file's content; return the keys that the network-status shows, in the order of the Go structs.

    Raises DecodingFailureError (6) and InvalidNetworkConfigError (7).
    """
    fields = gojson.loads_object(data)
    kind = gojson.get_str(fields, "type") or ""
    if kind not in _KEYS:
        raise DeviceInfoError(f"type {kind[:80]!r} is none of {', '.join(_KEYS)}")
    version = gojson.get_str(fields, "version") or ""
    if not _VERSION.fullmatch(version):
        raise DeviceInfoError(f"version {version[:80]!r} is not of the form 1.y.z")
    given = gojson.get_object(fields, kind)
    if given is None:
        raise DeviceInfoError(f"the field {kind!r} is missing, which type {kind} needs")
    device = {key: value for key in _KEYS[kind][0] if (value := gojson.get_str(given, key))}
    _check(kind, device)
    return {"type": kind, "version": version, kind: device}


def _check(kind: str, device: Mapping[str, str]) -> None:
    for key in _KEYS[kind][1]:
        if key not in device:
            raise DeviceInfoError(f"{kind}.{key} is missing")
    for key, value in device.items():
        allowed = _ALLOWED.get((kind, key))
        if allowed and value not in allowed:
            raise DeviceInfoError(f"{kind}.{key} {value[:80]!r} is none of {', '.join(allowed)}")
        if key in ("pci-address", "pf-pci-address") and not _PCI_ADDRESS.fullmatch(value):
            raise DeviceInfoError(f"{kind}.{key} {value[:80]!r} is not a PCI address")


def device_plugin_file(resource_name: str, device_id: str) -> str:
    """Return the name of the file that a device plugin writes; `/` becomes `-`, as in NPWG's client library."""
    return f"{resource_name}-{device_id}-device.json".replace("/", "-")


def cni_file(network: str, container_id: str, ifname: str) -> str:
    """Return upstream's name of the file that a CNI plugin writes; `network` is `<namespace>/<name>`.

    A name that is too long for a file system is cut and ends in a hash of the whole.
    """
    name = f"{network}-{container_id}_{ifname}".replace("/", "-")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= FILE_NAME_MAX_BYTES:
        return name
    ending = hashlib.sha256(encoded).hexdigest()[:32]
    return f"{encoded[: FILE_NAME_MAX_BYTES - len(ending) - 1].decode('utf-8', 'ignore')}-{ending}"
