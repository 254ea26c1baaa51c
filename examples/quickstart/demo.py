"""`make demo`: a pod gets three networks from a daemon without a cluster, sends packets, and is taken down again.

All of that twice, the second time silently: the timing is of the second time, with warm caches.
Exit status 0 only if all of it held. Everything that it makes is below a temporary directory and goes with it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import echo
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from multus_tools.ctl import show

POD = "demo/hello"
CLUSTER = Path(__file__).parent / "cluster"
READY_SECONDS = 30.0
PING_SECONDS = 5.0
INNER = "MULTUS_DEMO_INSIDE"
FORWARDING = (Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding"))

# rich replaces `:cd:`, which may be a part of a MAC address, with a picture.
console = Console(highlight=False, emoji=False)


class DemoError(Exception):
    """Something did not hold; the message says what."""


# --- where it runs ---------------------------------------------------------------------------------------------------


def enter_namespaces() -> None:
    """Run this program again in a user namespace of its own, unless namespaces may be made here. May not return."""
    is_root, has_unshare = os.geteuid() == 0, shutil.which("unshare") is not None
    if os.environ.get(INNER) or (is_root and (not has_unshare or _works("unshare", "-nm", "true"))):
        return
    if not has_unshare:
        raise DemoError("this is not root, and the program `unshare` (package util-linux) is missing")
    if not _works("unshare", "-Urnm", "true"):
        raise DemoError(
            "this may not make namespaces, and user namespaces are forbidden here. Run it as root, or allow them:\n"
            "  sysctl -w user.max_user_namespaces=15000\n"
            "  sysctl -w kernel.unprivileged_userns_clone=1              (Debian)\n"
            "  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0  (Ubuntu)"
        )
    console.print("[dim]no right to make namespaces: running again under unshare -Urnm[/]")
    os.environ[INNER] = "1"
    sys.stdout.flush()
    os.execvp("unshare", ["unshare", "-Urnm", sys.executable, *sys.argv])


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextlib.contextmanager
def forwarding_kept() -> Iterator[None]:
    """The ptp plugin turns forwarding on, as every node needs it; a demo leaves the machine as it was."""
    before = {path: path.read_text() for path in FORWARDING if path.exists()}
    try:
        yield
    finally:
        for path, value in before.items():
            if path.read_text() != value:
                path.write_text(value)


def installed(command: str, module: str) -> list[str]:
    """A command of ours, from the environment that this program runs in."""
    path = Path(sys.executable).parent / command
    return [str(path)] if path.exists() else [sys.executable, "-m", module]


# --- the node --------------------------------------------------------------------------------------------------------


class Node:
    """A scratch directory with the manifests, the daemon's configuration and all that the daemon keeps."""

    def __init__(self, root: Path) -> None:
        self.manifests = root / "cluster"
        self.addresses = root / "addresses"
        self.cni_dir = root / "cni"
        self.run = root / "run"
        self.netns = root / "netns"
        self.sandboxes = root / "sandboxes"
        self.config = root / "daemon-config.json"
        self.log = root / "daemon.log"
        plugins = root / "bin"
        for directory in (self.manifests, self.run, plugins):
            directory.mkdir(mode=0o700)
        settings = {
            "socketDir": str(self.run),
            "daemonSocketDir": str(self.run),
            "cniDir": str(self.cni_dir),
            # Empty: the built-in plugins are used, as on a node where no plugin is installed.
            "binDir": str(plugins),
            "builtinPlugins": "fallback",
            "clusterNetwork": "cluster",
            "cniVersion": "1.0.0",
            "logLevel": "verbose",
        }
        self.config.write_text(json.dumps(settings, indent=4))

    def declare(self) -> None:
        """Copy the manifests, host-local's files put below the scratch directory in place of /var/lib/cni/networks."""
        for path in sorted(CLUSTER.glob("*.yaml")):
            items = [item for item in yaml.safe_load_all(path.read_text()) if item]
            for item in items:
                if item["kind"] == "NetworkAttachmentDefinition":
                    config = json.loads(item["spec"]["config"])
                    config["ipam"]["dataDir"] = str(self.addresses)
                    item["spec"]["config"] = json.dumps(config)
            (self.manifests / path.name).write_text(yaml.safe_dump_all(items))

    @contextlib.contextmanager
    def daemon(self, name: str = "") -> Iterator[None]:
        """The daemon runs and is ready for the duration of the block. Raises DemoError with the end of its log.

        `name`: of the node; by default the machine's.
        """
        command = [*installed("multus-daemon", "multus_daemon.cli"), "run", "--config", str(self.config)]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--standalone", str(self.manifests)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "MULTUS_NODE_NAME": name},
            )
        try:
            self._wait_until_ready(process)
            yield
        except BaseException:
            tail = self.log.read_text(errors="replace").splitlines()[-30:]
            console.print("\n[bold]the end of the daemon's log[/]")
            console.print(*tail, sep="\n", markup=False, soft_wrap=True)
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        answer = "nothing listens"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise DemoError(f"the daemon ended with status {process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                code, answer = _get(self.run / "multus.sock", "/readyz?gates")
                if code == 200:
                    return
            time.sleep(0.02)
        raise DemoError(f"the daemon was not ready after {READY_SECONDS:.0f} s: {answer}")

    def multusctl(self, verb: str, pod: str = POD) -> dict[str, Any]:
        """Run `multusctl sandbox VERB POD --json`. Raises DemoError."""
        options = {
            "--config": self.config,
            "--standalone": self.manifests,
            "--netns-dir": self.netns,
            "--state-dir": self.sandboxes,
        }
        command = [*installed("multusctl", "multus_tools.ctl"), "sandbox", verb, pod, "--json"]
        command += [str(word) for option in options.items() for word in option]
        console.print(f"\n[bold]$ multusctl sandbox {verb} {pod}[/]")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise DemoError(f"multusctl sandbox {verb}: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def leftovers(self) -> list[str]:
        """What tells of an attachment: records, results, addresses, namespaces, status; not host-local's counters."""
        found = [
            path
            for directory in (self.cni_dir, self.addresses, self.netns, self.sandboxes, self.manifests / "status")
            for path in directory.rglob("*")
            if path.is_file() and path.name != "lock" and not path.name.startswith("last_reserved_ip.")
        ]
        return sorted(map(str, found))


def _get(path: Path, url: str) -> tuple[int, str]:
    """GET over a unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=5)
    with contextlib.closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(5)
        connection.sock.connect(str(path))
        connection.request("GET", url)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def host_links(up: dict[str, Any]) -> set[str]:
    """This side's ends of the pod's interfaces: the links that its IPv4 addresses are routed over."""
    addresses = [address.partition("/")[0] for item in up["pod"]["interfaces"] for address in item["addresses"]]
    # The kernel writes an address as the number that its bytes are in this machine's order.
    wanted = {f"{struct.unpack('=I', socket.inet_aton(address))[0]:08X}" for address in addresses if "." in address}
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return {row[0] for row in rows if row[1] in wanted}


# --- the steps -------------------------------------------------------------------------------------------------------


def show_pod(node: Node, up: dict[str, Any]) -> None:
    """Interfaces, routes, and the network-status as the file has it."""
    console.print(show.interfaces(up))
    console.print(show.routes(up))
    namespace, _, name = POD.partition("/")
    path = node.manifests / "status" / namespace / f"{name}.yaml"
    if not path.exists():
        raise DemoError(f"no network-status in {path}")
    console.print(f"[bold]status/{namespace}/{name}.yaml[/]")
    # Without colours: those of a highlighter are for a dark terminal, or for a light one.
    console.print(path.read_text().rstrip(), markup=False, soft_wrap=True)


def check_pod(up: dict[str, Any]) -> None:
    """Three interfaces, each with an address, and in the status what the annotation asked for."""
    seen = {item["name"]: item["addresses"] for item in up["pod"]["interfaces"]}
    if set(seen) != {"eth0", "net1", "probe0"} or not all(seen.values()):
        raise DemoError(f"eth0, net1 and probe0 with addresses are due, the kernel has {seen}")
    names = [(item["name"], item["interface"]) for item in up["networkStatus"]]
    due = [("kube-system/cluster", "eth0"), ("demo/storage", "net1"), ("demo/metrics", "probe0")]
    if names != due:
        raise DemoError(f"the network-status is due to name {due}, and names {names}")


def ping_gateways(up: dict[str, Any]) -> None:
    """An echo over each interface to each gateway behind it."""
    table = Table("from", "to the gateway", "answered", title="packets", box=box.ROUNDED)
    silent = []
    for item in up["pod"]["interfaces"]:
        gateways = sorted(
            {route["gw"] for route in up["pod"]["routes"] if route["interface"] == item["name"] and route["gw"]}
        )
        if not gateways:
            raise DemoError(f"{item['name']} has no gateway")
        # Each address family that the interface has is tried.
        for gateway in gateways:
            answered = echo.ping(up["netns"], item["name"], gateway, seconds=PING_SECONDS)
            table.add_row(item["name"], gateway, "[red]no[/]" if answered is None else f"[green]{answered:.2f} ms[/]")
            if answered is None:
                silent.append(f"{gateway} over {item['name']}")
    console.print(table)
    if silent:
        raise DemoError(f"no answer from {', '.join(silent)}")


def nothing_left(node: Node, links_of_pod: set[str]) -> None:
    """Links on the host, and files."""
    links, files = sorted({name for _, name in socket.if_nameindex()} & links_of_pod), node.leftovers()
    if links or files:
        raise DemoError(f"left behind: links {links}, files {files}")
    console.print("nothing is left: no link of the pod on the host, no address, no record, no namespace, no status")


@dataclass(frozen=True)
class Timings:
    """Milliseconds that the shim ran."""

    add: float
    check: float
    delete: float


def live(node: Node) -> Timings:
    """Take the pod through its life. Raises DemoError; the pod is down again then."""
    try:
        up = node.multusctl("up")
        show_pod(node, up)
        check_pod(up)
        links = host_links(up)
        if len(links) != len(up["pod"]["interfaces"]):
            raise DemoError(f"each interface is due to have an end on the host, found are {sorted(links)}")
        ping_gateways(up)
        check = node.multusctl("check")
        console.print("every network is as ADD made it")
    except BaseException:
        with contextlib.suppress(DemoError):
            node.multusctl("down")
        raise
    down = node.multusctl("down")
    nothing_left(node, links)
    return Timings(*(answer["milliseconds"] for answer in (up, check, down)))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing is printed for the duration of the block."""
    console.quiet = True
    try:
        yield
    finally:
        console.quiet = False


def demonstrate(root: Path) -> None:
    """All of it. Raises DemoError."""
    node = Node(root)
    node.declare()
    console.print(f"[bold]$ multus-daemon run --config {node.config.name} --standalone {node.manifests.name}[/]")
    with node.daemon():
        console.print("ready: no cluster, manifests from a directory, built-in ptp and host-local")
        first = live(node)
        # Among other things a daemon imports its built-in plugins for the first ADD, which is no figure to go by.
        console.print(f"\n[bold]$ for verb in up check down; do multusctl sandbox $verb {POD}; done[/]")
        with silence():
            second = live(node)
        console.print("the same again, with the same checks")
    console.print(
        f"[bold]second ADD {second.add:.1f} ms; the first, with cold caches, {first.add:.1f} ms[/]\n"
        f"then CHECK {second.check:.1f} ms, DEL {second.delete:.1f} ms; three networks, start of the shim included"
    )


def main(demonstrate: Callable[[Path], None] = demonstrate) -> None:
    """Exit status 0 if all held, 1 if not."""
    # An exception in place of sudden death: what was made is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        enter_namespaces()
        with tempfile.TemporaryDirectory(prefix="multus-demo-") as directory, forwarding_kept():
            demonstrate(Path(directory))
    except DemoError as error:
        console.print(f"\nthe demo failed: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("\ninterrupted; all is taken down", style="bold red")
        sys.exit(130)


if __name__ == "__main__":
    main()
