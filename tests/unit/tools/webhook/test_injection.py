"""Answers of the resource injector to a review."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Set
from typing import Any

import pytest

from multus_daemon import settings
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import StoreUnavailableError
from multus_tools import deadlines
from multus_tools.webhook import injection
from multus_tools.webhook.injection import Key
from tests.unit.tools.webhook.test_admission import review

NETWORKS = "k8s.v1.cni.cncf.io/networks"
DEFAULT = "v1.multus-cni.io/default-network"
FAST = "example.com/fast"
KNOWN = {
    ("tenant", "fast"): FAST,
    ("tenant", "also-fast"): FAST,
    ("tenant", "plain"): "",
    ("tenant", "memory"): "memory",
    ("tenant", "wrong"): "kubernetes.io/batch-cpu",
    ("other", "slow"): "example.com/slow",
    ("kube-system", "cluster"): "example.com/cluster",
}


class Networks:
    """The networks of a cluster; remembers what it is asked for."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.asked: list[Set[Key]] = []
        self._problem = problem

    def __call__(self, keys: Set[Key]) -> Mapping[Key, NetworkAttachmentDefinition]:
        self.asked.append(keys)
        if self._problem:
            raise self._problem
        return {
            key: NetworkAttachmentDefinition(*key, annotations={"k8s.v1.cni.cncf.io/resourceName": KNOWN[key]})
            for key in keys & KNOWN.keys()
        }


def pod(networks: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    metadata = {"generateName": "web-", "annotations": {NETWORKS: networks, **(annotations or {})}}
    container = {"name": "main", "image": "none", "resources": {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def answered(
    asked: dict[str, Any], networks: Networks | None = None, given: settings.Settings | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return what the answer adds to the first container, and the warnings."""
    body, kind, outcome = injection.answer(
        json.dumps(asked).encode(), given or settings.Settings(), networks or Networks()
    )
    answer = json.loads(body)
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = answer["response"]
    assert (response["uid"], response["allowed"]) == (asked["request"]["uid"], True)
    warnings = response.get("warnings", [])
    assert (kind, outcome) == (asked["request"]["kind"]["kind"], "warned" if warnings else "success")
    if "patch" not in response:
        assert "patchType" not in response
        return {}, warnings
    assert response["patchType"] == "JSONPatch"
    operations = json.loads(base64.b64decode(response["patch"], validate=True))
    (limits, requests) = operations
    assert [item["path"] for item in operations] == [
        "/spec/containers/0/resources/limits",
        "/spec/containers/0/resources/requests",
    ]
    assert limits["value"] == requests["value"]
    return limits["value"], warnings


@pytest.mark.parametrize(
    ("item", "added"),
    [
        (pod("fast"), {FAST: "1"}),
        (pod("fast, fast"), {FAST: "2"}),
        (pod("fast@net1, also-fast, plain"), {FAST: "2"}),
        (pod("fast, other/slow"), {FAST: "1", "example.com/slow": "1"}),
        (pod('[{"name": "fast"}, {"name": "slow", "namespace": "other"}]'), {FAST: "1", "example.com/slow": "1"}),
        (pod("plain"), {}),
        # The name of a claim, as the NetworkAttachmentDefinitions of older clusters have it.
        (pod("memory"), {}),
        (pod(""), {}),
    ],
)
def test_each_network_of_a_resource_needs_a_device(item: dict[str, Any], added: dict[str, str]) -> None:
    assert answered(review(item)) == (added, [])


def test_the_default_network_counts_too() -> None:
    assert answered(review(pod("fast", {DEFAULT: "cluster"}))) == ({FAST: "1", "example.com/cluster": "1"}, [])
    assert answered(review(pod("fast", {DEFAULT: "tenant/fast"}))) == ({FAST: "2"}, [])
    own = settings.from_object({"multusNamespace": "tenant"}, "test")
    assert answered(review(pod("fast", {DEFAULT: "also-fast"})), given=own) == ({FAST: "2"}, [])


def test_a_pod_that_is_left_alone_costs_no_look_up() -> None:
    networks = Networks()
    assert answered(review(pod("fast", {"multus.io/inject": "false"})), networks) == ({}, [])
    claims = pod("fast, blu")
    claims["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "gpu"}]
    assert answered(review(claims), networks) == ({}, [])
    assert networks.asked == []


@pytest.mark.parametrize(
    ("networks", "added", "warning"),
    [
        ("blu", {}, "network tenant/blu is not known; no request for a device is added for it"),
        ("fast, blu, blu", {FAST: "1"}, "network tenant/blu is not known; no request for a device is added for it"),
        ("wrong", {}, "'kubernetes.io/batch-cpu' of network tenant/wrong is not the name of an extended resource; "),
        ("a/b/c", {}, "more than one '/'"),
        ("[{", {}, "not JSON"),
        ("fast@net1, fast@net1", {}, "interface 'net1' is asked for twice"),
    ],
)
def test_what_keeps_a_request_from_being_added_is_a_warning(networks: str, added: dict[str, str], warning: str) -> None:
    found, (text,) = answered(review(pod(networks)))
    assert (found, warning in text, "no request for a device is added" in text) == (added, True, True)


def test_isolation_is_that_of_the_daemon() -> None:
    isolated = settings.from_object({"namespaceIsolation": True}, "test")
    networks = Networks()
    assert answered(review(pod("fast, other/slow, other/blu")), networks, isolated) == ({FAST: "1"}, [])
    # Neither a resource nor the existence of a network is shown to a tenant that may not use it.
    assert networks.asked == [{("tenant", "fast")}]
    assert answered(review(pod("", {DEFAULT: "cluster"})), given=isolated) == ({"example.com/cluster": "1"}, [])
    assert answered(review(pod("", {DEFAULT: "other/slow"})), given=isolated) == ({}, [])


def test_without_the_api_server_the_pod_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    networks = Networks(StoreUnavailableError("the API server can't be asked: it is at 192.0.2.1"))
    found, (warning,) = answered(review(pod("fast")), networks)
    assert (found, "can't look up networks now" in warning, "192.0.2.1" in warning) == ({}, True, False)
    assert "192.0.2.1" in caplog.text


def test_a_look_up_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "WEBHOOK_LOOKUP_SECONDS", 0.01)

    def find(keys: Set[Key]) -> Mapping[Key, NetworkAttachmentDefinition]:
        while True:
            deadline.pause(0.001)

    data = json.dumps(review(pod("fast"))).encode()
    with deadline.given(Deadline(10)):
        body, _, outcome = injection.answer(data, settings.Settings(), find)
    assert (b"can't look up networks now" in body, outcome) == (True, "warned")
    with deadline.given(Deadline(0)), pytest.raises(Interrupted):
        injection.answer(data, settings.Settings(), find)


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "UPDATE"},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
    ],
)
def test_only_new_pods_are_changed(change: dict[str, Any]) -> None:
    asked = review(pod("fast"))
    asked["request"] |= change
    assert answered(asked) == ({}, [])


def test_a_pod_with_all_that_the_api_server_may_send() -> None:
    item = pod("fast")
    item["metadata"] |= {"creationTimestamp": None, "labels": None}
    item["spec"] |= {"initContainers": None, "hostNetwork": None, "resourceClaims": None, "volumes": [{"name": "a"}]}
    assert answered(review(item)) == ({FAST: "1"}, [])
    item["metadata"]["annotations"] = None
    assert answered(review(item)) == ({}, [])


def test_many_warnings_are_as_long_as_the_api_server_shows() -> None:
    names = ", ".join(f"{'x' * 240}{number}" for number in range(99))
    _, warnings = answered(review(pod(names)))
    assert (len(warnings), max(map(len, warnings))) == (16, 256)


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{}] * 1001},
        {"containers": [{}], "initContainers": [{}] * 1001},
        {"containers": [{"resources": {"limits": {f"a/{number}": "1" for number in range(1001)}}}]},
    ],
)
def test_a_pod_that_would_take_long_is_not_judged(spec: dict[str, Any]) -> None:
    item = pod("fast") | {"spec": spec}
    with pytest.raises(gojson.JsonError, match="length <= 1000"):
        answered(review(item))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[]", b"{", b'{"apiVersion": "admission.k8s.io/v1beta1"}', b"\xff", b"[" * 100_000),
        b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}',
        b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"kind": {"kind": "Pod"}, '
        b'"operation": "CREATE", "object": {"spec": {"containers": 1}}}}',
    ],
)
def test_what_is_no_review(data: bytes) -> None:
    with pytest.raises(gojson.JsonError):
        injection.answer(data, settings.Settings(), Networks())
