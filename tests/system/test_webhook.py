"""`multus-daemon webhook` as a process: it answers without an API server, says what is missing, ends when told to.

Large networks of every bad shape are refused by the limit that they exceed, or judged, in little time and memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from multus_daemon.spec.cni.conf import CONFIG_MAX_BYTES, CONTAINERS_MAX
from tests.aside import Aside
from tests.e2e.certificates import Authority, OpensslError, Pair
from tests.e2e.server_process import free_port

SIZES: Final = (100_000, 350_000, 1_000_000, 3_000_000)
LARGE_AT_ONCE: Final = 3
REVIEWS_SECONDS: Final = 8.0
"""Bound of the processor time of three large reviews and the small ones beside them."""
GROWTH_BYTES: Final = 64 * 1024 * 1024
NUMBER_OF_SMALL: Final = 20
# The limits on time are those of a patient product: the machine may be busy.
_PATIENT: Final = """
import sys
from multus_daemon import cli
from multus_tools import deadlines as d
d.WEBHOOK_REVIEW_SECONDS = d.WEBHOOK_SECONDS = d.WEBHOOK_WARNINGS_SECONDS = d.WEBHOOK_HANDSHAKE_SECONDS = 40.0
cli.main(sys.argv[1:])
"""
COMMAND = [sys.executable, "-c", _PATIENT, "webhook"]


class Webhook:
    """A webhook whose API server is not there."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory / "pki", ("IP:127.0.0.1",))
        self.pair: Pair = authority.server()
        self.port, self._log = free_port(), directory / "log"
        cluster = {
            "name": "a",
            "cluster": {"server": f"https://127.0.0.1:{free_port()}", "insecure-skip-tls-verify": True},
        }
        context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
        users = [{"name": "a", "user": {"token": "x"}}]
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(
            json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "a"})
        )
        # The daemon's port, and this one's.
        self.node_port, self.metrics_port = free_port(), free_port()
        config = {"namespaceIsolation": True, "metricsPort": self.node_port, "metricsAddress": "127.0.0.1"}
        (directory / "config.json").write_text(json.dumps(config))
        files = ["--cert", str(self.pair.certificate), "--key", str(self.pair.key), "--kubeconfig", str(kubeconfig)]
        where = ["--port", str(self.port), "--address", "127.0.0.1", "--config", str(directory / "config.json")]
        where += ["--metrics-port", str(self.metrics_port)]
        self.tls = ssl.create_default_context(cafile=str(authority.certificate))
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*COMMAND, *files, *where], stdout=log, stderr=log)

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """The answer, once there is one."""
        end = time.monotonic() + 30
        while True:
            try:
                url = f"https://127.0.0.1:{self.port}{path}"
                with urllib.request.urlopen(url, body, timeout=50, context=self.tls) as answer:
                    found: bytes = answer.read()
                    return found
            except urllib.error.HTTPError:
                raise
            except OSError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < end, self._log.read_text()
                time.sleep(0.1)


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[Webhook]:
    try:
        made = Webhook(tmp_path)
    except OpensslError as error:
        pytest.skip(str(error))
    yield made
    made.process.kill()
    made.process.wait()


def test_it_answers_without_an_api_server_and_ends_when_told_to(webhook: Webhook) -> None:
    assert webhook.ask("/healthz") == b""
    metadata: dict[str, Any] = {"name": "a", "annotations": {"k8s.v1.cni.cncf.io/networks": "other/blue"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    request: dict[str, Any] = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "tenant", "object": pod}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    response = json.loads(webhook.ask("/validate", json.dumps(review).encode()))["response"]
    assert response["allowed"] is True
    # By the daemon's configuration.
    (warning,) = response["warnings"]
    assert "other/blue must not be used from namespace tenant" in warning
    # The injector can't look up the network, and admits the pod as it is.
    metadata["annotations"] = {"k8s.v1.cni.cncf.io/networks": "blue"}
    request["operation"] = "CREATE"
    response = json.loads(webhook.ask("/inject", json.dumps(review).encode()))["response"]
    (warning,) = response.pop("warnings")
    assert response == {"uid": "u", "allowed": True}
    assert "can't look up networks now" in warning
    with pytest.raises(urllib.error.HTTPError, match="503"):
        webhook.ask("/readyz")
    for path in ("/validate", "/inject"):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            webhook.ask(path, b"nonsense")
    webhook.process.send_signal(signal.SIGTERM)
    assert webhook.process.wait(30) == 0


def test_its_metrics_are_on_the_port_of_its_flag_only(webhook: Webhook) -> None:
    webhook.ask("/healthz")
    end = time.monotonic() + 30
    text = b""
    while not text:
        assert time.monotonic() < end
        with contextlib.suppress(urllib.error.URLError):
            text = urllib.request.urlopen(f"http://127.0.0.1:{webhook.metrics_port}/metrics", timeout=10).read()
    assert b"multus_webhook_reviews_total" in text
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", webhook.node_port)) != 0


def filled(head: str, piece: Callable[[int], str], tail: str) -> Callable[[int], str]:
    """Return a function for a text of a size, with as many pieces between head and tail as it takes."""

    def text(size: int) -> str:
        pieces: list[str] = []
        length = len(head) + len(tail)
        while length < size:
            pieces.append(piece(len(pieces)))
            length += len(pieces[-1]) + 1
        return head + ",".join(pieces) + tail

    return text


def plugin(fields: str, piece: Callable[[int], str], tail: str) -> Callable[[int], str]:
    return filled(f'{{"cniVersion":"1.0.0","name":"n",{fields}', piece, f"{tail}}}")


def subnet(number: int) -> str:
    return f'{{"subnet":"10.{number >> 14 & 255}.{number >> 6 & 255}.{(number & 63) * 4}/30"}}'


HOST_LOCAL: Final = '"type":"bridge","ipam":{"type":"host-local",'
SHAPES: Final[dict[str, Callable[[int], str]]] = {
    "array of numbers": plugin('"type":"bridge","x":[', lambda _: "1", "]"),
    "array of strings": plugin('"type":"sriov","x":[', lambda _: '"a"', "]"),
    "array of arrays": plugin('"type":"bridge","x":[', lambda _: "[]", "]"),
    "array of objects": plugin('"type":"macvlan","x":[', lambda _: '{"a":1}', "]"),
    "plugins": plugin('"plugins":[', lambda _: '{"type":"bridge"}', "]"),
    "cniVersions": plugin('"type":"bridge","cniVersions":[', lambda number: f'"1.0.{number}"', "]"),
    "keys": plugin('"type":"bridge",', lambda number: f'"k{number}":1', ""),
    "keys of ipam": plugin(f'{HOST_LOCAL}"subnet":"10.0.0.0/8",', lambda number: f'"k{number}":1', "}"),
    "capabilities": plugin('"type":"bridge","capabilities":{', lambda number: f'"k{number}":true', "}"),
    "range sets": plugin(f'{HOST_LOCAL}"ranges":[', lambda number: f"[{subnet(number)}]", "]}"),
    "a range set": plugin(f'{HOST_LOCAL}"ranges":[[', subnet, "]]}"),
    "routes": plugin(
        f'{HOST_LOCAL}"subnet":"10.0.0.0/8","routes":[',
        lambda number: f'{{"dst":"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}/32"}}',
        "]}",
    ),
    "sysctls": plugin('"type":"tuning","sysctl":{', lambda number: f'"net.ipv4.conf.IFNAME.k{number}":"1"', "}"),
    "wrong sysctls": plugin('"type":"tuning","sysctl":{', lambda number: f'"kernel.k{number}":"1"', "}"),
    "nested arrays": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "nested objects": lambda size: '{"a":' * (size // 6) + "1" + "}" * (size // 6),
    "a string": plugin('"type":"bridge","bridge":"', lambda _: "a" * 1000, '"'),
    "line ends": lambda size: f'{{"type":"bridge"{chr(10) * size},}}',
}


def review(config: str, old: str | None = None) -> bytes:
    def network(text: str) -> dict[str, Any]:
        kind = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}
        return {**kind, "metadata": {"name": "blue", "namespace": "tenant"}, "spec": {"config": text}}

    kind = {"group": "k8s.cni.cncf.io", "version": "v1", "kind": "NetworkAttachmentDefinition"}
    objects = {"object": network(config), "oldObject": None if old is None else network(old)}
    request = {"uid": "u", "kind": kind, "name": "blue", "namespace": "tenant", **objects}
    return json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}).encode()


def memory(process: int, key: str) -> int:
    """The bytes in a line of /proc/PID/status."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def processor_seconds(process: int) -> float:
    """User and system time of a process, proc_pid_stat(5)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def judged(webhook: Webhook, body: bytes) -> dict[str, Any]:
    """The response to a review."""
    response: dict[str, Any] = json.loads(webhook.ask("/validate", body))["response"]
    return response


def wanted_refusal(config: str) -> str:
    """The limit of an ADD that the configuration exceeds; empty if there is none."""
    if len(config) > CONFIG_MAX_BYTES:
        return f"CNI configuration has {len(config)} bytes, and at most {CONFIG_MAX_BYTES} are allowed"
    if config.count("{") + config.count("[") > CONTAINERS_MAX:
        return f"CNI configuration has more than {CONTAINERS_MAX} objects and arrays"
    return ""


@pytest.mark.parametrize("shape", SHAPES)
def test_large_networks_are_judged_by_the_limits_of_an_add(webhook: Webhook, shape: str) -> None:
    """Three at a time, and small ones beside them."""
    small = review('{"cniVersion":"1.0.0","type":"ptp","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}')
    for _ in range(3):
        assert judged(webhook, small)["allowed"]
    idle = memory(webhook.process.pid, "VmRSS")
    for size in SIZES:
        config = SHAPES[shape](size)
        body = review(config)
        before = processor_seconds(webhook.process.pid)
        large = [Aside(judged, webhook, body) for _ in range(LARGE_AT_ONCE)]
        beside = [judged(webhook, small) for _ in range(NUMBER_OF_SMALL)]
        answers = [one.result() for one in large]
        assert all(answer["allowed"] for answer in beside)
        assert processor_seconds(webhook.process.pid) - before < REVIEWS_SECONDS
        if limit := wanted_refusal(config):
            assert {answer["allowed"] for answer in answers} == {False}, size
            assert limit in answers[0]["status"]["message"]
    assert memory(webhook.process.pid, "VmHWM") - idle < GROWTH_BYTES


def test_a_review_of_any_size_is_answered(webhook: Webhook) -> None:
    """An update has the object twice; a review that is too large to be read is refused by that limit."""
    judged(webhook, review("{}"))
    idle = memory(webhook.process.pid, "VmRSS")
    three = SHAPES["keys"](3_000_000)
    for body, limit in (
        (review(three, three.replace("k1", "j1")), wanted_refusal(three)),
        (review("<" * 3_000_000).replace(b"<", rb"\u003c"), "larger than 8388608 bytes"),
    ):
        answers = [one.result() for one in [Aside(judged, webhook, body) for _ in range(3)]]
        assert {answer["allowed"] for answer in answers} == {False}
        assert limit in answers[0]["status"]["message"]
    # A label of a network that is older than the webhook.
    assert judged(webhook, review(three, three))["allowed"]
    assert memory(webhook.process.pid, "VmHWM") - idle < GROWTH_BYTES


def test_without_a_certificate_it_says_so(tmp_path: Path) -> None:
    files = ["--cert", str(tmp_path / "tls.crt"), "--key", str(tmp_path / "tls.key")]
    done = subprocess.run([*COMMAND, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert f"multus-daemon: certificate {tmp_path}/tls.crt, key {tmp_path}/tls.key: No such file" in done.stderr
