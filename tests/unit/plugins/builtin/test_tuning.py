import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import tuning, tuning_config
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.tuning_config import Attributes
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from tests.fakes.runner import FakePluginRunner


def call(ifname="eth0", cni_args="", **keys):
    fields = {"cniVersion": "1.0.0", "name": "n", "type": "tuning", **keys}
    invocation = Invocation("ADD", "c1", "/nowhere", ifname, cni_args, "/nowhere", fields)
    return Call(invocation, "n", "1.0.0", None, Path("/nowhere"), FakePluginRunner().plugin_for, PodNetns("/nowhere"))


@pytest.mark.parametrize(
    ("key", "ifname", "parts"),
    [
        ("net.ipv4.ip_forward", "eth0", ("ipv4", "ip_forward")),
        ("net/ipv4/ip_forward", "eth0", ("ipv4", "ip_forward")),
        ("net..ipv4.//ip_forward.", "eth0", ("ipv4", "ip_forward")),
        ("/net.core.somaxconn", "eth0", ("core", "somaxconn")),
        ("net.ipv4.conf.IFNAME.arp_filter", "eth0.100", ("ipv4", "conf", "eth0.100", "arp_filter")),
        ("net.ipv4.conf.IFNAME.IFNAME", "eth0", ("ipv4", "conf", "eth0", "IFNAME")),
        ("net.ipv4.conf.eth0/100.arp_filter", "eth0", ("ipv4", "conf", "eth0", "100", "arp_filter")),
    ],
)
def test_sysctl_names(key, ifname, parts):
    (found,) = tuning_config.read(call(ifname, sysctl={key: "1"})).sysctls
    assert (found.key, found.parts, found.value) == (key, parts, "1")


@pytest.mark.parametrize(
    "key",
    [
        "",
        "net",
        "net.",
        "kernel.hostname",
        "IFNAME.x",
        "network.x",
        "net.ipv4." + "x" * 256,
        "net.a\0b",
        "net.a\n",
        "NET.ipv4.x",
    ],
)
def test_names_that_are_refused(key):
    with pytest.raises(InvalidNetworkConfigError, match="invalid net sysctl key"):
        tuning_config.read(call(sysctl={key: "1"}))


@hypothesis.given(
    key=st.text(st.sampled_from("net./.IFNAME\\ e"), max_size=12), ifname=st.sampled_from(["a", ".a", "a..b"])
)
def test_no_name_leads_elsewhere(key, ifname):
    try:
        (found,) = tuning_config.read(call(ifname, sysctl={f"net.{key}": "1"})).sysctls
    except InvalidNetworkConfigError:
        return
    assert found.parts
    assert all(part and "/" not in part and part not in (".", "..") for part in found.parts)


@pytest.mark.parametrize(
    ("keys", "args", "expected"),
    [
        ({}, "", Attributes()),
        ({"promisc": False, "mtu": 0, "mac": ""}, "", Attributes()),
        ({"txQLen": 0, "allmulti": False}, "", Attributes(tx_queue_length=0, allmulti=False)),
        ({"mac": "02-00-00-00-00-0A"}, "", Attributes(mac="02:00:00:00:00:0a")),
        ({"mac": "x"}, "MAC=0200.0000.0001", Attributes(mac="02:00:00:00:00:01")),
        ({"args": {"cni": {"mac": ""}}, "mac": "x"}, "MAC=x", Attributes()),
        ({"args": {"cni": {"promisc": False, "mtu": 9}}, "promisc": True, "mtu": 5}, "", Attributes(mtu=9)),
        ({"args": {"cni": {"promisc": None}}, "promisc": True}, "", Attributes(promiscuous=True)),
    ],
)
def test_attributes(keys, args, expected):
    assert tuning_config.read(call(cni_args=args, **keys)).attributes == expected


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"mtu": -1}, 7),
        ({"txQLen": 2**31}, 7),
        ({"args": {"cni": {"txQLen": 1.5}}}, 6),
        ({"sysctl": {"net.ipv4.x": 1}}, 6),
        ({"sysctl": {"net.ipv4.x": "é"}}, 7),
        ({"sysctl": {"net.ipv4.x": "1\0"}}, 7),
        ({"dataDir": 1}, 6),
        ({"dataDir": "/run/\0"}, 7),
        ({"mac": "02:00:00:00:00"}, 7),
    ],
)
def test_codes(keys, code):
    with pytest.raises(CniError) as caught:
        tuning_config.read(call(**keys))
    assert caught.value.code == code


def test_what_an_older_daemon_attached_with_a_path_that_no_file_has_is_deleted(caplog):
    tuning.delete(call(dataDir="/run/\0"), PodNetns("/nowhere"))
    assert "eth0 can't be restored: dataDir:" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("", "net.x", True),
        ("ipv4", "net.ipv4.x", True),
        ("^ipv4", "net.ipv4.x", False),
        ("^net.ipv4.x$", "net.ipv4.x", True),
        (r"^net\.ipv4\.x\z", "net.ipv4.x", True),
        (r"\$", "net$", True),
        ("[$]$", "net$", True),
        ("^[[:lower:]]+[.][[:alpha:][:digit:]]+$", "net.ipv4", True),
        ("^[[:lower:]]+$", "net.ipv4", False),
        ("^[]n]et$", "net", True),
        ("^[^]n]et$", "net", False),
        ("^net[.](ipv4|ipv6)[.]conf[.](all|IFNAME)[.].*_filter$", "net.ipv6.conf.IFNAME.arp_filter", True),
        (r"^net\.\w+$", "net.é", False),
    ],
)
def test_patterns(pattern, key, expected):
    assert tuning_config.is_allowed(key, ["no such", pattern]) is expected


@pytest.mark.parametrize("pattern", ["(", "[a", "*", r"\Z", r"\pL", "[[:no:]]", "[[:^alpha:]]", "a{2,1}"])
def test_patterns_that_are_none(pattern):
    with pytest.raises(InvalidNetworkConfigError, match=re.escape(pattern)):
        tuning_config.is_allowed("net.x", [pattern])
    # Looked at in their order, as by the reference.
    assert tuning_config.is_allowed("net.x", ["net", pattern])
