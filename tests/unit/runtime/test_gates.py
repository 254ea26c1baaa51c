import asyncio

import pytest

from multus_daemon.runtime.gates import Gates


def test_gates_start_closed() -> None:
    assert Gates("store", "socket").closed == {"store": "not started", "socket": "not started"}
    assert Gates().closed == {}


def test_open_and_close() -> None:
    gates = Gates("store", "socket")
    gates.open("store")
    assert gates.closed == {"socket": "not started"}
    gates.open("socket")
    assert gates.closed == {}
    gates.close("store", "No space left on device")
    gates.close("store", "Read-only file system")
    assert gates.closed == {"store": "Read-only file system"}
    gates.open("store")
    gates.open("store")
    assert gates.closed == {}


def test_a_gate_may_come_later() -> None:
    gates = Gates()
    gates.close("watch", "410 Gone")
    assert gates.closed == {"watch": "410 Gone"}


def test_conditions_name_open_gates_too() -> None:
    gates = Gates("store", "socket")
    gates.open("store")
    gates.close("watch", "410 Gone")
    assert gates.conditions == {"store": True, "socket": False, "watch": False}
    gates.open("watch")
    assert gates.conditions == {"store": True, "socket": False, "watch": True}


def test_a_reader_keeps_what_it_has_read() -> None:
    gates = Gates("store")
    seen = gates.closed
    gates.open("store")
    assert (seen, gates.closed) == ({"store": "not started"}, {})


async def test_wait_until_all_others_are_open() -> None:
    gates = Gates("socket", "pods", "mine")
    waiters = [asyncio.create_task(gates.wait_open(but=("mine",))) for _ in range(2)]
    for name in ("socket", "mine"):
        await asyncio.sleep(0)
        gates.open(name)
    gates.close("mine", "again")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiters[0]), 0.02)
    gates.open("pods")
    await asyncio.wait_for(asyncio.gather(*waiters), 30)
    await asyncio.wait_for(gates.wait_open(but=("mine",)), 30)


async def test_a_degradation_does_not_make_unready() -> None:
    gates = Gates()
    gates.degraded.close("interfaces", "found late")
    assert (gates.closed, gates.conditions) == ({}, {})
    await asyncio.wait_for(gates.wait_open(), 30)
    gates.degraded.open("interfaces")
    gates.degraded.open("never")
    assert gates.degraded.conditions == {"interfaces": True, "never": True}
