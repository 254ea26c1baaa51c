from multus_daemon.base.gates import Gates


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


def test_what_is_handed_out_is_a_copy() -> None:
    gates = Gates("store")
    gates.closed.clear()
    assert gates.closed == {"store": "not started"}
