"""`multus-daemon webhook` as a process: it answers without an API server, says what is missing, ends when told to."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.certificates import Authority, OpensslError, Pair
from tests.e2e.server_process import free_port

COMMAND = [sys.executable, "-m", "multus_daemon.cli", "webhook"]


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
        (directory / "config.json").write_text('{"namespaceIsolation": true}')
        files = ["--cert", str(self.pair.certificate), "--key", str(self.pair.key), "--kubeconfig", str(kubeconfig)]
        where = ["--port", str(self.port), "--address", "127.0.0.1", "--config", str(directory / "config.json")]
        self._tls = ssl.create_default_context(cafile=str(authority.certificate))
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*COMMAND, *files, *where], stdout=log, stderr=log)

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """The answer, once there is one."""
        end = time.monotonic() + 30
        while True:
            try:
                url = f"https://127.0.0.1:{self.port}{path}"
                with urllib.request.urlopen(url, body, timeout=10, context=self._tls) as answer:
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
    metadata = {"name": "a", "annotations": {"k8s.v1.cni.cncf.io/networks": "other/blue"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    request = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "tenant", "object": pod}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    response = json.loads(webhook.ask("/validate", json.dumps(review).encode()))["response"]
    assert response["allowed"] is True
    # By the daemon's configuration.
    (warning,) = response["warnings"]
    assert "other/blue must not be used from namespace tenant" in warning
    with pytest.raises(urllib.error.HTTPError, match="400"):
        webhook.ask("/validate", b"nonsense")
    webhook.process.send_signal(signal.SIGTERM)
    assert webhook.process.wait(30) == 0


def test_without_a_certificate_it_says_so(tmp_path: Path) -> None:
    files = ["--cert", str(tmp_path / "tls.crt"), "--key", str(tmp_path / "tls.key")]
    done = subprocess.run([*COMMAND, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert f"multus-daemon: certificate {tmp_path}/tls.crt, key {tmp_path}/tls.key: No such file" in done.stderr
