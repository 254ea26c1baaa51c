"""Attachments of running pods stay as their ADD left them (`keep`): a real daemon, real namespaces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import deadlines
from tests.e2e.node import Node, ping
from tests.programs import needed

BRIDGE = "br-kept"
SUBNET = "10.93.0.0/24"


def bridge(node: Node, name: str = "lan", **more: Any) -> dict[str, Any]:
    ipam = {"type": "host-local", "subnet": SUBNET, "dataDir": str(node.networks_dir)}
    return {
        "cniVersion": "1.0.0",
        "name": name,
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipam": ipam,
        **more,
    }


@pytest.fixture
def keeping(make_node: Callable[..., Node]) -> Callable[..., Node]:
    """Start a node whose pod `web`, container c1, has a bridge network on net1; `keep` is the setting."""

    def start(keep: str, **more: Any) -> Node:
        node = make_node(settings={"keep": keep} if keep else {})
        node.ptp("cluster", "10.81.0.0/24")
        node.network("lan", bridge(node, **more), "default")
        node.pod("web", "lan")
        node.start()
        node.pod_netns = node.add_netns()  # type: ignore[attr-defined]
        assert node.cni("ADD", "c1", netns_of(node), "web").code == 0
        assert ping(netns_of(node), "10.93.0.1", "net1")
        return node

    return start


def netns_of(node: Node) -> str:
    path: str = node.pod_netns  # type: ignore[attr-defined]
    return path


def inside(node: Node, *arguments: str) -> None:
    """`ip` in the pod."""
    subprocess.run([needed("ip"), "-n", Path(netns_of(node)).name, *arguments], check=True, capture_output=True)


def on_host(node: Node, *arguments: str) -> None:
    """`ip` on the host."""
    subprocess.run([needed("ip"), "-n", Path(node.host).name, *arguments], check=True, capture_output=True)


def port(node: Node) -> str:
    return str(node.ip("link", "show", "master", BRIDGE)[0]["ifname"])


def address(node: Node) -> str:
    return next(str(item["local"]) for item in node.ip("address", "show", "net1", netns=netns_of(node))[0]["addr_info"])


def ctl(node: Node, *arguments: str) -> tuple[int, str]:
    """multusctl on the node: exit status and standard output."""
    command = [sys.executable, "-m", "multus_tools.ctl", *arguments, "--socket-dir", str(node.root / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


BREAK: dict[str, Callable[[Node], None]] = {
    "the interface": lambda node: inside(node, "link", "del", "net1"),
    "the host's end": lambda node: on_host(node, "link", "del", port(node)),
    "the port": lambda node: on_host(node, "link", "set", port(node), "nomaster"),
    "the bridge": lambda node: on_host(node, "link", "del", BRIDGE),
    "the address": lambda node: inside(node, "address", "flush", "dev", "net1"),
    "the pod's interface is down": lambda node: inside(node, "link", "set", "net1", "down"),
    "the host's end is down": lambda node: on_host(node, "link", "set", port(node), "down"),
    "the gateway's address": lambda node: on_host(node, "address", "flush", "dev", BRIDGE),
}


def reachable(node: Node) -> bool:
    try:
        return address(node) == "10.93.0.2" and ping(netns_of(node), "10.93.0.1", "net1")
    except (StopIteration, subprocess.CalledProcessError):
        return False


@pytest.mark.parametrize("what", BREAK)
def test_what_breaks_is_brought_back(keeping: Callable[..., Node], what: str) -> None:
    node = keeping("repair")
    BREAK[what](node)
    node.wait_until(lambda: reachable(node), f"{what} is repaired")
    node.wait_for_log("AttachmentRepaired")
    assert node.cni("CHECK", "c1", netns_of(node), "web").code == 0
    assert node.cni("DEL", "c1", netns_of(node), "web").code == 0
    assert node.links(netns_of(node)) == ["lo"]
    assert node.leftovers() == []


@pytest.mark.parametrize(
    ("setting", "pod", "network", "repaired"),
    [
        ("report", "repair", None, True),
        ("report", None, "repair", True),
        ("repair", "report", None, False),
        ("repair", None, "off", False),
        ("off", "repair", "off", True),
        ("repair", None, "nonsense", True),
    ],
)
def test_pod_and_network_say_what_happens(
    make_node: Callable[..., Node], setting: str, pod: str | None, network: str | None, repaired: bool
) -> None:
    node = make_node(settings={"keep": setting})
    node.ptp("cluster", "10.81.0.0/24")
    for kind, name, keep, more in (
        ("NetworkAttachmentDefinition", "lan", network, {"spec": {"config": json.dumps(bridge(node))}}),
        ("Pod", "web", pod, {"spec": {"containers": []}}),
    ):
        annotations = {"k8s.v1.cni.cncf.io/networks": "lan"} if kind == "Pod" else {}
        annotations |= {"multus.io/keep": keep} if keep else {}
        metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "annotations": annotations}
        version = "v1" if kind == "Pod" else "k8s.cni.cncf.io/v1"
        text = json.dumps({"apiVersion": version, "kind": kind, "metadata": metadata, **more})
        (node.manifests / f"{kind.lower()}-default-{name}.yaml").write_text(text)
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "web").code == 0
    node.pod_netns = netns  # type: ignore[attr-defined]
    # After this answer the daemon follows the namespace.
    assert ctl(node, "drift")[0] == 0
    inside(node, "link", "del", "net1")
    if repaired:
        node.wait_until(lambda: "net1" in node.links(netns), "it is repaired")
    else:
        assert ctl(node, "drift")[0] == 1
        # The daemon follows reports of the kernel once the container is no longer young.
        time.sleep(1.5 * deadlines.KEEP_YOUNG_SECONDS)
        assert "net1" not in node.links(netns)


def test_what_others_add_stays(keeping: Callable[..., Node]) -> None:
    node = keeping("repair")
    inside(node, "address", "add", "192.0.2.7/32", "dev", "net1")
    on_host(node, "address", "add", "192.0.2.9/32", "dev", BRIDGE)
    inside(node, "address", "del", f"{address(node)}/24", "dev", "net1")
    node.wait_until(lambda: ping(netns_of(node), "10.93.0.1", "net1"), "the address is back")
    assert "192.0.2.7" in str(node.ip("address", "show", "net1", netns=netns_of(node)))
    assert "192.0.2.9" in str(node.ip("address", "show", BRIDGE))


def test_what_only_a_plugins_check_says_is_told_to_who_asks(make_node: Callable[..., Node]) -> None:
    """Some plugins fail the CHECK of what they have just made."""
    node = make_node(settings={"networksReadyCondition": True})
    node.ptp("cluster", "10.81.0.0/24")
    node.plugin(
        "fabric",
        """case $CNI_COMMAND in
        ADD) echo '{"cniVersion": "1.0.0"}' ;;
        CHECK) echo '{"code": 117, "msg": "never satisfied"}'; exit 1 ;;
    esac""",
    )
    node.network("lan", {"cniVersion": "1.0.0", "name": "lan", "type": "fabric"}, "default")
    node.pod("web", "lan")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "web").code == 0
    node.wait_for_log("NetworksReady")
    assert "AttachmentBroken" not in node.log.read_text()
    code, shown = ctl(node, "drift", "-o", "json")
    [found] = json.loads(shown)["differences"]
    assert (code, found["repairable"]) == (1, False)
    assert "never satisfied" in found["difference"]


def bind(node: Node) -> None:
    """Do to net1 what the bridge binding of KubeVirt does, with a bridge in place of its dummy."""
    lines = (
        "link add k6t-net1 type bridge",
        "link set k6t-net1 up",
        "link set net1 down",
        "link set net1 name net1-nic",
        "link set net1-nic address 02:00:00:00:00:77 master k6t-net1 up",
        "address flush dev net1-nic",
    )
    command = [needed("ip"), "-n", Path(netns_of(node)).name, "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True, capture_output=True)
    # It makes its tap device in between.
    time.sleep(0.4)
    inside(node, "link", "add", "net1", "type", "bridge")
    inside(node, "address", "add", "10.93.0.2/24", "dev", "net1")


@pytest.mark.weak_spot(63)
def test_a_virtual_machine_takes_its_interface_over(keeping: Callable[..., Node]) -> None:
    """Nothing is reported and nothing repaired until its port leaves the bridge."""
    node = keeping("repair")
    bind(node)
    time.sleep(2 * deadlines.KEEP_YOUNG_SECONDS)
    code, shown = ctl(node, "drift", "default/web", "-o", "json")
    assert (code, json.loads(shown)["differences"]) == (0, [])
    assert node.cni("CHECK", "c1", netns_of(node), "web").code == 0
    assert not re.search("AttachmentBroken|AttachmentRepaired|AttachmentChanged", node.log.read_text())
    assert {"net1", "net1-nic", "k6t-net1"} <= set(node.links(netns_of(node)))
    on_host(node, "link", "set", port(node), "nomaster")
    node.wait_for_log("AttachmentRepaired")
    assert port(node)
    assert node.cni("DEL", "c1", netns_of(node), "web").code == 0


def test_host_ports_of_the_cluster_network_come_back(make_node: Callable[..., Node]) -> None:
    """A list as clusters have it: no binary is there."""
    node = make_node(settings={"keep": "repair"})
    ipam = {"type": "host-local", "subnet": "10.81.0.0/24", "dataDir": str(node.networks_dir)}
    plugins = [{"type": "ptp", "ipam": ipam}, {"type": "portmap", "capabilities": {"portMappings": True}}]
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "plugins": plugins})
    node.pod("web")
    node.start()
    netns = node.add_netns()
    ports = {"portMappings": [{"hostPort": 18231, "containerPort": 80, "protocol": "tcp"}]}
    stdin = json.dumps(json.loads(node.stdin) | {"runtimeConfig": ports}).encode()
    assert node.cni("ADD", "c1", netns, "web", stdin=stdin).code == 0

    def nat(*arguments: str) -> str:
        command = [needed("ip"), "netns", "exec", Path(node.host).name, needed("iptables"), "-w", "-t", "nat"]
        return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout

    before = nat("-S")
    assert "18231" in before
    nat("-F", "CNI-HOSTPORT-DNAT")
    # The kernel does not report rules: `multusctl repair` does not wait for the next round.
    assert ctl(node, "repair", "default/web")[0] == 0
    assert nat("-S") == before
    assert node.cni("DEL", "c1", netns, "web").code == 0
    assert "18231" not in nat("-S")


def test_what_the_pod_does_itself_is_said_once(keeping: Callable[..., Node]) -> None:
    node = keeping("")
    inside(node, "link", "set", "net1", "down")
    inside(node, "link", "set", "net1", "name", "mine")
    inside(node, "link", "set", "mine", "up")
    node.wait_for_log("AttachmentChanged")
    for state in ("down", "up") * 2:
        inside(node, "link", "set", "mine", state)
        time.sleep(deadlines.KEEP_YOUNG_SECONDS)
    code, shown = ctl(node, "drift", "default/web", "-o", "json")
    [found] = json.loads(shown)["differences"]
    assert (code, found["repairable"]) == (1, False)
    assert 'its name is "mine": a program in the pod did this' in found["difference"]
    [line] = [line for line in node.log.read_text().splitlines() if "AttachmentChanged" in line]
    assert found["difference"] in line


@pytest.mark.weak_spot(5)
def test_what_the_vpc_plugin_of_eks_reports(make_node: Callable[..., Node]) -> None:
    """An interface `dummy` and eleven digits in the sandbox "0", beside the pod's; for CHECK, drift and repair."""
    node = make_node(settings={"keep": "repair"})
    node.plugin(
        "aws-cni",
        """case $CNI_COMMAND in
        ADD) ip -n "$(basename "$CNI_NETNS")" link add "$CNI_IFNAME" type bridge &&
             ip -n "$(basename "$CNI_NETNS")" address add 10.94.0.2/32 dev "$CNI_IFNAME" &&
             echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eni123"},
                 {"name": "'"$CNI_IFNAME"'", "sandbox": "'"$CNI_NETNS"'"},
                 {"name": "dummy12345678901", "mac": "0", "sandbox": "0"}],
                 "ips": [{"address": "10.94.0.2/32", "interface": 1}]}' ;;
    esac""",
    )
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "aws-cni"})
    node.network("lan", bridge(node), "default")
    node.pod("web", "lan")
    node.start()
    node.pod_netns = netns = node.add_netns()  # type: ignore[attr-defined]
    assert node.cni("ADD", "c1", netns, "web").code == 0
    for _ in range(2):
        answer = node.cni("CHECK", "c1", netns, "web")
        assert answer.code == 0, answer.stdout
    assert json.loads(ctl(node, "drift", "default/web", "-o", "json")[1])["differences"] == []
    inside(node, "link", "del", "net1")
    node.wait_for_log("AttachmentRepaired")
    assert "AttachmentBroken" not in node.log.read_text()
    inside(node, "address", "flush", "dev", "eth0")
    node.wait_for_log("address 10.94.0.2/32 is not on")
    assert node.cni("CHECK", "c1", netns, "web").code == 1


def mac(node: Node, ifname: str = "net1") -> str:
    return str(node.ip("link", "show", ifname, netns=netns_of(node))[0]["address"])


OTHER = "02:00:00:00:00:55"


@pytest.mark.weak_spot(63)
@pytest.mark.parametrize("is_port", [True, False], ids=["bond", "others"])
def test_what_a_later_network_of_the_pod_changes_is_kept(make_node: Callable[..., Node], is_port: bool) -> None:
    """A bond changes its ports; a bridge is in its place. Another plugin sets a MAC address for its own reasons."""
    node = make_node(settings={"keep": "repair"})
    node.plugin(
        "bond",
        f"""pod="$(basename "$CNI_NETNS")"
        case $CNI_COMMAND in
        ADD)
            until ip -n $pod link show net1 >/dev/null 2>&1; do sleep 0.01; done
            sleep 0.2
            ip -n $pod link add "$CNI_IFNAME" type bridge
            ip -n $pod link set net1 address {OTHER} mtu 1400 {'master "$CNI_IFNAME"' if is_port else ""}
            made='{{"name": "'"$CNI_IFNAME"'", "sandbox": "'"$CNI_NETNS"'"}}'
            echo '{{"cniVersion": "1.0.0", "interfaces": ['"$made"']}}' ;;
        esac""",
    )
    node.ptp("cluster", "10.81.0.0/24")
    node.network("lan", bridge(node), "default")
    node.network("bond", {"cniVersion": "1.0.0", "name": "bond", "type": "bond"}, "default")
    node.pod("web", "lan,bond")
    node.start()
    node.pod_netns = netns = node.add_netns()  # type: ignore[attr-defined]
    answer = node.cni("ADD", "c1", netns, "web")
    assert answer.code == 0, answer.stdout
    assert json.loads(ctl(node, "drift", "default/web", "-o", "json")[1])["differences"] == []
    assert ctl(node, "repair", "default/web")[0] == 0
    assert node.cni("CHECK", "c1", netns, "web").code == 0
    assert mac(node) == OTHER
    log = node.log.read_text()
    assert not re.search("AttachmentBroken|AttachmentRepaired|NetworkCheckFailed", log)
    if not is_port:
        inside(node, "link", "set", "net1", "address", "02:00:00:00:00:66")
        node.wait_until(lambda: mac(node) == OTHER, "it has the address that the ADD left")
        assert reachable(node)


def test_what_the_auxiliary_chain_changes_is_kept(make_node: Callable[..., Node]) -> None:
    """Built-ins alone: it changes the cluster network's interface, on purpose."""
    node = make_node(settings={"keep": "repair", "clusterNetwork": "filled in", "auxiliaryCNIChainName": "policy"})
    folder = node.root / "net.d"
    node.settings["clusterNetwork"] = str(folder / "10-cluster.conflist")
    (folder / "policy").mkdir(parents=True)
    (folder / "10-cluster.conflist").write_text(
        json.dumps({"cniVersion": "1.0.0", "name": "cluster", "plugins": [bridge(node)]})
    )
    (folder / "policy" / "10.conf").write_text(json.dumps({"type": "tuning", "mac": OTHER, "mtu": 1400}))
    node.pod("web")
    node.start()
    node.pod_netns = netns = node.add_netns()  # type: ignore[attr-defined]
    answer = node.cni("ADD", "c1", netns, "web")
    assert answer.code == 0, answer.stdout
    assert mac(node, "eth0") == OTHER
    assert ctl(node, "drift", "default/web")[0] == 0
    answer = node.cni("CHECK", "c1", netns, "web")
    assert answer.code == 0, answer.stdout
    inside(node, "link", "set", "eth0", "mtu", "1300")
    inside(node, "link", "set", "eth0", "address", "02:00:00:00:00:66")
    node.wait_until(lambda: mac(node, "eth0") == OTHER, "it has the address that the ADD left")
    assert not re.search("AttachmentBroken|NetworkCheckFailed", node.log.read_text())


def test_pods_that_start_together_on_a_bridge_without_a_gateway(make_node: Callable[..., Node]) -> None:
    """CRI-O calls CHECK after each ADD, while the ports of other pods come and go."""
    node = make_node()
    node.network("cluster", bridge(node, "cluster", isGateway=False))
    places = [node.add_netns() for _ in range(40)]
    for number in range(40):
        node.pod(f"p{number}")
    node.start()

    def starts(number: int) -> list[bytes]:
        pod = f"c{number}", places[number], f"p{number}"
        done = [node.cni(verb, *pod) for verb in ("ADD", "CHECK", "CHECK")]
        if number % 3 == 0:
            done.append(node.cni("DEL", *pod))
        return [answer.stdout for answer in done if answer.code]

    with ThreadPoolExecutor(8) as pool:
        assert [failed for failed in pool.map(starts, range(40)) if failed] == []
