"""Three nodes with one API server and one network in common, on which pods share a range of addresses.

A node is a daemon in a network namespace, as in `tests.e2e.node`, with a bridge that a common switch joins to those of
the others. There is no kubelet: the test itself calls the shim, in the order in which a kubelet does, and makes and
deletes pods. The addresses are given by our built-in, or by whereabouts' own plugin and reconciler as the control.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import yaml

from multus_daemon.plugins.builtin.registry import PLUGINS
from tests import namespaces
from tests.e2e import build_tools
from tests.e2e.addresses.checker import Address, Excuse, Fence, Orders, Place
from tests.e2e.addresses.kernels import Entries, Kernels
from tests.e2e.apiserver import ApiServer
from tests.e2e.node import NAD, Answer, Node
from tests.e2e.server_process import ServerProcess
from tests.programs import needed

MANIFESTS: Final = Path(__file__).parents[3] / "manifests"
CONFIGURED: Final = "/etc/cni/net.d/whereabouts.d"
"""Where whereabouts' installer writes its flat file and its kubeconfig."""
EVERY: Final = "@every 2s"
"""When whereabouts' reconciler looks; its own default is once a day."""
OUT_OF_SERVICE: Final = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
NODES: Final = 3
CLOCK: Final = """
import time
time.time = lambda real=time.time: real() + {clock}
time.time_ns = lambda real=time.time_ns: real() + int({clock} * 1e9)
"""
"""Sets the clock of a Python program; the kernel has one of monotonic time only for each namespace."""


class Subject(StrEnum):
    """Who gives the addresses of a node."""

    BUILTIN = "builtin"
    BINARY = "binary"


@dataclass
class Pod:
    """A pod that was started."""

    name: str
    index: int
    """Number of its node."""
    netns: str
    container: str
    uid: str
    added: Answer

    @property
    def ref(self) -> str:
        """As whereabouts names it."""
        return f"default/{self.name}"

    @property
    def error(self) -> str:
        """Message of the ADD that failed; empty for one that did not."""
        return "" if self.added.code == 0 else str(self.added.json["msg"])


@dataclass
class Done:
    """What was done to the cluster, for the checker."""

    fences: list[Fence] = field(default_factory=list)
    excuses: list[Excuse] = field(default_factory=list)
    restores: list[float] = field(default_factory=list)


class Machine:
    """One node of the fleet, and what was started on it."""

    def __init__(self, fleet: Fleet, number: int, subject: Subject, clock: float = 0.0) -> None:
        """`clock`: by how many seconds the daemon's is wrong."""
        self.name = f"node{number}"
        self.subject = subject
        self._fleet = fleet
        self.node = Node(standalone=False)
        self.places: dict[str, Place] = {}
        self.cut_at: float | None = None
        self._control: ServerProcess | None = None
        if clock:
            folder = self.node.root / "clock"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(CLOCK.format(clock=clock))
            self.node.wrapper = ("env", f"PYTHONPATH={folder}")

    def prepare(self) -> None:
        """Its settings, its place in the common network, its object."""
        server, node = self._fleet.server, self.node
        conf = node.root / "whereabouts.d"
        self._fleet.write_flat_file(conf)
        node.preparation = (
            f"mkdir -p /etc/cni && mount -t tmpfs none /etc/cni && mkdir -p {Path(CONFIGURED).parent}"
            f" && cp -r {conf} {CONFIGURED}"
        )
        token = node.root / "token"
        token.write_text(server.service_account_token("kube-system", "multus-daemon"))
        node.settings |= {
            "kubeconfig": str(server.kubeconfig_for_token(token)),
            "multusNamespace": "kube-system",
            "clusterNetwork": f"cluster-{self.name}",
            "reconcileSeconds": 30,
        }
        if self.subject is Subject.BINARY:
            (node.bin_dir / "whereabouts").symlink_to(build_tools.find("whereabouts"))
            if "whereabouts" in PLUGINS:
                node.settings["builtinPluginsExcept"] = ["whereabouts"]
        node.node_name = self.name
        server.create_node(self.name)
        ipam = {"type": "host-local", "subnet": "10.85.0.0/16", "dataDir": str(node.networks_dir)}
        self._fleet.define(f"cluster-{self.name}", {"type": "ptp", "ipam": ipam}, "kube-system")
        self._fleet.join(node)

    # --- its daemon and its reconciler -----------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the daemon, and start a new one."""
        self.node.kill()
        self.node.start(timeout=60)

    def start_control(self) -> None:
        """Start whereabouts' reconciler, as its DaemonSet does: it sees the node's files below /host."""
        root = self.node.root / "control"
        if not root.exists():
            program = root / "ip-control-loop"
            for name in ("cron-schedule", "var/run/secrets/kubernetes.io/serviceaccount", f"host{CONFIGURED}"):
                (root / name).mkdir(parents=True)
            shutil.copy(build_tools.find("whereabouts-ip-control-loop"), program)
            account = root / "var/run/secrets/kubernetes.io/serviceaccount"
            (account / "token").write_text(self._fleet.token)
            shutil.copy(self._fleet.server.ca_file, account / "ca.crt")
            (root / "cron-schedule/config").write_text(EVERY)
            self._fleet.write_flat_file(root / f"host{CONFIGURED}")
        port = self._fleet.server.port
        variables = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port,
            "NODENAME": self.name, "WHEREABOUTS_NAMESPACE": "kube-system",
        }  # fmt: skip
        inside = [needed("ip"), "netns", "exec", Path(self.node.host).name, "env"]
        words = [f"{key}={value}" for key, value in variables.items()]
        self._control = ServerProcess("control", [*inside, *words, "chroot", str(root), "/ip-control-loop"], root)
        self._control.start()

    def stop_control(self) -> None:
        """End it."""
        if self._control is not None:
            self._control.stop()
            self._control = None

    # --- its way to the API server ---------------------------------------------------------------------------------

    def cut(self) -> None:
        """Drop what goes to the API server and what comes from it; connections stay, and wait."""
        port = self._fleet.server.port
        rules = f"tcp dport {port} drop; tcp sport {port} drop;"
        self._nft(f"table inet cut {{ chain out {{ type filter hook output priority 0; {rules} }}; }}")
        self.cut_at = time.monotonic()

    def mend(self) -> None:
        """Let it through again."""
        if self.cut_at is not None:
            self._nft("delete table inet cut")
            self._fleet.done.excuses.append(Excuse(self.cut_at, time.monotonic(), self.name))
            self.cut_at = None

    def _nft(self, rules: str) -> None:
        command = [needed("ip"), "netns", "exec", Path(self.node.host).name, needed("nft"), "-f", "-"]
        subprocess.run(command, input=f"{rules}\n".encode(), check=True, capture_output=True)


class Fleet:
    """Use it as a context manager."""

    def __init__(self, *subjects: Subject, clocks: Sequence[float] = (), server: ApiServer | None = None) -> None:
        """`subjects`: of each node; `clocks`: by how many seconds they are wrong; `server`: one that runs."""
        self.server = server or ApiServer()
        self._is_own = server is None
        self.machines: list[Machine] = []
        self.done = Done()
        self.pods: dict[str, Pod] = {}
        """Those that run, by container."""
        self._subjects, self._clocks = subjects, clocks or [0.0] * len(subjects)
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self.token = ""

    @property
    def has_binary(self) -> bool:
        """True if whereabouts is on a node."""
        return Subject.BINARY in self._subjects

    def __enter__(self) -> Fleet:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.stop_control()
            machine.node.kill()
        self._stack.close()

    def _build(self) -> None:
        server = self._stack.enter_context(self.server) if self._is_own else self.server
        for crd in self._kinds():
            server.install_crd(crd)
        for name in ("base", *(["addresses"] if Subject.BUILTIN in self._subjects else [])):
            server.apply(*documents(MANIFESTS / name / "rbac.yaml"))
        rights = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
        server.apply(*documents(_installed() / "daemonset-install.yaml", *rights))
        self.token = server.service_account_token("kube-system", "whereabouts", seconds=24 * 3600)
        self.switch = self._stack.enter_context(namespaces.named("switch"))
        self._run("link add lan type bridge", "link set lan up", "link set lo up", space=self.switch)
        for number, (subject, clock) in enumerate(zip(self._subjects, self._clocks, strict=True), 1):
            machine = Machine(self, number, subject, clock)
            self._stack.enter_context(machine.node)
            self.machines.append(machine)
            machine.prepare()
            self._stack.enter_context(server.reachable_in(machine.node.host))
            machine.node.start()
            if subject is Subject.BINARY:
                machine.start_control()
        self.kernels = self._stack.enter_context(Kernels(self._places))
        self.entries = self._stack.enter_context(Entries(server.client))

    def _kinds(self) -> Iterator[dict[str, Any]]:
        """The custom resources: whereabouts' own where it is, else ours."""
        yield from documents(MANIFESTS / "base" / "crd.yaml")
        if self.has_binary:
            for path in sorted(_installed().glob("whereabouts.cni.cncf.io_*.yaml")):
                yield from documents(path)
        else:
            yield from documents(MANIFESTS / "addresses-crds" / "crds.yaml", "CustomResourceDefinition")

    def write_flat_file(self, directory: Path) -> None:
        """What whereabouts' installer writes."""
        directory.mkdir(parents=True, exist_ok=True)
        text = self.server.kubeconfig_for_token(self.token).read_text()
        config = yaml.safe_load(text)
        config["clusters"][0]["cluster"].pop("certificate-authority")
        config["clusters"][0]["cluster"]["certificate-authority-data"] = _base64(self.server.ca_file)
        config["contexts"][0]["context"]["namespace"] = "kube-system"
        (directory / "whereabouts.kubeconfig").write_text(yaml.safe_dump(config))
        flat = {
            "datastore": "kubernetes",
            "kubernetes": {"kubeconfig": f"{CONFIGURED}/whereabouts.kubeconfig"},
            "reconciler_cron_expression": EVERY,
        }
        (directory / "whereabouts.conf").write_text(json.dumps(flat))

    def join(self, node: Node) -> None:
        """Make the node's bridge, and plug it into the switch."""
        space, port = Path(node.host).name, f"port{next(self._numbers)}"
        self._run(
            "link add br-lan type bridge",
            "link set br-lan up",
            f"link add uplink type veth peer name {port} netns {Path(self.switch).name}",
            "link set uplink master br-lan up",
            space=space,
        )
        self._run(f"link set {port} master lan up", space=self.switch)

    @staticmethod
    def _run(*commands: str, space: str) -> None:
        for words in commands:
            subprocess.run([needed("ip"), "-n", Path(space).name, *words.split()], check=True, capture_output=True)

    def _places(self) -> dict[str, Place]:
        return {path: place for machine in self.machines for path, place in list(machine.places.items())}

    # --- the cluster -----------------------------------------------------------------------------------------------

    def define(self, name: str, config: dict[str, Any], namespace: str = "default") -> None:
        """Declare a network."""
        text = json.dumps({"cniVersion": "1.0.0", "name": name, **config})
        self.server.apply({**NAD, "metadata": {"namespace": namespace, "name": name}, "spec": {"config": text}})

    def lan(self, name: str, range_: str, **ipam: Any) -> None:
        """Declare a network on the common bridge with a range of addresses; pods can use it once it is known."""
        self.define(
            name, {"type": "bridge", "bridge": "br-lan", "ipam": {"type": "whereabouts", "range": range_, **ipam}}
        )
        time.sleep(0.3)

    def orders(self, among: Callable[[Address], bool]) -> Orders:
        """What was done until now, and what was reported of these addresses."""
        reports = set()
        for item in self.server.client.get("/api/v1/events")["items"]:
            if item["reason"] == "AddressTaken":
                about = item["involvedObject"]
                for stay in self.kernels.stays(among):
                    if str(stay.address) in item["message"]:
                        reports.add((stay.address, f"{about.get('namespace')}/{about['name']}"))
        done = self.done
        return Orders(tuple(done.fences), tuple(done.excuses), tuple(done.restores), reports=frozenset(reports))

    def fence(self, index: int, how: str) -> None:
        """Say that a node is gone: `delete` its object, or `taint` it."""
        name = self.machines[index].name
        if how == "delete":
            self.server.delete("v1", "Node", name)
        else:
            self.server.client.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": [OUT_OF_SERVICE]}})
        self.done.fences.append(Fence(name, time.monotonic()))

    def unfence(self, index: int) -> None:
        """The node is there again."""
        name = self.machines[index].name
        self.server.create_node(name)
        self.server.client.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    @contextlib.contextmanager
    def api_away(self) -> Iterator[None]:
        """The API server is away in this block."""
        begin = time.monotonic()
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()
            self.done.excuses.append(Excuse(begin, time.monotonic()))

    def snapshot(self) -> Path:
        """What etcd has now, as a crash would leave it."""
        self.server.etcd.pause()
        try:
            target = self.server.directory / f"snapshot{next(self._numbers)}"
            shutil.copytree(self.server.directory / "etcd", target)
        finally:
            self.server.etcd.resume()
        return target

    def restore(self, snapshot: Path) -> None:
        """Give etcd back what it had then, and start the API server anew."""
        begin = time.monotonic()
        self.server.stop()
        self.server.etcd.stop()
        shutil.rmtree(self.server.directory / "etcd")
        shutil.copytree(snapshot, self.server.directory / "etcd")
        self.server.etcd.start()
        self.server.start()
        self.done.excuses.append(Excuse(begin, time.monotonic()))
        self.done.restores.append(time.monotonic())

    # --- pods, as a kubelet ----------------------------------------------------------------------------------------

    def start(self, index: int, name: str, networks: str, *, known: bool = True) -> Pod:
        """Create a pod and attach it. Of one that fails nothing is left but its object, which the caller deletes.

        `known`: create its object; False: it is there already.
        """
        machine = self.machines[index]
        if known:
            annotations = {"k8s.v1.cni.cncf.io/networks": networks}
            made = self.server.create_pod(name, node=machine.name, annotations=annotations, running=False)
        else:
            made = self.server.get("v1", "Pod", name)
        netns = machine.node.add_netns()
        container = f"c{next(self._numbers)}-{name}"
        machine.places[netns] = Place(machine.name, Path(netns).name, f"default/{name}")
        pod = Pod(name, index, netns, container, made["metadata"]["uid"], Answer(1, b'{"msg":"none"}', b"", 0.0))
        self.pods[container] = pod
        pod.added = machine.node.cni("ADD", container, netns, name, uid=pod.uid, timeout=200)
        if pod.added.code:
            self.stop(pod)
        else:
            # As its kubelet does, if it can.
            with contextlib.suppress(Exception):
                status = {"status": {"phase": "Running"}}
                self.server.client.merge(f"/api/v1/namespaces/default/pods/{name}/status", status)
        return pod

    def stop(self, pod: Pod, tries: int = 20) -> bool:
        """End the container; whether a DEL succeeded."""
        machine = self.machines[pod.index]
        is_done = pod.container not in self.pods
        while not is_done and tries:
            answer = machine.node.cni("DEL", pod.container, pod.netns, pod.name, uid=pod.uid, timeout=200)
            is_done, tries = answer.code == 0, tries - 1
            time.sleep(0 if is_done else 0.5)
        self.lose(pod)
        return is_done

    def lose(self, pod: Pod) -> None:
        """The node's power is off: its namespace is gone, and no DEL comes."""
        machine = self.machines[pod.index]
        if self.pods.pop(pod.container, None):
            machine.node.remove_netns(pod.netns)
            machine.places.pop(pod.netns, None)

    def end(self, pod: Pod) -> None:
        """Stop it, and delete its object."""
        self.stop(pod)
        self.server.delete_pod(pod.name)

    def end_all(self) -> None:
        """End every pod that runs."""
        for pod in list(self.pods.values()):
            self.end(pod)


def documents(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the objects of a file; only those of the `kinds`, if there are any."""
    found = [item for item in yaml.safe_load_all(path.read_text()) if item]
    return [item for item in found if not kinds or item["kind"] in kinds]


def _installed() -> Path:
    """The manifests of whereabouts."""
    return build_tools.source("github.com/k8snetworkplumbingwg/whereabouts", build_tools.WHEREABOUTS) / "doc/crds"


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def among(*ranges: str) -> Callable[[Address], bool]:
    """Whether an address is of one of the ranges."""
    networks = [ip_network(item) for item in ranges]
    return lambda item: any(item in network for network in networks if network.version == item.version)


def subjects(text: str) -> Sequence[Subject]:
    """`builtin`, `binary` or `mixed`, for NODES nodes."""
    if text == "mixed":
        return [Subject.BUILTIN, Subject.BINARY, Subject.BUILTIN]
    return [Subject(text)] * NODES
