"""DEL per network, its end where it never succeeds, and DELs that come late."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from multus_daemon.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.cni.names import ContainerId
from multus_daemon.engine import detach
from multus_daemon.engine.request import CniRequest
from multus_daemon.ports import Attachment, Sandbox
from tests.unit.engine.conftest import NETNS, Engine

OTHER = "/run/netns/other"


async def add(engine: Engine) -> None:
    engine.declare("n1,n2")
    await engine.verbs.add(engine.request())
    engine.runner.calls.clear()


def on_record(engine: Engine) -> list[str]:
    return [attachment.name for attachment in engine.store.records["c1"].attachments]


def spooled(engine: Engine, written: float) -> CniRequest:
    return replace(engine.request("DEL"), spooled=written)


# --- per network -----------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(3)
async def test_a_retry_runs_only_what_failed(engine: Engine) -> None:
    await add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy", code=11)
    with pytest.raises(CniError, match="^busy"):
        await engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order == [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert on_record(engine) == ["web/n1"]
    engine.runner.fail.clear()
    engine.runner.calls.clear()
    # As a daemon that has been started anew.
    engine.verbs = engine.make_verbs()
    await engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order == [("DEL", "web/n1")]
    assert engine.store.records == {}


async def test_a_torn_container_does_not_pass_for_a_whole_one(engine: Engine) -> None:
    """Else a repeated ADD would return the result of a network that has been detached."""
    await add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    with pytest.raises(CniError):
        await engine.verbs.delete(engine.request("DEL"))
    with pytest.raises(CniError, match="never finished"):
        await engine.verbs.check(engine.request("CHECK"))
    engine.runner.fail.clear()
    engine.runner.calls.clear()
    await engine.verbs.add(engine.request())
    assert engine.runner.order == [
        ("DEL", "web/n1"), ("ADD", "kube-system/cluster"), ("ADD", "web/n1"), ("ADD", "web/n2"),
    ]  # fmt: skip
    assert engine.store.records["c1"].complete
    assert engine.store.records["c1"].deletes_failed == 0


async def test_one_that_hangs_leaves_the_others_their_share(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await add(engine)
    monkeypatch.setattr(detach.Detacher.detach, "__kwdefaults__", {"seconds": 0.3, "counts": False})
    real = engine.runner.delete

    async def delete(sandbox: Sandbox, attachment: Attachment) -> None:
        await real(sandbox, attachment)
        if attachment.name == "web/n2":
            await asyncio.sleep(30)

    monkeypatch.setattr(engine.runner, "delete", delete)
    with pytest.raises(TryAgainLaterError, match=r"^DEL of network web/n2 did not end within 0\.1 s"):
        await engine.verbs.delete(engine.request("DEL"))
    assert on_record(engine) == ["web/n2"]


async def test_what_was_detached_is_on_record_when_the_call_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(engine)
    real = engine.runner.delete
    hanging = asyncio.Event()

    async def delete(sandbox: Sandbox, attachment: Attachment) -> None:
        await real(sandbox, attachment)
        if attachment.name == "web/n1":
            hanging.set()
            await asyncio.sleep(30)

    monkeypatch.setattr(engine.runner, "delete", delete)
    deleting = asyncio.create_task(engine.verbs.delete(engine.request("DEL")))
    await hanging.wait()
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    assert on_record(engine) == ["kube-system/cluster", "web/n1"]
    assert engine.store.records["c1"].deletes_failed == 1


async def test_a_record_that_cannot_be_written_is_an_error_and_nothing_is_forgotten(engine: Engine) -> None:
    await add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    engine.store.fail_at = {len(engine.store.calls) + 2: OSError("disk full")}
    with pytest.raises(CniError, match="^busy.*") as caught:
        await engine.verbs.delete(engine.request("DEL"))
    assert "disk full" in caught.value.details
    assert on_record(engine) == ["kube-system/cluster", "web/n1", "web/n2"]


# --- what never succeeds ---------------------------------------------------------------------------------------------


async def test_after_so_many_tries_the_pod_may_go_and_the_rest_stays_on_record(engine: Engine) -> None:
    engine.delete_tries = 3
    engine.verbs = engine.make_verbs()
    await add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    for _ in range(2):
        with pytest.raises(CniError, match="^pool is away"):
            await engine.verbs.delete(engine.request("DEL"))
        # The count outlives the daemon.
        engine.verbs = engine.make_verbs()
    await engine.verbs.delete(engine.request("DEL"))
    assert on_record(engine) == ["web/n1"]
    assert engine.store.records["c1"].given_up
    [(reason, message)] = engine.warnings
    assert reason == "NetworkNotReleased"
    assert "3 times" in message
    assert "pool is away" in message
    await engine.verbs.delete(engine.request("DEL"))
    assert len(engine.warnings) == 1, "told once"
    assert engine.given_up == 1
    engine.runner.fail.clear()
    await engine.verbs.delete(engine.request("DEL"))
    assert engine.store.records == {}


async def test_without_a_bound_every_try_is_an_error(engine: Engine) -> None:
    await add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("pool is away")
    for _ in range(20):
        with pytest.raises(CniError):
            await engine.verbs.delete(engine.request("DEL"))
    assert not engine.store.records["c1"].given_up


@pytest.mark.weak_spot(28)
async def test_a_damaged_record_does_not_keep_a_pod_for_ever_either(engine: Engine) -> None:
    engine.delete_tries = 3
    engine.verbs = engine.make_verbs()
    engine.store.corrupt.add("c1")
    for _ in range(2):
        with pytest.raises(IoFailureError, match="^record of container c1 is damaged"):
            await engine.verbs.delete(engine.request("DEL"))
    await engine.verbs.delete(engine.request("DEL"))
    assert engine.store.corrupt == {"c1"}, "what it held is still to be freed"
    [(reason, message)] = engine.warnings
    assert reason == "NetworkNotReleased"
    assert "c1 is damaged" in message


async def test_a_disk_that_takes_nothing_does_not_keep_a_pod_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.delete_tries = 2
    engine.verbs = engine.make_verbs()
    await add(engine)
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")

    def save(_record: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(engine.store, "save", save)
    with pytest.raises(CniError):
        await engine.verbs.delete(engine.request("DEL"))
    await engine.verbs.delete(engine.request("DEL"))
    assert "c1" in engine.store.records


# --- DELs that come late ---------------------------------------------------------------------------------------------


async def test_a_spooled_del_is_served(engine: Engine) -> None:
    await add(engine)
    engine.clock += 10
    await engine.verbs.delete(spooled(engine, engine.clock - 5))
    assert engine.store.records == {}


async def test_a_del_of_before_the_add_does_not_undo_it(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    await add(engine)
    await engine.verbs.delete(spooled(engine, engine.clock - 5))
    assert engine.runner.calls == []
    assert engine.store.records["c1"].complete
    assert "spooled DEL of container c1 is dropped" in caplog.text


async def test_a_clock_that_was_behind_loses_no_del(engine: Engine) -> None:
    """The machine has no clock of its own: after its restart the DEL seems to be older than the ADD."""
    await add(engine)
    engine.links.namespaces.clear()
    await engine.verbs.delete(spooled(engine, 1.0))
    assert engine.store.records == {}


@pytest.mark.parametrize("inhabited", [True, False])
async def test_a_del_of_the_future_counts_only_where_nothing_lives(engine: Engine, inhabited: bool) -> None:
    await add(engine)
    if not inhabited:
        engine.links.uninhabited.add(NETNS)
    engine.clock += 10
    await engine.verbs.delete(spooled(engine, engine.clock + 3600))
    assert ("c1" in engine.store.records) is inhabited


async def test_a_late_del_does_not_reach_into_the_namespace_of_a_newer_container(engine: Engine) -> None:
    await add(engine)
    engine.clock += 10
    newer = replace(engine.store.records["c1"], sandbox=Sandbox(ContainerId("c2"), NETNS), created=engine.clock)
    engine.store.save(newer)
    await engine.verbs.delete(spooled(engine, engine.clock - 5))
    assert {call.sandbox for call in engine.runner.calls} == {Sandbox(ContainerId("c1"), "")}
    assert list(engine.store.records) == ["c2"]
