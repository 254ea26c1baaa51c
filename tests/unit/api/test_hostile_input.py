"""Whatever comes over the socket, the caller gets an answer that it understands and the daemon lives on.

Arbitrary byte strings and generated requests go to a live server, as raw connections: 200 and 2,000 of them with
hypothesis' full profile. No descriptor, task or verb may be left of them.
"""

import asyncio
import base64
import functools
import json
import os
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.cni.result import decode
from tests.unit.api.harness import FakeVerbs, body, delegate_body, exchange, http, parse_reply, send

BYTE_STRINGS = 2 * settings().max_examples
REQUESTS = 20 * settings().max_examples
SEED = 20261121

# --- what is sent ----------------------------------------------------------------------------------------------------

texts = st.text(max_size=40)
names = st.one_of(
    st.sampled_from(
        ["", "eth0", "c0ffee", "/run/netns/a", "../../etc/passwd", "a" * 300, "a\0b", "é", "\u2028", "-1", "."]
    ),
    texts,
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
verbs = st.one_of(st.sampled_from(["ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION", "add", "", "FROB"]), texts)
pod_args = st.one_of(
    st.just("IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1"),
    st.builds("K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_UID={}".format, names, names, names),
    texts,
)
environments = st.one_of(
    st.fixed_dictionaries(
        {"CNI_COMMAND": verbs},
        optional={
            "CNI_CONTAINERID": st.one_of(st.just("c0ffee"), names),
            "CNI_NETNS": st.one_of(st.just("/run/netns/a"), names),
            "CNI_IFNAME": names,
            "CNI_ARGS": pod_args,
            "PATH": texts,
        },
    ),
    st.dictionaries(texts, json_values, max_size=4),
    json_values,
)
configurations = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.one_of(st.just("net"), names, json_values),
            "cniVersion": st.one_of(st.sampled_from(["0.1.0", "0.3.1", "1.0.0", "1.1.0", "9.9.9", ""]), json_values),
            "type": json_values,
            "prevResult": json_values,
        },
    ),
    json_values,
)


def encoded(configuration):
    return base64.b64encode(json.dumps(configuration).encode()).decode()


bodies = st.builds(
    lambda env, config, extra: json.dumps({**extra, "env": env, "config": config}).encode(),
    environments,
    st.one_of(configurations.map(encoded), texts, json_values),
    st.dictionaries(st.sampled_from(["interfaceAttributes", "ENV", "Config", "x"]), json_values, max_size=2),
)


@st.composite
def damaged(draw):
    """A good request with a few bytes changed, cut or doubled."""
    data = bytearray(draw(st.sampled_from([body(verb) for verb in ("ADD", "DEL", "CHECK", "STATUS", "GC")])))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(st.binary(max_size=4))
        data[at : at + draw(st.integers(0, 8))] = piece
    return bytes(data)


requests = st.one_of(bodies, bodies, damaged(), json_values.map(lambda value: json.dumps(value).encode()))
byte_strings = st.one_of(
    st.binary(max_size=600),
    st.binary(max_size=200).map(lambda tail: b"POST /cni HTTP/1.1\r\n" + tail),
    st.binary(max_size=200).map(lambda tail: b"POST /cni HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n" + tail),
)


@functools.cache
def drawn(strategy, count):
    """`count` examples of `strategy`, the same in every run."""
    examples = []

    @settings(
        max_examples=count, phases=[Phase.generate], database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(example):
        examples.append(example)

    while len(examples) < count:
        # Hypothesis ends early once it has seen everything it finds interesting.
        collect()
    return examples[:count]


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
async def live(tmp_path):
    verbs = FakeVerbs()
    api = CniApi(verbs, Metrics(), body_timeout=0.3)
    server = UnixServer(api, Gates(), Metrics(), tmp_path / "run", head_timeout=0.3)
    await server.start()
    # Everything that is opened once (the thread pool) is open before the count begins.
    await exchange(server, "GET", "/healthz")
    before = descriptors()
    yield server, verbs
    async with asyncio.timeout(30):
        while descriptors() > before:
            await asyncio.sleep(0.01)
    assert api.running == 0
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
async def test_generated_requests(live, path, valid, called):
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

    # One of each among them: few generated requests do not reach every verb.
    sent = [*valid, *drawn(requests, REQUESTS)]
    choice.shuffle(sent)
    await asyncio.gather(*(one(data) for data in sent))
    assert served + refused == len(sent)
    # The generator reaches both sides.
    assert served > REQUESTS // 100
    assert refused > REQUESTS // 2
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

    await asyncio.gather(*(one(data) for data in drawn(byte_strings, BYTE_STRINGS)))
    assert verbs.calls == []


@pytest.mark.parametrize("path", ["/cni", "/delegate"])
async def test_arbitrary_bytes_as_a_body(live, path):
    server, verbs = live
    for data in drawn(st.binary(min_size=1, max_size=600), BYTE_STRINGS):
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
