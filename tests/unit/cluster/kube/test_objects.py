"""Decoding of what the API sends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multus_daemon.cluster.kube.objects import decode_pod

DIRECT = [{"name": "gpu", "resourceClaimName": "the-gpu"}]
BY_TEMPLATE = [{"name": "nic", "resourceClaimTemplateName": "nics"}]


@pytest.mark.parametrize(
    ("spec", "status", "claims"),
    [
        ({}, {}, {}),
        ({"resourceClaims": None}, {"resourceClaimStatuses": None}, {}),
        ({"resourceClaims": DIRECT}, {}, {"gpu": ("the-gpu",)}),
        ({"resourceClaims": BY_TEMPLATE}, {}, {}),
        (
            {"resourceClaims": [*DIRECT, *BY_TEMPLATE]},
            {"resourceClaimStatuses": [{"name": "nic", "resourceClaimName": "p1-nic-x7f2"}]},
            {"gpu": ("the-gpu",), "nic": ("p1-nic-x7f2",), "nics": ("p1-nic-x7f2",)},
        ),
        # Two claims from one template; and the pod's own name for a claim goes before the name of a template.
        (
            {
                "resourceClaims": [
                    *BY_TEMPLATE,
                    {"name": "more", "resourceClaimTemplateName": "nics"},
                    {"name": "third", "resourceClaimTemplateName": "nic"},
                ]
            },
            {
                "resourceClaimStatuses": [
                    {"name": "nic", "resourceClaimName": "p1-nic-x7f2"},
                    {"name": "more", "resourceClaimName": "p1-more-k9d1"},
                    {"name": "third", "resourceClaimName": "p1-third-b3c4"},
                ]
            },
            {
                "nic": ("p1-nic-x7f2",),
                "more": ("p1-more-k9d1",),
                "third": ("p1-third-b3c4",),
                "nics": ("p1-nic-x7f2", "p1-more-k9d1"),
            },
        ),
        # No claim is made for it (the template's objects are not needed).
        ({"resourceClaims": BY_TEMPLATE}, {"resourceClaimStatuses": [{"name": "nic", "resourceClaimName": None}]}, {}),
    ],
)
def test_the_claims_of_a_pod_by_its_own_names_for_them_and_by_their_templates(
    spec: dict[str, Any], status: dict[str, Any], claims: dict[str, tuple[str, ...]]
) -> None:
    item = {"metadata": {"namespace": "web", "name": "p1", "uid": "u1"}, "spec": spec, "status": status}
    assert decode_pod(json.dumps(item).encode()).value.claims == claims


def test_a_pod_without_a_status() -> None:
    assert decode_pod(b'{"metadata":{"namespace":"web","name":"p1"},"spec":{}}').value.claims == {}


IMAGE = "ghcr.io/k8snetworkplumbingwg/multus-dynamic-networks-controller:latest"
SOCKET = {"name": "s", "hostPath": {"path": "/run/multus/multus.sock", "type": "Socket"}}


@pytest.mark.parametrize(
    ("name", "image", "volumes", "metadata", "expected"),
    [
        ("controller-x", IMAGE, [SOCKET], {}, True),
        (
            "dynamic-networks-controller-ds-x",
            "quay.io/ocp@sha256:0123",
            [{"name": "c", "configMap": {}}, SOCKET],
            {},
            True,
        ),
        ("controller-x", IMAGE, [SOCKET], {"deletionTimestamp": "2026-01-02T03:04:05Z"}, False),
        # Of tenants: without a directory or socket of the node.
        ("controller-x", IMAGE, None, {}, False),
        ("dynamic-networks-controller-ds-x", "web", [{"name": "c", "emptyDir": {}}], {}, False),
        ("web-1", "web", [SOCKET], {}, False),
    ],
)
def test_which_pod_serves_hotplug(name: str, image: str, volumes: Any, metadata: Any, expected: bool) -> None:
    spec = {"containers": [{"name": "proxy", "image": "proxy"}, {"name": "c", "image": image}], "volumes": volumes}
    item = {"metadata": {"namespace": "any", "name": name, **metadata}, "spec": spec}
    assert decode_pod(json.dumps(item).encode()).value.is_hotplug_controller is expected


def test_only_our_condition_is_kept() -> None:
    time = "2026-01-02T03:04:05Z"
    others = [{"type": kind, "status": "True", "lastTransitionTime": time} for kind in ("Ready", "Initialized")]
    ours = {"type": "multus.io/NetworksReady", "status": "False", "reason": "AttachmentBroken", "message": "net1"}
    item = {"metadata": {"namespace": "web", "name": "p1"}}
    pods = [
        decode_pod(json.dumps({**item, "status": {"conditions": conditions}}).encode()).value
        for conditions in (None, others, [*others, {**ours, "lastTransitionTime": time}], [{"type": ours["type"]}])
    ]
    assert [pod.networks_ready for pod in pods] == [
        None,
        None,
        (False, "AttachmentBroken", "net1", time),
        (False, "", "", ""),
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, False),
        ({"containers": [{"resources": {"limits": {"cpu": "1", "hugepages-2Mi": "2Mi"}}}]}, False),
        ({"containers": [{"resources": {"limits": {"attachable.kubernetes.io/x": 1}}}]}, False),
        ({"containers": [{"resources": {"requests": {"cpu": 1}}}, {"resources": {"limits": {"a.com/vf": "1"}}}]}, True),
        ({"initContainers": [{"resources": {"limits": {"a.com/vf": 1}}}]}, True),
    ],
)
def test_whether_a_device_plugin_may_have_devices_of_a_pod(spec, expected):
    pod = decode_pod(json.dumps({"metadata": {"name": "p"}, "spec": spec}).encode()).value
    assert pod.asks_for_extended_resources is expected


def test_the_claim_of_extended_resources():
    mappings = [{"containerName": "c", "requestName": "r0", "resourceName": "a.com/vf"}]
    status = {"extendedResourceClaimStatus": {"resourceClaimName": "made", "requestMappings": mappings}}
    pod = decode_pod(json.dumps({"metadata": {"name": "p"}, "status": status}).encode()).value
    assert pod.extended_claim == ("made", (("r0", "a.com/vf"),))
