"""`multusctl sandbox` as the runtime: what the shim is given, what is remembered, what people see."""

from __future__ import annotations

import json
import pathlib
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multus_daemon.cluster.standalone import status_file
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_tools import ctl, deadlines
from multus_tools.ctl import offline

RESULT = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}]}
STATUS = '[{\n    "name": "kube-system/cluster",\n    "interface": "eth0",\n    "default": true,\n    "dns": {}\n}]'
VIEW = {
    "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "mtu": 1500, "up": True, "addresses": ["10.1.0.2/24"]}],
    "routes": [
        {"dst": "0.0.0.0/0", "gw": "10.1.0.1", "interface": "eth0"},
        {"dst": "10.1.0.1/32", "gw": "", "interface": "eth0"},
    ],
}

SHIM = """#!{python}
import json, os, sys
folder = {folder!r}
verb = os.environ["CNI_COMMAND"]
with open(f"{{folder}}/calls", "a") as calls:
    print(json.dumps({{"env": dict(os.environ), "stdin": json.load(sys.stdin)}}), file=calls)
answer = json.load(open(f"{{folder}}/answers")).get(verb, [0, "", ""])
sys.stdout.write(answer[1])
sys.stderr.write(answer[2])
sys.exit(answer[0])
"""


class Bench:
    """A shim that records its calls and answers as told, and directories of their own."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        (self.manifests / "pod.yaml").write_text(
            "apiVersion: v1\nkind: Pod\nmetadata: {namespace: demo, name: hello, uid: the-uid}\n"
        )
        self.run_dir = root / "run"
        self.run_dir.mkdir()
        # All that it takes to be a daemon here: the shim talks to nobody.
        self.daemon = socket.socket(socket.AF_UNIX)
        self.daemon.bind(str(self.run_dir / "multus.sock"))
        self.daemon.listen()
        self.config = root / "daemon-config.json"
        self.config.write_text(
            json.dumps(
                {
                    "socketDir": "/host/run",
                    "daemonSocketDir": str(self.run_dir),
                    "cniDir": "/cni",
                    "binDir": "/plugins",
                    "clusterNetwork": "cluster",
                }
            )
        )
        self.shim = root / "shim"
        self.shim.write_text(SHIM.format(python=sys.executable, folder=str(root)))
        self.shim.chmod(0o755)
        self.answer(ADD=[0, json.dumps(RESULT), ""])

    def answer(self, **answers: list[Any]) -> None:
        (self.root / "answers").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.root / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def verbs(self) -> list[str]:
        return [call["env"]["CNI_COMMAND"] for call in self.calls]

    def run(self, verb: str, *options: str, pod: str = "demo/hello") -> None:
        common = ["--config", self.config, "--standalone", self.manifests, "--shim", self.shim]
        common += ["--state-dir", self.root / "state", "--netns-dir", self.root / "netns"]
        ctl.main(["sandbox", verb, pod, *map(str, common), *options])

    @property
    def left(self) -> list[str]:
        return [str(path) for name in ("state", "netns") for path in (self.root / name).rglob("*")]


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """No real namespaces: files in their place, and one view of what the kernel has."""

    def create(path: pathlib.Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch(exist_ok=False)

    monkeypatch.setattr("multus_tools.ctl.namespaces.create", create)
    monkeypatch.setattr("multus_tools.ctl.namespaces.remove", lambda path: path.unlink(missing_ok=True))
    monkeypatch.setattr("multus_tools.ctl.namespaces.look", lambda _netns: VIEW)
    bench = Bench(tmp_path)
    yield bench
    bench.daemon.close()


def test_what_the_shim_is_given(bench: Bench) -> None:
    bench.run("up")
    (call,) = bench.calls
    container_id = call["env"]["CNI_CONTAINERID"]
    assert len(container_id) == 64
    assert {key: value for key, value in call["env"].items() if key.startswith("CNI_")} == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": container_id,
        "CNI_NETNS": str(bench.root / "netns" / "multus-demo_hello"),
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/plugins",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=demo;K8S_POD_NAME=hello;"
        f"K8S_POD_INFRA_CONTAINER_ID={container_id};K8S_POD_UID=the-uid",
    }
    assert call["stdin"] == {
        "cniVersion": "1.0.0",
        "name": "multus-cni-network",
        "type": "multus-shim",
        "daemonSocketDir": str(bench.run_dir),
        "cniDir": "/cni",
        "clusterNetwork": "cluster",
    }


def test_the_same_container_until_it_is_down(bench: Bench) -> None:
    bench.run("up", "--ifname", "pod0")
    bench.run("check")
    bench.run("down")
    assert bench.verbs == ["ADD", "CHECK", "DEL"]
    for key in ("CNI_CONTAINERID", "CNI_NETNS", "CNI_ARGS", "CNI_IFNAME"):
        assert len({call["env"][key] for call in bench.calls}) == 1
    assert bench.calls[0]["env"]["CNI_IFNAME"] == "pod0"
    assert "prevResult" not in bench.calls[0]["stdin"]
    assert [call["stdin"]["prevResult"] for call in bench.calls[1:]] == [RESULT, RESULT]
    assert bench.left == []
    bench.run("up")
    assert bench.calls[3]["env"]["CNI_CONTAINERID"] != bench.calls[0]["env"]["CNI_CONTAINERID"]


def test_down_removes_the_status_and_can_be_repeated(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("up")
    pod = Pod(Namespace("demo"), PodName("hello"), PodUid("the-uid"))
    status_file.write(bench.manifests, pod, STATUS)
    bench.run("down")
    assert not (bench.manifests / "status" / "demo").exists()
    bench.run("down")
    assert bench.verbs == ["ADD", "DEL"]
    assert "pod demo/hello was not up" in capsys.readouterr().out


def test_json(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    status_file.write(bench.manifests, Pod(Namespace("demo"), PodName("hello"), PodUid("the-uid")), STATUS)
    bench.run("up", "--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["result"] == RESULT
    assert shown["networkStatus"] == json.loads(STATUS)
    assert shown["pod"] == VIEW
    assert shown["milliseconds"] > 1
    assert shown["containerId"] == bench.calls[0]["env"]["CNI_CONTAINERID"]
    bench.run("down", "--json")
    assert json.loads(capsys.readouterr().out)["result"] == {}


def test_tables(bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    status_file.write(bench.manifests, Pod(Namespace("demo"), PodName("hello"), PodUid("the-uid")), STATUS)
    bench.run("up")
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert ["eth0", "kube-system/cluster", "10.1.0.2/24", "02:00:00:00:00:01", "1500"] in rows
    assert ["default", "10.1.0.1", "eth0"] in rows
    assert ["10.1.0.1/32", "", "eth0"] in rows
    assert "pod demo/hello is up" in out


def failing(bench: Bench, capsys: pytest.CaptureFixture[str], call: Callable[[], None]) -> str:
    with pytest.raises(SystemExit) as caught:
        call()
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_failed_add_is_taken_down_and_shown_cause_first(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"cniVersion": "1.0.0", "code": 7, "msg": "no [such] network", "details": "look there"}
    bench.answer(ADD=[1, json.dumps(error), ""])
    shown = failing(bench, capsys, lambda: bench.run("up", "--json"))
    assert shown == "no [such] network (CNI error 7)\n  look there\n"
    assert bench.verbs == ["ADD", "DEL"]
    assert bench.left == []


def test_a_failed_add_that_can_not_be_taken_down_stays_known(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    failure = [1, json.dumps({"code": 5, "msg": "disk full"}), ""]
    bench.answer(ADD=failure, DEL=failure)
    assert "taking it down again failed: disk full" in failing(bench, capsys, lambda: bench.run("up"))
    assert len(bench.left) == 2
    bench.answer()
    bench.run("down")
    assert bench.left == []


def test_a_failed_del_keeps_everything(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("up")
    before = bench.left
    capsys.readouterr()
    bench.answer(DEL=[1, json.dumps({"code": 999, "msg": "busy"}), ""])
    assert failing(bench, capsys, lambda: bench.run("down")) == "busy (CNI error 999)\n"
    assert bench.left == before


@pytest.mark.parametrize("stdout", ["", "null", "[]", "not JSON"])
def test_a_shim_without_a_result(bench: Bench, capsys: pytest.CaptureFixture[str], stdout: str) -> None:
    bench.answer(ADD=[0, stdout, ""])
    assert "has not printed a CNI result" in failing(bench, capsys, lambda: bench.run("up"))
    assert bench.left == []


def test_a_shim_that_breaks(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.answer(ADD=[2, "panic", "goroutine 1"])
    shown = failing(bench, capsys, lambda: bench.run("up"))
    assert shown.startswith("the shim ended with status 2 and printed no CNI error (CNI error 999)")
    assert "'panic' goroutine 1" in shown


def test_what_the_shim_remarks_is_shown(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("up")
    bench.answer(DEL=[0, "", "spooled"])
    bench.run("down")
    assert "spooled" in capsys.readouterr().out


def test_up_twice(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("up")
    capsys.readouterr()
    assert "pod demo/hello is up already;" in failing(bench, capsys, lambda: bench.run("up"))
    assert bench.verbs == ["ADD"]


@pytest.mark.parametrize(
    ("verb", "pod", "problem"),
    [
        ("up", "demo/other", "declares pod demo/other"),
        ("up", "demo/../x", ""),
        ("up", "../x", "can't be a pod"),
        ("down", "demo/..", "can't be a pod"),
        ("check", "demo/hello", "pod demo/hello is not up"),
    ],
)
def test_refusals(bench: Bench, capsys: pytest.CaptureFixture[str], verb: str, pod: str, problem: str) -> None:
    if not problem:
        with pytest.raises(SystemExit, match="2"):
            bench.run(verb, pod=pod)
        return
    assert problem in failing(bench, capsys, lambda: bench.run(verb, pod=pod))
    assert bench.calls == []
    assert bench.left == []


def test_a_namespace_that_can_not_be_made(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: pathlib.Path) -> None:
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr("multus_tools.ctl.namespaces.create", refuse)
    assert "unshare: Operation not permitted" in failing(bench, capsys, lambda: bench.run("up"))
    assert bench.left == []


def test_configurations_and_shims_that_are_not_there(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.config.unlink()
    assert "can't be read: No such file" in failing(bench, capsys, lambda: bench.run("up"))
    bench.config.write_text(json.dumps({"socketDir": str(bench.run_dir)}))
    bench.shim.unlink()
    assert "the shim can't be run" in failing(bench, capsys, lambda: bench.run("up"))


def test_the_state_is_private(bench: Bench) -> None:
    bench.run("up")
    path = bench.root / "state" / "demo_hello.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("{")
    with pytest.raises(SystemExit):
        bench.run("down")
    assert path.exists()


@pytest.mark.parametrize("verb", ["up", "check", "down"])
@pytest.mark.parametrize("gone", [True, False])
def test_without_a_daemon_it_says_soon_how_to_start_one(
    bench: Bench, capsys: pytest.CaptureFixture[str], verb: str, gone: bool
) -> None:
    if verb != "up":
        bench.run("up")
    capsys.readouterr()
    before, calls = bench.left, len(bench.calls)
    bench.daemon.close()
    path = bench.run_dir / "multus.sock"
    if gone:
        path.unlink()
    began = time.monotonic()
    shown = failing(bench, capsys, lambda: bench.run(verb))
    # Not what the shim waits for a daemon that restarts.
    assert time.monotonic() - began < 10
    reason = "No such file or directory" if gone else "Connection refused"
    start = f"multus-daemon run --config {bench.config} --standalone {bench.manifests}"
    assert shown == f"multusctl: no daemon listens on {path}: {reason}; start one: {start}\n"
    assert (bench.left, len(bench.calls)) == (before, calls)


def test_a_daemon_that_is_about_to_listen_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.run_dir / "multus.sock"
    monkeypatch.setattr(deadlines, "CTL_DAEMON_SECONDS", 30.0)
    path.rename(path.with_name("later"))
    threading.Timer(0.2, path.with_name("later").rename, (path,)).start()
    bench.run("up")
    assert bench.verbs == ["ADD"]


@pytest.mark.parametrize(
    ("script", "expected"), [("echo it is so", "it is so\n"), ("echo no; exit 1", ""), ("sleep 30", "")]
)
def test_only_a_program_that_succeeds_in_time_has_an_output(script: str, expected: str) -> None:
    assert offline.output_of("", ["sh", "-c", script], 5.0 if expected else 1.0) == expected
    assert offline.output_of("", ["/nonexistent"], 5.0) == ""
