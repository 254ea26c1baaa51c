"""The log file on a full disk and on one that is read-only; standard error that nobody reads."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.request

import pytest

from multus_daemon import logs
from tests.aside import logged
from tests.disks import fill, make_read_only, make_writable
from tests.e2e.server_process import free_port
from tests.real_daemon import RealDaemon, full_pipe
from tests.unit.test_logs import file_of

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"

pytestmark = pytest.mark.usefixtures("logging_as_found")


def test_a_full_disk_costs_lines_and_the_file_says_how_many(small_disk, capfd):
    path = small_disk / "multus.log"
    logs.configure(file=str(path), to_stderr=False)
    logger = logging.getLogger("multus_daemon")
    logger.info("before")
    assert logged()
    filler = fill(small_disk)
    # What is left of the last page takes some of it.
    for _ in range(3):
        logger.info("lost %s", "x" * 6000)
    assert logged()
    said = capfd.readouterr().err
    assert re.fullmatch(rf"{STAMP} \[error\] log file {path}: No space left on device; lines are lost .*\n", said)
    assert logged()
    filler.unlink()
    logger.info("after")
    assert logged()
    before, part, missing, after = path.read_text().splitlines()
    assert before.endswith(" before")
    assert " lost x" in part
    assert re.fullmatch(rf"{STAMP} \[warning\] 3 lines are missing here, they could not be written", missing)
    assert after.endswith(" after")
    assert capfd.readouterr().err == ""


def test_a_full_disk_at_the_time_of_rotation(small_disk, capfd):
    """The file is closed then, and writing to a closed one would fail for ever."""
    path = small_disk / "multus.log"
    logs.configure(file=str(path), to_stderr=False, options={"maxSize": 0, "maxBackups": 1, "compress": False})
    file_of().maxBytes = 10_000
    logger = logging.getLogger("multus_daemon")
    logger.info("x" * 6000)
    assert logged()
    filler = fill(small_disk)
    for _ in range(5):
        logger.info("x" * 6000)
    assert logged()
    filler.unlink()
    for _ in range(4):
        logger.info("y" * 6000)
    assert logged()
    assert path.read_text().rstrip().endswith("y")
    assert (small_disk / "multus.log.1").stat().st_size <= 10_000
    capfd.readouterr()


def test_a_read_only_disk(small_disk, capfd):
    path = small_disk / "multus.log"
    logs.configure(file=str(path), to_stderr=False, options={"maxSize": 0, "maxBackups": 1, "compress": False})
    file = file_of()
    logger = logging.getLogger("multus_daemon")
    logger.info("before")
    assert logged()
    file.maxBytes = 10
    file.close()
    make_read_only(small_disk)
    logger.info("lost")
    logger.info("lost")
    assert logged()
    assert capfd.readouterr().err.count("Read-only file system") == 1
    make_writable(small_disk)
    logger.info("after")
    assert logged()
    assert path.read_text().rstrip().endswith(" after")


# --- nobody reads standard error -------------------------------------------------------------------------------------


def test_a_daemon_whose_standard_error_nobody_reads_goes_on_and_ends(tmp_path):
    reading, writing = full_pipe()
    with RealDaemon(tmp_path, {"metricsPort": (port := free_port())}, stderr=writing) as daemon:
        os.close(writing)
        # A line each of 8 kB: more than is kept for a reader that may come.
        for number in range(700):
            assert daemon.get(f"/{number}/{'x' * 8000}")[0] == 404
        assert daemon.get("/healthz")[0] == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            [dropped] = re.findall(r'(?m)^multus_log_lines_dropped_total\{to="stderr"\} (\S+)', answer.read().decode())
        assert 100 < float(dropped) < 400
        # It waits for its last lines, and no longer: it neither hangs nor is ended by force.
        assert daemon.stop() == 0
    os.close(reading)


def test_a_reader_that_comes_back_reads_what_is_missing_and_the_end(tmp_path):
    reading, writing = full_pipe()
    with RealDaemon(tmp_path, stderr=writing) as daemon:
        os.close(writing)
        for number in range(600):
            assert daemon.get(f"/{number}/{'x' * 8000}")[0] == 404
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.extend(iter(lambda: os.read(reading, 65536), b"")))
        reader.start()
        daemon.until(lambda: len(b"".join(found)) > 3_000_000, "the queue is read")
        # As soon as there is room a line is taken again.
        daemon.until(lambda: daemon.get("/again")[0] == 404 and b" GET /again: " in b"".join(found), "a new line")
        assert daemon.stop() == 0
        reader.join()
    os.close(reading)
    lines = b"".join(found).lstrip(b".").decode().splitlines()
    numbers = [int(match[1]) for line in lines if (match := re.search(r" GET /(\d+)/", line))]
    assert numbers == list(range(len(numbers)))
    [(place, missing)] = [
        (place, int(match[1]))
        for place, line in enumerate(lines)
        if (match := re.search(r"\] (\d+) lines are missing", line))
    ]
    assert missing + len(numbers) >= 600
    assert " GET /again: " in lines[place + 1]
    assert lines[-1].endswith("multus-daemon stops")


def test_a_standard_error_that_hangs_keeps_nothing_from_the_file(tmp_path):
    reading, writing = full_pipe()
    with RealDaemon(tmp_path, {"logFile": f"{tmp_path}/multus.log"}, stderr=writing) as daemon:
        os.close(writing)
        assert daemon.get("/nothing-here")[0] == 404
        daemon.until(lambda: "nothing-here" in (tmp_path / "multus.log").read_text(), "the file has the line")
        assert daemon.stop() == 0
    os.close(reading)


def test_a_daemon_that_fails_ends_though_nobody_reads_why(tmp_path):
    reading, writing = full_pipe()
    command = [
        sys.executable,
        "-m",
        "multus_daemon.cli",
        "run",
        "--standalone",
        f"{tmp_path}/nope",
        "--socket-dir",
        f"{tmp_path}",
    ]
    assert subprocess.run([*command, "--log-level=debug"], stderr=writing, timeout=30, check=False).returncode == 3
    os.close(reading)
    os.close(writing)


# --- the lines of requests -------------------------------------------------------------------------------------------


def fields_of(line_format, line):
    if line_format == "json":
        return json.loads(line)
    head, _, rest = line.partition("] ")
    words = re.fullmatch(r'(.*?)((?: \w+=(?:"(?:[^"\\]|\\.)*"|\S+))*)', rest)
    assert words
    found = {key: value for key, _, value in (word.partition("=") for word in shlex.split(words[2]))}
    time, _, level = head.partition(" [")
    return {"time": time, "level": level, "msg": words[1], **found}


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_a_failed_add_is_one_line_with_the_cause_and_the_id_of_the_runtimes_error(tmp_path, netns, line_format):
    path = tmp_path / "multus.log"
    with RealDaemon(tmp_path, {"logFile": str(path), "logToStderr": False, "logFormat": line_format}) as daemon:
        daemon.netns = netns
        # With the container's id, which is left out of what Kubernetes counts together.
        said = r"""'{"code":101,"msg":"no address for %s is \\"free\\""}'"""
        daemon.plugin("failing", f"test $CNI_COMMAND = DEL || {{ printf {said} $CNI_CONTAINERID; exit 1; }}")
        daemon.network("cluster", "failing")
        daemon.pod("p", "web")
        daemon.until(lambda: daemon.cni("DEL", "c0", "p", "web")[0] == 200, "it serves")
        status, answer = daemon.cni("ADD", "c1", "p", "web")
        assert status == 400
        assert daemon.stop() == 0
    lines = [fields_of(line_format, line) for line in path.read_text().splitlines()]
    assert {"time", "level", "msg"} <= set.intersection(*map(set, lines))
    assert all(re.fullmatch(STAMP, line["time"]) for line in lines)
    [failed] = [line for line in lines if line["level"] == "error"]
    assert failed["msg"].startswith('no address for the container is "free" (plugin type="failing"')
    error = json.loads(answer)
    assert error["details"].endswith(f"; more: multusctl explain web/p; request {failed['request']}")
    wanted = {"verb": "ADD", "pod": "web/p", "container": "c1", "ifname": "eth0", "outcome": "error"}
    assert failed.items() >= wanted.items()
    assert (int(failed["code"]), float(failed["seconds"]) > 0) == (101, True)
    [done] = [line for line in lines if line.get("verb") == "DEL" and "outcome" in line]
    assert (done["level"], done["msg"], done["outcome"]) == ("verbose", "CNI DEL finished", "success")
    assert not [line for line in lines if line["msg"].endswith("started")]
