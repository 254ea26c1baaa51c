"""Every `ports.ClusterStore` passes these tests."""

import asyncio
import dataclasses

import pytest

from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StatusWriteError
from tests.contract.conftest import StoreHarness
from tests.waiting import eventually

POD = Pod(
    Namespace("web"),
    PodName("web-1"),
    PodUid("11111111-2222-3333-4444-555555555555"),
    {"k8s.v1.cni.cncf.io/networks": '[{"name": "net1"}]', "other/key": "kept\n"},
)
NETWORK = NetworkAttachmentDefinition("web", "net1", '{"cniVersion": "1.0.0", "type": "ptp"}', {"a/b": "c"})


async def test_pod_as_declared(harness: StoreHarness) -> None:
    pod = await harness.put_pod(POD)
    # A real API server gives a phase, too.
    assert pod == dataclasses.replace(POD, uid=pod.uid, phase=pod.phase)
    assert await harness.store.pod(pod.namespace, pod.name, pod.uid) == pod
    assert await harness.store.pod(pod.namespace, pod.name, PodUid("")) == pod


async def test_pod_on_the_host_network(harness: StoreHarness) -> None:
    pod = await harness.put_pod(dataclasses.replace(POD, host_network=True))
    assert (await harness.store.pod(pod.namespace, pod.name, pod.uid)).host_network


async def test_another_incarnation_is_returned_and_not_judged(harness: StoreHarness) -> None:
    pod = await harness.put_pod(POD)
    found = await harness.store.pod(POD.namespace, POD.name, PodUid("99999999-2222-3333-4444-555555555555"))
    assert found.uid == pod.uid


async def test_the_newer_pod_of_the_same_name_counts(harness: StoreHarness) -> None:
    await harness.put_pod(POD)
    newer = await harness.put_pod(dataclasses.replace(POD, uid=PodUid("99999999-2222-3333-4444-555555555555")))
    assert await harness.store.pod(POD.namespace, POD.name, newer.uid) == newer


async def test_unknown_pod(harness: StoreHarness) -> None:
    await harness.put_pod(POD)
    for namespace, name in (("web", "web-2"), ("other", "web-1")):
        with pytest.raises(PodNotFoundError, match=f"{namespace}/{name}"):
            await harness.store.pod(Namespace(namespace), PodName(name), PodUid(""))


async def test_removed_pod(harness: StoreHarness) -> None:
    pod = await harness.put_pod(POD)
    await harness.remove_pod(pod)
    with pytest.raises(PodNotFoundError):
        await harness.store.pod(pod.namespace, pod.name, pod.uid)


async def test_pods_of_the_node(harness: StoreHarness) -> None:
    before = {(pod.namespace, pod.name) for pod in await harness.store.node_pods()}
    pod = await harness.put_pod(POD)
    assert pod in await harness.store.node_pods()
    await harness.remove_pod(pod)
    assert {(pod.namespace, pod.name) for pod in await harness.store.node_pods()} == before - {("web", "web-1")}


async def test_network_as_declared(harness: StoreHarness) -> None:
    await harness.put_network(NETWORK)
    assert await harness.store.network("web", "net1") == NETWORK


async def test_unknown_network(harness: StoreHarness) -> None:
    await harness.put_network(NETWORK)
    for namespace, name in (("web", "net2"), ("other", "net1")):
        with pytest.raises(NetworkNotFoundError, match=f"{namespace}/{name}"):
            await harness.store.network(namespace, name)


async def test_namespaces_that_have_a_network_of_a_name(harness: StoreHarness) -> None:
    for namespace in ("web", "infra"):
        await harness.put_network(dataclasses.replace(NETWORK, namespace=namespace))
    await harness.put_network(dataclasses.replace(NETWORK, namespace="other", name="net2"))
    assert await harness.store.namespaces_with_network("net1") == ["infra", "web"]
    assert await harness.store.namespaces_with_network("net3") == []


@pytest.mark.conformance("pods-28")
async def test_status_is_written_and_replaced(harness: StoreHarness) -> None:
    pod = await harness.put_pod(POD)
    assert await harness.read_status(pod) is None
    for value in ('[{\n    "name": "web/net1",\n    "dns": {}\n}]', "[]", '[{"name": "ä \\u003c \'x\'  "}]'):
        await harness.store.write_network_status(pod, value, keep_trying=False)
        assert await harness.read_status(pod) == value
    after = await harness.store.pod(pod.namespace, pod.name, pod.uid)
    assert after.annotations["other/key"] == "kept\n"


@pytest.mark.conformance("pods-31")
async def test_status_of_another_incarnation_is_refused(harness: StoreHarness) -> None:
    await harness.put_pod(POD)
    older = dataclasses.replace(POD, uid=PodUid("99999999-2222-3333-4444-555555555555"))
    with pytest.raises(StatusWriteError):
        await harness.store.write_network_status(older, "[]", keep_trying=False)
    assert await harness.read_status(POD) is None


async def test_status_of_a_pod_that_has_gone_is_refused(harness: StoreHarness) -> None:
    pod = await harness.put_pod(POD)
    await harness.remove_pod(pod)
    with pytest.raises(StatusWriteError):
        await harness.store.write_network_status(pod, "[]", keep_trying=False)


async def test_events_never_raise(harness: StoreHarness) -> None:
    harness.store.event(POD, "Normal", "AddedInterface", "Add net1 [10.1.0.2/24] from web/net1")
    harness.store.event(POD, "Warning", "NoNetworkFound", "%s %d {}")
    harness.store.node_event("Warning", "CNIConfigRestored", "%s %d {}")


async def until_condition(harness: StoreHarness, pod: Pod, wanted: tuple[bool, str, str]) -> None:
    async with asyncio.timeout(30):
        while await harness.read_condition(pod) != wanted:
            await asyncio.sleep(0.01)


async def test_the_newest_condition_is_the_pods(harness: StoreHarness) -> None:
    pod = await harness.put_pod(POD)
    assert await harness.read_condition(pod) is None
    good, bad = (True, "NetworksAttached", ""), (False, "AttachmentBroken", 'web/net1 "net1": ä')
    for ready, reason, message in (good, bad, good):
        await harness.store.condition(pod, ready=ready, reason=reason, message=message)
        await until_condition(harness, pod, (ready, reason, message))
    # The first of the two is on its way when the second replaces it.
    for ready, reason, message in (bad, good):
        await harness.store.condition(pod, ready=ready, reason=reason, message=message)
    await harness.store.condition(pod, ready=False, reason="NetworkChangeFailed", message="last")
    await until_condition(harness, pod, (False, "NetworkChangeFailed", "last"))


async def test_a_condition_of_a_pod_that_has_gone_harms_nothing(harness: StoreHarness) -> None:
    gone = await harness.put_pod(dataclasses.replace(POD, name=PodName("web-0")))
    await harness.remove_pod(gone)
    pod = await harness.put_pod(POD)
    await harness.store.condition(gone, ready=True, reason="NetworksAttached", message="")
    await harness.store.condition(pod, ready=True, reason="NetworksAttached", message="")
    await until_condition(harness, pod, (True, "NetworksAttached", ""))


async def test_labels_of_a_namespace(harness: StoreHarness) -> None:
    await harness.put_labels("web", {"multus.io/hotplug": "true", "team": "a"})
    labels = await harness.store.namespace_labels("web")
    # An API server adds one of its own.
    assert {"multus.io/hotplug": "true", "team": "a"}.items() <= labels.items()
    assert await harness.store.namespace_labels("there-is-none") == {}
    assert await harness.store.namespace_labels("not/a name") == {}


async def test_no_pod_is_a_hotplug_controller_by_its_name_alone(harness: StoreHarness) -> None:
    pod = await harness.put_pod(dataclasses.replace(POD, name=PodName("dynamic-networks-controller-ds-x7k2p")))
    assert await harness.store.hotplug_controller() == ""
    await harness.remove_pod(pod)


async def test_changed_pods_are_reported(harness: StoreHarness) -> None:
    known = await harness.put_pod(POD)
    reported: list[Pod] = []

    harness.watch_pods(reported.append)
    await eventually(lambda: known in reported)
    reported.clear()
    other = await harness.put_pod(dataclasses.replace(POD, name=PodName("web-0")))
    await eventually(lambda: other in reported)
    assert known not in reported
    changed = await harness.put_pod(dataclasses.replace(POD, annotations={"k8s.v1.cni.cncf.io/networks": "net2"}))
    await eventually(lambda: changed in reported)
    reported.clear()
    await harness.put_network(NETWORK)
    await harness.remove_pod(other)
    again = await harness.put_pod(dataclasses.replace(changed, annotations={}))
    await eventually(lambda: again in reported)
    assert {str(pod) for pod in reported} == {"web/web-1"}
