"""The netlink protocol against answers that a kernel seldom gives."""

from __future__ import annotations

import socket
import struct

import pytest

from multus_daemon.kernel import inet, transport
from multus_daemon.kernel.inet import RTM_GETADDR, RTM_NEWADDR
from multus_daemon.kernel.transport import (
    NLM_F_ACK_TLVS,
    NLM_F_CAPPED,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    Request,
    Socket,
)

ERROR, DONE, NLM_F_MULTI = 2, 3, 2
LIST = Request(RTM_GETADDR, b"\0" * 8)
CHANGE = Request(RTM_NEWADDR, b"\0" * 8)


def message(kind: int, sequence: int, payload: bytes = b"", flags: int = 0) -> bytes:
    text = struct.pack("=IHHII", 16 + len(payload), kind, flags, sequence, 0) + payload
    return text + b"\0" * (-len(text) % 4)


def address(sequence: int, text: str, flags: int = NLM_F_MULTI) -> bytes:
    attribute = struct.pack("=HH", 8, 2) + socket.inet_aton(text)
    return message(RTM_NEWADDR, sequence, struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, 1) + attribute, flags)


def words(text: str) -> bytes:
    """NLMSGERR_ATTR_MSG."""
    attribute = struct.pack("=HH", 5 + len(text), 1) + text.encode() + b"\0"
    return attribute + b"\0" * (-len(attribute) % 4)


class FakeSocket:
    """Plays back datagrams; remembers what was sent."""

    def __init__(self, *datagrams: bytes) -> None:
        self.datagrams = list(datagrams)
        self.sent: list[bytes] = []
        self.closed = False

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None: ...

    def send(self, data: bytes) -> None:
        self.sent.append(bytes(data))

    def recv(self, size: int) -> bytes:
        if not self.datagrams:
            raise BlockingIOError
        return self.datagrams.pop(0)

    def close(self) -> None:
        self.closed = True


def make(monkeypatch: pytest.MonkeyPatch, *datagrams: bytes) -> tuple[Socket, FakeSocket]:
    fake = FakeSocket(*datagrams)
    monkeypatch.setattr(socket, "socket", lambda *_arguments: fake)
    return Socket(), fake


def found(bodies: list[bytes]) -> list[str]:
    return [str(inet.decode_address(body)[1].address.ip) for body in bodies]


def test_an_interrupted_dump_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, fake = make(
        monkeypatch,
        address(1, "192.0.2.1"),
        message(DONE, 1, b"\0" * 4, NLM_F_DUMP_INTR),
        message(DONE, 2, struct.pack("=i", -4)),
        # The first attempt's leftovers do not count as the third's.
        address(1, "192.0.2.9") + address(3, "192.0.2.2") + message(DONE, 3, b"\0" * 4),
    )
    assert found(kernel.dump(LIST)) == ["192.0.2.2"]
    assert len(fake.sent) == 3


def test_five_interrupted_dumps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, fake = make(monkeypatch, *(message(DONE, number, b"\0" * 4, NLM_F_DUMP_INTR) for number in range(1, 9)))
    with pytest.raises(InterruptedError, match="interrupted 5 times"):
        kernel.dump(LIST)
    assert len(fake.sent) == 5


@pytest.mark.parametrize(
    ("payload", "flags", "text"),
    [
        (struct.pack("=i", -17) + message(16, 1), 0, "File exists"),
        (struct.pack("=i", -17) + message(16, 1)[:16] + words("taken"), NLM_F_CAPPED | NLM_F_ACK_TLVS, r"\(taken\)"),
        (struct.pack("=i", -17) + message(16, 1, b"12345") + words("taken"), NLM_F_ACK_TLVS, r"\(taken\)"),
        (
            struct.pack("=i", -17) + message(16, 1) + b"\x08\0\x02\0\0\0\0\0" + words("taken"),
            NLM_F_ACK_TLVS,
            r"\(taken\)",
        ),
        (struct.pack("=i", -17) + message(16, 1) + b"\0\0\0\0", NLM_F_ACK_TLVS, "File exists$"),
    ],
)
def test_errors(payload: bytes, flags: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = make(monkeypatch, message(ERROR, 1, payload, flags))
    with pytest.raises(FileExistsError, match=text):
        kernel.request(CHANGE)


def test_an_error_at_the_end_of_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = make(monkeypatch, message(DONE, 1, struct.pack("=i", -2) + words("no table"), NLM_F_ACK_TLVS))
    with pytest.raises(FileNotFoundError, match="no table"):
        kernel.dump(LIST)


@pytest.mark.parametrize("length", [0, 15, 99])
def test_a_message_that_is_cut_off(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = make(monkeypatch, struct.pack("=IHHII", length, ERROR, 0, 1, 0) + b"\0" * 4)
    with pytest.raises(OSError, match="cut off"):
        kernel.request(CHANGE)


def test_an_old_kernel_without_options_is_fine_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([92, 92, 1])

    def refuse(_self: FakeSocket, level: int, *_arguments: int) -> None:
        if level == transport.SOL_NETLINK:
            raise OSError(next(codes), "")

    monkeypatch.setattr(FakeSocket, "setsockopt", refuse)
    make(monkeypatch)
    fake = FakeSocket()
    monkeypatch.setattr(socket, "socket", lambda *_arguments: fake)
    with pytest.raises(PermissionError):
        Socket()
    assert fake.closed


def test_a_kernel_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in (Socket.request, Socket.look_up, Socket.dump):
        kernel, _ = make(monkeypatch)
        with pytest.raises(TimeoutError, match="has not answered for 10 s"):
            ask(kernel, CHANGE)
    kernel, _ = make(monkeypatch)
    with pytest.raises(TimeoutError):
        kernel.batch([CHANGE])


def test_what_comes_with_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = make(monkeypatch, message(RTM_NEWADDR, 1, b"told"), message(ERROR, 1, b"\0" * 4 + b"\0" * 16))
    assert kernel.request(CHANGE) == [b"told"]


def test_a_lookup_is_over_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, fake = make(monkeypatch, message(RTM_NEWADDR, 9, b"late"), message(RTM_NEWADDR, 1, b"told"))
    assert kernel.look_up(LIST) == b"told"
    assert struct.unpack_from("=IHHII", fake.sent[0]) == (24, RTM_GETADDR, NLM_F_REQUEST, 1, 0)
    kernel, _ = make(monkeypatch, message(ERROR, 1, struct.pack("=i", -19) + message(18, 1)))
    with pytest.raises(OSError, match="No such device"):
        kernel.look_up(LIST)
