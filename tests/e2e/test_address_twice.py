"""No address is in two pods: an attachment whose DEL has begun is not made anew, whoever began it and failed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import delegate
from tests.e2e.node import Node
from tests.e2e.test_annotation import edit
from tests.programs import needed
from tests.soak.census import Census

WATCHED_SECONDS = 4.0
"""A repair came after 0.1 to 3.5 s."""
ADDRESS = "10.93.0.2"
HOTPLUGS = ("annotation", "delegate")
ROADS = (*HOTPLUGS, "runtime")
CONTROL = """#!/bin/sh
input=$(cat)
if [ -e {flags}/fails ] && printf '%s' "$input" | grep -q '^-D'; then
  : >{flags}/asked
  while [ -e {flags}/hangs ]; do sleep 0.1; done
  echo 'iptables: out of memory' >&2
  exit 4
fi
printf '%s\\n' "$input" | {program} "$@"
"""


class Pods:
    """The node, the pod `hello` with its container c1, and an iptables that does not remove rules if it is to fail."""

    def __init__(self, node: Node, flags: Path, plugin: str) -> None:
        self.node = node
        self.flags = flags
        ipam = {
            "type": "host-local",
            "dataDir": str(node.networks_dir),
            # The second pod gets the address of the first.
            "ranges": [[{"subnet": "10.93.0.0/24", "rangeStart": ADDRESS, "rangeEnd": ADDRESS}]],
        }
        self.lan: dict[str, Any] = {
            "cniVersion": "1.0.0", "name": "lan", "type": plugin, "ipMasq": True, "ipMasqBackend": "iptables",
            **({"bridge": "br-twice", "isGateway": True} if plugin == "bridge" else {}), "ipam": ipam,
        }  # fmt: skip
        node.ptp("cluster", "10.81.0.0/24")
        node.ptp("other", "10.94.0.0/24", namespace="default")
        node.network("lan", self.lan, "default")
        edit(node, "next", "lan")

    def run(self, networks: str) -> None:
        """Start the pod `hello` with these networks."""
        edit(self.node, "hello", networks)
        self.node.start()
        self.netns = self.node.add_netns()
        assert self.node.cni("ADD", "c1", self.netns, "hello").code == 0

    def flag(self, name: str, *, on: bool) -> None:
        """`fails`: iptables does not remove rules; `hangs`: it does not end before."""
        if on:
            (self.flags / name).touch()
        else:
            (self.flags / name).unlink(missing_ok=True)

    def detach(self, road: str) -> None:
        """Begin the DEL of the network; return when iptables was asked to remove its rules."""
        if road == "annotation":
            edit(self.node, "hello", "other")
        else:
            self.request("DEL", road)
        self.node.wait_until((self.flags / "asked").exists, "rules are removed")

    def request(self, verb: str, road: str) -> int:
        """Ask for the network's ADD or DEL; return the status of the answer, 0 for success."""
        if road == "runtime":
            return self.node.cni(verb, "c1", self.netns, "hello").code
        status, _ = delegate.post(self.node, verb, self.netns, "net1", self.lan)
        return 0 if status == 200 else status

    def addresses(self) -> set[str]:
        """The addresses in the namespace of `hello`."""
        links = self.node.ip("address", netns=self.netns)
        return {item.get("local", "") for link in links for item in link.get("addr_info", ())}

    def next_has_it(self) -> str:
        """Start another pod, which gets the free address; its namespace."""
        netns = self.node.add_netns()
        answer = self.node.cni("ADD", "c2", netns, "next")
        assert answer.code == 0, answer.stdout
        return netns

    def stays_single(self) -> None:
        """Nothing puts the address into the first pod too."""
        with Census(self.node) as census:
            time.sleep(WATCHED_SECONDS)
        assert census.looks > 1
        assert census.twice == [], self.node.log.read_text()

    def ends(self, next_netns: str) -> None:
        """Once iptables works, the DELs of both pods leave nothing."""
        self.flag("fails", on=False)
        for container, netns, pod in (("c1", self.netns, "hello"), ("c2", next_netns, "next")):
            assert self.node.cni("DEL", container, netns, pod).code == 0
            assert self.node.links(netns) == ["lo"]
        # The shim has written the DEL that a kill cut off to the spool.
        self.node.wait_until(lambda: self.node.leftovers() == [], "nothing is left")
        rules = [needed("ip"), "netns", "exec", Path(self.node.host).name, "iptables-save", "-t", "nat"]
        assert "CNI-" not in subprocess.run(rules, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def make_pods(make_node: Callable[..., Node], tmp_path: Path) -> Iterator[Callable[[str], Pods]]:
    """Make a node whose daemon finds a `iptables-restore` of ours before that of the host."""
    program = needed("iptables-restore")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("iptables-restore", "ip6tables-restore"):
        (tools / name).write_text(CONTROL.format(flags=tmp_path, program=Path(program).with_name(name)))
        (tools / name).chmod(0o755)

    def make(plugin: str) -> Pods:
        # `ip netns exec` has made a mount namespace.
        mount = f"mount --bind {tools} /usr/local/sbin"
        node = make_node(settings={"keep": "repair", "hotplug": "on"}, preparation=mount)
        return Pods(node, tmp_path, plugin)

    yield make
    (tmp_path / "hangs").unlink(missing_ok=True)


@pytest.mark.parametrize("plugin", ["bridge", "ptp"])
@pytest.mark.parametrize("road", ROADS)
def test_a_failed_del_is_not_repaired(make_pods: Callable[[str], Pods], plugin: str, road: str) -> None:
    pods = make_pods(plugin)
    pods.run("" if road == "delegate" else "lan")
    if road == "delegate":
        assert pods.request("ADD", road) == 0
    pods.flag("fails", on=True)
    pods.detach(road)
    pods.node.wait_until(lambda: ADDRESS not in pods.addresses(), "the interface is gone")
    other = pods.next_has_it()
    pods.stays_single()
    pods.ends(other)


@pytest.mark.parametrize("road", HOTPLUGS)
def test_a_del_that_a_kill_cuts_off_is_not_repaired_by_the_next_daemon(
    make_pods: Callable[[str], Pods], road: str
) -> None:
    cut_off(make_pods, road)


def test_a_runtimes_del_that_a_kill_cuts_off_is_not_repaired_by_the_next_daemon(
    make_pods: Callable[[str], Pods],
) -> None:
    pods = cut_off(make_pods, "runtime")
    record = pods.node.cni_dir / "attachments" / "c1.json"
    assert not record.exists()


def cut_off(make_pods: Callable[[str], Pods], road: str) -> Pods:
    """Kill the daemon while it removes rules; another pod gets the address from the next daemon."""
    pods = make_pods("bridge")
    pods.run("" if road == "delegate" else "lan")
    if road == "delegate":
        assert pods.request("ADD", road) == 0
    pods.flag("hangs", on=True)
    pods.flag("fails", on=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pods.detach, road)
        pods.node.wait_until((pods.flags / "asked").exists, "rules are removed")
        pods.node.kill()
        pods.flag("hangs", on=False)
    assert ADDRESS not in pods.addresses()
    pods.node.start()
    other = pods.next_has_it()
    pods.stays_single()
    pods.ends(other)
    return pods
