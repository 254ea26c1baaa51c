"""No advice of a failed ADD names an input that the fault is not in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.node import Answer
from tests.reports.conftest import Site

# What advice about each input names, and never about another.
NAMED = {
    "annotation": ("annotation",),
    "network": ("NetworkAttachmentDefinition", "network's configuration", "spec.config"),
    "call": ("runtime's call", "containerd, CRI-O"),
    "plugin": ("its own agent", "its maker", "the program"),
}


def advice_of(site: Site, networks: str) -> str:
    site.declare(networks)
    return advice_in(site.call("ADD"))


def advice_in(answer: Answer) -> str:
    """Return the first part of the details of a refused ADD."""
    assert answer.code != 0, answer.stdout
    details: str = answer.json["details"]
    return details.partition("; ")[0]


def require(advice: str, origin: str) -> None:
    assert any(word in advice for word in NAMED[origin]), advice
    for other in NAMED.keys() - {origin}:
        assert not [word for word in NAMED[other] if word in advice], advice


@pytest.mark.parametrize(
    "element",
    [
        {"portMappings": [{"hostPort": 99999, "containerPort": 80}]},
        {"ips": ["10.0.4.300"]},
        {"ips": "10.0.4.3"},
        {"ips": ["10.0.4.1"]},
        {"ips": ["192.0.2.1"]},
        {"mac": "02:00:00:00:00"},
        {"mac": 5},
        {"default-route": ["10.0.4"]},
        {"interface": "a/b"},
        {"interface": "a-name-of-16-byte"},
        {"interface": "eth0"},
        {"name": "Lan"},
        {"name": ""},
        {"namespace": "no_namespace"},
        {"bandwidth": {"ingressRate": "much"}},
    ],
    ids=json.dumps,
)
def test_an_element_of_the_annotation(site: Site, element: Mapping[str, Any]) -> None:
    site.network("lan", {"cniVersion": "1.0.0", "type": "ptp", "ipam": site.ipam("10.0.4.0/24")})
    require(advice_of(site, json.dumps([{"name": "lan", **element}])), "annotation")


@pytest.mark.parametrize("text", ['[{"name": "lan"},]', "[{'name': 'lan'}]", '{"name": "lan"}', "lan@a@b", "a/b/c"])
def test_the_text_of_the_annotation(site: Site, text: str) -> None:
    require(advice_of(site, text), "annotation")


@pytest.mark.parametrize(
    "config",
    [
        {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.0.4.0/33"}},
        {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.0.4.7/24"}},
        {"type": "ptp", "ipam": {"type": "host-local"}},
        {"type": "ptp", "mtu": "large"},
        {"type": "macvlan", "master": "no-such-link"},
        {"type": "macvlan", "master": "lo", "mode": "fast"},
        {"type": "bridge", "vlan": 5000, "bridge": "br-advice"},
        {"type": "bridge", "bridge": "a/b"},
        {"type": "static"},
        {"plugins": [{"type": "loopback"}, {"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.no_such": "1"}}]},
        {"plugins": []},
        {"cniVersion": "9.9.9", "type": "ptp"},
    ],
    ids=json.dumps,
)
def test_the_configuration_of_a_network(site: Site, config: Mapping[str, Any]) -> None:
    site.network("lan", {"cniVersion": "1.0.0", **config})
    require(advice_of(site, "lan"), "network")


@pytest.mark.parametrize(
    "printed",
    [
        '{"error": "the pool is gone"}',
        "not JSON at all",
        '{"cniVersion": "1.0.0"} {"code": 111, "msg": "the pool is gone"}',
    ],
)
def test_what_a_plugin_prints(site: Site, printed: str) -> None:
    site.network("lan", {"cniVersion": "1.0.0", "type": site.plugin("lan", printed, "trap 'exit 1' EXIT")})
    site.declare("lan")
    answer = site.call("ADD")
    if "gone" in printed:
        assert answer.json["msg"].startswith("the pool is gone")
    require(advice_in(answer), "plugin")


def test_a_value_that_only_the_binary_may_know(site: Site) -> None:
    program = site.node.bin_dir / "macvlan"
    program.write_text('#!/bin/sh\ncat >/dev/null\necho \'{"code": 999, "msg": "unknown mode"}\'\nexit 1\n')
    program.chmod(0o755)
    try:
        site.network("lan", {"cniVersion": "1.0.0", "type": "macvlan", "master": "lo", "mode": "vepaa"})
        advice = advice_of(site, "lan")
    finally:
        program.unlink()
    assert 'mode: "vepaa"' in advice
    require(advice, "network")


def test_a_crash_of_a_plugin_is_named_by_its_first_line(site: Site) -> None:
    crash = "echo 'panic: assignment to entry in nil map\\n\\ngoroutine 1 [running]:\\nmain.iptables()' >&2; exit 2"
    site.network("lan", {"cniVersion": "1.0.0", "type": site.plugin("lan", None, crash)})
    site.declare("lan")
    answer = site.call("ADD")
    assert "panic: assignment to entry in nil map" in answer.json["msg"]
    require(advice_in(answer), "plugin")
