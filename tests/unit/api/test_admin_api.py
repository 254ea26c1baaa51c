"""The admin paths: questions and orders, who may ask, what goes wrong."""

import asyncio
import os
import threading

import pytest

from multus_daemon import deadlines
from multus_daemon.answers.questions import Answers
from multus_daemon.api.admin import AT_ONCE, BODY_LIMIT, AdminApi
from multus_daemon.api.app import UnixServer
from multus_daemon.runtime import deadline
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from tests.unit.api.harness import exchange, exposition, no_thread, started
from tests.unit.pod.conftest import Engine
from tests.waiting import eventually


def refuse(_asked):
    raise InvalidNetworkConfigError("network a is bad", remedy="mend it")


@pytest.fixture
def questions():
    return {"echo": lambda asked: {"query": dict(asked.query)}, "refuse": refuse}


@pytest.fixture
async def server(api, gates, metrics, tmp_path, questions):
    orders = {"forget": lambda asked: {"body": asked.body.decode()}}
    admin = AdminApi(lambda: {"GET": questions, "POST": orders})
    async with started(UnixServer(api, gates, metrics, tmp_path / "run", admin=admin)) as server:
        yield server


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
    assert reply.json["details"] == "correct the request; it knows v1/echo, v1/forget, v1/refuse"


async def test_a_body_that_is_too_large_is_refused(server):
    reply = await exchange(server, "POST", "/admin/v1/forget", b"x" * (BODY_LIMIT + 1))
    assert reply.status == 400
    assert str(BODY_LIMIT) in reply.json["msg"]


async def test_another_user_is_refused(api, gates, metrics, tmp_path, questions):
    admin = AdminApi(lambda: {"GET": questions})
    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=admin, allowed_uids=frozenset({os.getuid() + 1}))
    async with started(server):
        reply = await exchange(server, "GET", "/admin/v1/echo", b"")
    assert reply.status == 403


async def test_an_answer_that_takes_too_long_is_stopped(api, gates, metrics, tmp_path, monkeypatch):
    monkeypatch.setattr(deadlines, "ADMIN_SECONDS", 0.2)
    stopped = threading.Event()

    def hang(_asked):
        try:
            deadline.pause(60)
        except deadline.Interrupted:
            stopped.set()
            raise

    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=AdminApi(lambda: {"GET": {"hang": hang}}))
    async with started(server):
        reply = await exchange(server, "GET", "/admin/v1/hang", b"")
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

    server = UnixServer(api, gates, metrics, tmp_path / "run", admin=AdminApi(lambda: {"GET": {"work": work}}))
    async with started(server):
        asked = [asyncio.create_task(exchange(server, "GET", "/admin/v1/work", b"")) for _ in range(AT_ONCE + 3)]
        await eventually(lambda: most >= AT_ONCE, 10)
        gate.set()
        replies = await asyncio.gather(*asked)
    assert {reply.status for reply in replies} == {200}
    assert most == AT_ONCE


async def test_questions_are_counted_under_one_name(server, metrics):
    await exchange(server, "GET", "/admin/v1/echo", b"")
    await exchange(server, "GET", "/admin/v1/nonsense", b"")
    text = await exposition(metrics)
    assert 'handler="/admin"' in text
    assert "nonsense" not in text


# --- mistakes of the one who asks ------------------------------------------------------------------------------------


@pytest.fixture
def answers(tmp_path):
    """Return the answers of a daemon that has one pod, `web/p1`."""
    engine = Engine()
    engine.declare("n1")
    engine.verbs.add(engine.request())
    return Answers(engine.verbs.engine, Timelines(), pytest.fail, lambda: b"{}", tmp_path / "spool")


@pytest.fixture
async def asked(answers, api, gates, metrics, tmp_path):
    admin = AdminApi(lambda: answers.by_method)
    async with started(UnixServer(api, gates, metrics, tmp_path / "run", admin=admin)) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "message"),
    [
        ("GET", "trace?last=0", b"", 400, 4, "last must be a number from 1 to 1000, not '0'"),
        ("GET", "trace?last=1001", b"", 400, 4, "last must be a number from 1 to 1000"),
        ("GET", "trace?last=many", b"", 400, 4, "last must be a number"),
        ("GET", "trace?last=%D9%A3", b"", 400, 4, "last must be a number"),
        ("GET", "trace?last=" + "9" * 500, b"", 400, 4, "last must be a number"),
        ("GET", "trace?pod=p1", b"", 400, 4, "pod must be NAMESPACE/POD, not 'p1'"),
        ("GET", "trace?pod=web/", b"", 400, 4, "pod must be NAMESPACE/POD, not 'web/'"),
        ("GET", "attachments?pod=a/b/c", b"", 400, 4, "pod must be NAMESPACE/POD, not 'a/b/c'"),
        ("GET", "attachments?leaks=yes", b"", 400, 4, "leaks must be true or false, not 'yes'"),
        ("GET", "attachments?check=1", b"", 400, 4, "check must be true or false, not '1'"),
        ("GET", "drift?pod=p1", b"", 400, 4, "pod must be NAMESPACE/POD, not 'p1'"),
        ("GET", "drift?pod=web/p9", b"", 400, 3, "pod web/p9 has no networks on record on this node"),
        ("POST", "repair", b"", 400, 4, "no pod is named"),
        ("POST", "repair?pod=web/p1&dryRun=1", b"", 400, 4, "dryRun must be true or false, not '1'"),
        ("GET", "repair?pod=web/p1", b"", 405, 4, "v1/repair needs method POST, not GET"),
        ("GET", "explain", b"", 400, 4, "no pod is named"),
        ("GET", "explain?pod=", b"", 400, 4, "no pod is named"),
        ("GET", "explain?pod=/p1", b"", 400, 4, "pod must be NAMESPACE/POD, not '/p1'"),
        ("GET", "explain?pod=a/b/c", b"", 400, 4, "pod must be NAMESPACE/POD, not 'a/b/c'"),
        ("POST", "explain-manifest", b"", 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b"{", 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b"\xff", 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b'"\xff"', 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b"[]", 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b"[" * 100_000, 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b'{"x":' + b"[" * 100_000, 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b'{"metadata":{"name":1}}', 400, 6, "the body is not a pod: "),
        ("POST", "explain-manifest", b'{"metadata":{}}', 400, 6, "the pod has no name or no namespace"),
        ("POST", "explain-manifest", b" " * (BODY_LIMIT + 1), 400, 6, "the request's body is larger than"),
        ("POST", "forget", b"", 400, 4, "no container is named"),
        ("POST", "forget?container=../x", b"", 400, 4, "container is '../x': "),
        ("POST", "forget?container=%00", b"", 400, 4, "container is '\\x00': "),
        ("POST", "forget?container=unknown", b"", 400, 3, "nothing is known of container unknown"),
        ("POST", "forget?container=c1", b"", 400, 11, "container c1 can't be forgotten: its network namespace"),
        ("GET", "nonsense", b"", 404, 4, "'v1/nonsense' is not known to this daemon"),
        ("GET", "n" * 500, b"", 404, 4, "'v1/" + "n" * 37 + "' is not known to this daemon"),
        ("GET", "/admin/v2/status", b"", 404, 4, "'v2/status' is not known to this daemon"),
        ("GET", "/admin/status", b"", 404, 4, "'status' is not known to this daemon"),
        ("GET", "status/more", b"", 404, 4, "'v1/status/more' is not known to this daemon"),
        ("POST", "status", b"", 405, 4, "v1/status needs method GET, not POST"),
        ("GET", "forget?container=c1", b"", 405, 4, "v1/forget needs method POST, not GET"),
        ("PUT", "forget?container=c1", b"", 405, 4, "v1/forget needs method POST, not PUT"),
    ],
)
async def test_a_mistake_has_the_code_that_fits(asked, method, path, body, status, code, message):
    reply = await exchange(asked, method, path if path.startswith("/") else f"/admin/v1/{path}", body)
    assert (reply.status, reply.json["code"]) == (status, code), reply.json
    assert reply.json["msg"].startswith(message)


@pytest.mark.parametrize("path", ["attachments?leaks=false&check=", "trace?pod=&last=1000", "explain?pod=web/p1"])
async def test_what_is_allowed_is_answered(asked, path):
    assert (await exchange(asked, "GET", f"/admin/v1/{path}", b"")).status == 200
