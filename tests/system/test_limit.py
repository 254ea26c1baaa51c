"""Plugin processes: how many, who first, how long the others wait; with processes that are slow."""

import asyncio
import contextlib
import functools
import json
import time
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.metrics import Metrics
from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.plugins.limit import MIB, Allowance, ProcessLimit, automatic
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.slots import one_turn
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError
from tests.counted import value_of

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "tests" / "fakes" / "plugin.py"
GIB = 1024 * MIB


@pytest.mark.weak_spot(35)
@pytest.mark.parametrize(
    ("memory", "host", "cores", "processes", "reason"),
    [
        (50 * MIB, 8 * GIB, 4, 1, "the memory limit of 50 MiB; with 256 MiB or more a DEL has a place of its own"),
        (128 * MIB, 8 * GIB, 4, 1, "the memory limit of 128 MiB; with 256 MiB or more a DEL has a place of its own"),
        (255 * MIB, 8 * GIB, 1, 1, "the memory limit of 255 MiB; with 256 MiB or more a DEL has a place of its own"),
        (256 * MIB, 8 * GIB, 4, 2, "the memory limit of 256 MiB"),
        (512 * MIB, 8 * GIB, 4, 6, "the memory limit of 512 MiB"),
        (1 * GIB, 8 * GIB, 4, 14, "the memory limit of 1024 MiB"),
        (2 * GIB, 8 * GIB, 2, 8, "2 cores"),
        (64 * GIB, 512 * GIB, 128, 64, "128 cores"),
        (None, 1 * GIB, 8, 4, "1024 MiB of memory and no limit"),
        (16 * GIB, 1 * GIB, 8, 4, "1024 MiB of memory and no limit"),
        (None, 64 * GIB, 8, 32, "8 cores"),
        (512 * MIB, None, 4, 6, "the memory limit of 512 MiB"),
        (None, None, 4, 16, "4 cores"),
        (None, None, 0, 2, "0 cores"),
    ],
)
def test_automatic(memory, host, cores, processes, reason):
    assert automatic(memory, host, cores) == Allowance(processes, reason)


class Bench:
    """A runner of slow plugins, behind a limit."""

    def __init__(self, tmp_path, processes, wait_seconds):
        (tmp_path / "bin").mkdir()
        binary = tmp_path / "bin" / "slow"
        binary.write_bytes(PLUGIN.read_bytes())
        binary.chmod(0o755)
        self.metrics = Metrics()
        self.record = tmp_path / "calls"
        self.limit = ProcessLimit(Allowance(processes, "a test"), metrics=self.metrics, wait_seconds=wait_seconds)
        self.runner = ProcessRunner([str(tmp_path / "bin")], limit=self.limit, portal=portal.LoopPortal())
        self.began = []
        self.most = 0

    async def call(self, verb, container_id, seconds=0.05, plugin="slow"):
        steer = {"record": str(self.record), "hang": seconds}
        invocation = Invocation(verb, container_id, "/n", "eth0", "", "/bin", {"steer": {verb: steer}})
        return await portal.run(Deadline(), functools.partial(self.runner.run, plugin, invocation))

    def task(self, verb, container_id, seconds=0.05):
        return asyncio.create_task(self.call(verb, container_id, seconds))

    def order(self):
        """The containers in the order in which their plugins ran."""
        if not self.record.exists():
            return []
        calls = [json.loads(line)["env"] for line in self.record.read_text().splitlines()]
        return [call.get("CNI_CONTAINERID", "") for call in calls]

    def value(self, name, **labels):
        return value_of(self.metrics, name, **labels)

    async def until(self, holds):
        async with asyncio.timeout(60):
            while not holds():
                self.most = max(self.most, int(self.value("multus_plugin_processes_running", verb="ADD")))
                await asyncio.sleep(0.01)


@pytest.fixture
def bench(tmp_path):
    def make(processes, **waits):
        return Bench(tmp_path, processes, {**deadlines.SLOT_WAIT_SECONDS, **waits})

    return make


@pytest.mark.weak_spot(35)
async def test_a_burst_is_bounded_and_a_del_goes_first(bench):
    side = bench(3)
    adds = [side.task("ADD", f"c{number}", 6) for number in range(2)]
    await side.until(lambda: len(side.order()) == 2)
    adds += [side.task("ADD", f"c{number}", 0.2) for number in range(2, 24)]
    await side.until(lambda: side.limit.slots.waiting == 22)
    assert side.value("multus_plugin_processes_limit") == 3
    assert side.value("multus_plugin_processes_waiting", verb="ADD") == 22
    removal = side.task("DEL", "gone")
    await side.until(removal.done)
    # Two ADDs had begun, and the third place was the DEL's: it waited for nobody.
    assert side.order()[2] == "gone"
    await side.until(lambda: all(task.done() for task in adds))
    await asyncio.gather(*adds, removal)
    assert side.most == 2
    assert side.value("multus_plugin_process_wait_seconds_count", verb="ADD") == 24
    for name in ("running", "waiting"):
        assert side.value(f"multus_plugin_processes_{name}", verb="ADD") == 0


async def test_plugins_that_hang_leave_a_place_for_del(bench):
    side = bench(2)
    hanging = side.task("ADD", "hangs", 60)
    await side.until(side.order)
    for number in range(3):
        await asyncio.wait_for(side.call("DEL", f"gone{number}"), 20)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


async def test_a_container_with_twenty_networks_does_not_starve_others(bench):
    side = bench(2)
    calls = [side.task("ADD", "big") for _ in range(20)]
    await side.until(side.order)
    calls += [side.task("ADD", name) for name in ("p", "q", "r")]
    await asyncio.gather(*calls)
    order = side.order()
    assert set(order[2:7]) >= {"p", "q", "r"}, order


@contextlib.asynccontextmanager
async def held(limited, container_id):
    call = Invocation("ADD", container_id, "/n", "eth0", "", "/bin", {})
    slot = await limited.take("slow", call)
    yield
    limited.give_back(slot, call)


async def test_pods_of_several_networks_side_by_side_are_finished_in_the_order_of_their_beginning():
    """Else, with much to do, all of them would be at their middle when the time of all is over."""
    limited, order, busy = ProcessLimit(Allowance(1, "a test")), [], asyncio.Event()

    async def network(pod):
        async with held(limited, pod):
            order.append(pod)
            await busy.wait()
            await asyncio.sleep(0.01)

    async def pod(name):
        with one_turn():
            await asyncio.gather(*(network(name) for _ in range(3)))

    tasks = [asyncio.create_task(network("x")), *(asyncio.create_task(pod(name)) for name in "abc")]
    await asyncio.sleep(0.05)
    assert order == ["x"]
    busy.set()
    await asyncio.gather(*tasks)
    assert order == list("xaaabbbccc")


async def test_the_wait_of_a_network_begins_when_those_before_it_have_their_places():
    limited = ProcessLimit(Allowance(1, "a test"), wait_seconds={"ADD": 0.8, "CHECK": 0.8})

    async def network():
        async with held(limited, "c1"):
            await asyncio.sleep(0.3)

    await asyncio.gather(*(network() for _ in range(5)))


async def test_status_and_gc_do_not_wait_behind_a_burst(bench):
    side = bench(2, STATUS=60)
    # Long enough for all the others to stand in line on a machine under load.
    calls = [side.task("CHECK", "check", 6)]
    await side.until(side.order)
    calls += [side.task("CHECK", "check2")]
    calls += [side.task("ADD", f"c{number}") for number in range(3)]
    calls += [side.task("STATUS", ""), side.task("GC", "")]
    await asyncio.gather(*calls)
    order = side.order()
    # The ADDs look for their plugin in threads first, so any of them may be the first in line.
    assert order[:3] + sorted(order[3:6]) + order[6:] == ["check", "", "", "c0", "c1", "c2", "check2"]


async def test_waiting_in_vain(bench):
    side = bench(1, ADD=0.3)
    first = side.task("CHECK", "first", 3)
    await side.until(side.order)
    began = time.monotonic()
    with pytest.raises(TryAgainLaterError) as caught:
        await side.call("ADD", "second")
    assert 0.3 <= time.monotonic() - began < 30
    assert caught.value.msg == (
        "node is busy: ADD of plugin 'slow' has waited 0.3 s to be run, with 1 calls waiting and at most 1 plugin "
        "processes at once"
    )
    assert "maxDelegateProcesses" in caught.value.details
    assert "a test" in caught.value.details
    assert side.value("multus_plugin_process_waits_given_up_total", verb="ADD") == 1
    assert side.value("multus_plugin_processes_waiting", verb="ADD") == 0
    await first
    assert side.order() == ["first"]
    await side.call("ADD", "third")


async def test_a_del_of_the_container_takes_its_waiting_add_along(bench):
    side = bench(2)
    calls = [side.task("ADD", "first", 6)]
    await side.until(side.order)
    calls += [side.task("ADD", f"c{number}", 0.3) for number in range(5)]
    calls += [side.task("ADD", "left")]
    await side.until(lambda: side.limit.slots.waiting == 6)
    with side.limit.slots.hurried("left"):
        await calls[-1]
    assert side.order() == ["first", "left"]
    await asyncio.gather(*calls)


async def test_a_plugin_that_is_not_there_is_not_waited_for(bench):
    side = bench(1)
    first = side.task("ADD", "first", 60)
    await side.until(side.order)
    with pytest.raises(PluginNotFoundError):
        await asyncio.wait_for(side.call("ADD", "second", plugin="absent"), 30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_cancelled_wait_leaves_nothing(bench):
    side = bench(1)
    first = side.task("ADD", "first", 6)
    await side.until(side.order)
    second = side.task("ADD", "second")
    await side.until(lambda: side.value("multus_plugin_processes_waiting", verb="ADD") == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert side.value("multus_plugin_processes_waiting", verb="ADD") == 0
    await first
    await side.call("ADD", "third")
    assert side.order() == ["first", "third"]


async def test_a_del_has_less_time_than_other_verbs(bench, monkeypatch):
    monkeypatch.setattr(deadlines, "DELEGATE_DEL_SECONDS", 0.3)
    side = bench(2)
    with pytest.raises(CniError, match=r"did not end within 0\.3 s"):
        await side.call("DEL", "c1", 60)
    with contextlib.suppress(FileNotFoundError):
        side.record.unlink()
    await side.call("ADD", "c1", 0.5)
