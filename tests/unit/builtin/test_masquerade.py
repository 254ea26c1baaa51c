"""Names of chains and comments, by vectors of the reference plugins; the lines of `iptables -S` that are looked for."""

from __future__ import annotations

import pytest

from multus_daemon.builtin import masquerade
from multus_daemon.builtin.masquerade import Owner


def test_names() -> None:
    owner = Owner("n1", "cid1", "eth0")
    assert owner.chain == "CNI-ca7a875c2b85fc44a855128b"
    assert owner.comment == 'name: "n1" id: "cid1"'
    # One chain for all interfaces of a container on a network, but rules of their own in nftables.
    assert Owner("n1", "cid1", "net1").chain == owner.chain
    owner = Owner("n2", "cid1", "eth0")
    assert owner.nft_prefix == "c6cba14837cd1216-0b65a318f52e521b"
    assert owner.nft_comment == "c6cba14837cd1216-0b65a318f52e521b, net: n2, if: eth0, id: cid1"


@pytest.mark.parametrize("ifname", ['e"th0', "ünïcödé"])
def test_a_comment_is_cut_to_what_the_kernel_takes(ifname: str) -> None:
    comment = Owner("n" * 60, "c" * 64, ifname).nft_comment
    assert '"' not in comment
    assert len(comment.encode()) in (127, 128)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '-A POSTROUTING -s 10.0.0.2/32 -m comment --comment "name: \\"n\\" id: \\"c\\"" -j CNI-abc',
            ["POSTROUTING", "-s", "10.0.0.2/32", "-m", "comment", "--comment", 'name: "n" id: "c"', "-j", "CNI-abc"],
        ),
        ("-A POSTROUTING -j CNI-abcd", []),
        ("-A POSTROUTING -m comment --comment CNI-abc -j ACCEPT", []),
        ("-N CNI-abc", []),
        ("-P POSTROUTING ACCEPT", []),
        ("-A POSTROUTING -m comment --comment \"somebody else's 'odd\" -j ACCEPT", []),
    ],
)
def test_jumps(line: str, expected: list[str]) -> None:
    assert masquerade._jump(line, "CNI-abc") == expected


def test_quoting_is_what_iptables_restore_reads() -> None:
    assert masquerade._quoted('name: "n\\1"') == '"name: \\"n\\\\1\\""'
    assert (masquerade._quoted("-j"), masquerade._quoted("")) == ("-j", '""')
