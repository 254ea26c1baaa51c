"""Networks of one pod side by side, with real plugins: what has nothing to do with each other, and what has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.node import Node, ping


def marking(node: Node, name: str, target: Path, seconds: float) -> None:
    """A plugin `name`: `target`, with marks at its beginning and its end, and some time before it."""
    path = node.bin_dir / name
    marks = node.root / "marks"
    path.write_text(
        f'#!/bin/sh\necho "begin $CNI_COMMAND $CNI_IFNAME" >>{marks}\n'
        f'[ "$CNI_COMMAND" = CHECK ] || sleep {seconds}\n{target}\nstatus=$?\n'
        f'echo "end $CNI_COMMAND $CNI_IFNAME" >>{marks}\nexit $status\n'
    )
    path.chmod(0o755)


STACKED = """\
#!/bin/sh
cat >/dev/null
cd /
case $CNI_COMMAND in
ADD)
    nsenter --net="$CNI_NETNS" ip link add link net1 name "$CNI_IFNAME" type macvlan mode bridge >&2 || exit 1
    echo '{"cniVersion":"1.0.0","interfaces":[{"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}]}' ;;
DEL)
    sleep 0.3
    # Fails where the interface below has gone, and this one with it.
    nsenter --net="$CNI_NETNS" ip link delete "$CNI_IFNAME" >&2 || exit 1 ;;
esac
"""


@pytest.fixture
def loaded(make_node: Callable[..., Node], reference: Path) -> Node:
    """A node with pod `hello` of six networks, and `unlucky`, of whose six one fails."""
    node = make_node(settings={"maxDelegateProcesses": 16})
    for name in ("host-local", "bridge", "static"):
        (node.bin_dir / name).symlink_to(reference / name)
    marking(node, "slow", reference / "ptp", 3)
    marking(node, "marked", reference / "macvlan", 1.5)
    (node.bin_dir / "stack-target").write_text(STACKED)
    (node.bin_dir / "stack-target").chmod(0o755)
    marking(node, "stack", node.bin_dir / "stack-target", 0)
    node.ip("link", "add", "m0", "type", "veth", "peer", "name", "m1")
    for name in ("m0", "m1"):
        node.ip("link", "set", name, "up")
    node.ptp("cluster", "10.86.0.0/24")
    node.ptp("a", "10.86.1.0/24", namespace="default", type="slow")
    node.ptp("b", "10.86.2.0/24", namespace="default", type="slow")
    for name, subnet in (("c", "10.86.3.0/24"), ("d", "10.86.4.0/24")):
        node.ptp(name, subnet, namespace="default", type="marked", master="m0", mode="bridge")
    node.ptp("e", "10.86.5.0/24", namespace="default", type="bridge", bridge="br86", isGateway=True)
    on_top = {"cniVersion": "1.0.0", "name": "stacked", "type": "stack", "master": "net1", "linkInContainer": True}
    node.network("stacked", on_top, "default")
    node.plugin("broken", """test "$CNI_COMMAND" = ADD || exit 0; echo '{"code": 101, "msg": "no card"}'; exit 1""")
    node.network("broken", {"cniVersion": "1.0.0", "name": "broken", "type": "broken"}, "default")
    node.pod("hello", "a,b,c,d,e,stacked")
    node.pod("unlucky", "a,b,c,broken,d,stacked")
    node.start()
    return node


def marks(node: Node, verb: str) -> list[str]:
    """`begin net1` and the like, in the order in which they came."""
    lines = (node.root / "marks").read_text().splitlines()
    return [line.replace(f" {verb}", "") for line in lines if f" {verb} " in line]


@pytest.mark.npwg("7.3")
def test_six_networks(loaded: Node) -> None:
    node = loaded
    before = node.links()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, "hello")
    assert answer.code == 0, answer.stdout
    assert node.links(netns) == ["eth0", "lo", *(f"net{number}" for number in range(1, 7))]
    assert ping(netns, "10.86.1.1", "net1")
    assert ping(netns, "10.86.5.1")
    added = marks(node, "ADD")
    assert added.index("begin net2") < added.index("end net1")
    assert added.index("end net3") < added.index("begin net4"), "both are over m0"
    assert added.index("end net1") < added.index("begin net6"), "it is over net1"
    assert node.cni("CHECK", "c1", netns, "hello").code == 0
    answer = node.cni("DEL", "c1", netns, "hello")
    assert answer.code == 0, answer.stdout
    deleted = marks(node, "DEL")
    assert deleted.index("end net6") < deleted.index("begin net1")
    assert deleted.index("end net4") < deleted.index("begin net3")
    assert deleted.index("begin net1") < deleted.index("end net2")
    assert node.links(netns) == ["lo"]
    assert sorted({*node.links()} - {*before}) == ["br86"]
    assert node.leftovers() == []


@pytest.mark.npwg("7.2a")
def test_one_of_six_fails_and_nothing_stays(loaded: Node) -> None:
    node = loaded
    before = node.links()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, "unlucky")
    assert (answer.code, answer.json["code"]) == (1, 101)
    assert answer.json["msg"].startswith("no card")
    assert "begin net6" not in marks(node, "ADD"), "begun after the failure"
    assert sorted(marks(node, "DEL")) == sorted(
        f"{edge} net{number}" for edge in ("begin", "end") for number in (1, 2, 3)
    )
    assert node.links(netns) == ["lo"]
    assert node.links() == before
    assert node.leftovers() == []
