"""Counters of real interfaces in real namespaces, read from the host's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.traffic import Figures, Namespace, NamespaceSocket
from tests.namespaces import make_at, remove_netns
from tests.netns.conftest import Netns
from tests.netns.test_replaced_namespace import make_with_the_inode_of
from tests.programs import needed
from tests.waiting import until

MakeNetns = Callable[[], Netns]
Read = Callable[..., list[dict[str, Figures]]]
COUNTERS = {
    "receive_packets": ("rx", "packets"),
    "transmit_packets": ("tx", "packets"),
    "receive_bytes": ("rx", "bytes"),
    "transmit_bytes": ("tx", "bytes"),
    "receive_errors": ("rx", "errors"),
    "transmit_errors": ("tx", "errors"),
    "receive_drops": ("rx", "dropped"),
    "transmit_drops": ("tx", "dropped"),
}


def on_record(netns: Netns) -> Namespace:
    """Return the namespace as the record of an ADD that comes now has it."""
    with PodNetns(netns.path) as opened:
        return Namespace(netns.path, opened.identity(), time.time())


@pytest.fixture
def read(host: Netns) -> Iterator[Read]:
    """Read the figures, all with one socket."""
    with contextlib.closing(NamespaceSocket()) as kernel:
        yield lambda *asked: kernel.read(asked)


def counted(netns: Netns, name: str) -> Figures:
    """Return the counters as a program in the namespace sees them."""
    (link,) = netns.ip("-s", "link", "show", "dev", name)
    return Figures(**{field: link["stats64"][way][what] for field, (way, what) in COUNTERS.items()})


@pytest.fixture(autouse=True)
def quiet(host: Netns) -> None:
    """Without IPv6 an interface sends nothing by itself."""
    host.set_sysctl("net/ipv6/conf/default/disable_ipv6", "1")


def connect(host: Netns, netns: Netns, number: int = 1, kind: str = "veth", name: str = "") -> str:
    """Make `net<number>` of that kind in the namespace; return an address that it reaches."""
    netns.set_sysctl("net/ipv6/conf/default/disable_ipv6", "1")
    name, gateway, own = name or f"net{number}", f"10.9.{number}.1", f"10.9.{number}.2"
    if kind == "macvlan":
        # The other end of the uplink is on a host of its own, or the packets would not leave this one.
        host.batch(
            f"link add up{number} type veth peer name wire{number}",
            f"link set up{number} up",
            f"link add link up{number} name {name} netns {netns.path} type macvlan mode bridge",
        )
        answering = f"wire{number}"
        host.batch(f"address add {gateway}/24 dev {answering}", f"link set {answering} up")
    else:
        host.batch(f"link add v{number} type veth peer name {name} netns {netns.path}", f"link set v{number} up")
        answering = f"v{number}"
        if kind == "bridge":
            answering = f"br{number}"
            host.batch(
                f"link add {answering} type bridge",
                f"link set v{number} master {answering}",
                f"link set {answering} up",
            )
        host.batch(f"address add {gateway}/24 dev {answering}")
    netns.batch(f"address add {own}/24 dev {name}", f"link set {name} up")
    # Else the kernel asks for an address again, 5 s after its first use, and counts that.
    host.set_sysctl(f"net/ipv4/neigh/{answering}/delay_first_probe_time", "3600")
    netns.set_sysctl(f"net/ipv4/neigh/{name}/delay_first_probe_time", "3600")
    return gateway


def ping(netns: Netns, address: str, count: int = 3) -> None:
    assert netns.replies(address, count=count, size=500, wait=5) == count


@pytest.mark.parametrize("kind", ["veth", "bridge", "macvlan"])
def test_the_figures_are_those_of_the_interface(host: Netns, netns: Netns, kind: str, read: Read) -> None:
    namespace = on_record(netns)
    gateway = connect(host, netns, kind=kind)
    for packets in (3, 10):
        before = counted(netns, "net1")
        ping(netns, gateway, packets)
        (found,) = read((namespace, ("net1",)))
        assert found == {"net1": counted(netns, "net1")}
        grown = found["net1"].transmit_bytes - before.transmit_bytes
        # 8 bytes of ICMP, 20 of IP, 14 of Ethernet; besides ARP.
        assert grown >= packets * (500 + 8 + 20 + 14)
        assert found["net1"].receive_packets - before.receive_packets >= packets


def test_what_is_dropped_is_counted_apart(host: Netns, netns: Netns, read: Read) -> None:
    namespace = on_record(netns)
    connect(host, netns)
    before = counted(netns, "net1")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
        sender.bind(("v1", 0))
        for _ in range(5):
            # A protocol that nothing receives.
            sender.send(b"\xff" * 6 + bytes(6) + b"\x88\xb5" + bytes(46))
    ((_, found),) = read((namespace, ("net1",)))[0].items()
    assert found == counted(netns, "net1")
    assert found.receive_drops == before.receive_drops + 5
    assert found.transmit_drops == before.transmit_drops


def test_many_namespaces_are_read_at_once(host: Netns, make_netns: MakeNetns, read: Read) -> None:
    made = [make_netns() for _ in range(20)]
    asked = []
    for number, netns in enumerate(made, 1):
        connect(host, netns, 2 * number)
        connect(host, netns, 2 * number + 1)
        ping(netns, f"10.9.{2 * number}.1", number % 3 + 1)
        asked.append((on_record(netns), (f"net{2 * number}", "no-such", f"net{2 * number + 1}")))
    for _ in range(2):
        found = read(*asked)
        for (_, (first, _, second)), netns, figures in zip(asked, made, found, strict=True):
            assert figures == {first: counted(netns, first), second: counted(netns, second)}


def test_an_interface_appears_goes_and_comes_again(host: Netns, netns: Netns, read: Read) -> None:
    namespace = on_record(netns)
    assert read((namespace, ("net1",))) == [{}]
    ping(netns, connect(host, netns))
    assert read((namespace, ("net1",))) == [{"net1": counted(netns, "net1")}]
    netns.ip("link", "delete", "net1")
    assert read((namespace, ("net1",))) == [{}]
    connect(host, netns)
    assert read((namespace, ("net1",))) == [{"net1": counted(netns, "net1")}]


def test_a_namespace_that_is_gone_spoils_nothing(host: Netns, make_netns: MakeNetns, read: Read) -> None:
    gone, there = make_netns(), make_netns()
    known = on_record(gone), on_record(there)
    connect(host, gone, 1)
    ping(there, connect(host, there, 2))
    remove_netns(Path(gone.path))
    for _ in range(2):
        assert read((known[0], ("net1",)), (known[1], ("net2",))) == [{}, {"net2": counted(there, "net2")}]


def id_of(host: Netns, netns: Netns) -> int:
    """Return the id that the host's namespace has for the other one; -1 if it has none."""
    with Named(netns) as name:
        (found,) = [item for item in host.ip("netns", "list-id") if item.get("name") == name] or [{"nsid": -1}]
        number: int = found["nsid"]
        return number


class Named:
    """A name below /run/netns for a namespace that is elsewhere, for the duration of a block."""

    def __init__(self, netns: Netns) -> None:
        self._path = Path("/run/netns", Path(netns.path).name)
        self._netns = netns

    def __enter__(self) -> str:
        self._path.parent.mkdir(exist_ok=True)
        self._path.touch()
        subprocess.run(["mount", "--bind", self._netns.path, str(self._path)], check=True)
        return self._path.name

    def __exit__(self, *_: object) -> None:
        remove_netns(self._path)


def test_an_id_that_another_namespace_got_is_not_used(host: Netns, make_netns: MakeNetns, read: Read) -> None:
    first = make_netns()
    known = on_record(first)
    connect(host, first)
    ping(first, "10.9.1.1", 20)
    assert read((known, ("net1",))) == [{"net1": counted(first, "net1")}]
    number = id_of(host, first)
    assert number >= 0
    remove_netns(Path(first.path))
    until(lambda: "v1" not in host.links(), 40, what="the namespace stays")

    second = make_netns()
    with Named(second) as name:
        host.run("ip", "netns", "set", name, str(number))
    connect(host, second)
    ping(second, "10.9.1.1", 2)
    assert id_of(host, second) == number
    # The one that is gone has nothing, and the other what is its own.
    assert read((known, ("net1",)), (on_record(second), ("net1",))) == [{}, {"net1": counted(second, "net1")}]


def test_another_namespace_at_the_path_is_not_read(host: Netns, make_netns: MakeNetns, read: Read) -> None:
    first = make_netns()
    known, without_identity = on_record(first), Namespace(first.path, "", time.time())
    asked = ((known, ("net1",)), (without_identity, ("net1",)))
    ping(first, connect(host, first))
    assert read(*asked) == [{"net1": counted(first, "net1")}] * 2
    path = Path(first.path)
    with path.open("rb"):
        # The open file keeps the first one, so that the other one has another inode.
        remove_netns(path)
        # The kernel's clock for files has ticks.
        time.sleep(0.02)
        make_at(path)
        host.batch(f"link add w type veth peer name net1 netns {path}")
        assert counted(first, "net1").receive_packets == 0
        assert read(*asked) == [{}, {}]
    until(lambda: "v1" not in host.links(), 40, what="the namespace stays")
    assert read(*asked) == [{}, {}]


def test_a_namespace_that_is_younger_than_the_record_is_not_read(host: Netns, netns: Netns, read: Read) -> None:
    connect(host, netns)
    known = on_record(netns)
    # As if it had got the inode of the one that the ADD was for.
    identity = known.identity.partition(namespaces.COOKIE_MARK)[0]
    older = Namespace(known.path, identity, os.stat(netns.path).st_ctime - 0.001)
    assert read((known, ("net1",)), (older, ("net1",))) == [{"net1": counted(netns, "net1")}, {}]


def test_the_cookie_counts_if_the_clock_was_set_back(host: Netns, netns: Netns, read: Read) -> None:
    """Between the start of the namespace and the ADD."""
    connect(host, netns)
    known = on_record(netns)
    with PodNetns(netns.path) as opened:
        identity = opened.identity()
    if not namespaces.cookie_of(identity):
        pytest.skip("the kernel has no cookies of namespaces: Linux 5.14 or newer")
    recorded = os.stat(netns.path).st_ctime - 3600
    same = Namespace(known.path, identity, recorded)
    other = Namespace(known.path, identity[:-1] + ("0" if identity[-1] != "0" else "1"), recorded)
    assert read((same, ("net1",)), (other, ("net1",))) == [{"net1": counted(netns, "net1")}, {}]


def test_a_namespace_that_got_the_inode_of_an_earlier_one_is_not_read(host: Netns, netns: Netns, read: Read) -> None:
    path = Path(netns.path)
    known, fresh, inode = on_record(netns), on_record(netns), path.stat().st_ino
    connect(host, netns)
    assert read((known, ("net1",))) == [{"net1": counted(netns, "net1")}]
    remove_netns(path)
    if not make_with_the_inode_of(path, inode):
        pytest.skip("the kernel did not use the inode again within 5 s: other tests make namespaces too")
    host.batch(f"link add w type veth peer name net1 netns {path}")
    assert counted(netns, "net1")
    assert read((known, ("net1",)), (fresh, ("net1",))) == [{}, {}]
    assert read((on_record(netns), ("net1",))) == [{"net1": counted(netns, "net1")}]


@pytest.fixture
def process(netns: Netns) -> Iterator[int]:
    """A process in the namespace."""
    child = subprocess.Popen([needed("nsenter"), f"--net={netns.path}", "sleep", "60"])
    while os.path.realpath(f"/proc/{child.pid}/exe") != os.path.realpath("/bin/sleep"):
        time.sleep(0.01)
    yield child.pid
    child.kill()
    child.wait()


def test_a_namespace_that_the_runtime_names_by_a_process(host: Netns, netns: Netns, process: int, read: Read) -> None:
    ping(netns, connect(host, netns))
    by_process = on_record(Netns(f"/proc/{process}/ns/net"))
    remove_netns(Path(netns.path))
    for _ in range(2):
        (found,) = read((by_process, ("net1",)))
        assert found["net1"].receive_packets >= 3


def test_the_hosts_own_interfaces_and_files_are_no_pods(host: Netns, tmp_path: Path, read: Read) -> None:
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.touch()
    os.mkfifo(fifo)
    paths = ["/proc/thread-self/ns/net", "/proc/self/ns/mnt", str(file), str(fifo), str(tmp_path), "", "a\0b", "/no"]
    assert read(*((Namespace(path, "", 0), ("lo",)) for path in paths)) == [{}] * len(paths)


def test_nothing_stays_open(host: Netns, netns: Netns, read: Read) -> None:
    connect(host, netns)
    namespace = on_record(netns)
    before = set(os.listdir("/proc/self/fd"))
    assert read((namespace, ("net1",))) == [{"net1": counted(netns, "net1")}]
    assert set(os.listdir("/proc/self/fd")) == before
    remove_netns(Path(netns.path))
    until(lambda: "v1" not in host.links(), 40, what="the namespace stays")
