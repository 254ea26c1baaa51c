"""Answer the admission webhook by the rules of `validate`: refuse unusable networks, warn about pods.

A change outside of a network's `spec` is never refused. Otherwise a network that is older than the webhook could not
be labelled or deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.diagnosis import validate
from multus_daemon.diagnosis.validate import Finding
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition

API_VERSION: Final = "admission.k8s.io/v1"
_UNPROCESSABLE: Final = 422
# The API server truncates longer warnings, and drops warnings above 4096 characters in total.
_WARNING_MAX: Final = 256
_WARNINGS_MAX: Final = 16
_MESSAGE_MAX: Final = 4096


def answer(
    review: bytes, settings: Settings, others: Mapping[tuple[str, str], NetworkAttachmentDefinition]
) -> tuple[bytes, str, str]:
    """Return the answering AdmissionReview, the kind of the object, and `allowed`, `warned` or `refused`.

    `others`: the existing NetworkAttachmentDefinitions. Raises JsonError if `review` is not an AdmissionReview.
    """
    parsed = gojson.loads_object(review)
    version, review_kind = gojson.get_str(parsed, "apiVersion"), gojson.get_str(parsed, "kind")
    if (version, review_kind) != (API_VERSION, "AdmissionReview"):
        raise gojson.JsonError(f"{API_VERSION} AdmissionReview is needed, not {version} {review_kind}")
    request = gojson.get_object(parsed, "request")
    if request is None:
        raise gojson.JsonError("request: an object is needed, not null")
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
        data = gojson.dumps({**item, "metadata": named}, sort_keys=False)
        findings = validate.of_object(data, settings, others).sorted()
    errors = [finding for finding in findings if finding.severity == "error"]
    old = gojson.get_object(request, "oldObject")
    is_changed = old is None or old.get("spec") != item.get("spec")
    refused = kind == selection.KIND and bool(errors) and is_changed
    response: dict[str, Any] = {"uid": uid, "allowed": not refused}
    if refused:
        message = "; ".join(map(_text, errors))[:_MESSAGE_MAX]
        response["status"] = {"status": "Failure", "code": _UNPROCESSABLE, "reason": "Invalid", "message": message}
        findings = [finding for finding in findings if finding.severity != "error"]
    if findings:
        texts = [_text(finding) for finding in findings[:_WARNINGS_MAX]]
        response["warnings"] = [
            text if len(text) <= _WARNING_MAX else f"{text[: _WARNING_MAX - 3]}..." for text in texts
        ]
    body = gojson.dumps({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}, sort_keys=False)
    return body, kind, "refused" if refused else "warned" if findings else "allowed"


def _text(finding: Finding) -> str:
    where = f"{finding.file} line {finding.place.line}, column {finding.place.column}: " if finding.file else ""
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{where}{finding.problem}{advice}"
