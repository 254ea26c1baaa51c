"""Whatever comes over the socket, the caller gets an answer that it understands and the daemon lives on.

Arbitrary byte strings and damaged requests go to a live server, as raw connections: 200 and 2,000 of them with
hypothesis' full profile. No descriptor, task or verb may be left of them.
"""

import asyncio
import json
import os
import random

import pytest
from hypothesis import settings

from multus_daemon import deadlines
from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.cni.result import decode
from tests.fuzz import corpus
from tests.unit.api.harness import FakeVerbs, body, delegate_body, exchange, http, parse_reply, send
from tests.waiting import eventually

BYTE_STRINGS = 2 * settings().max_examples
REQUESTS = 20 * settings().max_examples
SEED = 20261121
HEADS = (b"", b"POST /cni HTTP/1.1\r\n", b"POST /cni HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")


def damaged(data, choice):
    """The bytes with up to three places changed, cut or doubled."""
    data = bytearray(data)
    for _ in range(choice.randrange(4)):
        at = choice.randrange(len(data) + 1)
        data[at : at + choice.randrange(9)] = choice.randbytes(choice.randrange(5))
    return bytes(data)


# --- what must come back ---------------------------------------------------------------------------------------------


def assert_understood(reply):
    """A CNI error, or the result of one of the verbs."""
    if reply.status == 200:
        if reply.body:
            made = reply.json.get("Result", reply.json)
            decode(json.dumps(made).encode(), "1.1.0")
        return
    assert reply.status == 400
    error = reply.json
    assert isinstance(error["code"], int)
    assert error["code"] in (1, 4, 6, 7), error
    assert isinstance(error["msg"], str)
    assert error["msg"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
async def live(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlines, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(deadlines, "HEAD_SECONDS", 0.3)
    verbs = FakeVerbs()
    api = CniApi(verbs, Metrics())
    server = UnixServer(api, Gates(), Metrics(), tmp_path / "run")
    await server.start()
    # Everything that is opened once (the thread pool) is open before the count begins.
    await exchange(server, "GET", "/healthz")
    before = descriptors()
    yield server, verbs
    await eventually(lambda: descriptors() <= before)
    assert len(api._requests) == 0
    assert (await exchange(server, "POST", "/cni", body())).status == 200
    await server.stop(1)


@pytest.mark.parametrize(
    ("path", "valid", "called"),
    [
        (
            "/cni",
            [body(verb) for verb in ("ADD", "DEL", "CHECK", "STATUS", "GC")],
            {"ADD", "DEL", "CHECK", "STATUS", "GC"},
        ),
        (
            "/delegate",
            [delegate_body(verb) for verb in ("ADD", "DEL", "CHECK")],
            {"add_network", "remove_network", "check_network"},
        ),
    ],
    ids=["cni", "delegate"],
)
async def test_damaged_requests(live, path, valid, called):
    server, verbs = live
    choice = random.Random(SEED)
    served = refused = 0
    gate = asyncio.Semaphore(20)

    async def one(data):
        nonlocal served, refused
        async with gate:
            reply = await exchange(server, "POST", path, data, native=choice.random() < 0.5)
        assert_understood(reply)
        served += reply.status == 200
        refused += reply.status == 400

    # What the fuzzer has found, and calls of each verb.
    found = [*corpus.read("cni_body"), *valid]
    sent = [*found, *(damaged(choice.choice(found), choice) for _ in range(REQUESTS))]
    choice.shuffle(sent)
    await asyncio.gather(*(one(data) for data in sent))
    assert served + refused == len(sent)
    assert served > REQUESTS // 10
    assert refused > REQUESTS // 10
    assert {verb for verb, _ in verbs.calls} == called


async def test_arbitrary_bytes(live):
    server, verbs = live
    gate = asyncio.Semaphore(20)

    async def one(data):
        async with gate, asyncio.timeout(10):
            received = await send(server.path, data, eof=True)
        # Input that never became a request may be dropped without an answer; half an answer never comes.
        if received:
            reply = parse_reply(received)
            assert reply.status in (400, 404, 405, 417)
            assert len(reply.body) == int(reply.headers["content-length"])

    choice = random.Random(SEED)
    sent = [choice.choice(HEADS) + choice.randbytes(choice.randrange(600)) for _ in range(BYTE_STRINGS)]
    await asyncio.gather(*(one(data) for data in sent))
    assert verbs.calls == []


@pytest.mark.parametrize("path", ["/cni", "/delegate"])
async def test_arbitrary_bytes_as_a_body(live, path):
    server, verbs = live
    choice = random.Random(SEED)
    for _ in range(BYTE_STRINGS):
        data = choice.randbytes(choice.randrange(1, 600))
        reply = await exchange(server, "POST", path, data)
        assert_understood(reply)
        assert reply.status == 400
    assert verbs.calls == []


async def test_connections_that_say_nothing_are_closed(live):
    server, _ = live
    writers = [(await asyncio.open_unix_connection(str(server.path)))[1] for _ in range(100)]
    assert (await exchange(server, "GET", "/healthz")).status == 200
    await asyncio.sleep(0.5)
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_leaves_in_the_middle(live):
    server, verbs = live
    data = http("POST", "/cni", body())
    for cut in range(0, len(data) - 1, 7):
        _, writer = await asyncio.open_unix_connection(str(server.path))
        writer.write(data[:cut])
        writer.transport.abort()
    assert verbs.calls == []
