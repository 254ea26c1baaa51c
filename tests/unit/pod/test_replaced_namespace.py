"""The path of a container's namespace leads to another namespace or to none: the daemon does not touch that one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from multus_daemon.node import orphans
from multus_daemon.spec.cni.errors import InvalidNetnsError
from multus_daemon.spec.cni.names import ContainerId
from tests.unit.pod.conftest import NETNS, Engine

OWN, ANOTHERS = "boot-4-100", "boot-4-200"
WHOLE = [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]


def add(engine: Engine) -> None:
    engine.links.ids[NETNS] = OWN
    engine.declare("n1,n2")
    engine.verbs.add(engine.request())
    engine.runner.calls.clear()


def namespaces(engine: Engine) -> set[str]:
    return {call.sandbox.netns for call in engine.runner.calls}


def late(engine: Engine) -> None:
    engine.clock = 3000.0
    engine.verbs.delete(replace(engine.request("DEL"), spooled=2000.0))


def collect(engine: Engine) -> None:
    engine.verbs.gc(json.dumps({"cniVersion": "1.1.0", "name": "multus", "cni.dev/valid-attachments": []}).encode())


def compare(engine: Engine) -> None:
    core = engine.verbs.engine
    found = orphans.look(core)
    assert not found.in_use
    for orphan in found.orphans.values():
        assert orphan.is_certain
        assert orphans.delete(core, orphan, 10)


Way = Callable[[Engine], None]
WAYS: dict[str, Way] = {
    "DEL": lambda engine: engine.verbs.delete(engine.request("DEL")),
    "spooled": late,
    "GC": collect,
    "reconcile": compare,
}


@pytest.mark.parametrize("way", WAYS)
def test_another_namespace_is_not_touched_and_the_rest_is_deleted(engine: Engine, way: str) -> None:
    add(engine)
    engine.links.ids[NETNS] = ANOTHERS
    engine.links.namespaces[NETNS].add("eth0")
    WAYS[way](engine)
    assert engine.runner.order == WHOLE
    assert namespaces(engine) == {""}
    assert engine.store.records == {}
    if way in ("DEL", "spooled"):
        assert engine.replaced_netns == 1


@pytest.mark.parametrize("way", ["DEL", "spooled"])
@pytest.mark.parametrize("known", [OWN, ""], ids=["same", "record of an earlier daemon"])
def test_its_own_is(engine: Engine, way: str, known: str) -> None:
    add(engine)
    [record] = engine.store.records.values()
    assert record.netns_id == OWN
    engine.store.records["c1"] = replace(record, netns_id=known)
    if not known:
        # Nothing to compare with.
        engine.links.ids[NETNS] = ANOTHERS
    WAYS[way](engine)
    assert namespaces(engine) == {NETNS}
    assert engine.replaced_netns == 0


@pytest.mark.parametrize("way", ["DEL", "spooled", "GC"])
@pytest.mark.parametrize("known", [OWN, ""])
def test_a_file_in_its_place_is_a_namespace_that_is_gone(engine: Engine, way: str, known: str) -> None:
    add(engine)
    engine.store.records["c1"] = replace(engine.store.records["c1"], netns_id=known)
    del engine.links.namespaces[NETNS]
    engine.links.files.add(NETNS)
    WAYS[way](engine)
    assert engine.runner.order == WHOLE
    assert namespaces(engine) == {""}
    assert engine.store.records == {}


def test_a_repeated_add_is_no_repetition_in_another_namespace(engine: Engine) -> None:
    add(engine)
    engine.links.ids[NETNS] = ANOTHERS
    engine.verbs.add(engine.request())
    deleted = [call for call in engine.runner.calls if call.verb == "DEL"]
    assert {call.sandbox.netns for call in deleted} == {""}
    assert len(engine.runner.calls) == 2 * len(deleted)
    assert engine.store.records["c1"].netns_id == ANOTHERS


class TestHotPlug:
    def test_add_to_another_namespace_is_refused(self, engine: Engine) -> None:
        add(engine)
        engine.links.ids[NETNS] = ANOTHERS
        with pytest.raises(InvalidNetnsError, match="is not the network namespace that container c1 had"):
            engine.verbs.add_network(engine.plug())
        assert engine.runner.calls == []

    @pytest.mark.parametrize("lives", [True, False])
    def test_del_is_done_in_the_containers_own(self, engine: Engine, lives: bool) -> None:
        """A client that names another's namespace takes nothing out of it."""
        add(engine)
        engine.verbs.add_network(engine.plug())
        engine.runner.calls.clear()
        engine.links.namespaces["/run/netns/other"] = {"lo", "net5"}
        engine.links.ids["/run/netns/other"] = ANOTHERS
        if not lives:
            del engine.links.namespaces[NETNS]
        engine.verbs.remove_network(engine.plug("DEL", netns="/run/netns/other"))
        assert engine.runner.order == [("DEL", "web/hot")]
        assert namespaces(engine) == {NETNS if lives else ""}

    def test_a_container_never_seen_is_known_by_its_namespace_from_then_on(self, engine: Engine) -> None:
        engine.links.ids[NETNS] = OWN
        engine.verbs.add_network(engine.plug(container="c2"))
        assert engine.store.records["c2"].netns_id == OWN


def test_processes_in_its_own_namespace_still_count(engine: Engine) -> None:
    add(engine)
    assert functools.partial(collect, engine)() is None
    assert engine.runner.order == []
    assert ContainerId("c1") in engine.store.records
