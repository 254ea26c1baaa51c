"""Networks of one pod attach side by side: reported, recorded and undone as if they were attached one by one."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Progress
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result
from tests.aside import Aside
from tests.fakes.runner import FakeDelegateRunner
from tests.unit.pod.conftest import Engine, definition
from tests.waiting import until

NETWORKS = [f"n{number}" for number in range(1, 7)]
NAMES = {f"web/{name}" for name in NETWORKS}


class Runner(FakeDelegateRunner):
    """Notes beginnings and ends.

    `steps`: (verb, name) to how many milliseconds the call takes; `held`: which wait for ever; `after`: (verb, name) to
    what of that verb must have ended before; `together`: how many calls of NETWORKS begin before one ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, str]] = []
        self.steps: dict[tuple[str, str], int] = {}
        self.held: set[tuple[str, str]] = set()
        self.after: dict[tuple[str, str], str] = {}
        self.together = 1

    def _call(self, verb: str, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
        call = verb, attachment.name
        self.log.append(("begin", *call))
        try:
            while call in self.held:
                deadline.pause(0.005)
            until(lambda: attachment.name not in NAMES or self.begun(verb) >= self.together)
            until(lambda: call not in self.after or ("end", verb, self.after[call]) in self.log)
            deadline.pause(0.001 * self.steps.get(call, 0))
            super()._call(verb, sandbox, attachment, netns)
        finally:
            self.log.append(("end", *call))

    def begun(self, verb: str) -> int:
        """Return how many calls of the verb for NETWORKS have begun."""
        return sum(edge == "begin" and called == verb and name in NAMES for edge, called, name in list(self.log))

    def most(self, verb: str) -> int:
        """Return the largest number of calls of the verb at the same time."""
        steps = [1 if edge == "begin" else -1 for edge, called, _ in self.log if called == verb]
        return max(itertools.accumulate(steps))

    def place(self, edge: str, verb: str, name: str) -> int:
        """Return the index of the entry in the log."""
        return self.log.index((edge, verb, name))

    def unfinished(self) -> int:
        return sum(1 if edge == "begin" else -1 for edge, _, _ in self.log)


def make(at_once: int = 4, networks: list[str] = NETWORKS, **configs: dict[str, Any]) -> tuple[Engine, Runner]:
    """An engine whose pod asks for `networks`; `configs`: keys of their configurations."""
    engine, runner = Engine(), Runner()
    engine.attach_concurrency = at_once
    engine.runner = runner
    engine.verbs = engine.make_verbs()
    for number, name in enumerate(["cluster", *networks]):
        namespace = "web" if number else "kube-system"
        fields = {"cniVersion": "1.0.0", "name": name, "type": "fake", **configs.get(name, {})}
        engine.cluster.put_network(definition(namespace, name, json.dumps(fields)))
        engine.interface(f"net{number}" if number else "eth0", f"{namespace}/{name}", f"10.{number}.0.2/24")
    engine.declare(",".join(networks))
    return engine, runner


@pytest.mark.parametrize("at_once", [1, 2, 4, 64])
def test_as_many_as_are_allowed(at_once: int) -> None:
    engine, runner = make(at_once)
    runner.pause = 0.01
    runner.together = min(at_once, len(NETWORKS))
    engine.verbs.add(engine.request())
    assert runner.most("ADD") == runner.together
    engine.verbs.delete(engine.request("DEL"))
    assert runner.most("DEL") == runner.together
    assert runner.attached == set()
    assert engine.store.records == {}


def test_what_is_built_in_runs_in_the_thread_of_the_request_beside_processes() -> None:
    engine, runner = make()
    runner.built_in = {"web/n1", "web/n3"}
    runner.after = {("ADD", "web/n1"): "web/n2"}
    ran_in: dict[str, threading.Thread] = {}
    real = runner.add

    def add(sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> Result:
        ran_in[attachment.name] = threading.current_thread()
        return real(sandbox, attachment, netns)

    runner.add = add  # type: ignore[method-assign]  # of this object only
    engine.verbs.add(engine.request())
    here = {name for name, thread in ran_in.items() if thread is threading.current_thread()}
    assert here >= {"kube-system/cluster", "web/n1", "web/n3"}
    assert "web/n2" not in here


@pytest.mark.npwg("7.3")
def test_a_bond_comes_after_its_links_and_goes_before_them() -> None:
    bond = {"type": "bond", "links": [{"name": "net1"}, {"name": "net3"}]}
    engine, runner = make(n4=bond)
    runner.steps = {("ADD", "web/n3"): 20, ("DEL", "web/n4"): 20}
    # n5 need not wait for n4: n4 can't begin before n1 has ended.
    runner.after = {("ADD", "web/n1"): "web/n5"}
    engine.verbs.add(engine.request())
    assert max(runner.place("end", "ADD", f"web/{name}") for name in ("n1", "n3")) < runner.place(
        "begin", "ADD", "web/n4"
    )
    assert runner.place("end", "ADD", "web/n5") < runner.place("begin", "ADD", "web/n4"), "n5 need not wait"
    engine.verbs.delete(engine.request("DEL"))
    assert runner.place("end", "DEL", "web/n4") < min(
        runner.place("begin", "DEL", f"web/{name}") for name in ("n1", "n3")
    )


def test_a_network_that_wants_it_runs_beside_no_other() -> None:
    engine, runner = make(n3={"multus.io/serial": True})
    runner.pause = 0.005
    engine.verbs.add(engine.request())
    place = runner.place("begin", "ADD", "web/n3")
    assert runner.log[place + 1] == ("end", "ADD", "web/n3")
    assert {name for edge, _, name in runner.log[:place] if edge == "end"} == {
        "kube-system/cluster",
        "web/n1",
        "web/n2",
    }


@pytest.mark.npwg("7.2a")
def test_the_first_in_the_list_is_the_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = make()
    for name in ("n1", "n2", "n3"):
        runner.after["ADD", f"web/{name}"] = "web/n4"
        # Until it is known that n4 has failed, whoever ends makes room for n5.
        runner.steps["ADD", f"web/{name}"] = 100
    runner.fail = {("ADD", "web/n2"): CniError("the cause", code=101), ("ADD", "web/n4"): CniError("quicker")}
    with caplog.at_level(logging.WARNING), pytest.raises(CniError, match="^the cause .pod web/p1") as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == 101
    # The request's own line is the one at level error.
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "another network of pod web/p1 has failed too: quicker (pod web/p1)")
    ]
    # Four had begun, the others never did.
    assert [name for verb, name in runner.order if verb == "DEL"] == [
        *(f"web/{name}" for name in ("n4", "n3", "n2", "n1")),
        "kube-system/cluster",
    ]
    assert [reason for reason, _ in engine.warnings] == ["FailedAddingInterface"]
    assert (runner.attached, engine.store.records) == (set(), {})


def test_one_that_hangs_beside_a_failure_is_ended_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SETTLE_SECONDS", 0.05)
    engine, runner = make()
    runner.held = {("ADD", "web/n1")}
    runner.fail["ADD", "web/n3"] = CniError("the cause")
    with pytest.raises(CniError, match="^the cause"):
        engine.verbs.add(engine.request())
    assert ("DEL", "web/n1") in runner.order
    assert (runner.attached, engine.store.records, runner.unfinished()) == (set(), {}, 0)


@pytest.mark.parametrize("times", [1, 2])
def test_stopping_ends_all_and_undoes_all(times: int) -> None:
    engine, runner = make()
    runner.held = {("ADD", f"web/{name}") for name in NETWORKS}
    adding = Aside(engine.verbs.add, engine.request())
    until(lambda: len(runner.log) >= 6)
    for _ in range(times):
        adding.stop()
    with pytest.raises(Interrupted):
        adding.result()
    assert (runner.attached, engine.store.records, runner.unfinished()) == (set(), {}, 0)
    assert {name for verb, name in runner.order if verb == "ADD"} == {"kube-system/cluster"}
    first_undone = min(place for place, entry in enumerate(runner.log) if entry[1] == "DEL")
    assert max(place for place, entry in enumerate(runner.log) if entry[1] == "ADD") < first_undone


def test_an_undoing_is_not_cut_short_by_a_stop() -> None:
    """It has its own time, however the ADD ended."""
    engine, runner = make()
    runner.fail["ADD", "web/n1"] = CniError("the cause")
    runner.held = {("DEL", "web/n2")}
    adding = Aside(engine.verbs.add, engine.request())
    until(lambda: ("begin", "DEL", "web/n2") in runner.log)
    adding.stop()
    time.sleep(0.05)
    assert not adding.done
    runner.held.clear()
    with pytest.raises(CniError, match="^the cause"):
        adding.result()
    assert (runner.attached, engine.store.records) == (set(), {})


@pytest.mark.parametrize("stopped", [True, False])
def test_an_undoing_that_hangs_leaves_the_record_and_the_others_are_undone(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """Also in a daemon that must stop; its successor has the record to go by."""
    monkeypatch.setattr(deadlines, "UNDO_SECONDS", 0.5)
    engine, runner = make()
    runner.fail["ADD", "web/n1"] = CniError("the cause")
    runner.held = {("DEL", "web/n2")}
    adding = Aside(engine.verbs.add, engine.request())
    until(lambda: ("begin", "DEL", "web/n2") in runner.log)
    if stopped:
        adding.stop()
    with pytest.raises(CniError, match="^the cause"):
        adding.result()
    assert runner.attached == {("web/n2", "net2")}
    assert "web/n2" in [item.name for item in engine.store.records["c1"].attachments]
    assert not engine.store.records["c1"].complete


def test_a_del_that_is_stopped_remembers_what_is_done() -> None:
    engine, runner = make()
    engine.verbs.add(engine.request())
    runner.held = {("DEL", "web/n2"), ("DEL", "web/n5")}
    deleting = Aside(engine.verbs.delete, engine.request("DEL"))
    until(lambda: len([entry for entry in runner.log if entry[:2] == ("end", "DEL")]) >= 4)
    deleting.stop()
    with pytest.raises(Interrupted):
        deleting.result()
    assert runner.unfinished() == 0
    kept = ["kube-system/cluster", "web/n2", "web/n5"]
    assert [item.name for item in engine.store.records["c1"].attachments] == kept
    assert engine.store.records["c1"].deletes_failed == 1


# --- the same as one by one ------------------------------------------------------------------------------------------

STEPS = st.dictionaries(
    st.tuples(st.sampled_from(["ADD", "DEL"]), st.sampled_from([f"web/{name}" for name in NETWORKS])),
    st.integers(0, 6),
)
CONFIGS = st.dictionaries(
    st.sampled_from(NETWORKS),
    st.fixed_dictionaries(
        {},
        optional={
            "master": st.sampled_from(["net1", "net2", "net4", "ens1"]),
            "multus.io/serial": st.booleans(),
        },
    ),
)
FAILING = st.sampled_from(["kube-system/cluster", *(f"web/{name}" for name in NETWORKS), "nobody"])


def outcome(engine: Engine, verb: str) -> tuple[Any, ...]:
    """Return the result or error of a verb, and all state that it left."""
    end: Result | tuple[int, str] | None
    try:
        if verb == "ADD":
            end = engine.verbs.add(engine.request())
        else:
            engine.verbs.delete(engine.request("DEL"))
            end = None
    except CniError as error:
        end = (error.code, str(error))
    cluster = engine.cluster
    return end, engine.store.saved, engine.store.records, cluster.statuses, cluster.events, engine.runner.attached


@pytest.mark.npwg("7.3")
@given(steps=STEPS, configs=CONFIGS, failing=FAILING, at_once=st.integers(2, 7))
def test_an_add_and_its_undoing(
    steps: dict[tuple[str, str], int], configs: dict[str, Any], failing: str, at_once: int
) -> None:
    sides, runner = [], Runner()
    for number in (1, at_once):
        engine, runner = make(number, **configs)
        runner.steps = steps
        runner.fail["ADD", failing] = CniError(f"{failing} refuses", code=101)
        sides.append(outcome(engine, "ADD"))
    assert sides[0] == sides[1]
    assert runner.unfinished() == 0
    names = ["kube-system/cluster", *(f"web/{name}" for name in NETWORKS)]
    undone = [name for verb, name in runner.order if verb == "DEL"]
    assert undone == [name for name in reversed(names) if name in undone]
    begun = {name for verb, name in runner.order if verb == "ADD"}
    assert set(undone) == (begun if failing in names else set())


@given(steps=STEPS, configs=CONFIGS, failing=st.sets(FAILING, max_size=3), at_once=st.integers(2, 7))
def test_a_del(steps: dict[tuple[str, str], int], configs: dict[str, Any], failing: set[str], at_once: int) -> None:
    sides = []
    for number in (1, at_once):
        engine, runner = make(number, **configs)
        engine.verbs.add(engine.request())
        runner.steps = steps
        runner.fail = {("DEL", name): CniError(f"{name} refuses", code=102) for name in failing}
        sides.append((outcome(engine, "DEL"), sorted(runner.order)))
    assert sides[0] == sides[1]
