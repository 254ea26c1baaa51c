"""The manifests that grant rights: each says what the daemon needs, and no more."""

import functools
import json
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from multus_daemon import __version__, cli, deadlines, probe, settings
from multus_daemon.api import metrics_port
from multus_daemon.cli import HOST_BIN_DIR
from multus_daemon.cluster.kube import access, connect, csr
from multus_daemon.plugins import limit
from multus_daemon.spec.nad import selection
from multus_tools import deadlines as tool_deadlines
from multus_tools.webhook import device_requests
from tests.repo import manifests
from tests.repo.manifests import CHART, MANIFESTS, RENDERED, of_file
from tests.repo.manifests import objects as build

ROOT = MANIFESTS.parent
OVERLAYS = sorted(path for path in (MANIFESTS / "overlays").iterdir() if path.is_dir())
UNINSTALLS = sorted(path for path in (MANIFESTS / "uninstall" / "overlays").iterdir() if path.is_dir())
FOLDERS = [MANIFESTS / "base", *OVERLAYS]
RBAC = "rbac.authorization.k8s.io"
METRICS_PORT = 9059

# (group, resource) -> verbs: what the code does. A right that is granted and not listed here fails, and the reverse.
DAEMON = {
    ("k8s.cni.cncf.io", "network-attachment-definitions"): {"get", "list", "watch"},
    ("", "pods"): {"get", "list", "watch"},
    ("", "pods/status"): {"patch"},
    ("", "events"): {"create", "patch"},
    ("", "namespaces"): {"get"},
    ("resource.k8s.io", "resourceclaims"): {"get"},
    ("resource.k8s.io", "resourceslices"): {"list"},
    ("", "nodes"): {"get"},
}
APPROVER = {
    ("certificates.k8s.io", "certificatesigningrequests"): {"get", "list", "watch"},
    ("certificates.k8s.io", "certificatesigningrequests/approval"): {"update"},
    ("certificates.k8s.io", "signers"): {"approve"},
}
WEBHOOK = {("k8s.cni.cncf.io", "network-attachment-definitions"): {"get", "list", "watch"}}
REVIEWS = {
    ("authentication.k8s.io", "tokenreviews"): {"create"},
    ("authorization.k8s.io", "subjectaccessreviews"): {"create"},
}
DEVICE_STATUS = {
    ("resource.k8s.io", "resourceclaims/status"): {"patch"},
    ("resource.k8s.io", "resourceclaims/driver"): {"associated-node:patch"},
}
ADDRESSES = {
    ("whereabouts.cni.cncf.io", "overlappingrangeipreservations"): {
        "get",
        "list",
        "watch",
        "create",
        "patch",
        "delete",
    },
    ("whereabouts.cni.cncf.io", "ippools"): {"get", "list", "watch", "patch"},
    ("k8s.cni.cncf.io", "ipamclaims"): {"get"},
    ("k8s.cni.cncf.io", "ipamclaims/status"): {"patch"},
    ("apps", "statefulsets"): {"get"},
}
REPORTER = {("", "nodes"): {"get"}, ("", "nodes/status"): {"update"}}
REQUESTER = {("certificates.k8s.io", "certificatesigningrequests"): {"create", "get"}}
RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")


def documents(name: str, *kinds: str) -> list[dict[str, Any]]:
    """Return the objects of a file, or of the files of a folder; all, or those of these kinds."""
    path = MANIFESTS / name
    files = [path] if path.is_file() else sorted(set(path.glob("*.yaml")) - {path / "kustomization.yaml"})
    return [item for file in files for item in of_file(file) if not kinds or item["kind"] in kinds]


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
        ("base", "multus-daemon", DAEMON),
        ("cert-approver", "multus-cert-approver", APPROVER),
        ("cert-approver", "multus-certificate-requester", REQUESTER),
        ("webhook", "multus-webhook", WEBHOOK),
        ("metrics-authorization", "multus-metrics-reviews", REVIEWS),
        ("ready-before-pods", "multus-readiness-reporter", REPORTER),
        ("device-status", "multus-device-status", DEVICE_STATUS),
        ("addresses", "multus-addresses", ADDRESSES),
        ("startup-taint", "multus-startup-taint", {("", "nodes"): {"patch"}}),
    ],
)
def test_a_role_grants_what_is_used(name: str, role: str, wanted: dict[tuple[str, str], set[str]]) -> None:
    assert rights(named(name, "ClusterRole", role)) == wanted


NODES_USERS = ("Group", "", "system:multus")


def account(name: str) -> tuple[str, str, str]:
    return "ServiceAccount", "kube-system", name


@pytest.mark.parametrize(
    ("name", "binding", "role", "wanted"),
    [
        ("base", "multus-daemon", "multus-daemon", {account("multus-daemon")}),
        ("cert-approver", "multus-cert-approver", "multus-cert-approver", {account("multus-cert-approver")}),
        ("cert-approver", "multus-per-node", "multus-daemon", {NODES_USERS}),
        (
            "cert-approver",
            "multus-certificate-requester",
            "multus-certificate-requester",
            {("Group", "", "system:nodes"), NODES_USERS},
        ),
        ("webhook", "multus-webhook", "multus-webhook", {account("multus-webhook")}),
        (
            "metrics-authorization",
            "multus-metrics-reviews",
            "multus-metrics-reviews",
            {account("multus-daemon"), NODES_USERS},
        ),
        ("device-status", "multus-device-status", "multus-device-status", {account("multus-daemon"), NODES_USERS}),
        ("addresses", "multus-addresses", "multus-addresses", {account("multus-daemon"), NODES_USERS}),
        ("startup-taint", "multus-startup-taint", "multus-startup-taint", {account("multus-daemon"), NODES_USERS}),
        (
            "ready-before-pods",
            "multus-readiness-reporter",
            "multus-readiness-reporter",
            {account("multus-readiness-reporter")},
        ),
    ],
)
def test_who_has_a_role(name: str, binding: str, role: str, wanted: set[tuple[str, str, str]]) -> None:
    found = named(name, "ClusterRoleBinding", binding)
    assert found["roleRef"] == {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
    assert subjects(found) == wanted


def test_nothing_else_is_granted() -> None:
    """In each folder; those of a distribution are the base with the right of OpenShift's nodes."""
    folders = sorted({path.parent for path in MANIFESTS.rglob("*.yaml") if path.parent != MANIFESTS})
    found = {
        str(folder.relative_to(MANIFESTS)): sorted(
            (item["kind"], item["metadata"]["name"]) for item in documents(str(folder), *RIGHTS, "Role", "RoleBinding")
        )
        for folder in folders
    }
    base = [
        ("ClusterRole", "multus-daemon"),
        ("ClusterRoleBinding", "multus-daemon"),
        ("ServiceAccount", "multus-daemon"),
    ]
    webhook = [(kind, "multus-webhook") for kind in sorted(RIGHTS)]
    assert {folder: items for folder, items in found.items() if items} == {
        "base": base,
        **{f"overlays/{name}": base for name in ("k3s", "microk8s", "talos")},
        **{f"overlays/{name}": sorted([*base, ("RoleBinding", "multus-scc")]) for name in ("microshift", "openshift")},
        "metrics-authorization": [(kind, "multus-metrics-reviews") for kind in ("ClusterRole", "ClusterRoleBinding")],
        "device-status": [(kind, "multus-device-status") for kind in ("ClusterRole", "ClusterRoleBinding")],
        "addresses": [(kind, "multus-addresses") for kind in ("ClusterRole", "ClusterRoleBinding")],
        "startup-taint": [(kind, "multus-startup-taint") for kind in ("ClusterRole", "ClusterRoleBinding")],
        "ready-before-pods": [(kind, "multus-readiness-reporter") for kind in sorted(RIGHTS)],
        "cert-approver": [
            ("ClusterRole", "multus-cert-approver"),
            ("ClusterRole", "multus-certificate-requester"),
            ("ClusterRoleBinding", "multus-cert-approver"),
            ("ClusterRoleBinding", "multus-certificate-requester"),
            ("ClusterRoleBinding", "multus-per-node"),
            ("ServiceAccount", "multus-cert-approver"),
        ],
        "webhook": webhook,
        "webhook-cert-manager": webhook,
    }


def test_no_wildcards() -> None:
    for folder in {str(path.parent.relative_to(MANIFESTS)) for path in MANIFESTS.rglob("*.yaml")}:
        for role in documents(folder, "ClusterRole"):
            for rule in role["rules"]:
                assert not [value for values in rule.values() for value in values if "*" in value], folder


def test_service_accounts_are_in_the_namespace_of_their_bindings() -> None:
    for name in ("base", "cert-approver", "webhook"):
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
    (rule,) = [
        rule
        for rule in named("cert-approver", "ClusterRole", "multus-cert-approver")["rules"]
        if rule["resources"] == ["signers"]
    ]
    assert rule["resourceNames"] == [csr.SIGNER]


@pytest.mark.npwg("3.1")
def test_the_custom_resource_is_what_clients_know() -> None:
    (crd,) = documents("base", "CustomResourceDefinition")
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


@pytest.mark.npwg("3.2a")
def test_the_schema_takes_every_definition_that_exists() -> None:
    (crd,) = documents("base", "CustomResourceDefinition")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema["type"] == "object"
    # `spec` may be missing altogether: the configuration is a file of the node then.
    assert "required" not in schema
    assert set(schema["properties"]) == {"apiVersion", "kind", "metadata", "spec"}
    spec = schema["properties"]["spec"]
    assert "required" not in spec
    assert {key: value["type"] for key, value in spec["properties"].items()} == {"config": "string"}


def test_printer_columns_point_into_the_object() -> None:
    (crd,) = documents("base", "CustomResourceDefinition")
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"] for column in columns] == ["Resource", "Config", "Age"]
    for column in columns:
        assert set(column) - {"description", "priority"} == {"name", "type", "jsonPath"}
        assert column["jsonPath"].startswith((".spec.", ".metadata."))


# --- the DaemonSet ---------------------------------------------------------------------------------------------------


@functools.cache
def objects(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `folder` builds; callers must not change them."""
    return build(folder)


def daemon_set(folder: Path) -> dict[str, Any]:
    (found,) = [item for item in objects(folder) if item["kind"] == "DaemonSet"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def container(folder: Path) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = daemon_set(folder)["containers"]
    return found


def configuration(folder: Path) -> settings.Settings:
    (found,) = [item for item in objects(folder) if item["kind"] == "ConfigMap"]
    (data,) = found["data"].values()
    return settings.parse(data.encode(), str(folder))


def mounts(pod: dict[str, Any], of: dict[str, Any]) -> dict[str, str]:
    """Path in the container -> path on the node, of what is the node's."""
    volumes = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    return {item["mountPath"]: volumes[item["name"]] for item in of["volumeMounts"] if volumes[item["name"]]}


def on_the_node(folder: Path, path: str) -> str:
    """Return the path on the node of a path of the daemon; empty if it is the container's own."""
    return mounted_at(mounts(daemon_set(folder), container(folder)), path)


def mounted_at(found: dict[str, str], path: str) -> str:
    at = max((mount for mount in found if PurePosixPath(path).is_relative_to(mount)), key=len, default="")
    return str(PurePosixPath(found[at]) / PurePosixPath(path).relative_to(at)) if at else ""


def by_folder(path: Path) -> str:
    return path.name


def test_the_plain_file_is_the_base() -> None:
    assert of_file(RENDERED) == build(MANIFESTS / "base"), "make manifests"


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_the_daemon_takes_the_configuration_and_has_nothing_to_say(folder: Path) -> None:
    found = configuration(folder)
    assert found.warnings == ()
    # In the spelling of the documentation, too.
    assert set(found.given) <= settings.known_keys()
    assert found.paths.chroot_dir


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_paths_of_configuration_and_volumes_fit(folder: Path) -> None:
    found, pod = configuration(folder), daemon_set(folder)
    (install,) = pod["initContainers"]
    assert on_the_node(folder, found.paths.chroot_dir) == "/"
    # The shim goes where the runtime looks for plugins, and the daemon looks there too.
    thin = ["--thin"] * (folder.name == "microshift")
    assert install["args"] == ["install", "--bin-dir", str(HOST_BIN_DIR), *thin]
    assert mounts(pod, install) == {str(HOST_BIN_DIR): found.paths.bin_dir}
    # The runtime reads what the daemon writes, and its primary network's is found there.
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert on_the_node(folder, found.primary.config_dir) == volumes["cni"]["hostPath"]["path"]
    assert on_the_node(folder, found.primary.autoconfig_dir)
    assert not found.primary.indicator or on_the_node(folder, found.primary.indicator)
    # The shim reaches the socket: where its default is, or where the generated configuration says.
    shim_directory = found.socket.shim_directory or settings.Settings().socket.directory
    assert PurePosixPath(on_the_node(folder, found.socket.directory)) == PurePosixPath(shim_directory)
    for directory in (found.paths.cni_dir, found.paths.conf_dir):
        assert on_the_node(folder, directory) == directory
    for below in ("pod-resources", "device-plugins"):
        assert on_the_node(folder, f"{found.paths.kubelet_dir}/{below}").endswith(f"/kubelet/{below}")
    assert on_the_node(folder, "/run/netns").endswith("/run/netns")
    config = next(item for item in container(folder)["volumeMounts"] if item["name"] == "multus-daemon-config")
    assert f"{config['mountPath']}/daemon-config.json" == settings.DEFAULT_CONFIG_PATH


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_probes_ask_the_socket_of_the_configuration(folder: Path) -> None:
    socket = PurePosixPath(configuration(folder).socket.directory) / "multus.sock"
    asked = {}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        found = container(folder)[kind]
        program, question, *path = found["exec"]["command"]
        asked[kind] = question
        assert program in (ROOT / "pyproject.toml").read_text()
        assert PurePosixPath((*path, probe.DEFAULT_SOCKET)[0]) == socket
        assert found["timeoutSeconds"] > deadlines.PROBE_SECONDS
    assert asked == {"startupProbe": "healthz", "livenessProbe": "healthz", "readinessProbe": "readyz"}


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_mounts_and_volumes_belong_together(folder: Path) -> None:
    pod = daemon_set(folder)
    used = {item["name"] for each in (*pod["containers"], *pod["initContainers"]) for item in each["volumeMounts"]}
    assert used == {volume["name"] for volume in pod["volumes"]}
    # Mounts that the runtime makes later must propagate into the container.
    later = {item["name"] for item in container(folder)["volumeMounts"] if "mountPropagation" in item}
    assert later == {"host-run-netns", "hostroot"}


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_no_container_is_privileged(folder: Path) -> None:
    pod = daemon_set(folder)
    for each in (*pod["containers"], *pod["initContainers"]):
        security = each["securityContext"]
        assert "privileged" not in security
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        # With the prefix an API server refuses it together with allowPrivilegeEscalation.
        assert not [name for name in security["capabilities"]["add"] if name.startswith("CAP_")]
    # tests/e2e/test_privileges.py shows that each is needed; NET_RAW is for iptables of the legacy kind.
    assert set(container(folder)["securityContext"]["capabilities"]["add"]) == {
        "DAC_OVERRIDE", "NET_ADMIN", "NET_BROADCAST", "NET_RAW", "SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE",
    }  # fmt: skip


def test_what_the_daemon_needs_of_the_node() -> None:
    pod = daemon_set(MANIFESTS / "base")
    assert (pod["hostNetwork"], pod["hostPID"]) == (True, True)
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["serviceAccountName"] == "multus-daemon"
    assert pod["terminationGracePeriodSeconds"] > deadlines.DRAIN_SECONDS + deadlines.REPORT_SECONDS + 10
    variables = {item["name"]: item["valueFrom"]["fieldRef"] for item in container(MANIFESTS / "base")["env"]}
    assert variables == {
        connect.VARIABLE: {"fieldPath": "spec.nodeName"},
        metrics_port.NODE_IPS: {"fieldPath": "status.hostIPs"},
        "MULTUS_POD_NAMESPACE": {"fieldPath": "metadata.namespace"},
        "MULTUS_POD_NAME": {"fieldPath": "metadata.name"},
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_the_port_of_the_metrics_is_the_one_of_the_configuration(folder: Path) -> None:
    found = configuration(folder).metrics
    (port,) = container(folder)["ports"]
    assert port == {"name": "metrics", "containerPort": found.port, "hostPort": found.port, "protocol": "TCP"}
    assert found.port == METRICS_PORT
    # Anyone may read them, until a component or an operator says otherwise: docs/security.md.
    assert (found.address, found.tls, found.authorization) == ("", None, False)


def test_the_memory_limit_lets_several_plugins_run_at_once() -> None:
    resources = container(MANIFESTS / "base")["resources"]
    assert "cpu" not in resources["limits"]
    memory = re.fullmatch(r"(\d+)Mi", resources["limits"]["memory"])
    assert memory
    amount = int(memory[1]) * limit.MIB
    # The figure in the manifest's comment.
    assert limit.automatic(amount, 64 * 1024 * limit.MIB, 64).number == 6


def mebibytes(amount: str) -> int:
    found = re.fullmatch(r"(\d+)Mi", amount)
    assert found, amount
    return int(found[1])


def figure(page: str, row: str) -> float:
    """Return the last number of the row that begins with `row`, in MiB or KiB as the page has it."""
    (text,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return float(re.findall(r"[\d.]+", text)[-1])


def test_the_memory_request_is_what_the_page_measured() -> None:
    """A full node: 5,000 networks in the cluster, 250 pods with one more network each."""
    idle = figure("scaling.md", "the daemon of the image, idle in a cluster")
    modules = figure("scaling.md", "the modules of the built-in plugins, with the first pod")
    networks = figure("scaling.md", "after a restart and a list in pages of 500")
    pairs = 2 * 250 * figure("scaling.md", "one veth pair, 2 CPUs") / 1024
    needed = idle + modules + networks + pairs
    resources = container(MANIFESTS / "base")["resources"]
    assert needed <= mebibytes(resources["requests"]["memory"]) < 2 * needed
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["daemonSet"]["resources"] == resources


# --- the image's name ------------------------------------------------------------------------------------------------

OTHERS = {"registry.k8s.io/node-readiness-controller/node-readiness-reporter:v0.5.0"}
"""Images that are not ours."""


def images(folder: Path) -> set[str]:
    return set(re.findall(r"image: (\S+)", "".join(path.read_text() for path in folder.rglob("*.yaml")))) - OTHERS


def test_every_manifest_has_the_image_of_the_chart() -> None:
    assert images(MANIFESTS) == {manifests.image()}


def test_the_placeholder_has_the_version_of_the_code() -> None:
    assert manifests.image() == f"{manifests.PLACEHOLDER}:{__version__}", (
        "the name of a release's image is not committed"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("registry.example:5000/net/multus:20261124", "registry.example/multus-daemon@sha256:" + "0a" * 32),
        "registry.example/net/multus:1.20",
    ],
)
def test_the_name_is_set_in_one_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("MANIFESTS", "CHART"):
        shutil.copytree(getattr(manifests, place), tmp_path / place)
        monkeypatch.setattr(manifests, place, tmp_path / place)
    manifests.set_image(name)
    assert manifests.image() == name
    assert images(tmp_path / "MANIFESTS") == {name}
    assert "No registry has" not in (tmp_path / "MANIFESTS" / RENDERED.name).read_text()
    # And back.
    manifests.set_image(f"{manifests.PLACEHOLDER}:{__version__}")
    assert (tmp_path / "MANIFESTS" / RENDERED.name).read_text() == RENDERED.read_text()
    assert (tmp_path / "CHART" / "values.yaml").read_text() == (CHART / "values.yaml").read_text()


def test_what_the_chart_has_of_the_code_is_up_to_date() -> None:
    for path, text in manifests.of_the_code().items():
        assert path.read_text() == text, "make manifests"


def test_the_image_says_which_version_it_is() -> None:
    (version,) = re.findall(r"^ARG VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert version == __version__


# --- uninstall, certificates -----------------------------------------------------------------------------------------


def test_every_distribution_has_its_uninstall() -> None:
    assert [path.name for path in UNINSTALLS] == [path.name for path in OVERLAYS]


@pytest.mark.parametrize("folder", [MANIFESTS / "uninstall" / "base", *UNINSTALLS], ids=by_folder)
def test_uninstall_undoes_what_the_daemon_set_does(folder: Path) -> None:
    overlay = MANIFESTS / ("base" if folder.name == "base" else f"overlays/{folder.name}")
    (found,) = build(folder)
    pod = found["spec"]["template"]["spec"]
    (uninstall,) = pod["initContainers"]
    command, *given = uninstall["args"]
    assert command == "uninstall"
    assert {word.partition("=")[0] for word in given} == {
        *("--bin-dir", "--cni-config-dir", "--socket-dir", "--cni-dir", "--conf-dir", "--chroot-dir"),
    }
    there_is = mounts(pod, uninstall)
    node = {word.partition("=")[0]: mounted_at(there_is, word.partition("=")[2]) for word in given}
    there = configuration(overlay)
    assert node == {
        "--bin-dir": there.paths.bin_dir,
        "--cni-config-dir": on_the_node(overlay, there.primary.config_dir),
        "--socket-dir": on_the_node(overlay, there.socket.directory),
        "--cni-dir": there.paths.cni_dir,
        "--conf-dir": there.paths.conf_dir,
        "--chroot-dir": "/",
    }
    # The kernel removes nothing that is mounted itself.
    assert not {node["--socket-dir"], node["--cni-dir"], node["--conf-dir"]} & set(there_is.values())
    # It detaches deleted pods as the daemon does, with its configuration.
    daemon = container(overlay)
    assert [uninstall[key] for key in ("securityContext", "resources")] == [
        daemon[key] for key in ("securityContext", "resources")
    ]
    assert (pod["hostNetwork"], pod["hostPID"]) == (True, True)
    shared = {"/run/netns", "/hostroot", str(PurePosixPath(settings.DEFAULT_CONFIG_PATH).parent)}
    for item in (item for item in daemon["volumeMounts"] if item["mountPath"] in shared):
        assert item in uninstall["volumeMounts"]
        shared.remove(item["mountPath"])
    assert not shared
    volumes, wanted = ({item["name"]: item for item in each["volumes"]} for each in (pod, daemon_set(overlay)))
    assert volumes["host-run-netns"] == wanted["host-run-netns"]
    # The configuration may be deleted already.
    assert volumes["multus-daemon-config"]["configMap"].pop("optional") is True
    assert volumes["multus-daemon-config"] == wanted["multus-daemon-config"]
    # Permission to use the node's directories must outlast the daemon.
    bound = [item for item in objects(overlay) if item["kind"] == "RoleBinding"]
    assert pod.get("serviceAccountName") == (daemon_set(overlay)["serviceAccountName"] if bound else None)
    # It must not be taken for the daemon: the selector of its DaemonSet is `name: multus`.
    assert found["spec"]["template"]["metadata"]["labels"]["name"] != "multus"


@pytest.mark.parametrize(
    "folder",
    [MANIFESTS / "cert-approver", MANIFESTS / "uninstall" / "base", MANIFESTS / "ready-before-pods"],
    ids=by_folder,
)
def test_what_needs_no_root_has_none(folder: Path) -> None:
    for item in build(folder):
        if item["kind"] not in ("Deployment", "DaemonSet"):
            continue
        pod = item["spec"]["template"]["spec"]
        for each in pod["containers"]:
            security = {**pod.get("securityContext", {}), **each["securityContext"]}
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] > 0
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True


def test_the_approver_is_a_command_of_the_image_with_its_account() -> None:
    (deployment,) = [item for item in build(MANIFESTS / "cert-approver") if item["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (found,) = pod["containers"]
    assert found["args"] == ["cert-approver"]
    assert found["args"][0] in cli.COMMANDS
    assert pod["serviceAccountName"] == "multus-cert-approver"
    # Its pod may be the first of a node whose network waits for it.
    assert pod["hostNetwork"] is True


def component(name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the pod's fields that a component merges into the DaemonSet, and the arguments that it appends."""
    merged, appended = yaml.safe_load((MANIFESTS / name / "kustomization.yaml").read_text())["patches"]
    target = yaml.safe_load(merged["patch"])
    assert (target["kind"], target["metadata"]["name"]) == tuple(appended["target"].values())
    assert target["metadata"]["name"] == "kube-multus-ds"
    operations = yaml.safe_load(appended["patch"])
    # Appended: other components add arguments, too.
    assert {(item["op"], item["path"]) for item in operations} == {("add", "/spec/template/spec/containers/0/args/-")}
    pod: dict[str, Any] = target["spec"]["template"]["spec"]
    (daemon,) = pod["containers"]
    assert daemon["name"] == container(MANIFESTS / "base")["name"]
    return pod, [item["value"] for item in operations]


def test_certificates_come_with_the_files_that_they_need() -> None:
    pod, (flag,) = component("per-node-certificates")
    name, _, value = flag.partition("=")
    assert name == "--per-node-certificate"
    given = settings.from_object({"perNodeCertificate": json.loads(value)}, "manifest")
    certificate = given.kubernetes.per_node_certificate
    assert certificate is not None
    assert certificate.enabled
    at = {item["mountPath"]: item for item in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(volumes[at[certificate.cert_dir]["name"]]) == {"name", "emptyDir"}
    # At the same path as on the node: the kubeconfig names other files.
    for path in (certificate.bootstrap_kubeconfig, "/var/lib/kubelet/pki"):
        assert volumes[at[path]["name"]]["hostPath"]["path"] == path
        assert at[path]["readOnly"] is True


# --- metrics, readiness ----------------------------------------------------------------------------------------------


def test_tokens_come_with_the_files_that_tls_needs() -> None:
    pod, flags = component("metrics-authorization")
    words = cli.parser().parse_args(["run", *flags])
    given = settings.from_object({"metricsPort": METRICS_PORT}, "manifest", dict(words.flags)).metrics
    assert given.authorization
    assert given.tls is not None
    at = {item["mountPath"]: item for item in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for path in (given.tls.cert_file, given.tls.key_file):
        mount = at[str(PurePosixPath(path).parent)]
        assert mount["readOnly"] is True
        # Without the Secret no pod of the DaemonSet would start.
        assert volumes[mount["name"]]["secret"] == {"secretName": "multus-metrics-tls", "optional": True}


def test_prometheus_finds_the_port_of_the_daemon() -> None:
    (monitor,) = documents("monitoring/podmonitor.yaml")
    (daemon,) = documents("base", "DaemonSet")
    assert monitor["spec"]["selector"] == daemon["spec"]["selector"]
    assert monitor["metadata"]["namespace"] == daemon["metadata"]["namespace"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = container(MANIFESTS / "base")["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], access.PATH)


def test_every_way_has_the_same_startup_taint() -> None:
    (patch,) = yaml.safe_load((MANIFESTS / "startup-taint" / "kustomization.yaml").read_text())["patches"]
    (appended,) = yaml.safe_load(patch["patch"])
    words = cli.parser().parse_args(["run", appended["value"]])
    given = settings.from_object({}, "manifest", dict(words.flags)).kubernetes
    (rule,) = documents("ready-before-pods/rule.yaml")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {given.startup_taint, values["startupTaint"]["key"]} == {rule["spec"]["taint"]["key"]}
    assert given.startup_taint in (MANIFESTS / "startup-taint" / "rbac.yaml").read_text()


def test_the_reporter_asks_the_daemon_and_names_the_condition_of_the_rule() -> None:
    (daemon,) = [item for item in documents("ready-before-pods/reporter.yaml") if item["kind"] == "DaemonSet"]
    pod = daemon["spec"]["template"]["spec"]
    (reporter,) = pod["containers"]
    variables = {
        item["name"]: item.get("value") or item["valueFrom"]["fieldRef"]["fieldPath"] for item in reporter["env"]
    }
    (rule,) = documents("ready-before-pods/rule.yaml")
    assert rule["spec"]["conditions"] == [{"type": variables["CONDITION_TYPE"], "requiredStatus": "True"}]
    assert variables["CHECK_ENDPOINT"] == f"http://$(NODE_IP):{METRICS_PORT}/readyz"
    assert (variables["NODE_NAME"], variables["NODE_IP"]) == ("spec.nodeName", "status.hostIP")
    # It reports before any pod has a network, on nodes with the taint, and does not have the daemon's rights.
    assert (pod["hostNetwork"], pod["tolerations"]) == (True, [{"operator": "Exists"}])
    assert pod["serviceAccountName"] == daemon["metadata"]["name"] == "multus-readiness-reporter"
    assert daemon["spec"]["selector"]["matchLabels"].items() <= daemon["spec"]["template"]["metadata"]["labels"].items()
    assert daemon["spec"]["selector"]["matchLabels"]["name"] != "multus"
    policy, binding = documents("ready-before-pods/policy.yaml")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert variables["CONDITION_TYPE"] in json.dumps(policy)


# --- the admission webhook -------------------------------------------------------------------------------------------


def webhooks() -> list[tuple[str, dict[str, Any]]]:
    """Each webhook, and the path that answers it."""
    paths = {"webhook": "/validate", "webhook-injector": "/inject"}
    return [
        (path, hook) for name, path in paths.items() for item in documents(name) for hook in item.get("webhooks", ())
    ]


@pytest.mark.parametrize(("path", "hook"), webhooks(), ids=lambda item: item if isinstance(item, str) else item["name"])
def test_a_webhook_keeps_nobody_from_anything(path: str, hook: dict[str, Any]) -> None:
    assert (hook["failurePolicy"], hook["sideEffects"]) == ("Ignore", "None")
    assert hook["timeoutSeconds"] > tool_deadlines.WEBHOOK_REVIEW_SECONDS
    service = hook["clientConfig"]["service"]
    (found,) = documents("webhook", "Service")
    assert (service["namespace"], service["name"]) == (found["metadata"]["namespace"], found["metadata"]["name"])
    assert (service["path"], found["spec"]["ports"][0]["port"]) == (path, 443)


def test_the_webhook_is_what_the_service_leads_to() -> None:
    (deployment,), (service,) = documents("webhook", "Deployment"), documents("webhook", "Service")
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == (service["spec"]["ports"][0]["targetPort"], cli.WEBHOOK_PORT)
    words = cli.parser().parse_args(container["args"])
    (tls,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
    assert {str(words.cert.parent), str(words.key.parent)} == {tls["mountPath"]}
    config = PurePosixPath(settings.DEFAULT_CONFIG_PATH)
    assert str(config.parent) in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_injector_is_asked_about_pods_of_labelled_namespaces_only() -> None:
    (configuration,) = documents("webhook-injector")
    assert configuration["kind"] == "MutatingWebhookConfiguration"
    (hook,) = configuration["webhooks"]
    assert hook["namespaceSelector"] == {"matchLabels": {device_requests.LABEL: "true"}}
    (rule,) = hook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE"])
    (condition,) = hook["matchConditions"]
    for key in (selection.NETWORKS_ANNOTATION, selection.DEFAULT_NETWORK_ANNOTATION):
        assert f"'{key}'" in condition["expression"]


def test_the_webhook_is_never_drained_as_a_whole() -> None:
    (budget,), (deployment,) = documents("webhook", "PodDisruptionBudget"), documents("webhook", "Deployment")
    assert budget["spec"] == {"maxUnavailable": 1, "selector": deployment["spec"]["selector"]}
    assert deployment["spec"]["replicas"] > 1


def test_the_webhook_can_be_reached_at_its_port_only() -> None:
    (policy,), (deployment,) = documents("webhook", "NetworkPolicy"), documents("webhook", "Deployment")
    spec = policy["spec"]
    assert spec["podSelector"] == deployment["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    # The API server's address is not known here: it is in no namespace, and its port differs between distributions.
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": "webhook"}]}]
    assert spec["egress"] == [{"ports": [{"protocol": "TCP"}]}]


def test_the_webhook_may_do_nothing_on_its_node() -> None:
    (deployment,) = documents("webhook", "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_with_cert_manager_it_is_the_same_webhook() -> None:
    plain, managed = build(MANIFESTS / "webhook"), build(MANIFESTS / "webhook-cert-manager")
    added = [item for item in managed if item["apiVersion"].startswith("cert-manager.io/")]
    (certificate,) = [item for item in added if item["kind"] == "Certificate"]
    (deployment,) = documents("webhook", "Deployment")
    (tls,) = [volume for volume in deployment["spec"]["template"]["spec"]["volumes"] if volume["name"] == "tls"]
    assert certificate["spec"]["secretName"] == tls["secret"]["secretName"]
    (service,) = documents("webhook", "Service")
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert name in certificate["spec"]["dnsNames"]
    for ours, theirs in (
        (plain, managed),
        (build(MANIFESTS / "webhook-injector"), build(MANIFESTS / "webhook-injector-cert-manager")),
    ):
        rest = [item for item in theirs if item not in added]
        sources = [
            item["metadata"].pop("annotations")["cert-manager.io/inject-ca-from"] for item in rest if "webhooks" in item
        ]
        assert sources == [f"{certificate['metadata']['namespace']}/{certificate['metadata']['name']}"]
        assert rest == ours
