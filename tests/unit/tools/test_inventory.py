"""The plugins of a node, and the implementation that serves each."""

import json
import struct

import pytest

from multus_daemon import settings
from multus_tools import inventory
from tests.unit.plugins.test_find import go_program


def elf(machine):
    return b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", machine) + bytes(44)


@pytest.fixture
def directory(tmp_path):
    """The node's plugins."""
    made = tmp_path / "opt" / "cni" / "bin"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def found(tmp_path, directory):
    """Return a function that writes files there and lists the plugins with the given settings."""

    def look(files, **changes):
        for name, data in files.items():
            (directory / name).write_bytes(data)
            (directory / name).chmod(0o755)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"chrootDir": str(tmp_path), "binDir": "/opt/cni/bin", **changes}))
        answer = inventory.plugins(settings.load(path))
        assert answer["schema"] == "multusctl.plugins/v1"
        return {item["type"]: (item["servedBy"], item["problem"]) for item in answer["plugins"]}

    return look


def test_built_in_ones_and_binaries(found):
    answer = found({"calico": b"#!/bin/sh\n", "bridge": b"#!/bin/sh\n", "multus-shim": b"#!/bin/sh\n"})
    assert answer["bridge"] == ("built-in", "")
    assert answer["host-local"] == ("built-in", "")
    assert answer["calico"] == ("/opt/cni/bin/calico", "")
    assert "multus-shim" not in answer


@pytest.mark.parametrize(
    ("changes", "bridge", "ptp"),
    [
        ({"builtinPlugins": "prefer"}, "built-in", "built-in"),
        ({"builtinPlugins": "fallback"}, "/opt/cni/bin/bridge", "built-in"),
        ({"builtinPlugins": "off"}, "/opt/cni/bin/bridge", None),
        ({"builtinPluginsExcept": ["bridge", "ptp"]}, "/opt/cni/bin/bridge", None),
    ],
)
def test_who_serves_by_the_settings(found, changes, bridge, ptp):
    answer = found({"bridge": b"#!/bin/sh\n"}, **changes)
    assert answer["bridge"] == (bridge, "")
    assert answer.get("ptp", (None, ""))[0] == ptp


@pytest.mark.parametrize(
    ("mode", "version", "server"),
    [
        ("prefer", "v99.0.0", "/opt/cni/bin/bridge"),
        ("prefer", "v1.0.0", "built-in"),
        ("fallback", "v99.0.0", "/opt/cni/bin/bridge"),
    ],
)
def test_a_binary_that_is_newer_than_the_built_in(tmp_path, directory, found, mode, version, server):
    package = "github.com/containernetworking/plugins"
    go_program(directory / "bridge", f"{package}/plugins/main/bridge", more=f"mod\t{package}\t{version}\n")
    (directory / "bridge").chmod(0o755)
    assert found({}, builtinPlugins=mode)["bridge"] == (server, "")
    answer = inventory.plugins(settings.load(tmp_path / "config.json"))
    (why,) = [item["newer"] for item in answer["plugins"] if item["type"] == "bridge"]
    assert why.startswith("v99.0.0 is newer than v1." if (mode, version) == ("prefer", "v99.0.0") else "")
    assert bool(why) is ((mode, version) == ("prefer", "v99.0.0"))


def test_what_can_not_be_run(found, directory, monkeypatch):
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"machine": "x86_64"}))
    found({"plain": b"text"})
    (directory / "plain").chmod(0o644)
    (directory / "folder").mkdir()
    (directory / "nowhere").symlink_to("/none")
    (directory / ".hidden.tmp").write_bytes(b"")
    # Links are resolved in the host's file system.
    (directory / "linked").symlink_to("/opt/cni/bin/alien")
    answer = found({"alien": elf(183), "own": elf(62)})
    assert answer["alien"][1] == "is a program for aarch64, and this node is x86_64"
    assert answer["linked"] == ("/opt/cni/bin/linked", answer["alien"][1])
    assert answer["own"] == ("/opt/cni/bin/own", "")
    (directory / "plain").chmod(0o644)
    assert found({})["plain"][1].startswith("is not executable")
    assert not {"folder", "nowhere", ".hidden.tmp"} & answer.keys()


def test_a_directory_that_is_not_there(found):
    with pytest.raises(FileNotFoundError):
        found({}, binDir="/none")
