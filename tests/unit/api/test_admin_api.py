"""The admin paths: questions and orders, who may ask, what goes wrong."""

import asyncio
import os
import threading

import pytest

from multus_daemon.api.admin import AT_ONCE, BODY_LIMIT, AdminApi
from multus_daemon.api.app import UnixServer
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from tests.unit.api.harness import exchange, exposition, no_thread


def refuse(_asked):
    raise InvalidNetworkConfigError("network a is bad", "mend it")


@pytest.fixture
def questions():
    return {"echo": lambda asked: {"query": dict(asked.query)}, "refuse": refuse}


@pytest.fixture
async def server(api, gates, metrics, tmp_path, questions):
    orders = {"forget": lambda asked: {"body": asked.body.decode()}}
    admin = AdminApi(questions, orders, seconds=0.5)
    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=admin)
    await server.start()
    yield server
    await server.stop(1)


async def test_a_question_is_answered_in_json(server):
    reply = await exchange(server, "GET", "/admin/v1/echo?pod=a%2Fb&x=1", b"")
    assert (reply.status, reply.json) == (200, {"query": {"pod": "a/b", "x": "1"}})


async def test_an_order_is_a_post(server):
    reply = await exchange(server, "POST", "/admin/v1/forget", b"abc")
    assert (reply.status, reply.json) == (200, {"body": "abc"})
    reply = await exchange(server, "GET", "/admin/v1/forget", b"")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


async def test_an_error_is_that_of_cni(server):
    reply = await exchange(server, "GET", "/admin/v1/refuse", b"")
    assert (reply.status, reply.json) == (400, {"code": 7, "msg": "network a is bad", "details": "mend it"})


async def test_what_is_not_known_is_named_with_what_is(server):
    reply = await exchange(server, "GET", "/admin/v1/nonsense", b"")
    assert reply.status == 404
    assert reply.json["details"] == "it knows echo, forget, refuse"


async def test_a_body_that_is_too_large_is_refused(server):
    reply = await exchange(server, "POST", "/admin/v1/forget", b"x" * (BODY_LIMIT + 1))
    assert reply.status == 400
    assert str(BODY_LIMIT) in reply.json["msg"]


async def test_another_user_is_refused(api, gates, metrics, tmp_path, questions):
    admin = AdminApi(questions, {})
    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=admin, allowed_uids=frozenset({os.getuid() + 1}))
    await server.start()
    try:
        reply = await exchange(server, "GET", "/admin/v1/echo", b"")
    finally:
        await server.stop(1)
    assert reply.status == 403


async def test_an_answer_that_takes_too_long_is_stopped(api, gates, metrics, tmp_path):
    stopped = threading.Event()

    def hang(_asked):
        try:
            deadline.pause(60)
        except deadline.Interrupted:
            stopped.set()
            raise

    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=AdminApi({"hang": hang}, {}, seconds=0.2))
    await server.start()
    try:
        reply = await exchange(server, "GET", "/admin/v1/hang", b"")
    finally:
        await server.stop(1)
    assert (reply.status, reply.json["code"]) == (504, 11)
    assert await asyncio.to_thread(stopped.wait, 10)


async def test_without_a_thread_it_is_to_be_asked_again(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        reply = await exchange(server, "GET", "/admin/v1/echo", b"")
    assert (reply.status, reply.json["code"]) == (400, 11)
    assert reply.json["msg"].startswith("the daemon can't start a thread")
    assert (await exchange(server, "GET", "/admin/v1/echo", b"")).status == 200


async def test_few_are_worked_on_at_once(api, gates, metrics, tmp_path):
    guard, gate = threading.Lock(), threading.Event()
    running, most = 0, 0

    def work(_asked):
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        gate.wait(10)
        with guard:
            running -= 1
        return {}

    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=AdminApi({"work": work}, {}))
    await server.start()
    try:
        asked = [asyncio.create_task(exchange(server, "GET", "/admin/v1/work", b"")) for _ in range(AT_ONCE + 3)]
        async with asyncio.timeout(10):
            while most < AT_ONCE:
                await asyncio.sleep(0.01)
        gate.set()
        replies = await asyncio.gather(*asked)
    finally:
        await server.stop(1)
    assert {reply.status for reply in replies} == {200}
    assert most == AT_ONCE


async def test_questions_are_counted_under_one_name(server, metrics):
    await exchange(server, "GET", "/admin/v1/echo", b"")
    await exchange(server, "GET", "/admin/v1/nonsense", b"")
    text = await exposition(metrics)
    assert 'handler="/admin"' in text
    assert "nonsense" not in text
