"""Check which networks are attached one after another, and that the others run side by side."""

from __future__ import annotations

import contextvars
import itertools
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multus_daemon.pod.schedule import SERIAL, in_order, predecessors, side_by_side
from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import IfName
from tests.aside import Aside
from tests.waiting import until


def network(ifname: str, *plugins: dict[str, Any], top: dict[str, Any] | None = None, **fields: Any) -> Attachment:
    """A network of its own name, a list of `plugins`; `top`: keys beside them; `fields`: of the attachment."""
    name = fields.pop("name", f"network-of-{ifname}")
    config = {"cniVersion": "1.0.0", "name": name, "plugins": list(plugins) or [{"type": "ptp"}], **(top or {})}
    return Attachment(
        name=f"web/{name}", config=conf.parse(json.dumps(config).encode()), ifname=IfName(ifname), **fields
    )


def single(ifname: str, **fields: Any) -> Attachment:
    config = {"cniVersion": "1.0.0", "name": f"network-of-{ifname}", "type": "ptp", **fields}
    return Attachment(name=ifname, config=conf.parse(json.dumps(config).encode()), ifname=IfName(ifname))


def apart(one: Attachment, other: Attachment) -> bool:
    """Return whether the two run one after the other; the answer is the same in both orders."""
    found = {bool(predecessors(pair)[1]) for pair in ([one, other], [other, one])}
    assert len(found) == 1
    return found.pop()


def ipam(**fields: Any) -> dict[str, Any]:
    return {"type": "ptp", "ipam": {"type": "host-local", **fields}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (network("net1"), network("net2")),
        (network("net1", ipam(subnet="10.1.0.0/24")), network("net2", ipam(subnet="10.2.0.0/24"))),
        (network("net1", ipam(dataDir="/var/lib/a")), network("net2", ipam(dataDir="/var/lib/a"))),
        (
            network("net1", {"type": "macvlan", "master": "ens1"}),
            network("net2", {"type": "macvlan", "master": "ens2"}),
        ),
        (network("net1", {"type": "macvlan", "master": "ens1"}), network("net2", {"type": "bridge", "bridge": "br1"})),
        (network("net1", {"type": "bridge"}), network("net2", {"type": "macvlan"})),
        (network("net1", {"type": "sriov", "deviceID": "1"}), network("net2", {"type": "sriov", "deviceID": "2"})),
        (network("net1", resource_name="vendor/nic"), network("net2", resource_name="vendor/nic")),
        (network("net1"), network("net2", {"type": "x", "master": "net10"})),
        (network("net1"), network("net2", {"type": "x", "path": "/sys/my-net1"})),
        (single("net1", name="net2"), single("net2", name="net1")),
        (single("net1"), single("net2")),
        (single("net1"), single("net2", **{SERIAL: False})),
        (network("net1", ipam(gateway="10.1.0.1")), network("net2", ipam(gateway="10.1.0.1"))),
    ],
)
def test_side_by_side(one: Attachment, other: Attachment) -> None:
    assert not apart(one, other)


SLAVES = {"type": "bond", "linksInContainer": True, "links": [{"name": "net1"}, {"name": "net7"}]}


@pytest.mark.npwg("7.3")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        # On top of the other.
        (network("net1"), network("net2", {"type": "vlan", "master": "net1", "linkInContainer": True})),
        (network("net1"), network("net2", {"type": "macvlan", "Master": "net1.100"})),
        (network("net1"), network("net2", SLAVES)),
        (network("net1"), network("net2", {"type": "first"}, SLAVES)),
        (network("net1"), network("net2", {"type": "bond", "links": "net7,net1"})),
        (network("net1"), network("net2", {"type": "tuning", "sysctl": {"net.ipv4.conf.net1.rp_filter": "0"}})),
        (network("net1"), network("net2", {"type": "tuning", "sysctl": {"net/ipv4/conf/net1/rp_filter": "0"}})),
        (network("net1.5"), network("net2", {"type": "x", "args": {"cni": {"on": ["net1.5"]}}})),
        (network("a+b", name="odd"), network("net2", {"type": "x", "over": "a+b"})),
        (single("net1"), single("net2", master="net1")),
        # The same thing used.
        (network("net1", name="same"), network("net2", name="same")),
        (network("net1", {"type": "macvlan", "master": "ens1"}), network("net2", {"type": "ipvlan", "master": "ens1"})),
        (network("net1", {"type": "macvlan", "MASTER": "ens1"}), network("net2", {"type": "vlan", "master": "ens1"})),
        (network("net1", {"type": "macvlan"}), network("net2", {"type": "ipvlan", "master": ""})),
        (network("net1", {"type": "bridge"}), network("net2", {"type": "bridge", "bridge": "cni0"})),
        (network("net1", {"type": "ovs", "bridge": "br1"}), network("net2", {"type": "ovs", "bridge": "br1"})),
        (network("net1", {"type": "x", "deviceID": "03:02.1"}), network("net2", {"type": "y", "deviceID": "03:02.1"})),
        (network("net1", {"type": "vrf", "vrfname": "red"}), network("net2", {"type": "vrf", "vrfname": "red"})),
        (network("net1", {"type": "ptp"}, {"type": "sbr"}), network("net2", {"type": "ptp"}, {"type": "sbr"})),
        # Routes and addresses of the same prefix: the order decides which one counts.
        (
            network("net1", ipam(routes=[{"dst": "10.9.0.0/16"}])),
            network("net2", {"type": "ptp"}, {"type": "route-override", "addroutes": [{"dst": "10.9.0.0/16"}]}),
        ),
        (network("net1", ipam(routes=[{"dst": "::/0"}])), network("net2", {"type": "x", "isDefaultGateway": True})),
        (network("net1", ipam(subnet="10.1.0.0/24")), network("net2", ipam(addresses=[{"address": "10.1.0.9/24"}]))),
        (network("net1", ipam(subnet="10.1.0.0/24")), network("net2", capability_args={"ips": ["10.1.0.9/24"]})),
        (network("net1", ipam(subnet="2001:DB8::/64")), network("net2", ipam(range="2001:db8:0::7/64"))),
        # Nothing may run beside these.
        (network("net1", cluster_network=True), network("net2")),
        (network("eth0", auxiliary=True), network("net2")),
        (network("net1"), network("net2", top={SERIAL: True})),
        (network("net1"), network("net2", top={"Multus.io/Serial": "yes"})),
        (network("net1"), network("net2", {"type": "a"}, {"type": "b", SERIAL: True})),
        (single("net1"), single("net2", **{SERIAL: True})),
    ],
)  # fmt: skip
def test_one_after_the_other(one: Attachment, other: Attachment) -> None:
    assert apart(one, other)


def test_the_graph_of_a_whole_pod() -> None:
    pod = [
        network("eth0", cluster_network=True),
        network("net1", {"type": "sriov", "deviceID": "1"}),
        network("net2", {"type": "sriov", "deviceID": "2"}),
        network("net3", {"type": "bond", "links": [{"name": "net1"}, {"name": "net2"}]}),
        network("net4"),
        network("eth0", name="aux", auxiliary=True),
    ]
    before = predecessors(pod)
    assert tuple(map(set, before)) == (set(), {0}, {0}, {0, 1, 2}, {0}, {0, 1, 2, 3, 4})
    # In reverse: the auxiliary chain is number 0, the cluster network the last.
    assert tuple(map(set, predecessors(pod[::-1]))) == (set(), {0}, {0}, {0, 2}, {0, 2}, {0, 1, 2, 3, 4})


def test_long_texts_of_networks_are_not_kept() -> None:
    tracemalloc.start()
    try:
        predecessors([network("net1"), network("net2")])
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            predecessors([network("net1", ipam(dataDir=f"/{number}/{'a' * 100_000}")), network("net2")])
        assert tracemalloc.get_traced_memory()[0] - before < 1_000_000
    finally:
        tracemalloc.stop()


# --- the relation, and its running -----------------------------------------------------------------------------------

NAMES = [f"net{number}" for number in range(6)]
OBJECTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["ptp", "macvlan", "sbr"])},
    optional={
        "master": st.sampled_from([*NAMES, "ens1", "ens2"]),
        "links": st.lists(st.sampled_from(NAMES).map(lambda name: {"name": name}), max_size=2),
        SERIAL: st.booleans(),
    },
)


@st.composite
def pods(draw: st.DrawFn) -> list[Attachment]:
    return [
        network(name, *draw(st.lists(OBJECTS, min_size=1, max_size=2)), cluster_network=number == 0)
        for number, name in enumerate(NAMES[: draw(st.integers(0, len(NAMES)))])
    ]


@given(pods())
def test_only_what_is_earlier_comes_before_and_the_reverse_list_mirrors_it(pod: list[Attachment]) -> None:
    before = predecessors(pod)
    assert all(earlier < later for later, found in enumerate(before) for earlier in found)
    last = len(pod) - 1
    mirrored = {(last - later, last - earlier) for later, found in enumerate(before) for earlier in found}
    assert {(one, other) for other, found in enumerate(predecessors(pod[::-1])) for one in found} == mirrored


RELATIONS = st.integers(0, 8).flatmap(
    lambda size: st.tuples(
        *(st.frozensets(st.integers(0, max(0, number - 1)), max_size=number) for number in range(size))
    )
)


class Conductor(Deadline):
    """Has one thread go on each time that `in_order` waits: which one, `choices` say, and nothing else decides.

    `held`: where the threads wait, by number. From a failure on that ends everything all go on.
    """

    def __init__(self, choices: Sequence[int], last: Collection[int]) -> None:
        """`last`: the numbers after whose end all go on."""
        super().__init__()
        self.held: dict[int, threading.Event] = {}
        self._choices = itertools.cycle(choices)
        self._last = last

    def wait(self, *events: futures.Future[Any]) -> None:
        if not (numbers := sorted(self.held)):
            # They have failed at once.
            super().wait(*events)
            return
        number = numbers[next(self._choices) % len(numbers)]
        self.held.pop(number).set()
        super().wait(*events)
        if number in self._last:
            self.let_all_go()

    def let_all_go(self) -> None:
        while self.held:
            self.held.popitem()[1].set()


@example((frozenset(),) * 6, 2, frozenset(), frozenset(), True, [0])
@example((frozenset(),) * 6, 3, frozenset({1, 2, 4}), frozenset({3}), False, [0, 1])
@given(
    before=RELATIONS,
    at_once=st.integers(1, 4),
    here=st.frozensets(st.integers(0, 7)),
    failing=st.frozensets(st.integers(0, 7)),
    goes_on=st.booleans(),
    choices=st.lists(st.integers(0, 3), min_size=1),
)
def test_whatever_runs_keeps_the_order_and_the_bound(
    before: tuple[frozenset[int], ...],
    at_once: int,
    here: frozenset[int],
    failing: frozenset[int],
    goes_on: bool,
    choices: list[int],
) -> None:
    running: set[int] = set()
    over: list[int] = []
    begun: list[int] = []
    caller = threading.current_thread()
    conductor = Conductor(choices, () if goes_on else failing)

    def work(number: int) -> None:
        assert before[number] <= set(over)
        assert goes_on or not failing & set(over), "begun after a failure"
        is_here = threading.current_thread() is caller
        assert is_here or number not in here
        running.add(number)
        assert len(running) <= at_once
        if is_here:
            begun.append(number)
        else:
            gate = conductor.held[number] = threading.Event()
            begun.append(number)
            assert gate.wait(30)
        running.remove(number)
        over.append(number)
        if number in failing:
            if is_here and not goes_on:
                conductor.let_all_go()
            raise ValueError(str(number))

    real_start = threads.start

    def start(body: Callable[[], None], *, name: str) -> futures.Future[None]:
        before = len(begun)
        future = real_start(body, name=name)
        # Else it could begin long after it was started, when others are over.
        until(lambda: len(begun) > before or future.done())
        return future

    with pytest.MonkeyPatch.context() as patch, deadline.given(conductor):
        patch.setattr(threads, "start", start)
        failures = in_order(work, before, at_once=at_once, here=here, patience=None if goes_on else 60)
    assert not running
    assert sorted(over) == sorted(begun)
    assert list(failures) == sorted(failing & set(over))
    assert all(str(error) == str(number) for number, error in failures.items())
    if goes_on or not failing & set(range(len(before))):
        assert len(over) == len(before)
    if at_once == 1:
        assert begun == sorted(begun)


def blocked(numbers: set[int], gate: threading.Event, ended: list[int]) -> Callable[[int], None]:
    """Work of which `numbers` wait for `gate`, and number 9 fails; `ended`: which have come to an end of any kind."""

    def work(number: int) -> None:
        try:
            if number == 9:
                raise ValueError("9")
            while number in numbers and not gate.is_set():
                deadline.pause(0.005)
        finally:
            # However often it is told to stop, it takes its time.
            time.sleep(0.01)
            ended.append(number)

    return work


@pytest.mark.parametrize("here", [(), (9,)])
def test_after_a_failure_the_others_come_to_their_end(here: tuple[int, ...]) -> None:
    gate, ended = threading.Event(), list[int]()
    running = Aside(in_order, blocked({0, 1}, gate, ended), [()] * 10, at_once=10, here=here, patience=60)
    until(lambda: len(ended) == 8)
    time.sleep(0.02)
    assert not running.done
    gate.set()
    assert list(running.result()) == [9]
    assert sorted(ended) == list(range(10))


@pytest.mark.parametrize("patience", [0.0, 0.05])
def test_after_the_patience_they_are_interrupted_and_waited_for(patience: float) -> None:
    gate, ended = threading.Event(), list[int]()
    running = Aside(in_order, blocked({0, 1}, gate, ended), [()] * 10, at_once=10, patience=patience)
    assert list(running.result()) == [9]
    assert sorted(ended) == list(range(10))


def test_one_that_raises_ends_those_beside_it() -> None:
    ended: list[str] = []

    def work(name: str) -> None:
        if name == "second":
            raise ValueError(name)
        try:
            deadline.pause(60)
        finally:
            ended.append(name)

    running = Aside(side_by_side, ["first", "second"], work)
    with pytest.raises(ValueError, match="^second$"):
        running.result()
    assert ended == ["first"]


@pytest.mark.parametrize("here", [(), (1,)])
def test_stopping_ends_all_first_however_often(here: tuple[int, ...]) -> None:
    """Also what the calling thread is busy with: then the others are told when that has ended."""
    gate, ended = threading.Event(), list[int]()
    running = Aside(in_order, blocked({0, 1, 2}, gate, ended), [()] * 6, at_once=3, here=here, patience=60)
    time.sleep(0.02)
    running.stop()
    running.stop()
    with pytest.raises(Interrupted):
        running.result()
    assert sorted(ended) == [0, 1, 2]


def test_what_fails_while_it_is_interrupted_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def work(number: int) -> None:
        if number:
            raise ValueError("first")
        try:
            deadline.pause(60)
        except Interrupted:
            raise OSError("ended") from None

    failures = in_order(work, [(), ()], at_once=2, patience=0.01)
    assert [str(error) for error in failures.values()] == ["first"]
    assert caplog.records == []


@pytest.mark.parametrize("here", [(), (0,), (0, 1)])
def test_one_that_interrupts_itself_is_no_success(here: tuple[int, ...]) -> None:
    def work(number: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        in_order(work, [(), ()], at_once=2, here=here)


def test_each_thread_has_the_callers_time_and_context() -> None:
    found: list[tuple[float, str]] = []
    context = contextvars.ContextVar("context", default="")
    context.set("the caller's")
    with deadline.within(60) as limit:
        in_order(lambda _: found.append((deadline.current().end, context.get())), [(), (), ()], at_once=3)
        assert [end for end, _ in found] == pytest.approx([limit.end] * 3, abs=1)
    assert {text for _, text in found} == {"the caller's"}


def test_without_threads_to_be_had_they_run_in_the_calling_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, threading.Thread]] = []

    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def work(number: int) -> None:
        ran.append((number, threading.current_thread()))
        if number == 1:
            raise ValueError("1")

    monkeypatch.setattr(threads, "start", start)
    assert list(in_order(work, [()] * 4, at_once=3)) == [1]
    assert ran == [(number, threading.current_thread()) for number in range(4)]
