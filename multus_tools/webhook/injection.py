"""Answer the mutating webhook: add the requests for devices that a pod's networks need and its author left out.

Every pod is admitted. If a request can't be added, the answer has a warning; the validating webhook reports why.
"""

from __future__ import annotations

import base64
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import msgspec

from multus_daemon.runtime import deadline
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition, NetworkSelection
from multus_daemon.spec.ports import StoreUnavailableError
from multus_tools import deadlines, validate
from multus_tools.webhook import admission, device_requests
from multus_tools.webhook.admission import Answer
from multus_tools.webhook.device_requests import Pod

Key = tuple[str, str]
"""Namespace and name of a NetworkAttachmentDefinition."""
Find = Callable[[Set[Key]], Mapping[Key, NetworkAttachmentDefinition]]
"""Returns those of the given networks that exist. Blocks. Raises StoreUnavailableError."""
_NOT_ADDED: Final = "no request for a device is added"


log = logging.getLogger(__name__)


class _Kind(msgspec.Struct):
    kind: str = ""


class _Request(msgspec.Struct, rename="camel"):
    uid: str = ""
    kind: _Kind = msgspec.field(default_factory=_Kind)
    sub_resource: str = ""
    namespace: str = ""
    operation: str = ""
    object: msgspec.Raw = msgspec.Raw(b"{}")


class _Review(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    request: _Request | None = None


_decode_review: Final = msgspec.json.Decoder(_Review).decode
_decode_pod: Final = msgspec.json.Decoder(Pod).decode


def answer(review: bytes, settings: Settings, find: Find) -> Answer:
    """Answer a review. Raises JsonError if `review` is not an AdmissionReview, Interrupted."""
    warnings: list[str] = []
    operations: list[dict[str, Any]] = []
    try:
        parsed = _decode_review(review)
        request = admission.checked(parsed.api_version, parsed.kind, parsed.request)
        kind = request.kind.kind
        if (kind, request.sub_resource, request.operation) == ("Pod", "", "CREATE"):
            pod = _decode_pod(request.object)
            wanted = _wanted(pod, request.namespace or "default", settings, find, warnings)
            operations = device_requests.patch(pod, wanted)
    except (ValueError, RecursionError) as error:
        raise gojson.JsonError(str(error)) from error
    response: dict[str, Any] = {"uid": request.uid, "allowed": True}
    if operations:
        patch = gojson.dumps(operations, sort_keys=False)
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
    return admission.body(response, list(dict.fromkeys(warnings))), kind, "warned" if warnings else "success"


def _wanted(pod: Pod, namespace: str, settings: Settings, find: Find, warnings: list[str]) -> dict[str, int]:
    """Return the number of devices that the pod's networks need, by resource."""
    if pod.is_left_alone:
        return {}
    try:
        elements = _elements(pod, namespace, settings)
    except CniError as error:
        warnings.append(f"{error.msg}; {_NOT_ADDED}")
        return {}
    try:
        with deadline.within(deadlines.WEBHOOK_LOOKUP_SECONDS):
            networks = find({(element.namespace, element.name) for element in elements}) if elements else {}
    except (StoreUnavailableError, deadline.ExpiredError) as error:
        reason = str(error) or f"no answer within {deadlines.WEBHOOK_LOOKUP_SECONDS:g} s"
        log.error("%s: the networks of a pod of namespace %s can't be looked up: %s", _NOT_ADDED, namespace, reason)
        warnings.append(f"the webhook can't look up networks now; {_NOT_ADDED}: create the pod again later")
        return {}
    wanted: Counter[str] = Counter()
    for element in elements:
        network = networks.get((element.namespace, element.name))
        resource = network.resource_name if network else ""
        if device_requests.is_extended(resource):
            wanted[resource] += 1
        elif network is None:
            warnings.append(f"network {element} is not known; {_NOT_ADDED} for it")
        elif "/" in resource:
            # Others are names of claims.
            problem = f"{resource[:80]!r} of network {element} is not the name of an extended resource"
            warnings.append(f"{problem}; {_NOT_ADDED} for it")
    return wanted


def _elements(pod: Pod, namespace: str, settings: Settings) -> list[NetworkSelection]:
    """Return the networks that the pod names and may use. Raises CniError."""
    net_conf = validate.net_conf(settings)
    annotations = pod.annotations
    elements = [
        element
        for element in selection.parse(annotations.get(selection.NETWORKS_ANNOTATION, ""), pod_namespace=namespace)
        if net_conf.allows(namespace, element.namespace)
    ]
    if (default := annotations.get(selection.DEFAULT_NETWORK_ANNOTATION)) is not None:
        first = selection.parse_default_network(default, default_namespace=net_conf.multus_namespace)
        if first.namespace == net_conf.multus_namespace or net_conf.allows(namespace, first.namespace):
            elements.append(first)
    return elements
