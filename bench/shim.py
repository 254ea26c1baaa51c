"""The shim alone: what it adds to a call, and the memory that it needs while it waits.

    python -m bench.shim [--quick] [--rounds 300] [--record FOLDER]

Times, in turns: `ours`, a DEL that a stand-in for the daemon answers at once (the shim's start, the request, the
answer, the exit); `version`, VERSION, which needs no daemon; `true`, a program that does nothing, which is what
starting any process costs here; and `peer`, upstream's shim with the same stand-in, where it is there. Memory: of a
shim whose daemon does not answer. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import multus_shim
from bench import cluster as clusters
from bench import sides, stats, verdict
from bench.harness import Bench
from bench.program import run
from bench.stats import Figure

WARM_UP = 5
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("shim", __doc__, seconds=60, rounds=300)
    true = shutil.which("true")
    if true is None:
        verdict.skip("needs the program `true`: install coreutils")
    program = clusters.implementation()
    programs: dict[str, tuple[Path, str]] = {
        "ours": (multus_shim.binary(), "DEL"),
        "version": (multus_shim.binary(), "VERSION"),
        "true": (Path(true), "DEL"),
    }
    if program is not None:
        bench.versions["peer"] = program.version
        programs["peer"] = (program.shim, "DEL")
    with tempfile.TemporaryDirectory() as name, StandIn(Path(name) / "multus.sock") as daemon:
        config = {"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus-shim", "daemonSocketDir": name}
        stdin = json.dumps(config | {"cniDir": f"{name}/cni", "clusterNetwork": "cluster"}).encode()
        times: dict[str, list[float]] = defaultdict(list)
        processor: dict[str, list[float]] = defaultdict(list)
        for number in range(bench.number("rounds", 20) + WARM_UP):
            if not bench.has_time():
                break
            for label, (path, verb) in sides.in_turn(list(programs.items()), number):
                done = run(path, environment(verb), stdin)
                if done.code:
                    raise sides.FailedError(f"{path} {verb}: {(done.output + done.errors).decode(errors='replace')}")
                if number >= WARM_UP:
                    times[label].append(done.seconds * 1000)
                    processor[label].append(done.processor * 1000)
        for label, values in times.items():
            bench.add(f"{label} time", stats.median(values, "ms"))
            bench.add(f"{label} processor", stats.mean(processor[label], "ms"))
        if "peer" in times:
            bench.add("time ours/peer", stats.ratio(times["ours"], times["peer"]))
        for label, (path, verb) in programs.items():
            if label in ("ours", "peer"):
                bench.add(f"{label} file", Figure.exact(path.stat().st_size / 1000, "kB"))
                with daemon.silent():
                    for what, kib in waiting_memory(path, environment(verb), stdin).items():
                        bench.add(f"{label} {what}", Figure.exact(kib, "KiB"))
    bench.end()


def environment(verb: str) -> dict[str, str]:
    """Return the environment that a runtime sets."""
    return {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": "/run/netns/none",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=p;K8S_POD_UID=u",
        "PATH": os.environ["PATH"],
    }


class StandIn:
    """Answers every request on a socket at once, or never while it is `silent`."""

    def __init__(self, path: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._thread = threading.Thread(target=self._serve, name="stand-in", daemon=True)
        self._is_silent = False

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone does not wake an accept.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Connections are taken and never answered."""
        self._is_silent = True
        yield
        self._is_silent = False

    def _serve(self) -> None:
        held: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                if self._is_silent:
                    held.append(connection)
                    continue
                with connection:
                    connection.settimeout(5)
                    # A client may ask for /healthz first, and for the verb on the same connection.
                    with contextlib.suppress(OSError):
                        _read_request(connection)
                        connection.sendall(ANSWER)


def _read_request(connection: socket.socket) -> None:
    """Head and body of one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    while length and len(body) < int(length[1]):
        piece = connection.recv(65536)
        if not piece:
            return
        body += piece


def waiting_memory(program: Path, variables: Mapping[str, str], stdin: bytes) -> dict[str, float]:
    """KiB of a shim that waits for an answer: anonymous, and resident in all."""
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        process = subprocess.Popen(
            [str(program)], env=dict(variables), stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(0.5)
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        finally:
            process.kill()
            process.wait()
    found = dict(re.findall(r"(?m)^(\w+):\s+(\d+) kB$", text))
    return {"anonymous": float(found["Anonymous"]), "resident": float(found["Rss"])}


if __name__ == "__main__":
    main()
