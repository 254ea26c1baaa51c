"""What the pages tell an administrator to apply, at a real API server: a policy, more rights, a certificate."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.repo import pages
from tests.repo.manifests import MANIFESTS, build

pytest_plugins = ["tests.e2e.kube_fixtures"]

NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"
DEFAULT: Final = "v1.multus-cni.io/default-network"


class Shell:
    """Runs commands of a page; `kubectl` is an administrator's."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        try:
            program = build_tools.find("kubectl")
        except build_tools.ToolError as error:
            pytest.skip(str(error))
        self.directory = directory
        (directory / "manifests").symlink_to(MANIFESTS)
        (directory / "bin").mkdir()
        (directory / "bin" / "kubectl").symlink_to(program)
        kubeconfig = server.kubeconfig("administrator", ("system:masters",))
        self._env = {"PATH": f"{directory}/bin:{os.environ['PATH']}", "KUBECONFIG": str(kubeconfig)}

    def __call__(self, script: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = ["sh", "-ec", script]
        return subprocess.run(
            command, cwd=self.directory, env=self._env, input=stdin, capture_output=True, text=True, timeout=50
        )

    def output(self, script: str, stdin: str = "") -> str:
        done = self(script, stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shell(api_server: ApiServer, tmp_path: Path) -> Shell:
    return Shell(api_server, tmp_path)


def block(page: str, text: str) -> str:
    """Return the block of the page that has the text."""
    (found,) = (part for part in pages.text(page).split("```") if text in part)
    return found.partition("\n")[2]


@pytest.fixture
def policy(shell: Shell, api_namespace: str) -> Iterator[str]:
    """The namespace in which the policy of docs/security.md holds."""
    items = list(yaml.safe_load_all(block("docs/security.md", "kind: ValidatingAdmissionPolicyBinding")))
    # Not for the pods of other tests.
    expressions = items[1]["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    expressions.append({"key": "kubernetes.io/metadata.name", "operator": "In", "values": [api_namespace]})
    shell.output("kubectl apply -f -", "\n---\n".join(map(json.dumps, items)))
    yield api_namespace
    for item in items:
        shell.output(f"kubectl delete {item['kind']} {item['metadata']['name']}")


def test_the_policy_refuses_what_the_page_says(shell: Shell, policy: str) -> None:
    def refusal(annotations: dict[str, str]) -> str:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "annotations": annotations}}
        pod |= {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        return shell(f"kubectl -n {policy} apply --dry-run=server -f -", json.dumps(pod)).stderr

    end = time.monotonic() + 30
    while not (said := refusal({DEFAULT: "other"})):
        assert time.monotonic() < end, "the API server reads a policy a moment later"
        time.sleep(0.1)
    assert "the default network of a pod is the cluster's" in said
    refused = "networks are named in the short form only, without requests"
    assert refused in refusal({NETWORKS: '[{"name": "blue", "ips": ["10.1.0.2"]}]'})
    assert [refusal(annotations) for annotations in ({}, {NETWORKS: "blue, web/green@net5"})] == ["", ""]


def test_the_container_can_be_made_privileged(shell: Shell) -> None:
    patches = block("docs/operations.md", "{privileged: true, allowPrivilegeEscalation: null")
    (shell.directory / "mine").mkdir()
    head = (
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../manifests/overlays/vanilla]\n"
    )
    (shell.directory / "mine" / "kustomization.yaml").write_text(head + patches)
    shell.output("kubectl apply --dry-run=server --validate=strict -k mine")
    items = yaml.safe_load_all(shell.output("kubectl kustomize mine"))
    (found,) = (item for item in items if item["kind"] == "DaemonSet")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    context = container["securityContext"]
    assert (context["privileged"], {"capabilities", "seccompProfile"} & context.keys()) == (True, set())


def test_a_webhook_without_cert_manager_gets_its_certificate(shell: Shell) -> None:
    try:
        shell.output(block("docs/operations.md", "multus-webhook-tls"))
        found = json.loads(shell.output("kubectl get validatingwebhookconfiguration multus-webhook -o json"))
        bundles = {hook["clientConfig"]["caBundle"] for hook in found["webhooks"]}
        (wanted,) = shell.output("base64 -w0 tls.crt").split()
        assert bundles == {wanted}
        assert len(found["webhooks"]) == sum(
            len(item["webhooks"]) for item in build(MANIFESTS / "webhook") if "webhooks" in item
        )
    finally:
        shell(
            "kubectl delete --wait=false -k manifests/webhook; kubectl -n kube-system delete secret multus-webhook-tls"
        )
