"""Manifests: what `kubectl apply` takes, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.cluster.standalone import manifests
from multus_daemon.cluster.standalone.manifests import ManifestError
from multus_daemon.spec.cni.gojson import JsonError

POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n"
NETWORK = """
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata:
  name: storage
  namespace: demo
spec:
  config: |
    {"type": "ptp"}
"""


def of(kind: str, found: manifests.Manifests) -> list[Any]:
    return [value for declared, _, value in found.declared if declared == kind]


def test_several_documents() -> None:
    found = manifests.parse(f"# comment\n---\n{POD}---\n---\n{NETWORK}---\napiVersion: v1\nkind: Service\n".encode())
    assert [str(pod) for pod in of("Pod", found)] == ["default/a"]
    assert [str(network) for network in of("NetworkAttachmentDefinition", found)] == ["demo/storage"]
    assert of("NetworkAttachmentDefinition", found)[0].config == '{"type": "ptp"}\n'
    assert found.passed_over == ["v1/Service"]


@pytest.mark.parametrize("kind", ["List", "PodList"])
def test_lists_are_opened(kind: str) -> None:
    items = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "web"}} for name in "ab"]
    data = json.dumps({"apiVersion": "v1", "kind": kind, "items": items}).encode()
    for is_json in (True, False):
        assert [pod.name for pod in of("Pod", manifests.parse(data, is_json=is_json))] == ["a", "b"]


def test_pod_fields() -> None:
    data = (
        b"apiVersion: v1\nkind: Pod\nmetadata: {name: a.b, uid: u1, annotations: {x/y: '1'}}\nspec: {hostNetwork: true}"
    )
    (pod,) = of("Pod", manifests.parse(data))
    assert (pod.name, pod.uid, dict(pod.annotations), pod.host_network) == ("a.b", "u1", {"x/y": "1"}, True)


def test_uid_is_stable_and_tells_pods_apart() -> None:
    first, again = (of("Pod", manifests.parse(POD.encode()))[0].uid for _ in range(2))
    other = of("Pod", manifests.parse(POD.replace("name: a", "name: b").encode()))[0].uid
    assert first == again != other
    assert len(first) == 36


def test_a_network_without_config() -> None:
    data = b"apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {name: a}\nspec:\n"
    assert of("NetworkAttachmentDefinition", manifests.parse(data))[0].config == ""


@pytest.mark.parametrize("data", ["", "---\n", "# nothing\n", "null"])
def test_empty_files(data: str) -> None:
    assert manifests.parse(data.encode()) == manifests.Manifests()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "not YAML"),
        ("a: !!python/object:os.system x", "not YAML"),
        ("a: !!bool x", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("just text", "each document must be an object, not a string"),
        ("1: 2", "all keys must be strings"),
        ("kind: Pod", "apiVersion and kind are needed"),
        ("kind: [Pod]\napiVersion: v1", "kind: a string is needed"),
        ("apiVersion: v1\nkind: List\nitems: [1]", "each document must be an object, not a number"),
        ("apiVersion: v1\nkind: Pod", "object 0 (Pod): metadata.name '' is empty"),
        ("apiVersion: v1\nkind: Pod\nmetadata: []", "metadata: an object is needed"),
        (POD.replace("name: a", "name: ../x"), "'../x' must consist of"),
        (POD.replace("name: a", "name: a, namespace: a/b"), "metadata.namespace 'a/b' must"),
        (POD.replace("name: a", "name: a, annotations: {x: 1}"), "annotation x: a string is needed, not a number"),
        (POD.replace("name: a", "name: a, annotations: {1: x}"), "annotations: all keys must be strings"),
        (f"{POD}---\n{NETWORK.replace('|', '{a: b} #').replace('    {', '#')}", "object 1 (NetworkAttachmentDef"),
        ("- " * 300_000, "nested deeper than 100 levels"),
        ("[" * 300_000, "nested deeper than 100"),
        ("{a: " * 300_000, "nested deeper than 100"),
        ("[" * 101 + "]" * 101, "nested deeper than 100"),
    ],
)
def test_refusals(text: str, problem: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifests.parse(text.encode())
    assert problem in str(caught.value)


def test_too_many_objects() -> None:
    with pytest.raises(ManifestError, match="more than 2000"):
        manifests.parse(("apiVersion: v1\nkind: X\n---\n" * 2001).encode())


@given(st.binary(max_size=200) | st.text("-:[]{}!&*abc \n|>'\"0,?#%@`~", max_size=100).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for is_json in (False, True):
        try:
            manifests.parse(data, is_json=is_json)
        except (ManifestError, JsonError):
            pass
