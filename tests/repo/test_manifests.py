"""The manifests that grant rights: each says what the daemon needs, and no more."""

from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
RBAC = "rbac.authorization.k8s.io"

# (group, resource) -> verbs: what the code does. A right that is granted and not listed here fails, and the reverse.
DAEMON = {
    ("k8s.cni.cncf.io", "network-attachment-definitions"): {"get", "list", "watch"},
    ("", "pods"): {"get", "list", "watch"},
    ("", "pods/status"): {"patch"},
    ("", "events"): {"create", "patch"},
    ("", "nodes"): {"get"},
}
APPROVER = {
    ("certificates.k8s.io", "certificatesigningrequests"): {"get", "list", "watch"},
    ("certificates.k8s.io", "certificatesigningrequests/approval"): {"update"},
    ("certificates.k8s.io", "signers"): {"approve"},
}
REQUESTER = {("certificates.k8s.io", "certificatesigningrequests"): {"create", "get"}}


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((MANIFESTS / name).read_text()) if document]


def named(name: str, kind: str, found: str) -> dict[str, Any]:
    (document,) = [item for item in documents(name) if item["kind"] == kind and item["metadata"]["name"] == found]
    return document


def rights(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted.setdefault((group, resource), set()).update(rule["verbs"])
    return granted


def subjects(binding: dict[str, Any]) -> set[tuple[str, str, str]]:
    for subject in binding["subjects"]:
        # The API server takes a group only with its API group, and a service account only without.
        assert subject.get("apiGroup", "") == ("" if subject["kind"] == "ServiceAccount" else RBAC)
    return {(item["kind"], item.get("namespace", ""), item["name"]) for item in binding["subjects"]}


@pytest.mark.parametrize(
    ("name", "role", "wanted"),
    [
        ("base/rbac.yaml", "multus", DAEMON),
        ("cert-approver/rbac.yaml", "multus-cert-approver", APPROVER),
        ("cert-approver/rbac.yaml", "multus-certificate-requester", REQUESTER),
    ],
)
def test_a_role_grants_what_is_used(name: str, role: str, wanted: dict[tuple[str, str], set[str]]) -> None:
    assert rights(named(name, "ClusterRole", role)) == wanted


@pytest.mark.parametrize(
    ("name", "binding", "role", "wanted"),
    [
        ("base/rbac.yaml", "multus", "multus", {("ServiceAccount", "kube-system", "multus")}),
        (
            "cert-approver/rbac.yaml",
            "multus-cert-approver",
            "multus-cert-approver",
            {("ServiceAccount", "kube-system", "multus-cert-approver")},
        ),
        ("cert-approver/rbac.yaml", "multus-per-node", "multus", {("Group", "", "system:multus")}),
        (
            "cert-approver/rbac.yaml",
            "multus-certificate-requester",
            "multus-certificate-requester",
            {("Group", "", "system:nodes"), ("Group", "", "system:multus")},
        ),
    ],
)
def test_who_has_a_role(name: str, binding: str, role: str, wanted: set[tuple[str, str, str]]) -> None:
    found = named(name, "ClusterRoleBinding", binding)
    assert found["roleRef"] == {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
    assert subjects(found) == wanted


def test_nothing_else_is_granted() -> None:
    names = {
        name: sorted((item["kind"], item["metadata"]["name"]) for item in documents(name))
        for name in ("base/rbac.yaml", "cert-approver/rbac.yaml")
    }
    assert names == {
        "base/rbac.yaml": [
            ("ClusterRole", "multus"),
            ("ClusterRoleBinding", "multus"),
            ("ServiceAccount", "multus"),
        ],
        "cert-approver/rbac.yaml": [
            ("ClusterRole", "multus-cert-approver"),
            ("ClusterRole", "multus-certificate-requester"),
            ("ClusterRoleBinding", "multus-cert-approver"),
            ("ClusterRoleBinding", "multus-certificate-requester"),
            ("ClusterRoleBinding", "multus-per-node"),
            ("ServiceAccount", "multus-cert-approver"),
        ],
    }


@pytest.mark.parametrize("name", ["base/rbac.yaml", "cert-approver/rbac.yaml"])
def test_no_wildcards(name: str) -> None:
    for role in (item for item in documents(name) if item["kind"] == "ClusterRole"):
        for rule in role["rules"]:
            assert not [value for values in rule.values() for value in values if "*" in value]


def test_service_accounts_are_in_the_namespace_of_their_bindings() -> None:
    for name in ("base/rbac.yaml", "cert-approver/rbac.yaml"):
        accounts = {item["metadata"]["name"] for item in documents(name) if item["kind"] == "ServiceAccount"}
        assert {item["metadata"].get("namespace") for item in documents(name) if item["kind"] == "ServiceAccount"} == {
            "kube-system"
        }
        bound = {
            subject["name"]
            for item in documents(name)
            if item["kind"] == "ClusterRoleBinding"
            for subject in item["subjects"]
            if subject["kind"] == "ServiceAccount"
        }
        assert bound == accounts


def test_the_approver_may_approve_for_one_signer() -> None:
    approver = pytest.importorskip("multus_daemon.kube.approver", reason="needs cryptography")
    (rule,) = [
        rule
        for rule in named("cert-approver/rbac.yaml", "ClusterRole", "multus-cert-approver")["rules"]
        if rule["resources"] == ["signers"]
    ]
    assert rule["resourceNames"] == [approver.SIGNER]


def test_the_custom_resource_is_what_clients_know() -> None:
    (crd,) = documents("base/crd.yaml")
    spec = crd["spec"]
    names = spec["names"]
    assert crd["apiVersion"] == "apiextensions.k8s.io/v1"
    assert crd["metadata"]["name"] == f"{names['plural']}.{spec['group']}"
    assert (spec["group"], spec["scope"]) == ("k8s.cni.cncf.io", "Namespaced")
    assert names == {
        "plural": "network-attachment-definitions",
        "singular": "network-attachment-definition",
        "kind": "NetworkAttachmentDefinition",
        "shortNames": ["nad", "net-attach-def"],
    }
    (version,) = spec["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v1", True, True)
    # No status subresource: with one, clients that write whole objects would lose part of what they write.
    assert "subresources" not in version


def test_the_schema_takes_every_definition_that_exists() -> None:
    (crd,) = documents("base/crd.yaml")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema["type"] == "object"
    # `spec` may be missing altogether: the configuration is a file of the node then.
    assert "required" not in schema
    assert set(schema["properties"]) == {"apiVersion", "kind", "metadata", "spec"}
    spec = schema["properties"]["spec"]
    assert "required" not in spec
    assert {key: value["type"] for key, value in spec["properties"].items()} == {"config": "string"}


def test_printer_columns_point_into_the_object() -> None:
    (crd,) = documents("base/crd.yaml")
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"] for column in columns] == ["Age"]
    for column in columns:
        assert set(column) == {"name", "type", "jsonPath"}
        assert column["jsonPath"].startswith(".")
