"""host-local as the runner calls it: results, DEL, CHECK, the host's root, the lock, cancellation."""

import asyncio
import errno
import fcntl
import os
import socket
import time
from functools import partial

import pytest

from multus_daemon import deadlines
from multus_daemon.plugins.builtin import host_local as plugin
from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.plugins.builtin.host_local_store import Index
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.runtime import fs, portal
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.result import Result
from tests.aside import Aside
from tests.calls import run


class Node:
    """A host below `root`, and calls to it."""

    def __init__(self, root):
        self.root = root
        self.directory = root / "data" / "net"
        self.runner = Builtin("host-local", root)

    def call(
        self, verb, container_id="c1", *, ifname="eth0", args="", version="1.0.0", top=None, recorded=None, **ipam
    ):
        config = {
            "cniVersion": version,
            "name": "net",
            "ipam": {"type": "host-local", "dataDir": "/data", **({"subnet": "10.0.0.0/24"} | ipam)},
            **(top or {}),
        }
        return run(
            self.runner,
            Invocation(verb, container_id, "/run/netns/x", ifname, args, "/opt/cni/bin", config, recorded=recorded),
        )

    def files(self):
        return {entry.name: entry.read_bytes() for entry in self.directory.iterdir()}

    def addresses(self):
        return sorted(name for name in os.listdir(self.directory) if name[0].isdigit())


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The plugin as in a process that has just begun."""
    monkeypatch.setattr(plugin, "_locks", KeyedLock())
    monkeypatch.setattr(plugin, "_index", Index())


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_result(node):
    (node.root / "resolv.conf").write_text(
        "# nameserver 9.9.9.9\n; search no\n\nnameserver 1.1.1.1 ignored\n\tnameserver  1.0.0.1\n"
        "domain old.example\ndomain new.example\nsearch a b\nsearch c\noptions ndots:2\noptions rotate\n"
        "nameserver\nsortlist 1.2.3.4\n"
    )
    found = node.call(
        "ADD",
        ranges=[[{"subnet": "fd00::/64"}]],
        routes=[{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "10.0.0.1", "mtu": 1400, "table": 0}],
        resolvConf="/resolv.conf",
    )
    assert result.to_object(found, "1.0.0") == {
        "cniVersion": "1.0.0",
        "ips": [
            {"address": "10.0.0.2/24", "gateway": "10.0.0.1"},
            {"address": "fd00::2/64", "gateway": "fd00::1"},
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "10.0.0.1", "mtu": 1400, "table": 0}],
        "dns": {
            "nameservers": ["1.1.1.1", "1.0.0.1"],
            "domain": "new.example",
            "search": ["a", "b", "c"],
            "options": ["ndots:2", "rotate"],
        },
    }
    assert node.files()["10.0.0.2"] == b"c1\r\neth0"


def test_old_version(node):
    found = node.call("ADD", version="0.2.0")
    assert result.to_object(found, "0.2.0") == {
        "cniVersion": "0.2.0",
        "ip4": {"ip": "10.0.0.2/24", "gateway": "10.0.0.1"},
        "dns": {},
    }


def test_a_resolv_conf_that_is_not_there_takes_no_address(node):
    with pytest.raises(IoFailureError, match=r"open .*/nowhere: No such file or directory"):
        node.call("ADD", resolvConf="/nowhere")
    assert node.addresses() == []


def test_del_releases_what_the_interface_owns_and_can_be_repeated(node):
    node.call("ADD")
    node.call("ADD", ifname="net1")
    node.call("ADD", args="IP=10.0.0.77")
    assert node.addresses() == ["10.0.0.2", "10.0.0.3", "10.0.0.77"]
    assert node.call("DEL") == Result()
    assert node.addresses() == ["10.0.0.3"]
    assert node.call("DEL") == Result()
    assert node.files()["last_reserved_ip.0"] == b"10.0.0.77"


def kept(node, data_dir="/data"):
    """Whether a failing DEL of the container would leave an address."""
    ipam = {"type": "host-local", "subnet": "10.0.0.0/24", "dataDir": data_dir}
    config = {"cniVersion": "1.0.0", "name": "net", "ipam": ipam}
    return node.runner.keeps(Invocation("DEL", "c1", "/run/netns/x", "eth0", "", "/opt/cni/bin", config))


def test_where_no_directory_can_be_no_address_is_kept(node):
    (node.root / "file").touch()
    assert not kept(node)
    assert not kept(node, "/file/x")
    # As the kernel says it of a link in the root directory itself, which is not resolved before.
    node.directory.parent.mkdir()
    node.directory.symlink_to("net")
    assert not kept(node)
    for path in ("/data\0", "/" + "d" * 256, 5):
        assert not kept(node, path)


def test_a_directory_that_cannot_be_read_says_nothing_of_what_is_kept(node, monkeypatch):
    node.call("ADD")
    assert kept(node)
    monkeypatch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(IoFailureError, match="can't be read: Input/output error"):
        kept(node)


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK"])
def test_a_bad_configuration_fails_every_verb(node, verb):
    with pytest.raises(CniError, match="too small to allocate from"):
        node.call(verb, subnet="10.0.0.0/31")


def test_check(node):
    with pytest.raises(CniError) as caught:
        node.call("CHECK")
    assert caught.value.to_object() == {
        "code": 999,
        "msg": "host-local: Failed to find address added by container c1",
    }
    node.call("ADD")
    assert node.call("CHECK") == Result()
    with pytest.raises(CniError, match="Failed to find"):
        node.call("CHECK", ifname="net1")


@pytest.mark.parametrize("verb", ["STATUS", "GC"])
def test_verbs_without_work(node, verb):
    assert node.call(verb, version="1.1.0", subnet="nonsense") == Result()
    assert not node.directory.exists()


def test_a_later_set_that_fails_frees_only_what_this_call_took(node):
    node.call("ADD", args="IP=10.0.0.50")
    with pytest.raises(CniError, match=r"failed to allocate for range 1: requested ip 10.1.0.1 is subnet's gateway"):
        node.call(
            "ADD", top={"runtimeConfig": {"ips": ["10.0.0.60", "10.1.0.1"]}}, ranges=[[{"subnet": "10.1.0.0/24"}]]
        )
    assert node.addresses() == ["10.0.0.50"]


def test_what_a_crashed_reference_plugin_left_is_taken_for_good(node):
    node.directory.mkdir(parents=True)
    (node.directory / "10.0.0.2").write_bytes(b"")
    (node.directory / "10.0.0.3").write_bytes(b"\x00\x00")
    (node.directory / "last_reserved_ip.0").write_bytes(b"")
    node.call("ADD")
    assert node.files()["10.0.0.4"] == b"c1\r\neth0"
    with pytest.raises(CniError, match=r"requested IP address 10.0.0.2 is not available"):
        node.call("ADD", "c2", args="IP=10.0.0.2")
    node.call("DEL")
    assert node.addresses() == ["10.0.0.2", "10.0.0.3"]


def broken(monkeypatch, function, code, *names):
    """Have `os.<function>` of the leases `names` fail."""
    real_open, real = os.open, getattr(os, function)
    opened = {}

    def note(path, *arguments, **keywords):
        if function == "open" and path in names:
            raise OSError(code, os.strerror(code), path)
        descriptor = real_open(path, *arguments, **keywords)
        opened[descriptor] = path
        return descriptor

    def refuse(descriptor, *arguments):
        if opened.get(descriptor) in names:
            raise OSError(code, os.strerror(code))
        return real(descriptor, *arguments)

    if function != "open":
        monkeypatch.setattr(os, function, refuse)
    monkeypatch.setattr(os, "open", note)


def result_of(*addresses):
    return Result(ips=tuple(map(result.IpConfig, addresses)))


UNREADABLE = [("open", errno.EMFILE), ("open", errno.ENFILE), ("open", errno.EACCES), ("read", errno.EIO)]


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize(("function", "code"), UNREADABLE)
def test_a_lease_that_cannot_be_read_fails_the_del(node, monkeypatch, function, code, is_told):
    """It may be the one that is to be released. The others are, and once it can be read, it is too."""
    ranges = {"ranges": [[{"subnet": "fd00::/64"}]]}
    node.call("ADD", **ranges)
    recorded = result_of("10.0.0.2/24", "fd00::2/64") if is_told else None
    for known in (False, True):
        # With and without what an earlier call has read.
        monkeypatch.setattr(plugin, "_index", Index())
        if known:
            node.call("CHECK", **ranges)
            node.call("CHECK", **ranges)
        with monkeypatch.context() as patched:
            broken(patched, function, code, "10.0.0.2")
            for _ in range(2):
                with pytest.raises(
                    IoFailureError, match=rf"^host-local: {os.strerror(code)}: /data/net/10.0.0.2"
                ) as caught:
                    node.call("DEL", recorded=recorded, **ranges)
                assert "/data/net" in str(caught.value)
        assert node.addresses() == ["10.0.0.2"]
    node.call("DEL", recorded=recorded, **ranges)
    assert node.addresses() == []


@pytest.mark.parametrize(("function", "code"), UNREADABLE)
def test_a_lease_that_cannot_be_read_holds_up_nobody_else(node, monkeypatch, function, code):
    """The ADD's result has the addresses."""
    for number in (1, 2):
        node.call("ADD", f"c{number}")
    broken(monkeypatch, function, code, "10.0.0.2")
    node.call("DEL", "c2", recorded=result_of("10.0.0.3/24"))
    assert node.addresses() == ["10.0.0.2"]
    node.call("ADD", "c3")
    assert node.addresses() == ["10.0.0.2", "10.0.0.4"]


@pytest.mark.parametrize("holds", [False, True])
def test_a_del_where_nothing_can_be_written(node, monkeypatch, holds):
    """Nothing was reserved there, or it cannot be released."""
    node.directory.mkdir(parents=True)
    if holds:
        node.call("ADD")

    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store, "_acquire", refuse)
    if holds:
        with pytest.raises(IoFailureError, match="Read-only"):
            node.call("DEL")
        assert node.addresses()
    else:
        node.call("DEL")


@pytest.mark.parametrize(("is_known", "failing"), [(False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize("recorded", [result_of("10.0.0.2/24"), None])
def test_a_lease_that_can_be_read_only_later_in_the_same_del_fails_it(node, monkeypatch, is_known, failing, recorded):
    """The disk is sick, not dead: each read may fail or not. `failing`: the one of this lease that does."""
    node.call("ADD")
    if not is_known:
        monkeypatch.setattr(plugin, "_index", Index())
    real, reads = fs.open_regular, []

    def some(path, *arguments, **more):
        if path == "10.0.0.2":
            reads.append(path)
            if len(reads) == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(fs, "open_regular", some)
        with pytest.raises(IoFailureError, match="Input/output error: /data/net/10.0.0.2"):
            node.call("DEL", recorded=recorded)
    node.call("DEL", recorded=recorded)
    assert node.addresses() == []


def test_an_add_that_cannot_tidy_up_gives_no_address_away(node, monkeypatch):
    """The name beside stays, for the next call to remove; the address does not."""
    real = os.unlink
    calls: list[str] = []

    def refuse_once(path, **more):
        if path == ".new" and os.path.exists(node.directory / "10.0.0.2") and not calls:
            calls.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse_once)
        with pytest.raises(IoFailureError, match="Input/output error"):
            node.call("ADD")
    assert calls
    assert node.addresses() == []
    node.call("DEL")
    assert sorted(node.files()) == ["lock"]


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "socket"])
def test_what_is_no_file_is_no_lease(node, kind):
    """An IPAM plugin cannot have made it."""
    node.call("ADD")
    path = node.directory / "10.0.0.9"
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("10.0.0.2")
        case "pipe":
            os.mkfifo(path)
        case _:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
    for _ in range(2):
        node.call("DEL")
        assert node.addresses() == ["10.0.0.9"]
    with pytest.raises(CniError, match="requested IP address 10.0.0.9 is not available"):
        node.call("ADD", args="IP=10.0.0.9")


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK"])
def test_a_pipe_for_a_lock_holds_nobody_up(node, verb):
    node.directory.mkdir(parents=True)
    os.mkfifo(node.directory / "lock")
    with pytest.raises(IoFailureError, match="^host-local: not a regular file: /data/net/lock") as caught:
        node.call(verb)
    assert "/data/net" in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_in_the_way_of_a_mark(node, make):
    """Only the order depends on it."""
    node.directory.mkdir(parents=True)
    make(node.directory / "last_reserved_ip.0")
    if make is os.mkfifo:
        node.call("ADD")
        assert node.files()["last_reserved_ip.0"] == b"10.0.0.2"
    else:
        with pytest.raises(IoFailureError, match="Is a directory: /data/net/last_reserved_ip.0"):
            node.call("ADD")
        assert node.addresses() == []


@pytest.fixture
def held(node):
    node.directory.mkdir(parents=True)
    with (node.directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def test_a_lock_that_somebody_keeps(node, held, monkeypatch):
    monkeypatch.setattr(deadlines, "HOST_LOCAL_LOCK_SECONDS", 0.2)
    # The second waits for the first inside the process; its time runs all the same.
    for call in (Aside(node.call, "ADD"), Aside(node.call, "DEL")):
        with pytest.raises(TryAgainLaterError) as caught:
            call.result()
        assert caught.value.code == 11
        assert "/data/net/lock" in caught.value.msg
    assert node.addresses() == []


def test_a_call_of_this_process_that_hangs(node, monkeypatch):
    """A disk that does not answer: later calls wait as long as for another process, then fail with the reason."""
    monkeypatch.setattr(deadlines, "HOST_LOCAL_LOCK_SECONDS", 0.1)
    with plugin._locks.hold(str(node.directory)):
        call = Aside(node.call, "ADD")
        with pytest.raises(TryAgainLaterError) as caught:
            call.result()
    assert "/data/net/lock" in caught.value.msg
    assert not node.directory.exists()


def test_a_busy_network_does_not_stop_the_others(tmp_path, node, held):
    waiting = [Aside(node.call, "ADD", f"c{number}") for number in range(50)]
    time.sleep(0.05)
    other = Node(tmp_path)
    Aside(other.call, "ADD", dataDir="/elsewhere").result()
    assert not any(call.done for call in waiting)
    fcntl.flock(held, fcntl.LOCK_UN)
    for call in waiting:
        call.result()
    assert len(node.addresses()) == 50


def test_a_stopped_call_stops_waiting_and_takes_nothing(node, held):
    # The first polls for the lock of the directory, the second waits for the first.
    calls = [Aside(node.call, "ADD", name) for name in ("c1", "c2")]
    time.sleep(0.05)
    started = time.monotonic()
    for call in reversed(calls):
        call.stop()
        with pytest.raises(Interrupted):
            call.result()
    # Long before the lock's own deadline of 10 s.
    assert time.monotonic() - started < 5
    fcntl.flock(held, fcntl.LOCK_UN)
    time.sleep(0.05)
    assert node.addresses() == []


def test_an_unusable_data_directory(node):
    node.directory.parent.mkdir(parents=True)
    node.directory.write_text("a file")
    with pytest.raises(IoFailureError, match="host-local: Not a directory") as caught:
        node.call("ADD")
    assert "/data/net" in str(caught.value)


def test_a_nearly_full_network_is_read_once_and_tried_once(node, monkeypatch):
    node.directory.mkdir(parents=True)
    for number in range(2, 4094):
        (node.directory / f"10.0.{number >> 8}.{number & 255}").write_bytes(b"other\r\neth0")
    calls = []
    for name in ("listdir", "link"):
        real = getattr(os, name)

        def counted(*args, _real=real, _name=name, **kw):
            calls.append(_name)
            return _real(*args, **kw)

        monkeypatch.setattr(os, name, counted)
    found = node.call("ADD", subnet="10.0.0.0/20")
    assert found.ips[0].address == "10.0.15.254/20"
    assert calls == ["listdir", "link"]
    with pytest.raises(CniError, match="no IP addresses available"):
        node.call("ADD", "c2", subnet="10.0.0.0/20")
    assert calls == ["listdir", "link", "listdir"]


async def test_a_cancelled_call_ends_before_the_caller_goes_on(node, monkeypatch):
    """The thread has finished its work when the cancellation is reported, so a DEL can follow."""
    real = os.link

    def slow(*args, **kwargs):
        time.sleep(0.2)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "link", slow)
    call = asyncio.create_task(portal.run(Deadline(), partial(node.call, "ADD")))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.addresses() == ["10.0.0.2"]
    await portal.run(Deadline(), partial(node.call, "DEL"))
    assert node.addresses() == []
