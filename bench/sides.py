"""The alternatives that are measured beside each other: our daemon, the reference plugins, another implementation.

A side attaches pods of several sizes: `size` is the number of networks beside the cluster network, or the name of
another cluster network: DUAL, or a list of CHAINS. All have addresses of host-local. Each worker has a network
namespace of its own, in which one pod at a time lives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import multus_shim
from bench import verdict
from bench.program import Run, processor_seconds, run
from tests.e2e.node import Node

REFERENCE: Final = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
PLUGINS: Final = ("ptp", "host-local")
FOREIGN: Final = "calico-like"
"""A plugin that no built-in replaces: the reference ptp under another name."""
PTP: Final = "ptp"
PORT: Final = "port"
"""The list whose pods ask for a host port."""
CHAINS: Final[Mapping[str, Sequence[str]]] = {
    PTP: ("ptp",),
    "kind": ("ptp", "portmap"),
    PORT: ("ptp", "portmap"),
    "full": ("ptp", "portmap", "bandwidth"),
    "k3s": ("flannel", "portmap", "bandwidth"),
    "calico": (FOREIGN, "bandwidth", "portmap"),
}
"""The types of the plugins of each list."""
ALL_TYPES: Final = frozenset({*PLUGINS, "bridge", *(name for types in CHAINS.values() for name in types)})
_SUBNETS: Final = "FLANNEL_NETWORK=10.90.0.0/16\nFLANNEL_SUBNET=10.90.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
_CAPABILITIES: Final = {"portmap": "portMappings", "bandwidth": "bandwidth"}
MOST: Final = 16
"""Networks of the largest pod, beside its cluster network."""
DUAL: Final = "dual"
"""In place of a size: a pod whose cluster network has an IPv4 and an IPv6 address."""
DEFAULT_NETWORK: Final = "v1.multus-cni.io/default-network"
START: Final = 120.0
"""Seconds for a daemon to start, on a machine with ten times as much to do as it can."""
NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"

Size = int | str
T = TypeVar("T")


class Side(Protocol):
    """One alternative."""

    name: str

    def call(self, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
        """One verb, from the start of the program that the runtime starts to its exit.

        For the worker's own pod of the size, or for `pod`.
        """
        ...

    def processor(self) -> float:
        """Seconds of processor time so far of what outlives a call."""
        ...


class FailedError(Exception):
    """A call that a bench needs has failed."""


def checked(side: Side, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
    """A call that must succeed. Raises FailedError with what the program said."""
    done = side.call(verb, container, size, worker, pod)
    if done.code:
        said = (done.output + done.errors).decode(errors="replace")[-2000:]
        raise FailedError(f"{verb} by {side.name} for a pod with {size} more networks: {said}")
    return done


def in_turn(entries: Sequence[T], number: int) -> list[T]:
    """The entries in the order of a round: each is first, and each is before and after each other one, as often."""
    turn = number % len(entries)
    order = [*entries[turn:], *entries[:turn]]
    return order[::-1] if number // len(entries) % 2 else order


# --- networks --------------------------------------------------------------------------------------------------------


def ipam(data: Path, number: int, *, dual: bool = False) -> dict[str, Any]:
    """host-local with the addresses of the network of a number."""
    ranges = [[{"subnet": f"10.{100 + number}.0.0/16"}]] + ([[{"subnet": "fd00:100::/64"}]] if dual else [])
    return {"type": "host-local", "ranges": ranges, "dataDir": str(data)}


def network(name: str, data: Path, number: int, *, dual: bool = False) -> dict[str, Any]:
    """A ptp network; the numbers keep their subnets apart."""
    return {"cniVersion": "1.0.0", "name": name, "type": "ptp", "ipam": ipam(data, number, dual=dual)}


def chain(data: Path, name: str, number: int) -> dict[str, Any]:
    """A network of the list of CHAINS; writes flannel's file beside `data`."""
    plugins: list[dict[str, Any]] = [{"type": plugin} for plugin in CHAINS[name]]
    first = plugins[0]
    if first["type"] == "flannel":
        env, state = data.with_name("subnet.env"), str(data.with_name("flannel"))
        env.parent.mkdir(parents=True, exist_ok=True)
        env.write_text(_SUBNETS)
        first |= {"subnetFile": str(env), "dataDir": state, "ipam": {"dataDir": str(data)}}
        first["delegate"] = {"hairpinMode": True, "isDefaultGateway": True}
    else:
        first["ipam"] = ipam(data, number)
    for plugin in plugins[1:]:
        plugin["capabilities"] = {_CAPABILITIES[plugin["type"]]: True}
    return {"cniVersion": "1.0.0", "name": name, "plugins": plugins}


def runtime_config(size: Size, worker: int) -> dict[str, Any]:
    """What the runtime asks for: a host port in TCP for a pod of PORT."""
    port = {"hostPort": 30000 + worker, "containerPort": 80, "protocol": "tcp"}
    return {"portMappings": [port]} if size == PORT else {}


def with_runtime_config(stdin: bytes, size: Size, worker: int) -> bytes:
    """The runtime's configuration of Multus with what it asks for."""
    asked = runtime_config(size, worker)
    return json.dumps(json.loads(stdin) | {"runtimeConfig": asked}).encode() if asked else stdin


def has_programs(types: Sequence[str]) -> bool:
    """Report whether the reference plugins of a list are here."""
    return all((REFERENCE / ("ptp" if name == FOREIGN else name)).exists() for name in types)


def copy_programs(bin_dir: Path, types: Collection[str]) -> None:
    """Install those of the reference plugins that are here; a link might lead out of a daemon's chroot."""
    for name in types:
        program = REFERENCE / ("ptp" if name == FOREIGN else name)
        if program.exists():
            shutil.copy2(program, bin_dir / name)


def names(size: Size) -> list[str]:
    """The networks of a pod, beside its cluster network."""
    return [f"n{number}" for number in range(size if isinstance(size, int) else 0)]


def definitions(data: Path, more: int = MOST) -> dict[str, dict[str, Any]]:
    """Name and configuration of every network: the two cluster networks, and those of the largest pod."""
    found = {"cluster": network("cluster", data, 0), DUAL: network(DUAL, data, more + 1, dual=True)}
    found |= {name: chain(data, name, more + number) for number, name in enumerate(CHAINS, 2)}
    return found | {name: network(name, data, number) for number, name in enumerate(names(more), 1)}


def pod_annotations(size: Size, cluster_namespace: str) -> dict[str, str]:
    """A pod's annotations; `size` may name another cluster network than `cluster`."""
    if isinstance(size, str):
        return {DEFAULT_NETWORK: f"{cluster_namespace}/{size}"}
    return {NETWORKS: ",".join(names(size))} if size else {}


def require_reference() -> None:
    """Skip the bench where the reference plugins are not here."""
    if not all((REFERENCE / name).exists() for name in PLUGINS):
        verdict.skip(
            f"needs the reference plugins, but {' and '.join(PLUGINS)} are not both in {REFERENCE}: "
            "install containernetworking-plugins, or set CNI_REFERENCE_DIR"
        )


def reference_version() -> str:
    """Return the version line of the reference ptp, such as `CNI ptp plugin v1.9.1`."""
    said = subprocess.run([REFERENCE / "ptp"], env={}, capture_output=True, text=True, check=False).stderr
    return said.partition("\n")[0]


# --- the sides -------------------------------------------------------------------------------------------------------


class Bare:
    """The reference plugins, started directly: no Multus. Each network's list runs one after the other.

    Links and rules are made in the namespace in which the bench runs.
    """

    def __init__(self, node: Node, name: str = "bare") -> None:
        """`node` lends its directory and the namespaces of pods."""
        self.name = name
        self._node = node
        self._data = node.root / name
        self._definitions = definitions(self._data)
        self.netns = Spaces(node)
        copy_programs(node.bin_dir, ALL_TYPES)
        self._results: dict[tuple[str, str], Any] = {}

    def call(self, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
        """One call for each plugin of each network, as libcni calls them; the plugins know nothing of pods."""
        first = size if isinstance(size, str) else "cluster"
        asked = runtime_config(size, worker)
        total: Run | None = None
        for number, name in enumerate([first, *names(size)]):
            ifname = f"net{number}" if number else "eth0"
            config = self._definitions[name]
            common = {"cniVersion": config["cniVersion"], "name": name}
            plugins = config.get("plugins", [config])
            result = None if verb == "ADD" else self._results.get((container, ifname))
            for plugin in plugins if verb != "DEL" else plugins[::-1]:
                given = {key: asked[key] for key in plugin.get("capabilities", ()) if key in asked}
                fields = {**common, **plugin, "prevResult": result, "runtimeConfig": given}
                environment = {
                    "CNI_COMMAND": verb,
                    "CNI_CONTAINERID": container,
                    "CNI_NETNS": self.netns[worker],
                    "CNI_IFNAME": ifname,
                    "CNI_PATH": str(self._node.bin_dir),
                    "PATH": os.environ["PATH"],
                }
                stdin = json.dumps({key: value for key, value in fields.items() if value}).encode()
                done = run(self._node.bin_dir / plugin["type"], environment, stdin)
                if verb == "ADD" and not done.code:
                    result = self._results[container, ifname] = json.loads(done.output)
                total = done if total is None else total + done
            if verb == "DEL":
                self._results.pop((container, ifname), None)
        assert total is not None
        return total

    def define(self, name: str, config: dict[str, Any]) -> None:
        """One more cluster network; a call names it as its size."""
        self._definitions[name] = config

    @property
    def data(self) -> Path:
        """host-local's data directory."""
        return self._data

    def processor(self) -> float:
        """Return 0: no process outlives a call, and its CPU time is counted with the call."""
        return 0.0


class Daemon:
    """A daemon of this project behind its shim: of this checkout, or of another one (`checkout`)."""

    def __init__(
        self,
        node: Node,
        name: str,
        *,
        binaries: bool = False,
        checkout: Path | None = None,
        pods: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`pods`: namespace -> pod -> uid, of an API server; where None, they are manifests of the node's own."""
        self.name = name
        self.node = node
        self.netns = Spaces(node)
        self._declared: set[tuple[Size, int]] = set()
        self.namespace = "default"
        if binaries:
            node.settings["builtinPlugins"] = "off"
        copy_programs(node.bin_dir, ALL_TYPES if binaries else (FOREIGN, "host-local"))
        if checkout is not None:
            node.wrapper = (*node.wrapper, "env", "-C", str(checkout), f"PYTHONPATH={checkout}")
        self._pods = pods
        self._stdin = node.stdin
        self._shim = multus_shim.binary()

    def declare(self, workers: int = 1, sizes: Sequence[Size] = (0,)) -> None:
        """Manifests of all networks and pods, of a standalone node that has not started."""
        node = self.node
        for name, config in definitions(node.networks_dir).items():
            node.network(name, config, "kube-system" if name in ("cluster", DUAL, *CHAINS) else "default")
        for size in sizes:
            for worker in range(workers):
                write_pod(node, f"pod{size}-{worker}", pod_annotations(size, "kube-system"))

    def call(self, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
        """Run the shim."""
        pod = pod or f"pod{size}-{worker}"
        uid = None if self._pods is None else self._pods[self.namespace][pod]
        environment = self.node.environment(verb, container, self.netns[worker], pod, self.namespace, uid)
        return run(self._shim, environment, with_runtime_config(self._stdin, size, worker))

    def processor(self) -> float:
        """The daemon's, and that of the plugin processes that it has started."""
        assert self.node.daemon is not None
        return processor_seconds(self.node.daemon.pid)


class Spaces:
    """The network namespace of each worker, made when it is first needed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._paths: dict[int, str] = {}

    def __getitem__(self, worker: int) -> str:
        if worker not in self._paths:
            self._paths[worker] = self._node.add_netns()
        return self._paths[worker]


def write_pod(node: Node, name: str, with_annotations: Mapping[str, str]) -> None:
    """Declare a pod of a standalone node, with any annotations."""
    metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "annotations": dict(with_annotations)}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
    (node.manifests / f"pod-{name}.json").write_text(json.dumps(pod))


def base_checkout() -> Path | None:
    """The checkout that BENCH_BASE names, None where it names none. Exits where it has no daemon that starts."""
    named = os.environ.get("BENCH_BASE")
    if not named:
        return None
    checkout = Path(named).resolve()
    ask = "import multus_daemon.cli as cli; print(cli.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not found.stdout.strip().startswith(f"{checkout}/"):
        sys.exit(f"BENCH_BASE={named} is not a checkout whose daemon can be run: {found.stdout}{found.stderr}")
    return checkout
