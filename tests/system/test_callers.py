"""Who may call the daemon's socket."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from multus_daemon.base.gates import Gates
from multus_daemon.metrics import Metrics
from multus_daemon.server.app import UnixServer
from multus_daemon.server.cni_api import CniApi
from tests.unit.server.harness import STDOUT_TYPE, FakeVerbs, body, exposition, http, parse_reply

CALL = """
import os, socket, sys
uid = int(sys.argv[3])
# The interpreter may lie where only root gets: become the other user after its start.
os.setgroups([]), os.setgid(uid), os.setuid(uid)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(sys.argv[2].encode())
data = b""
while chunk := s.recv(65536):
    data += chunk
sys.stdout.buffer.write(data)
"""


async def call_as(user, path, data):
    command = [sys.executable, "-I", "-S", "-c", CALL, str(path), data.decode(), str(user)]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=20, check=True)
    return ran.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can call as another user: run as root")
@pytest.mark.parametrize("path", ["/cni", "/healthz", "/nope"])
@pytest.mark.parametrize("native", [False, True])
async def test_other_users_are_refused(path, native):
    verbs, metrics = FakeVerbs(), Metrics(CollectorRegistry(), version="0.0-test")
    # Not tmp_path: its parents let nobody else in.
    directory = Path("/tmp") / f"multus-peer-{os.getpid()}"
    server = UnixServer(CniApi(verbs, metrics), Gates(), metrics, directory)
    await server.start()
    try:
        directory.chmod(0o755)
        server.path.chmod(0o666)
        reply = parse_reply(await call_as(65534, server.path, http("POST", path, body(), native=native)))
        assert reply.status == 403
        assert reply.json["code"] == 999
        assert reply.json["msg"].startswith("user 65534 (process ")
        assert reply.headers["content-type"] == (STDOUT_TYPE if native else "application/json")
        assert verbs.calls == []
        assert "multus_refused_peers_total 1.0" in await exposition(metrics)
        reply = parse_reply(await call_as(0, server.path, http("POST", "/cni", body())))
        assert reply.status == 200
        assert "multus_refused_peers_total 1.0" in await exposition(metrics)
    finally:
        await server.stop(1)
        directory.rmdir()
