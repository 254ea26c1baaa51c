"""Our daemon in the place of upstream's: pods that the real v4.3.0 attached are ours to check, keep and delete."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import Answer, Node
from tests.e2e.test_kubernetes import Cluster
from tests.e2e.upstream import Upstream

pytest_plugins = ["tests.e2e.kube_fixtures"]

PORTS = [{"hostPort": 18080, "containerPort": 80, "protocol": "tcp"}]
CHAIN_OF_A_POD = re.compile(r"\bCNI-(DN-)?[0-9a-f]{8,}")
"""Of portmap and of `ipMasq`; portmap leaves the chains that it makes once."""

PODS = {
    "alone": None,
    "lan": "macvlan",
    "two": "unversioned,ptp@data0",
    "asked": json.dumps(
        [
            {"name": "addressed", "ips": ["10.94.0.7/24"], "mac": "02:00:00:00:00:07", "interface": "lan0"},
            {"name": "ports", "portMappings": [{"hostPort": 18081, "containerPort": 81, "protocol": "tcp"}]},
        ]
    ),
}
"""The networks annotation of each pod."""

INTERFACES = {
    "alone": ["eth0", "lo"],
    "lan": ["eth0", "lo", "net1"],
    "two": ["data0", "eth0", "lo", "net1"],
    "asked": ["eth0", "lan0", "lo", "net2"],
}


class Takeover(Cluster):
    """A node whose pods upstream's daemon attaches, and ours deletes; both have the same configuration."""

    upstream: Upstream

    def lay_out(self, reference: Path, **settings: Any) -> None:
        """Networks, plugins, and a configuration map as upstream's, the paths apart."""
        node, server = self.node, self.server
        self.prepare()
        del node.settings["kubeconfig"]
        for plugin in reference.iterdir():
            (node.bin_dir / plugin.name).symlink_to(plugin)
        certificates = node.root / "certificates"
        certificates.mkdir(mode=0o700)
        user = f"system:multus:{self.name}"
        pair = server.authority.client(user.replace(":", "-"), user, ("system:multus",))
        current = certificates / "multus-client-current.pem"
        current.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
        current.chmod(0o600)
        self._grant(user)
        net_d = node.root / "net.d"
        net_d.mkdir()
        node.settings |= {
            "nodeName": self.name,
            "cniConfigDir": str(net_d),
            "multusAutoconfigDir": str(net_d),
            "multusConfigFile": "auto",
            "logLevel": "verbose",
            "logToStderr": True,
            "perNodeCertificate": {
                "enabled": True,
                "bootstrapKubeconfig": str(server.kubeconfig(user, ["system:multus"])),
                "certDir": str(certificates),
                "certDuration": "24h",
            },
        } | settings
        del node.settings["clusterNetwork"]
        self._networks()
        self.spaces: dict[str, str] = {}

    def _grant(self, user: str) -> None:
        """What upstream's manifest grants to its service account, and what ours needs besides."""
        rules = [
            {"apiGroups": ["k8s.cni.cncf.io"], "resources": ["*"], "verbs": ["*"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "update"]},
            {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["get", "update", "patch"]},
            {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        ]
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": f"upstream-{self.name}"}}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"upstream-{self.name}"}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
        self.server.apply(
            {**rbac, "kind": "ClusterRole", "rules": rules},
            {**rbac, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]},
        )

    def ipam(self, subnet: str, **more: Any) -> dict[str, Any]:
        return {
            "type": "host-local",
            "ranges": [[{"subnet": subnet}]],
            "dataDir": str(self.node.networks_dir),
            **more,
        }

    def _networks(self) -> None:
        node = self.node
        node.ip("link", "add", "up0", "type", "veth", "peer", "name", "up1")
        node.ip("link", "set", "up0", "up")
        node.ip("link", "set", "up1", "up")
        bridge = {"type": "bridge", "bridge": "br-two", "ipam": self.ipam("10.92.0.0/24")}
        self.definition("unversioned", json.dumps({"plugins": [bridge, {"type": "tuning", "mtu": 1400}]}))
        macvlan = {"type": "macvlan", "master": "up0", "mode": "bridge", "ipam": self.ipam("10.93.0.0/24")}
        self.definition("macvlan", json.dumps({"cniVersion": "0.3.1", **macvlan}))
        addressed = {
            "type": "bridge",
            "bridge": "br-lan",
            "capabilities": {"ips": True, "mac": True},
            "ipam": {"type": "static"},
        }
        self.definition("addressed", json.dumps({"cniVersion": "0.4.0", "name": "addressed", **addressed}))
        self.network("ptp", "10.95.0.0/24")
        plugins = [
            {"type": "ptp", "ipMasq": True, "ipam": self.ipam("10.96.0.0/24")},
            {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
        ]
        self.definition("ports", json.dumps({"cniVersion": "1.0.0", "name": "ports", "plugins": plugins}))

    def cluster_network(self, kind: str) -> None:
        """The cluster network's own file: `conf` or `conflist`."""
        ipam = self.ipam("10.91.0.0/24", routes=[{"dst": "0.0.0.0/0"}])
        bridge = {"type": "bridge", "bridge": "br-pods", "isGateway": True, "ipMasq": True, "ipam": ipam}
        ptp = {"type": "ptp", "mtu": 1450, "ipMasq": True, "ipam": ipam}
        portmap = {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}}
        kinds: dict[str, dict[str, Any]] = {
            "conf": bridge,
            "conflist": {"plugins": [ptp, portmap]},
        }
        content = {"cniVersion": "1.0.0", "name": "pods", **kinds[kind]}
        (self.node.root / "net.d" / f"10-pods.{kind}").write_text(json.dumps(content))

    # --- the runtime's part ------------------------------------------------------------------------------------------

    def runtime(self, verb: str, pod: str, *, by: str = "ours") -> Answer:
        """One call for a pod by our shim or upstream's, with the configuration that the daemon generated."""
        if pod not in self.spaces:
            self.spaces[pod] = self.node.add_netns()
        netns = self.spaces[pod]
        stdin = self.upstream.stdin()
        if pod == "alone" and b"portMappings" in stdin:
            # As containerd: the configuration declares the capability, and the pod has ports.
            stdin = self.upstream.stdin(runtimeConfig={"portMappings": PORTS})
        if by == "ours":
            return self.cni(verb, pod, netns, stdin=stdin)
        return self.upstream.cni(verb, f"c-{pod}", netns, pod, self.namespace, self.uids[pod], stdin)

    def collect(self, valid: list[dict[str, str]]) -> Answer:
        """GC with the attachments that the runtime knows."""
        # The first version that has GC.
        keys = {"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid}
        return self.node.cni("GC", "", "", "", stdin=self.upstream.stdin(**keys))

    def addresses(self, pod: str, ifname: str) -> list[str]:
        """IPv4 addresses of an interface, as CNI results have them."""
        (link,) = self.node.ip("address", "show", ifname, netns=self.spaces[pod])
        return [f"{item['local']}/{item['prefixlen']}" for item in link["addr_info"] if item["family"] == "inet"]

    def die(self, pod: str) -> None:
        """The pod's namespace goes, and everything in it; so it is when its node has been started anew."""
        self.node.remove_netns(self.spaces[pod])
        self.spaces[pod] = ""

    def attach(self, pods: dict[str, str | None]) -> None:
        """Upstream attaches the pods."""
        for pod, networks in pods.items():
            self.pod(pod, networks)
            added = self.runtime("ADD", pod, by="upstream")
            assert added.code == 0, f"{added.stdout!r} {added.stderr!r}\n{self.upstream.process.tail()}"

    def take_over(self, number: signal.Signals = signal.SIGTERM, *, ready: bool = True) -> None:
        """Our daemon in the place of upstream's."""
        self.upstream.stop(number)
        self.node.start(ready=ready)

    # --- what there is -----------------------------------------------------------------------------------------------

    def rules(self) -> list[str]:
        """Rules and chains in the host's nat table that belong to a pod."""
        command = ["ip", "netns", "exec", Path(self.node.host).name, "iptables-save", "-t", "nat"]
        saved = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        # The counters change by themselves.
        return [re.sub(r"\[.*\]", "", line) for line in saved.splitlines() if CHAIN_OF_A_POD.search(line)]

    def pod_links(self) -> dict[str, list[str]]:
        """Names of the links in each namespace."""
        return {pod: self.node.links(netns) for pod, netns in self.spaces.items() if netns}

    def state(self) -> tuple[Any, ...]:
        """Everything that a pod's networks are made of."""
        links = {
            pod: [(link["ifindex"], link["ifname"], link["address"]) for link in self.node.ip("link", netns=netns)]
            for pod, netns in self.spaces.items()
        }
        addresses = {
            (pod, ifname): self.addresses(pod, ifname) for pod, found in links.items() for _, ifname, _ in found
        }
        return self.node.leftovers(), self.node.links(), self.rules(), links, addresses

    def assert_clean(self, links: list[str], rules: Sequence[str] = ()) -> None:
        """Nothing is left of any pod: in its namespace, on the host, in the files."""
        assert set(map(tuple, self.pod_links().values())) <= {("lo",)}
        assert self.node.leftovers() == []
        assert [name for name in self.node.links() if not name.startswith("br-")] == links
        assert self.rules() == list(rules)


Make = Callable[..., contextlib.AbstractContextManager[Takeover]]


@pytest.fixture
def takeover(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node], reference: Path) -> Make:
    """Makes a node where upstream's daemon serves; both daemons are ended after it."""

    @contextlib.contextmanager
    def make(kind: str, **settings: Any) -> Iterator[Takeover]:
        made = Takeover(api_server, make_node(standalone=False), api_namespace)
        made.lay_out(reference, **settings)
        made.cluster_network(kind)
        try:
            made.upstream = Upstream(made.node, made.name)
        except ToolError as error:
            pytest.skip(str(error))
        with api_server.reachable_in(made.node.host):
            try:
                made.upstream.start()
                yield made
            finally:
                made.upstream.stop(signal.SIGKILL)
                made.node.kill()

    return make


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "shim", "settings"),
    [
        ("conf", signal.SIGTERM, "ours", {}),
        ("conflist", signal.SIGKILL, "upstream", {"chrootDir": "/"}),
        ("conflist", signal.SIGTERM, "ours", {"builtinPlugins": "off"}),
    ],
    ids=["conf-sigterm", "conflist-sigkill-chroot-upstream-shim", "conflist-sigterm-binaries"],
)
@pytest.mark.weak_spot(1, 6)
def test_live_pods_are_checked_kept_and_deleted(
    takeover: Make, kind: str, number: signal.Signals, shim: str, settings: dict[str, Any]
) -> None:
    with takeover(kind, **settings) as made:
        links = made.node.links()
        made.attach(PODS)
        assert made.pod_links() == INTERFACES
        assert made.rules(), "there is something to be left"
        before = made.state()
        made.take_over(number)
        assert made.state() == before
        # Not of those with port mappings: CHECK of portmap 1.1.1 wants IPv6 rules also for a pod without IPv6.
        for pod in ("lan", "two"):
            checked = made.runtime("CHECK", pod, by=shim)
            assert checked.code == 0, checked.stdout
        valid = [{"containerID": f"c-{pod}", "ifname": "eth0"} for pod in PODS]
        collected = made.collect(valid)
        assert collected.code == 0, collected.stdout
        for pod in PODS:
            again = made.runtime("ADD", pod, by=shim)
            assert again.code == 0, again.stdout
            assert [address["address"] for address in again.json["ips"]] == made.addresses(pod, "eth0")
        assert made.state() == before
        for pod in PODS:
            deleted = made.runtime("DEL", pod, by=shim)
            assert (deleted.code, deleted.stdout) == (0, b"")
        made.assert_clean(links)
        # Again is no failure.
        assert made.runtime("DEL", "two", by=shim).code == 0


def test_what_the_api_server_has_forgotten_is_deleted_all_the_same(takeover: Make) -> None:
    with takeover("conflist") as made:
        links = made.node.links()
        made.attach(PODS)
        made.server.delete_pod("asked", made.namespace)
        for name in ("unversioned", "macvlan", "addressed", "ports"):
            made.server.delete("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition", name, made.namespace)
        # Without the cluster network's configuration our daemon is not ready: DEL needs neither.
        (made.node.root / "net.d" / "10-pods.conflist").unlink()
        made.take_over(ready=False)
        for pod in PODS:
            assert made.runtime("DEL", pod).code == 0
        made.assert_clean(links)


def test_pods_whose_namespace_is_gone(takeover: Make) -> None:
    with takeover("conflist") as made:
        links = made.node.links()
        made.attach(PODS)
        made.take_over()
        made.die("lan")
        made.die("alone")
        kept = [{"containerID": f"c-{pod}", "ifname": "eth0"} for pod in PODS if pod != "lan"]
        assert made.collect(kept).code == 0
        files = made.node.leftovers()
        assert [path for path in files if "c-lan" in path or path.startswith("networks/macvlan")] == []
        assert made.pod_links() == {pod: INTERFACES[pod] for pod in ("two", "asked")}
        for pod in ("alone", "two", "asked"):
            assert made.runtime("DEL", pod).code == 0
        # Without a namespace the reference ptp leaves its rules of ipMasq, whoever calls it.
        made.assert_clean(links, rules=[line for line in made.rules() if "CNI-DN-" not in line])


@pytest.mark.weak_spot(1, 32)
def test_what_upstreams_own_del_has_lost_is_freed_by_our_gc(takeover: Make) -> None:
    with takeover("conflist") as made:
        links = made.node.links()
        made.attach({"two": PODS["two"]})
        assert made.runtime("DEL", "two", by="upstream").code == 0
        assert "networks/pods/10.91.0.2" in made.node.leftovers(), "upstream's DEL loses the ranges of a conflist"
        made.take_over()
        assert made.collect([]).code == 0
        made.assert_clean(links)


def test_check_of_a_pod_that_has_lost_an_interface_says_which(takeover: Make) -> None:
    with takeover("conf") as made:
        made.attach({"two": PODS["two"]})
        made.take_over()
        assert made.runtime("CHECK", "two").code == 0
        made.node.ip("link", "delete", "data0", netns=made.spaces["two"])
        checked = made.runtime("CHECK", "two")
        assert checked.code == 1
        assert "data0" in checked.json["msg"]


@pytest.mark.weak_spot(28)
def test_files_that_a_crash_cut_off_or_lost(takeover: Make) -> None:
    """Whatever is left of two sources is enough to delete the pod."""
    with takeover("conflist") as made:
        links = made.node.links()
        damaged = ("truncated", "emptied", "garbage", "unrecorded", "resultless")
        made.attach({pod: PODS["asked"] if pod == "truncated" else PODS["two"] for pod in damaged})
        cache = made.node.cni_dir
        whole = (cache / "c-truncated").read_bytes()
        (cache / "c-truncated").write_bytes(whole[: len(whole) // 2])
        (cache / "c-emptied").write_bytes(b"")
        (cache / "c-garbage").write_bytes(b"\0" * 4096)
        (cache / "c-unrecorded").unlink()
        for path in (cache / "results").glob("*-c-resultless-*"):
            path.unlink()
        made.take_over()
        before = made.state()
        for pod in ("truncated", "emptied", "garbage"):
            if pod != "truncated":
                checked = made.runtime("CHECK", pod)
                assert checked.code == 0, checked.stdout
            again = made.runtime("ADD", pod)
            assert again.code == 0, again.stdout
            assert [address["address"] for address in again.json["ips"]] == made.addresses(pod, "eth0")
        refused = made.runtime("ADD", "unrecorded")
        assert refused.code == 1
        assert "'eth0' already exists" in refused.json["msg"]
        checked = made.runtime("CHECK", "resultless")
        assert (checked.code, checked.json["code"]) == (1, 3)
        assert made.state() == before
        for pod in damaged:
            deleted = made.runtime("DEL", pod)
            assert deleted.code == 0, (pod, deleted.stdout)
        made.assert_clean(links)


def test_an_add_that_was_cut_off_is_undone(takeover: Make) -> None:
    """Upstream writes its list before the first plugin runs; killed in the middle it leaves a pod half attached."""
    with takeover("conflist") as made:
        links = made.node.links()
        made.node.plugin("hangs", "touch $0.called; exec sleep 60")
        made.definition("hangs", json.dumps({"cniVersion": "1.0.0", "name": "hangs", "type": "hangs"}))
        made.pod("half", "unversioned,hangs")
        add = threading.Thread(target=made.runtime, args=("ADD", "half"), kwargs={"by": "upstream"})
        add.start()
        called = made.node.bin_dir / "hangs.called"
        made.node.wait_until(called.exists, "the second network's plugin runs")
        made.upstream.stop(signal.SIGKILL)
        add.join()
        made.node.plugin("hangs", "exit 0")
        assert made.pod_links() == {"half": ["eth0", "lo", "net1"]}
        made.node.start()
        checked = made.runtime("CHECK", "half")
        assert (checked.code, checked.json["code"]) == (1, 3)
        assert made.runtime("DEL", "half").code == 0
        made.assert_clean(links)
