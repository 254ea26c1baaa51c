"""Every command of docs/addresses.md, at a real API server, by somebody with the rights of docs/kubectl-multus.md."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.addresses.objects import CRDS, RESERVATIONS, forget
from tests.e2e.apiserver import ApiServer
from tests.e2e.kube_client import ApiError
from tests.e2e.node import NAD
from tests.repo import pages
from tests.waiting import until

pytest_plugins = ["tests.e2e.kube_fixtures"]

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = "docs/addresses.md"
RIGHTS: Final = (ROOT / "docs" / "kubectl-multus.md").read_text()
IPAM: Final = {"type": "whereabouts", "range": "10.9.0.0/24"}


class Reader:
    """Somebody who reads the page and types what it says, in the root of a clone."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        self.server, self.typed = server, set[str]()
        programs = directory / "bin"
        programs.mkdir()
        try:
            (programs / "kubectl").symlink_to(build_tools.find("kubectl"))
        except build_tools.ToolError as error:
            pytest.skip(str(error))
        # As pipx or krew install it.
        plugin = programs / "kubectl-multus"
        plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from multus_tools.kubectl import main; main()" "$@"\n')
        plugin.chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "KUBECONFIG": str(server.kubeconfig("administrator", ("system:masters",))),
            "COLUMNS": "300",
            # kubectl keeps a cache there; without it, in the clone.
            "HOME": str(directory),
        }

    def types(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of the page, which may fail."""
        assert line in list(pages.lines(PAGE)), "the page has another command"
        self.typed.add(line)
        return self.runs(line)

    def runs(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run another line, which may fail."""
        done = subprocess.run(
            ["sh", "-c", line], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        print(line, done.stdout, done.stderr, sep="\n")
        return done

    def creates_the_resources(self) -> None:
        """Type the command, and wait until the API server has what it makes."""
        assert self.types("kubectl create -k manifests/addresses-crds").returncode == 0
        names = " ".join(f"crd/{name}.whereabouts.cni.cncf.io" for name in CRDS)
        assert self.runs(f"kubectl wait --for=condition=Established {names}").returncode == 0

        def served() -> bool:
            with contextlib.suppress(ApiError):
                self.reserved()
                return True
            return False

        until(served, what="the API server serves them")

    def reserve(self, name: str, pod: str, node: str = "") -> None:
        """As the daemon of the node makes it; without a node, as whereabouts' binary does."""
        held = {"annotations": {"multus.io/node": node}, "finalizers": ["multus.io/held"]}
        notes = held if node else {}
        self.server.apply(
            {
                "apiVersion": "whereabouts.cni.cncf.io/v1alpha1",
                "kind": "OverlappingRangeIPReservation",
                "metadata": {"namespace": "kube-system", "name": name, **notes},
                "spec": {"podref": pod, "ifname": "net1", "containerid": "c"},
            }
        )

    def reserved(self) -> set[str]:
        """The names of the reservations."""
        return {item["metadata"]["name"] for item in self.server.request("GET", RESERVATIONS)["items"]}


@pytest.fixture
def reader(api_server: ApiServer, tmp_path: Path) -> Iterator[Reader]:
    api_server.install_crd(yaml.safe_load((ROOT / "manifests/base/crd.yaml").read_text()))
    forget(api_server)
    yield Reader(api_server, tmp_path)
    forget(api_server)


def test_every_command_of_the_page(reader: Reader) -> None:
    server = reader.server
    assert reader.types("kubectl apply -k manifests/addresses").returncode == 0
    reader.creates_the_resources()
    # A second time it changes nothing.
    assert "AlreadyExists" in reader.types("kubectl create -k manifests/addresses-crds").stderr

    server.create_node("worker-1")
    server.create_node("worker-3")
    config = json.dumps({"cniVersion": "1.0.0", "name": "lan", "type": "macvlan", "master": "eth1", "ipam": IPAM})
    server.apply({**NAD, "metadata": {"namespace": "default", "name": "lan"}, "spec": {"config": config}})
    reader.reserve("10.9.0.1", "default/web", "worker-1")
    reader.reserve("10.9.0.2", "default/db", "worker-3")
    reader.reserve("10.9.0.7", "default/old")
    pool(server, {"7": "default/old"})
    assert "251 of 254" in reader.types("kubectl multus addresses").stdout
    assert "default/old" in reader.types("kubectl multus addresses -o wide").stdout
    assert "default/db" in reader.types("kubectl multus addresses --node worker-3").stdout
    said = reader.types("kubectl multus addresses --address 10.9.0.7").stdout
    assert ("default/old" in said, "default/db" in said) == (True, False)

    said = reader.types("kubectl taint node worker-3 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute").stdout
    assert "tainted" in said
    assert "out-of-service" in reader.types("kubectl multus addresses").stdout
    # Without a terminal it asks for --yes.
    assert reader.types("kubectl multus addresses release --node worker-3").returncode == 1
    assert reader.reserved() == {"10.9.0.1", "10.9.0.2", "10.9.0.7"}
    done = reader.types("kubectl multus addresses release --node worker-3 --yes")
    assert (done.returncode, done.stdout) == (0, "released 10.9.0.2 of pod default/db\n")
    assert reader.reserved() == {"10.9.0.1", "10.9.0.7"}

    server.apply(daemon_set("whereabouts"))
    assert reader.types("kubectl -n kube-system delete daemonset whereabouts").returncode == 0
    assert reader.types("kubectl -n kube-system delete ippools.whereabouts.cni.cncf.io --all").returncode == 0
    assert reader.types("kubectl multus addresses -o wide").returncode == 0
    (last,) = (line for line in pages.lines(PAGE) if "finalizers" in line)
    assert reader.types(last).returncode == 0
    assert reader.typed == {line for line in pages.lines(PAGE) if line}


def pool(server: ApiServer, pods: dict[str, str]) -> None:
    """A pool of whereabouts; `pods` by offset."""
    entries = {offset: {"id": "c", "podref": pod, "ifname": "net1"} for offset, pod in pods.items()}
    server.apply(
        {
            "apiVersion": "whereabouts.cni.cncf.io/v1alpha1",
            "kind": "IPPool",
            "metadata": {"namespace": "kube-system", "name": "10.9.0.0-24"},
            "spec": {"range": IPAM["range"], "allocations": entries},
        }
    )


def daemon_set(name: str) -> dict[str, Any]:
    """A DaemonSet that runs nowhere: the API server has no controllers."""
    labels = {"name": name}
    spec = {"containers": [{"name": name, "image": "none"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"namespace": "kube-system", "name": name},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


def test_the_rights_of_the_pages_suffice(reader: Reader) -> None:
    server = reader.server
    reader.creates_the_resources()
    server.apply(*yaml.safe_load_all(RIGHTS.split("```yaml\n")[1].partition("```")[0]))
    reader.reserve("10.9.0.2", "default/db", "worker-9")
    reader.reserve("10.9.0.7", "default/old")
    pool(server, {"7": "default/old"})
    token = server.service_account_token("kube-system", "asking")
    reader.environment["KUBECONFIG"] = str(server.kubeconfig_for_token(token))
    server.apply(bound("asking", "kubectl-multus"))
    assert "worker-9" in reader.types("kubectl multus addresses").stdout
    done = reader.runs("kubectl multus addresses release --node worker-9 --yes")
    assert (done.returncode, "forbidden" in done.stderr) == (1, True)
    # What the page adds.
    assert "`delete` and `patch` for\n`overlappingrangeipreservations`, and `patch` for `ippools`" in RIGHTS
    rules = [
        {"apiGroups": ["whereabouts.cni.cncf.io"], "resources": [name], "verbs": verbs}
        for name, verbs in (("overlappingrangeipreservations", ["delete", "patch"]), ("ippools", ["patch"]))
    ]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "releasing"}}
    server.apply({**role, "rules": rules}, bound("asking", "releasing"))
    for of in ("--node worker-9", "--address 10.9.0.7"):
        done = reader.runs(f"kubectl multus addresses release {of} --yes")
        assert (done.returncode, done.stderr) == (0, "")
    assert reader.reserved() == set()


def bound(user: str, role: str) -> dict[str, Any]:
    """Bind a cluster role to a service account of kube-system."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{user}-{role}"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": user, "namespace": "kube-system"}],
    }
