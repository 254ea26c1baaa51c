"""`charts/multus-daemon`: what helm says of it, what it renders beside the kustomizations, at a real API server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from multus_daemon import cli, settings
from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.e2e.chart import CASES, GOLDEN, ChartError, helm, objects, template
from tests.e2e.test_manifests import Kubectl, in_any_order
from tests.repo.manifests import CHART, MANIFESTS, RENDERED, build, with_component

pytest_plugins = ["tests.e2e.kube_fixtures"]

DISTRIBUTIONS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
SIGNED: dict[str, Any] = {"enabled": True, "tls": {"caBundle": "Q0E="}}
"""Values of a webhook without cert-manager."""
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by")


@pytest.fixture(scope="module", autouse=True)
def _helm_is_there() -> None:
    try:
        build_tools.find("helm")
    except build_tools.ToolError as error:
        pytest.skip(str(error))


def plain(item: dict[str, Any]) -> dict[str, Any]:
    """An object without what a chart's objects have besides, its configuration decoded."""
    item = json.loads(json.dumps(item))
    for labels in (item["metadata"].get("labels", {}),):
        for label in OF_HELM:
            labels.pop(label, None)
    item["metadata"].get("annotations", {}).pop("helm.sh/resource-policy", None)
    for key in ("labels", "annotations"):
        if not item["metadata"].get(key):
            item["metadata"].pop(key, None)
    if item["kind"] == "ConfigMap":
        item["data"] = {key: json.loads(value) for key, value in item["data"].items()}
    if item["kind"] == "DaemonSet" and item["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": "10%"}:
        # The chart changes a tenth of the nodes at a time, the plain manifests one node.
        item["spec"]["updateStrategy"]["rollingUpdate"] = {"maxUnavailable": 1}
    if "template" in item.get("spec", {}):
        metadata, pod = item["spec"]["template"]["metadata"], item["spec"]["template"]["spec"]
        metadata.pop("annotations", None)
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            # The default of a tag that is not `latest`, and of a digest.
            assert container.pop("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
    return item


def same(made: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    def keyed(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {f"{item['kind']}/{item['metadata']['name']}": in_any_order(plain(item)) for item in items}

    assert keyed(made) == keyed(wanted)


# --- what it renders -------------------------------------------------------------------------------------------------


def test_helm_has_nothing_to_object() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_each_distribution_is_its_overlay(distribution: str) -> None:
    same(objects({"distribution": distribution}), build(MANIFESTS / "overlays" / distribution))


def test_the_default_is_the_plain_file() -> None:
    same(objects({}), [item for item in yaml.safe_load_all(RENDERED.read_text()) if item])


def test_certificates_are_the_component_and_the_approver() -> None:
    made = objects({"perNodeCertificates": {"enabled": True}})
    wanted = with_component(MANIFESTS / "per-node-certificates", build(MANIFESTS / "base"))
    wanted += build(MANIFESTS / "cert-approver")
    # The manifests say it with a flag, as a patch can't change one key of a ConfigMap's text.
    (daemon_set,) = [item for item in wanted if item["kind"] == "DaemonSet"]
    (daemon,) = daemon_set["spec"]["template"]["spec"]["containers"]
    flag = daemon["args"].pop()
    (config_map,) = [item for item in wanted if item["kind"] == "ConfigMap"]
    found = json.loads(config_map["data"]["daemon-config.json"])
    found["perNodeCertificate"] = json.loads(flag.partition("=")[2])
    config_map["data"] = {"daemon-config.json": json.dumps(found)}
    same(made, wanted)


def test_tokens_for_the_metrics_are_the_component() -> None:
    made = objects({"metrics": {"tls": {"secretName": "multus-metrics-tls"}, "authorization": True}})
    wanted = with_component(MANIFESTS / "metrics-authorization", build(MANIFESTS / "base"))
    (daemon_set,) = [item for item in wanted if item["kind"] == "DaemonSet"]
    (daemon,) = daemon_set["spec"]["template"]["spec"]["containers"]
    words = cli.parser().parse_args(daemon["args"])
    daemon["args"] = ["run"]
    (config_map,) = [item for item in wanted if item["kind"] == "ConfigMap"]
    given = json.loads(config_map["data"]["daemon-config.json"])
    given |= {key: value for key, (_, value) in words.flags.items()}
    config_map["data"] = {"daemon-config.json": json.dumps(given)}
    same(made, wanted)


def test_the_device_status_is_the_kustomization() -> None:
    made = objects({"deviceStatus": {"enabled": True}})
    same(made, [*build(MANIFESTS / "base"), *build(MANIFESTS / "device-status")])


def test_the_pod_monitor_is_the_manifest() -> None:
    made = [item for item in objects({"podMonitor": {"enabled": True}}) if item["kind"] == "PodMonitor"]
    same(made, [yaml.safe_load((MANIFESTS / "monitoring" / "podmonitor.yaml").read_text())])


@pytest.mark.parametrize("url", ["", "https://docs.example.com/runbook/"])
def test_the_runbook_of_the_alerts_can_be_another(url: str) -> None:
    values = {"enabled": True} | ({"runbookUrl": url} if url else {})
    (made,) = [item for item in objects({"prometheusRule": values}) if item["kind"] == "PrometheusRule"]
    manifest = yaml.safe_load((MANIFESTS / "monitoring" / "prometheusrule.yaml").read_text())

    def links(rule: dict[str, Any]) -> list[str]:
        found = (item.get("annotations", {}) for group in rule["spec"]["groups"] for item in group["rules"])
        return [item["runbook_url"] for item in found if item]

    page = links(manifest)[0].partition("#")[0]
    assert links(made) == [link.replace(page, url) if url else link for link in links(manifest)]


def test_metrics_can_be_turned_off() -> None:
    assert "ports" not in daemon({"config": {"metricsPort": None}})
    assert configured({"config": {"metricsPort": None}}, "kube-system").metrics.port is None
    assert configured({}, "kube-system").metrics.port == daemon({})["ports"][0]["hostPort"]


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("injector", [False, True])
def test_the_webhook_is_the_kustomization(managed: bool, injector: bool) -> None:
    names = ["webhook", *(["webhook-injector"] if injector else [])]
    folders = [MANIFESTS / (f"{name}-cert-manager" if managed else name) for name in names]
    values = {"enabled": True, "certManager": {"enabled": managed}, "injector": {"enabled": injector}}
    made = objects({"webhook": values if managed else SIGNED | values})
    # A manifest gets it by a command: docs/operations.md.
    given = [hook["clientConfig"].pop("caBundle", "") for item in made for hook in item.get("webhooks", ())]
    assert set(given) == {"" if managed else "Q0E="}
    same(made, [item for folder in (MANIFESTS / "base", *folders) for item in build(folder)])


def test_the_webhook_is_off_by_default() -> None:
    for values in ({}, {"webhook": {"injector": {"enabled": True}}}):
        assert not [item for item in objects(values) if re.search("webhook|injector", item["metadata"]["name"])]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_uninstall_is_the_kustomization(distribution: str) -> None:
    made = objects({"distribution": distribution, "uninstall": {"enabled": True}})
    rights = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "RoleBinding", "CustomResourceDefinition")
    overlay = build(MANIFESTS / "overlays" / distribution)
    same(
        [item for item in made if item["kind"] not in rights],
        # The configuration stays until the release goes: what pods have is freed by it.
        [*build(MANIFESTS / "uninstall" / "overlays" / distribution),
         *(item for item in overlay if item["kind"] == "ConfigMap")],
    )  # fmt: skip


def test_what_is_left_to_the_user_is_put_in() -> None:
    (daemon_set,) = [item for item in objects({"uninstall": {"enabled": True, "force": True, "purge": True}})
                     if item["kind"] == "DaemonSet"]  # fmt: skip
    assert daemon_set["spec"]["template"]["spec"]["initContainers"][0]["args"][-2:] == ["--force", "--purge"]


def daemon(values: dict[str, Any]) -> dict[str, Any]:
    (daemon_set,) = [item for item in objects(values) if item["kind"] == "DaemonSet"]
    found: dict[str, Any]
    (found,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return found


def test_the_daemon_gets_further_variables() -> None:
    more = [
        {"name": "KUBERNETES_SERVICE_HOST", "value": "192.0.2.1"},
        {"name": "FROM_A_SECRET", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
    ]
    assert daemon({"daemonSet": {"env": more}})["env"] == [*daemon({})["env"], *more]


def configured(values: dict[str, Any], namespace: str) -> settings.Settings:
    (config_map,) = [item for item in objects(values, namespace) if item["kind"] == "ConfigMap"]
    return settings.parse(config_map["data"]["daemon-config.json"].encode(), namespace)


@pytest.mark.parametrize(
    ("values", "namespace", "wanted"),
    [
        ({}, "kube-system", "kube-system"),
        ({}, "networks", "networks"),
        ({"config": {"multusNamespace": "other"}}, "networks", "other"),
    ],
)
def test_cluster_wide_networks_are_in_the_namespace_of_the_release(
    values: dict[str, Any], namespace: str, wanted: str
) -> None:
    assert configured(values, namespace).networks.multus_namespace == wanted
    # The key is absent where the code's default says the same: a plain manifest has none either.
    assert (namespace == "kube-system") is ("multusNamespace" not in configured(values, namespace).given)


def test_a_tenth_of_the_nodes_change_at_once() -> None:
    (daemon_set,) = [item for item in objects({}) if item["kind"] == "DaemonSet"]
    assert daemon_set["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": "10%"},
    }


def test_the_webhook_may_lose_one_pod_at_a_time() -> None:
    made = objects({"webhook": SIGNED | {"podDisruptionBudget": {"enabled": False}}})
    assert "PodDisruptionBudget" not in {item["kind"] for item in made}
    made = objects({"webhook": SIGNED | {"replicas": 1}})
    (found,) = [item for item in made if item["kind"] == "PodDisruptionBudget"]
    (deployment,) = [item for item in made if item["kind"] == "Deployment"]
    # A minimum would keep a node with the only pod from being drained.
    assert set(found["spec"]) == {"maxUnavailable", "selector"}
    assert found["spec"]["selector"] == deployment["spec"]["selector"]


def test_the_networks_of_the_webhook_can_be_narrowed() -> None:
    made = objects({"webhook": SIGNED | {"networkPolicy": {"enabled": False}}})
    assert "NetworkPolicy" not in {item["kind"] for item in made}
    servers = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    made = objects({"webhook": SIGNED | {"networkPolicy": {"from": servers, "to": servers}}})
    (found,) = [item for item in made if item["kind"] == "NetworkPolicy"]
    assert [rule["from"] for rule in found["spec"]["ingress"]] == [servers]
    assert [rule["to"] for rule in found["spec"]["egress"]] == [servers]


@pytest.mark.parametrize("name", CASES)
def test_it_renders_what_it_did(name: str) -> None:
    assert template(CASES[name]) == (GOLDEN / f"{name}.yaml").read_text(), "python -m tests.e2e.chart, if it was meant"


def test_every_golden_file_is_of_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_daemon_takes_the_configuration(name: str) -> None:
    (found,) = [item for item in objects(CASES[name]) if item["kind"] == "ConfigMap"]
    assert settings.parse(found["data"]["daemon-config.json"].encode(), name).warnings == ()


def test_a_change_of_the_configuration_replaces_the_pods() -> None:
    def annotation(values: dict[str, Any]) -> str:
        (found,) = [item for item in objects(values) if item["kind"] == "DaemonSet"]
        return str(found["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert annotation({}) == annotation({"priorityClassName": "other"})
    assert annotation({}) != annotation({"config": {"logLevel": "debug"}})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"distribution": "kubeadm"}, "distribution"),
        ({"config": {"logLevl": "debug"}}, "logLevl"),
        ({"paths": {"binDir": "opt/cni/bin"}}, "binDir"),
        ({"daemonset": {}}, "daemonset"),
        ({"daemonSet": {"terminationGracePeriodSeconds": 10}}, "terminationGracePeriodSeconds"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"daemonSet": {"env": [{"name": "MULTUS_NODE_NAME", "value": "a"}]}}, "env"),
        ({"daemonSet": {"env": [{"name": "MULTUS_NODE_IPS", "value": "a"}]}}, "env"),
        ({"daemonSet": {"env": [{"value": "a"}]}}, "name"),
        ({"podMonitor": {"enabled": True}, "config": {"metricsPort": None}}, "set config.metricsPort too"),
        ({"metrics": {"authorization": True}}, "set metrics.tls.secretName too"),
        ({"podMonitor": {"enabled": True}, "metrics": {"tls": {"secretName": "a"}}}, "set podMonitor.tlsConfig too"),
        (
            {
                "podMonitor": {"enabled": True, "tlsConfig": {"insecureSkipVerify": True}},
                "metrics": {"tls": {"secretName": "a"}, "authorization": True},
            },
            "set podMonitor.authorization too",
        ),
        ({"webhook": {"enabled": True}}, "set webhook.certManager.enabled, or webhook.tls.caBundle"),
        ({"prometheusRule": {"runbookUrl": "docs/runbook.md"}}, "runbookUrl"),
        ({"priorityClass": {"create": True}}, "does not begin with system-"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_can_not_be_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ChartError) as caught:
        template(values)
    assert said in str(caught.value)


def test_the_schema_is_of_these_values() -> None:
    """Every value is in the schema and the reverse, at all depths."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(node: dict[str, Any], values: dict[str, Any], path: str) -> None:
        names = set(node["properties"]) - {"global"}
        assert names == set(values), path
        for name in names:
            if "properties" in node["properties"][name]:
                compare(node["properties"][name], values[name], f"{path}.{name}")

    compare(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")


# --- at an API server ------------------------------------------------------------------------------------------------


@pytest.fixture
def kubectl(api_server: ApiServer) -> Kubectl:
    return Kubectl(api_server)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("values", [{}, {"perNodeCertificates": {"enabled": True}}, {"uninstall": {"enabled": True}}],
                         ids=["", "certificates", "uninstall"])  # fmt: skip
def test_an_api_server_takes_what_it_renders(kubectl: Kubectl, distribution: str, values: dict[str, Any]) -> None:
    text = template({"distribution": distribution, **values})
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert len(said.splitlines()) == len([item for item in yaml.safe_load_all(text) if item])


@pytest.mark.parametrize("name", CASES)
def test_an_api_server_takes_every_case(kubectl: Kubectl, name: str) -> None:
    # These custom resources are the Prometheus operator's and cert-manager's, which are not there.
    others = ("monitoring.coreos.com/", "cert-manager.io/")
    items = [item for item in objects(CASES[name]) if not item["apiVersion"].startswith(others)]
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump_all(items))


@pytest.fixture
def cluster(api_server: ApiServer, kubectl: Kubectl) -> Iterator[Path]:
    """The kubeconfig of an administrator; the release and what the plain file made go afterwards."""
    kubeconfig = api_server.kubeconfig("administrator", ("system:masters",))
    yield kubeconfig
    helm("uninstall", "multus", "--namespace", "kube-system", "--ignore-not-found", "--kubeconfig", kubeconfig)
    for name in ("daemonset/kube-multus-ds", "daemonset/multus-uninstall"):
        kubectl("-n", "kube-system", "delete", name, "--ignore-not-found", "--wait=false")


def test_it_takes_over_what_the_plain_file_has_made(kubectl: Kubectl, cluster: Path) -> None:
    kubectl("apply", "-f", RENDERED)
    before = json.loads(kubectl("-n", "kube-system", "get", "daemonset", "kube-multus-ds", "-o", "json"))
    command = ("upgrade", "--install", "multus", CHART, "--namespace", "kube-system", "--kubeconfig", cluster)
    with pytest.raises(ChartError, match="exists and cannot be imported"):
        helm(*command)
    said = helm(*command, "--take-ownership")
    assert "rollout status daemonset/kube-multus-ds" in said
    after = json.loads(kubectl("-n", "kube-system", "get", "daemonset", "kube-multus-ds", "-o", "json"))
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "the same object, so its pods are replaced one by one"
    changed = after["spec"]["template"]["metadata"].pop("annotations")
    assert set(changed) == {"checksum/config"}
    assert after["spec"]["template"]["spec"] == before["spec"]["template"]["spec"]
    # Off again: the definitions, and with them every network, stay.
    helm("uninstall", "multus", "--namespace", "kube-system", "--kubeconfig", cluster)
    kubectl("get", "crd", "network-attachment-definitions.k8s.cni.cncf.io")
    left = kubectl("-n", "kube-system", "get", "daemonset,configmap,serviceaccount", "-o", "name").split()
    assert not {"daemonset.apps/kube-multus-ds", "configmap/multus-daemon", "serviceaccount/multus-daemon"} & set(left)


def test_the_release_cleans_the_nodes(kubectl: Kubectl, cluster: Path) -> None:
    command = ("upgrade", "--install", "multus", CHART, "--namespace", "kube-system", "--kubeconfig", cluster)
    helm(*command, "--take-ownership")
    said = helm(*command, "--reuse-values", "--set", "uninstall.enabled=true")
    assert "rollout status daemonset/multus-uninstall" in said
    found = kubectl("-n", "kube-system", "get", "daemonset", "-o", "name").split()
    assert found == ["daemonset.apps/multus-uninstall"]
