"""Disks that are full, take no writes, are slow, or give back other bytes than were written."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disks import fill, hanging, make_read_only, make_writable
from tests.e2e.node import Answer, Node

PAGE = 4096
SLOW_FSYNC = 0.5


@pytest.fixture
def small(node: Node) -> Iterator[Node]:
    """A node whose `cniDir` is a disk of its own, of 256 KiB; the addresses of host-local are elsewhere."""
    node.cni_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "multus-test", str(node.cni_dir)], check=True)
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    for pod in ("one", "two", "three"):
        node.pod(pod, "storage")
    yield node
    node.kill()
    subprocess.run(["umount", "-l", str(node.cni_dir)], check=True)


def add(node: Node, pod: str) -> str:
    """Attach a pod, its name being the container's too; its namespace."""
    netns = node.add_netns()
    answer = node.cni("ADD", pod, netns, pod)
    assert answer.code == 0, answer.stdout
    return netns


def assert_refused(answer: Answer, message: str) -> None:
    """An error of code 5 whose first words are the cause."""
    assert answer.code == 1, answer
    assert answer.json["code"] == 5, answer.json
    assert answer.json["msg"].startswith(message), answer.json


def assert_alive(node: Node) -> None:
    assert node.daemon is not None
    assert node.daemon.poll() is None, node.log.read_text()
    assert node.get("/healthz")[0] == 200


def test_full(small: Node) -> None:
    small.start()
    first = add(small, "one")
    links, files = small.links(), small.leftovers()
    filler = fill(small.cni_dir)

    second = small.add_netns()
    answer = small.cni("ADD", "two", second, "two")
    assert_refused(answer, "record of container two can't be written: [Errno 28] No space left on device")
    assert "free space" in answer.json["details"]
    # No plugin has run: no link, no address.
    assert small.links(second) == ["lo"]
    assert small.links() == links
    filler_name = str(filler.relative_to(small.root))
    assert [name for name in small.leftovers() if name != filler_name] == files
    assert_alive(small)

    # The others are served, and nothing more than room is needed.
    assert small.cni("CHECK", "one", first, "one").code == 0
    assert small.cni("DEL", "one", first, "one").code == 0
    assert small.links(first) == ["lo"]
    assert small.leftovers() == [filler_name]
    filler.unlink()
    assert small.cni("ADD", "two", second, "two").code == 0
    assert small.cni("DEL", "two", second, "two").code == 0
    assert small.leftovers() == []


def test_full_at_any_point_of_an_add(small: Node) -> None:
    """Page by page more room: the ADD fails at its first write, at its second, ... until it succeeds."""
    small.start()
    netns = small.add_netns()
    outcomes = []
    for pages in range(12):
        filler = fill(small.cni_dir)
        os.truncate(filler, filler.stat().st_size - pages * PAGE)
        answer = small.cni("ADD", "one", netns, "one")
        outcomes.append(answer.code)
        if answer.code:
            assert_refused(answer, "record of" if pages == 0 else "")
            assert "No space left" in answer.json["msg"]
            assert small.links(netns) == ["lo"]
        else:
            assert small.cni("DEL", "one", netns, "one").code == 0
        filler.unlink()
        assert small.leftovers() == [], f"{pages} pages of room"
    assert outcomes == sorted(outcomes, reverse=True)
    assert 2 < sum(outcomes) < len(outcomes), "the sweep shows nothing"


def test_read_only(small: Node) -> None:
    small.start()
    first, third = add(small, "one"), add(small, "three")
    make_read_only(small.cni_dir)

    second = small.add_netns()
    answer = small.cni("ADD", "two", second, "two")
    assert_refused(answer, "record of container two can't be written: [Errno 30] Read-only file system")
    assert small.links(second) == ["lo"]

    # All that a DEL can do is done, and the runtime asks again.
    answer = small.cni("DEL", "one", first, "one")
    assert_refused(answer, "record of container one can't be removed: [Errno 30] Read-only file system")
    assert small.links(first) == ["lo"]
    assert addresses(small) == ["three", "three"]
    assert small.cni("CHECK", "three", third, "three").code == 0
    assert_alive(small)

    # No restart is needed for what comes after.
    make_writable(small.cni_dir)
    assert small.cni("DEL", "one", first, "one").code == 0
    assert small.cni("ADD", "two", second, "two").code == 0
    assert small.cni("DEL", "two", second, "two").code == 0

    # A daemon that starts on such a disk serves the same.
    small.stop()
    make_read_only(small.cni_dir)
    small.start()
    assert small.cni("CHECK", "three", third, "three").code == 0
    assert_refused(small.cni("DEL", "three", third, "three"), "record of container three can't be removed")
    assert small.links(third) == ["lo"]
    small.stop()
    make_writable(small.cni_dir)
    small.start()
    assert small.cni("DEL", "three", third, "three").code == 0
    assert small.leftovers() == []


def addresses(node: Node) -> list[str]:
    """The containers that have an address of host-local, once for each."""
    return sorted(path.read_text().split()[0] for path in node.networks_dir.rglob("10.*"))


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_plugin_that_can_not_write(node: Node, what: str) -> None:
    """The addresses' disk: its error is the plugin's, the cause first, and what was done before it is undone."""
    disk = node.root / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "multus-test", str(disk)], check=True)
    try:
        ipam = {"type": "host-local", "subnet": "10.81.1.0/24", "dataDir": str(disk)}
        config = {"cniVersion": "1.0.0", "name": "storage", "type": "ptp", "ipam": ipam}
        node.network("storage", config, namespace="default")
        node.pod("one", "storage")
        node.start()
        netns = add(node, "one")
        assert node.cni("DEL", "one", netns, "one").code == 0
        before = node.links()
        filler = None
        if what == "full":
            filler = fill(disk)
        else:
            make_read_only(disk)
        answer = node.cni("ADD", "one", netns, "one")
        assert answer.code == 1
        words = "No space left on device" if what == "full" else "Read-only file system"
        assert words in answer.json["msg"] + answer.json.get("details", ""), answer.json
        assert node.links(netns) == ["lo"]
        assert node.links() == before
        assert_alive(node)
        if filler:
            filler.unlink()
        else:
            make_writable(disk)
        assert node.cni("ADD", "one", netns, "one").code == 0
        assert node.cni("DEL", "one", netns, "one").code == 0
        assert node.leftovers() == []
    finally:
        node.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(28)
@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "other"])
def test_a_damaged_record(small: Node, damage: str) -> None:
    """Upstream takes a damaged file for a container that it does not know, and answers success."""
    small.pod("zero")
    small.start()
    netns = {name: add(small, name) for name in ("zero", "one", "two")}
    second = netns["two"]
    # What the record said is in the result cache too, and in what is written for an upstream daemon.
    damage_file(small.cni_dir / "attachments" / "one.json", damage)
    (small.cni_dir / "one").unlink()
    damage_file(small.cni_dir / "attachments" / "zero.json", damage)
    for path in (small.cni_dir / "results").glob("*-zero-*"):
        damage_file(path, "cut")
    for name in ("one", "zero"):
        assert small.cni("DEL", name, netns[name], name).code == 0
        assert small.links(netns[name]) == ["lo"]
        assert name not in addresses(small)
    assert addresses(small) == ["two", "two"]

    damage_file(small.cni_dir / "attachments" / "two.json", damage)
    damage_file(small.cni_dir / "two", "cut")
    for path in (small.cni_dir / "results").iterdir():
        damage_file(path, "cut")
    answer = small.cni("DEL", "two", second, "two")
    assert_refused(answer, "record of container two is damaged")
    # Nothing is thrown away that could tell a person what there was.
    assert addresses(small) == ["two", "two"]
    assert (small.cni_dir / "attachments" / "two.json").exists()
    third = add(small, "three")
    assert small.cni("CHECK", "three", third, "three").code == 0
    assert small.cni("DEL", "three", third, "three").code == 0
    assert_alive(small)


@pytest.mark.parametrize("damage", ["cut", "bit", "other"])
def test_a_record_of_which_one_state_is_damaged(small: Node, damage: str) -> None:
    """The state at the start of an ADD is enough for its DEL, and so is the state at its end."""
    small.start()
    for name, position in (("one", 0), ("two", 1)):
        netns = add(small, name)
        path = small.cni_dir / "attachments" / f"{name}.json"
        lines = path.read_bytes().splitlines()
        assert len(lines) == 2
        half = len(lines[position]) // 2
        lines[position] = {
            "cut": lines[position][:half],
            "bit": with_a_bit_changed(lines[position]),
            "other": b"\x00" * len(lines[position]),
        }[damage]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        for result in (small.cni_dir / "results").iterdir():
            result.unlink()
        assert small.cni("DEL", name, netns, name).code == 0
        assert small.links(netns) == ["lo"]
        assert addresses(small) == []
    assert_alive(small)


def damage_file(path: Path, how: str) -> None:
    data = path.read_bytes()
    # A record has a line for each state of the container, and each of them alone would do.
    lines = data.splitlines()
    path.write_bytes(
        {
            "empty": b"",
            "cut": data[: len(lines[0]) // 2],
            "bit": b"".join(with_a_bit_changed(line) + b"\n" for line in lines),
            "other": b"\x00" * len(data),
        }[how]
    )


def with_a_bit_changed(line: bytes) -> bytes:
    middle = len(line) // 2
    return line[:middle] + bytes([line[middle] ^ 1]) + line[middle + 1 :]


# --- slowness --------------------------------------------------------------------------------------------------------


def test_slow(make_node: Callable[..., Node]) -> None:
    """Each fsync takes half a second: ADDs wait for theirs, and the daemon for none."""
    pods = 17
    slow = (sys.executable, str(Path(__file__).with_name("slow_disk.py")), str(SLOW_FSYNC))
    node = make_node(wrapper=slow)
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
    for number in range(pods):
        node.pod(f"p{number}")
    node.start()
    first = add(node, "p0")
    stop = threading.Event()
    asked: list[float] = []

    def watch() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            assert node.get("/healthz")[0] == 200
            assert node.cni("CHECK", "p0", first, "p0").code == 0
            asked.append(time.monotonic() - begun)
            time.sleep(0.05)

    namespaces = [node.add_netns() for _ in range(pods - 1)]
    with ThreadPoolExecutor(pods) as pool:
        watcher = pool.submit(watch)
        for verb in ("ADD", "DEL"):
            begun = time.monotonic()
            calls = [
                pool.submit(node.cni, verb, f"p{number}", netns, f"p{number}")
                for number, netns in enumerate(namespaces, start=1)
            ]
            answers = [call.result() for call in calls]
            whole = time.monotonic() - begun
            assert [answer.code for answer in answers] == [0] * len(answers), [answer.stdout for answer in answers]
            # Four fsyncs each, or two, one behind the other; side by side with those of the others.
            print(f"{verb}: {whole:.1f} s for {len(calls)}")
            assert whole < len(calls) * 4 * SLOW_FSYNC / 3
        stop.set()
        watcher.result()
    print(f"healthz and CHECK meanwhile: median {statistics.median(asked):.3f} s, worst {max(asked):.3f} s")
    # A stall of the machine is in one or two of them; a daemon that waits for the disk delays all.
    assert len(asked) > 2
    assert statistics.median(asked) < 2 * SLOW_FSYNC
    assert node.cni("DEL", "p0", first, "p0").code == 0
    assert node.leftovers() == []


# --- a binDir that hangs ---------------------------------------------------------------------------------------------


def test_a_bin_dir_that_hangs(node: Node) -> None:
    """An ADD and a DEL fail in time and name the directory, other pods are served, and the daemon stops."""
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
    node.network("steered", {"cniVersion": "1.0.0", "name": "steered", "type": "steered"}, namespace="default")
    node.pod("one")
    node.pod("two", "steered")
    node.pod("three", "steered")
    plugin = node.bin_dir / "steered"
    shutil.copy(Path(__file__).parents[1] / "fakes" / "plugin.py", plugin)
    plugin.chmod(0o755)
    node.start()
    second = add(node, "two")
    assert node.daemon is not None
    with hanging(Path(node.below_chroot(node.bin_dir)), node.daemon.pid), ThreadPoolExecutor(4) as pool:
        deletes = [pool.submit(node.cni, "DEL", "two", second, "two") for _ in range(3)]
        third = node.add_netns()
        adding = pool.submit(node.cni, "ADD", "three", third, "three")
        first = add(node, "one")
        assert node.cni("DEL", "one", first, "one").code == 0
        assert_refused(adding.result(), f"directory {node.bin_dir} does not answer")
        assert "steered" in adding.result().json["msg"]
        assert_refused(deletes[0].result(), f"directory {node.bin_dir} does not answer")
        assert_alive(node)
        begun = time.monotonic()
        assert node.stop() == 0
        print(f"SIGTERM to exit: {time.monotonic() - begun:.1f} s")
        for call in deletes:
            call.result()
    with hanging(node.bin_dir):
        node.start()
        assert node.stop() == 0
    node.start()
    assert node.cni("DEL", "two", second, "two").code == 0
