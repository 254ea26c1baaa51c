"""A node's archive has what there is: a part that fails, hangs or comes too late is named."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multus_daemon.settings import Settings, from_object
from multus_tools import bundle_file, deadlines
from multus_tools.bundle_file import Archive, Unpacked
from multus_tools.ctl import bundle as of_node
from multus_tools.ctl import offline
from multus_tools.ctl.socket_client import Client


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a node that has nothing, not even a runtime, but time."""
    monkeypatch.setattr(of_node, "_RUNTIMES", ())
    monkeypatch.setattr(deadlines, "CTL_BUNDLE_SECONDS", 60.0)
    names = ("socketDir", "cniDir", "confDir", "cniConfigDir", "binDir")
    (tmp_path / "binDir").mkdir()
    return from_object({name: str(tmp_path / name) for name in names}, "test")


def collected(settings: Settings, on_part: Callable[[str], None] = lambda _: None) -> Unpacked:
    """The archive of the node."""
    output = io.BytesIO()
    archive = Archive(output, "top", most=bundle_file.NODE_MAX_BYTES)
    client = Client(Path(settings.socket.directory) / "multus.sock")
    of_node.Bundle(archive, settings, "", None, client, (), on_part).collect()
    return bundle_file.unpack(output.getvalue())


def missing(found: Unpacked) -> dict[str, str]:
    """The missing files, and why."""
    return {item["name"]: item["problem"] for item in found.index["missing"]}


def test_a_node_that_has_nothing(settings: Settings) -> None:
    parts: list[str] = []
    found = collected(settings, parts.append)
    assert missing(found) == {}
    assert found.known.daemon.startswith("no daemon")
    assert {"settings.json", "versions.json", "records.json", "answers/status.json", "answers/doctor.json"} <= set(
        found.files
    )
    assert parts[0] == "settings.json"


def test_after_its_time_everything_is_missing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CTL_BUNDLE_SECONDS", 0.0)
    found = collected(settings)
    assert found.files == {}
    assert set(missing(found).values()) == {"the time was over"}


def test_a_part_that_hangs_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(_: Settings) -> dict[str, Any]:
        released.wait(30)
        return {}

    monkeypatch.setattr(of_node, "inventory", SimpleNamespace(plugins=hang))
    found = collected(settings)
    released.set()
    assert missing(found) == {"answers/plugins.json": "no answer within 2.0 s"}
    assert "answers/doctor.json" in found.files


def test_a_part_that_fails_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Settings) -> dict[str, Any]:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(of_node, "inventory", SimpleNamespace(plugins=fail))
    assert missing(collected(settings)) == {"answers/plugins.json": "LookupError: a fault of ours"}


def test_programs_that_hang_do_not_take_the_others_with_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_node, "_RUNTIMES", (("sleep", "30"), ("sleep", "31"), ("echo", "crio 1.34")))
    run = offline.output_of

    def output_of(root: str, words: Sequence[str], seconds: float) -> str:
        # On a busy machine a good program may take long, too.
        return run(root, words, 0.3 if words[0] == "sleep" else 30)

    monkeypatch.setattr(offline, "output_of", output_of)
    found = collected(settings)
    assert missing(found) == {}
    assert json.loads(found.files["versions.json"])["runtimes"] == ["crio 1.34"]


def test_only_the_end_of_a_log(tmp_path: Path, settings: Settings) -> None:
    log = tmp_path / "daemon.log"
    log.write_text("".join(f"line {number}\n" for number in range(200_000)))
    with_log = from_object({**settings.given, "logFile": str(log)}, "test")
    text = collected(with_log).files["log.txt"].decode()
    assert len(text) <= of_node.LOG_BYTES
    assert text.startswith("line ")
    assert text.endswith("line 199999\n")
    log.unlink()
    os.mkfifo(log)
    assert "not a regular file" in missing(collected(with_log))["log.txt"]


def test_configurations_are_taken_and_other_files_listed(settings: Settings) -> None:
    directory = Path(settings.primary.config_dir)
    (directory / "multus.d").mkdir(parents=True)
    (directory / "10-a.conflist").write_text('{"name": "a", "plugins": []}')
    (directory / "multus.d" / "daemon-config.json").write_text('{"logLevel": "debug"}')
    (directory / "multus.d" / "multus.kubeconfig").write_text("token: x")
    (directory / "20-b.conf").symlink_to("nowhere")
    found = collected(settings)
    taken = {name for name in found.files if name.startswith("cni/cniConfigDir/")}
    assert taken == {"cni/cniConfigDir/10-a.conflist", "cni/cniConfigDir/multus.d/daemon-config.json"}
    listed = found.files["cni/cniConfigDir.json"].decode()
    assert "multus.d/multus.kubeconfig" in listed
    assert '"target": "nowhere"' in listed


def test_many_records_do_not_take_the_memory_of_the_daemon(settings: Settings, tmp_path: Path) -> None:
    directory = Path(settings.paths.cni_dir) / "attachments"
    directory.mkdir(parents=True)
    for number in range(12):
        (directory / f"c{number}.json").write_text('{"x": "%s"}' % ("a" * 900_000))
    found = collected(settings)
    taken = [name for name in found.files if name.startswith("records/")]
    assert len(taken) == 9
    assert missing(found)["records"] == "3 files are left out: too many, or too large together"
