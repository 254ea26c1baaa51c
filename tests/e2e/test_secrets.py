"""Environments, configurations and arguments must not appear in a log, even at level debug, or in an answer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

import multus_shim
from tests.e2e.node import Node

SECRET = "s3cr3t-0f-s0meb0dy"


def test_no_log_line_has_a_secret(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", SECRET)
    node = make_node(settings={"logLevel": "debug"})
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0", args={"cni": {"password": SECRET}})
    node.plugin("failing", 'echo \'{"code": 7, "msg": "no"}\'; exit 1')
    node.network("bad", {"cniVersion": "1.0.0", "name": "bad", "type": "failing", "password": SECRET}, "default")
    unknown = {
        "cniVersion": "1.0.0",
        "name": "unknown",
        "type": "static",
        "ipam": {"type": "static", "password": SECRET},
    }
    node.network("unknown", unknown, "default")
    asked = {"cni-args": {"password": SECRET}, "password": SECRET}
    node.pod("one")
    node.pod("two", json.dumps([{"name": "bad", **asked}]))
    node.pod("three", json.dumps([{"name": "unknown", **asked}]))
    node.pod("four", json.dumps([{"name": "bad", **asked}])[:-1])
    node.start()
    stdin = json.dumps({**json.loads(node.stdin), "password": SECRET, "runtimeConfig": {"token": SECRET}}).encode()
    for pod, code in (("one", 0), ("two", 1), ("three", 1), ("four", 1)):
        netns = node.add_netns()
        for verb in ("ADD", "CHECK", "DEL"):
            environment = node.environment(verb, pod, netns, pod)
            environment["CNI_ARGS"] += f";TOKEN={SECRET}"
            done = subprocess.run(
                [str(multus_shim.binary())], env=environment, input=stdin, capture_output=True, timeout=60
            )
            assert (verb, done.returncode) in ((verb, code), ("DEL", 0), ("CHECK", code)), done.stdout
            assert SECRET not in done.stdout.decode()
    node.stop()
    text = node.log.read_text()
    assert "CNI ADD failed: no" in text
    assert "CNI ADD failed: ipam.password is not supported by the built-in static" in text
    assert SECRET not in text


def test_nothing_from_outside_begins_a_line(make_node: Callable[..., Node]) -> None:
    """A plugin's words and a pod's annotation may hold line ends and what steers a terminal."""
    forged = "\n2026-01-01T00:00:00.000+00:00 [verbose] CNI DEL finished\x1b[2K"
    node = make_node(settings={"logLevel": "debug"})
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
    node.plugin("failing", f"printf '%s' {json.dumps(json.dumps({'code': 7, 'msg': forged}))}; exit 1")
    node.network("bad", {"cniVersion": "1.0.0", "name": "bad", "type": "failing"}, "default")
    node.pod("one", "bad")
    node.pod("two", json.dumps([{"name": forged}]))
    node.start()
    for pod in ("one", "two"):
        answer = node.cni("ADD", pod, node.add_netns(), pod)
        assert answer.code == 1
        assert answer.json["code"] in (6, 7)
    node.stop()
    text = node.log.read_text()
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]
    assert text.count("CNI ADD failed") == 2
