"""One verb for one caller: answers, deadlines, hang-ups, the drain, and what is logged."""

import asyncio
import contextlib
import json
import logging
import re
import threading

import pytest
from aiohttp.test_utils import TestClient, TestServer

from multus_daemon import deadlines
from multus_daemon.api.app import UnixServer, application
from multus_daemon.api.cni import CniApi
from multus_daemon.logs import JsonFormatter
from multus_daemon.node.allowances import FEWEST
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, UnknownContainerError
from multus_daemon.spec.cni.result import Result
from tests.counted import value_of
from tests.unit.api.harness import (
    EXCHANGES,
    RESULT,
    STDOUT_TYPE,
    FakeVerbs,
    body,
    delegate_body,
    environment,
    exchange,
    exposition,
    from_recorded,
    http,
    netconf,
    no_thread,
    send,
    started,
)
from tests.waiting import eventually


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "multus_daemon")
    return caplog


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK", "STATUS", "GC"])
async def test_without_a_thread_the_runtime_is_to_try_again(server, verbs, log, monkeypatch, verb):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        reply = await exchange(server, "POST", "/cni", body(verb), native=True)
    assert (reply.status, reply.json["code"]) == (400, 11)
    assert reply.json["msg"].startswith("the daemon can't start a thread for the request: the limit of processes")
    assert "pids.max" in reply.json["details"]
    assert verbs.calls == []
    assert "Traceback" not in log.text
    assert (await exchange(server, "POST", "/cni", body(verb), native=True)).status == 200


async def test_a_large_request_without_a_thread(server, monkeypatch):
    large = body("ADD", b'{"name":"n","more":"%s"}' % (b"x" * 100_000))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        reply = await exchange(server, "POST", "/cni", large, native=True)
    assert (reply.status, reply.json["code"]) == (400, 11)


@pytest.mark.weak_spot(57)
@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK", "STATUS", "GC"])
@pytest.mark.parametrize("native", [False, True])
async def test_success(server, verbs, verb, native):
    reply = await exchange(server, "POST", "/cni", body(verb), native=native)
    assert reply.status == 200
    assert [called for called, _ in verbs.calls] == [verb]
    assert reply.headers["connection"] == "close"
    assert reply.headers["content-length"] == str(len(reply.body))
    if verb == "ADD":
        made = reply.json if native else reply.json["Result"]
        assert made["cniVersion"] == ("1.0.0" if native else "1.1.0")
        assert reply.headers["content-type"] == (STDOUT_TYPE if native else "application/json")
    else:
        assert reply.body == b""
        assert reply.headers.get("content-type") == (STDOUT_TYPE if native else None)


async def test_recorded_exchanges_answer_as_upstream_did(server, verbs):
    replayed = set()
    for record, recorded in EXCHANGES:
        if "200 OK" not in recorded["response"]["status"]:
            # A refusal of upstream is text without a code; ours is a CNI error (its wording is the engine's).
            continue
        said = recorded["response"]["body"]
        verbs.result = from_recorded(said) if said else RESULT
        data = recorded["request"]["body"].encode()
        reply = await exchange(server, "POST", "/cni", data)
        # Upstream's args-free DELs fail and its runtime is told "done"; none of these is among the 200s.
        assert (reply.status, reply.body.decode()) == (200, said), record["name"]
        reply = await exchange(server, "POST", "/cni", data, native=True)
        assert (reply.status, reply.body.decode()) == (200, record["stdout"]), record["name"]
        replayed.add((record["env"]["CNI_COMMAND"], json.loads(record["stdin"]).get("cniVersion")))
    assert {verb for verb, _ in replayed} == {"ADD", "DEL", "CHECK", "STATUS", "GC"}
    assert {version for verb, version in replayed if verb == "ADD"} >= {"0.3.1", "0.4.0", "1.0.0"}


@pytest.mark.parametrize("native", [False, True])
async def test_a_cni_error_passes_with_what_to_do(server, verbs, native):
    verbs.error = UnknownContainerError("no such container", "c0ffee")
    reply = await exchange(server, "POST", "/cni", body("CHECK"), native=native)
    assert reply.status == 400
    details = "nothing needs to be done: the container is gone; c0ffee"
    assert reply.json == {"code": 3, "msg": "no such container", "details": details}
    assert reply.headers["content-type"] == (STDOUT_TYPE if native else "application/json")
    assert (b"\n    " in reply.body) is native


@pytest.mark.weak_spot(57)
@pytest.mark.parametrize(("error", "native"), [(KeyError("x"), True), (TimeoutError(), False), (RuntimeError(), True)])
async def test_anything_else_is_999_with_its_traceback_in_the_log_only(server, verbs, log, error, native):
    verbs.error = error
    reply = await exchange(server, "POST", "/cni", body(), native=native)
    assert reply.status == 400
    assert reply.json["code"] == 999
    assert reply.json["msg"].startswith(f"internal error: {type(error).__name__}")
    assert b"Traceback" not in reply.body
    [record] = [record for record in log.records if record.exc_info or record.levelno >= logging.ERROR]
    assert record.getMessage().startswith(f"internal error: {type(error).__name__}")
    assert record.getMessage().endswith("; see the daemon's log")
    assert record.exc_info[1] is error


async def test_a_result_that_cannot_be_told_is_undone(server, verbs):
    verbs.result = Result()
    reply = await exchange(server, "POST", "/cni", body(conf=netconf("0.2.0")), native=True)
    assert (reply.status, reply.json["code"]) == (400, 1)
    assert reply.json["msg"] == "cannot convert: no valid IP addresses"
    [(_, added), (verb, removed)] = verbs.calls
    assert (verb, removed.verb) == ("DEL", "DEL")
    assert (removed.container_id, removed.stdin) == (added.container_id, added.stdin)


async def test_a_failed_undo_is_told_behind_the_cause(server, verbs):
    verbs.result = Result()
    verbs.delete_error = CniError("plugin is gone")
    reply = await exchange(server, "POST", "/cni", body(conf=netconf("0.2.0")), native=True)
    assert reply.json["msg"].startswith(
        "cannot convert: no valid IP addresses (and undoing the ADD failed: plugin is gone"
    )


async def test_nothing_is_undone_for_clients_that_convert_by_themselves(server, verbs):
    verbs.result = Result()
    reply = await exchange(server, "POST", "/cni", body(conf=netconf("0.2.0")))
    assert reply.json == {"Result": {"cniVersion": "1.1.0"}}
    assert [verb for verb, _ in verbs.calls] == ["ADD"]


# --- deadlines and bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb_seconds", [0.3])
@pytest.mark.weak_spot(34)
@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK", "STATUS", "GC"])
async def test_a_deadline_cancels_the_verb_and_names_it(server, verbs, verb, metrics):
    verbs.gate.clear()
    reply = await exchange(server, "POST", "/cni", body(verb), native=True)
    assert (reply.status, reply.json["code"]) == (400, 11)
    subject = " of pod web/web-1" if verb in ("ADD", "DEL", "CHECK") else ""
    assert reply.json["msg"] == f"{verb}{subject} took longer than 0.3 s"
    assert verbs.cancelled == 1
    line = f'multus_cni_request_duration_seconds_count{{outcome="timeout",verb="{verb}"}} 1.0'
    assert line in await exposition(metrics)


async def test_one_who_shares_a_status_has_its_own_time(metrics, verbs, monkeypatch):
    """The run has begun earlier, with the first one that asked; its time is over when the second one's is not."""
    verbs.gate.clear()
    limits = {"STATUS": 1.0}
    monkeypatch.setattr(deadlines, "VERB_SECONDS", limits)
    api = CniApi(verbs, metrics)
    first = asyncio.create_task(api.call(body("STATUS")))
    await verbs.begun()
    limits["STATUS"] = 60.0
    second = asyncio.create_task(api.call(body("STATUS")))
    with pytest.raises(CniError, match=r"^STATUS took longer than 1 s") as caught:
        await first
    assert caught.value.code == 11
    assert (verbs.cancelled, second.done()) == (0, False)
    verbs.gate.set()
    assert (await second).status == 200
    assert len(verbs.calls) == 1


@pytest.mark.weak_spot(36)
@pytest.mark.parametrize("body_seconds", [0.5])
@pytest.mark.usefixtures("little_linger")
async def test_a_slow_body_is_refused(server, verbs):
    started = asyncio.get_running_loop().time()
    data = http("POST", "/cni", body())[:-5]
    received = await send(server.path, data)
    assert 0.4 < asyncio.get_running_loop().time() - started < 25
    assert b"HTTP/1.1 400" in received
    assert b"did not arrive within 0.5 s" in received
    assert verbs.calls == []


@pytest.mark.weak_spot(36)
async def test_a_slow_head_is_dropped(server):
    async with asyncio.timeout(30):
        assert await send(server.path, b"POST /cni HTTP/1.1\r\nHost:") == b""


async def test_a_body_that_is_cut_off(server, verbs):
    await send(server.path, http("POST", "/cni", body())[:-5], eof=True)
    assert (await exchange(server, "GET", "/healthz")).status == 200
    assert verbs.calls == []


@pytest.mark.weak_spot(36)
async def test_a_body_that_is_too_large(server, verbs):
    reply = await exchange(server, "POST", "/cni", b" " * (24 * 1024 * 1024 + 1))
    assert (reply.status, reply.json["code"]) == (400, 6)
    assert "larger than 25165824 bytes" in reply.json["msg"]


async def test_sixteen_mebibytes_of_stdin_fit(server, verbs):
    conf = json.dumps(netconf(padding="x" * (16 * 1024 * 1024 - 200))).encode()
    reply = await exchange(server, "POST", "/cni", body(conf=conf))
    assert reply.status == 200
    assert verbs.calls[0][1].stdin == conf


# What comes later is not seen to be bad, and so is waited for.
@pytest.mark.parametrize("body_seconds", [0.5])
@pytest.mark.usefixtures("little_linger")
@pytest.mark.parametrize("pause", [0, 0.05])
async def test_bad_chunks(server, verbs, pause):
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(b"POST /cni HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    await asyncio.sleep(pause)
    writer.write(b"zzz\r\n")
    async with asyncio.timeout(30):
        # To the end: the server reads on for a moment after its answer.
        assert b" 400 " in await reader.read()
    writer.close()
    await writer.wait_closed()
    assert verbs.calls == []


# --- clients that hang up --------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(34)
async def test_a_client_that_hangs_up_does_not_cut_the_add(server, verbs, api, log):
    verbs.gate.clear()
    _, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(http("POST", "/cni", body()))
    await verbs.begun()
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert (verbs.cancelled, len(api._requests)) == (0, 1)
    verbs.gate.set()
    await eventually(lambda: not len(api._requests))
    assert (verbs.cancelled, verbs.finished) == (0, 1)
    assert "CNI ADD finished" in log.messages


async def test_a_cancelled_handler_does_not_cut_the_add(api, gates, metrics, verbs):
    # aiohttp's test server cancels the handler when the client goes; so does a server set up with
    # handler_cancellation. The verb must not notice.
    verbs.gate.clear()
    app = application(api, gates, metrics)
    async with TestClient(TestServer(app), raise_for_status=False) as client:
        request = asyncio.create_task(client.post("/cni", data=body()))
        await verbs.begun()
        request.cancel()
        await asyncio.wait([request])
        await client.close()
    await asyncio.sleep(0.05)
    assert (verbs.cancelled, len(api._requests)) == (0, 1)
    verbs.gate.set()
    await eventually(lambda: not len(api._requests))
    assert (verbs.cancelled, verbs.finished) == (0, 1)


# --- the drain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True])
async def test_after_the_drain_the_native_shim_is_sent_on(server, api, verbs, native):
    assert await api.drain(0) == 0
    for verb in ("ADD", "DEL", "CHECK", "STATUS", "GC"):
        reply = await exchange(server, "POST", "/cni", body(verb), native=native)
        assert (reply.status, reply.json["code"]) == (503 if native else 400, 11)
        assert reply.json["msg"] == "multus daemon is shutting down"
    assert verbs.calls == []


async def test_what_the_drain_cuts_is_sent_on_too(server, api, verbs, metrics):
    verbs.gate.clear()
    native = asyncio.create_task(exchange(server, "POST", "/cni", body(), native=True))
    other = asyncio.create_task(exchange(server, "POST", "/cni", body()))
    await eventually(lambda: len(verbs.calls) == 2)
    assert await api.drain(0.05) == 2
    assert [((await task).status, (await task).json["code"]) for task in (native, other)] == [(503, 11), (400, 11)]
    assert "stopped before the request was done" in (await other).json["msg"]
    assert verbs.cancelled == 2
    assert value_of(metrics, "multus_cni_request_duration_seconds_count", verb="ADD", outcome="cancelled") == 2


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "success"),
        (InvalidNetworkConfigError("no such mode"), "refused"),
        (UnknownContainerError("who?"), "refused"),
        (CniError("no address left", code=101), "error"),
        (KeyError("x"), "error"),
    ],
)
async def test_a_request_is_counted_with_its_outcome_and_its_stages(api, verbs, metrics, error, outcome):
    verbs.error = error
    with pytest.raises(CniError) if error else contextlib.nullcontext():
        await api.call(body())
    assert value_of(metrics, "multus_cni_request_duration_seconds_count", verb="ADD", outcome=outcome) == 1
    assert value_of(metrics, "multus_cni_stage_duration_seconds_count", verb="ADD", stage="queue") == 1


# --- how many at once ------------------------------------------------------------------------------------------------


def _announced(verbs: FakeVerbs) -> list[object]:
    return [what for name, what in verbs.calls if name == "slow"]


async def test_an_add_that_is_slow_is_announced_once(metrics, monkeypatch):
    monkeypatch.setattr(deadlines, "SLOW_ADD_SECONDS", 0.01)
    verbs = FakeVerbs(gate=threading.Event())
    api = CniApi(verbs, metrics)
    requests = [asyncio.create_task(api.call(body(verb))) for verb in ("ADD", "STATUS")]
    await eventually(lambda: _announced(verbs))
    verbs.gate.set()
    await asyncio.gather(*requests)
    assert _announced(verbs) == [("web-1", None)]
    # Not when it is over.
    monkeypatch.setattr(deadlines, "SLOW_ADD_SECONDS", 0.2)
    await api.call(body("ADD"))
    before = len(_announced(verbs))
    await asyncio.sleep(0.4)
    assert len(_announced(verbs)) == before


class CountingVerbs(FakeVerbs):
    """Tells in which order verbs begin, and how many run at once."""

    def __init__(self):
        super().__init__(gate=threading.Event())
        self.running = self.most = 0

    def _work(self, verb, what, error):
        with self._count:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            super()._work(verb, what, error)
        finally:
            with self._count:
                self.running -= 1


def one(verb, container_id):
    return body(verb, CNI_CONTAINERID=container_id)


@pytest.mark.weak_spot(35)
async def test_connection_limit(metrics):
    verbs = CountingVerbs()
    api = CniApi(verbs, metrics, at_once=2)
    adds = [asyncio.create_task(api.call(one("ADD", f"c{number}"))) for number in range(30)]
    await asyncio.sleep(0.05)
    removal = asyncio.create_task(api.call(one("DEL", "x")))
    await eventually(lambda: len(verbs.calls) == 2 and api.slots.waiting == 29)
    await asyncio.sleep(0.05)
    assert len(verbs.calls) == 2
    assert 'multus_cni_requests_waiting{verb="ADD"} 28.0' in await exposition(metrics)
    assert 'multus_cni_requests_in_flight{verb="ADD"} 2.0' in await exposition(metrics)
    verbs.gate.set()
    assert {(await task).status for task in (*adds, removal)} == {200}
    assert verbs.most == 2
    assert [verb for verb, _ in verbs.calls].index("DEL") == 2
    assert 'multus_cni_requests_waiting{verb="ADD"} 0.0' in await exposition(metrics)


@pytest.mark.weak_spot(35)
async def test_probes_are_not_queued(metrics, gates, tmp_path):
    verbs = FakeVerbs(gate=threading.Event())
    api = CniApi(verbs, metrics, at_once=1)
    async with started(UnixServer(api, gates, metrics, tmp_path / "run")) as server:
        calls = [asyncio.create_task(exchange(server, "POST", "/cni", one("ADD", f"c{number}"))) for number in range(3)]
        await verbs.begun()
        for path in ("/healthz", "/readyz"):
            assert (await asyncio.wait_for(exchange(server, "GET", path), 5)).status == 200
        verbs.gate.set()
        assert {(await call).status for call in calls} == {200}


@pytest.mark.weak_spot(35)
async def test_a_request_that_waits_in_vain_never_begins(metrics, monkeypatch):
    monkeypatch.setattr("multus_daemon.deadlines.REQUEST_WAIT_SECONDS", {"ADD": 0.1})
    verbs = FakeVerbs(gate=threading.Event())
    api = CniApi(verbs, metrics, at_once=1, at_once_reason="the memory limit of 50 MiB")
    first = asyncio.create_task(api.call(one("ADD", "c1")))
    await verbs.begun()
    with pytest.raises(CniError, match=r"^node is busy: ADD has waited 0.1 s to begin, with 1 requests") as caught:
        await api.call(one("ADD", "c2"))
    assert caught.value.code == 11
    assert "the memory limit of 50 MiB; raise the limits of the daemon's pod" in caught.value.explanation
    assert "or connectionLimit" in caught.value.explanation
    verbs.gate.set()
    await first
    assert len(verbs.calls) == 1


async def test_a_request_that_waits_tells_for_what(metrics):
    verbs, timelines = FakeVerbs(gate=threading.Event()), Timelines()
    api = CniApi(verbs, metrics, at_once=1, timelines=timelines)
    tasks = [asyncio.create_task(api.call(one("ADD", "c1")))]
    await verbs.begun()
    tasks += [asyncio.create_task(api.call(one("ADD", name))) for name in ("c2", "c3")]
    await eventually(lambda: api.slots.waiting == 2)
    first, *others = [[what for what, _, _ in timeline.steps] for timeline in timelines]
    assert first == ["its turn has come"]
    assert others == [[f"waits for its turn: 1 of at most 1 requests run, {number} wait"] for number in (1, 2)]
    verbs.gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.weak_spot(35)
async def test_among_few_places_nobody_starves(metrics):
    """With the slots of a 50 MiB memory limit, ADDs of one network take all they may have, and others go on."""
    verbs = CountingVerbs()
    api = CniApi(verbs, metrics, at_once=FEWEST)
    adds = [asyncio.create_task(api.call(one("ADD", f"c{number}"))) for number in range(50)]
    # The others are out of reach of one network of one namespace, one of them is for DEL alone.
    await eventually(lambda: verbs.running == FEWEST - 3)
    others = [asyncio.create_task(api.call(one(verb, f"{verb}-1"))) for verb in ("STATUS", "GC", "DEL")]
    await eventually(lambda: {verb for verb, _ in verbs.calls} == {"ADD", "DEL", "STATUS", "GC"})
    check = asyncio.create_task(api.call(one("CHECK", "c0")))
    await eventually(lambda: api.slots.waiting == 50 - (FEWEST - 3) + 1)
    adds += [asyncio.create_task(api.call(one("ADD", f"d{number}"))) for number in range(50)]
    await eventually(lambda: api.slots.waiting == 100 - (FEWEST - 3) + 1)
    verbs.gate.set()
    assert {(await task).status for task in (*adds, *others, check)} == {200}
    order = [verb for verb, _ in verbs.calls]
    # Behind the ADDs that came before it, and before those that came later.
    assert order.index("CHECK") < len(order) * 2 // 3


async def test_the_wait_counts_towards_the_deadline(metrics, monkeypatch):
    monkeypatch.setattr(deadlines, "VERB_SECONDS", {"ADD": 0.3, "DEL": 5})
    verbs = FakeVerbs(gate=threading.Event())
    api = CniApi(verbs, metrics, at_once=1)
    first = asyncio.create_task(api.call(one("DEL", "c1")))
    await verbs.begun()
    with pytest.raises(CniError, match=r"^ADD of pod web/web-1 took longer than 0.3 s"):
        await api.call(one("ADD", "c2"))
    verbs.gate.set()
    await first
    assert len(verbs.calls) == 1


async def test_a_del_hurries_what_runs_of_its_container(metrics, verbs):
    hurried = []

    @contextlib.contextmanager
    def hurry(container_id):
        hurried.append(container_id)
        yield
        hurried.append("done")

    api = CniApi(verbs, metrics, hurry=hurry)
    await api.call(one("ADD", "c1"))
    await api.call(body("GC"))
    assert hurried == []
    await api.call(one("DEL", "c2"))
    assert hurried == ["c2", "done"]


@pytest.mark.parametrize(
    ("same", "others", "share"),
    [
        # Two of 16 slots are for DEL alone; ADDs that share namespace and networks leave four more free, others two.
        (("ns{}", "a"), ("x", "b"), 12),
        (("web", "a{}"), ("x", "b"), 12),
        (("web", "a"), ("web", "b"), 10),
    ],
)
async def test_requests_of_one_namespace_or_network_leave_slots_for_others(metrics, same, others, share):
    verbs = CountingVerbs()
    api = CniApi(verbs, metrics, at_once=16, asked_networks=lambda args: args.name)

    def add(number, namespace, networks):
        kubernetes = f"K8S_POD_NAMESPACE={namespace.format(number)};K8S_POD_NAME={networks.format(number)}"
        return asyncio.create_task(api.call(body("ADD", CNI_CONTAINERID=f"c{number}", CNI_ARGS=kubernetes)))

    adds = [add(number, *same) for number in range(30)]
    await eventually(lambda: len(verbs.calls) == share and api.slots.waiting == 30 - share)
    await asyncio.sleep(0.05)
    assert len(verbs.calls) == share
    adds.append(add(30, *others))
    await eventually(lambda: len(verbs.calls) == share + 1)
    adds.append(asyncio.create_task(api.call(one("DEL", "x"))))
    await eventually(lambda: len(verbs.calls) == share + 2)
    assert [verb for verb, _ in verbs.calls[share:]] == ["ADD", "DEL"]
    verbs.gate.set()
    assert {(await task).status for task in adds} == {200}


# --- the log ---------------------------------------------------------------------------------------------------------


def said(log):
    return [(record.levelname, record.getMessage()) for record in log.records if record.name == "multus_daemon.api.cni"]


@pytest.mark.parametrize("error", [None, CniError("broken")])
async def test_one_start_and_one_finish_line(server, verbs, log, error):
    """The first words of the line at level error are the cause."""
    verbs.error = error
    await exchange(server, "POST", "/cni", body())
    end = ("ERROR", "broken") if error else ("INFO", "CNI ADD finished")
    assert said(log) == [("DEBUG", "CNI ADD started"), end]
    assert not any(record.exc_info for record in log.records)


async def test_a_refused_request_has_one_line(server, log):
    await exchange(server, "POST", "/cni", body("FROB"))
    assert said(log) == [("ERROR", "unknown CNI_COMMAND: FROB; known are ADD, CHECK, DEL, GC and STATUS")]


class Written(logging.Handler):
    """The fields of each line."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.lines = []

    def emit(self, record):
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def written(log):
    handler = Written()
    logging.getLogger("multus_daemon").addHandler(handler)
    yield handler.lines
    logging.getLogger("multus_daemon").removeHandler(handler)


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_the_lines_of_a_request_have_its_fields(server, api, verbs, written):
    def slow(request):
        for stage in ("plan", "gather"):
            with timeline.stage(stage):
                deadline.pause(0.11)
        return verbs.result

    api._routes["ADD"] = slow
    await exchange(server, "POST", "/cni", body(TRACEPARENT=PARENT))
    begin, end = written
    [kept] = api._timelines
    assert re.fullmatch("[0-9a-f]{8}", kept.id)
    both = {
        "verb": "ADD", "container": "c0ffee", "ifname": "eth0", "pod": "web/web-1", "request": kept.id,
        "trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331",
    }  # fmt: skip
    for found in (begin, end):
        found.pop("time")
    assert begin == both | {"level": "debug", "msg": "CNI ADD started"}
    stages = end.pop("stages")
    assert set(stages) == {"plan", "gather"}
    assert min(stages.values()) >= 0.1
    seconds = end.pop("seconds")
    assert seconds >= 0.1
    assert end == both | {"level": "verbose", "msg": "CNI ADD finished", "outcome": "success"}
    assert kept.trace_id == both["trace_id"]


async def test_two_requests_have_two_ids_and_no_fields_without_a_value(server, api, verbs, written):
    verbs.error = CniError("broken", code=101)
    for _ in range(2):
        await exchange(server, "POST", "/cni", body())
    first, second = (line for line in written if line["level"] == "error")
    assert first["request"] != second["request"]
    assert (first["outcome"], first["code"]) == ("error", 101)
    assert first.keys() == {
        "time", "level", "msg", "verb", "container", "ifname", "pod", "request", "outcome", "seconds", "code",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "path", "has_id"),
    [("ADD", "/cni", True), ("DEL", "/cni", False), ("CHECK", "/cni", False), ("STATUS", "/cni", False),
     ("GC", "/cni", False), ("ADD", "/delegate", False)],
)  # fmt: skip
async def test_the_error_of_an_add_ends_with_the_request_id(server, api, verbs, verb, path, has_id):
    """Kubernetes counts Events together whose texts are equal: those of the same sandbox, or node, must be."""
    verbs.error = CniError("broken", remedy="see there")
    conf = netconf("1.1.0") if verb in ("STATUS", "GC") else None
    content = delegate_body(verb) if path == "/delegate" else body(verb, conf)
    reply = await exchange(server, "POST", path, content)
    if has_id:
        [kept] = api._timelines
        assert reply.json["details"] == f"see there; more: multusctl explain web/web-1; request {kept.id}"
    else:
        assert "request" not in reply.json["details"]


async def test_neither_the_configuration_nor_other_variables_are_logged(server, verbs, log):
    verbs.error = RuntimeError("odd")
    secret = {"CNI_ARGS": environment()["CNI_ARGS"] + ";TOKEN=hunter2", "AWS_SECRET": "hunter2"}
    await exchange(server, "POST", "/cni", body(conf=netconf(password="hunter2"), **secret))
    assert "hunter2" not in log.text


# --- clients that hang up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "content"), [("/cni", body(CNI_CONTAINERID="c1")), ("/delegate", delegate_body())])
async def test_a_request_whose_client_is_gone_does_not_begin(verbs, gates, metrics, tmp_path, path, content):
    """The result of its ADD would reach no client: the runtime has given the container up, or asks anew."""
    api = CniApi(verbs, metrics, at_once=1)
    async with started(UnixServer(api, gates, metrics, tmp_path)) as server:
        verbs.gate.clear()
        first = asyncio.create_task(exchange(server, "POST", "/cni", body(CNI_CONTAINERID="c0")))
        await verbs.begun()
        _, writer = await asyncio.open_unix_connection(str(server.path))
        writer.write(http("POST", path, content))
        await eventually(lambda: api.slots.waiting == 1)
        writer.close()
        await writer.wait_closed()
        third = asyncio.create_task(exchange(server, "POST", "/cni", body(CNI_CONTAINERID="c2")))
        await eventually(lambda: api.slots.waiting == 2)
        verbs.gate.set()
        assert (await first).status == (await third).status == 200
        assert [request.container_id for _, request in verbs.calls] == ["c0", "c2"]
        await eventually(lambda: len(api._requests) == 0)
