"""`multus-daemon`: its commands, its exit status, and what it says when it can't start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("command", ["run", "cert-approver"])
def test_without_a_cluster_it_says_what_to_set(command: str, tmp_path: Path) -> None:
    done = run(command, "--config", config(tmp_path))
    assert done.returncode == 3
    assert "kubeconfig" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


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
