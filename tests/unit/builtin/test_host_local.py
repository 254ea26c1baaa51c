"""host-local as the runner calls it: results, DEL, CHECK, the host's root, the lock, cancellation."""

import asyncio
import contextlib
import fcntl
import json
import os
import time

import pytest

from multus_daemon.builtin.host_local import HostLocal, inotify
from multus_daemon.builtin.runner import BuiltinRunner
from multus_daemon.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.ports import Invocation


class Node:
    """A host below `root`, and calls to it."""

    def __init__(self, root, **options):
        self.root = root
        self.directory = root / "data" / "net"
        self.runner = BuiltinRunner(root, plugins={"host-local": HostLocal(**options)})

    async def call(self, verb, container_id="c1", *, ifname="eth0", args="", version="1.0.0", top=None, **ipam):
        config = {
            "cniVersion": version,
            "name": "net",
            "ipam": {"type": "host-local", "dataDir": "/data", **({"subnet": "10.0.0.0/24"} | ipam)},
            **(top or {}),
        }
        stdin = json.dumps(config).encode()
        return await self.runner.run(
            "host-local", Invocation(verb, container_id, "/run/netns/x", ifname, args, "/opt/cni/bin", stdin)
        )

    def files(self):
        return {entry.name: entry.read_bytes() for entry in self.directory.iterdir()}

    def addresses(self):
        return sorted(name for name in self.files() if name[0].isdigit())


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


async def test_result(node):
    (node.root / "resolv.conf").write_text(
        "# nameserver 9.9.9.9\n; search no\n\nnameserver 1.1.1.1 ignored\n\tnameserver  1.0.0.1\n"
        "domain old.example\ndomain new.example\nsearch a b\nsearch c\noptions ndots:2\noptions rotate\n"
        "nameserver\nsortlist 1.2.3.4\n"
    )
    printed = await node.call(
        "ADD",
        ranges=[[{"subnet": "fd00::/64"}]],
        routes=[{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "10.0.0.1", "mtu": 1400, "table": 0}],
        resolvConf="/resolv.conf",
    )
    assert json.loads(printed) == {
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


async def test_old_version(node):
    printed = await node.call("ADD", version="0.2.0")
    assert json.loads(printed) == {
        "cniVersion": "0.2.0",
        "ip4": {"ip": "10.0.0.2/24", "gateway": "10.0.0.1"},
        "dns": {},
    }


async def test_a_resolv_conf_that_is_not_there_takes_no_address(node):
    with pytest.raises(IoFailureError, match=r"open .*/nowhere: No such file or directory"):
        await node.call("ADD", resolvConf="/nowhere")
    assert node.addresses() == []


async def test_del_releases_what_the_interface_owns_and_can_be_repeated(node):
    await node.call("ADD")
    await node.call("ADD", ifname="net1")
    await node.call("ADD", args="IP=10.0.0.77")
    assert node.addresses() == ["10.0.0.2", "10.0.0.3", "10.0.0.77"]
    assert await node.call("DEL") == b""
    assert node.addresses() == ["10.0.0.3"]
    assert await node.call("DEL") == b""
    assert node.files()["last_reserved_ip.0"] == b"10.0.0.77"


async def test_del_of_a_network_that_never_was(node):
    assert await node.call("DEL") == b""


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK"])
async def test_a_bad_configuration_fails_every_verb(node, verb):
    with pytest.raises(CniError, match="too small to allocate from"):
        await node.call(verb, subnet="10.0.0.0/31")


async def test_check(node):
    with pytest.raises(CniError) as caught:
        await node.call("CHECK")
    assert caught.value.to_object() == {
        "code": 999,
        "msg": "host-local: Failed to find address added by container c1",
    }
    await node.call("ADD")
    assert await node.call("CHECK") == b""
    with pytest.raises(CniError, match="Failed to find"):
        await node.call("CHECK", ifname="net1")


@pytest.mark.parametrize("verb", ["STATUS", "GC"])
async def test_verbs_without_work(node, verb):
    assert await node.call(verb, version="1.1.0", subnet="nonsense") == b""
    assert not node.directory.exists()


async def test_a_later_set_that_fails_frees_only_what_this_call_took(node):
    await node.call("ADD", args="IP=10.0.0.50")
    with pytest.raises(CniError, match=r"failed to allocate for range 1: requested ip 10.1.0.1 is subnet's gateway"):
        await node.call(
            "ADD", top={"runtimeConfig": {"ips": ["10.0.0.60", "10.1.0.1"]}}, ranges=[[{"subnet": "10.1.0.0/24"}]]
        )
    assert node.addresses() == ["10.0.0.50"]


async def test_what_a_crashed_reference_plugin_left_is_taken_for_good(node):
    node.directory.mkdir(parents=True)
    (node.directory / "10.0.0.2").write_bytes(b"")
    (node.directory / "10.0.0.3").write_bytes(b"\x00\x00")
    (node.directory / "last_reserved_ip.0").write_bytes(b"")
    await node.call("ADD")
    assert node.files()["10.0.0.4"] == b"c1\r\neth0"
    with pytest.raises(CniError, match=r"requested IP address 10.0.0.2 is not available"):
        await node.call("ADD", "c2", args="IP=10.0.0.2")
    await node.call("DEL")
    assert node.addresses() == ["10.0.0.2", "10.0.0.3"]


async def test_many_at_a_time(node):
    await asyncio.gather(*(node.call("ADD", f"c{number}") for number in range(100)))
    files = node.files()
    owners = [content for name, content in files.items() if name[0].isdigit()]
    assert sorted(owners) == sorted(b"c%d\r\neth0" % number for number in range(100))
    await asyncio.gather(*(node.call("DEL", f"c{number}") for number in range(100)))
    assert node.addresses() == []


@pytest.fixture
def held(node):
    node.directory.mkdir(parents=True)
    with (node.directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


async def test_a_lock_that_somebody_keeps(tmp_path, held):
    node = Node(tmp_path, lock_timeout=0.2)
    # The second waits for the first inside the process; its time runs all the same.
    for outcome in await asyncio.gather(node.call("ADD"), node.call("DEL"), return_exceptions=True):
        assert isinstance(outcome, TryAgainLaterError)
        assert outcome.code == 11
        assert str(node.directory / "lock") in outcome.msg
    assert node.addresses() == []


async def test_a_busy_network_does_not_stop_the_others(tmp_path, node, held):
    waiting = [asyncio.create_task(node.call("ADD", f"c{number}")) for number in range(50)]
    await asyncio.sleep(0.05)
    other = Node(tmp_path)
    async with asyncio.timeout(30):
        await other.call("ADD", dataDir="/elsewhere")
    fcntl.flock(held, fcntl.LOCK_UN)
    await asyncio.gather(*waiting)
    assert len(node.addresses()) == 50


async def test_a_cancelled_call_stops_waiting_and_takes_nothing(node, held):
    call = asyncio.create_task(node.call("ADD"))
    await asyncio.sleep(0.05)
    call.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await call
    # Long before the lock's own deadline of 10 s.
    assert time.monotonic() - started < 5
    fcntl.flock(held, fcntl.LOCK_UN)
    await asyncio.sleep(0.05)
    assert node.addresses() == []


async def test_an_unusable_data_directory(node):
    node.directory.parent.mkdir(parents=True)
    node.directory.write_text("a file")
    with pytest.raises(IoFailureError, match="host-local: Not a directory") as caught:
        await node.call("ADD")
    assert str(node.directory) in str(caught.value)


async def test_a_nearly_full_network_is_read_once_and_tried_once(node, monkeypatch):
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
    printed = await node.call("ADD", subnet="10.0.0.0/20")
    assert json.loads(printed)["ips"][0]["address"] == "10.0.15.254/20"
    assert calls == ["listdir", "link"]
    with pytest.raises(CniError, match="no IP addresses available"):
        await node.call("ADD", "c2", subnet="10.0.0.0/20")
    assert calls == ["listdir", "link", "listdir"]


@pytest.mark.parametrize("leases", [10, 1000])
async def test_an_add_opens_no_lease_of_others(node, monkeypatch, leases):
    node.directory.mkdir(parents=True)
    for number in range(2, 2 + leases):
        (node.directory / f"10.0.{number >> 8}.{number & 255}").write_bytes(b"other%d\r\neth0" % number)
    for _ in range(2):
        await node.call("ADD", subnet="10.0.0.0/20")
        await node.call("DEL", subnet="10.0.0.0/20")
    real, opened = os.open, []

    def recorded(path, *args, **kwargs):
        opened.append(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", recorded)
    await node.call("ADD", subnet="10.0.0.0/20")
    (address,) = set(node.addresses()) - {f"10.0.{number >> 8}.{number & 255}" for number in range(2, 2 + leases)}
    # The directory, its lock, the lease that the last call removed, and what this call writes.
    last = f"10.0.{(leases + 3) >> 8}.{(leases + 3) & 255}"
    assert opened == [str(node.directory), "lock", last, "last_reserved_ip.0", ".new", "last_reserved_ip.0"]
    assert address == f"10.0.{(leases + 4) >> 8}.{(leases + 4) & 255}"


async def test_a_refusal_comes_from_the_directory_not_from_memory(node, monkeypatch):
    """Where changes are not reported, as those of another machine on NFS, and within one tick of the clock."""
    await node.call("ADD", subnet="10.0.0.0/30")
    for _ in range(2):
        await node.call("CHECK", subnet="10.0.0.0/30")

    @contextlib.contextmanager
    def unreported():
        before = node.directory.stat()
        yield
        os.utime(node.directory, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(inotify.Watcher, "changes", lambda self: iter(()))
    address = node.directory / "10.0.0.2"
    with unreported():
        address.unlink()
    await node.call("ADD", "c2", subnet="10.0.0.0/30")
    with unreported():
        address.unlink()
    await node.call("ADD", "c3", subnet="10.0.0.0/30", args="IP=10.0.0.2")
    with unreported():
        address.unlink()
        address.with_name("10.0.0.3").write_bytes(b"c4\r\neth0")
    await node.call("CHECK", "c4", subnet="10.0.0.0/30")


async def test_a_cancelled_call_ends_before_the_caller_goes_on(node, monkeypatch):
    """What the thread has begun is done, one way or the other, when the cancellation is seen: DEL can follow."""
    real = os.link

    def slow(*args, **kwargs):
        time.sleep(0.2)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "link", slow)
    call = asyncio.create_task(node.call("ADD"))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.addresses() == ["10.0.0.2"]
    await node.call("DEL")
    assert node.addresses() == []
