"""The kernel keeps some clients of a listening socket waiting, and no others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from multus_daemon.runtime import bpf

ONE, TWO = "127.0.0.1", "127.0.0.2"


@pytest.fixture(params=["IPv4", "both families"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    if request.param == "IPv4":
        made = socket.create_server((ONE, 0))
    elif socket.has_dualstack_ipv6():
        made = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        pytest.skip("needs IPv6: load the kernel's module ipv6")
    with made:
        try:
            bpf.drop(made, [bytes(4)])
        except PermissionError:
            pytest.skip("needs root on a kernel that lets nobody else filter a socket: run as root")
        bpf.drop(made, [])
        yield made


def connected(listener: socket.socket, source: str) -> bytes | None:
    """The key of a client that connects; None where the kernel lets it wait."""
    is_new = ":" in source
    with socket.socket(socket.AF_INET6 if is_new else socket.AF_INET) as client:
        client.settimeout(0.3)
        client.bind((source, 0))
        with contextlib.suppress(TimeoutError):
            client.connect(("::1" if is_new else ONE, listener.getsockname()[1]))
            connection, address = listener.accept()
            connection.close()
            return bpf.key(address[0])
    return None


def test_only_those_that_are_named_wait(listener: socket.socket) -> None:
    one, two = connected(listener, ONE), connected(listener, TWO)
    assert (one, two) == (bytes([127, 0, 0, 1]), bytes([127, 0, 0, 2]))
    assert one
    assert two
    for out in ([], [one], [two], [bytes(8), one], [one, two], [one, bytes(8), two], []):
        bpf.drop(listener, out)
        assert connected(listener, ONE) == (None if one in out else one)
        assert connected(listener, TWO) == (None if two in out else two)
    bpf.attach(listener, [bpf.DROP])
    assert connected(listener, ONE) is None


@pytest.mark.parametrize("listener", ["both families"], indirect=True)
def test_a_client_of_ipv6_is_its_network(listener: socket.socket) -> None:
    assert bpf.key("2001:db8:1:2:3::4") == bpf.key("2001:db8:1:2::5") == bytes.fromhex("20010db800010002")
    own = connected(listener, "::1")
    bpf.drop(listener, [bpf.key("fe80::1%lo")])
    assert connected(listener, "::1") == own == bytes(8)
    bpf.drop(listener, [bytes(8)])
    assert connected(listener, "::1") is None
    assert connected(listener, ONE) is not None
