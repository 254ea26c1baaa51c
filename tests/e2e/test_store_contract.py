"""The contract suite of the stores, over the store on a real API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import network_status
from multus_daemon.spec.nad.selection import KIND, NETWORKS_READY, NetworkAttachmentDefinition
from tests.contract.conftest import Condition, condition_in, of_the_loop
from tests.contract.test_cluster_store import *  # noqa: F403  every test of the suite
from tests.e2e.apiserver import ApiServer
from tests.e2e.node import NAD
from tests.e2e.test_kubernetes import manifests
from tests.waiting import eventually

pytest_plugins = ["tests.e2e.kube_fixtures"]

NODE = "node-of-the-contract"


class RealHarness:
    """The store on the API server, with the daemon's rights, and an administrator."""

    def __init__(self, server: ApiServer, store: KubeStore) -> None:
        self._server = server
        self._kube = store
        self.store = of_the_loop(store)

    async def put_pod(self, pod: Pod) -> Pod:
        await self.remove_pod(pod)
        made = await asyncio.to_thread(
            self._server.create_pod,
            pod.name,
            namespace=pod.namespace,
            node=NODE,
            annotations=dict(pod.annotations),
            hostNetwork=pod.host_network,
        )
        declared = replace(pod, uid=PodUid(made["metadata"]["uid"]), phase=made["status"]["phase"])
        await self._until_known(self._kube.pods, (pod.namespace, pod.name), declared)
        return declared

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        metadata = {"namespace": network.namespace, "name": network.name, "annotations": dict(network.annotations)}
        await asyncio.to_thread(self._server.apply, {**NAD, "metadata": metadata, "spec": {"config": network.config}})
        await self._until_known(self._kube.networks, (network.namespace, network.name), network)

    async def remove_pod(self, pod: Pod) -> None:
        await asyncio.to_thread(self._server.delete_pod, pod.name, pod.namespace)
        await self._until_known(self._kube.pods, (pod.namespace, pod.name), None)

    async def read_status(self, pod: Pod) -> str | None:
        found = await asyncio.to_thread(self._server.get, "v1", "Pod", pod.name, pod.namespace)
        value: str | None = (found["metadata"].get("annotations") or {}).get(network_status.ANNOTATION)
        return value

    async def read_condition(self, pod: Pod) -> Condition | None:
        found = await asyncio.to_thread(self._server.get, "v1", "Pod", pod.name, pod.namespace)
        return condition_in(found)

    async def put_labels(self, namespace: str, labels: Mapping[str, str]) -> None:
        await asyncio.to_thread(self._server.create_namespace, namespace, labels)

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        self._kube.watch_pods(callback)

    async def clean(self) -> None:
        for name in ("web-0", "web-1"):
            await asyncio.to_thread(self._server.delete_pod, name, "web")
        for namespace, name in (("web", "net1"), ("infra", "net1"), ("other", "net2")):
            await asyncio.to_thread(self._server.delete, NAD["apiVersion"], KIND, name, namespace)

    async def _until_known(self, informer: Any, key: tuple[str, str], expected: object) -> None:
        await eventually(lambda: informer.get(key) == expected)


def prepare(server: ApiServer, directory: Path) -> Path:
    """The CRD, the rights, namespaces and a node; the daemon's kubeconfig."""
    (crd,) = manifests("crd.yaml")
    server.install_crd(crd)
    namespaces = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("web", "infra", "other")
    ]
    server.apply(*manifests("rbac.yaml"), *namespaces)
    with contextlib.suppress(Exception):
        server.create_node(NODE)
    token = directory / "token"
    token.write_text(server.service_account_token("kube-system", "multus-daemon"))
    return server.kubeconfig_for_token(token)


@pytest.fixture
async def harness(api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealHarness]:
    # The server is slow on a busy machine.
    monkeypatch.setattr(deadlines, "NETWORK_STATUS_PATIENCE_SECONDS", 20.0)
    kubeconfig = await asyncio.to_thread(prepare, api_server, tmp_path)
    async with ApiClient(Kubeconfig(kubeconfig)) as client:
        store = KubeStore(client, NODE, Gates())
        store._pod_patience = store._unsynced_patience = store._lookup._patience = 0.2
        running = asyncio.create_task(store.run())
        harness = RealHarness(api_server, store)
        try:
            async with asyncio.timeout(20):
                await store.pods.synced.wait()
                await store.networks.synced.wait()
            await harness.clean()
            yield harness
        finally:
            await harness.clean()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_a_condition_is_a_readiness_gate_beside_the_kubelets(harness: RealHarness, api_server: ApiServer) -> None:
    """As the kubelet finds it: its own conditions stay, and the time of transition means something."""
    made = await asyncio.to_thread(
        api_server.create_pod,
        "web-1",
        namespace="web",
        node=NODE,
        readinessGates=[{"conditionType": NETWORKS_READY}],
    )
    pod = Pod(Namespace("web"), PodName("web-1"), PodUid(made["metadata"]["uid"]))

    async def conditions(ready: bool, reason: str, message: str = "") -> dict[str, dict[str, Any]]:
        await harness.store.condition(pod, ready=ready, reason=reason, message=message)
        async with asyncio.timeout(20):
            while await harness.read_condition(pod) != (ready, reason, message):
                await asyncio.sleep(0.02)
        found = await asyncio.to_thread(api_server.get, "v1", "Pod", "web-1", "web")
        assert found["spec"]["readinessGates"] == [{"conditionType": NETWORKS_READY}]
        return {item["type"]: item for item in found["status"]["conditions"]}

    def kubelets(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [item for kind, item in sorted(found.items()) if kind != NETWORKS_READY]

    before = made["status"]["conditions"]
    first = await conditions(ready=False, reason="AttachmentBroken", message="net1")
    assert kubelets(first) == sorted(before, key=lambda item: item["type"])
    # A second is the API's unit of time.
    await asyncio.sleep(1.1)
    second = await conditions(ready=False, reason="NetworkChangeFailed", message="net2")
    assert second[NETWORKS_READY]["lastTransitionTime"] == first[NETWORKS_READY]["lastTransitionTime"]
    third = await conditions(ready=True, reason="NetworksAttached")
    assert third[NETWORKS_READY]["lastTransitionTime"] > first[NETWORKS_READY]["lastTransitionTime"]
    assert kubelets(third) == kubelets(first)
    # What the kubelet writes leaves ours.
    status = {"status": {"conditions": [{**item, "message": "newer"} for item in before]}}
    path = "/api/v1/namespaces/web/pods/web-1/status"
    await asyncio.to_thread(
        api_server.request, "PATCH", path, status, content_type="application/strategic-merge-patch+json"
    )
    assert await harness.read_condition(pod) == (True, "NetworksAttached", "")


async def test_a_condition_never_goes_to_a_pod_made_anew(harness: RealHarness, api_server: ApiServer) -> None:
    older = await harness.put_pod(Pod(Namespace("web"), PodName("web-1"), PodUid("")))
    newer = await harness.put_pod(older)
    assert newer.uid != older.uid
    other = await harness.put_pod(replace(older, name=PodName("web-0")))
    await harness.store.condition(older, ready=False, reason="AttachmentBroken", message="of the older")
    await harness.store.condition(other, ready=True, reason="NetworksAttached", message="")
    # They are written in order.
    async with asyncio.timeout(20):
        while await harness.read_condition(other) is None:
            await asyncio.sleep(0.02)
    assert await harness.read_condition(newer) is None


async def test_an_annotation_that_is_patched_is_reported(harness: RealHarness, api_server: ApiServer) -> None:
    pod = await harness.put_pod(Pod(Namespace("web"), PodName("web-1"), PodUid(""), {"a": "1"}))
    reported: list[Pod] = []
    harness.watch_pods(reported.append)
    assert pod in reported
    reported.clear()
    patch = {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "net1"}}}
    path = "/api/v1/namespaces/web/pods/web-1"
    await asyncio.to_thread(
        api_server.request, "PATCH", path, patch, content_type="application/strategic-merge-patch+json"
    )
    await eventually(lambda: reported, 20)
    assert reported == [replace(pod, annotations={"a": "1", "k8s.v1.cni.cncf.io/networks": "net1"})]


async def test_the_controller_of_upstream_is_seen(harness: RealHarness, api_server: ApiServer) -> None:
    """As its manifest has it: privileged, with sockets of the node."""
    container = {"name": "c", "image": "ghcr.io/k8snetworkplumbingwg/multus-dynamic-networks-controller:latest"}
    socket = {"name": "s", "hostPath": {"path": "/run/multus/multus.sock", "type": "Socket"}}
    await asyncio.to_thread(
        api_server.create_pod, "web-1", namespace="web", node=NODE, containers=[container], volumes=[socket]
    )
    async with asyncio.timeout(20):
        while await harness.store.hotplug_controller() != "web/web-1":
            await asyncio.sleep(0.02)
    await asyncio.to_thread(api_server.delete_pod, "web-1", "web")
    async with asyncio.timeout(20):
        while await harness.store.hotplug_controller():
            await asyncio.sleep(0.02)
