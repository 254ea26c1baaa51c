"""Running pods that lack networks of their annotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multus_daemon import settings
from multus_daemon.node import lacking
from multus_daemon.spec.attachment import Pod, Sandbox
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION
from multus_daemon.spec.ports import StoreUnavailableError
from tests.aside import Aside
from tests.counted import counted
from tests.unit.pod.conftest import NETNS, Engine


class World:
    """An engine, and the reports of its pods. `trouble` is why networks cannot be attached now."""

    def __init__(self, hotplug: str = "off") -> None:
        self.engine = Engine()
        self.trouble = ""
        core = self.engine.verbs.engine
        core = replace(core, settings=settings.from_object({"hotplug": hotplug}, "test"))
        self.reports = lacking.Reports(core, lambda pod: self.trouble)

    def add(self, networks: str) -> None:
        self.engine.declare(networks)
        Aside(self.engine.verbs.add, self.engine.request()).result()
        self.engine.cluster.events.clear()

    async def looks(self, number: int = 1) -> None:
        for _ in range(number):
            await self.reports.look()

    @property
    def number(self) -> float:
        return counted(self.engine.verbs.engine.metrics.lacking)


@pytest.fixture
def world() -> World:
    return World()


def declare(world: World, networks: str = "n1,n2", **fields: Any) -> None:
    pod = Pod(Namespace("web"), PodName("p1"), PodUid("u1"), {NETWORKS_ANNOTATION: networks}, phase="Running")
    world.engine.cluster.put_pod(replace(pod, **fields))


@pytest.mark.weak_spot(27)
async def test_a_pod_that_was_started_behind_our_back_is_told_of_once(world: World) -> None:
    declare(world)
    await world.looks()
    assert world.engine.cluster.events == []
    await world.looks(3)
    [(subject, kind, reason, message)] = world.engine.cluster.events
    assert (subject, kind, reason) == ("web/p1", "Warning", "NetworksMissing")
    assert "web/n1, web/n2" in message
    assert message.endswith("; delete it, so that it is made anew")
    assert world.number == 1
    declare(world, uid=PodUid("u2"))
    await world.looks(3)
    assert len(world.engine.cluster.events) == 2
    world.engine.cluster.pods.clear()
    await world.looks()
    assert world.number == 0


@pytest.mark.parametrize("by", ["us", "another daemon"])
async def test_a_pod_whose_annotation_was_edited_is_not_to_be_deleted(world: World, by: str) -> None:
    """It would be recreated from a template without the change."""
    world.add("n1")
    declare(world, "n1,n2")
    if by == "another daemon":
        world.engine.store.left["c1"] = world.engine.store.records.pop("c1")
    await world.looks(2)
    [(_, _, _, message)] = world.engine.cluster.events
    assert "asked for: web/n2:" in message
    assert "changed after its start" in message
    assert "template" in message
    assert "delete" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "Pending"},
        {"phase": "Succeeded"},
        {"phase": ""},
        {"host_network": True},
        {"annotations": {}},
        {"annotations": {NETWORKS_ANNOTATION: "[null]"}},
    ],
)
async def test_pods_that_lack_nothing(world: World, fields: dict[str, Any]) -> None:
    declare(world, **fields)
    await world.looks(3)
    assert world.engine.cluster.events == []
    assert world.number == 0


@pytest.mark.parametrize("by", ["us", "a former sandbox", "another daemon", "hot-plug"])
async def test_a_pod_that_has_its_networks(world: World, by: str) -> None:
    world.add("n1" if by == "hot-plug" else "n1,n2")
    declare(world)
    store = world.engine.store
    record = store.records["c1"]
    match by:
        case "a former sandbox":
            store.save(replace(record, sandbox=Sandbox(ContainerId("c0"), NETNS), attachments=record.attachments[:1]))
        case "another daemon":
            store.left["c1"] = store.records.pop("c1")
        case "hot-plug":
            Aside(world.engine.verbs.add_network, world.engine.plug(network="other-than-its-definition")).result()
            world.engine.cluster.events.clear()
        case _:
            assert by == "us"
    await world.looks(3)
    assert world.engine.cluster.events == []


async def test_nothing_is_said_while_pods_are_not_known(world: World) -> None:
    declare(world)
    world.engine.cluster.unsynced = True
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await world.looks()
    assert world.engine.cluster.events == []


@pytest.mark.parametrize("hotplug", ["on", "off"])
@pytest.mark.parametrize("trouble", ["", "due in 12 s after 3 failures: no such network"])
async def test_what_the_daemon_attaches_needs_no_other_controller(hotplug: str, trouble: str) -> None:
    world = World(hotplug)
    world.trouble = trouble
    world.add("n1")
    declare(world, "n1,n2")
    await world.looks(2)
    [(_, _, _, message)] = world.engine.cluster.events
    assert "web/n2" in message
    assert ("controller" in message) is (hotplug == "off")
    assert ("template" in message) is (hotplug == "off")
    if hotplug == "on":
        assert message.endswith(trouble or "under way")


async def test_a_controller_that_is_there_attaches_them() -> None:
    """The daemon does not, although it is set to."""
    world = World("on")
    world.add("n1")
    declare(world, "n1,n2")
    names = Namespace("kube-system"), PodName("controller"), PodUid("u9")
    world.engine.cluster.put_pod(Pod(*names, is_hotplug_controller=True))
    await world.looks(2)
    [(_, _, _, message)] = world.engine.cluster.events
    assert "controller" in message
