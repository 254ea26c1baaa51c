"""Answer the admission webhook by the rules of `validate`: refuse unusable networks, warn about pods.

A change outside of a network's `spec` is never refused: otherwise an invalid network that is older than the webhook
could not be labelled or deleted. Only what the rules read is decoded: the rest of an object may have megabytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from multus_daemon.metrics.declared import Outcome
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.nad import selection
from multus_tools import deadlines, validate
from multus_tools.validate import Finding, Networks
from multus_tools.validate.located import Place

T = TypeVar("T")

API_VERSION: Final = "admission.k8s.io/v1"
_UNPROCESSABLE: Final = 422
# The API server truncates longer warnings, and drops warnings above 4096 characters in total.
_WARNING_MAX: Final = 256
_WARNINGS_MAX: Final = 16
_MESSAGE_MAX: Final = 4096
# As kube-apiserver writes it, in front of all that a user chooses.
_HEAD: Final = re.compile(rb'"uid"\s*:\s*"([\w-]+)"\s*,\s*"kind"\s*:\s*\{[^{}]*"kind"\s*:\s*"(\w+)"')
_HEAD_MAX_BYTES: Final = 4096
_READ: Final = (
    *("apiVersion", "kind", "request", "uid", "object", "oldObject", "metadata", "name", "namespace", "generateName"),
    *("deletionTimestamp", "annotations", "spec", "config", "hostNetwork", "template", "jobTemplate"),
)
"""The keys of a review, and of the object in it, that the rules read."""
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

Answer = tuple[bytes, str, Outcome]
"""The AdmissionReview with the answer, the kind of the object, and the outcome for the metrics."""


def answer(review: bytes, settings: Settings, others: Networks) -> Answer:
    """Answer a review; `others`: the networks that exist in the cluster.

    Raises JsonError if `review` is not an AdmissionReview, Interrupted.
    """
    try:
        parsed = _read(review)
    except (ValueError, RecursionError) as error:
        if found := unread(review, f"the object can't be read: {error}"):
            return found
        raise gojson.JsonError(str(error)) from error
    version, review_kind = gojson.get_str(parsed, "apiVersion"), gojson.get_str(parsed, "kind")
    request = checked(version, review_kind, gojson.get_object(parsed, "request"))
    uid = gojson.get_str(request, "uid") or ""
    kind = gojson.get_str(gojson.get_object(request, "kind") or {}, "kind") or ""
    item = gojson.get_object(request, "object") or {}
    metadata = gojson.get_object(item, "metadata") or {}
    findings: list[Finding] = []
    if item and not metadata.get("deletionTimestamp"):
        # The object may lack both: the API server takes them from the path, or generates the name later.
        named = {"namespace": gojson.get_str(request, "namespace") or "default", **metadata}
        if not named.get("name"):
            named["name"] = (gojson.get_str(request, "name") or f"{metadata.get('generateName') or 'object-'}x")[:63]
        seconds = math.inf if kind == selection.KIND else deadlines.WEBHOOK_WARNINGS_SECONDS
        findings = validate.of_object({**item, "metadata": named}, settings, others, seconds=seconds).sorted()
    old = gojson.get_object(request, "oldObject")
    return _answer(uid, kind, findings, may_refuse=old is None or old.get("spec") != item.get("spec"))


def unread(beginning: bytes, problem: str) -> Answer | None:
    """Answer a review that is too large or malformed, by its beginning and the problem; None if it is not a review.

    A network is refused, since its `spec` is a new one: no API server stores an object that can't be read.
    """
    if (head := _HEAD.search(beginning, 0, _HEAD_MAX_BYTES)) is None:
        return None
    finding = Finding("", Place(1, 1), "error", "object", "", "", problem, "")
    return _answer(head[1].decode(), head[2].decode(), [finding], may_refuse=True)


def checked(version: str | None, kind: str | None, request: T | None) -> T:
    """Return `request`, checking that `version` and `kind` are those of an AdmissionReview. Raises JsonError."""
    if (version, kind) != (API_VERSION, "AdmissionReview"):
        raise gojson.JsonError(f"{API_VERSION} AdmissionReview is needed, not {version} {kind}")
    if request is None:
        raise gojson.JsonError("request: an object is needed, not null")
    return request


def body(response: dict[str, Any], warnings: Sequence[str]) -> bytes:
    """Return the AdmissionReview with the response, and with as many warnings as the API server passes on."""
    if warnings:
        response["warnings"] = [
            text if len(text) <= _WARNING_MAX else f"{text[: _WARNING_MAX - 3]}..." for text in warnings[:_WARNINGS_MAX]
        ]
    return gojson.dumps({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}, sort_keys=False)


def _read(raw: bytes | msgspec.Raw) -> dict[str, Any]:
    """Return the object with only the keys in _READ, at all levels. Raises ValueError, RecursionError."""
    values: dict[str, Any] = {}
    for key, value in _fields(raw).items():
        if key in _READ:
            is_read_whole = key == "annotations" or bytes(memoryview(value)[:1]) != b"{"
            values[key] = msgspec.json.decode(value) if is_read_whole else _read(value)
    return values


def _answer(uid: str, kind: str, findings: Sequence[Finding], *, may_refuse: bool) -> Answer:
    errors = [finding for finding in findings if finding.severity == "error"]
    refused = kind == selection.KIND and bool(errors) and may_refuse
    response: dict[str, Any] = {"uid": uid, "allowed": not refused}
    if refused:
        message = "; ".join(map(_text, errors))[:_MESSAGE_MAX]
        response["status"] = {"status": "Failure", "code": _UNPROCESSABLE, "reason": "Invalid", "message": message}
        findings = [finding for finding in findings if finding.severity != "error"]
    warnings = list(map(_text, findings[:_WARNINGS_MAX]))
    return body(response, warnings), kind, "refused" if refused else "warned" if findings else "success"


def _text(finding: Finding) -> str:
    where = f"{finding.file} line {finding.place.line}, column {finding.place.column}: " if finding.file else ""
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{where}{finding.problem}{advice}"
