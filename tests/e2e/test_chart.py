"""`charts/multus-daemon`: what helm says of it, what values make of it, at a real API server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from multus_daemon import cli, settings
from tests.e2e import build_tools
from tests.e2e.addresses.objects import forget
from tests.e2e.apiserver import ApiServer
from tests.e2e.chart import CASES, OF_OTHERS, ChartError, helm, objects, template
from tests.e2e.test_manifests import Kubectl, kustomization
from tests.repo.manifests import CHART, MANIFESTS, RENDERED, of_file

RUNS: Final = ("helm",)
pytest_plugins = ["tests.e2e.kube_fixtures"]

DISTRIBUTIONS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
SIGNED: dict[str, Any] = {"enabled": True, "tls": {"caBundle": "Q0E="}}
"""Values of a webhook without cert-manager."""


@pytest.fixture(scope="module", autouse=True)
def _helm_is_there() -> None:
    try:
        build_tools.find("helm")
    except build_tools.ToolError as error:
        pytest.skip(str(error))


# --- what it renders -------------------------------------------------------------------------------------------------


def test_helm_has_nothing_to_object() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


def test_the_components_of_the_manifests_are_its_values(tmp_path: Path) -> None:
    """A patch can't change one key of a ConfigMap's text: a component says it with a flag."""
    try:
        kubectl = build_tools.find("kubectl")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    mine = kustomization(tmp_path, "metrics-authorization", "per-node-certificates")
    done = subprocess.run([kubectl, "kustomize", mine], capture_output=True, text=True, check=True, timeout=50)
    patched = {item["kind"]: item for item in yaml.safe_load_all(done.stdout) if item}
    made = {
        item["kind"]: item
        for item in objects(
            {
                "perNodeCertificates": {"enabled": True},
                "metrics": {"tls": {"secretName": "multus-metrics-tls"}, "authorization": True},
            }
        )
    }
    (theirs, ours), (found, wanted) = (
        (pod, pod["containers"][0])
        for pod in (item["DaemonSet"]["spec"]["template"]["spec"] for item in (patched, made))
    )
    flags = dict(cli.parser().parse_args(ours["args"]).flags)
    given = json.loads(patched["ConfigMap"]["data"]["daemon-config.json"]) | {
        key: value for key, (_, value) in flags.items()
    }
    assert given == json.loads(made["ConfigMap"]["data"]["daemon-config.json"])

    def named(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {item["name"]: item for item in items}

    assert named(theirs["volumes"]) == named(found["volumes"])
    assert named(ours["volumeMounts"]) == named(wanted["volumeMounts"])


@pytest.mark.parametrize("url", ["", "https://docs.example.com/runbook/"])
def test_the_runbook_of_the_alerts_can_be_another(url: str) -> None:
    values = {"enabled": True} | ({"runbookUrl": url} if url else {})
    (made,) = [item for item in objects({"prometheusRule": values}) if item["kind"] == "PrometheusRule"]
    (manifest,) = of_file(MANIFESTS / "monitoring" / "prometheusrule.yaml")

    def links(rule: dict[str, Any]) -> list[str]:
        found = (item.get("annotations", {}) for group in rule["spec"]["groups"] for item in group["rules"])
        return [item["runbook_url"] for item in found if item]

    page = links(manifest)[0].partition("#")[0]
    assert links(made) == [link.replace(page, url) if url else link for link in links(manifest)]


def test_metrics_can_be_turned_off() -> None:
    assert "ports" not in daemon({"config": {"metricsPort": None}})
    assert configured({"config": {"metricsPort": None}}, "kube-system").metrics.port is None
    assert configured({}, "kube-system").metrics.port == daemon({})["ports"][0]["hostPort"]


def test_the_webhook_is_off_by_default() -> None:
    for values in ({}, {"webhook": {"injector": {"enabled": True}}}):
        assert not [item for item in objects(values) if re.search("webhook|injector", item["metadata"]["name"])]


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


def test_what_the_user_sets_of_the_pods_is_put_in() -> None:
    given = CASES["placement"]["daemonSet"]
    made = {item["kind"]: item for item in objects(CASES["placement"])}
    assert "CustomResourceDefinition" not in made
    found = made["DaemonSet"]
    pod = found["spec"]["template"]["spec"]
    (main,) = pod["containers"]
    assert found["metadata"]["name"] == given["name"]
    assert found["spec"]["updateStrategy"]["type"] == given["updateStrategy"]["type"]
    assert {key: pod[key] for key in ("nodeSelector", "affinity", "tolerations")} == {
        key: given[key] for key in ("nodeSelector", "affinity", "tolerations")
    }
    assert given["podAnnotations"].items() <= found["spec"]["template"]["metadata"]["annotations"].items()
    assert main["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    assert {"name": "ovs", "mountPath": "/run/openvswitch"} in main["volumeMounts"]
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    assert (paths["ovs"], paths["cnibin"]) == ("/run/openvswitch", "/usr/lib/cni")
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"] == "other"
    assert made["ServiceAccount"]["metadata"]["annotations"] == {"a": "b"}


def test_the_image_and_what_scrapes_it_are_put_in() -> None:
    given = CASES["metrics"]
    made = {item["kind"]: item for item in objects(given)}
    pod = made["DaemonSet"]["spec"]["template"]["spec"]
    image = f"{given['image']['repository']}@{given['image']['digest']}"
    assert {item["image"] for item in (*pod["initContainers"], *pod["containers"])} == {image}
    assert pod["imagePullSecrets"] == given["imagePullSecrets"]
    assert pod["priorityClassName"] == made["PriorityClass"]["metadata"]["name"] == "multus"
    assert pod["containers"][0]["ports"][0]["hostPort"] == 9091
    assert made["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    assert made["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["interval"] == "15s"
    made = {item["kind"]: item for item in objects(CASES["metrics-authorization"])}
    (endpoint,) = made["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert {key: endpoint[key] for key in ("tlsConfig", "authorization")} == {
        key: CASES["metrics-authorization"]["podMonitor"][key] for key in ("tlsConfig", "authorization")
    }


def test_the_paths_of_a_distribution_are_those_of_the_certificates() -> None:
    """`manifests` have them for kubeadm only."""
    made = {item["kind"]: item for item in objects(CASES["certificates-k3s"])}
    pod = made["DaemonSet"]["spec"]["template"]["spec"]
    mounts = {item["mountPath"] for item in pod["containers"][0]["volumeMounts"]}
    assert {"/var/lib/rancher/k3s/agent/kubelet.kubeconfig", "/var/lib/rancher/k3s/agent"} <= mounts
    found = json.loads(made["ConfigMap"]["data"]["daemon-config.json"])["perNodeCertificate"]
    assert found["bootstrapKubeconfig"] == "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"
    assert found["certDuration"] == "1h"


def test_in_the_place_of_others_the_directories_are_theirs() -> None:
    assert len(OF_OTHERS) == 2, "NVIDIA's and home-operations'"
    for values in OF_OTHERS:
        elsewhere = {key: f"/elsewhere{path}" for key, path in values["paths"].items()}
        made = {item["kind"]: item for item in objects(values | {"paths": elsewhere})}
        volumes = made["DaemonSet"]["spec"]["template"]["spec"]["volumes"]
        assert set(elsewhere.values()) <= {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
        assert json.loads(made["ConfigMap"]["data"]["daemon-config.json"])["binDir"] == elsewhere["binDir"]


def test_the_webhook_has_the_certificate_of_its_user() -> None:
    made = objects(CASES["webhook"])
    assert {hook["clientConfig"]["caBundle"] for item in made for hook in item.get("webhooks", ())} == {"Q0E="}
    (deployment,) = [item for item in made if item["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 3
    volumes = {item["name"]: item for item in deployment["spec"]["template"]["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "own"


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


def test_the_custom_resources_of_whereabouts_stay_as_they_are(
    api_server: ApiServer, kubectl: Kubectl, cluster: Path
) -> None:
    command = ("upgrade", "--install", "multus", CHART, "--namespace", "kube-system", "--kubeconfig", cluster)
    dry = (*command, "--dry-run=server", "--take-ownership", "--set", "addresses.enabled=true")
    forget(api_server)
    try:
        assert resources(helm(*dry)) == {"ippools", "overlappingrangeipreservations"}
        kubectl("create", "-k", MANIFESTS / "addresses-crds")
        assert resources(helm(*dry)) == set()
        # Those of the release are kept up to date.
        kubectl("label", "crd", "ippools.whereabouts.cni.cncf.io", "app.kubernetes.io/instance=multus")
        assert resources(helm(*dry)) == {"ippools"}
    finally:
        forget(api_server)


def resources(said: str) -> set[str]:
    """The custom resources of whereabouts' group that helm would make."""
    return set(re.findall(r"(?m)^ +plural: (\w+)$", said)) & {"ippools", "overlappingrangeipreservations"}
