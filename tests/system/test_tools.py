"""ToolRunner: real programs, with and without chroot."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from multus_daemon.plugins import process
from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.plugins.process import ToolRunner
from multus_daemon.spec.cni.errors import InternalError, TryAgainLaterError


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A directory in place of the usual ones; makes scripts in it."""
    monkeypatch.setattr(process, "TOOLS", (str(tmp_path / "empty"), str(tmp_path)))

    def make(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


def test_what_it_is_given_and_says(programs):
    programs("tool", 'echo "$@"; cat; echo " oh " >&2; exit 3')
    end = ToolRunner().run("tool", ["-a", "b c"], b"stdin")
    assert (end.status, end.stdout, end.stderr) == (3, b"-a b c\nstdin", "oh")


def test_nothing_of_our_environment_reaches_it(programs, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SECRET", "x")
    programs("tool", "env")
    assert b"KUBERNETES" not in (ToolRunner().run("tool", [])).stdout


def test_absent(programs):
    with pytest.raises(ToolNotFoundError, match="tool is not in "):
        ToolRunner().run("tool", [])


def test_deadline(programs):
    programs("tool", "sleep 30")
    with pytest.raises(TryAgainLaterError, match="tool did not end within 0.2 s"):
        ToolRunner(timeout=0.2).run("tool", [])


@pytest.mark.parametrize(("asked", "allowed"), [(1, 1), (100, process.TOOLS_AT_ONCE)])
def test_no_more_at_once_than_allowed(programs, tmp_path, asked, allowed):
    log = tmp_path / "log"
    programs("tool", f"echo begin >>{log}; sleep 0.2; echo end >>{log}")
    runner = ToolRunner(at_once=asked)
    with ThreadPoolExecutor(2 * allowed) as threads:
        list(threads.map(lambda _: runner.run("tool", []), range(2 * allowed)))
    running = most = 0
    for line in log.read_text().split():
        running += 1 if line == "begin" else -1
        most = max(most, running)
    assert most == allowed


def test_too_much(programs):
    programs("tool", "yes")
    with pytest.raises(InternalError, match="tool wrote more than 1000 bytes"):
        ToolRunner(max_output=1000).run("tool", [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for chroot(2): run pytest as root")
def test_in_another_root(programs):
    programs("tool", "readlink /proc/self/root; pwd")
    end = ToolRunner(chroot_dir="/proc/self/root").run("tool", [])
    assert (end.status, end.stdout) == (0, b"/\n/\n")
    with pytest.raises(ToolNotFoundError, match="of the host"):
        ToolRunner(chroot_dir="/proc/self/root/usr").run("tool", [])


def test_a_relative_root():
    with pytest.raises(ValueError, match="not an absolute path"):
        ToolRunner(chroot_dir="host")
