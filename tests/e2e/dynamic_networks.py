"""The real multus-dynamic-networks-controller on a scratch node.

No package and no Go module proxy has it: who runs the tests builds it and names it by a variable.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.node import Node
from tests.e2e.server_process import ServerProcess

VARIABLE: Final = "WIDE_DYNAMIC_NETWORKS_CONTROLLER"
_SOURCE: Final = (
    "./cmd/dynamic-networks-controller of github.com/k8snetworkplumbingwg/multus-dynamic-networks-controller"
)
_ACCOUNT: Final = "dynamic-networks-controller"
_RULES: Final = [
    {
        "apiGroups": ["k8s.cni.cncf.io"],
        "resources": ["network-attachment-definitions"],
        "verbs": ["get", "list", "watch"],
    },
    {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get", "list", "update", "watch"]},
    {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
]
"""Rights of its own manifest."""
# It looks for its account below /var/run, in a mount namespace of its own here.
_START: Final = """
run=$(readlink -f /var/run); mount -t tmpfs tmpfs "$run"; mkdir -p "$run/secrets/kubernetes.io"
ln -s "$1" "$run/secrets/kubernetes.io/serviceaccount"; shift; exec "$@"
"""


def program() -> Path:
    """The program that the variable names; where there is none, the test is skipped and says so."""
    if not (path := os.environ.get(VARIABLE)):
        pytest.skip(f"{VARIABLE} is not set: build {_SOURCE} in a checkout, and set it to the program")
    assert os.access(path, os.X_OK), f"{VARIABLE}: {path} is no program"
    return Path(path)


class DynamicNetworksController:
    """It watches the pods of a node, and asks the daemon of this node."""

    def __init__(self, server: ApiServer, node: Node, runtime: Path) -> None:
        """`runtime` is the container runtime's socket; the node has its name."""
        account = node.root / "account"
        account.mkdir()
        (account / "token").write_text(server.service_account_token("kube-system", _ACCOUNT))
        (account / "ca.crt").write_bytes(server.ca_file.read_bytes())
        (account / "namespace").write_text("kube-system")
        self._grant(server)
        config = node.root / "dynamic-networks-config.json"
        config.write_text(json.dumps({"criSocketPath": str(runtime), "multusSocketPath": str(node.socket)}))
        env = [f"NODE_NAME={node.node_name}", "KUBERNETES_SERVICE_HOST=127.0.0.1"]
        command = ["unshare", "-m", "sh", "-ec", _START, "start", str(account)]
        command += ["env", *env, f"KUBERNETES_SERVICE_PORT={server.port}"]
        command += [str(program()), f"-config={config}", "-v=5"]
        self.process = ServerProcess("dynamic-networks-controller", command, node.root)

    @staticmethod
    def _grant(server: ApiServer) -> None:
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": _ACCOUNT}}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _ACCOUNT}
        subject = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": "kube-system"}
        server.apply(
            {**rbac, "kind": "ClusterRole", "rules": _RULES},
            {**rbac, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]},
        )
