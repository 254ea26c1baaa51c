"""`kubectl-multus` as a program: flags, the kubeconfig, exit statuses, what it prints."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from multus_tools import kubectl
from tests.unit.tools.kubectl.conftest import Bench, benched, explain_reply, hang, status_reply
from tests.unit.tools.kubectl.test_nodes_leaks import leak, node_of

PROGRAM = (sys.executable, "-m", "multus_tools.kubectl")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(tmp_path) as made:
        yield made


async def run(*words: str, home: Path, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error; the kubeconfig is that of `home`, if there is none in `words`."""
    known = {key: value for key, value in os.environ.items() if not key.startswith(("KUBE", "HOME"))}
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**known, "HOME": str(home), **environment},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_status_as_json_and_its_exit_status(bench: Bench, tmp_path: Path) -> None:
    bench.node("node-a", lambda execution: execution.answer(status_reply()))
    config = str(tmp_path / "kubeconfig")
    code, out, err = await run("status", "--json", "--kubeconfig", config, home=tmp_path)
    assert (code, err) == (0, "")
    assert json.loads(out)["nodes"][0]["node"] == "node-a"
    bench.node("node-b")
    code, out, _ = await run("--kubeconfig", config, "--json", "status", home=tmp_path)
    assert (code, json.loads(out)["unanswered"][0]["node"]) == (1, "node-b")
    bench.server.delete("pods", "kube-system", "kube-multus-ds-node-a")
    code, out, _ = await run("status", home=tmp_path, KUBECONFIG=config)
    assert code == 3
    assert "node-a" in out


async def test_the_kubeconfig_is_found_as_kubectl_finds_it(bench: Bench, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".kube").mkdir(parents=True)
    code, _, err = await run("status", home=home)
    assert (code, err) == (1, f"kubectl-multus: kubeconfig {home}/.kube/config can't be used: [Errno 2] "
                              f"No such file or directory: '{home}/.kube/config'\n")  # fmt: skip
    config = bench.server.kubeconfig(home / ".kube" / "config")
    assert (await run("pods", home=home))[0] == 0
    assert (await run("pods", home=home, KUBECONFIG=f"{tmp_path}/none:{config}"))[0] == 0
    code, _, err = await run("pods", "--context", "other", home=home)
    assert code == 1
    assert "it has no context 'other', but x" in err


async def test_why_takes_the_namespace_of_flag_or_context(bench: Bench, tmp_path: Path) -> None:
    async def program(execution):
        await execution.answer(explain_reply(problem="no such network"))

    bench.node("node-a", program)
    bench.pod("web", "blue", namespace="mine")
    path = tmp_path / "kubeconfig"
    config = json.loads(path.read_text())
    config["contexts"][0]["context"]["namespace"] = "mine"
    path.write_text(json.dumps(config))
    for words in (["web"], ["mine/web"], ["web", "-n", "mine"]):
        code, out, err = await run("why", *words, home=tmp_path, KUBECONFIG=str(path))
        assert (code, err) == (1, "")
        assert "mine/web on node node-a: no such network" in out
    code, out, err = await run("why", "other/web", home=tmp_path, KUBECONFIG=str(path))
    assert (code, out, err) == (3, "", "kubectl-multus: there is no pod other/web\n")


def in_context(path: Path, namespace: str) -> str:
    """Give the kubeconfig's context a namespace."""
    config = json.loads(path.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    path.write_text(json.dumps(config))
    return str(path)


async def test_the_namespace_is_that_of_flag_or_context_and_all_with_a(bench: Bench, tmp_path: Path) -> None:
    for namespace in ("default", "mine", "other"):
        bench.pod("web", "[", namespace=namespace)
        bench.network("blue", "{", namespace=namespace)
    leaks = [leak(f"{namespace}/web", container=f"{namespace}-1") for namespace in ("default", "mine", "other")]
    bench.node("node-a", node_of(*leaks))
    kubeconfig = in_context(tmp_path / "kubeconfig", "mine")
    for command, name in (("pods", "web"), ("networks", "blue"), ("leaks", "")):
        for flags, expected in (
            ([], ["mine"]),
            (["-n", "other"], ["other"]),
            (["-A"], ["default", "mine", "other"]),
            (["-n", "other", "--all-namespaces"], ["default", "mine", "other"]),
        ):
            code, out, err = await run(command, "-o", "name", *flags, home=tmp_path, KUBECONFIG=kubeconfig)
            names = [f"{item}/{name}" if name else f"{item}-1" for item in expected]
            if command == "networks":
                # The node does not list plugins.
                assert code in (1, 3)
            else:
                assert code == 1
            assert (out.splitlines(), err) == (names, ""), command
    bench.node("node-a", node_of())
    code, out, err = await run("networks", "blue", "-o", "name", home=tmp_path, KUBECONFIG=kubeconfig)
    assert (out, err) == ("mine/blue\n", "")


@pytest.mark.parametrize("command", ["pods", "networks", "leaks"])
async def test_a_namespace_that_does_not_exist(bench: Bench, tmp_path: Path, command: str) -> None:
    bench.node("node-a", node_of())
    for words in ([command, "-n", "nowhere"], [command, "-n", "nowhere", "-o", "json"]):
        code, out, err = await run(*words, home=tmp_path, KUBECONFIG=str(tmp_path / "kubeconfig"))
        assert (code, out, err) == (3, "", "kubectl-multus: there is no namespace nowhere\n")


async def test_the_same_answer_in_each_format(bench: Bench, tmp_path: Path) -> None:
    bench.node("node-a", lambda execution: execution.answer(status_reply(containers=3)))
    kubeconfig = str(tmp_path / "kubeconfig")

    async def shown(*flags: str) -> str:
        code, out, err = await run("status", *flags, home=tmp_path, KUBECONFIG=kubeconfig)
        assert (code, err) == (0, "")
        return out

    as_json = json.loads(await shown("--json"))
    assert as_json == json.loads(await shown("-o", "json")) == json.loads(await shown("-ojson"))
    assert as_json == yaml.safe_load(await shown("-o", "yaml"))
    assert await shown("-o", "name") == "node-a\n"
    table = (await shown()).splitlines()
    assert table[0] == "pods get their networks on 1 of 1 nodes"
    assert (await shown("--no-headers")).split() == table[2].split() == ["node-a", "yes", "0.2.0", "3"]
    wide = (await shown("-o=wide", "--no-headers")).split()
    assert wide == ["node-a", "yes", "0.2.0", "3", "kube-system/kube-multus-ds-node-a"]


@pytest.mark.parametrize(("duration", "expected"), [("1m", 0), ("100ms", 1)])
async def test_status_waits_until_every_daemon_is_ready(
    bench: Bench, tmp_path: Path, duration: str, expected: int
) -> None:
    # It is ready at the second look, or at none.
    answers = iter([status_reply(ready=False, gates={"pods": "not listed"})] * (1000 if expected else 1))
    bench.node("node-a", lambda execution: execution.answer(next(answers, status_reply())))
    words = ("status", "--wait", "--wait-duration", duration, "-o", "json")
    kubeconfig = str(tmp_path / "kubeconfig")
    code, out, err = await run(*words, home=tmp_path, KUBECONFIG=kubeconfig)
    found = json.loads(out)
    assert (code, err, found["nodes"][0]["ready"]) == (expected, "", not expected)


async def test_a_watch_prints_what_changes_until_it_is_interrupted(bench: Bench, tmp_path: Path) -> None:
    bench.pod("web-1", "[")
    kubeconfig = str(tmp_path / "kubeconfig")
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("pods", "-w", "--kubeconfig", kubeconfig),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout
    async with asyncio.timeout(50):
        lines = [await process.stdout.readline() for _ in range(2)]
        bench.pod("web-2", "[")
        lines.append(await process.stdout.readline())
        bench.server.delete("pods", "default", "web-1")
        lines.append(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, err = await process.communicate()
    assert [line.decode().split() for line in lines] == [
        ["pod", "node", "lacks"],
        ["default/web-1", "node-a", "["],
        ["default/web-2", "node-a", "["],
        ["default/web-1", "gone"],
    ]
    assert lines[1].index(b"node-a") == lines[2].index(b"node-a") == lines[0].index(b"node")
    assert (process.returncode, rest, err) == (130, b"", b"")


async def test_a_reader_that_has_read_enough(bench: Bench, tmp_path: Path) -> None:
    for number in range(2000):
        bench.pod(f"web-{number}-{'x' * 50}", "[")
    command = f"{' '.join(PROGRAM)} pods --no-headers --kubeconfig {tmp_path}/kubeconfig | head -1"
    process = await asyncio.create_subprocess_shell(command, stdout=-1, stderr=-1)
    out, err = await asyncio.wait_for(process.communicate(), 50)
    assert (out.count(b"\n"), err) == (1, b"")


async def test_an_api_server_that_is_away(bench: Bench, tmp_path: Path) -> None:
    await bench.server.stop()
    code, out, err = await run("status", home=tmp_path, KUBECONFIG=str(tmp_path / "kubeconfig"))
    assert (code, out) == (1, "")
    assert err.startswith("kubectl-multus: the API server can't be asked: GET /api/v1/pods: Cannot connect to host ")
    assert err.endswith("; bring it back, or name another by --kubeconfig or --context\n")
    assert "Traceback" not in err


async def test_a_terminal_shows_how_many_have_answered(bench: Bench, tmp_path: Path) -> None:
    bench.node("node-a", hang)
    bench.node("node-b", lambda execution: execution.answer(status_reply()))
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("status", "--timeout", "8s", "--kubeconfig", str(tmp_path / "kubeconfig")),
        stdout=asyncio.subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    seen = b""
    try:
        while data := os.read(ours, 65536):
            seen += data
    except OSError:
        # Linux says EIO at the end.
        pass
    os.close(ours)
    assert process.returncode == 1
    assert b"1 of 2" in seen
    assert "no answer, its pod is Ready, no answer within 8 s" in out.decode()


async def test_an_interrupt_ends_it_at_once(bench: Bench, tmp_path: Path) -> None:
    bench.node("node-a", hang)
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("status", "--timeout", "10m", "--kubeconfig", str(tmp_path / "kubeconfig")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # What a shell starts in the background ignores it, the tests too then.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    async with asyncio.timeout(30):
        while not bench.server.executing:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["status", "--timeout", "soon"], "'soon' is no time"),
        (["status", "--timeout", "0"], "'0' is no time"),
        (["nonsense"], "invalid choice"),
        (["why", "web", "-o", "wide"], "invalid choice"),
        (["status", "-A"], "unrecognized arguments"),
        (["why"], "the following arguments are required"),
        ([], "the following arguments are required"),
    ],
)
def test_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kubectl.main(words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [["why", "a/b/c"], ["why", "/b"], ["networks", "a/"], ["networks", "a/b/c"]])
def test_names_that_are_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kubectl.main(words)
    assert ended.value.code == 1
    assert "is not of the form" in capsys.readouterr().err


def test_it_answers_at_once_without_a_network() -> None:
    """The best of some, for the machine may be busy; far above what it takes."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([*PROGRAM, "--help"], check=True, capture_output=True)
        took.append(time.monotonic() - began)
    assert min(took) < 10
