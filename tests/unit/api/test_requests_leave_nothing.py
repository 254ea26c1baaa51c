"""Logging keys of a request's configuration are for the shim only: the daemon's own logging does not change."""

import asyncio
import json
import logging
import os
import threading

import pytest

from multus_daemon import logs
from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from tests.aside import logged
from tests.unit.api.harness import body, exchange
from tests.unit.pod.conftest import NETNS, Engine

pytestmark = pytest.mark.usefixtures("logging_as_found")


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
async def server(engine, metrics, tmp_path):
    server = UnixServer(CniApi(engine.verbs, metrics), engine.gates, metrics, tmp_path / "run")
    await server.start()
    yield server
    await server.stop(1)


async def calls(server, count, conf):
    args = "K8S_POD_NAMESPACE=web;K8S_POD_NAME=p1;K8S_POD_UID=u1"
    stdin = json.dumps({"cniVersion": "1.0.0", "name": "multus", "type": "multus-shim", **conf}).encode()
    for _ in range(count):
        for verb in ("ADD", "CHECK", "DEL"):
            reply = await exchange(server, "POST", "/cni", body(verb, stdin, CNI_ARGS=args, CNI_NETNS=NETNS))
            assert reply.status == 200, reply.body


@pytest.mark.weak_spot(43)
async def test_no_descriptor_and_no_thread_stays_where_a_log_file_is_set(engine, server, tmp_path):
    file = tmp_path / "daemon.log"
    await asyncio.to_thread(logs.configure, file=str(file), to_stderr=False)
    engine.overlay |= {"logFile": str(file), "logToStderr": False, "logOptions": {"maxSize": 1}}
    await calls(server, 5, {"logFile": str(file)})
    before = len(os.listdir("/proc/self/fd")) + threading.active_count()
    await calls(server, 40, {"logFile": str(file)})
    # Upstream leaves one of each behind for each request; a connection may just be closing, a pool grow a little.
    assert len(os.listdir("/proc/self/fd")) + threading.active_count() < before + 10
    assert await asyncio.to_thread(logged)
    assert file.read_text().count("CNI ADD finished") == 45


@pytest.mark.weak_spot(44, 46)
@pytest.mark.parametrize("conf", [{}, {"logToStderr": True, "logLevel": "debug"}])
async def test_a_request_changes_nothing_about_logging(server, tmp_path, capfd, conf):
    """Upstream logs to stderr from the first request on that does not forbid it."""
    await asyncio.to_thread(logs.configure, "verbose", False, file=str(tmp_path / "daemon.log"))
    handlers = logging.getLogger().handlers[:]
    await calls(server, 1, conf | {"logFile": str(tmp_path / "other.log")})
    assert logging.getLogger().handlers == handlers
    assert logging.getLogger("multus_daemon").level == logging.INFO
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "other.log").exists()
