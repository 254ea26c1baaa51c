"""A network-status that waited when the daemon was killed: the next one finds it in the records and writes it."""

from __future__ import annotations

import functools

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.store import Cluster, KubeStore
from multus_daemon.node.at_start import OutdatedStatuses
from multus_daemon.pod import statuses
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad.network_status import ANNOTATION
from tests.fakes.apiserver import PODS, FakeApiServer
from tests.unit.cluster.kube.conftest import Running
from tests.unit.pod.conftest import NETNS, Engine


async def test_it_is_written_once_the_api_server_is_back(
    server: FakeApiServer, client: ApiClient, running: Running, until, monkeypatch
) -> None:
    monkeypatch.setattr(deadlines, "STATUSES_BLIND_SECONDS", 0.01)
    engine = Engine()
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.cluster.put_pod(Pod(Namespace("web"), PodName("p1"), PodUid("u1")))
    await portal.run(Deadline(), functools.partial(engine.verbs.add, engine.request()))
    engine.links.namespaces[NETNS].add("eth0")
    lost = engine.cluster.statuses["web/p1"]
    for name, uid in (("p1", "u1"), ("p2", "u2")):
        server.add_pod(name, uid=uid, annotations={"other/key": "kept"})

    # The daemon has been killed, and the next one starts while the API server is away.
    await server.stop()
    store = KubeStore(client, "node-a", Gates("pods", "networks"))
    engine.cluster = Cluster(store, LoopPortal())  # type: ignore[assignment]  # a real one serves as well
    engine.verbs = engine.make_verbs()
    core = engine.verbs.engine
    at_start = OutdatedStatuses(core)
    await portal.run(Deadline(), core.records.refresh)
    async with running(store.run()), running(at_start.run()):
        await until(lambda: store.pods.problem not in ("", "not started"))
        await server.start()
        await until(lambda: server.count("PATCH"))
        await until(lambda: (pod := store.pods.get(("web", "p1"))) and ANNOTATION in pod.annotations)
        assert server.get(PODS, "web", "p1")["metadata"]["annotations"] == {"other/key": "kept", ANNOTATION: lost}
        assert ANNOTATION not in server.get(PODS, "web", "p2")["metadata"]["annotations"], "it has no record"
        # Another start finds nothing to do, and sends no request.
        before = len(server.requests)
        again = functools.partial(statuses.bring_up_to_date, core, ContainerId("c1"))
        assert not await portal.run(Deadline(), again)
        assert len(server.requests) == before
