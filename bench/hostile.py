"""ADD while a thousand connections a second reach an open port, against the same crowd at a port that only closes.

    python -m bench.hostile [--rounds 60] [--rate 1000] [--seconds 1] [--tls] [--webhook]

A crowd of four processes, which yield to everyone else (nice 19), connects to the metrics port of a daemon: half
requests, whole ones, a packed body, noise; with `--tls`, half of them begin a handshake. Then, in the same round, it
connects to a listener outside the daemon that closes each connection at once; then to nothing. One worker attaches and
deletes a pod of one network meanwhile. The quotient of the crowd at the port and the crowd at the listener is what the
port costs an ADD: the crowd itself takes the machine's time in both. Also the daemon's processor time, which says more
where the machine is busy. With `--webhook` the crowd is at the port of a webhook on the node, which has the least share
of the processors, as the little that its manifest requests gives it. Needs root and iproute2; openssl for TLS. Exit
status 3 if an ADD takes too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench import harness, sides, stats, verdict
from bench.sides import START, Daemon
from tests.e2e.certificates import Authority, Pair
from tests.e2e.node import Node

PORT: Final = 9900
CLOSER: Final = 9901
WEBHOOK: Final = 9902
PROCESSES: Final = 4
MEDIAN: Final = 1.05
SLOWEST: Final = 2.0
"""Most that an ADD may take with the crowd at the port, as a quotient of one with the crowd elsewhere."""
WARM_UP: Final = 3

CLOSING: Final = f"""
import socket
with socket.create_server(("127.0.0.1", {CLOSER}), backlog=128) as listener:
    while True:
        listener.accept()[0].close()
"""
CROWD: Final = """
import json, os, socket, ssl, sys, time, zlib
os.nice(19)
bomb = zlib.compress(bytes(1_000_000_000), 9)[:60000]
head = b"GET /metrics HTTP/1.1\\r\\nHost: a\\r\\n"
packed = b"Content-Encoding: deflate\\r\\nContent-Length: 60000\\r\\n\\r\\n" + bomb
sent = [head, head + b"\\r\\n", head + packed, bytes(2000),
        head + b"Transfer-Encoding: chunked\\r\\n\\r\\n" + b"1\\r\\na\\r\\n" * 1000, b""]
hello = ssl.MemoryBIO()
try:
    ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="a").do_handshake()
except ssl.SSLWantReadError:
    # Half of a TLS port's connections make it compute.
    sent = sent if sys.argv[1:] != ["tls"] else [*sent[:1], *[hello.read()] * len(sent), *sent[1:]]
for line in sys.stdin:
    port, rate, seconds, source = json.loads(line)
    begun, number, open_, failed = time.monotonic(), 0, [], 0
    while (now := time.monotonic()) < begun + seconds:
        while number < (now - begun) * rate:
            client = socket.socket()
            client.setblocking(False)
            client.bind((source, 0))
            client.connect_ex(("127.0.0.1", port))
            open_.append((client, sent[number % len(sent)]))
            number += 1
        if len(open_) > 30:
            for client, data in open_[:-20]:
                try:
                    client.send(data)
                except OSError:
                    failed += 1
                client.close()
            del open_[:-20]
        time.sleep(0.005)
    for client, _ in open_:
        client.close()
    print(json.dumps([number, failed]), flush=True)
"""


def main() -> None:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rate", type=int, default=1000, help="connections a second")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each crowd")
    parser.add_argument("--tls", action="store_true", help="the port serves TLS")
    parser.add_argument("--webhook", action="store_true", help="the webhook's port; it serves TLS")
    options = parser.parse_args()
    verdict.require_node()
    harness.isolate("hostile")
    settings: dict[str, Any] = {"logLevel": "error", "metricsPort": PORT, "metricsAddress": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as directory, Node(settings=settings) as node:
        speaks_tls = options.tls or options.webhook
        pair = Authority(Path(directory, "ca"), ("IP:127.0.0.1",)).server() if speaks_tls else None
        if options.tls and pair:
            node.settings["metricsTLS"] = {"certFile": str(pair.certificate), "keyFile": str(pair.key)}
        daemon = Daemon(node, "ours", checkout=sides.base_checkout())
        daemon.declare(sizes=(0,))
        node.start(timeout=START)
        with contextlib.ExitStack() as stack:
            if options.webhook and pair:
                stack.enter_context(webhook(node, Path(directory), pair))
            crowd = stack.enter_context(programs(node, *(["tls"] if speaks_tls else [])))
            found, reached = measure(options, daemon, crowd)
    report(found, reached)


@contextlib.contextmanager
def webhook(node: Node, directory: Path, pair: Pair) -> Iterator[None]:
    """A webhook in the node's network namespace, whose API server is away."""
    kubeconfig = directory / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "t"}}
    kubeconfig.write_text(
        json.dumps({"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "c"})
    )
    kubeconfig.chmod(0o600)
    arguments = ["--cert", str(pair.certificate), "--key", str(pair.key), "--port", str(WEBHOOK)]
    command = [sys.executable, "-m", "multus_daemon.cli", "webhook", *arguments, "--kubeconfig", str(kubeconfig)]
    inside = ["nice", "-n", "19", "ip", "netns", "exec", Path(node.host).name]
    with subprocess.Popen([*inside, *command, "--address", "127.0.0.1"]) as process:
        try:
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def programs(node: Node, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The crowd and the listener that closes, in the node's network namespace."""
    inside = ["ip", "netns", "exec", Path(node.host).name, sys.executable, "-c"]
    with contextlib.ExitStack() as stack:
        closer = stack.enter_context(subprocess.Popen([*inside, CLOSING]))
        stack.callback(closer.kill)
        crowd = []
        for _ in range(PROCESSES):
            command = [*inside, CROWD, *arguments]
            member = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(member)
            stack.callback(member.kill)
            crowd.append(member)
        time.sleep(3)
        yield crowd


def measure(
    options: argparse.Namespace, daemon: Daemon, crowd: list[subprocess.Popen[str]]
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Return the milliseconds of each ADD by round, and the connections a second, by where the crowd is."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    reached: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[tuple[float, int, float]]] = defaultdict(list)
    ports = {"port": WEBHOOK if options.webhook else PORT, "listener": CLOSER, "none": 0}
    for number in range(options.rounds + WARM_UP):
        for where in sides.in_turn(tuple(ports), number):
            if ports[where]:
                for member, process in enumerate(crowd):
                    order = [ports[where], options.rate / PROCESSES, options.seconds, f"127.0.0.{10 + member}"]
                    assert process.stdin is not None
                    print(json.dumps(order), file=process.stdin, flush=True)
            before, at = daemon.processor(), time.perf_counter()
            taken = block(daemon, options.seconds, f"{where}-{number}")
            spent, took = daemon.processor() - before, time.perf_counter() - at
            if ports[where]:
                made = [json.loads(process.stdout.readline())[0] for process in crowd if process.stdout]
                reached[where].append(sum(made) / options.seconds)
            if number >= WARM_UP:
                found[where].append(taken)
                used[where].append((spent, len(taken), took))
    for where, values in used.items():
        spent, adds, took = (sum(column) for column in zip(*values, strict=True))
        print(
            f"crowd at {where:10} processor time of the daemon {spent:.2f} s in {took:.1f} s with {adds} ADDs and DELs"
        )
    return found, reached


def block(daemon: Daemon, seconds: float, mark: str) -> list[float]:
    """Milliseconds of each ADD, of a worker that attaches and deletes a pod until the time is over."""
    begun = time.perf_counter()
    taken: list[float] = []
    while not taken or time.perf_counter() - begun < seconds:
        container = f"h{mark}-{len(taken)}"
        taken.append(sides.checked(daemon, "ADD", container, 0).seconds * 1000)
        sides.checked(daemon, "DEL", container, 0)
    return taken


def report(found: dict[str, list[list[float]]], reached: dict[str, list[float]]) -> None:
    """Print the figures, and judge them."""
    every = {where: [value for taken in rounds for value in taken] for where, rounds in found.items()}
    medians = {where: [statistics.median(taken) for taken in rounds] for where, rounds in found.items()}
    for where, values in every.items():
        values.sort()
        late = values[int(len(values) * 0.995)]
        rate = f"{statistics.median(reached[where]):.0f} connections/s" if where in reached else ""
        print(
            f"crowd at {where:10} ADD median {statistics.median(values):.2f} ms, mean {statistics.fmean(values):.2f}, "
            f"99.5 % {late:.2f}, slowest {values[-1]:.2f}, n={len(values)}  {rate}"
        )
    quotient = stats.ratio(medians["port"], medians["listener"])
    print(f"median of a round, port/listener: {quotient.value:.3f}, {quotient.low:.3f} to {quotient.high:.3f}")
    # The slowest of 200: of as many ADDs on both sides.
    latest = {where: values[int(len(values) * 0.995)] for where, values in every.items()}
    verdict.end(
        verdict.Result("median ADD, crowd at the port against elsewhere", quotient.value, MEDIAN, ""),
        verdict.Result("slowest of 200 ADDs, the same", latest["port"] / latest["listener"], SLOWEST, ""),
    )


if __name__ == "__main__":
    main()
