"""The admission webhook with a real API server: `multus-daemon webhook`, the manifests' configuration, kubectl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import webhook_cluster
from tests.e2e.apiserver import ApiServer
from tests.e2e.webhook_cluster import BAD, GOOD, Cluster, network, pod

pytest_plugins = ["tests.e2e.kube_fixtures"]


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, tmp_path: Path) -> Iterator[Cluster]:
    with webhook_cluster.running(api_server, api_namespace, tmp_path) as cluster:
        yield cluster


def test_a_network_that_can_not_be_used_is_refused_and_pods_are_warned_about(cluster: Cluster) -> None:
    refused = cluster.apply(network("blue", BAD))
    assert refused.returncode == 1
    assert "denied the request: spec.config line 4, column 1: not JSON: trailing comma in object" in refused.stderr
    done = cluster.apply(network("blue", GOOD))
    assert (done.returncode, done.stderr) == (0, "")
    # The webhook hears of the network by its watch.
    pods = pod("wrong", "blu"), pod("right", "blue")
    (warning,) = cluster.wait_until("is blue meant?", *pods).splitlines()
    assert warning.startswith(f"Warning: network {cluster.namespace}/blu does not exist")
    assert cluster.apply(*pods).returncode == 0
    # A workload, by its template; one without networks is not asked about.
    for networks, said in (("blu", True), ("blue", False), (None, False)):
        template = pod("", networks) if networks else pod("", "") | {"metadata": {}}
        template["metadata"] = {**template["metadata"], "labels": {"app": "web"}}
        spec = {
            "selector": {"matchLabels": {"app": "web"}},
            "template": {key: template[key] for key in ("metadata", "spec")},
        }
        metadata = {"name": f"web-{networks or 'none'}"}
        deployment: dict[str, Any] = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
        if said:
            cluster.wait_until("is blue meant?", deployment)
        else:
            done = cluster.apply(deployment)
            assert (done.returncode, "is blue meant?" in done.stderr) == (0, False), done.stderr
    cron: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "cron"}}
    template = pod("", "blu")
    template["spec"]["restartPolicy"] = "Never"
    template = {key: template[key] for key in ("metadata", "spec")}
    cron["spec"] = {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": template}}}
    cluster.wait_until("is blue meant?", cron)


def test_a_webhook_that_is_down_keeps_nobody_from_anything(cluster: Cluster) -> None:
    cluster.webhook.stop()
    done = cluster.apply(network("blue", BAD), pod("a", "blue"))
    assert (done.returncode, done.stderr) == (0, "")
    # A network that was bad before the webhook came can be changed otherwise.
    cluster.webhook.start()
    cluster.wait_until("denied the request", network("probe", BAD))
    labelled = network("blue", BAD)
    labelled["metadata"]["labels"] = {"a": "b"}
    cluster.wait_until("not JSON: trailing comma", labelled)
    assert cluster.apply(labelled).returncode == 0
