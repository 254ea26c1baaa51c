"""The chart on a real node: installed, upgraded while pods start; and off again, like the manifest, without a trace."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.fixtures import installed
from tests.e2e.cluster.multus import GENERATED, SHIM, STORE, MultusPod, MultusRelease
from tests.e2e.cluster.real_node import NAME, RealNode
from tests.e2e.cluster.workload import failures, leftovers, status, two_networks, wait_clean
from tests.repo.manifests import MANIFESTS, RENDERED

pytest_plugins = ["tests.e2e.cluster.fixtures"]

UNINSTALL: Final = str(MANIFESTS / "uninstall" / "overlays" / "vanilla")
ADDRESSES: Final = "/var/lib/cni/networks"
CERTIFICATES: Final = "/run/multus-generator"
LIVES: Final = 20.0
"""Seconds that a certificate is valid."""


@pytest.fixture
def release(real_node: RealNode) -> Iterator[MultusRelease]:
    """The chart, not installed; a link that its pods leave on the node fails the test."""
    with installed(real_node, MultusRelease) as made:
        yield made


# --- an upgrade ------------------------------------------------------------------------------------------------------


class Runtime:
    """Makes a sandbox a second and calls the installed shim for it, as containerd does; a context manager.

    Each is of a pod of its own, which no kubelet starts. A call that waits holds up no other.
    """

    def __init__(self, multus: MultusPod) -> None:
        self._multus, self._node = multus, multus.node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._calls: list[Future[dict[str, Any]]] = []
        self._pool = ThreadPoolExecutor(64)
        self.seconds: list[float] = []
        """Duration of each ADD."""
        self.without_daemon: list[str] = []
        """Names of the pods whose ADD began while the daemon was not listening."""

    def __enter__(self) -> Runtime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown()

    def answers(self) -> list[dict[str, Any]]:
        """Wait for all ADDs and return their results or errors in the order of the calls."""
        return [call.result() for call in self._calls]

    def delete(self) -> list[dict[str, Any]]:
        """DEL for each, and its pod; what was said, nothing where it went well."""
        names = [f"add{number}" for number in range(len(self._calls))]
        said = [answer for name in names if (answer := self._call("DEL", name))]
        for name in names:
            self._node.machine.run("ip", "netns", "delete", name)
            self._node.server.delete_pod(name, "default", grace=0)
        return said

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self._calls.append(self._pool.submit(self._add, f"add{len(self._calls)}"))
            due += 1

    def _add(self, name: str) -> dict[str, Any]:
        self._node.pod(name, networks="blue,green@fast", schedulingGates=[{"name": "example.com/never"}])
        self._node.machine.run("ip", "netns", "add", name)
        if self._multus.readyz()[0] == 0:
            self.without_daemon.append(name)
        begin = time.monotonic()
        try:
            return self._call("ADD", name)
        finally:
            self.seconds.append(time.monotonic() - begin)

    def _call(self, verb: str, name: str) -> dict[str, Any]:
        cni_args = {
            "IgnoreUnknown": "1",
            "K8S_POD_NAMESPACE": "default",
            "K8S_POD_NAME": name,
            "K8S_POD_INFRA_CONTAINER_ID": name,
            "K8S_POD_UID": self._node.server.get("v1", "Pod", name)["metadata"]["uid"],
        }
        environment = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": name,
            "CNI_NETNS": f"/run/netns/{name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": "/opt/cni/bin",
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in cni_args.items()),
        }
        done = subprocess.run(
            self._node.machine.inside("env", "-i", *(f"{key}={value}" for key, value in environment.items()), SHIM),
            input=self._node.machine.path(GENERATED).read_bytes(),
            capture_output=True,
            timeout=120,
            check=False,
        )
        said: dict[str, Any] = json.loads(done.stdout or b"{}")
        assert done.returncode == 0 or "code" in said, done
        return said


def test_an_upgrade_fails_no_add(release: MultusRelease) -> None:
    node = release.node
    release.start()
    two_networks(node)
    node.pod("before", networks="blue,green@fast")
    node.wait_running("before")
    old = release.pid
    with Runtime(release) as runtime:
        time.sleep(2)
        release.values = {"config": {"logLevel": "debug"}}
        release.apply()
        node.wait_until(lambda: release.readyz()[0] == 0, "the old daemon has ended")
        begin = time.monotonic()
        release.wait_rolled_out()
        release.wait_ready()
        away = time.monotonic() - begin
        time.sleep(2)
    answers = runtime.answers()
    print(f"{len(answers)} ADDs, the slowest {max(runtime.seconds):.1f} s; the daemon was away up to {away:.1f} s")
    assert release.pid != old
    assert runtime.without_daemon
    assert [answer for answer in answers if "code" in answer] == []
    for answer in answers:
        assert [found["name"] for found in answer["interfaces"] if found.get("sandbox")] == ["eth0"]
    # All of their networks, not only the one that the answer is about.
    for number in range(len(answers)):
        name = f"add{number}"
        assert node.machine.run("ip", "-netns", name, "-o", "link").count("\n") == 4, name
        pod = node.server.get("v1", "Pod", name)
        assert [entry["name"] for entry in status(pod)] == ["primary", "default/blue", "default/green"]
    assert runtime.delete() == []
    assert node.links("before") == ["eth0", "fast", "lo", "net1"]
    node.remove_pods()
    wait_clean(node)
    assert failures(node) == []


# --- off the node again ----------------------------------------------------------------------------------------------


def host_paths() -> set[str]:
    """The directories of the node that the DaemonSet has to do with, but the node's root."""
    (pod,) = [
        item["spec"]["template"]["spec"]
        for item in yaml.safe_load_all(RENDERED.read_text())
        if item and item["kind"] == "DaemonSet"
    ]
    return {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume} - {"/"}


def listing(node: RealNode) -> dict[str, str]:
    """Every path in the directories that hold something of ours, with its mode and what is in it.

    But for what host-local, a plugin as any other, keeps of each network: its lock and the address that was last.
    """
    listed: dict[str, str] = {}

    def enter(path: Path, name: str) -> None:
        state = path.lstat()
        content = ""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            # A network namespace is a file that can't be read.
            with contextlib.suppress(OSError):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
        is_of_host_local = Path(name).is_relative_to(ADDRESSES) and (
            path.is_dir() or path.name == "lock" or path.name.startswith("last_reserved_ip.")
        )
        if not is_of_host_local:
            listed[name] = f"{state.st_mode:o} {content}"

    for place in sorted({"/etc/cni", "/opt/cni", "/var/lib/cni"} | host_paths()):
        top = node.machine.path(place)
        if top.exists():
            enter(top, place)
        for directory, folders, files in os.walk(top):
            for name in (*folders, *files):
                path = Path(directory, name)
                enter(path, f"{place}/{path.relative_to(top)}")
    return listed


def by_manifest(multus: MultusPod) -> None:
    node = multus.node
    multus.delete()
    node.kubectl("apply", "-k", UNINSTALL)
    node.kubectl("-n", "kube-system", "rollout", "status", "daemonset/multus-uninstall", "--timeout=120s", timeout=130)
    node.kubectl("delete", "-k", UNINSTALL)


def by_chart(multus: MultusPod) -> None:
    assert isinstance(multus, MultusRelease)
    node = multus.node
    multus.values = {"uninstall": {"enabled": True}}
    multus.apply()
    node.kubectl("-n", "kube-system", "rollout", "status", "daemonset/multus-uninstall", "--timeout=120s", timeout=130)
    multus.remove()


@pytest.mark.parametrize(
    ("fixture", "uninstall"), [("multus_pod", by_manifest), ("release", by_chart)], ids=["manifest", "chart"]
)
def test_nothing_is_left_on_the_node(
    fixture: str, uninstall: Callable[[MultusPod], None], request: pytest.FixtureRequest
) -> None:
    multus: MultusPod = request.getfixturevalue(fixture)
    node = multus.node
    # What the cluster network and the runtime make with the first pod is not ours.
    node.pod("early")
    node.wait_running("early")
    node.delete_pod("early")
    before = listing(node)
    assert [name for name in before if name.startswith(STORE)] == []
    multus.start()
    two_networks(node)
    node.pod("p1", networks="blue,green@fast")
    node.wait_running("p1")
    assert node.links("p1") == ["eth0", "fast", "lo", "net1"]
    assert set(listing(node)) > {*before, SHIM, GENERATED, STORE}
    node.remove_pods()
    wait_clean(node)
    uninstall(multus)
    after = listing(node)
    assert {name: after.get(name) for name in before} == before
    assert sorted(set(after) - set(before)) == []
    # And the node works.
    node.pod("late", networks="blue")
    node.wait_running("late")
    assert node.links("late") == ["eth0", "lo"]
    node.remove_pods()
    assert leftovers(node) == []


# --- programs beside the daemon --------------------------------------------------------------------------------------


@pytest.fixture
def approver(multus_pod: MultusPod) -> Iterator[RealNode]:
    """The node, with the cert-approver of the manifests."""
    node, manifest = multus_pod.node, str(MANIFESTS / "cert-approver")
    node.kubectl("apply", "-k", manifest)
    yield node
    node.kubectl("delete", "--ignore-not-found", "-k", manifest)
    node.machine.run("rm", "-rf", CERTIFICATES)


def sign_approved(node: RealNode, seconds: float) -> None:
    """The controller manager's part: sign what is approved."""
    for item in node.server.request("GET", "/apis/certificates.k8s.io/v1/certificatesigningrequests")["items"]:
        state = item.get("status", {})
        if state.get("conditions", [{}])[0].get("type") == "Approved" and not state.get("certificate"):
            node.server.sign_certificate(item["metadata"]["name"], seconds=seconds)


def test_kubeconfig_generator_keeps_a_kubeconfig_of_the_nodes_own(approver: RealNode) -> None:
    node, target = approver, f"{CERTIFICATES}/kubeconfig"
    bootstrap = node.server.kubeconfig(f"system:node:{NAME}", ("system:nodes",))
    places = {"bootstrap": str(bootstrap.parent), "certificates": CERTIFICATES}
    container = {
        "name": "generator",
        "image": daemon_image.NAME,
        "command": ["/usr/src/multus-cni/bin/kubeconfig_generator"],
        "args": ["--bootstrap-config", str(bootstrap), "--certdir", CERTIFICATES, "--kubeconfig", target],
        "env": [{"name": "MULTUS_NODE_NAME", "value": NAME}],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items()],
    }
    volumes = [{"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}} for name, path in places.items()]
    node.pod("generator", containers=[container], volumes=volumes, hostNetwork=True)

    def user() -> str:
        kubectl = (str(build_tools.find("kubectl")), "--kubeconfig", target)
        return node.machine.run(*kubectl, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")

    def is_there() -> bool:
        sign_approved(node, LIVES)
        return node.machine.path(target).exists()

    current = node.machine.path(f"{CERTIFICATES}/multus-client-current.pem")

    def has_ended() -> bool:
        sign_approved(node, LIVES)
        return time.monotonic() > begin + LIVES and current.read_bytes() != first

    node.wait_until(is_there, "there is a kubeconfig")
    begin, first = time.monotonic(), current.read_bytes()
    assert user() == f"system:multus:{NAME}"
    assert node.machine.path(target).stat().st_mode & 0o777 == 0o600
    # It stays when the certificate is renewed that it names.
    written = node.machine.path(target).read_bytes()
    node.wait_until(has_ended, "the first certificate has ended, and there is another")
    assert node.machine.path(target).read_bytes() == written
    assert user() == f"system:multus:{NAME}"
    # On SIGTERM the generator removes the file. A busy machine takes longer than the usual grace period.
    node.kubectl("delete", "pod", "generator", "--grace-period=30", timeout=120)
    assert not node.machine.path(target).exists()
