"""A cluster of an API server in this process, with daemons that answer as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_tools.kubectl.cluster import Cluster
from tests.fakes.apiserver import (
    EVENTS,
    NETWORKS,
    NODES,
    PODS,
    POOLS,
    RESERVATIONS,
    Execution,
    FakeApiServer,
    Object,
)
from tests.virtual_time import VirtualLoop

NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"
STATUS_ANNOTATION = "k8s.v1.cni.cncf.io/network-status"


class Bench:
    """Actions of a test on the cluster."""

    def __init__(self, server: FakeApiServer, client: ApiClient) -> None:
        self.server, self.client = server, client
        self.asked: list[tuple[str, list[str]]] = []
        """Nodes, and the commands that ran in the daemons' pods there."""
        self.progress: list[tuple[int, int]] = []
        """Daemons that have answered, and that were asked, after each change."""

    def cluster(self, *, node_seconds: float = 10.0, selector: str = "app=multus") -> Cluster:
        return Cluster(self.client, selector, node_seconds, lambda *numbers: self.progress.append(numbers))

    def node(
        self,
        name: str,
        program: Callable[[Execution], Awaitable[None]] | None = None,
        *,
        ready: bool = True,
        taint: str = "",
        **labels: str,
    ) -> None:
        """A node, and with `program` a daemon."""
        conditions = [{"type": "Ready", "status": "True" if ready else "Unknown"}]
        taints = [{"key": taint, "effect": "NoExecute"}] if taint else []
        state = {"spec": {"taints": taints}, "status": {"conditions": conditions}}
        self.server.put(NODES, {"metadata": {"name": name, "labels": labels}, **state})
        if program is not None:
            self.daemon(name, program)

    def daemon(
        self,
        node: str,
        program: Callable[[Execution], Awaitable[None]],
        *,
        name: str = "",
        owner: str = "DaemonSet",
        waiting: Object | None = None,
        containers: tuple[str, ...] = ("kube-multus",),
        **metadata: Any,
    ) -> None:
        """A pod of the DaemonSet on the node."""
        name = name or f"kube-multus-ds-{node}"
        found = {
            "namespace": "kube-system",
            "name": name,
            "labels": {"app": "multus", "name": "multus"},
            "ownerReferences": [{"kind": owner, "name": "kube-multus-ds"}],
            **metadata,
        }
        state = {"waiting": waiting} if waiting else {"running": {}}
        status = {"phase": "Running", "containerStatuses": [{"name": "kube-multus", "ready": True, "state": state}]}
        spec = {"nodeName": node, "hostNetwork": True, "containers": [{"name": each} for each in containers]}
        self.server.put(PODS, {"metadata": found, "spec": spec, "status": status})

        async def noted(execution: Execution) -> None:
            self.asked.append((node, execution.words))
            await program(execution)

        self.server.programs["kube-system", name] = noted

    def pod(
        self,
        name: str,
        networks: str | None = None,
        *,
        namespace: str = "default",
        node: str = "node-a",
        attached: str | None = None,
        status: Object | None = None,
        **fields: Any,
    ) -> str:
        """A pod; its UID. `attached`: JSON of its network-status; `fields`: of its spec."""
        annotations = {NETWORKS_ANNOTATION: networks, STATUS_ANNOTATION: attached}
        metadata = {
            "namespace": namespace,
            "name": name,
            "annotations": {key: value for key, value in annotations.items() if value is not None},
        }
        spec = {"nodeName": node, "containers": [{"name": "main"}], **fields}
        found = self.server.put(PODS, {"metadata": metadata, "spec": spec, "status": status or {"phase": "Pending"}})
        uid: str = found["metadata"]["uid"]
        return uid

    def event(self, pod: str, uid: str, message: str, **fields: Any) -> None:
        """A Warning of the daemon's about a pod of the namespace `default`."""
        number = len(self.server.objects[EVENTS])
        item = {
            "metadata": {"namespace": "default", "name": f"{pod}.{number}"},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": pod, "uid": uid},
            "type": "Warning",
            "reason": "NoNetworkFound",
            "source": {"component": "multus"},
            "lastTimestamp": f"2026-11-22T10:00:{number:02}Z",
            "message": message,
            **fields,
        }
        self.server.put(EVENTS, item)

    def network(self, name: str, config: str, namespace: str = "default") -> None:
        self.server.put(NETWORKS, {"metadata": {"namespace": namespace, "name": name}, "spec": {"config": config}})

    def shared(self, name: str, namespace: str = "default", **ipam: Any) -> None:
        """A network whose addresses whereabouts gives."""
        config = {"cniVersion": "1.0.0", "type": "macvlan", "ipam": {"type": "whereabouts", **ipam}}
        self.network(name, json.dumps(config), namespace)

    def reserve(self, name: str, pod: str, node: str = "", **notes: str) -> None:
        """A reservation; without a node, of whereabouts' binary. `notes`: annotations of ours without their prefix."""
        notes |= {"node": node} if node else {}
        annotations = {f"multus.io/{key}": value for key, value in notes.items()}
        metadata: Object = {"namespace": "kube-system", "name": name, "annotations": annotations}
        metadata |= {"finalizers": ["multus.io/held"]} if node else {}
        spec = {"podref": pod, "ifname": "net1", "containerid": f"c-{pod.partition('/')[2]}"}
        self.server.put(RESERVATIONS, {"metadata": metadata, "spec": spec})

    def pool(self, name: str, cidr: str, **pods: str) -> None:
        """A pool; `pods`: the pods by the offsets of their addresses, with a letter before the number."""
        entries = {key[1:]: {"id": "c", "podref": pod, "ifname": "net1"} for key, pod in pods.items()}
        spec = {"range": cidr, "allocations": entries}
        self.server.put(POOLS, {"metadata": {"namespace": "kube-system", "name": name}, "spec": spec})


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Server, daemons and client are in this process: nothing is left to do when the time for an answer is over."""
    return {"virtual": VirtualLoop}


@contextlib.asynccontextmanager
async def benched(tmp_path: Path) -> AsyncIterator[Bench]:
    """Start an API server and a client, for tests and for programs that run the bench alone."""
    server = FakeApiServer()
    await server.start()
    async with ApiClient(Kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))) as client:
        yield Bench(server, client)
    await server.stop()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(tmp_path) as made:
        yield made


def status_reply(**fields: Any) -> Object:
    """Return the output of `multusctl status --json`."""
    return {
        "schema": "multusctl.status/v1",
        "source": "daemon",
        "version": "0.2.0",
        "startedAt": 1.0,
        "ready": True,
        "gates": {},
        "primary": {"wanted": False},
        "cluster": {"kind": "kubernetes", "informers": [], "pendingStatuses": 0},
        "requests": {"running": 0, "waiting": 0, "limit": 256},
        "processes": {"running": 0, "waiting": 0, "limit": 8},
        "spooled": 0,
        "containers": 3,
        "behind": {},
        "leftovers": 0,
        "errors": [],
        **fields,
    }


def explain_reply(pod: str = "default/web", problem: str = "", **fields: Any) -> Object:
    """Return the output of `multusctl explain --json`."""
    return {
        "schema": "multusctl.explain/v1",
        "pod": pod,
        "container": "",
        "problem": problem,
        "code": 7 if problem else 0,
        "steps": [{"what": "networks", "result": "", "problem": problem}],
        "networks": [],
        "attached": False,
        "errors": [],
        **fields,
    }


async def hang(execution: Execution) -> None:
    """A daemon that never answers."""
    await execution.hang()
