"""The built-in dhcp beside a real server, and beside the reference plugin and its agent."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.leases import Leases, Owner
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName
from tests import calls
from tests.namespaces import entered, make_at, remove_netns
from tests.netns import beside, outcome, reference
from tests.programs import needed
from tests.waiting import until

RUNS: Final = ("dnsmasq", "reference plugins, Debian's")
SERVER = "10.149.0.1"
NETWORK = {"cniVersion": "1.0.0", "name": "lan"}
BRIDGE = {"type": "bridge", "bridge": "lan0"}
OWNER = Owner("container1", "lan", "eth0")


def network(**ipam: Any) -> dict[str, Any]:
    return {**NETWORK, **BRIDGE, "ipam": {"type": "dhcp", **ipam}}


@pytest.fixture(autouse=True)
def segment(host: Any) -> None:
    host.batch("link add lan0 type bridge", f"addr add {SERVER}/24 dev lan0", "link set lan0 up")


class Server:
    """One of the segment; it can be stopped and started again."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._log, self._command = folder / "server.log", [needed(command[0]), *command[1:]]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def log(self) -> str:
        return self._log.read_text()


Serve = Callable[..., Server]


@pytest.fixture
def dnsmasq(tmp_path: Path) -> Iterator[Serve]:
    """Leases of an hour, and every option that is asked for."""
    with contextlib.ExitStack() as ending:

        def serve(*options: str, seconds: int = 3600, first: int = 10, last: int = 250) -> Server:
            command = ["dnsmasq", "-k", "--port=0", "--log-facility=-", "--user=root", "--pid-file=", "--conf-file="]
            command += ["--no-ping", "--interface=lan0", "--bind-interfaces", "--dhcp-authoritative", "--log-dhcp"]
            command += [f"--dhcp-range=10.149.0.{first},10.149.0.{last},255.255.255.0,{seconds}"]
            command += [f"--dhcp-leasefile={tmp_path}/leases", *(f"--dhcp-option={option}" for option in options)]
            made = Server(tmp_path, command)
            ending.callback(made.stop)
            until(lambda: "sockets bound" in made.log, what=lambda: made.log)
            return made

        yield serve


@pytest.fixture
def udhcpd(tmp_path: Path) -> Iterator[Serve]:
    """Leases of seconds; it sends no times of renewal."""
    with contextlib.ExitStack() as ending:

        def serve(*lines: str, seconds: int) -> Server:
            (tmp_path / "udhcpd.leases").touch()
            given = [f"start 10.149.0.10\nend 10.149.0.250\ninterface lan0\noption lease {seconds}\nmin_lease 1"]
            given += [f"option subnet 255.255.255.0\nlease_file {tmp_path}/udhcpd.leases\npidfile {tmp_path}/pid"]
            config = tmp_path / "udhcpd.conf"
            config.write_text("\n".join([*given, *lines, ""]))
            made = Server(tmp_path, ["busybox", "udhcpd", "-f", "-a", "1", str(config)])
            ending.callback(made.stop)
            until(lambda: "started" in made.log, what=lambda: made.log)
            return made

        yield serve


@pytest.fixture
def make_leases(tmp_path: Path) -> Iterator[Callable[[], Leases]]:
    """The daemon's, made anew as after its restart."""
    made: list[Leases] = []

    def make() -> Leases:
        for each in made:
            each.stop()
        made[:] = [Leases(tmp_path / "dhcp")]
        made[0].begin()
        return made[0]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def leases(make_leases: Callable[[], Leases]) -> Leases:
    return make_leases()


def call(verb: str, netns: Any, leases: Leases, config: dict[str, Any] | None = None, **more: Any) -> outcome.Outcome:
    config = network() if config is None else config
    return outcome.builtin(config["type"], verb, netns.path, config, leases=leases, **more)


def address(made: outcome.Outcome) -> str:
    assert made.result, made
    text: str = made.result["ips"][0]["address"]
    return text.partition("/")[0]


# --- a lease ---------------------------------------------------------------------------------------------------------


def test_add_and_del(dnsmasq: Serve, netns: Any, host: Any, leases: Leases, tmp_path: Path) -> None:
    server = dnsmasq(f"3,{SERVER}")
    made = call("ADD", netns, leases)
    assert made.result, made
    assert made.result["routes"] == [{"dst": "0.0.0.0/0", "gw": SERVER}]
    assert netns.reaches(SERVER)
    assert "id:00:" not in server.log
    config = {**network(), "prevResult": made.result}
    assert leases.problem(OWNER) == ""
    assert [path.name for path in (tmp_path / "dhcp").iterdir()] == [OWNER.file]
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "dhcp", tmp_path / "dhcp" / OWNER.file)]
    assert modes == [0o700, 0o600]
    assert call("DEL", netns, leases, config) == outcome.Outcome()
    until(lambda: f"DHCPRELEASE(lan0) {address(made)}" in server.log)
    assert not list((tmp_path / "dhcp").iterdir())
    assert call("DEL", netns, leases, config) == outcome.Outcome()


def test_two_interfaces_have_a_lease_each(dnsmasq: Serve, netns: Any, leases: Leases) -> None:
    dnsmasq()
    first = call("ADD", netns, leases)
    second = call("ADD", netns, leases, ifname="net1")
    assert address(first) != address(second)
    assert not call("DEL", netns, leases, {**network(), "prevResult": first.result}).failed
    assert leases.problem(OWNER)
    assert leases.problem(Owner("container1", "lan", "net1")) == ""


@beside.needs_kind("ipvlan")
def test_ipvlan_gets_an_answer_to_all(dnsmasq: Serve, host: Any, netns: Any, leases: Leases) -> None:
    """The kernel gives a slave nothing that is sent to an address which it does not have yet."""
    dnsmasq()
    host.batch("link add up0 type veth peer name up1", "link set up1 master lan0 up", "link set up0 up")
    config = {**NETWORK, "type": "ipvlan", "master": "up0", "ipam": {"type": "dhcp"}}
    made = call("ADD", netns, leases, config)
    assert made.result, made
    assert netns.reaches(SERVER)
    assert not call("DEL", netns, leases, config | {"prevResult": made.result}).failed


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_del_without_the_namespace(dnsmasq: Serve, netns: Any, leases: Leases, tmp_path: Path, path: str) -> None:
    dnsmasq()
    made = call("ADD", netns, leases)
    config = {**network(), "prevResult": made.result}
    assert outcome.builtin("bridge", "DEL", path, config, leases=leases) == outcome.Outcome()
    assert not list((tmp_path / "dhcp").iterdir())


# --- no lease --------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "DHCP_OFFER_SECONDS", 2.5)


def test_without_a_server(impatient: None, netns: Any, leases: Leases, tmp_path: Path) -> None:
    made = call("ADD", netns, leases)
    assert (made.code, made.msg) == (11, 'no DHCP lease within 2 s: no offer came (interface "eth0")')
    assert netns.links() == set()
    assert not (tmp_path / "dhcp").exists()


def test_the_deadline_of_the_request_ends_it(netns: Any, leases: Leases) -> None:
    began = time.monotonic()
    with pytest.raises(deadline.ExpiredError), deadline.within(1.5):
        call("ADD", netns, leases)
    assert time.monotonic() - began < 10
    assert leases.problem(OWNER)


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.EIO])
@pytest.mark.parametrize("method", ["opened", "send", "recv"])
def test_what_the_kernel_refuses_is_tried_again(
    dnsmasq: Serve, netns: Any, leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: int
) -> None:
    """Every second time, so of each message the first: the offer and the lease come, and a DEL ends it all."""
    from multus_daemon.kernel import dhcp

    dnsmasq()
    calls = itertools.count()
    place: Any = dhcp if method == "opened" else dhcp._Socket
    real = getattr(place, method)

    def fail_each_second(*arguments: Any) -> Any:
        if next(calls) % 2 == 0:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(place, method, fail_each_second)
    made = call("ADD", netns, leases)
    assert not made.failed, made
    assert netns.reaches(SERVER)
    assert not call("DEL", netns, leases, {**network(), "prevResult": made.result}).failed
    assert next(calls) > 4 - (method == "recv")
    assert not leases.has(OWNER)
    assert not list((tmp_path / "dhcp").iterdir())


BOOTP_REPLY = bytes([2, 1, 6, 0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # No type of message, as a BOOTP server; a length that is not there; an offer without a server.
        (b"\xff", "cannot be"),
        (b"\x35\x09\x02", "cannot be"),
        (b"\x35\x01\x02\x33\x04\0\0\x0e\x10\xff", "cannot be used"),
        # An offer, and a refusal of each request.
        (b"\x35\x01\x02\x36\x04\x0a\x95\0\x01\xff", "refuses"),
        # An ACK without the subnet mask.
        (b"\x35\x01\x02\x36\x04\x0a\x95\0\x01\x33\x04\0\0\x0e\x10\xff", "cannot be used"),
    ],
    ids=["bootp", "cut", "no-server", "nak", "no-mask"],
)
def test_wrong_answers_end_no_client(
    impatient: None, host: Any, netns: Any, leases: Leases, options: bytes, words: str
) -> None:
    with answering(options, refuses=words == "refuses"):
        made = call("ADD", netns, leases)
    assert made.code == 11
    assert words in made.msg, made


@contextlib.contextmanager
def answering(options: bytes, *, refuses: bool) -> Iterator[None]:
    """A server of the host that gives the same options with each answer."""
    ending = threading.Event()

    def answer(server: socket.socket) -> None:
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                asked = server.recv(2048)
                said = options
                if b"\x35\x01\x03" in asked:
                    said = options.replace(b"\x35\x01\x02", b"\x35\x01\x06" if refuses else b"\x35\x01\x05")
                xid, chaddr = asked[4:8], asked[28:44]
                head = BOOTP_REPLY + xid + bytes(8) + bytes([10, 149, 0, 77]) + bytes(8) + chaddr + bytes(192)
                server.sendto(head + b"\x63\x82\x53\x63" + said, ("255.255.255.255", 68))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lan0")
        server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        server.bind(("", 67))
        server.settimeout(0.1)
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()


# --- a lease that goes on --------------------------------------------------------------------------------------------


def test_it_is_renewed(udhcpd: Serve, netns: Any, leases: Leases, tmp_path: Path) -> None:
    udhcpd(seconds=4)
    made = call("ADD", netns, leases)
    assert not made.failed, made
    file = tmp_path / "dhcp" / OWNER.file
    seen = [file.read_bytes()]
    for _ in range(3):
        until(lambda: file.read_bytes() != seen[-1], what="no renewal")
        seen.append(file.read_bytes())
        assert leases.problem(OWNER) == ""
    assert netns.reaches(SERVER)


def test_a_server_that_is_away_and_comes_back(
    udhcpd: Serve, netns: Any, leases: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    server = udhcpd(seconds=4)
    made = call("ADD", netns, leases)
    server.stop()
    until(lambda: leases.problem(OWNER), what="the lease does not expire")
    lost = f"the DHCP lease of {address(made)} (network lan, interface eth0 of container container1) is lost"
    until(lambda: lost in caplog.text, what=lambda: caplog.text)
    config = {**network(), "prevResult": made.result}
    checked = call("CHECK", netns, leases, config)
    assert checked.failed
    assert f"the DHCP lease of {address(made)} is lost" in checked.msg
    server.start()
    until(lambda: not leases.problem(OWNER), what="no new lease")
    assert not call("CHECK", netns, leases, config).failed


def test_no_socket_stays_in_the_namespace(udhcpd: Serve, netns: Any, leases: Leases) -> None:
    udhcpd(seconds=60)
    assert not call("ADD", netns, leases).failed
    with entered(netns.path):
        until(lambda: "03" not in Path("/proc/thread-self/net/packet").read_text()[90:])


def test_a_link_that_goes_down_ends_nothing(udhcpd: Serve, netns: Any, leases: Leases, tmp_path: Path) -> None:
    udhcpd(seconds=6)
    made = call("ADD", netns, leases)
    netns.batch("link set eth0 down")
    file = tmp_path / "dhcp" / OWNER.file
    before = file.read_bytes()
    time.sleep(4)
    netns.batch("link set eth0 up")
    until(lambda: file.read_bytes() != before, what="no renewal")
    assert leases.problem(OWNER) == "", made


def test_a_lost_lease_is_a_difference(udhcpd: Serve, netns: Any, leases: Leases, tmp_path: Path) -> None:
    server = udhcpd(seconds=4)
    plugins = Plugins(ProcessRunner([str(tmp_path)]), "prefer", leases=leases)
    chain = ListRunner(plugins, ResultCache(tmp_path / "cache"), "/nowhere")
    config = conf.parse(json.dumps(network()).encode())
    sandbox = Sandbox(ContainerId("container1"), netns.path)
    asked = Attachment("default/lan", config, IfName("eth0"))
    planned = chain.plan(sandbox, asked, chain.programs((config,)))
    assert planned.served_by == {"bridge": BUILT_IN, "dhcp": BUILT_IN}
    made = replace(planned, result=calls.add(chain, sandbox, planned))

    def differences() -> list[str]:
        with PodNetns(netns.path) as opened:
            return [item.text for item in chain.differences(sandbox, made, opened, asks=True)]

    assert differences() == []
    server.stop()
    until(lambda: leases.problem(OWNER), what="the lease does not expire")
    assert differences() == [leases.problem(OWNER)]
    calls.delete(chain, sandbox, made)
    assert not leases.has(OWNER)


@pytest.mark.parametrize("ipam", [{}, {"daemonSocketPath": "/run/cni/dhcp.sock"}, {"request": [{"option": "121"}]}])
def test_the_daemon_serves_it(ipam: dict[str, Any], leases: Leases) -> None:
    assert outcome.unsupported("dhcp", network(**ipam), leases) == ""
    assert outcome.unsupported("dhcp", network(**ipam), None) == "a lease without a daemon"


@pytest.mark.parametrize(
    "ipam",
    [
        {"daemonSocketPath": "/run/own.sock"},
        {"timeout": 3},
        {"request": [{"options": "12"}]},
        {"provide": [{"option": "53", "value": "x"}]},
    ],
)
def test_what_only_the_binary_knows(ipam: dict[str, Any], leases: Leases) -> None:
    assert outcome.unsupported("dhcp", network(**ipam), leases)


# --- the daemon ends and begins --------------------------------------------------------------------------------------


def test_a_restart_keeps_the_lease(
    udhcpd: Serve, netns: Any, make_leases: Callable[[], Leases], tmp_path: Path
) -> None:
    server = udhcpd(seconds=20)
    made = call("ADD", netns, make_leases())
    before = (tmp_path / "dhcp" / OWNER.file).read_bytes()
    again = make_leases()
    until(lambda: (tmp_path / "dhcp" / OWNER.file).read_bytes() != before, what="it is not asked for again")
    assert again.problem(OWNER) == ""
    server.stop()
    silent = make_leases()
    until(lambda: OWNER in silent._clients)
    assert silent.problem(OWNER) == ""
    assert not call("CHECK", netns, silent, {**network(), "prevResult": made.result}).failed


def test_a_restart_forgets_what_is_gone(
    dnsmasq: Serve, make_netns: Any, make_leases: Callable[[], Leases], tmp_path: Path
) -> None:
    dnsmasq()
    first, second = make_netns(), make_netns()
    leases = make_leases()
    call("ADD", first, leases)
    call("ADD", second, leases, container="container2")
    remove_netns(Path(first.path))
    # Another container's namespace at the same path.
    make_at(Path(first.path))
    (tmp_path / "dhcp" / "lan-broken-eth0").write_bytes(b"{}")
    again = make_leases()
    until(lambda: not (tmp_path / "dhcp" / OWNER.file).exists(), what="it is kept")
    assert again.problem(OWNER)
    assert again.problem(Owner("container2", "lan", "eth0")) == ""


def test_a_del_right_after_the_start_gives_the_lease_back(
    dnsmasq: Serve, netns: Any, make_leases: Callable[[], Leases]
) -> None:
    server = dnsmasq()
    made = call("ADD", netns, make_leases())
    assert not call("DEL", netns, make_leases(), {**network(), "prevResult": made.result}).failed
    until(lambda: f"DHCPRELEASE(lan0) {address(made)}" in server.log)


def test_a_namespace_that_ends_while_no_server_answers(
    udhcpd: Serve, netns: Any, leases: Leases, tmp_path: Path
) -> None:
    server = udhcpd(seconds=4)
    assert not call("ADD", netns, leases).failed
    server.stop()
    until(lambda: leases.problem(OWNER), what="the lease does not expire")
    remove_netns(Path(netns.path))
    until(lambda: not (tmp_path / "dhcp" / OWNER.file).exists(), what="it is kept")
    assert not leases.has(OWNER)


def test_a_refused_lease_is_asked_for_again(
    dnsmasq: Serve, netns: Any, make_leases: Callable[[], Leases], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The address is none of the server's any more: the pod is to be made again."""
    server = dnsmasq(last=239)
    made = call("ADD", netns, make_leases())
    server.stop()
    (tmp_path / "leases").unlink()
    dnsmasq(first=240)
    again = make_leases()
    until(lambda: "in place of" in again.problem(OWNER), what=lambda: again.problem(OWNER))
    assert address(made) in again.problem(OWNER)
    until(lambda: re.search(r"the server gave 10\.149\.0\.2[45]", caplog.text), what=lambda: caplog.text)
    assert not call("DEL", netns, again, {**network(), "prevResult": made.result}).failed


# --- beside the reference --------------------------------------------------------------------------------------------

RFC3442 = "121,10.9.0.0/16,10.149.0.7,0.0.0.0/0,10.149.0.8"
STATIC = "33,10.0.0.0,10.149.0.9,192.168.7.0,10.149.0.9,172.16.0.0,10.149.0.4"
BOTH_ROUTERS = f"3,{SERVER},10.149.0.2"
ASKS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": ([BOTH_ROUTERS, "6,10.149.0.3", "15,example.org", "26,1400"], {}),
    "no-router": (["3"], {}),
    "priority": ([BOTH_ROUTERS], {"priority": 44}),
    "classless": ([BOTH_ROUTERS, RFC3442, STATIC], {"request": [{"option": "121"}, {"option": "33"}]}),
    "no-default": ([BOTH_ROUTERS, "121,10.9.0.0/16,10.149.0.7"], {"request": [{"option": "121"}], "priority": 7}),
    "static": ([BOTH_ROUTERS, STATIC], {"request": [{"option": "33"}]}),
    "skip": ([BOTH_ROUTERS], {"request": [{"option": "6", "skipDefault": True}, {"option": "15"}]}),
    "names": ([BOTH_ROUTERS], {"request": [{"option": "routers"}, {"option": "subnet-mask"}, {}]}),
    "provide": (
        [BOTH_ROUTERS],
        {
            "provide": [
                {"option": "host-name", "value": "unused", "fromArg": "K8S_POD_NAME"},
                {"option": "vendor-class-identifier", "value": "vc"},
                {"option": "user-class", "value": "uc"},
                {"option": "78", "fromArg": "ABSENT"},
                {"option": "79", "value": "raw"},
            ]
        },
    ),
    "client-id": ([BOTH_ROUTERS], {"provide": [{"option": "dhcp-client-identifier", "value": "cid"}]}),
}


@contextlib.contextmanager
def agent(folder: Path) -> Iterator[str]:
    """The reference's, at the path that is yielded."""
    path = folder / "agent.sock"
    command = [
        str(reference.DIRECTORY / "dhcp"),
        "daemon",
        "-socketpath",
        str(path),
        "-timeout",
        "3s",
        "-resendmax",
        "1s",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(path.exists, what="the agent does not listen")
        yield str(path)
    finally:
        process.kill()
        process.wait()


ARGS = "IgnoreUnknown=1;K8S_POD_NAME=mypod"


@reference.needs_new()
@reference.needs("dhcp")
@pytest.mark.parametrize("name", ASKS)
def test_both_ask_for_the_same_and_give_the_same(
    name: str, dnsmasq: Serve, host: Any, make_netns: Any, leases: Leases, tmp_path: Path
) -> None:
    options, ipam = ASKS[name]
    dnsmasq(*options)
    messages, results = [], []
    for ours in (True, False):
        netns = make_netns()
        netns.batch("link set lo up")
        with pair(host, netns), recorded() as packets:
            if ours:
                made = call(
                    "ADD", netns, leases, {**NETWORK, "type": "dhcp", "ipam": {"type": "dhcp", **ipam}}, args=ARGS
                )
            else:
                with agent(tmp_path) as path:
                    config = {**NETWORK, "type": "dhcp", "ipam": {"type": "dhcp", "daemonSocketPath": path, **ipam}}
                    made = outcome.of_reference("dhcp", "ADD", netns.path, config, args=ARGS)
        assert made.result, made
        made.result["ips"][0]["address"] = "0.0.0.0/" + made.result["ips"][0]["address"].partition("/")[2]
        results.append(made.result)
        messages.append(packets)
        if ours:
            leases.release(OWNER)
    assert results[0] == results[1]
    assert messages[0][:2] == messages[1][-2:]


REFUSED: dict[str, dict[str, Any]] = {
    "option": {"request": [{"option": "domain-name-servers"}]},
    "too-large": {"request": [{"option": "256"}]},
    "provided": {"provide": [{"option": "nope", "value": "x"}]},
    "priority": {"priority": "high"},
    "list": {"request": {"option": "12"}},
    "agent": {"daemonSocketPath": 7},
}


@reference.needs_new()
@reference.needs("dhcp")
@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse_for_the_same_reason(name: str, netns: Any, leases: Leases, tmp_path: Path) -> None:
    """Ours before anything is made."""
    ours = call("ADD", netns, leases, network(**REFUSED[name]))
    with agent(tmp_path) as path:
        config = network(**{"daemonSocketPath": path, **REFUSED[name]})
        theirs = outcome.of_reference("dhcp", "ADD", netns.path, config)
    outcome.require_same_failure(ours, theirs)
    refusal = outcome.refusal("dhcp", network(**REFUSED[name]), leases)
    assert refusal
    assert refusal.code == ours.code


@contextlib.contextmanager
def pair(host: Any, netns: Any) -> Iterator[None]:
    """An interface eth0 on the segment, for an IPAM plugin that is called alone."""
    add = f"link add port0 type veth peer name eth0 netns {netns.path}"
    host.batch(add, "link set port0 master lan0 up")
    netns.batch("link set eth0 up")
    yield
    host.batch("link del port0")


@contextlib.contextmanager
def recorded() -> Iterator[list[dict[int, bytes]]]:
    """The options of each message to a server; without its type's own, such as the address that is asked for."""
    found: list[dict[int, bytes]] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as tap:
        tap.bind(("lan0", 0x0800))
        tap.setblocking(False)
        yield found
        with contextlib.suppress(BlockingIOError):
            while frame := tap.recv(4096):
                if frame[23] == 17 and frame[36:38] == b"\0\x43":
                    found.append(options_of(frame[42 + 240 :]) | {-1: frame[42 + 10 : 42 + 12]})


def options_of(data: bytes) -> dict[int, bytes]:
    found = {}
    while data and data[0] != 255:
        code, length = data[0], data[1]
        found[code] = data[2 : 2 + length]
        data = data[2 + length :]
    if 55 in found:
        # The reference's order is that of a map.
        found[55] = bytes(sorted(found[55]))
    return {code: value for code, value in found.items() if code not in (50, 54)}
