"""`manifests/ready-before-pods` at a real API server: the rule, and what the reporter may write.

The schema is what the documentation of node-readiness-controller says of its custom resource.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import yaml

from tests.e2e.apiserver import ApiServer
from tests.e2e.kube_client import ApiError, Client
from tests.e2e.test_manifests import Kubectl
from tests.repo import manifests
from tests.repo.manifests import MANIFESTS

pytest_plugins = ["tests.e2e.kube_fixtures"]

FOLDER: Final = MANIFESTS / "ready-before-pods"
ACCOUNT: Final = "multus-readiness-reporter"
CONDITION: Final = "multus.io/Ready"
CRD: Final = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: nodereadinessrules.readiness.node.x-k8s.io}
spec:
  group: readiness.node.x-k8s.io
  scope: Cluster
  names: {kind: NodeReadinessRule, plural: nodereadinessrules, singular: nodereadinessrule}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          required: [spec]
          properties:
            spec:
              type: object
              required: [conditions, taint, enforcementMode, nodeSelector]
              properties:
                conditions:
                  type: array
                  minItems: 1
                  maxItems: 32
                  x-kubernetes-list-type: map
                  x-kubernetes-list-map-keys: [type]
                  items:
                    type: object
                    required: [type, requiredStatus]
                    properties:
                      type: {type: string, minLength: 1, maxLength: 316}
                      requiredStatus: {type: string, enum: ["True", "False", Unknown]}
                      defaultStatus: {type: string, enum: ["True", "False", Unknown]}
                conditionPolicy: {type: string, enum: [allOf, anyOf]}
                taint:
                  type: object
                  required: [key, effect]
                  properties:
                    key:
                      type: string
                      maxLength: 253
                      pattern: "^readiness[.]k8s[.]io/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
                    effect: {type: string, enum: [NoSchedule, PreferNoSchedule, NoExecute]}
                    value: {type: string, maxLength: 63}
                enforcementMode: {type: string, enum: [bootstrap-only, continuous]}
                dryRun: {type: boolean}
                nodeSelector:
                  type: object
                  properties:
                    matchLabels: {type: object, additionalProperties: {type: string}}
                    matchExpressions: {type: array, items: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""


@pytest.fixture
def objects(api_server: ApiServer) -> list[dict[str, Any]]:
    """The manifests, once the API server knows their kinds."""
    api_server.install_crd(yaml.safe_load(CRD))
    return manifests.objects(FOLDER)


@pytest.fixture
def kubectl(api_server: ApiServer) -> Kubectl:
    return Kubectl(api_server)


def test_an_api_server_takes_them(kubectl: Kubectl, objects: list[dict[str, Any]]) -> None:
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-k", FOLDER)
    assert len(said.splitlines()) == len(objects)


@contextlib.contextmanager
def reporter(server: ApiServer, node: str) -> Iterator[Client]:
    """A client with the token of a reporter's pod on the node."""
    server.create_service_account("kube-system", ACCOUNT)
    name = f"reporter-{node}"
    pod = server.create_pod(name, namespace="kube-system", node=node, serviceAccountName=ACCOUNT)
    client = server.client_for_token(server.service_account_token("kube-system", ACCOUNT, bound_to=pod))
    try:
        yield client
    finally:
        client.close()
        server.delete_pod(name, "kube-system")


def report(client: Client, node: str, change: Callable[[dict[str, Any]], object] = lambda status: None) -> None:
    """Do what the reporter does: read the node, write its status with the condition. Raises ApiError."""
    path = f"/api/v1/nodes/{node}"
    found = client.get(path)
    conditions = found["status"]["conditions"]
    conditions[:] = [item for item in conditions if item["type"] != CONDITION]
    moment = "2026-11-24T00:00:00Z"
    conditions.append(
        {"type": CONDITION, "status": "True", "reason": "EndpointOK", "message": "it is ready",
         "lastHeartbeatTime": moment, "lastTransitionTime": moment}
    )  # fmt: skip
    change(found["status"])
    client.request("PUT", f"{path}/status", found)


def other_condition(status: dict[str, Any]) -> None:
    status["conditions"].append({**copy.deepcopy(status["conditions"][-1]), "type": "Ready2"})


def ready_off(status: dict[str, Any]) -> None:
    (found,) = [item for item in status["conditions"] if item["type"] == "Ready"]
    found["status"] = "False"


def other_address(status: dict[str, Any]) -> None:
    status["addresses"] = [{"type": "InternalIP", "address": "203.0.113.1"}]


def more_capacity(status: dict[str, Any]) -> None:
    status["capacity"] = {"cpu": "100"}


@pytest.fixture
def nodes(api_server: ApiServer, objects: list[dict[str, Any]], api_namespace: str) -> tuple[str, str]:
    """Two nodes; the rights and the policy are in force."""
    api_server.apply(*objects)
    mine, other = f"{api_namespace}-a", f"{api_namespace}-b"
    api_server.create_node(mine)
    api_server.create_node(other)
    with reporter(api_server, other) as client:

        def refused() -> bool:
            try:
                report(client, other, other_condition)
            except ApiError as error:
                return "may write the condition" in str(error)
            return False

        api_server.wait_until(refused, "the policy is in force", 60)
    return mine, other


def conditions(server: ApiServer, node: str) -> dict[str, str]:
    return {item["type"]: item["status"] for item in server.get("v1", "Node", node)["status"]["conditions"]}


def test_the_reporter_writes_its_condition_of_its_node(api_server: ApiServer, nodes: tuple[str, str]) -> None:
    mine, other = nodes
    with reporter(api_server, mine) as client:
        report(client, mine)
        report(client, mine)
        assert conditions(api_server, mine) == {"Ready": "True", CONDITION: "True"}
        with pytest.raises(ApiError, match="the status of its own node only"):
            report(client, other)
        for change in (other_condition, ready_off, other_address, more_capacity):
            with pytest.raises(ApiError, match="may write the condition multus.io/Ready only"):
                report(client, mine, change)
        # Neither labels nor taints.
        parts: list[dict[str, Any]] = [{"metadata": {"labels": {"a": "b"}}}, {"spec": {"taints": []}}]
        for part in parts:
            with pytest.raises(ApiError, match="forbidden"):
                client.merge(f"/api/v1/nodes/{mine}", part)


def test_a_token_of_no_pod_writes_nothing(api_server: ApiServer, nodes: tuple[str, str]) -> None:
    client = api_server.client_for_token(api_server.service_account_token("kube-system", ACCOUNT))
    with contextlib.closing(client), pytest.raises(ApiError, match="the status of its own node only"):
        report(client, nodes[0])


def test_others_write_what_they_could(api_server: ApiServer, nodes: tuple[str, str]) -> None:
    report(api_server.client, nodes[0], other_address)
