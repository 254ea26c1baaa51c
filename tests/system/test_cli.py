"""`multus-daemon`: its commands, its exit status, and what it says when it can't start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import __version__, cli


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")} | (environ or {})
    command = [sys.executable, "-m", "multus_daemon.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=environ, check=False)


def config(tmp_path: Path, **keys: object) -> str:
    path = tmp_path / "daemon-config.json"
    path.write_text(json.dumps({"socketDir": str(tmp_path / "run"), "cniDir": str(tmp_path / "cni"), **keys}))
    return str(path)


@pytest.mark.parametrize("argv", [["version"], ["--version"], ["-version"]])
def test_version_in_every_spelling(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(argv)
    assert capsys.readouterr().out == f"multus-daemon: version {__version__}\n"


def test_check_config_prints_every_setting_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["check-config", "--config", config(tmp_path, metricsPort=9091, retryDeleteOnError=True)])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["metricsPort"] == 9091
    assert shown.err.startswith("warning: retryDeleteOnError: no effect")


@pytest.mark.parametrize("command", [["check-config"], ["run"], []])
def test_every_problem_is_told_at_once(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "-config", config(tmp_path, metricsPort="x", clusterNetwrk="y")])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "2 problem(s)" in said
    assert "metricsPort" in said
    assert "is clusterNetwork meant?" in said


def test_a_missing_configuration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--config=/nowhere/daemon-config.json"])
    assert caught.value.code == 1
    assert "/nowhere/daemon-config.json" in capsys.readouterr().err


def test_a_missing_directory_of_manifests_is_named(tmp_path: Path) -> None:
    done = run("run", "--config", config(tmp_path), "--standalone", str(tmp_path / "nope"))
    assert (done.returncode, done.stderr) == (3, f"multus-daemon: --standalone {tmp_path}/nope: no such directory\n")


@pytest.mark.parametrize("to_stderr", [True, False])
def test_a_failed_start_is_a_line_of_the_format(tmp_path: Path, to_stderr: bool) -> None:
    settings = config(tmp_path, logFormat="json", logToStderr=to_stderr, logFile=f"{tmp_path}/log")
    done = run("run", "--config", settings, "--standalone", str(tmp_path / "nope"))
    problem = f"--standalone {tmp_path}/nope: no such directory"
    assert done.returncode == 3
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (last["level"], last["msg"]) == ("panic", problem)
    if to_stderr:
        assert [json.loads(line) for line in done.stderr.splitlines()][-1] == last
    else:
        assert done.stderr == f"multus-daemon: {problem}\n"


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_a_fault_that_ends_the_daemon_is_one_line_with_its_traceback(tmp_path: Path, line_format: str) -> None:
    fault = "from multus_daemon import cli, settings; import sys\n"
    fault += f"given = settings.from_object({{'logFormat': '{line_format}'}}, 'test')\n"
    fault += "sys.exit(cli._until_ended(given, lambda: 1 / 0))"
    done = subprocess.run([sys.executable, "-c", fault], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    if line_format == "json":
        [line] = map(json.loads, done.stderr.splitlines())
        assert (line["level"], line["msg"]) == ("panic", "ZeroDivisionError: division by zero")
        assert line["traceback"].startswith("Traceback (most recent call last):")
    else:
        first, *rest = done.stderr.splitlines()
        assert first.endswith("[panic] ZeroDivisionError: division by zero")
        assert rest[0] == "    Traceback (most recent call last):"
        assert all(item.startswith("    ") for item in rest)


@pytest.mark.conformance("pods-18", "pods-33")
@pytest.mark.parametrize("command", ["run", "cert-approver"])
def test_without_a_cluster_it_says_what_to_set(command: str, tmp_path: Path) -> None:
    done = run(command, "--config", config(tmp_path))
    assert done.returncode == 3
    assert "kubeconfig" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.conformance("pods-17")
@pytest.mark.parametrize("command", ["run", "cert-approver"])
def test_a_kubeconfig_that_is_not_there_is_named(command: str, tmp_path: Path) -> None:
    done = run(command, "--config", config(tmp_path), "--kubeconfig", "/nowhere/kubeconfig")
    assert done.returncode == 3
    assert "/nowhere/kubeconfig" in done.stderr


def test_a_certificate_needs_to_know_where_and_for_whom(tmp_path: Path) -> None:
    done = run("run", "--config", config(tmp_path, perNodeCertificate={"enabled": True}))
    assert done.returncode == 3
    assert "perNodeCertificate.bootstrapKubeconfig" in done.stderr


def test_a_socket_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    done = run("run", "--config", config(tmp_path), "--standalone", str(tmp_path))
    assert done.returncode == 3
    assert f"{tmp_path}/run" in done.stderr


def test_install_puts_the_shim_there_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("installed", "was there already"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["install", "--bin-dir", str(tmp_path)])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"{tmp_path}/multus-shim: {said}, version {__version__}\n"
    assert os.access(tmp_path / "multus-shim", os.X_OK)


@pytest.fixture
def upstream_program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run our program under a name of upstream's image, where it is a link to it."""

    def run_as(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        link = tmp_path / name
        link.symlink_to(Path(sysconfig.get_path("scripts"), "multus-daemon"))
        return subprocess.run(
            [link, *arguments], capture_output=True, text=True, timeout=60, check=False, env=os.environ | env
        )

    return run_as


@pytest.mark.parametrize("flags", [("-d", "-t"), ("--dest-dir", "--type")])
def test_install_multus(
    upstream_program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, flags: tuple[str, str]
) -> None:
    target = tmp_path / "bin"
    target.mkdir()
    done = upstream_program("install_multus", flags[0], str(target), flags[1], "thick")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(
        f"{target}/{name}: installed, version {__version__}\n" for name in ("multus-shim", "passthru")
    )
    assert (target / "passthru").read_bytes() == (target / "multus-shim").read_bytes()
    asked = subprocess.run([target / "passthru"], env={"CNI_COMMAND": "VERSION"}, capture_output=True, check=False)
    assert asked.returncode == 0


def test_install_multus_has_no_thin_plugin(
    upstream_program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = upstream_program("install_multus", "-d", str(tmp_path), "-t", "thin")
    assert done.returncode == 2
    assert "thick" in done.stderr
    assert not (tmp_path / "multus-shim").exists()


def test_install_takes_the_place_of_a_thin_plugin(tmp_path: Path) -> None:
    (tmp_path / "multus").write_bytes(b"upstream's")
    for state in ("installed", "was there already"):
        done = run("install", "--bin-dir", str(tmp_path))
        assert done.stdout.splitlines()[-1] == f"{tmp_path}/multus: {state}, version {__version__}"
    assert (tmp_path / "multus").read_bytes() == (tmp_path / "multus-shim").read_bytes()
    assert not (tmp_path / "passthru").exists()


def test_install_takes_the_place_of_a_thin_plugin_that_is_gone(tmp_path: Path) -> None:
    assert run("install", "--bin-dir", str(tmp_path), "--thin").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["multus", "multus-shim"]


def test_cert_approver_by_its_name(upstream_program: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = upstream_program("cert-approver", KUBERNETES_SERVICE_HOST="")
    assert done.returncode == 3
    assert "no service account" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "MULTUS_NODE_NAME"),
        (("--cert-duration", "soon"), "certDuration"),
    ],
)
def test_kubeconfig_generator_says_what_it_needs(
    upstream_program: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...], named: str
) -> None:
    env = {"MULTUS_NODE_NAME": "node-a"} if arguments else {"MULTUS_NODE_NAME": ""}
    done = upstream_program("kubeconfig_generator", *arguments, **env)
    assert done.returncode == 3
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_install_reads_no_configuration(tmp_path: Path) -> None:
    done = run("install", "--bin-dir", str(tmp_path), "--shim", "/usr/bin/false")
    assert done.returncode == 3
    assert done.stderr.startswith("multus-daemon install: ")
    assert "does not run on this node" in done.stderr
    assert not list(tmp_path.iterdir())


def test_uninstall_takes_its_places_from_the_configuration_and_the_flags(tmp_path: Path) -> None:
    for name in ("net.d", "bin", "cni"):
        (tmp_path / name).mkdir()
    (tmp_path / "net.d" / "00-multus.conf").write_text('{"name": "multus-cni-network", "type": "multus-shim"}')
    (tmp_path / "net.d" / "10-cluster.conf").write_text('{"name": "cluster", "type": "ptp"}')
    (tmp_path / "bin" / "multus-shim").write_text("")
    command = ["uninstall", "--config", config(tmp_path), "--bin-dir", f"{tmp_path}/bin"]
    command += [f"--cni-config-dir={tmp_path}/net.d", "--purge"]
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"removed {tmp_path}/net.d/00-multus.conf",
        f"removed {tmp_path}/bin/multus-shim",
        f"removed {tmp_path}/cni",
    ]
    assert run(*command).stdout == "there was nothing to remove\n"


def test_uninstall_does_without_a_configuration(tmp_path: Path) -> None:
    places = [f"--{name}={tmp_path}" for name in ("bin-dir", "cni-config-dir", "socket-dir", "cni-dir")]
    done = run("uninstall", *places)
    assert (done.returncode, done.stdout, done.stderr) == (0, "there was nothing to remove\n", "")


def test_uninstall_is_refused_beside_a_daemon_that_runs(tmp_path: Path) -> None:
    places = [f"--{name}={tmp_path}" for name in ("bin-dir", "cni-config-dir", "socket-dir", "cni-dir")]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "multus.sock"))
        listener.listen()
        done = run("uninstall", *places, "--force")
    assert done.returncode == 3
    assert done.stderr.startswith("multus-daemon uninstall: the daemon of this node still runs")
    assert (tmp_path / "multus.sock").exists()
    # The socket of one that was killed is no daemon.
    assert run("uninstall", *places).stdout == f"removed {tmp_path}/multus.sock\n"


def test_flags_that_uninstall_has_no_use_for_are_unknown() -> None:
    done = run("uninstall", "--kubeconfig", "x")
    assert done.returncode == 2
    assert "unrecognized arguments: --kubeconfig x" in done.stderr


# --- the first minutes -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`multus-daemon run` until the end of the block, its log beside its standard output."""
    command = [sys.executable, "-m", "multus_daemon.cli", "run", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """The first line on its standard output, or how it has ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout.readline() or process.stderr.read()


def test_a_daemon_that_is_ready_says_where(tmp_path: Path) -> None:
    with running("--config", config(tmp_path), "--standalone", str(tmp_path)) as process:
        assert said(process) == f"multus-daemon: ready, {tmp_path}/run/multus.sock\n"


def test_kubeconfig_generator_names_a_file_that_can_not_be_removed(tmp_path: Path) -> None:
    places = ("--kubeconfig", str(tmp_path), "--bootstrap-config", str(tmp_path), "--certdir", str(tmp_path))
    environ = {**os.environ, "MULTUS_NODE_NAME": "node-a"}
    command = [sys.executable, "-m", "multus_daemon.cli", "kubeconfig-generator", *places]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.terminate()
        rest = process.stderr.read()
        assert (process.wait(20), "Traceback" in rest) == (3, False)
    assert re.fullmatch(f"multus-daemon kubeconfig-generator: .*{tmp_path}.*", rest.splitlines()[-1])


def test_a_crash_tells_where_it_was(tmp_path: Path) -> None:
    with running("--config", config(tmp_path), "--standalone", str(tmp_path)) as process:
        assert said(process).startswith("multus-daemon: ready")
        # The thread that says so ends now, and has no Python frame then.
        time.sleep(0.2)
        process.send_signal(signal.SIGSEGV)
        _, told = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault\n" in told
    assert "multus_daemon/daemon.py" in told


@pytest.mark.parametrize("fault", ["closed", "full"])
def test_a_standard_output_that_nobody_reads_stops_nothing(tmp_path: Path, fault: str) -> None:
    read_end, write_end = os.pipe()
    if fault == "closed":
        os.close(read_end)
    else:
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b"x" * 4096)
        os.set_blocking(write_end, True)
    command = [sys.executable, "-m", "multus_daemon.cli", "run", "--config", config(tmp_path)]
    process = subprocess.Popen([*command, "--standalone", str(tmp_path)], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    try:
        assert process.stderr is not None
        assert any(line.endswith(b" ready\n") for line in process.stderr)
        time.sleep(0.5)
        process.terminate()
        # Not until somebody reads.
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
        if fault == "full":
            os.close(read_end)


# The interpreter may lie where nobody else can reach it: it is left only when all is loaded.
AS_A_USER = """
import concurrent.futures.thread, ctypes, os, sys
from multus_daemon import cli, daemon
from multus_daemon.cluster.standalone import store
os.setgroups([]), os.setgid(65534), os.setuid(65534)
# As after an exec: else /proc/self is not this user's (prctl(2), PR_SET_DUMPABLE).
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if sys.argv[1] == "root of a user namespace":
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    with open("/proc/self/uid_map", "w") as uid_map:
        uid_map.write("0 65534 1")
    assert os.geteuid() == 0
cli.main(["run", "--standalone", sys.argv[2]])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user: run pytest as root")
@pytest.mark.parametrize("who", ["user", "root of a user namespace"])
def test_standalone_as_an_ordinary_user_is_in_the_users_runtime_directory(who: str) -> None:
    # Not tmp_path: its parents let nobody else in.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        runtime = Path(name) / "runtime"
        runtime.mkdir(mode=0o700)
        os.chown(runtime, 65534, 65534)
        command = [sys.executable, "-c", AS_A_USER, who, name]
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        try:
            assert said(process) == f"multus-daemon: ready, {runtime}/multus/multus.sock\n"
        finally:
            process.kill()
            process.communicate()
        assert (runtime / "multus" / "cni").is_dir()
