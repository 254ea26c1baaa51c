"""Settings on the command line: derived names, the old ones, Go's spelling, what wins, what errors name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from multus_daemon import cli, flags, settings

LEVELS = "Invalid enum value 'info'; known: panic, error, verbose, debug"


@pytest.fixture(autouse=True)
def nothing_in_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_CONFIG_PATH", str(tmp_path / "none.json"))


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    cli.main(["check-config", *argv])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("multusAutoconfigDir", "multus-autoconfig-dir"),
        ("multusMasterCNI", "multus-master-cni"),
        ("forceCNIVersion", "force-cni-version"),
        ("auxiliaryCNIChainName", "auxiliary-cni-chain-name"),
        ("logToStderr", "log-to-stderr"),
        ("kubeconfig", "kubeconfig"),
        ("cniDir", "cni-dir"),
    ],
)
def test_names_are_derived(key: str, flag: str) -> None:
    assert flags.flag_of(key) == flag
    assert flag in flags.names()


VALUES: dict[str, tuple[str, Any]] = {
    "builtin-plugins": ("off", "off"),
    "builtin-plugins-except": ("bridge, host-local", ["bridge", "host-local"]),
    "capabilities": ('{"mac":true}', {"mac": True}),
    "default-networks": ("a, b,", ["a", "b"]),
    "delegate-timeout-seconds": ("1.5", 1.5),
    "delegates": ('[{"name":"a","type":"x"}]', [{"name": "a", "type": "x"}]),
    "log-level": ("DEBUG", "debug"),
    "log-options": ('{"maxsize":1}', {"maxSize": 1}),
    "metrics-port": ("9091", 9091),
    "multus-master-cni": ("10", "10"),
    "namespace-isolation": ("t", True),
    "runtime-config": ('{"mac":"x"}', {"mac": "x"}),
    "system-namespaces": ('["a,b"]', ["a,b"]),
}


@pytest.mark.parametrize(("flag", "text", "value"), [(flag, *pair) for flag, pair in VALUES.items()])
@pytest.mark.parametrize("form", ["--{} {}", "--{}={}", "-{} {}", "-{}={}"])
def test_every_kind_of_value_in_every_spelling(
    flag: str, text: str, value: Any, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [form[: -len(" {}")].format(flag), text] if " " in form else [form.format(flag, text)]
    [key] = [key for key in settings.Settings().effective() if flags.flag_of(key) == flag]
    assert shown(capsys, *argv)[key] == value


def test_every_setting_has_a_flag_of_its_own() -> None:
    keys = list(settings.Settings().effective())
    found = {"readiness-indicator-file" if key == "readinessindicatorfile" else flags.flag_of(key) for key in keys}
    assert len(found) == len(keys)
    assert found <= flags.names()


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
    found = shown(capsys, "-namespace-isolation", "--override-network-name", "--bin-dir", "/b")
    assert (found["namespaceIsolation"], found["overrideNetworkName"], found["binDir"]) == (True, True, "/b")


def write(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "daemon-config.json"
    path.write_text(json.dumps(keys))
    return str(path)


def test_a_flag_wins_over_the_file_over_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, BINDIR="/file", cniDir="/file")
    found = shown(capsys, "-config", path, "--bin-dir=/flag")
    assert (found["binDir"], found["cniDir"], found["confDir"]) == ("/flag", "/file", "/etc/cni/multus/net.d")


def test_the_last_of_several_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--binDir=/a", "--additional-bin-dir", "/b")["binDir"] == "/b"


def test_flags_reach_requests_as_keys_of_the_file_do(tmp_path: Path) -> None:
    found = settings.load(Path(write(tmp_path, binDir="/b")), {"clusterNetwork": ("--cluster-network", "net")})
    assert found.overlay == {"binDir": "/b", "clusterNetwork": "net"}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["-metrics-port", "x"], "--metrics-port: Expected `int | null`, got `str`"),
        (["--metrics-port=0"], "--metrics-port: Expected `int` >= 1"),
        (["--multus-log-level=info"], f"--multus-log-level: {LEVELS}"),
        (["--log-level=info"], f"--log-level: {LEVELS}"),
        (
            ["--builtin-plugins-except=ptp,ovs"],
            "--builtin-plugins-except: Invalid enum value 'ovs' - at `$[1]`; "
            f"known: {', '.join(get_args(settings.BuiltinPlugin))}",
        ),
        (["--namespace-isolation=yes"], "--namespace-isolation: Expected `bool`, got `str`"),
        (["--delegates={"], "--delegates: Expected `array`, got `str`"),
        (["--capabilities", '{"a":1}'], "--capabilities: Expected `bool`, got `int` - at `$[...]`"),
        (["--multus-rundir="], "--multus-rundir: Expected `str` of length >= 1"),
    ],
)
def test_errors_name_the_flag(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check-config", *argv])
    assert caught.value.code == 1
    assert capsys.readouterr().err.splitlines()[1:] == [f"  {problem}"]


def test_errors_of_file_and_flags_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, metricsPort="x", binDir=1)
    with pytest.raises(SystemExit):
        cli.main(["check-config", "--config", path, "--metrics-port=1", "--log-level=x"])
    assert [line.partition(":")[0].strip() for line in capsys.readouterr().err.splitlines()[1:]] == [
        "binDir",
        "--log-level",
    ]


@pytest.mark.parametrize("argv", [["--bin"], ["--bin-dirs=/x"], ["--name=x"], ["--enable-pprof"], ["stray"]])
def test_what_is_no_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check-config", *argv])
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "check-config"])
def test_help_lists_every_setting_with_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in settings.Settings().effective():
        assert f" {key}: " in text, key
    for name in flags.names():
        # Python 3.13 and newer name the argument once, behind the last of the names.
        assert re.search(rf"--{name}[ ,]", text), name
    assert "multusMasterCNI: Name of the primary network's file in `multusAutoconfigDir`." in text
    assert "primary: The node's CNI configuration: how it is made" in text
    assert ": --" not in text, "a setting without its text"


def test_the_approver_takes_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["cert-approver", "-h"])
    text = capsys.readouterr().out
    assert "--kubeconfig" in text
    assert "--multus-log-level" in text
    assert "--bin-dir" not in text
