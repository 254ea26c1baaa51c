"""The shim under the name `passthru`: the plugin of upstream's image that does nothing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import typing

import pytest

from multus_daemon.spec.cni import versions

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

VERBS = {"ADD": "0.1.0", "DEL": "0.1.0", "CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
"""The first version that has each."""


@pytest.fixture
def passthru(shim: Shim, tmp_path: pathlib.Path) -> list[str]:
    path = tmp_path / "passthru"
    path.symlink_to(shim.binary)
    return [str(path)]


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_it_answers_as_the_built_in_does(shim: Shim, passthru: list[str], version: str) -> None:
    stdin = json.dumps({"cniVersion": version, "name": "aux", "type": "passthru"}).encode()
    done = shim("ADD", stdin=stdin, command=passthru)
    assert (done.code, done.err) == (0, b"")
    assert json.loads(done.out)["cniVersion"] == version
    env = os.environ | {**shim.environment("ADD"), "CNI_NETNS_OVERRIDE": "1"}
    command = [sys.executable, "-m", "multus_tools.builtin", "passthru"]
    built_in = subprocess.run(command, input=stdin, env=env, capture_output=True, timeout=30, check=False)
    assert json.loads(done.out) == json.loads(built_in.stdout)


def test_without_a_version_it_is_the_first(shim: Shim, passthru: list[str]) -> None:
    done = shim("ADD", stdin=b'{"name": "aux"}', command=passthru)
    assert json.loads(done.out) == {"cniVersion": "0.1.0", "dns": {}}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_needs_a_daemon(shim: Shim, daemon: Stub, passthru: list[str], verb: str) -> None:
    done = shim(verb, conf={"cniVersion": VERBS[verb]}, command=passthru)
    assert (done.code, done.err) == (0, b"")
    assert bool(done.out) == (verb == "ADD")
    assert daemon.requests == []


def test_it_refuses_what_every_plugin_refuses(shim: Shim, passthru: list[str]) -> None:
    assert shim("ADD", stdin=b"{", command=passthru).error["code"] == 6
    assert shim("ADD", conf={"cniVersion": "9.0.0"}, command=passthru).error["code"] == 1
    assert shim("ADD", env={"CNI_COMMAND": "ADD"}, command=passthru).error["code"] == 4
