"""The daemon's descriptors: how many it may have, and what is left for pods when the port of the metrics is stormed."""

import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.server_process import free_port
from tests.real_daemon import RealDaemon

LIMIT = 1024
STORM = 4000


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process may have as many as the storm takes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < STORM + 500:
        pytest.skip(f"needs {STORM + 500} descriptors: raise the hard RLIMIT_NOFILE, which is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (STORM + 500, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limited(soft: int, hard: int) -> list[str]:
    return ["sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh"]


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path):
    with RealDaemon(tmp_path, wrapper=limited(256, LIMIT)) as daemon:
        found = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    assert found == (LIMIT, LIMIT)


def test_without_descriptors_the_socket_waits_quietly(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stderr, RealDaemon(tmp_path, wrapper=limited(64, 64), stderr=stderr) as daemon:
        clients = [socket.socket(socket.AF_UNIX) for _ in range(200)]
        try:
            for client in clients:
                client.connect(str(daemon.socket))
            daemon.until(lambda: b"Too many open files" in log.read_bytes(), "there is no descriptor left")
            # Time for three pauses.
            time.sleep(3.5)
        finally:
            for client in clients:
                client.close()
        daemon.until(lambda: daemon.get("/healthz")[0] == 200, "served again")
        lines = [line for line in log.read_text().splitlines() if "can't accept" in line]
    assert len(lines) == 1, lines[:5]
    assert "socket: can't accept a connection: Too many open files; raise the daemon's limit of open files" in lines[0]
    assert "Traceback" not in log.read_text()


@pytest.mark.usefixtures("many_descriptors")
def test_a_storm_on_the_port_of_the_metrics_fails_no_pod(tmp_path, netns):
    port = free_port()
    settings = {"metricsPort": port, "metricsAddress": "127.0.0.1"}
    with RealDaemon(tmp_path, settings, wrapper=limited(LIMIT, LIMIT)) as daemon:
        daemon.netns = netns
        daemon.plugin("plain", 'test "$CNI_COMMAND" = DEL || echo \'{"cniVersion":"1.0.0"}\'')
        daemon.network("cluster", "plain")
        daemon.pod("web", "default")
        storm = [socket.socket() for _ in range(STORM)]
        try:
            for client in storm:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            answers = [
                daemon.cni(verb, f"c{number}", "web", "default") for number in range(20) for verb in ("ADD", "DEL")
            ]
            assert [status for status, _ in answers] == [200] * 40, answers
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 100
        finally:
            for client in storm:
                client.close()
