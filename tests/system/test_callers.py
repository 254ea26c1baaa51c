"""The daemon checks who may call its socket."""

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.plugins import child
from multus_daemon.runtime.gates import Gates
from tests.unit.api.harness import STDOUT_TYPE, FakeVerbs, body, exposition, http, parse_reply

CALL = """
import os, socket, sys
uid = int(sys.argv[3])
# The interpreter may lie where only root gets: become the other user after its start.
if uid != os.getuid():
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
    verbs, metrics = FakeVerbs(), Metrics(version="0.0-test")
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


# --- plugins that call the daemon which runs them --------------------------------------------------------------------


@pytest.fixture
async def server():
    verbs, metrics = FakeVerbs(), Metrics(version="0.0-test")
    directory = Path("/tmp") / f"multus-caller-{os.getpid()}"
    server = UnixServer(CniApi(verbs, metrics), Gates(), metrics, directory)
    await server.start()
    yield server, verbs
    await server.stop(1)
    shutil.rmtree(directory)


def plugin(path, way):
    """A command line of a plugin that calls the daemon: by itself, or by a process that it starts."""
    call = [sys.executable, "-I", "-S", "-c", CALL, str(path), http("POST", "/cni", body()).decode(), str(os.getuid())]
    inner = shlex.join(call)
    answer = shlex.quote(f"{path.parent}/answer")
    lines = {
        "itself": f"exec {inner}",
        "child": f"{inner}; true",
        "child without the environment": f"env -i {inner}; true",
        "session of its own": f"setsid -w {inner}",
        # The plugin has ended, its pipes are closed: it is not ended with the plugin.
        "left behind": f"setsid sh -c {shlex.quote(f'sleep 0.3; {inner} >{answer}')} </dev/null >/dev/null 2>&1 &",
    }
    return ["/bin/sh", "-c", lines[way]]


@pytest.mark.parametrize(
    "way", ["itself", "child", "child without the environment", "session of its own", "left behind"]
)
async def test_a_plugin_of_the_daemon_is_refused(server, way):
    served, verbs = server
    limits = child.Limits(timeout=20, grace=1, max_output=1 << 20)
    end = await asyncio.to_thread(child.run, plugin(served.path, way), {"PATH": os.environ["PATH"]}, b"", limits)
    stdout = end.stdout
    if way == "left behind":
        answer = served.path.parent / "answer"
        for _ in range(1000):
            await asyncio.sleep(0.05)
            if answer.exists() and (stdout := answer.read_bytes()):
                break
    reply = parse_reply(stdout)
    assert reply.status == 400
    assert reply.json["code"] == 7
    assert reply.json["msg"] == "the request comes from a plugin that this daemon runs"
    assert verbs.calls == []


async def test_a_program_that_the_daemon_did_not_start_is_served(server):
    served, verbs = server
    limits = child.Limits(timeout=20, grace=1, max_output=1 << 20)
    running = asyncio.create_task(asyncio.to_thread(child.run, ["/bin/sleep", "1"], {}, b"", limits))
    await asyncio.sleep(0.2)
    reply = parse_reply(await call_as(os.getuid(), served.path, http("POST", "/cni", body())))
    assert reply.status == 200
    assert len(verbs.calls) == 1
    await running
    assert child.running() == frozenset()
