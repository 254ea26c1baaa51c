"""A failing DEL drops a network that was never attached; one that can't be detached for a day is set aside."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from multus_daemon import deadlines
from multus_daemon.node import orphans
from multus_daemon.plugins.plugin import NothingLeftError
from multus_daemon.pod import delete
from multus_daemon.spec.cni.errors import CniError, UnknownContainerError
from multus_daemon.spec.cni.names import ContainerId
from tests.unit.pod.conftest import NETNS, Engine

REFUSED = NothingLeftError("no such range", code=7)


def gc(engine: Engine, *listed: str) -> None:
    valid = [{"containerID": name, "ifname": "eth0"} for name in listed]
    engine.verbs.gc(json.dumps({"cniVersion": "1.1.0", "name": "multus", "cni.dev/valid-attachments": valid}).encode())


def cut_off(engine: Engine) -> None:
    """An ADD of which only the write-ahead record is there, as after a crash."""
    engine.declare("n1")
    engine.runner.fail["ADD", "web/n1"] = CniError("broken")
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    with pytest.raises(CniError, match="broken"):
        engine.verbs.add(engine.request())
    assert "c1" in engine.store.records
    engine.runner.fail["DEL", "web/n1"] = REFUSED
    engine.cluster.events.clear()


def told(engine: Engine) -> list[str]:
    return [message for reason, message in engine.warnings if reason == "NetworkNeverAttached"]


def by_del(engine: Engine) -> None:
    engine.verbs.delete(engine.request("DEL"))


def by_reconcile(engine: Engine) -> None:
    engine.links.namespaces.clear()
    (orphan,) = orphans.look(engine.verbs.engine).orphans.values()
    assert orphans.delete(engine.verbs.engine, orphan, 10)


def by_gc(engine: Engine) -> None:
    engine.links.unused.add(NETNS)
    gc(engine)


@pytest.mark.parametrize("way", [by_del, by_gc, by_reconcile])
def test_it_leaves_the_record(engine: Engine, way: Callable[[Engine], None]) -> None:
    cut_off(engine)
    way(engine)
    assert engine.store.records == {}
    assert "network web/n1" in told(engine)[0]
    assert "no such range" in told(engine)[0]
    assert engine.never_attached == 1


def test_a_hot_plug_that_was_never_attached_leaves_the_record_at_once(engine: Engine) -> None:
    engine.verbs.add(engine.request())
    before = engine.store.records["c1"]
    engine.runner.fail |= {("ADD", "web/hot"): CniError("no such range", code=7), ("DEL", "web/hot"): REFUSED}
    with pytest.raises(CniError, match="no such range"):
        engine.verbs.add_network(engine.plug())
    assert engine.store.records["c1"] == before
    assert len(told(engine)) == 1


def test_a_hot_plug_that_failed_fails_no_del_of_its_pod(engine: Engine) -> None:
    """Whatever its plugin is: the pod never had it, and what may be left is for reconcile."""
    engine.verbs.add(engine.request())
    engine.runner.fail |= {("ADD", "web/hot"): CniError("broken"), ("DEL", "web/hot"): CniError("broken")}
    with pytest.raises(CniError, match="broken"):
        engine.verbs.add_network(engine.plug())
    engine.verbs.delete(engine.request("DEL"))
    rest = engine.store.records["c1"]
    assert [item.name for item in rest.attachments] == ["web/hot"]
    assert rest.given_up
    assert any("DEL failed once and is answered as done" in message for _, message in engine.warnings)
    engine.runner.fail.clear()
    by_reconcile(engine)
    assert engine.store.records == {}


def test_a_network_of_the_pod_that_fails_beside_it_fails_the_del(engine: Engine) -> None:
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.runner.fail |= {("ADD", "web/hot"): CniError("broken"), ("DEL", "web/hot"): CniError("broken")}
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    with pytest.raises(CniError, match="broken"):
        engine.verbs.add_network(engine.plug())
    with pytest.raises(CniError, match="broken") as caught:
        engine.verbs.delete(engine.request("DEL"))
    assert "busy" in str(caught.value)


def test_an_attached_network_of_which_nothing_is_left_leaves_the_record(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.runner.fail["DEL", "web/n1"] = NothingLeftError("Link not found")
    engine.links.namespaces.clear()
    by_del(engine)
    assert engine.store.records == {}
    assert ("web/n1", "net1") not in engine.runner.attached
    assert "has nothing left, so its failed DEL counts as done: Link not found" in caplog.text
    assert (told(engine), engine.never_attached) == ([], 0)


# --- set aside -------------------------------------------------------------------------------------------------------


def failing(engine: Engine) -> None:
    """A container whose `web/n1` can't be detached any more, and whose namespace is gone."""
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.runner.fail["DEL", "web/n1"] = CniError("no daemon of mine")
    engine.links.namespaces.clear()


def tried(engine: Engine) -> bool:
    """Delete the orphans that reconcile finds; return whether all were deleted."""
    core = engine.verbs.engine
    for orphan in orphans.look(core).orphans.values():
        try:
            orphans.delete(core, orphan, 10)
        except CniError:
            return False
    return True


@pytest.fixture
def at_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day is all that it takes."""
    monkeypatch.setattr(delete, "SET_ASIDE_TRIES", 1)
    monkeypatch.setattr(deadlines, "SET_ASIDE_LEAST_SECONDS", 0.0)


@pytest.mark.usefixtures("at_the_first_try")
def test_after_a_day_it_is_set_aside_told_of_and_tried_no_more(engine: Engine) -> None:
    failing(engine)
    # Long after the ADD: the day begins with the first failure.
    engine.clock += 10 * deadlines.SET_ASIDE_SECONDS
    assert not tried(engine)
    engine.clock += deadlines.SET_ASIDE_SECONDS - 1
    assert not tried(engine)
    with pytest.raises(CniError, match="no daemon of mine"):
        gc(engine)
    engine.clock += 1
    assert tried(engine)
    assert engine.store.records == {}
    (item,) = engine.verbs.engine.records.store.aside()
    assert (item.container_id, item.since) == ("c1", engine.clock)
    assert "no daemon of mine" in item.why
    assert item.record
    assert [left.name for left in item.record.attachments] == ["web/n1"]
    assert engine.set_aside == 1
    (message,) = [message for reason, message in engine.warnings if reason == "AttachmentSetAside"]
    assert "web/n1 (net1)" in message
    engine.runner.calls.clear()
    gc(engine)
    assert engine.runner.calls == []
    assert orphans.look(engine.verbs.engine).aside == 1


@pytest.mark.usefixtures("at_the_first_try")
def test_gc_sets_aside_what_reconcile_does_not_reach(engine: Engine) -> None:
    failing(engine)
    with pytest.raises(CniError, match="no daemon of mine"):
        gc(engine)
    engine.clock += deadlines.SET_ASIDE_SECONDS
    gc(engine)
    assert engine.store.records == {}
    assert [item.container_id for item in engine.verbs.engine.records.store.aside()] == ["c1"]


def test_a_clock_that_jumps_sets_nothing_aside(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(engine)
    since_start = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: since_start)
    assert not tried(engine)
    engine.clock += 1000 * deadlines.SET_ASIDE_SECONDS
    for _ in range(delete.SET_ASIDE_TRIES):
        assert not tried(engine)
    since_start += deadlines.SET_ASIDE_LEAST_SECONDS
    assert tried(engine)


def test_the_dels_of_a_runtime_set_nothing_aside(engine: Engine) -> None:
    """A person has said how often they may fail: deleteTries."""
    failing(engine)
    for _ in range(3):
        engine.clock += deadlines.SET_ASIDE_SECONDS
        with pytest.raises(CniError, match="no daemon of mine"):
            engine.verbs.delete(engine.request("DEL"))
    assert "c1" in engine.store.records


@pytest.mark.usefixtures("at_the_first_try")
def test_where_the_disk_takes_nothing_it_stays_on_record(engine: Engine) -> None:
    failing(engine)
    assert not tried(engine)
    engine.clock += deadlines.SET_ASIDE_SECONDS

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space")

    engine.store.set_aside = refuse  # type: ignore[method-assign]  # of this object only
    assert not tried(engine)
    assert "c1" in engine.store.records


def in_store(engine: Engine) -> None:
    """On record."""


def by_another_daemon(engine: Engine) -> None:
    record = engine.store.records.pop("c1")
    engine.store.left["c1"] = record
    engine.store.listed.add("c1")


def damaged(engine: Engine) -> None:
    """Another daemon's files still tell of it."""
    engine.store.left["c1"] = engine.store.records.pop("c1")
    engine.store.corrupt.add("c1")


def aside_already(engine: Engine) -> None:
    engine.store.set_aside(engine.store.records["c1"], since=1.0, why="x")


@pytest.mark.parametrize("place", [in_store, by_another_daemon, damaged, aside_already])
def test_while_its_namespace_exists_nothing_is_forgotten(engine: Engine, place: Callable[[Engine], None]) -> None:
    engine.declare("n1")
    engine.verbs.add(engine.request())
    place(engine)
    core = engine.verbs.engine
    with pytest.raises(CniError, match=f"container c1 can't be forgotten: its network namespace {NETNS} exists"):
        delete.forget(core, engine.request().container_id)
    engine.links.namespaces.clear()
    assert delete.forget(core, engine.request().container_id)
    assert (engine.store.containers(), engine.store.put_aside) == ([], {})
    with pytest.raises(UnknownContainerError, match="nothing is known of container c1"):
        delete.forget(core, engine.request().container_id)


def test_a_namespace_that_is_another_containers_now_keeps_nothing(engine: Engine) -> None:
    engine.verbs.add(engine.request())
    old = engine.store.records["c1"]
    engine.store.records["c2"] = replace(
        old, sandbox=replace(old.sandbox, container_id=ContainerId("c2")), created=old.created + 1
    )
    assert delete.forget(engine.verbs.engine, ContainerId("c1"))
    assert set(engine.store.records) == {"c2"}
