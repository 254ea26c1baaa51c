"""A scratch node: a daemon in a directory of its own, network namespaces, and the real shim as the runtime runs it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import multus_shim
from tests import namespaces, packets, real_daemon
from tests.e2e.memory_group import MemoryGroup
from tests.e2e.rights import SHIPPED, Container, Rights, writable_in
from tests.programs import needed
from tests.waiting import until

_NUMBERS = itertools.count(1)

NAD = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}


@dataclass(frozen=True)
class Answer:
    """Answer of the shim to one call of the runtime."""

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.stdout)


@dataclass
class Node:
    """One node; use it as a context manager. Everything that it makes is below `root` or carries its prefix."""

    settings: dict[str, Any] = field(default_factory=dict)
    cni_version: str = "1.0.0"
    standalone: bool = True
    """True if the daemon reads objects from `manifests`, False if it reads them from an API server."""
    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="multus-node-")))
    daemon: subprocess.Popen[bytes] | None = None
    wrapper: tuple[str, ...] = ()
    """A program, with arguments, that the daemon's command line is given to; it has the daemon's rights."""
    preparation: str = ""
    """A command of the shell that runs before, as root, in the daemon's mounts."""
    rights: Rights = SHIPPED
    """The daemon's; a test with others says why."""
    writable: list[Path] = field(default_factory=list)
    """Directories that the daemon writes to and the shipped manifest has no mount for; who names one says why."""
    group: MemoryGroup | None = None
    """The daemon's control group, instead of one with the manifest's memory limit."""
    node_name: str = ""
    """Value of the daemon's variable MULTUS_NODE_NAME."""

    def __post_init__(self) -> None:
        self.prefix = f"mlt{os.getpid()}n{next(_NUMBERS)}"
        self.manifests = self.root / "manifests"
        self.cni_dir = self.root / "cni"
        self.networks_dir = self.root / "networks"
        self.socket = self.root / "run" / "multus.sock"
        self.bin_dir = self.root / "bin"
        self.container = Container(self.root, self.rights, self.group)
        self.manifests.mkdir()
        self.bin_dir.mkdir()
        self.config = self.root / "daemon-config.json"
        self.log = self.root / "daemon.log"
        self._netns: list[str] = []
        # The daemon's own network: what is on "the host" is then of this node only.
        self.host = self.add_netns()
        self.ip("link", "set", "lo", "up")
        self.settings = {
            "socketDir": str(self.root / "run"),
            "daemonSocketDir": str(self.root / "run"),
            "cniDir": str(self.cni_dir),
            "chrootDir": str(self.container.host_root),
            "binDir": str(self.bin_dir),
            "confDir": str(self.root / "conf.d"),
            "cniConfigDir": "",
            "clusterNetwork": "cluster",
            "cniVersion": self.cni_version,
        } | self.settings

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.container.__exit__()
        for name in list(self._netns):
            self.remove_netns(name)
        remove = ["rm", "-rf", "--one-file-system", str(self.root)]
        # A plugin of the killed daemon may still write there, until it ends.
        self.wait_until(lambda: subprocess.run(remove, capture_output=True).returncode == 0, "the files are removed")

    # --- what the cluster declares ---------------------------------------------------------------------------------

    def network(self, name: str, config: dict[str, Any] | str, namespace: str = "kube-system") -> None:
        """Declare a NetworkAttachmentDefinition."""
        text = config if isinstance(config, str) else json.dumps(config)
        self.manifest({**NAD, "metadata": {"namespace": namespace, "name": name}, "spec": {"config": text}})

    def ptp(self, name: str, subnet: str, *, namespace: str = "kube-system", **more: Any) -> None:
        """Declare a ptp network with host-local addresses below the node's root."""
        ipam = {"type": "host-local", "subnet": subnet, "dataDir": str(self.networks_dir)}
        config = {"cniVersion": self.cni_version, "name": name, "type": "ptp", "ipam": ipam, **more}
        self.network(name, config, namespace)

    def pod(self, name: str, networks: str | None = None, namespace: str = "default") -> None:
        """Declare a pod, with or without the networks annotation."""
        metadata: dict[str, Any] = {"namespace": namespace, "name": name, "uid": f"uid-{name}"}
        if networks is not None:
            metadata["annotations"] = {"k8s.v1.cni.cncf.io/networks": networks}
        self.manifest({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}})

    def manifest(self, item: dict[str, Any]) -> None:
        """Declare an object, or change it."""
        metadata = item["metadata"]
        path = self.manifests / f"{item['kind']}-{metadata['namespace']}-{metadata['name']}.yaml".lower()
        # Beside and renamed: the daemon may be looking.
        path.with_suffix(".new").write_text(yaml.safe_dump(item))
        path.with_suffix(".new").rename(path)

    # --- the daemon ------------------------------------------------------------------------------------------------

    def start(self, timeout: float = 180, *, ready: bool = True) -> None:
        """Start the daemon and wait until it is ready, or only until it listens: in `tests.kernels` that takes long."""
        self.config.write_text(json.dumps(self.settings))
        words = ["run", "--config", str(self.config)]
        if self.standalone:
            words += ["--standalone", str(self.manifests)]
        command = self._inside(self.container.cli(*words, wrapper=self.wrapper, writable=self._all_writable()))
        with self.log.open("ab") as log:
            env = os.environ | {"MULTUS_NODE_NAME": self.node_name}
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
        deadline = time.monotonic() + timeout
        while self.get("/readyz?gates")[0] != 200 and ready:
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the daemon did not become ready:\n{self.log.read_text()}")
            time.sleep(0.02)
        while self.get("/readyz?gates")[0] == 0:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def below_chroot(self, path: Path) -> str:
        """Return the path that a file of the node has in the daemon's container, where all of them can be written."""
        return f"{self.container.host_root}{path}"

    def contained(self, *command: str) -> list[str]:
        """Return the command line of a program in the daemon's container, such as `kubectl exec` starts."""
        return self._inside(self.container.command(*command, writable=self._all_writable()))

    def _all_writable(self) -> list[Path]:
        # Without an API server, the daemon writes statuses into files beside the objects.
        return [*writable_in(self.settings), *self.writable, *[self.manifests] * self.standalone]

    def _inside(self, contained: list[str]) -> list[str]:
        prepared = ["sh", "-ec", f'{self.preparation}; exec "$@"', "sh"] if self.preparation else []
        return [needed("ip"), "netns", "exec", Path(self.host).name, *prepared, *contained]

    def get(self, path: str) -> tuple[int, bytes]:
        """GET over the daemon's socket; status 0 where nobody listens."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request over the daemon's socket; status 0 where nobody listens."""
        return real_daemon.ask(self.socket, method, path, body)

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM; the exit status."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(timeout)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait(timeout=30)
            self.daemon = None

    # --- the runtime -----------------------------------------------------------------------------------------------

    def add_netns(self) -> str:
        """Make a network namespace; its path."""
        name = f"{self.prefix}-{next(_NUMBERS)}"
        path = namespaces.add(name)
        self._netns.append(name)
        return path

    def netns_names(self) -> list[str]:
        """Return the names of the namespaces that `add_netns` made, the host's among them."""
        return list(self._netns)

    def remove_netns(self, name_or_path: str) -> None:
        """Remove one that `add_netns` made."""
        name = Path(name_or_path).name
        namespaces.remove_netns(namespaces.NAMED / name)
        self._netns.remove(name)

    def remove_netns_and_links(self, netns: str) -> None:
        """Remove a namespace that nothing lives in, and wait until the kernel has taken the ends of its pairs, too.

        It does so when it comes to it: behind all the namespaces of this machine that went before.
        """
        links = self.ip("-details", "link", netns=netns)
        # Not what a macvlan is on, which stays.
        ends = {link["link_index"] for link in links if link.get("linkinfo", {}).get("info_kind") == "veth"}
        self.remove_netns(netns)
        self.wait_until(
            lambda: not ends & {link["ifindex"] for link in self.ip("link")}, "the links of the namespace are gone"
        )

    def process_in(self, netns: str) -> subprocess.Popen[bytes]:
        """Start a program that sleeps in a namespace; `ip` enters it a moment after its own start."""
        program = subprocess.Popen([needed("ip"), "netns", "exec", Path(netns).name, "sleep", "600"])
        entered = Path(f"/proc/{program.pid}/ns/net")
        self.wait_until(lambda: entered.stat().st_ino == Path(netns).stat().st_ino, "a program in the namespace")
        return program

    def environment(
        self, verb: str, container_id: str, netns: str, pod: str, namespace: str = "default", uid: str | None = None
    ) -> dict[str, str]:
        """Return the environment that the runtime sets for one call."""
        cni_args = {
            "IgnoreUnknown": "1",
            "K8S_POD_NAMESPACE": namespace,
            "K8S_POD_NAME": pod,
            "K8S_POD_INFRA_CONTAINER_ID": container_id,
            "K8S_POD_UID": f"uid-{pod}" if uid is None else uid,
        }
        return {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container_id,
            "CNI_NETNS": netns,
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(self.bin_dir),
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in cni_args.items()),
        }

    @property
    def stdin(self) -> bytes:
        """The runtime's configuration of our network."""
        keys = ("daemonSocketDir", "cniDir", "clusterNetwork")
        config = {key: self.settings[key] for key in keys}
        return json.dumps(
            {"cniVersion": self.cni_version, "name": "multus-cni-network", "type": "multus-shim", **config}
        ).encode()

    def cni(
        self,
        verb: str,
        container_id: str,
        netns: str,
        pod: str,
        namespace: str = "default",
        *,
        uid: str | None = None,
        stdin: bytes | None = None,
        timeout: float = 60,
        shim: Path | None = None,
    ) -> Answer:
        """Run the shim as the runtime does; `shim`: another than the installed one."""
        environment = self.environment(verb, container_id, netns, pod, namespace, uid)
        return self.run_shim(environment, self.stdin if stdin is None else stdin, timeout, shim)

    def run_shim(
        self, environment: dict[str, str], stdin: bytes, timeout: float = 60, shim: Path | None = None
    ) -> Answer:
        """Run the shim with these variables."""
        start = time.perf_counter()
        done = subprocess.run(
            [str(shim or multus_shim.binary())], env=environment, input=stdin, capture_output=True, timeout=timeout
        )
        return Answer(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)

    # --- what there is ---------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Files that tell of an attachment: records, cached results, addresses, spooled requests."""
        found = [path for path in self.cni_dir.rglob("*") if path.is_file()]
        harmless = ("lock", "last_reserved_ip.")
        found += [
            path for path in self.networks_dir.rglob("*") if path.is_file() and not path.name.startswith(harmless)
        ]
        return sorted(str(path.relative_to(self.root)) for path in found)

    def ip(self, *arguments: str, netns: str = "") -> Any:
        """`ip -j ARGUMENTS`, in a namespace or the host's."""
        command = [needed("ip"), "-n", Path(netns or self.host).name, "-j", *arguments]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout or b"[]")

    def plugin(self, name: str, body: str) -> None:
        """A plugin binary that is a shell script; its configuration is on stdin."""
        real_daemon.write_plugin(self.bin_dir / name, body)

    def metrics(self, port: int) -> str:
        """`/metrics`, fetched where the daemon listens."""
        fetch = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
        command = [needed("ip"), "netns", "exec", Path(self.host).name, sys.executable, "-c", fetch]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def wait_until(self, holds: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Wait for something that the daemon does by itself."""
        until(holds, timeout, f"not within {timeout} s: {what}")

    def wait_for_log(self, text: str) -> None:
        """Wait for it in the daemon's log, which a thread writes, later than what it tells of."""
        self.wait_until(lambda: text in self.log.read_text(), f"{text!r} in the log")

    def links(self, netns: str = "") -> list[str]:
        """Names of the links in a namespace, or on the host."""
        return sorted(link["ifname"] for link in self.ip("link", netns=netns))


def ping(netns: str, address: str, device: str = "") -> bool:
    """One echo request from a namespace, answered within 2 s; false also if there is no such device or route."""
    try:
        return packets.replies(address, netns=netns, device=device) == 1
    except OSError:
        return False
