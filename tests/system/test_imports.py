"""A program loads no unused module when it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import deadlines
from tests.e2e.certificates import Authority
from tests.fakes.apiserver import NODES, FakeApiServer
from tests.programs import require

UNUSED = (
    "cryptography", "google.protobuf", "grpc", "pyroute2", "requests", "rich",
)  # fmt: skip
GENERATED = ("kubernetes_asyncio.client.api", "kubernetes_asyncio.client.models")

# Runs the daemon; what it has loaded goes to the file, once its standard input ends.
RUN = """
    import gc, json, os, pathlib, signal, ssl, sys, threading, time
    from multus_daemon import cli

    def look():
        sys.stdin.read()
        # The daemon handles it a moment after its socket is there.
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            time.sleep(0.01)
        contexts = [one for one in gc.get_objects() if isinstance(one, ssl.SSLContext)]
        found = {
            "modules": sorted(sys.modules),
            "authorities": [one.cert_store_stats()["x509_ca"] for one in contexts],
            "bundle": os.environ.get("SSL_CERT_FILE"),
        }
        pathlib.Path(sys.argv.pop()).write_text(json.dumps(found))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look).start()
    cli.main(sys.argv[1:-1])
"""


def loaded(modules: list[str], *names: str) -> list[str]:
    return [module for module in modules if any(f"{module}.".startswith(f"{name}.") for name in names)]


def loaded_by(code: str) -> list[str]:
    """The modules that are loaded at the end of a program."""
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout)
    return modules


@contextlib.asynccontextmanager
async def apiserver() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer()
    server.put(NODES, {"metadata": {"name": "node-a"}})
    await server.start()
    yield server
    await server.stop()


async def run_daemon(directory: Path, arguments: list[str], is_up: Any, **environment: str) -> dict[str, Any]:
    """Run a daemon and return what it has loaded when it is up."""
    settings = {
        "socketDir": str(directory / "run"),
        "daemonSocketDir": str(directory / "run"),
        "cniDir": str(directory / "cni"),
        "binDir": str(directory / "bin"),
        "confDir": str(directory / "conf.d"),
        "clusterNetwork": "cluster",
    }
    (directory / "bin").mkdir()
    (directory / "config.json").write_text(json.dumps(settings))
    answer = directory / "loaded.json"
    arguments = ["run", "--config", str(directory / "config.json"), *arguments, str(answer)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(RUN),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"MULTUS_NODE_NAME": "node-a"} | environment,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    log = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(30):
            while not is_up() and process.returncode is None:
                await asyncio.sleep(0.05)
            process.stdin.close()
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        text = (await log).decode()
    assert status == 0, text
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


async def test_a_daemon_in_a_cluster_loads_only_what_it_uses(tmp_path: Path) -> None:
    """And no certificate of the system's, which are there to be read."""
    require("openssl")
    bundle = Authority(tmp_path / "pki", ()).certificate
    async with apiserver() as server:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", ca=bundle)
        found = await run_daemon(
            tmp_path, ["--kubeconfig", str(kubeconfig)], lambda: server.watches == 2, SSL_CERT_FILE=str(bundle)
        )
    modules = found["modules"]
    assert loaded(modules, "multus_daemon.cluster.kube.store", "kubernetes_asyncio.config.kube_config")
    unused = (*UNUSED, *GENERATED, "multus_tools", "kubernetes_asyncio.watch", "urllib3.util")
    assert loaded(modules, *unused) == []
    # That of the API server has one, aiohttp's none.
    assert sorted(found["authorities"]) == [0, 0, 1]
    assert found["bundle"] == str(bundle)


async def test_a_standalone_daemon_loads_nothing_of_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    socket = tmp_path / "run" / "multus.sock"
    found = await run_daemon(tmp_path, ["--standalone", str(tmp_path / "manifests")], socket.exists)
    assert loaded(found["modules"], "multus_daemon.cluster.standalone.store")
    unused = (*UNUSED, "multus_tools", "kubernetes_asyncio", "multus_daemon.cluster.kube")
    assert loaded(found["modules"], *unused) == []
    assert found["bundle"] == os.environ.get("SSL_CERT_FILE")


def test_a_service_account_needs_no_yaml() -> None:
    modules = loaded_by(
        "import multus_daemon.daemon, multus_daemon.cluster.kube.connect, multus_daemon.cluster.kube.store"
    )
    assert loaded(modules, "kubernetes_asyncio.config.incluster_config")
    assert loaded(modules, "yaml", "kubernetes_asyncio.config.kube_config", *GENERATED) == []


def test_the_programs_beside_the_daemon_load_nothing_of_what_attaches_pods() -> None:
    modules = loaded_by("import multus_tools.approver")
    assert loaded(modules, "multus_daemon.cluster.kube.client")
    unwanted = [f"multus_daemon.{package}" for package in ("pod", "plugins.builtin", "plugins.run", "kernel", "daemon")]
    assert loaded(modules, *unwanted, *GENERATED, *(name for name in UNUSED if name != "cryptography")) == []


@pytest.mark.parametrize(
    "program",
    [
        "multus_tools.builtin",
        "multus_daemon.probe",
        "multus_tools.ctl",
        "multus_tools.ctl.show",
        "multus_tools.kubectl",
    ],
)
def test_other_programs_load_no_large_library_before_they_need_it(program: str) -> None:
    unwanted = (*UNUSED, "aiohttp", "kubernetes_asyncio", "prometheus_client")
    assert loaded(loaded_by(f"import {program}"), *unwanted) == []


def test_help_loads_no_library_and_only_what_it_prints() -> None:
    code = (
        "import contextlib, io; from multus_tools.ctl import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['--help'])"
    )
    assert loaded(loaded_by(code), "dataclasses", "http", "msgspec", "rich", "socket", "multus_daemon.settings") == []


def test_deadlines_load_by_their_path_with_nothing_installed() -> None:
    """The shim's build loads them this way; and they add no slow module to `multus-probe`."""
    code = (
        "import sys; before = set(sys.modules); exec(open(sys.argv[1]).read());"
        "print(sorted({'multus_daemon', 'typing', 'dataclasses'} & (set(sys.modules) - before)))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, deadlines.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
