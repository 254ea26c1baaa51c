"""Settings on the command line: Go's spelling, the flags of earlier daemons, what wins, what errors name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import cli, settings
from multus_daemon.settings import FLAGS

LEVELS = "Invalid enum value 'info'; known: panic, error, verbose, debug"


@pytest.fixture(autouse=True)
def nothing_in_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_CONFIG_PATH", str(tmp_path / "none.json"))


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    cli.main(["check-config", *argv])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


VALUES: dict[str, tuple[str, str, Any]] = {
    "conf-dir": ("/c", "confDir", "/c"),
    "log-level": ("DEBUG", "logLevel", "debug"),
    "metrics-port": ("9091", "metricsPort", 9091),
    "metrics-tls": ('{"certFile":"/c","keyFile":"/k"}', "metricsTLS", {"certFile": "/c", "keyFile": "/k"}),
    "multus-master-cni-file": ("10", "multusMasterCNI", "10"),
    "namespace-isolation": ("t", "namespaceIsolation", True),
    "socket-dir": ("/s", "socketDir", "/s"),
}


@pytest.mark.parametrize(("flag", "text", "key", "value"), [(flag, *rest) for flag, rest in VALUES.items()])
@pytest.mark.parametrize("form", ["--{} {}", "--{}={}", "-{} {}", "-{}={}"])
def test_every_kind_of_value_in_every_spelling(
    flag: str, text: str, key: str, value: Any, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [form[: -len(" {}")].format(flag), text] if " " in form else [form.format(flag, text)]
    assert shown(capsys, *argv)[key] == value


def test_every_flag_is_of_a_setting() -> None:
    assert set(FLAGS.values()) <= set(settings.Settings().effective())


OLD = {
    "additional-bin-dir": ("/b", "binDir"),
    "binDir": ("/b", "binDir"),
    "cni-config-dir": ("/c", "cniConfigDir"),
    "cni-version": ("1.0.0", "cniVersion"),
    "cniDir": ("/d", "cniDir"),
    "force-cni-version": ("true", "forceCNIVersion"),
    "global-namespaces": ("a,b", "globalNamespaces"),
    "multus-autoconfig-dir": ("/a", "multusAutoconfigDir"),
    "multus-conf-file": ("/f", "multusConfigFile"),
    "multus-kubeconfig-file-host": ("/k", "kubeconfig"),
    "multus-log-file": ("/l", "logFile"),
    "multus-log-level": ("error", "logLevel"),
    "multus-log-to-stderr": ("false", "logToStderr"),
    "multus-master-cni-file": ("10-x.conf", "multusMasterCNI"),
    "multus-rundir": ("/r", "socketDir"),
    "namespace-isolation": ("true", "namespaceIsolation"),
    "override-network-name": ("true", "overrideNetworkName"),
    "readiness-indicator-file": ("/i", "readinessindicatorfile"),
}


@pytest.mark.parametrize(("flag", "text", "key"), [(flag, *pair) for flag, pair in OLD.items()])
def test_flags_of_the_first_thick_release(flag: str, text: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(text) if text in ("true", "false") else text
    assert shown(capsys, f"-{flag}={text}")[key] == value
    assert settings.Settings().effective()[key] != value


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True", "0", "f", "F", "FALSE", "false", "False"])
def test_booleans_as_go_reads_them(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, f"--namespace-isolation={text}")["namespaceIsolation"] == (text[0] in "1tT")


def test_a_boolean_without_a_value_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "-namespace-isolation", "--override-network-name", "--binDir", "/b")
    assert (found["namespaceIsolation"], found["overrideNetworkName"], found["binDir"]) == (True, True, "/b")


def write(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "daemon-config.json"
    path.write_text(json.dumps(keys))
    return str(path)


def test_a_flag_wins_over_the_file_over_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, BINDIR="/file", cniDir="/file")
    found = shown(capsys, "-config", path, "--binDir=/flag")
    assert (found["binDir"], found["cniDir"], found["confDir"]) == ("/flag", "/file", "/etc/cni/multus/net.d")


def test_the_last_of_several_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--binDir=/a", "--additional-bin-dir", "/b")["binDir"] == "/b"


def test_flags_reach_requests_as_keys_of_the_file_do(tmp_path: Path) -> None:
    found = settings.load(Path(write(tmp_path, binDir="/b")), {"clusterNetwork": ("--cluster-network", "net")})
    assert found.overlay == {"binDir": "/b", "clusterNetwork": "net"}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["-metrics-port", "x"], "--metrics-port: a whole number or null is needed, not a string"),
        (["--metrics-port=0"], "--metrics-port: a whole number >= 1 is needed"),
        (["--multus-log-level=info"], f"--multus-log-level: {LEVELS}"),
        (["--log-level=info"], f"--log-level: {LEVELS}"),
        (["--namespace-isolation=yes"], "--namespace-isolation: a boolean is needed, not a string"),
        (["--per-node-certificate={"], "--per-node-certificate: an object or null is needed, not a string"),
        (["--multus-rundir="], "--multus-rundir: a string of length >= 1 is needed"),
    ],
)
def test_errors_name_the_flag(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check-config", *argv])
    assert caught.value.code == 1
    assert capsys.readouterr().err.splitlines()[1:] == [f"  {problem}"]


@pytest.mark.parametrize("argv", [["--bin"], ["--bin-dirs=/x"], ["--name=x"], ["--enable-pprof"], ["stray"]])
def test_what_is_no_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check-config", *argv])
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "check-config"])
def test_help_explains_every_flag_and_names_its_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag, key in FLAGS.items():
        # Python 3.13 and newer name the argument once, behind the last of the names.
        assert re.search(rf"--{flag} (TEXT|JSON|\[BOOL\]) [^(]*[.;] \(the key {key}\)", text), flag
    assert "example: multus-daemon " in text


def test_the_approver_takes_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["cert-approver", "-h"])
    text = capsys.readouterr().out
    assert "--kubeconfig" in text
    assert "--multus-log-level" in text
    assert "--bin-dir" not in text
