"""Our host-local beside the reference plugin's binary: the same answers, the same files, one directory for both."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from multus_daemon.plugins.builtin.registry import PLUGINS, Builtin
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson, result
from multus_daemon.spec.cni.errors import CniError
from tests import calls as plugin_calls
from tests.aside import together
from tests.netns import reference as programs

REFERENCE = programs.DIRECTORY / "host-local"

pytestmark = programs.needs("host-local")


def environ(verb, container_id, args=""):
    return {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": container_id,
        "CNI_NETNS": "/nowhere",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": args,
        "CNI_PATH": "/usr/lib/cni",
    }


def reference(verb, container_id, config, args=""):
    done = subprocess.run(
        [str(REFERENCE)],
        env=environ(verb, container_id, args),
        input=json.dumps(config).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    return done.returncode, done.stdout


def daemon():
    """A runner as in a process of its own: locks, and what is known of directories, are shared with no other."""
    spec = importlib.util.find_spec(PLUGINS["host-local"])
    assert spec is not None
    assert spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    return Builtin("host-local", Path("/"), module=plugin)


RUNNERS: dict[str, Builtin] = {}


def ours(verb, container_id, config, args="", *, runner=None):
    fields = gojson.loads_object(json.dumps(config).encode())
    invocation = Invocation(verb, container_id, "/nowhere", "eth0", args, "/usr/lib/cni", fields)
    try:
        made = plugin_calls.run(runner or RUNNERS["one"], invocation)
        return 0, result.to_stdout(made, config["cniVersion"]) if verb == "ADD" else b""
    except CniError as error:
        return 1, error.to_stdout()


@pytest.fixture(autouse=True)
def fresh_runner():
    RUNNERS["one"] = daemon()


def network(directory, version="0.4.0", *, top=None, **ipam):
    ipam = {"type": "host-local", "dataDir": str(directory), **ipam}
    return {"cniVersion": version, "name": "net", "type": "ptp", "ipam": ipam, **(top or {})}


def files(directory):
    return {entry.name: entry.read_bytes() for entry in (directory / "net").iterdir()} if directory.exists() else {}


def sets(*subnets):
    return [[{"subnet": subnet} for subnet in item.split()] for item in subnets]


SMALL = "10.50.0.0/29"
# Configuration, then the calls: verb, container, CNI_ARGS.
ADDS = [("ADD", f"c{number}", "") for number in range(7)]
ADD_DEL_ADD = [*ADDS[:3], ("DEL", "c1", ""), ("CHECK", "c0", ""), ("CHECK", "c1", ""), *ADDS[3:], ("DEL", "c9", "")]
# Not here: IPv6 addresses that begin with zero bits. 1.1.1 miscounts from them, later releases do not.
CASES = {
    "full": ({"subnet": SMALL}, ADDS),
    "in turns": ({"subnet": SMALL}, ADD_DEL_ADD),
    "part of a subnet": ({"subnet": "10.50.0.0/24", "rangeStart": "10.50.0.9", "rangeEnd": "10.50.0.12"}, ADD_DEL_ADD),
    "gateway inside": ({"subnet": SMALL, "gateway": "10.50.0.4"}, ADDS),
    "gateway at the end": ({"subnet": SMALL, "gateway": "10.50.0.7"}, ADDS),
    "mapped gateway": ({"subnet": SMALL, "gateway": "::ffff:10.50.0.4"}, ADDS[:4]),
    "start is the subnet's own address": ({"subnet": SMALL, "rangeStart": "10.50.0.0"}, ADDS[:2]),
    "only the gateway": ({"subnet": SMALL, "rangeEnd": "10.50.0.1"}, ADDS[:1]),
    "ipv6": ({"subnet": "fd01::/126"}, ADD_DEL_ADD),
    "ipv6 large": ({"subnet": "fd01:0:0:1::/64"}, ADD_DEL_ADD),
    "ipv6 many zeros": ({"subnet": "2001:0:0:2::/64", "rangeStart": "2001:0:0:2:0:0:3:0"}, ADDS[:3]),
    "mapped start": ({"subnet": SMALL, "rangeStart": "::ffff:10.50.0.3"}, ADDS[:2]),
    "two ranges": ({"ranges": sets("10.50.0.0/30 10.51.0.0/30 10.52.0.0/30")}, ADD_DEL_ADD),
    "two sets": ({"ranges": sets("10.50.0.0/29", "fd00::/64")}, ADD_DEL_ADD),
    "second set full": ({"ranges": sets("10.50.0.0/24", "10.51.0.0/30")}, ADDS[:3]),
    "legacy first": ({"subnet": SMALL, "ranges": sets("10.51.0.0/29")}, ADDS[:3]),
    "routes": ({"subnet": SMALL, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.1/8", "gw": "10.50.0.1"}]}, ADDS[:1]),
    "requested by CNI_ARGS": ({"subnet": SMALL}, [("ADD", "c1", "IP=10.50.0.5"), ("ADD", "c2", ""), ("ADD", "c3", "")]),
    "requested with a length": ({"subnet": SMALL}, [("ADD", "c1", "IP=10.50.0.5/8")]),
    "requested twice": ({"subnet": SMALL}, [("ADD", "c1", "IP=10.50.0.5"), ("ADD", "c2", "IP=10.50.0.5")]),
    "two for one container": ({"subnet": SMALL}, [("ADD", "c1", ""), ("ADD", "c1", "IP=10.50.0.5"), ("DEL", "c1", "")]),
    "requested gateway": ({"subnet": SMALL}, [("ADD", "c1", "IP=10.50.0.1")]),
    "requested elsewhere": ({"subnet": SMALL}, [("ADD", "c1", "IP=10.9.0.1")]),
    "duplicate": ({"subnet": SMALL}, [("ADD", "c1", ""), ("ADD", "c1", "")]),
    "unknown argument": ({"subnet": SMALL}, [("ADD", "c1", "MAC=x"), ("ADD", "c1", "IgnoreUnknown=1;MAC=x")]),
    "bad argument": ({"subnet": SMALL}, [("ADD", "c1", "IP=x"), ("ADD", "c1", "IgnoreUnknown=x")]),
    "no ranges": ({}, [("ADD", "c1", ""), ("DEL", "c1", ""), ("CHECK", "c1", "")]),
    "too small": ({"subnet": "10.50.0.0/31"}, ADDS[:1]),
    "host bits": ({"subnet": "10.50.0.1/29"}, ADDS[:1]),
    "mapped subnet": ({"subnet": "::ffff:10.50.0.0/120"}, ADDS[:1]),
    "empty set": ({"ranges": [[]]}, ADDS[:1]),
    "no subnet": ({"ranges": [[{"rangeStart": "10.0.0.1"}]]}, ADDS[:1]),
    "start outside": ({"subnet": SMALL, "rangeStart": "10.51.0.1"}, ADDS[:1]),
    "end outside": ({"subnet": SMALL, "rangeEnd": "10.51.0.1"}, ADDS[:1]),
    "start behind end": ({"subnet": SMALL, "rangeStart": "10.50.0.5", "rangeEnd": "10.50.0.3"}, ADDS[:1]),
    "end before all": ({"subnet": SMALL, "rangeEnd": "10.50.0.0"}, ADDS[:1]),
    "end of the other family": ({"subnet": SMALL, "rangeStart": "10.50.0.5", "rangeEnd": "fd00::1"}, ADDS[:1]),
    "mixed families": ({"ranges": sets("10.50.0.0/29 fd00::/64")}, ADDS[:1]),
    "overlap inside": ({"ranges": sets("10.50.0.0/29 10.50.0.0/28")}, ADDS[:1]),
    "overlap": ({"ranges": sets("10.51.0.0/29", "10.50.0.0/29", "10.50.0.0/28")}, ADDS[:1]),
    "bad subnet": ({"subnet": "10.50.0.0"}, ADDS[:1]),
    "bad start": ({"subnet": SMALL, "rangeStart": "10.50.0"}, ADDS[:1]),
}


def compare(tmp_path, calls, version="0.4.0", *, top=None, **ipam):
    """The same calls to both, each with a directory of its own: same output, same files after each call."""
    for verb, container_id, args in calls:
        seen = []
        for name, run in (("reference", reference), ("ours", ours)):
            code, stdout = run(verb, container_id, network(tmp_path / name, version, top=top, **ipam), args)
            if code:
                # Codes and details are better here, on purpose; the words are the same, without values of CNI_ARGS.
                stdout = json.loads(stdout)["msg"].replace("MAC=x", "MAC")
            elif version == "1.0.0" and run is reference:
                # 1.1.1 wrote an empty dns, which later releases leave out.
                stdout = stdout.replace(b',\n    "dns": {}', b"")
            seen.append((code, stdout, files(tmp_path / name)))
        assert seen[0] == seen[1], (verb, container_id)


@pytest.mark.parametrize("case", CASES)
def test_same_answers_and_files(tmp_path, case):
    ipam, calls = CASES[case]
    compare(tmp_path, calls, **ipam)


@pytest.mark.parametrize("by", ["reference", "built-in"])
@pytest.mark.parametrize(
    ("subnet", "gateway", "shown"),
    [
        (SMALL, "192.168.0.1", "192.168.0.1"),
        (SMALL, "169.254.1.1", "169.254.1.1"),
        (SMALL, "0.0.0.0", "0.0.0.0"),
        (SMALL, "fd00::1", "fd00::1"),
        ("fd00::/64", "fe80::1", "fe80::1"),
        ("fd00::/64", "fd00:0:0:1::1", "fd00:0:0:1::1"),
        ("fd00::/64", "::ffff:10.1.1.1", "10.1.1.1"),
    ],
)
def test_a_gateway_outside_of_the_subnet_is_refused(tmp_path, by, subnet, gateway, shown):
    if by == "reference" and programs.release() < (1, 10):
        pytest.skip(f"needs v1.10.0 or newer: {programs.HOW}")
    config = network(tmp_path, ranges=[[{"subnet": "10.9.0.0/24"}], [{"subnet": subnet, "gateway": gateway}]])
    code, stdout = (ours if by == "built-in" else reference)("ADD", "c1", config)
    assert code == 1
    assert json.loads(stdout)["msg"] == f"invalid range set 1: gateway {shown} not in network {subnet}"
    assert not (tmp_path / "net").exists()


def test_del_frees_what_was_given_before_gateways_were_looked_at(tmp_path):
    """v1.10.0 does not."""
    assert ours("ADD", "c1", network(tmp_path, subnet=SMALL))[0] == 0
    config = network(tmp_path, subnet=SMALL, gateway="10.99.0.1")
    assert ours("CHECK", "c1", config)[0] == 0
    assert ours("DEL", "c1", config)[0] == 0
    assert set(files(tmp_path)) == {"lock", "last_reserved_ip.0"}


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0"])
def test_same_answers_in_every_version(tmp_path, version):
    ranges = sets("10.50.0.0/29", "fd00::/64")
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "fd01::/48", "gw": "fd00::9"}]
    compare(tmp_path, ADDS[:2], version, ranges=ranges, routes=routes)
    compare(tmp_path / "more", ADDS[:1], version, ranges=sets("10.50.0.0/29", "10.51.0.0/29"))


@pytest.mark.parametrize(
    "top",
    [
        {"args": {"cni": {"ips": ["10.50.0.5"]}}},
        {"runtimeConfig": {"ips": ["10.50.0.5/24"]}},
        {"args": {"cni": {"ips": ["10.50.0.5"]}}, "runtimeConfig": {"ips": ["10.60.0.3"]}},
        {"args": {"cni": {"ips": ["x"]}}},
        {"runtimeConfig": {"ips": [""]}},
        {"runtimeConfig": {"ipRanges": sets("10.70.0.0/29", "10.71.0.0/30 10.72.0.0/30")}},
        {"runtimeConfig": {"ipRanges": sets("10.50.0.0/28")}},
        {"RuntimeConfig": {"IPRANGES": sets("10.70.0.0/29")}},
    ],
    ids=json.dumps,
)
def test_same_answers_to_runtime_requests(tmp_path, top):
    compare(tmp_path, ADDS[:2], top=top, ranges=sets("10.50.0.0/29", "10.60.0.0/29"))


def test_same_dns(tmp_path):
    path = tmp_path / "resolv.conf"
    path.write_text(
        "# c\nnameserver 1.1.1.1\nnameserver 1.0.0.1 x\ndomain a\ndomain b\nsearch x y\nsearch z\noptions o\n"
    )
    compare(tmp_path, ADDS[:1], subnet=SMALL, resolvConf=str(path))


def test_a_directory_moves_from_one_to_the_other_and_back(tmp_path):
    config = network(tmp_path, subnet="10.50.0.0/29")
    for number, (adds, deletes) in enumerate([(reference, ours), (ours, reference)] * 4):
        code, stdout = adds("ADD", "c1", config)
        assert code == 0
        # Both walk on from the same mark.
        address = f"10.50.0.{2 + number % 5}"
        assert json.loads(stdout)["ips"][0]["address"] == f"{address}/29"
        assert files(tmp_path)[address] == b"c1\r\neth0"
        assert (deletes("CHECK", "c1", config))[0] == 0
        assert (deletes("ADD", "c1", config))[0] == 1
        assert (deletes("DEL", "c1", config))[0] == 0
        assert set(files(tmp_path)) == {"lock", "last_reserved_ip.0"}


def _many(runs, verb, config, names):
    limit = threading.Semaphore(8)

    def one(position, name):
        with limit:
            code, stdout = runs[position % len(runs)](verb, name, config)
            assert code == 0, stdout
            return json.loads(stdout)["ips"][0]["address"] if stdout else ""

    return together(*(partial(one, position, name) for position, name in enumerate(names)))


def test_both_at_once(tmp_path):
    config = network(tmp_path, subnet="10.50.0.0/26")
    names = [f"c{number}" for number in range(61)]
    # Seldom the program, whose start takes longer than twenty calls of the others.
    got = _many([ours, reference, ours, reference, ours, command], "ADD", config, names)
    # Every address of the subnet, each once.
    assert sorted(got) == sorted(f"10.50.0.{number}/26" for number in range(2, 63))
    owners = {name: content for name, content in files(tmp_path).items() if re.fullmatch(r"[\d.]+", name)}
    assert owners == {
        address.partition("/")[0]: f"{name}\r\neth0".encode() for name, address in zip(names, got, strict=True)
    }
    # Each is taken back by another one than gave it.
    _many([reference, ours, reference, command, reference, ours], "DEL", config, names)
    assert set(files(tmp_path)) == {"lock", "last_reserved_ip.0"}


def test_both_in_turns_under_load(tmp_path):
    """Few addresses, given and taken back all the time: each is somebody's alone, and none is lost."""
    config = network(tmp_path, subnet="10.50.0.0/28")
    runs = [ours, reference]
    held = set()

    def worker(number):
        for turn in range(5):
            adds, deletes = runs[(number + turn) % 2], runs[(number + turn // 2) % 2]
            name = f"w{number}t{turn}"
            code, stdout = adds("ADD", name, config)
            assert code == 0, stdout
            address = json.loads(stdout)["ips"][0]["address"]
            assert address not in held
            held.add(address)
            assert (deletes("CHECK", name, config))[0] == 0
            held.remove(address)
            assert (deletes("DEL", name, config))[0] == 0

    together(*(partial(worker, number) for number in range(12)))
    assert set(files(tmp_path)) == {"lock", "last_reserved_ip.0"}
    # All 13 addresses of the subnet are free.
    got = _many([ours, reference], "ADD", config, [f"c{number}" for number in range(13)])
    assert len(set(got)) == 13


class Books:
    """Models host-local with one range, and so what a directory must contain."""

    def __init__(self, first, last):
        self.ring = [f"10.50.0.{number}" for number in range(first, last + 1)]
        self.leases = {}
        self.mark = ""

    def next_free(self):
        start = self.ring.index(self.mark) + 1 if self.mark else 0
        return next((one for one in self.ring[start:] + self.ring[:start] if one not in self.leases), None)

    def of(self, container_id):
        return [one for one in self.ring if self.leases.get(one) == _content(container_id)]

    def files(self):
        marks = {"last_reserved_ip.0": self.mark.encode()} if self.mark else {}
        return {"lock": b"", **self.leases, **marks}


def _content(container_id):
    return f"{container_id}\r\neth0".encode()


def _by_hand(random, books, directory):
    """Change a lease by hand, without the lock and without our tools."""
    address = random.choice(books.ring)
    path = directory / "net" / address
    match random.choice(["remove", "add", "rewrite", "give away"]):
        case "remove":
            path.unlink(missing_ok=True)
            books.leases.pop(address, None)
        case "add" if address not in books.leases:
            path.write_bytes(_content("hand"))
            books.leases[address] = _content("hand")
        case "rewrite" if address in books.leases:
            # In place: neither the directory nor the file's inode is another one afterwards.
            path.write_bytes(b"")
            books.leases[address] = b""
        case "give away" if address in books.leases:
            path.write_bytes(_content("hand"))
            books.leases[address] = _content("hand")
        case _:
            pass


@pytest.mark.parametrize("same_mtime", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_both_and_of_changes_by_hand(tmp_path, seed, same_mtime):
    """The binary, two daemons that remember, and somebody at a shell: each sees at once what another has done.

    With one mtime for all that happens, as for what happens within one tick of the kernel's clock.
    """
    random = Random(seed)
    config = network(tmp_path, subnet="10.50.0.0/28", rangeStart="10.50.0.2", rangeEnd="10.50.0.9")
    books = Books(2, 9)
    runs: list[Callable[..., tuple[int, bytes]]] = [reference, ours, ours, partial(ours, runner=daemon())]
    for turn in range(300):
        # Of these containers some have an address, some do not.
        name = f"c{random.randrange(10)}"
        verb = random.choice(["ADD", "ADD", "DEL", "CHECK", "hand"])
        if verb == "hand" and turn:
            _by_hand(random, books, tmp_path)
        else:
            verb = "ADD" if verb == "hand" else verb
            code, stdout = random.choice(runs)(verb, name, config)
            mine, free = books.of(name), books.next_free()
            if verb == "ADD" and not mine and free:
                assert (code, json.loads(stdout)["ips"][0]["address"]) == (0, f"{free}/28")
                books.leases[free] = _content(name)
                books.mark = free
            elif verb == "DEL":
                assert code == 0
                for address in mine:
                    del books.leases[address]
            else:
                assert code == (0 if verb == "CHECK" and mine else 1)
        assert files(tmp_path) == books.files(), (turn, verb, name)
        if same_mtime:
            os.utime(tmp_path / "net", ns=(0, 0))


def command(verb, container_id, config, args=""):
    """Ours as a program of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "multus_tools.builtin", "host-local"],
        cwd=Path(__file__).parents[2],
        env=environ(verb, container_id, args),
        input=json.dumps(config).encode(),
        stdout=subprocess.PIPE,
        timeout=60,
    )
    return done.returncode, done.stdout
