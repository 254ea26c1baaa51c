"""A store of the API server's objects with those who follow their changes, as the daemon joins them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.node.keep import Keep
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.records import Records
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import ContainerRecord, Sandbox
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid


async def followed_store() -> KubeStore:
    """A store whose pods are followed by the loop that keeps running pods; it has a container of web/web-1."""
    store = KubeStore(ApiClient(Kubeconfig(Path("/nonexistent"))), "node-a", Gates())
    store.claims._is_wanted = True
    records = Records(FileStore(Path("/nonexistent"), ResultCache(Path("/nonexistent"))))
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(
            attachments=SimpleNamespace(hotplug="on", ready_condition=False),
            deletes=SimpleNamespace(reconcile_seconds=300.0),
        ),
        cluster=SimpleNamespace(hotplug_controller=store.hotplug_controller, node_event=store.events.node_event),
        at_work=frozenset(),
        records=records,
    )
    loop = Keep(engine, lambda: b"{}")
    sandbox = Sandbox(ContainerId("c"), "/run/netns/c")
    names = Namespace("web"), PodName("web-1"), PodUid("u")
    records.view.is_loaded = True
    records.view.enter(ContainerRecord(sandbox, IfName("eth0"), *names, (), complete=True))
    # The loop enters it.
    await asyncio.sleep(0)
    store.watch_pods(loop.pod_changed)
    return store
