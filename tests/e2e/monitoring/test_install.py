"""What `kubectl apply -k manifests/monitoring` and the chart make of the rules and the dashboard."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.chart import objects
from tests.e2e.monitoring import rules

ENABLED = {"prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}


@pytest.fixture(scope="module")
def kustomized() -> dict[str, dict[str, Any]]:
    """The objects of the kustomization by kind."""
    try:
        kubectl = build_tools.find("kubectl")
        build_tools.find("helm")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    done = subprocess.run([kubectl, "kustomize", rules.MONITORING], capture_output=True, text=True, check=True)
    return {item["kind"]: item for item in yaml.safe_load_all(done.stdout)}


def test_the_kustomization_has_three_objects_in_one_namespace(kustomized: dict[str, dict[str, Any]]) -> None:
    assert set(kustomized) == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    assert {item["metadata"]["namespace"] for item in kustomized.values()} == {"kube-system"}
    # With these names the rules and the dashboard find the samples.
    assert kustomized["PodMonitor"]["metadata"]["name"] == "multus-daemon"
    (endpoint,) = kustomized["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert "node" in {item["targetLabel"] for item in endpoint["relabelings"]}


def test_the_chart_has_the_same(kustomized: dict[str, dict[str, Any]]) -> None:
    made = {item["kind"]: item for item in objects(ENABLED) if item["metadata"]["name"] != "multus-daemon"}
    (rule,) = [item for item in objects(ENABLED) if item["kind"] == "PrometheusRule"]
    assert rule["spec"] == kustomized["PrometheusRule"]["spec"]
    assert rule["metadata"]["name"] == kustomized["PrometheusRule"]["metadata"]["name"]
    found = made["ConfigMap"]
    assert json.loads(found["data"]["multus.json"]) == json.loads(kustomized["ConfigMap"]["data"]["multus.json"])
    assert found["metadata"]["labels"].items() >= kustomized["ConfigMap"]["metadata"]["labels"].items()


def test_the_chart_has_them_where_they_are_asked_for() -> None:
    assert not {item["kind"] for item in objects({})} & {"PrometheusRule"}
    assert not [item for item in objects({}) if item["metadata"]["name"] == "multus-dashboard"]
    labels = {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
    (rule,) = [item for item in objects(labels, "networks") if item["kind"] == "PrometheusRule"]
    assert rule["metadata"]["namespace"] == "networks"
    assert rule["metadata"]["labels"].items() >= {"release": "prometheus", "app": "multus"}.items()
