"""The shim copies good replies; everything else is an error that says what the shim saw."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import typing

import pytest

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Request, Shim, Stub

VERBS = ["ADD", "DEL", "CHECK", "STATUS", "GC"]
STDOUT = b"Content-Type: application/vnd.multus.cni-stdout\r\n"
MAX_BODY = 16 * 1024 * 1024


def http(body: bytes, status: str = "200 OK", content_type: bytes = STDOUT) -> bytes:
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status.encode(), content_type, len(body), body)


def chunked(*chunks: bytes, status: str = "200 OK", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks)
    return b"HTTP/1.1 %s\r\n%sTransfer-Encoding: chunked\r\n\r\n%s0\r\n%s\r\n" % (
        status.encode(),
        STDOUT,
        body,
        trailer,
    )


BODIES = {
    "json": b'{\n    "cniVersion": "1.1.0"\n}',
    "newline": b"{}\n",
    "unicode": '{"a":"é\u2028😀"}'.encode(),
    "binary": bytes(range(256)) * 3,
    "nul": b"\x00",
    "crlf": b"\r\n\r\n0\r\n\r\n",
    "large": b"x" * 1_000_000,
    "largest": b"y" * MAX_BODY,
}


@pytest.mark.parametrize("name", BODIES)
def test_body_is_copied_to_the_byte(shim: Shim, daemon: Stub, name: str) -> None:
    daemon.answer(http(BODIES[name]))
    result = shim()
    assert (result.code, result.err) == (0, b"")
    assert result.out == BODIES[name]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_copies_a_body(shim: Shim, daemon: Stub, verb: str) -> None:
    daemon.answer(http(b"whatever"))
    result = shim(verb)
    assert (result.code, result.out) == (0, b"whatever")


@pytest.mark.waits
@pytest.mark.weak_spot(11)
@pytest.mark.parametrize(
    "status", ["400 Bad Request", "500 Internal Server Error", "503 Later", "201 Created", "302 X", "404"]
)
@pytest.mark.parametrize("verb", VERBS)
def test_errors_are_copied_with_exit_code_1(shim: Shim, daemon: Stub, verb: str, status: str) -> None:
    body = b'{\n    "code": 7,\n    "msg": "bad"\n}'
    daemon.answer(http(body, status))
    result = shim(verb)
    assert (result.code, result.out) == (1, body)
    assert not shim.cni_dir.exists()


@pytest.mark.weak_spot(25)
@pytest.mark.parametrize("content_type", [b"", b"Content-Type: text/plain\r\n", STDOUT], ids=["none", "text", "ours"])
@pytest.mark.parametrize("verb", VERBS)
def test_empty_success(shim: Shim, daemon: Stub, verb: str, content_type: bytes) -> None:
    daemon.answer(http(b"", content_type=content_type))
    result = shim(verb)
    if verb == "ADD":
        assert result.error["code"] == 999
        assert "0 bytes of body" in result.error["msg"]
    else:
        assert (result.code, result.out, result.err) == (0, b"", b"")


@pytest.mark.parametrize("verb", VERBS)
def test_empty_failure_is_still_an_error_object(shim: Shim, daemon: Stub, verb: str) -> None:
    daemon.answer(http(b"", "500 Oops"))
    error = shim(verb).error
    assert error["code"] == 999
    assert "500 Oops" in error["msg"]


@pytest.mark.parametrize(
    "header",
    [
        b"content-type:application/vnd.multus.cni-stdout\r\n",
        b"CONTENT-TYPE: \t Application/VND.multus.cni-stdout \r\n",
        b"Content-Type: application/vnd.multus.cni-stdout; charset=utf-8\r\n",
        b"Content-Type: application/vnd.multus.cni-stdout ;x\r\n",
    ],
)
def test_ways_to_write_the_content_type(shim: Shim, daemon: Stub, header: bytes) -> None:
    daemon.answer(http(b"ok", content_type=header))
    assert shim().out == b"ok"


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        ("200 OK", b"text/html", b"<html>"),
        ("200 OK", b"application/json", b"{}"),
        ("200 OK", b"application/json", b'{"Result":null}'),
        ("200 OK", b"application/json", b'{"Result":{"cniVersion":"1.1.0"}'),
        ("404 Not Found", b"text/plain", b"404 page not found"),
        ("404 Not Found", b"application/json", b'{"code":7,"msg":"x"}'),
        ("400 Bad Request", b"application/json", b'{"code":7}'),
        ("400 Bad Request", b"application/json", b'{"code":7,"msg":"x"'),
        ("400 Bad Request", b"text/plain", b"\n"),
        ("400 Bad Request", b"text/html", b"<html>"),
    ],
)
def test_reply_that_no_daemon_makes_is_quoted_not_copied(
    shim: Shim, daemon: Stub, status: str, content_type: bytes, body: bytes
) -> None:
    daemon.answer(http(body, status, b"Content-Type: " + content_type + b"\r\n"))
    error = shim().error
    assert error["code"] == 999
    assert str(shim.socket_dir / "multus.sock") in error["msg"]
    assert f'status line "HTTP/1.1 {status}", content type "{content_type.decode()}"' in error["msg"]
    assert json.dumps(body.decode()) in error["msg"]
    assert "of another version" in error["msg"]


def test_only_the_beginning_of_a_long_strange_body_is_quoted(shim: Shim, daemon: Stub) -> None:
    daemon.answer(http(b"<\xff" * 50_000, content_type=b""))
    msg = shim().error["msg"]
    assert "... (100000 bytes)" in msg
    assert "<\\xff<\\xff" in msg
    assert len(msg) < 2000


# Each of these is a complete reply with the body "ok".
UNUSUAL = {
    "one chunk": chunked(b"ok"),
    "many chunks": chunked(b"o", b"k"),
    "chunk extension": http(b"").split(b"Content-Length")[0]
    + b"Transfer-Encoding: Chunked\r\n\r\n2;a=b\r\nok\r\n0\r\n\r\n",
    "chunk trailer": chunked(b"ok", trailer=b"X-Sum: 1\r\nX-More: 2\r\n"),
    "chunk size with zeros": http(b"").split(b"Content-Length")[0]
    + b"Transfer-Encoding: chunked\r\n\r\n0002\r\nok\r\n000\r\n\r\n",
    "HTTP/1.0": http(b"ok").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "no reason": http(b"ok", "200"),
    "empty reason": http(b"ok", "200 "),
    "interim replies": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + http(b"ok"),
    "equal lengths": http(b"ok").replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n"),
    "more than the length": http(b"ok") + b"rubbish",
    "64 KiB of headers": http(b"ok").replace(b"\r\n\r\n", b"\r\nX: " + b"h" * 65_000 + b"\r\n\r\n"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_but_complete_replies(shim: Shim, daemon: Stub, name: str) -> None:
    daemon.answer(UNUSUAL[name])
    result = shim()
    assert (result.code, result.out) == (0, b"ok")


def test_chunked_error_and_large_chunked_reply(shim: Shim, daemon: Stub) -> None:
    daemon.answer(chunked(b"bad", status="400 X"))
    result = shim()
    assert (result.code, result.out) == (1, b"bad")
    body = random.Random(1).randbytes(3_000_000)
    daemon.answer(chunked(*(body[i : i + 70_001] for i in range(0, len(body), 70_001))))
    assert shim().out == body


@pytest.mark.parametrize("reply", [http(b"slow body"), chunked(b"slow", b" ", b"body")], ids=["length", "chunked"])
def test_slow_peer_one_byte_at_a_time(shim: Shim, daemon: Stub, reply: bytes) -> None:
    daemon.answer(*(reply[i : i + 1] for i in range(len(reply))), pause=0.002)
    assert shim().out == b"slow body"


def test_every_split_of_a_chunked_reply(shim: Shim, daemon: Stub) -> None:
    reply = chunked(b"ab", b"\r\n", trailer=b"T: 1\r\n")
    for at in range(1, len(reply)):
        daemon.answer(reply[:at], reply[at:], pause=0.004)
        assert shim().out == b"ab\r\n", at


HEAD = b"HTTP/1.1 200 OK\r\n" + STDOUT
# What the peer sends before it closes, and a part of the message that tells.
BROKEN = {
    "nothing": (b"", "closed the connection without a reply"),
    "half a status line": (b"HTTP/1.1 20", "cut off inside its header block, after 11 bytes"),
    "half a header": (http(b"ok")[:40], "cut off inside its header block"),
    "no empty line": (HEAD + b"Content-Length: 0\r\n", "cut off inside its header block"),
    "half a body": (http(b"x" * 100)[:-40], "cut off with 40 bytes still to come"),
    "no body": (http(b"x" * 100)[:-100], "cut off with 100 bytes still to come"),
    "neither length nor chunks": (HEAD + b"\r\nok", "neither by Content-Length nor by chunks"),
    "too long by its header": (HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1), f"longer than {MAX_BODY} bytes"),
    "much too long": (HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\n", f"longer than {MAX_BODY} bytes"),
    "too long a chunk": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFF\r\n",
        f"longer than {MAX_BODY}",
    ),
    "too long in chunks": (chunked(*[b"z" * (1 << 20)] * 17), f"longer than {MAX_BODY} bytes"),
    "huge header": (HEAD + b"X: " + b"h" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n", "longer than 65536 bytes"),
    "endless header": (HEAD + b"X: " + b"h" * 200_000, "longer than 65536 bytes"),
    "huge trailer": (chunked(b"ok", trailer=b"T: 1\r\n" * 20_000), "trailer of the reply is longer than 65536 bytes"),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", "Content-Length is no number"),
    "signed length": (HEAD + b"Content-Length: +2\r\n\r\nok", "Content-Length is no number"),
    "empty length": (HEAD + b"Content-Length:\r\n\r\nok", "Content-Length is no number"),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nokk", "two different Content-Lengths"),
    "both framings": (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "both a"),
    "gzip": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "Transfer-Encoding that is not understood"),
    "bad chunk size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "a chunk whose size is no number"),
    "no chunk size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n\r\n", "a chunk whose size is no number"),
    "long chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nok\r\n0\r\n\r\n", "longer than its size says"),
    "endless chunk size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 200_000, "broken chunk framing"),
    "cut between chunks": (chunked(b"ok")[:-5], "cut off between chunks, after 2 bytes"),
    "cut before the last line": (chunked(b"ok")[:-2], "cut off between chunks, after 2 bytes"),
    "cut inside a chunk": (chunked(b"okay")[:-9], "cut off with 2 bytes still to come"),
    "HTTP/2": (b"HTTP/2 200\r\n\r\n", "is not HTTP/1.x"),
    "ssh": (b"SSH-2.0-x\r\n", 'is not HTTP/1.x; it begins with "SSH-2.0-x\\r\\n"'),
    "json": (b'{"cniVersion":"1.1.0"}', "is not HTTP/1.x"),
    "tls": (b"\x15\x03\x01\x00\x02\x02\x16", 'begins with "\\x15\\x03\\x01\\x00\\x02\\x02\\x16"'),
    "bad status": (b"HTTP/1.1 2x0 OK\r\n\r\n", "is not HTTP/1.x"),
    "status too small": (b"HTTP/1.1 099 X\r\n\r\n", "is not HTTP/1.x"),
    "long status": (b"HTTP/1.1 2000 OK\r\n\r\n", "is not HTTP/1.x"),
    "only interim": (b"HTTP/1.1 100 Continue\r\n\r\n", "closed the connection without a reply"),
}


@pytest.mark.waits
@pytest.mark.parametrize("name", BROKEN)
def test_incomplete_and_foreign_replies(shim: Shim, daemon: Stub, name: str) -> None:
    sent, says = BROKEN[name]
    daemon.answer(sent)
    error = shim().error
    assert error["code"] == 999
    assert says in error["msg"]
    assert str(shim.socket_dir / "multus.sock") in error["msg"]
    assert len(error["msg"]) < 2000


@pytest.mark.waits
@pytest.mark.parametrize("name", BROKEN)
def test_the_same_for_a_del_spools_it(shim: Shim, daemon: Stub, name: str) -> None:
    daemon.answer(BROKEN[name][0])
    result = shim("DEL")
    assert (result.code, result.out) == (0, b"")
    (kept,) = shim.spool.iterdir()
    assert kept.read_bytes() == daemon.requests[0].body


@pytest.mark.waits
@pytest.mark.parametrize("verb", ["CHECK", "GC", "STATUS"])
def test_the_same_for_the_other_verbs(shim: Shim, daemon: Stub, verb: str) -> None:
    daemon.answer(b"HTTP/1.1 2")
    assert shim(verb).error["code"] == 999


def test_foreign_reply_is_not_waited_for(shim: Shim, daemon: Stub) -> None:
    def behave(conn: socket.socket, request: Request) -> None:
        conn.sendall(b"220 mail ready\r\n")
        daemon.stopped.wait(20)

    daemon.behaviour = behave
    result = shim()
    assert result.error["code"] == 999
    assert result.seconds < 15


def test_complete_reply_is_enough_when_the_peer_keeps_the_connection(shim: Shim, daemon: Stub) -> None:
    def behave(conn: socket.socket, request: Request) -> None:
        conn.sendall(http(b"ok"))
        daemon.stopped.wait(20)

    daemon.behaviour = behave
    result = shim()
    assert result.out == b"ok"
    assert result.seconds < 15


def test_reply_of_a_server_that_does_not_read_the_request(shim: Shim) -> None:
    """A server may refuse by header alone; its answer counts although the request could not be sent."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shim.socket_dir / "multus.sock"))
        listener.listen()
        process = subprocess.Popen(
            [shim.binary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=shim.environment("ADD"),
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(shim.config(padding="x" * 3_000_000))
            process.stdin.close()
            conn, _ = listener.accept()
            with conn:
                conn.recv(1000)
                conn.sendall(http(b"too large", "413 Content Too Large"))
            assert process.stdout.read() == b"too large"
            assert process.wait(10) == 1


def test_stdout_that_cannot_be_written(shim: Shim, daemon: Stub) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full: mknod /dev/full c 1 7")
    assert shim(command=["/bin/sh", "-c", f'exec "{shim.binary}" >/dev/full']).code == 1


def test_closed_pipe_on_stdout_is_no_signal(shim: Shim, daemon: Stub) -> None:
    daemon.answer(http(b"x" * 300_000))
    process = subprocess.Popen(
        [shim.binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=shim.environment("ADD")
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(shim.config())
        process.stdin.close()
        assert process.wait(20) == 1


@pytest.mark.waits
@pytest.mark.weak_spot(33)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC"])
def test_hanging_daemon(shim: Shim, daemon: Stub, verb: str) -> None:
    daemon.hang()
    result = shim.hasty(verb)
    assert result.error["code"] == 11
    assert result.error["msg"].startswith(f"no complete reply to {verb} within 1.0 s")
    assert 0.9 < result.seconds < 30


@pytest.mark.waits
@pytest.mark.weak_spot(33)
def test_trickling_daemon_does_not_stretch_the_deadline(shim: Shim, daemon: Stub) -> None:
    reply = http(b"x" * 200)
    daemon.answer(*(reply[i : i + 1] for i in range(len(reply))), pause=0.05)
    result = shim.hasty()
    assert result.error["code"] == 11
    assert result.seconds < 30


@pytest.mark.waits
@pytest.mark.weak_spot(33)
def test_daemon_that_reads_nothing_is_bounded_too(shim: Shim) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shim.socket_dir / "multus.sock"))
        listener.listen()
        result = shim.hasty(conf={"padding": "x" * 3_000_000})
    assert result.error["code"] == 11
    assert result.seconds < 30


@pytest.mark.waits(long=True)
def test_status_deadline_is_its_own(shim: Shim, daemon: Stub) -> None:
    daemon.hang()
    result = shim("STATUS")
    assert result.error["code"] == 50
    assert 9.5 < result.seconds < 60


def outcome_is_sane(verb: str, code: int, out: bytes) -> None:
    """Never a crash; a failure always has a CNI error or the daemon's own words on stdout."""
    assert code in (0, 1)
    assert out or (code == 0 and verb != "ADD")


def test_random_stdin(shim: Shim, daemon: Stub) -> None:
    rng = random.Random(20261121)
    good = shim.config()
    for i in range(100):
        verb = rng.choice(VERBS)
        if i % 2:
            stdin = rng.randbytes(rng.randrange(200))
        else:
            changed = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            # A changed path must not make the shim wait for a daemon that is not there.
            stdin = bytes(changed) if bytes(shim.socket_dir) in changed and b"daemonSocketDir" in changed else b"{"
        result = shim(verb, stdin=stdin)
        outcome_is_sane(verb, result.code, result.out)
        if result.code:
            assert json.loads(result.out)["code"] in (1, 6, 7)


@pytest.mark.waits
@pytest.mark.parametrize("seed", range(25))
def test_random_replies(shim: Shim, daemon: Stub, seed: int) -> None:
    rng = random.Random(20261122 + seed)
    good = [http(b'{"a":1}'), chunked(b'{"a"', b":1}"), http(b"{}", "400 Bad Request")]
    for i in range(4):
        verb = rng.choice(VERBS)
        if i == 0:
            reply = rng.randbytes(rng.randrange(300))
        elif i == 1:
            reply = b"HTTP/1.1 200 OK\r\n" + rng.randbytes(100) + b"\r\n\r\n" + rng.randbytes(100)
        else:
            changed = bytearray(rng.choice(good))
            for _ in range(rng.randrange(1, 5)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            reply = bytes(changed[: rng.randrange(len(changed) + 1)])
        daemon.answer(reply)
        result = shim(verb)
        outcome_is_sane(verb, result.code, result.out)


def test_little_memory_is_an_error_not_a_crash(shim: Shim, daemon: Stub) -> None:
    stdin = shim.config(padding="x" * 8_000_000)
    script = f'ulimit -v 6000; exec "{shim.binary}"'
    error = shim(stdin=stdin, command=["/bin/sh", "-c", script]).error
    assert error["code"] == 999
    assert "out of memory" in error["msg"]
    daemon.answer(http(b"x" * 12_000_000))
    assert shim(command=["/bin/sh", "-c", script]).error["code"] == 999
