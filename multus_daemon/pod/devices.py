"""Devices for the networks that need one: who gets which, and the device-info file of each attachment.

Rules: NPWG multi-network SPEC 3.3 (resourceName), device-info SPEC 4.2 and 5.1; the keys are upstream's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import Network
from multus_daemon.spec.attachment import Attachment, Pod
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, IoFailureError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad.device_info import DeviceInfo
from multus_daemon.spec.ports import DeviceFiles

log = logging.getLogger(__name__)

# Capabilities: NPWG multi-network SPEC 4.1.2.1.11, device-info SPEC 5.1.
DEVICE_ID: Final = "deviceID"
_INFO_FILE: Final = "CNIDeviceInfoFile"
_SHOWN_NAMES: Final = 10


def fields(device_id: str) -> dict[str, str]:
    """Return what each plugin's object gets for its device, as upstream has it."""
    return {DEVICE_ID: device_id, "pciBusID": device_id} if device_id else {}


def deal(pod: Pod, networks: Sequence[Network], allocated: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the device of each network, empty for none: the n-th network of a resource has its n-th device. Pure.

    A requested device id counts if the network has no resource, or the resource has no more devices. `allocated`: ids
    by resource or claim. Raises InvalidNetworkConfigError (7) if there are too few.
    """
    dealt: set[tuple[str, str]] = set()
    return [_device_for(network, pod, allocated, dealt) for network in networks]


def with_info_file(files: DeviceFiles, attachment: Attachment, container_id: ContainerId) -> Attachment:
    """The attachment with the path of its device-info file, if its plugins or its device have use for one."""
    given = {key: value for key, value in attachment.capability_args.items() if key != _INFO_FILE}
    if attachment.device_id or _INFO_FILE in attachment.config.capabilities:
        given[_INFO_FILE] = files.path(attachment, container_id)
    return replace(attachment, capability_args=given)


def prepare(engine: Engine, attachment: Attachment) -> None:
    """Before the ADD of the attachment's plugins: its device-info file is what the device plugin has told.

    Raises IoFailureError (5).
    """
    if path := _info_file(attachment):
        try:
            engine.device_files.prepare(attachment, path)
        except OSError as error:
            raise IoFailureError(
                f"device-info file can't be prepared: {error}", f"network {attachment.name}: {path}"
            ) from error


def info(engine: Engine, attachment: Attachment) -> DeviceInfo | None:
    """After the ADD: what the file says; None where it is not there or not to be used, which the log tells then."""
    path = _info_file(attachment)
    if not path:
        return None
    try:
        return engine.device_files.read(path)
    except (CniError, OSError) as error:
        log.warning("network %s: its device-info is left out of the status: %s (%s)", attachment.name, error, path)
        return None


def remove(engine: Engine, attachment: Attachment) -> None:
    """After the DEL. The file alone does no harm: that it can't be removed is for the log."""
    if path := _info_file(attachment):
        try:
            engine.device_files.remove(path)
        except OSError as error:
            log.warning("network %s: its device-info file is not removed: %s", attachment.name, error)


def _info_file(attachment: Attachment) -> str:
    path = attachment.capability_args.get(_INFO_FILE)
    return path if isinstance(path, str) else ""


def _device_for(network: Network, pod: Pod, allocated: Mapping[str, Sequence[str]], dealt: set[tuple[str, str]]) -> str:
    """The next device of the network's resource, kept in `dealt`, else the one that was asked for, else empty.

    `dealt`: resource or claim, and device, of those that other networks of the pod have.
    """
    asked = network.capability_args.get(DEVICE_ID)
    resource = network.resource_name
    if not resource:
        return asked if isinstance(asked, str) else ""
    # A pod that has a claim by a template knows it by the name in its own spec, or by that of the template; the
    # object's name is generated.
    keys = (resource,) if resource in allocated else pod.claims.get(resource, ())
    devices = [(key, device) for key in keys for device in allocated.get(key, ())]
    for device in devices:
        if device not in dealt:
            dealt.add(device)
            return device[1]
    if isinstance(asked, str) and asked and asked not in (device for _, device in devices):
        return asked
    has = f"has {len(devices)} of them, and network {network.name} is number {len(devices) + 1} that needs one"
    if not devices:
        has = f"has none, and network {network.name} needs one"
    raise InvalidNetworkConfigError(
        f"not enough devices of {resource}: the pod {has}",
        f"its containers must ask for them; they have devices of: {_shown(allocated)}",
    )


def _shown(allocated: Mapping[str, Sequence[str]]) -> str:
    names = sorted(allocated)
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "") or "nothing"
