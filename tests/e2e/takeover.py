"""A node on which upstream's daemon and ours take turns, and pods of every kind."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.node import Answer
from tests.e2e.test_kubernetes import Cluster
from tests.e2e.upstream import Upstream
from tests.programs import needed

PORTS = [{"hostPort": 18080, "containerPort": 80, "protocol": "tcp"}]
CHAIN_OF_A_POD = re.compile(r"\bCNI-(DN-)?[0-9a-f]{8,}")
"""Matches the chains of portmap and `ipMasq` for a pod. The chains that portmap creates once per node stay."""

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
        # The component per-node-certificates mounts it.
        node.writable.append(certificates)
        self._grant(user)
        net_d = node.root / "net.d"
        net_d.mkdir()
        node.settings |= {
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
        node.node_name = self.name
        del node.settings["clusterNetwork"]
        self._networks()
        self.spaces: dict[str, str] = {}
        self.host_ports: dict[str, Sequence[Mapping[str, Any]]] = {"alone": PORTS}

    def _grant(self, user: str) -> None:
        """Grant the rights of upstream's manifest and the additional rights that our daemon needs."""
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
        """One call for a pod, with the configuration that the daemon generated.

        `by`: the shim, `ours`, `upstream` (of the daemon's release), or a release of upstream.
        """
        if pod not in self.spaces:
            self.spaces[pod] = self.node.add_netns()
        netns = self.spaces[pod]
        stdin = self.upstream.stdin()
        if pod in self.host_ports and b"portMappings" in stdin:
            # As containerd: the configuration declares the capability, and the pod has ports.
            stdin = self.upstream.stdin(runtimeConfig={"portMappings": self.host_ports[pod]})
        if by == "ours":
            return self.cni(verb, pod, netns, stdin=stdin)
        release = "" if by == "upstream" else by
        return self.upstream.cni(verb, f"c-{pod}", netns, pod, self.namespace, self.uids[pod], stdin, release)

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
        self.node.remove_netns_and_links(self.spaces[pod])
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
        command = [needed("ip"), "netns", "exec", Path(self.node.host).name, "iptables-save", "-t", "nat"]
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
