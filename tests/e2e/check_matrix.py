"""Networks of every reference plugin, and nodes of both daemons that attach pods to them as CRI-O does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.e2e.node import Answer, Node
from tests.e2e.takeover import Takeover
from tests.e2e.test_kubernetes import Cluster
from tests.e2e.upstream import Upstream
from tests.programs import needed

FAKES: Final = Path(__file__).parents[1] / "fakes"
VERSIONS: Final = ("0.4.0", "1.0.0", "1.1.0")
"""The CNI versions that have CHECK."""

LATEST: Final = VERSIONS[-1:]

THIRD_PARTY: Final = "CNI_THIRD_PARTY_DIR"
"""Environment variable: a directory with `whereabouts`, its CRDs as `*.yaml`, and `route-override`."""

ROUTES: Final = [{"dst": "0.0.0.0/0"}, {"dst": "10.200.0.0/16"}]
PORTS: Final = [{"hostPort": 18080, "containerPort": 80, "protocol": "tcp"}]
DHCP_BRIDGE: Final = "br-dhcp"
MASTER: Final = "low0"
"""The device below macvlan; its peer is a port of the bridge on which the DHCP server listens."""


@dataclass(frozen=True)
class Case:
    """One network. In `plugins`, `@KEY@` stands for something of the node: see `Lab.config`."""

    name: str
    plugins: Sequence[dict[str, Any]]
    starts: bool = True
    """True if a pod with this network starts under upstream's daemon."""
    kind: str = ""
    """Kind of link that the kernel must know, as in `ip link add type KIND`."""
    needs: str = ""
    """Program of `THIRD_PARTY`, or of the machine."""
    ports: bool = False
    device: bool = False
    """True if the network uses a device of the host. Its DEL fails without the device."""
    secondary: bool = False
    """True if the pod has its own cluster network and this network is attached as net1."""
    versions: Sequence[str] = VERSIONS
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the list."""

    @property
    def has_interface(self) -> bool:
        """Return True if a plugin creates an interface. An IPAM plugin alone creates none."""
        return not self.types <= {"host-local", "static"}

    @property
    def has_link(self) -> bool:
        """Return True if the interface can be deleted."""
        return self.has_interface and "loopback" not in self.types

    @property
    def types(self) -> set[str]:
        """Names of the programs that its plugins are."""
        found = {plugin["type"] for plugin in self.plugins}
        return found | {plugin["ipam"]["type"] for plugin in self.plugins if plugin.get("ipam", {}).get("type")}


# --- the networks ----------------------------------------------------------------------------------------------------


def host_local(routes: list[dict[str, str]] | None = None, **more: Any) -> dict[str, Any]:
    ranges = [[{"subnet": "10.150.0.0/24"}]]
    return {"type": "host-local", "dataDir": "@DATA@", "ranges": ranges, "routes": routes or ROUTES, **more}


def dual_stack() -> dict[str, Any]:
    ranges = [[{"subnet": "10.150.0.0/24"}], [{"subnet": "fd50::/64"}]]
    return host_local([*ROUTES, {"dst": "::/0"}, {"dst": "fd60::/64"}], ranges=ranges)


def static(**more: Any) -> dict[str, Any]:
    address = {"address": "10.150.0.7/24", "gateway": "10.150.0.1"}
    return {"type": "static", "addresses": [address], "routes": ROUTES, **more}


def without_check() -> dict[str, Any]:
    """Return an IPAM plugin like whereabouts: it sets addresses and routes, but does not implement CHECK."""
    return static(type="without-check")


def whereabouts() -> dict[str, Any]:
    """The real one."""
    return {
        "type": "whereabouts",
        "range": "10.150.0.0/24",
        "gateway": "10.150.0.1",
        "routes": ROUTES,
        "kubernetes": {"kubeconfig": "@KUBECONFIG@"},
        "configuration_path": "@ROOT@/whereabouts.conf",
    }


MAINS: Final[dict[str, dict[str, Any]]] = {
    "bridge": {"type": "bridge", "bridge": "br-pods", "isGateway": True},
    "macvlan": {"type": "macvlan", "master": MASTER, "mode": "bridge"},
    "ptp": {"type": "ptp"},
}
"""Every other plugin is tested with each of these main plugins."""

METAS: Final[dict[str, dict[str, Any]]] = {
    "bandwidth": {"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000},
    "firewall": {"type": "firewall", "backend": "iptables"},
    "portmap": {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
    "sbr": {"type": "sbr"},
    "tuning": {"type": "tuning", "mtu": 1400, "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}},
    "vrf": {"type": "vrf", "vrfname": "red"},
}

GONE: Final = [{"dst": "10.200.0.0/16"}]
OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    "routes deleted": {"type": "routes-moved", "delroutes": GONE},
    "routes deleted, result kept": {"type": "routes-moved", "delroutes": GONE, "keepresult": True},
    "routes replaced": {
        "type": "routes-moved",
        "delroutes": ROUTES,
        "addroutes": [{"dst": "10.201.0.0/16", "gw": "10.150.0.1"}],
    },
    "route-override": {"type": "route-override", "delroutes": GONE},
    "route-override, flushed": {
        "type": "route-override",
        "flushroutes": True,
        "addroutes": [{"dst": "10.201.0.0/16", "gw": "10.150.0.1"}],
    },
}


def _alone() -> Iterator[Case]:
    bridge = {"type": "bridge", "bridge": "br-flat"}
    yield Case("bridge, no ipam", [bridge])
    yield Case("bridge, ipam {}", [{**bridge, "ipam": {}}])

    yield Case("dummy", [{"type": "dummy", "ipam": host_local([])}], kind="dummy")
    yield Case("host-device", [{"type": "host-device", "device": "@DEVICE@", "ipam": host_local()}], device=True)
    yield Case("host-device, no ipam", [{"type": "host-device", "device": "@DEVICE@"}], device=True)
    yield Case("ipvlan", [{"type": "ipvlan", "master": MASTER, "ipam": host_local()}], kind="ipvlan")
    yield Case("loopback", [{"type": "loopback"}])
    yield Case("macvlan, no ipam", [{"type": "macvlan", "master": MASTER, "mode": "bridge"}])
    yield Case("tap", [{"type": "tap", "ipam": host_local()}], kind="tun")
    yield Case("vlan", [{"type": "vlan", "master": MASTER, "vlanId": 5, "ipam": host_local()}], kind="vlan")
    for name, plugin in METAS.items():
        yield Case(name, [plugin], starts=False, ports=name == "portmap")
    yield Case("host-local", [{"type": "host-local", "ipam": host_local()}])
    yield Case("static", [{"type": "static", "ipam": static()}])


def _behind(main: str) -> Iterator[Case]:
    plugin = MAINS[main]
    usual = {**plugin, "ipam": host_local()}
    yield Case(main, [usual])
    yield Case(f"{main}, dual stack", [{**plugin, "ipam": dual_stack()}], versions=LATEST)
    yield Case(f"{main}, static", [{**plugin, "ipam": static()}])
    # It asks before there is a link: not with ptp.
    if main != "ptp":
        own = {"bridge": DHCP_BRIDGE, "isGateway": False} if main == "bridge" else {}
        ipam = {"type": "dhcp", "daemonSocketPath": "@DHCP@"}
        yield Case(f"{main}, dhcp", [{**plugin, **own, "ipam": ipam}], needs="busybox")
    yield Case(f"{main}, IPAM without CHECK", [{**plugin, "ipam": without_check()}])
    yield Case(f"{main}, whereabouts", [{**plugin, "ipam": whereabouts()}], needs="whereabouts")
    for name, meta in METAS.items():
        for secondary in (False, True) if name == "sbr" else (False,):
            yield Case(
                f"{main}, {name}{', as net1' if secondary else ''}",
                [usual, meta],
                # It needs a link on the host.
                starts=(main, name) != ("macvlan", "bandwidth"),
                kind="vrf" if name == "vrf" else "",
                ports=name == "portmap",
                secondary=secondary,
                versions=LATEST if secondary else VERSIONS,
            )
    for name, override in OVERRIDES.items():
        real = override["type"] == "route-override"
        for secondary in (False, True):
            yield Case(
                f"{main}, {name}{', as net1' if secondary else ''}",
                [usual, override],
                needs="route-override" if real else "",
                secondary=secondary,
                # The real one is built with a library of before 1.1.0.
                versions=("1.0.0",)
                if real and secondary
                else VERSIONS[:2]
                if real
                else LATEST
                if secondary
                else VERSIONS,
            )


CASES: Final = {case.name: case for case in (*_alone(), *(case for main in MAINS for case in _behind(main)))}


# --- a node ----------------------------------------------------------------------------------------------------------


@dataclass
class Pod:
    """A pod that one of the cases is the network of, and what the runtime knows about it."""

    name: str
    case: Case
    version: str
    netns: str
    ports: list[dict[str, Any]] = field(default_factory=list)
    result: Any = None
    """The result of ADD, which the runtime keeps."""
    is_attached: bool = False

    @property
    def container(self) -> str:
        """The sandbox's id."""
        return f"c-{self.name}"

    @property
    def ifname(self) -> str:
        """The interface of the case's network, if a plugin makes one of this name."""
        return "net1" if self.case.secondary else "eth0"


class Lab:
    """A node with the plugins, the devices and the DHCP server that the cases need."""

    def __init__(self, node: Node, kubeconfig: Path | None = None) -> None:
        """Raises `build_tools.ToolError` where a plugin is missing."""
        self.node = node
        self._kubeconfig = kubeconfig
        self._numbers = iter(range(1, 1 << 30))
        self._stack = contextlib.ExitStack()
        self._dhcp_socket = node.root / "dhcp.sock"
        self._install()
        self._make_devices()

    def _install(self) -> None:
        for name in build_tools.REFERENCE_PLUGINS:
            # What the fixtures of upstream's daemon have brought is Debian's.
            (self.node.bin_dir / name).unlink(missing_ok=True)
            (self.node.bin_dir / name).symlink_to(build_tools.find(f"plugin-{name}"))
        for name, fake in {"without-check": "ipam_without_check.py", "routes-moved": "route_override.py"}.items():
            shutil.copy(FAKES / fake, self.node.bin_dir / name)
            (self.node.bin_dir / name).chmod(0o755)
        # It fails without a file, although the network's configuration says all.
        (self.node.root / "whereabouts.conf").write_text("{}")
        for name in ("whereabouts", "route-override"):
            if path := third_party(name):
                (self.node.bin_dir / name).symlink_to(path)

    def _make_devices(self) -> None:
        ip = self.node.ip
        ip("link", "add", DHCP_BRIDGE, "type", "bridge")
        ip("address", "add", "10.149.0.1/24", "dev", DHCP_BRIDGE)
        ip("link", "add", MASTER, "type", "veth", "peer", "name", "low1")
        ip("link", "set", "low1", "master", DHCP_BRIDGE)
        for name in (DHCP_BRIDGE, MASTER, "low1"):
            ip("link", "set", name, "up")

    def _spawn(self, *command: str) -> None:
        inside = [needed("ip"), "netns", "exec", Path(self.node.host).name]
        process = subprocess.Popen([*inside, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def serve_dhcp(self) -> None:
        """Start the DHCP server of the network and the daemon of the plugin, once."""
        if self._dhcp_socket.exists():
            return
        lines = (
            *("start 10.149.0.10", "end 10.149.0.250", f"interface {DHCP_BRIDGE}", "option lease 3600"),
            *("option subnet 255.255.255.0", "option router 10.149.0.1"),
            *(f"lease_file {self.node.root}/leases", f"pidfile {self.node.root}/udhcpd.pid"),
        )
        config = self.node.root / "udhcpd.conf"
        config.write_text("\n".join(lines) + "\n")
        (self.node.root / "leases").touch()
        self._spawn("busybox", "udhcpd", "-f", "-a", "1", str(config))
        # A first packet can be lost, of a link that has just come up.
        patience = ("-timeout", "5s", "-resendmax", "500ms")
        self._spawn(str(self.node.bin_dir / "dhcp"), "daemon", "-socketpath", str(self._dhcp_socket), *patience)
        self.node.wait_until(self._dhcp_socket.exists, "the dhcp daemon listens")

    def close(self) -> None:
        """End what was started here."""
        self._stack.close()

    def config(self, case: Case, version: str) -> str:
        """The network's configuration on this node."""
        if "dhcp" in case.types:
            self.serve_dhcp()
        values = {
            "DATA": self.node.networks_dir,
            "DEVICE": "hd0",
            "DHCP": self._dhcp_socket,
            "KUBECONFIG": self._kubeconfig or "",
            "ROOT": self.node.root,
        }
        text = json.dumps({"cniVersion": version, "name": network(case, version), "plugins": case.plugins, **case.keys})
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        return text

    @contextlib.contextmanager
    def pod(self, case: Case, version: str) -> Iterator[Pod]:
        """Declare a pod and its network, and make its namespace; what is left of it is removed."""
        # No name is the beginning of another one.
        name = f"p{next(self._numbers):04}"
        made = Pod(name, case, version, self.node.add_netns())
        self.node.ip("link", "set", "lo", "up", netns=made.netns)
        if case.device:
            self.node.ip("link", "add", "hd0", "type", "veth", "peer", "name", "hd1")
            self.node.ip("link", "set", "hd1", "up")
        element = {"name": network(case, version), "namespace": self.namespace}
        if case.ports and case.secondary:
            element["portMappings"] = PORTS  # type: ignore[assignment]
        key = "k8s.v1.cni.cncf.io/networks" if case.secondary else "v1.multus-cni.io/default-network"
        self.declare(made, self.config(case, version), {key: json.dumps([element])})
        try:
            yield made
        finally:
            self._remove(made)

    def _remove(self, pod: Pod) -> None:
        if pod.is_attached:
            self.call("DEL", pod)
        self.node.remove_netns(pod.netns)
        if pod.case.device and "hd1" in self.node.links():
            self.node.ip("link", "delete", "hd1")
        shutil.rmtree(self.node.networks_dir, ignore_errors=True)

    def call(self, verb: str, pod: Pod) -> Answer:
        """Call the shim as libcni does: CHECK and DEL have the result of ADD."""
        keys: dict[str, Any] = {"cniVersion": self.runtime_version(pod)}
        if pod.case.ports and not pod.case.secondary:
            keys["runtimeConfig"] = {"portMappings": PORTS}
        if verb != "ADD" and pod.result is not None:
            keys["prevResult"] = pod.result
        pod.is_attached = verb != "DEL"
        answer = self.run(verb, pod, keys)
        if verb == "ADD" and answer.code == 0:
            pod.result = answer.json
        return answer

    # --- what differs ------------------------------------------------------------------------------------------------

    namespace = "kube-system"

    def runtime_version(self, pod: Pod) -> str:
        """Return the CNI version of the runtime's configuration."""
        return pod.version

    def declare(self, pod: Pod, config: str, annotations: dict[str, str]) -> None:
        """Make the objects of the network and of the pod."""
        self.node.network(network(pod.case, pod.version), config, self.namespace)
        metadata = {"namespace": "default", "name": pod.name, "uid": f"uid-{pod.name}", "annotations": annotations}
        fields = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
        (self.node.manifests / f"pod-{pod.name}.yaml").write_text(json.dumps(fields))

    def run(self, verb: str, pod: Pod, keys: dict[str, Any]) -> Answer:
        """Run the shim with the runtime's configuration and `keys`."""
        stdin = json.dumps(json.loads(self.node.stdin) | keys).encode()
        return self.node.cni(verb, pod.container, pod.netns, pod.name, stdin=stdin)

    def leftovers(self, pod: Pod) -> list[str]:
        """Return the files of the pod's attachments; no other pod has addresses."""
        return [path for path in self.node.leftovers() if pod.container in path or path.startswith("networks/")]


class ClusterLab(Lab):
    """The same with an API server."""

    def __init__(self, made: Cluster, kubeconfig: Path | None = None) -> None:
        super().__init__(made.node, kubeconfig)
        self.cluster = made
        self.namespace = made.namespace

    def declare(self, pod: Pod, config: str, annotations: dict[str, str]) -> None:
        self.cluster.definition(network(pod.case, pod.version), config)
        self.cluster.pod(pod.name, None, **annotations)

    def run(self, verb: str, pod: Pod, keys: dict[str, Any]) -> Answer:
        stdin = json.dumps(json.loads(self.node.stdin) | keys).encode()
        return self.cluster.cni(verb, pod.name, pod.netns, pod.container, stdin=stdin)


class UpstreamLab(ClusterLab):
    """The same with upstream's daemon and shim."""

    def __init__(self, made: Takeover, kubeconfig: Path) -> None:
        super().__init__(made, kubeconfig)
        self._upstream = made.upstream

    def runtime_version(self, pod: Pod) -> str:
        # Its CHECK and DEL refuse a result of 0.4.0: "result type supports [1.0.0 1.1.0]".
        return "1.0.0" if pod.version == "0.4.0" else pod.version

    def leftovers(self, pod: Pod) -> list[str]:
        return []

    def run(self, verb: str, pod: Pod, keys: dict[str, Any]) -> Answer:
        uid = self.cluster.uids[pod.name]
        stdin = self._upstream.stdin(**keys)
        return self._upstream.cni(verb, pod.container, pod.netns, pod.name, self.namespace, uid, stdin)


def cluster_network(node: Node) -> dict[str, Any]:
    """The network of a pod whose case is a secondary network."""
    ipam = host_local([{"dst": "0.0.0.0/0"}], ranges=[[{"subnet": "10.81.0.0/16"}]])
    return {"cniVersion": "1.0.0", "name": "cluster", "type": "ptp", "ipam": ipam | {"dataDir": str(node.networks_dir)}}


def network(case: Case, version: str) -> str:
    """The name of the case's network."""
    words = "".join(letter if letter.isalnum() else " " for letter in case.name.lower()).split()
    return "-".join([*words, *version.split(".")])


def third_party(name: str) -> Path | None:
    """The program in the directory that `THIRD_PARTY` names."""
    directory = os.environ.get(THIRD_PARTY, "")
    path = Path(directory) / name
    return path.resolve() if directory and os.access(path, os.X_OK) else None


@contextlib.contextmanager
def our_lab(builtins: str, server: ApiServer | None = None, **settings: Any) -> Iterator[Lab]:
    """A node of our daemon. `server`: the API server that whereabouts talks to."""
    with Node(settings={"builtinPlugins": builtins, **settings}) as node, contextlib.ExitStack() as stack:
        kubeconfig = None
        if server:
            for path in sorted(Path(os.environ.get(THIRD_PARTY, "")).glob("*.yaml")):
                for item in filter(None, yaml.safe_load_all(path.read_text())):
                    server.install_crd(item)
            stack.enter_context(server.reachable_in(node.host))
            kubeconfig = server.admin_kubeconfig
        lab = Lab(node, kubeconfig)
        stack.callback(lab.close)
        node.network("cluster", cluster_network(node))
        node.start()
        yield lab


@contextlib.contextmanager
def upstream_lab(server: ApiServer, namespace: str) -> Iterator[Lab]:
    """A node of upstream's daemon."""
    server.create_namespace(namespace)
    with Node(standalone=False) as node, contextlib.ExitStack() as stack:
        made = Takeover(server, node, namespace)
        # Our own plugins are installed below.
        made.lay_out(node.bin_dir)
        (node.root / "net.d" / "10-cluster.conf").write_text(json.dumps(cluster_network(node)))
        stack.enter_context(server.reachable_in(node.host))
        made.upstream = Upstream(node, made.name)
        lab = UpstreamLab(made, server.admin_kubeconfig)
        stack.callback(lab.close)
        stack.callback(made.upstream.stop, signal.SIGKILL)
        made.upstream.start()
        yield lab
