"""The alternatives that are measured beside each other: our daemon, the reference plugins, another implementation.

A side attaches pods of several sizes: `size` is the number of networks beside the cluster network. All networks are
ptp with addresses of host-local. Each worker has a network namespace of its own, in which one pod at a time lives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import multus_shim
from bench import verdict
from bench.program import Run, processor_seconds, run
from tests.e2e.node import Node

REFERENCE: Final = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
PLUGINS: Final = ("ptp", "host-local")
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


def names(size: Size) -> list[str]:
    """The networks of a pod, beside its cluster network."""
    return [f"n{number}" for number in range(size if isinstance(size, int) else 0)]


def definitions(data: Path, more: int = MOST) -> dict[str, dict[str, Any]]:
    """Name and configuration of every network: the two cluster networks, and those of the largest pod."""
    found = {"cluster": network("cluster", data, 0), DUAL: network(DUAL, data, more + 1, dual=True)}
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
    """The reference ptp, started directly: no Multus. A pod of n more networks is n + 1 calls, one after the other.

    Its links are made in the namespace in which the bench runs.
    """

    def __init__(self, node: Node, name: str = "bare") -> None:
        """`node` lends its directory and the namespaces of pods."""
        self.name = name
        self._node = node
        self._data = node.root / name
        self._definitions = {key: json.dumps(value) for key, value in definitions(self._data).items()}
        self.netns = Spaces(node)
        self._results: dict[tuple[str, str], Any] = {}

    def call(self, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
        """One call for each network; the plugins know nothing of pods."""
        first = size if isinstance(size, str) else "cluster"
        total: Run | None = None
        for number, name in enumerate([first, *names(size)]):
            ifname = f"net{number}" if number else "eth0"
            config = self._config(name)
            if verb == "CHECK":
                config = json.dumps(json.loads(config) | {"prevResult": self._results[container, ifname]})
            environment = {
                "CNI_COMMAND": verb,
                "CNI_CONTAINERID": container,
                "CNI_NETNS": self.netns[worker],
                "CNI_IFNAME": ifname,
                "CNI_PATH": str(REFERENCE),
                "PATH": os.environ["PATH"],
            }
            done = run(REFERENCE / "ptp", environment, config.encode())
            if verb == "ADD" and not done.code:
                self._results[container, ifname] = json.loads(done.output)
            elif verb == "DEL":
                self._results.pop((container, ifname), None)
            total = done if total is None else total + done
        assert total is not None
        return total

    def define(self, name: str, config: dict[str, Any]) -> None:
        """One more cluster network; a call names it as its size."""
        self._definitions[name] = json.dumps(config)

    @property
    def data(self) -> Path:
        """host-local's data directory."""
        return self._data

    def _config(self, name: str) -> str:
        return self._definitions[name]

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
            for plugin in PLUGINS:
                (node.bin_dir / plugin).symlink_to(REFERENCE / plugin)
        if checkout is not None:
            node.wrapper = (*node.wrapper, "env", "-C", str(checkout), f"PYTHONPATH={checkout}")
        self._pods = pods
        self._stdin = node.stdin
        self._shim = multus_shim.binary()

    def declare(self, workers: int = 1, sizes: Sequence[Size] = (0,)) -> None:
        """Manifests of all networks and pods, of a standalone node that has not started."""
        node = self.node
        for name, config in definitions(node.networks_dir).items():
            node.network(name, config, "kube-system" if name in ("cluster", DUAL) else "default")
        for size in sizes:
            for worker in range(workers):
                write_pod(node, f"pod{size}-{worker}", pod_annotations(size, "kube-system"))

    def call(self, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
        """Run the shim."""
        pod = pod or f"pod{size}-{worker}"
        uid = None if self._pods is None else self._pods[self.namespace][pod]
        environment = self.node.environment(verb, container, self.netns[worker], pod, self.namespace, uid)
        return run(self._shim, environment, self._stdin)

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
