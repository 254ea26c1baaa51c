"""Answers of the webhook to a review."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multus_daemon import settings
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_tools import deadlines
from multus_tools.webhook import admission

GOOD = '{"cniVersion": "1.0.0", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}'
BAD = '{\n  "cniVersion": "1.0.0",\n  "type": "ptp",\n}'
PLUGIN = '{"type": "ptp"}'
KINDS = {
    "NetworkAttachmentDefinition": ("k8s.cni.cncf.io", "v1", "network-attachment-definitions"),
    "Pod": ("", "v1", "pods"),
    "Deployment": ("apps", "v1", "deployments"),
}


def review(item: dict[str, Any], *, old: dict[str, Any] | None = None, operation: str = "CREATE") -> dict[str, Any]:
    """Return a review like kube-apiserver v1.34 sends it."""
    group, version, resource = KINDS[item["kind"]]
    kind = {"group": group, "version": version, "kind": item["kind"]}
    named = {"group": group, "version": version, "resource": resource}
    metadata = {
        "uid": "7e0a1b52-6a9e-4c6e-8f0b-7a4d4dcb2f0d",
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "managedFields": [
            {"manager": "kubectl-client-side-apply", "operation": "Update", "apiVersion": f"{group}/{version}",
             "time": "2026-01-02T03:04:05Z", "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {".": {}}}}
        ],
    }  # fmt: skip
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": kind,
        "resource": named,
        "requestKind": kind,
        "requestResource": named,
        "name": item["metadata"].get("name", ""),
        "namespace": "tenant",
        "operation": operation,
        "userInfo": {"username": "kubernetes-admin", "groups": ["kubeadm:cluster-admins", "system:authenticated"]},
        "object": {**item, "metadata": {**metadata, **item["metadata"]}} if operation != "DELETE" else None,
        "oldObject": old,
        "dryRun": False,
        "options": {"kind": f"{operation.capitalize()}Options", "apiVersion": "meta.k8s.io/v1"},
    }
    return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}


def network(config: str, **metadata: Any) -> dict[str, Any]:
    kind = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}
    return {**kind, "metadata": {"name": "blue", "namespace": "tenant", **metadata}, "spec": {"config": config}}


def pod(networks: str) -> dict[str, Any]:
    metadata = {"generateName": "web-", "annotations": {"k8s.v1.cni.cncf.io/networks": networks}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}


def answered(
    asked: dict[str, Any], found: settings.Settings | None = None, known: dict[tuple[str, str], str] | None = None
) -> tuple[dict[str, Any], str]:
    others = {key: NetworkAttachmentDefinition(*key, config) for key, config in (known or {}).items()}
    body, kind, outcome = admission.answer(json.dumps(asked).encode(), found or settings.Settings(), others)
    given = json.loads(body)
    assert (given["apiVersion"], given["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert given["response"]["uid"] == asked["request"]["uid"]
    assert kind == asked["request"]["kind"]["kind"]
    return given["response"], outcome


def test_a_network_that_is_good_is_allowed() -> None:
    response, outcome = answered(review(network(GOOD)))
    assert (response, outcome) == ({"uid": response["uid"], "allowed": True}, "success")


def test_a_network_that_can_not_be_used_is_refused_with_the_place_in_its_text() -> None:
    response, outcome = answered(review(network(BAD)))
    assert (response["allowed"], outcome) == (False, "refused")
    assert response["status"] == {
        "status": "Failure",
        "code": 422,
        "reason": "Invalid",
        "message": "spec.config line 4, column 1: not JSON: trailing comma in object; "
        "remove the comma before the closing bracket",
    }


def _many(number: int, piece: str) -> str:
    return ",".join(piece for _ in range(number))


BEYOND = {
    "bytes": (f'{{"x": "{"a" * 1024 * 1024}"}}', "bytes, and at most 1048576 are allowed"),
    "objects": (f"[{_many(20_001, '{}')}]", "more than 20000 objects and arrays"),
    "depth": (f"{'[' * 201}{']' * 201}", "nested deeper than 200 levels"),
    "great depth": (f"{'[' * 9000}{']' * 9000}", "nested deeper than 200 levels"),
    "plugins": (f'{{"name": "n", "plugins": [{_many(65, PLUGIN)}]}}', "at most 64 are allowed"),
    "range sets": (
        GOOD.replace('"subnet"', f'"ranges": [{_many(4097, "[]")}], "subnet"'),
        "4097 range sets, and at most",
    ),
    "addresses": (GOOD.replace('"subnet"', f'"addresses": [{_many(4097, "{}")}], "s"'), "4097 addresses, and at most"),
}


@pytest.mark.parametrize("limit", BEYOND)
def test_a_network_beyond_a_limit_of_an_add_is_refused_by_that_limit(limit: str) -> None:
    config, words = BEYOND[limit]
    response, outcome = answered(review(network(config)))
    assert outcome == "refused"
    assert words in response["status"]["message"]
    # It can be labelled and deleted.
    relabelled = review(network(config, labels={"a": "b"}), old=network(config), operation="UPDATE")
    assert answered(relabelled)[1] == "warned"


def test_in_a_large_network_an_error_has_no_place_and_unknown_keys_are_not_searched_for() -> None:
    keys = ", ".join(f'"k{number}": 1' for number in range(5001))
    assert answered(review(network(GOOD.replace('"type": "ptp"', f'"type": "ptp", {keys}'))))[1] == "success"
    routes = _many(2501, '{"dst": "10.0.0.0/8"}')
    response, _ = answered(review(network(GOOD.replace('0/24"', f'0/33", "routes": [{routes}]'))))
    assert response["status"]["message"].startswith("spec.config line 1, column 1: invalid CIDR address: 10.1.0.0/33")


def test_an_object_that_can_not_be_read_is_refused_by_its_kind() -> None:
    deep = "[" * 9000 + "]" * 9000
    for item, outcome in ((network(GOOD), "refused"), (pod("blue"), "warned")):
        text = json.dumps(review(item)).replace('"metadata": {', f'"status": {deep}, "metadata": {{', 1)
        body, kind, found = admission.answer(text.encode(), settings.Settings(), {})
        assert (kind, found) == (item["kind"], outcome)
        assert "the object can't be read: " in body.decode()


def test_the_beginning_of_a_review_is_enough_to_refuse_a_network() -> None:
    text = json.dumps(review(network(GOOD))).encode()
    body, kind, outcome = admission.unread(text[:400], "it is too large") or (b"", "", "")
    response = json.loads(body)["response"]
    assert (kind, outcome, response["uid"]) == (
        "NetworkAttachmentDefinition",
        "refused",
        "705ab4f5-6393-11e8-b7cc-42010a800002",
    )
    assert response["status"]["message"] == "it is too large"
    warned = admission.unread(json.dumps(review(pod("blue"))).encode()[:400], "it is too large")
    assert warned
    assert warned[2] == "warned"
    assert admission.unread(b"{}", "it is too large") is None


def test_a_review_stops_at_its_deadline() -> None:
    data = json.dumps(review(network(GOOD))).encode()
    with deadline.given(Deadline(0)), pytest.raises(Interrupted):
        admission.answer(data, settings.Settings(), {})


def test_warnings_about_a_pod_take_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "WEBHOOK_WARNINGS_SECONDS", 0.0)
    assert answered(review(pod("blu")), known={("tenant", "blue"): GOOD})[1] == "success"
    assert answered(review(network(BAD)))[1] == "refused"


def test_what_is_doubtful_is_a_warning() -> None:
    response, outcome = answered(review(network(GOOD.replace("ptp", "ptpp"))))
    assert (response["allowed"], outcome) == (True, "warned")
    (warning,) = response["warnings"]
    assert warning.startswith("spec.config line 1, column 25: unknown plugin 'ptpp'; is ptp meant?")


def test_a_network_that_was_bad_before_can_be_labelled_and_deleted() -> None:
    old = network(BAD)
    response, outcome = answered(review(network(BAD, labels={"a": "b"}), old=old, operation="UPDATE"))
    assert (response["allowed"], outcome) == (True, "warned")
    response, outcome = answered(review(network(BAD.replace("ptp", "vlan")), old=old, operation="UPDATE"))
    assert (response["allowed"], outcome) == (False, "refused")
    ending = network(BAD, deletionTimestamp="2026-01-02T03:04:05Z")
    assert answered(review(ending, old=network(GOOD), operation="UPDATE"))[1] == "success"
    assert answered(review(network(BAD), old=old, operation="DELETE"))[1] == "success"


@pytest.mark.parametrize(
    ("networks", "warnings"),
    [
        ("blue", []),
        ("blu", ["network tenant/blu does not exist: "]),
        ('[{"name": "blue", "ipss": []}]', ["unknown key 'ipss' (network tenant/blue); is ips meant?"]),
        ("blue@net1, blue@net1", ["interface 'net1' is asked for twice"]),
        ('[{"name": "blue", "bandwidth": {"ingressRate": 1}}]', ["bandwidth {"]),
        ("broken", []),
    ],
)
def test_pods_are_warned_about_and_never_refused(networks: str, warnings: list[str]) -> None:
    known = {("tenant", "blue"): GOOD, ("tenant", "broken"): BAD}
    response, outcome = answered(review(pod(networks)), known=known)
    assert (response["allowed"], outcome) == (True, "warned" if warnings else "success")
    for text, warning in zip(response.get("warnings", []), warnings, strict=True):
        assert warning in text


def test_before_the_networks_are_known_none_is_missing() -> None:
    assert answered(review(pod("blue")))[1] == "success"


def test_isolation_is_that_of_the_daemon() -> None:
    isolated = settings.from_object({"namespaceIsolation": True}, "test")
    response, _ = answered(review(pod("other/blue")), isolated)
    assert response["allowed"]
    assert "must not be used from namespace tenant" in response["warnings"][0]


@pytest.mark.parametrize(("networks", "known"), [("blue", ("other", "blue")), ("other/blu", ("other", "blue"))])
@pytest.mark.parametrize("isolation", [True, False])
def test_networks_that_a_pod_may_not_use_are_not_named(networks: str, known: tuple[str, str], isolation: bool) -> None:
    found = settings.from_object({"namespaceIsolation": isolation}, "test")
    response, _ = answered(review(pod(networks)), found, {known: GOOD, ("tenant", "a"): GOOD})
    assert ("meant?" in json.dumps(response)) is not isolation


def test_of_a_workload_the_template_counts() -> None:
    item = pod("blu")
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {"template": item},
    }
    response, _ = answered(review(deployment), known={("tenant", "blue"): GOOD})
    assert "is blue meant?" in response["warnings"][0]


def test_warnings_are_as_long_as_the_api_server_shows() -> None:
    keys = [{"name": "blue", f"{'x' * 100}{number}": 1} for number in range(99)]
    response, _ = answered(review(pod(json.dumps(keys))), known={("tenant", "blue"): GOOD})
    assert len(response["warnings"]) == 16
    assert max(map(len, response["warnings"])) <= 256


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"apiVersion": "admission.k8s.io/v1beta1"}', b"{"])
def test_what_is_no_review(data: bytes) -> None:
    with pytest.raises(gojson.JsonError):
        admission.answer(data, settings.Settings(), {})


def test_a_review_without_a_request() -> None:
    with pytest.raises(gojson.JsonError, match="request"):
        admission.answer(b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}', settings.Settings(), {})
