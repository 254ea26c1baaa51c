"""The file format of our own container records: lines of JSON, each checked by a sum over its exact bytes.

`{"format":1,"sha256":"<hex>","record":{...}}`; the sum is over the bytes of `record`, from `{` to `}`. Configurations
are in base64, byte for byte; results in the form of the newest CNI version. Each line is the whole record as it was at
a time, the last one that is whole counts; there is a first one always, with its end (`pod.store`). Pure: bytes
in, values out.

A newer daemon raises `FORMAT` only where an older one would misread the record; new keys alone do not, unknown ones
are passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any, Final

import msgspec

from multus_daemon.kernel.netns import COOKIE_MARK
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result

FORMAT: Final = 1


class RecordFormatError(ValueError):
    """Bytes that are no record which this version can read; the message says why."""


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    sha256: str
    record: msgspec.Raw


class _Attachment(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    name: str
    config: bytes
    ifname: str
    cni_version: str
    """What the plugins were called with; differs from the configuration's own where it was overridden."""
    cluster_network: bool = False
    capability_args: dict[str, Any] = {}
    cni_args: list[tuple[str, str]] = []
    result: Result | None = None
    observed: Result | None = None
    hot_plugged: bool = False
    auxiliary: bool = False
    default_route: list[str] | None = None
    resource_name: str = ""
    device_id: str = ""
    served_by: dict[str, str] = {}


class _Record(msgspec.Struct, frozen=True, rename="camel"):
    container_id: str
    netns: str
    ifname: str
    pod_namespace: str
    pod_name: str
    pod_uid: str
    complete: bool
    created: float
    attachments: list[_Attachment]
    deletes_failed: int = 0
    given_up: bool = False
    failing_since: float = 0.0
    netns_id: str = ""
    netns_cookie: str = ""
    """Apart from the id: a daemon that knows no cookies compares that as a whole."""


# Not made where they are used: msgspec lays a type out at its first use, which several threads can't share.
_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode
_decode_record: Final = msgspec.json.Decoder(_Record).decode


def encode(record: ContainerRecord) -> bytes:
    """One state of the container, as a line without its end."""
    netns_id, _, netns_cookie = record.netns_id.partition(COOKIE_MARK)
    body = msgspec.json.encode(
        _Record(
            container_id=record.sandbox.container_id,
            netns=record.sandbox.netns,
            ifname=record.ifname,
            pod_namespace=record.pod_namespace,
            pod_name=record.pod_name,
            pod_uid=record.pod_uid,
            complete=record.complete,
            created=record.created,
            attachments=[_encode(attachment) for attachment in record.attachments],
            deletes_failed=record.deletes_failed,
            given_up=record.given_up,
            failing_since=record.failing_since,
            netns_id=netns_id,
            netns_cookie=netns_cookie,
        )
    )
    return msgspec.json.encode(_Envelope(FORMAT, hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def _encode(attachment: Attachment) -> _Attachment:
    return _Attachment(
        name=attachment.name,
        config=attachment.config.raw,
        ifname=attachment.ifname,
        cni_version=attachment.config.cni_version,
        cluster_network=attachment.cluster_network,
        capability_args=dict(attachment.capability_args),
        cni_args=list(attachment.cni_args),
        result=attachment.result,
        observed=attachment.observed,
        hot_plugged=attachment.hot_plugged,
        auxiliary=attachment.auxiliary,
        default_route=None if attachment.default_route is None else list(attachment.default_route),
        resource_name=attachment.resource_name,
        device_id=attachment.device_id,
        served_by=dict(attachment.served_by),
    )


def decode(data: bytes) -> ContainerRecord:
    """The last state in a file's content that is whole. Raises RecordFormatError where none is, for the first."""
    first, *later = data.split(b"\n")
    for line in reversed(later):
        # Cut off by a crash, or never on the disk: nobody had been told of it, or the container is gone.
        with contextlib.suppress(RecordFormatError):
            return _decode_state(line)
    return _decode_state(first)


def _decode_state(data: bytes) -> ContainerRecord:
    try:
        envelope = _decode_envelope(data)
        if envelope.format > FORMAT:
            raise RecordFormatError(
                f"written by a newer version of the daemon: format {envelope.format}, this one reads up to {FORMAT}"
            )
        if envelope.format < 1:
            raise RecordFormatError(f"format {envelope.format} has never been one")
        body = bytes(envelope.record)
        if hashlib.sha256(body).hexdigest() != envelope.sha256:
            raise RecordFormatError("its checksum does not fit its content")
        fields = _decode_record(body)
        return ContainerRecord(
            sandbox=Sandbox(ContainerId(fields.container_id), fields.netns),
            ifname=IfName(fields.ifname),
            pod_namespace=Namespace(fields.pod_namespace),
            pod_name=PodName(fields.pod_name),
            pod_uid=PodUid(fields.pod_uid),
            attachments=tuple(_decode(attachment) for attachment in fields.attachments),
            complete=fields.complete,
            created=fields.created,
            deletes_failed=fields.deletes_failed,
            given_up=fields.given_up,
            failing_since=fields.failing_since,
            netns_id=f"{fields.netns_id}{COOKIE_MARK}{fields.netns_cookie}" if fields.netns_cookie else fields.netns_id,
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CniError) as error:
        raise RecordFormatError(str(error)) from error


def _decode(fields: _Attachment) -> Attachment:
    config = conf.parse(fields.config)
    if config.cni_version != fields.cni_version:
        config = conf.with_version(config, fields.cni_version)
    return Attachment(
        name=fields.name,
        config=config,
        ifname=IfName(fields.ifname),
        cluster_network=fields.cluster_network,
        capability_args=fields.capability_args,
        cni_args=tuple(fields.cni_args),
        result=fields.result,
        observed=fields.observed,
        hot_plugged=fields.hot_plugged,
        auxiliary=fields.auxiliary,
        default_route=None if fields.default_route is None else tuple(fields.default_route),
        resource_name=fields.resource_name,
        device_id=fields.device_id,
        served_by=fields.served_by,
    )
