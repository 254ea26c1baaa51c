"""`multusctl validate`: exit status, formats, where files come from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_tools import ctl
from multus_tools.validate import known

GOOD = {"cniVersion": "1.0.0", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}


def network(config: Any, name: str = "blue") -> str:
    text = config if isinstance(config, str) else json.dumps(config)
    metadata = {"name": name}
    kind = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}
    return json.dumps({**kind, "metadata": metadata, "spec": {"config": text}})


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]):
    """Runs the command; its exit status."""

    def run(*words: str | Path) -> int:
        try:
            ctl.main(["validate", *map(str, words)])
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    return run


@pytest.mark.parametrize(
    ("config", "plain", "strict"), [(GOOD, 0, 0), ({**GOOD, "type": "ptpp"}, 0, 1), ({**GOOD, "ipam": {}}, 1, 1)]
)
def test_exit_status(status, tmp_path: Path, config: Any, plain: int, strict: int) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(network(config))
    assert (status(path), status(path, "--strict")) == (plain, strict)


def test_the_json_object(status, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "a.yaml", tmp_path / "values.yaml"
    path.write_text(network({**GOOD, "mtuu": 9000}))
    other.write_text("replicas: 2\n")
    assert status(path, other, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    column = path.read_text().index('\\"mtuu') + 2
    assert found == {
        "schema": "multusctl.validate/v1",
        "objects": 1,
        "errors": 0,
        "warnings": 1,
        "findings": [
            {
                "file": str(path),
                "line": 1,
                "column": column - 1,
                "severity": "warning",
                "check": "plugin-key",
                "subject": "NetworkAttachmentDefinition default/blue",
                "key": "mtuu",
                "problem": "unknown key 'mtuu' of plugin ptp",
                "advice": "is mtu meant?",
            }
        ],
        "passedOver": [{"file": str(other), "why": "nothing of Multus' is in it"}],
    }


def test_annotations_of_a_workflow_are_one_line_each(
    status, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a,b:c.yaml"
    path.write_text(network({**GOOD, "%\n::error::": 1}))
    assert status(path, "--format", "github") == 0
    out = capsys.readouterr().out
    name = str(path).replace(":", "%3A").replace(",", "%2C")
    assert out.startswith(f"::warning file={name},line=1,col=")
    assert out.count("\n") == 1
    assert out.count("::error") == out.count("n::error::")
    assert "%25" in out


def test_text_shows_the_line_and_steers_no_terminal(status, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.conf"
    path.write_text('{"cniVersion": "1.0.0",\n "name": "a",\n "type": "ptp\x7f", "\u202ex": 1,\n "ipam": {}}')
    assert status(path) == 0
    out = capsys.readouterr().out
    assert "\x7f" not in out
    assert "\u202e" not in out
    shown = next(line for line in out.splitlines() if line.startswith(f"{path}:3:"))
    assert out.splitlines()[out.splitlines().index(shown) + 1].startswith('  |  "type": "ptp')


def test_standard_input(status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(network("{").encode())))
    assert status("-") == 1
    assert capsys.readouterr().out.startswith("standard input:1:")


def test_a_file_that_is_not_there(status, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(tmp_path / "none.yaml") == 1
    assert "none.yaml can't be read: No such file" in capsys.readouterr().err


def test_the_files_of_a_directory(status, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "below").mkdir()
    for name in ("below/a.yaml", "b.json", "c.txt"):
        (tmp_path / name).write_text(network("{"))
    assert status(tmp_path) == 1
    out = capsys.readouterr().out
    assert (f"{tmp_path}/below/a.yaml:1:" in out, f"{tmp_path}/b.json:1:" in out, "c.txt" in out) == (True, True, False)


def test_plugins_that_are_not_on_the_node(status, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, bin_dir = tmp_path / "a.yaml", tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "vlan").write_text("")
    (bin_dir / "vlan").chmod(0o755)
    chain = [
        {"type": "vlan", "master": "eth0", "ipam": {"type": "whereaboutz"}},
        {"type": "ptp", "mtuu": 1, "ipam": {"type": "static"}},
    ]
    path.write_text(network({"cniVersion": "1.0.0", "plugins": chain}))
    assert status(path) == 0
    capsys.readouterr()
    assert status(path, "--bin-dir", bin_dir, "--json") == 1
    found = [(item["key"], item["check"], item["severity"]) for item in json.loads(capsys.readouterr().out)["findings"]]
    # Without a binary, what the built-in does not know fails the ADD.
    assert found == [
        ("plugins[0].ipam.type", "plugin-missing", "error"),
        ("plugins[1].mtuu", "plugin-key", "error"),
    ]


def test_isolation_by_a_configuration_that_is_named(status, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    annotations = {"k8s.v1.cni.cncf.io/networks": "tenant/blue"}
    pod.write_text(
        json.dumps({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a", "annotations": annotations}})
    )
    config = tmp_path / "daemon-config.json"
    config.write_text('{"namespaceIsolation": true}')
    assert status(pod) == 0
    assert status(pod, "--config", config) == 1


def test_of_many_files_a_few_are_named(status, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(9):
        (tmp_path / f"{number}.yaml").write_text("a: 1\n")
    assert status(*sorted(tmp_path.iterdir())) == 0
    assert "4 more files" in capsys.readouterr().err


@pytest.mark.parametrize("directory", ["bin", "./bin", "../work/bin"])
def test_a_relative_directory_of_plugins(
    status, tmp_path: Path, directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    (work / "bin").mkdir(parents=True)
    (work / "bin" / "fabric").write_text("")
    (work / "bin" / "fabric").chmod(0o755)
    (work / "a.yaml").write_text(network({**GOOD, "type": "fabric"}))
    monkeypatch.chdir(work)
    assert status("a.yaml", "--bin-dir", directory) == 0, capsys.readouterr().out
    (work / "bin" / "fabric").unlink()
    assert status("a.yaml", "--bin-dir", directory) == 1


@pytest.mark.parametrize("plugin", sorted(known.TYPES - {*PLUGINS}))
def test_a_plugin_that_is_well_known_is_meant(
    status, tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(network({"cniVersion": "1.0.0", "type": plugin}))
    status(path)
    status(path, "--bin-dir", tmp_path)
    assert "meant?" not in capsys.readouterr().out


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_the_output_of_other_commands(status, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(network(GOOD))
    assert status(path, "-o", output) == 0
    assert yaml.safe_load(capsys.readouterr().out)["schema"] == "multusctl.validate/v1"
