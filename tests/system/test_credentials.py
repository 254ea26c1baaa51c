"""Credentials that a program hands out."""

import json

from multus_daemon.cluster.kube.credentials import Kubeconfig
from tests.unit.cluster.kube.test_credentials import write


def test_exec_plugin(tmp_path):
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "of exec"}}
    (tmp_path / "plugin").write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    (tmp_path / "plugin").chmod(0o755)
    user = {"exec": {"command": str(tmp_path / "plugin"), "apiVersion": "client.authentication.k8s.io/v1"}}
    assert Kubeconfig(write(tmp_path / "k", user)).load().header() == "Bearer of exec"
