"""Attributes of kinds of links, byte for byte as pyroute2 writes them."""

from __future__ import annotations

from typing import Any

import pytest

from multus_daemon.kernel import kinds, links
from tests.unit.kernel.test_links import encoded

CASES: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = [
    ("macvlan", {"mode": "vepa"}, [("IFLA_MACVLAN_MODE", "vepa")]),
    ("ipvlan", {"mode": "l3s"}, [("IFLA_IPVLAN_MODE", 2)]),
    ("vlan", {"number": 4094}, [("IFLA_VLAN_ID", 4094)]),
    ("vrf", {"number": 2**32 - 1}, [("IFLA_VRF_TABLE", 2**32 - 1)]),
]


@pytest.mark.parametrize(("kind", "given", "attrs"), CASES)
def test_attributes(kind: str, given: dict[str, Any], attrs: list[tuple[str, Any]]) -> None:
    info = [("IFLA_INFO_KIND", kind), ("IFLA_INFO_DATA", {"attrs": attrs})]
    body = encoded(index=9, attrs=[("IFLA_LINKINFO", {"attrs": info})])
    data = kinds.encode(kind, **given)
    assert data in body
    link = links.decode(body)
    assert (link.kind, link.mode, link.number) == (kind, given.get("mode", ""), given.get("number", 0))


def test_a_kind_without_them_and_a_mode_without_a_name() -> None:
    assert kinds.decode("veth", b"") == kinds.decode("vlan", b"") == ("", 0)
    assert kinds.decode("macvlan", kinds.encode("vrf", number=16)) == ("", 0)


def test_a_request_has_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(links.Rtnl, "__init__", lambda _: None)
    monkeypatch.setattr(links.Rtnl, "request", lambda _, request: made.append(request))
    data = kinds.encode("vlan", number=5)
    links.Rtnl().add_link("net1", "vlan", data, below=4, netns=7, mtu=1400, mac="02:00:00:00:00:0a", up=True)
    attrs = [
        ("IFLA_IFNAME", "net1"),
        ("IFLA_LINK", 4),
        ("IFLA_NET_NS_FD", 7),
        ("IFLA_MTU", 1400),
        ("IFLA_ADDRESS", "02:00:00:00:00:0a"),
        (
            "IFLA_LINKINFO",
            {"attrs": [("IFLA_INFO_KIND", "vlan"), ("IFLA_INFO_DATA", {"attrs": [("IFLA_VLAN_ID", 5)]})]},
        ),
    ]
    assert made[0].body == encoded(flags=1, change=1, attrs=attrs)
