"""The manifests at a real API server, by kubectl: taken without a warning, and in the place of upstream's."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.repo import manifests, pages
from tests.repo.manifests import MANIFESTS, RENDERED

pytest_plugins = ["tests.e2e.kube_fixtures"]

FOLDERS = [
    MANIFESTS / "base",
    *sorted((MANIFESTS / "overlays").iterdir()),
    MANIFESTS / "cert-approver",
    MANIFESTS / "webhook",
    MANIFESTS / "webhook-injector",
    MANIFESTS / "device-status",
    MANIFESTS / "addresses",
    MANIFESTS / "addresses-crds",
    MANIFESTS / "uninstall" / "base",
    *sorted((MANIFESTS / "uninstall" / "overlays").iterdir()),
]
FILES = [RENDERED]


class Kubectl:
    """kubectl as an administrator."""

    def __init__(self, server: ApiServer) -> None:
        try:
            self._program = build_tools.find("kubectl")
        except build_tools.ToolError as error:
            pytest.skip(str(error))
        self._kubeconfig = server.kubeconfig("administrator", ("system:masters",))

    def run(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, which may fail."""
        return subprocess.run(
            [self._program, "--kubeconfig", self._kubeconfig, *arguments],
            input=stdin, capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip

    def __call__(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run kubectl and return its output. A warning of the API server is a failure."""
        done = self.run(*arguments, stdin=stdin)
        # Other tests of the run make the same objects without kubectl; it says so of each, and takes them over.
        others = "is missing the kubectl.kubernetes.io/last-applied-configuration annotation"
        said = [line for line in done.stderr.splitlines() if others not in line]
        assert (done.returncode, said) == (0, [])
        return done.stdout


@pytest.fixture
def kubectl(api_server: ApiServer) -> Kubectl:
    return Kubectl(api_server)


def by_folder(path: Path) -> str:
    return str(path.relative_to(MANIFESTS))


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_every_overlay_is_taken(kubectl: Kubectl, folder: Path) -> None:
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-k", folder)
    assert len(said.splitlines()) == len(manifests.objects(folder))


def in_any_order(item: Any) -> Any:
    """Lists of objects, sorted: kustomize puts what a patch adds first. Without the last newline of a patch's text."""
    if isinstance(item, dict):
        return {key: in_any_order(value) for key, value in item.items()}
    if isinstance(item, list) and all(isinstance(each, dict) for each in item):
        return sorted((in_any_order(each) for each in item), key=lambda each: json.dumps(each, sort_keys=True))
    return item.rstrip("\n") if isinstance(item, str) else item


def kustomization(folder: Path, *components: str) -> Path:
    """Make a user's own kustomization of the base with components, and return its folder."""
    (folder / "manifests").symlink_to(MANIFESTS)
    mine = folder / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../manifests/overlays/vanilla]\n"
        f"components: [{', '.join(f'../manifests/{name}' for name in components)}]\n"
    )
    return mine


@pytest.mark.parametrize(
    "names",
    [["per-node-certificates"], ["metrics-authorization"], ["metrics-authorization", "per-node-certificates"]],
    ids=" ".join,
)
def test_components_are_taken(kubectl: Kubectl, tmp_path: Path, names: list[str]) -> None:
    mine = kustomization(tmp_path, *names)
    kubectl("apply", "--dry-run=server", "--validate=strict", "-k", mine)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_taken(kubectl: Kubectl, path: Path) -> None:
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", path)
    assert len(said.splitlines()) == len([item for item in yaml.safe_load_all(path.read_text()) if item])


def upstream_like() -> str:
    """A DaemonSet that has what matters of upstream's: its names, labels and selector, a command, full privileges."""
    labels = {"app": "multus", "name": "multus", "tier": "node"}
    mount = {"name": "host-run", "mountPath": "/host/run"}
    main = {
        "name": "kube-multus",
        "image": "upstream.example/multus-cni:thick",
        "command": ["/usr/src/multus-cni/bin/multus-daemon"],
        "resources": {"limits": {"cpu": "100m", "memory": "50Mi"}},
        "securityContext": {"privileged": True},
        "volumeMounts": [mount],
    }
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "kube-multus-ds", "namespace": "kube-system", "labels": labels},
            "spec": {
                "selector": {"matchLabels": {"name": "multus"}},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "containers": [main],
                        "terminationGracePeriodSeconds": 10,
                        "volumes": [{"name": "host-run", "hostPath": {"path": "/run"}}],
                    },
                },
            },
        }
    )


def test_it_takes_the_place_of_upstreams_daemon_set(kubectl: Kubectl) -> None:
    try:
        kubectl("apply", "-f", "-", stdin=upstream_like())
        kubectl("apply", "-f", MANIFESTS / "base" / "daemonset.yaml")
        found = json.loads(kubectl("-n", "kube-system", "get", "daemonset", "kube-multus-ds", "-o", "json"))
        (wanted,) = [item for item in manifests.objects(MANIFESTS / "base") if item["kind"] == "DaemonSet"]
        pod, (container,) = found["spec"]["template"]["spec"], found["spec"]["template"]["spec"]["containers"]
        (ours,) = wanted["spec"]["template"]["spec"]["containers"]
        assert "command" not in container
        assert container["securityContext"] == ours["securityContext"]
        assert container["resources"] == ours["resources"]
        assert {item["mountPath"] for item in container["volumeMounts"]} == {
            item["mountPath"] for item in ours["volumeMounts"]
        }
        assert {item["name"] for item in pod["volumes"]} == {
            item["name"] for item in wanted["spec"]["template"]["spec"]["volumes"]
        }
    finally:
        # No controller is there to wait for.
        kubectl("-n", "kube-system", "delete", "daemonset", "kube-multus-ds", "--ignore-not-found", "--wait=false")


def test_networks_are_listed_with_their_resource(kubectl: Kubectl, api_server: ApiServer) -> None:
    kubectl("apply", "-f", MANIFESTS / "base" / "crd.yaml")
    get = ("--namespace=default", "get", "nad")
    # A moment after the condition `Established`.
    api_server.wait_until(lambda: kubectl.run(*get).returncode == 0, "the kind is served")
    network = {
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {
            "name": "sriov",
            "namespace": "default",
            "annotations": {"k8s.v1.cni.cncf.io/resourceName": "vendor.example/vf"},
        },
        "spec": {"config": '{"type":"sriov"}'},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(network))
    try:
        head, row = kubectl(*get, "--output=wide").splitlines()
        assert head.split() == ["NAME", "RESOURCE", "CONFIG", "AGE"]
        assert row.split()[:3] == ["sriov", "vendor.example/vf", '{"type":"sriov"}']
    finally:
        kubectl("--namespace=default", "delete", "nad", "sriov")


# --- what the pages have besides -------------------------------------------------------------------------------------


def block(page: str, text: str) -> str:
    """Return the block of the page that has the text."""
    (found,) = (part for part in pages.text(page).split("```") if text in part)
    return found.partition("\n")[2]


def test_the_policy_for_tenants_refuses_what_the_page_says(kubectl: Kubectl, api_namespace: str) -> None:
    networks, default = "k8s.v1.cni.cncf.io/networks", "v1.multus-cni.io/default-network"
    items = list(yaml.safe_load_all(block("docs/security.md", "kind: ValidatingAdmissionPolicyBinding")))
    # Not for the pods of other tests.
    expressions = items[1]["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    expressions.append({"key": "kubernetes.io/metadata.name", "operator": "In", "values": [api_namespace]})

    def answer(annotations: dict[str, str]) -> str:
        metadata = {"name": "web", "namespace": api_namespace, "annotations": annotations}
        spec = {"containers": [{"name": "main", "image": "none"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        done = kubectl.run("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        return done.stdout + done.stderr

    policy = "\n---\n".join(map(json.dumps, items))
    kubectl("apply", "-f", "-", stdin=policy)
    try:
        end = time.monotonic() + 30
        while "the default network of a pod is the cluster's" not in answer({default: "other"}):
            assert time.monotonic() < end, "the API server reads a policy a moment later"
            time.sleep(0.1)
        refused = "networks are named in the short form only, without requests"
        assert refused in answer({networks: '[{"name": "blue", "ips": ["10.1.0.2"]}]'})
        for allowed in ({}, {networks: "blue, web/green@net5"}):
            assert answer(allowed) == "pod/web created (server dry run)\n"
    finally:
        kubectl("delete", "-f", "-", stdin=policy)


def test_the_container_can_be_made_privileged_as_the_page_says(kubectl: Kubectl, tmp_path: Path) -> None:
    (tmp_path / "manifests").symlink_to(MANIFESTS)
    (tmp_path / "mine").mkdir()
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    patches = block("docs/operations.md", "{privileged: true, allowPrivilegeEscalation: null")
    text = f"{head}resources: [../manifests/overlays/vanilla]\n{patches}"
    (tmp_path / "mine" / "kustomization.yaml").write_text(text)
    kubectl("apply", "--dry-run=server", "--validate=strict", "-k", tmp_path / "mine")
    items = yaml.safe_load_all(kubectl("kustomize", tmp_path / "mine"))
    (found,) = (item for item in items if item["kind"] == "DaemonSet")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    context = container["securityContext"]
    assert (context["privileged"], {"capabilities", "seccompProfile"} & context.keys()) == (True, set())
