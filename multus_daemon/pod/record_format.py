"""The format of a record on disk.

A file holds lines of JSON, `{"format":1,"sha256":"<hex>","record":{...}}`; the sum is over the bytes of `record`, from
`{` to `}`. Configurations are in base64, byte for byte; results in the form of the newest CNI version. Each line is a
whole record; the last line that is not cut off counts, and the first is never cut off (`pod.store`).

A line `{"leaving":[["<network>","<interface>"],...]}` marks attachments of the line before it: their DEL has begun. An
older daemon ignores it.

A newer daemon raises `FORMAT` only if an older one would misread the record; unknown keys are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import msgspec

from multus_daemon.kernel.netns import COOKIE_MARK
from multus_daemon.spec.attachment import LEAVING, Attachment, ClaimedDevice, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Result, Route

FORMAT: Final = 1


class RecordFormatError(ValueError):
    """The bytes are not a record that this version can read; the message says why."""


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    sha256: str
    record: msgspec.Raw


class _StoredAttachment(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    name: str
    config: bytes
    ifname: IfName
    cni_version: str
    """The CNI version that the plugins were called with; it differs from the configuration's if that was overridden."""
    cluster_network: bool = False
    capability_args: dict[str, Any] = {}
    cni_args: tuple[tuple[str, str], ...] = ()
    result: Result | None = None
    observed: Result | None = None
    hot_plugged: bool = False
    leaving: bool = False
    detached: bool = False
    auxiliary: bool = False
    default_route: tuple[str, ...] | None = None
    selection: str = ""
    replaced_routes: tuple[Route, ...] = ()
    resource_name: str = ""
    device_id: str = ""
    claimed: ClaimedDevice | None = None
    address_claim: str = ""
    served_by: dict[str, str] = {}


class _StoredRecord(msgspec.Struct, frozen=True, rename="camel"):
    container_id: ContainerId
    netns: str
    ifname: IfName
    pod_namespace: str
    pod_name: str
    pod_uid: str
    complete: bool
    created: float
    attachments: list[_StoredAttachment]
    deletes_failed: int = 0
    given_up: bool = False
    failing_since: float = 0.0
    netns_id: str = ""
    netns_cookie: str = ""
    """The namespace's cookie. It is not in `netns_id`, which a daemon that knows no cookies compares as a whole."""


class _Mark(msgspec.Struct, frozen=True):
    leaving: tuple[tuple[str, str], ...]


_MARK: Final = b'{"leaving":'
_SAME: Final = tuple(set(_StoredAttachment.__struct_fields__) - {"config", "cni_version"})
_SAME_OF_RECORD: Final = tuple(
    set(_StoredRecord.__struct_fields__) - {"container_id", "netns", "attachments", "netns_id", "netns_cookie"}
)
# Not made where they are used: msgspec lays a type out at its first use, which several threads cannot share.
_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode
_decode_record: Final = msgspec.json.Decoder(_StoredRecord).decode
_decode_mark: Final = msgspec.json.Decoder(_Mark).decode


def encode(record: ContainerRecord) -> bytes:
    """Return the record as a line without a newline."""
    netns_id, _, netns_cookie = record.netns_id.partition(COOKIE_MARK)
    attachments = [
        _StoredAttachment(
            config=item.config.raw, cni_version=item.config.cni_version, **{name: getattr(item, name) for name in _SAME}
        )
        for item in record.attachments
    ]
    body = msgspec.json.encode(
        _StoredRecord(
            container_id=record.sandbox.container_id,
            netns=record.sandbox.netns,
            attachments=attachments,
            netns_id=netns_id,
            netns_cookie=netns_cookie,
            **{name: getattr(record, name) for name in _SAME_OF_RECORD},
        )
    )
    return msgspec.json.encode(_Envelope(FORMAT, hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def encode_mark(leaving: Collection[tuple[str, str]]) -> bytes:
    """Return the line, without a newline, that marks these attachments (network, interface) as leaving."""
    return msgspec.json.encode(_Mark(tuple(leaving)))


def decode(data: bytes) -> ContainerRecord:
    """Return the last whole record in a file's content. Raises RecordFormatError, for the first line, without one."""
    first, *later = data.removesuffix(b"\n").split(b"\n")
    leaving: set[tuple[str, str]] = set()
    for line in reversed(later):
        # A crash cut the line off, before any client got an answer or any plugin ran DEL, or the container is gone.
        with contextlib.suppress(RecordFormatError, msgspec.MsgspecError, UnicodeDecodeError):
            if line.startswith(_MARK):
                leaving |= set(_decode_mark(line).leaving)
            else:
                return _decode_state(line).with_leaving(leaving)
    return _decode_state(first).with_leaving(leaving)


def _decode_state(data: bytes) -> ContainerRecord:
    try:
        envelope = _decode_envelope(data)
        if envelope.format > FORMAT:
            raise RecordFormatError(
                f"written by a newer version of the daemon: format {envelope.format}, this one reads up to {FORMAT}"
            )
        if envelope.format < 1:
            raise RecordFormatError(f"the file has format {envelope.format}, which no daemon writes")
        body = bytes(envelope.record)
        if hashlib.sha256(body).hexdigest() != envelope.sha256:
            raise RecordFormatError("the checksum does not match the content")
        fields = _decode_record(body)
        return ContainerRecord(
            sandbox=Sandbox(fields.container_id, fields.netns),
            attachments=tuple(map(_decode_attachment, fields.attachments)),
            netns_id=f"{fields.netns_id}{COOKIE_MARK}{fields.netns_cookie}" if fields.netns_cookie else fields.netns_id,
            **{name: getattr(fields, name) for name in _SAME_OF_RECORD},
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CniError) as error:
        raise RecordFormatError(str(error)) from error


def _decode_attachment(fields: _StoredAttachment) -> Attachment:
    config = conf.parse(fields.config)
    if config.cni_version != fields.cni_version:
        config = replace(config, cni_version=fields.cni_version)
    values = {name: getattr(fields, name) for name in _SAME}
    # Earlier versions marked some attachments so.
    values["leaving"] = fields.leaving or fields.detached or fields.selection == LEAVING
    return Attachment(config=config, **values)
