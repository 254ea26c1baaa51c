"""Requests for devices that are added to pods: the patch, and which pods get none."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_tools.webhook import device_requests
from multus_tools.webhook.device_requests import Pod

FAST, SLOW = "example.com/fast", "example.com/a~b"


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "spec": {"containers": list(containers), **spec}}


def asks(number: Any, *, both: bool = True, resource: str = FAST, **others: Any) -> dict[str, Any]:
    values = {resource: number}
    return {"resources": {"limits": values, **({"requests": values} if both else {})}, **others}


def patched(item: dict[str, Any], wanted: dict[str, int]) -> dict[str, Any]:
    """Return the pod with the patch applied, by the rules of RFC 6902 for `add`."""
    result = copy.deepcopy(item)
    for operation in device_requests.patch(msgspec.convert(item, Pod), wanted):
        assert operation["op"] == "add"
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].removeprefix("/").split("/")
        ]
        target: Any = result
        for part in parents:
            target = target[int(part) if isinstance(target, list) else part]
        target[last] = copy.deepcopy(operation["value"])
    return result


def resources(item: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = item["spec"]["containers"][number]["resources"]
    return found


@pytest.mark.parametrize("number", ["2", "3", 2, "1k", "2500m", "10Gi", "1e3"])
@pytest.mark.parametrize("both", [True, False])
def test_what_the_pod_asks_for_is_enough(number: Any, both: bool) -> None:
    assert patched(pod(asks(number, both=both)), {FAST: 2}) == pod(asks(number, both=both))
    in_second = pod({}, asks(number, both=both))
    assert patched(in_second, {FAST: 2}) == in_second


@pytest.mark.parametrize(
    ("containers", "wanted", "first"),
    [
        ([asks("1")], 3, "3"),
        ([asks("0")], 1, "1"),
        ([{}, asks("1")], 3, "2"),
        ([asks("1"), asks("1")], 3, "2"),
        ([asks("1", both=False)], 2, "2"),
    ],
)
def test_only_what_is_missing_is_added(containers: list[dict[str, Any]], wanted: int, first: str) -> None:
    result = patched(pod(*containers), {FAST: wanted})
    assert {key: values[FAST] for key, values in resources(result).items()} == {"limits": first, "requests": first}
    assert result["spec"]["containers"][1:] == containers[1:]


@pytest.mark.parametrize(
    ("init", "wanted", "first"),
    [
        # Its devices are those of the containers that follow.
        ([asks("2")], 2, None),
        ([asks("1")], 2, "2"),
        ([asks("1", restartPolicy="Always")], 2, "1"),
        ([asks("1", restartPolicy="Always")], 1, None),
        ([asks("1", restartPolicy="Always"), asks("1")], 2, None),
        ([asks("1"), asks("1", restartPolicy="Always")], 2, "1"),
    ],
)
def test_init_containers_count_as_for_the_kubelet(init: list[dict[str, Any]], wanted: int, first: str | None) -> None:
    result = patched(pod({}, initContainers=init), {FAST: wanted})
    assert result["spec"]["initContainers"] == init
    given_first = result["spec"]["containers"][0].get("resources", {})
    assert given_first == ({"limits": {FAST: first}, "requests": {FAST: first}} if first else {})


@pytest.mark.parametrize("item", [{}, {"spec": {"containers": None}}, pod()])
def test_a_pod_without_containers_is_left_to_the_api_server(item: dict[str, Any]) -> None:
    assert device_requests.patch(msgspec.convert(item, Pod), {FAST: 1}) == []


COUNTS = st.dictionaries(st.sampled_from([FAST, SLOW, "cpu"]), st.integers(0, 3).map(str))
CONTAINERS = st.builds(
    lambda limits, requests, policy: {"resources": {"limits": limits, "requests": requests}, "restartPolicy": policy},
    st.none() | COUNTS,
    st.none() | COUNTS,
    st.sampled_from([None, "Always"]),
)


@given(st.lists(CONTAINERS, min_size=1, max_size=3), st.lists(CONTAINERS, max_size=2), st.integers(0, 4))
def test_a_second_review_adds_nothing(containers: list[Any], init: list[Any], number: int) -> None:
    before = json.loads(json.dumps(pod(*containers, initContainers=init)))
    wanted = {FAST: number, SLOW: 1}
    once = patched(before, wanted)
    assert patched(once, wanted) == once
    rest = once["spec"]["containers"][0]["resources"]
    for key, values in before["spec"]["containers"][0]["resources"].items():
        if values and "cpu" in values:
            assert rest[key]["cpu"] == values["cpu"]


@pytest.mark.parametrize(
    ("annotations", "spec", "labels", "is_left_alone"),
    [
        ({}, {}, {}, False),
        ({"multus.io/inject": "true"}, {}, {}, False),
        ({"multus.io/inject": "false"}, {}, {}, True),
        ({"multus.io/inject": "no"}, {}, {}, True),
        ({}, {"resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}]}, {}, True),
        ({"multus.io/inject": "true"}, {"resourceClaims": [{"name": "gpu"}]}, {}, False),
        ({}, {"resourceClaims": []}, {}, False),
        ({"multus.io/inject": "true"}, {"hostNetwork": True}, {}, True),
        ({}, {"hostNetwork": False}, {}, False),
        ({}, {}, {"nri.npwg.org/resourcename": "false"}, True),
        ({}, {}, {"nri.npwg.org/resourcename": "true"}, False),
    ],
)
def test_pods_that_are_left_alone(
    annotations: dict[str, str], spec: dict[str, Any], labels: dict[str, str], is_left_alone: bool
) -> None:
    item = {"metadata": {"annotations": annotations, "labels": labels}, "spec": spec}
    assert msgspec.convert(item, Pod).is_left_alone is is_left_alone


@pytest.mark.parametrize(
    "name", ["example.com/fast", "intel.com/intel_sriov_netdevice", "a/B", "devices.kubevirt.io/kvm", f"a/{'x' * 63}"]
)
def test_names_of_extended_resources(name: str) -> None:
    assert device_requests.is_extended(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "memory", "claim-of-a-pod", "hugepages-2Mi", "/fast", "example.com/", "example.com/a/b", "EXAMPLE/a"),
        *("kubernetes.io/a", "x.kubernetes.io/a", "requests.example.com/a", "a/-b", "a/b-", "a/b c", "a/b\n"),
        *(f"a/{'x' * 64}", f"{'x' * 250}/a"),
    ],
)
def test_other_names(name: str) -> None:
    assert not device_requests.is_extended(name)
