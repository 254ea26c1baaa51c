"""The devices of pods and the device-info file of each attachment (NPWG device-info SPEC 4.2 and 5.1)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni.errors import CniError, IoFailureError
from multus_daemon.spec.nad.device_info import DeviceInfo
from multus_daemon.spec.ports import DeviceFiles, DeviceSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of the node's pods. The methods do nothing for an attachment without a device-info file."""

    source: DeviceSource
    files: DeviceFiles

    def prepare(self, attachment: Attachment) -> None:
        """Before the ADD, copy the device plugin's file to the attachment's. Raises IoFailureError (5)."""
        if path := attachment.info_file:
            try:
                self.files.prepare(attachment, path)
            except OSError as error:
                raise IoFailureError(
                    f"device-info file can't be prepared: {error}", f"network {attachment.name}: {path}"
                ) from error

    def info(self, attachment: Attachment) -> DeviceInfo | None:
        """After the ADD, read the file; None if it is missing or unusable, which is logged."""
        path = attachment.info_file
        if not path:
            return None
        try:
            return self.files.read(path)
        except (CniError, OSError) as error:
            log.warning("network %s: its device-info is left out of the status: %s (%s)", attachment.name, error, path)
            return None

    def remove(self, attachment: Attachment) -> None:
        """After the DEL, remove the file. A file that stays does no harm: the failure is logged."""
        if path := attachment.info_file:
            try:
                self.files.remove(path)
            except OSError as error:
                log.warning("network %s: its device-info file is not removed: %s", attachment.name, error)
