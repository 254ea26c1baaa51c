"""DEL and CHECK."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError, IoFailureError, UnknownContainerError, fault
from multus_daemon.spec.cni.names import ContainerId
from tests.aside import Aside
from tests.fakes.namespaces import FakePodNetns
from tests.unit.pod.conftest import NETNS, Engine, definition
from tests.waiting import until


def add(engine: Engine) -> None:
    engine.declare("n1,n2")
    engine.verbs.add(engine.request())
    engine.runner.calls.clear()


@pytest.mark.weak_spot(60)
@pytest.mark.conformance("verbs-14", "pods-19")
def test_del_goes_in_reverse_and_asks_nobody(engine: Engine) -> None:
    add(engine)
    engine.cluster.pods.clear()
    engine.cluster.networks.clear()
    asked = len(engine.cluster.calls)
    engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order == [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert len(engine.cluster.calls) == asked
    assert engine.store.records == {}


@pytest.mark.weak_spot(3)
@pytest.mark.npwg("7.2b")
def test_one_failure_stops_nothing_is_reported_and_tried_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    add(engine)
    engine.runner.fail["DEL", "web/n2"] = CniError("address pool is busy", code=11)
    engine.runner.fail["DEL", "web/n1"] = RuntimeError("boom")
    with pytest.raises(CniError, match="^address pool is busy .*web/p1") as caught:
        engine.verbs.delete(engine.request("DEL"))
    assert caught.value.code == 11
    assert "boom" in caught.value.details
    # The request's own line has both, and the traceback.
    assert fault(caught.value) is engine.runner.fail["DEL", "web/n1"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert ("DEL", "kube-system/cluster") in engine.runner.order
    assert "c1" in engine.store.records
    engine.runner.fail.clear()
    engine.verbs.delete(engine.request("DEL"))
    assert engine.store.records == {}


def test_del_and_check_search_for_what_another_daemon_left_and_add_does_not(engine: Engine) -> None:
    add(engine)
    record = engine.store.records.pop("c1")
    engine.store.left["c1"] = record
    engine.store.calls.clear()
    engine.verbs.add(engine.request())
    assert ("recover", "c1") not in engine.store.calls
    engine.store.records.clear()
    engine.runner.calls.clear()
    engine.overlay["strictCheck"] = True
    engine.verbs.check(engine.request("CHECK"))
    engine.verbs.delete(engine.request("DEL"))
    assert [verb for verb, _ in engine.runner.order] == ["CHECK"] * 3 + ["DEL"] * 3
    assert engine.store.calls.count(("recover", "c1")) == 2


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK"])
def test_a_container_on_upstreams_list_is_known_whole(engine: Engine, verb: str) -> None:
    """Its file lacks the results, so they are searched for, whatever the verb."""
    add(engine)
    engine.overlay["strictCheck"] = True
    engine.store.left["c1"] = engine.store.records.pop("c1")
    engine.store.listed.add("c1")
    request = engine.request(verb)
    {"ADD": engine.verbs.add, "DEL": engine.verbs.delete, "CHECK": engine.verbs.check}[verb](request)
    assert ("recover", "c1") in engine.store.calls
    assert [called for called, _ in engine.runner.order] == ([] if verb == "ADD" else [verb] * 3)


def test_records_are_read_in_other_threads_and_written_in_the_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read has a bounded wait. A write is never left to itself: the next one would run beside it."""
    threads: dict[str, list[threading.Thread]] = {"load": [], "save": [], "remove": [], "recover": []}
    for name in threads:
        real = getattr(engine.store, name)

        def noted(*arguments: Any, name: str = name, real: Any = real, **options: bool) -> Any:
            threads[name].append(threading.current_thread())
            return real(*arguments, **options)

        monkeypatch.setattr(engine.store, name, noted)
    engine.verbs.add(engine.request())
    engine.verbs.add_network(engine.plug())
    engine.verbs.remove_network(engine.plug("DEL"))
    engine.verbs.delete(engine.request("DEL"))
    engine.verbs.delete(engine.request("DEL"))
    assert {name: len(found) for name, found in threads.items()} == {"load": 5, "save": 5, "remove": 1, "recover": 1}
    # An ADD does its first read in its own thread: a disk that hangs would hold up its writing too.
    own, read_in = threads["load"][0], threads["load"][1:] + threads["recover"]
    assert {own, *threads["save"], *threads["remove"]} == {threading.current_thread()}
    assert threading.current_thread() not in read_in


@pytest.mark.parametrize("method", ["load", "recover"])
def test_a_record_whose_reading_hangs_is_waited_for_a_while_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its container gets an error, others notice nothing, and when the disk answers nothing is lost."""
    add(engine)
    hangs, real = threading.Event(), getattr(engine.store, method)

    def read(container_id: ContainerId) -> ContainerRecord | None:
        if container_id == "c1":
            hangs.wait(20)
        found: ContainerRecord | None = real(container_id)
        return found

    monkeypatch.setattr(engine.store, method, read)
    monkeypatch.setattr(deadlines, "RECORD_READ_SECONDS", 2.0)
    engine.verbs = engine.make_verbs()
    if method == "recover":
        engine.store.corrupt.add("c1")
        engine.store.left["c1"] = engine.store.records["c1"]
    try:
        waiting = Aside(engine.verbs.delete, engine.request("DEL"))
        engine.verbs.add(engine.request(container="c2"))
        assert not waiting.done
        with pytest.raises(IoFailureError, match=r"record of container c1 can't be read: \[Errno 110\] the disk did"):
            waiting.result()
        assert engine.runner.attached != set()
    finally:
        hangs.set()
    engine.verbs.delete(engine.request("DEL"))
    engine.verbs.delete(engine.request("DEL", container="c2"))
    assert engine.runner.attached == set()


@pytest.mark.weak_spot(34)
@pytest.mark.npwg("7.3")
def test_a_del_waits_for_the_add_of_its_container(engine: Engine) -> None:
    engine.declare("n1")
    engine.runner.pause = 0.02
    adding = Aside(engine.verbs.add, engine.request())
    until(lambda: engine.runner.calls)
    engine.verbs.delete(engine.request("DEL"))
    adding.result()
    assert engine.runner.attached == set()
    assert [verb for verb, _ in engine.runner.order] == ["ADD", "ADD", "DEL", "DEL"]


def test_only_links_that_built_ins_have_made_leave_together(engine: Engine) -> None:
    """A plugin that makes no interface (passthru, tuning) must not cost the pod one that has the network's name."""
    for name, ifname in (("kube-system/cluster", "eth0"), ("web/n1", "net1")):
        engine.interface(ifname, name, "10.1.0.2/24")
    engine.runner.built_in = {"kube-system/cluster", "web/n2"}
    add(engine)
    engine.links.leaving.clear()
    engine.verbs.delete(engine.request("DEL"))
    assert engine.links.leaving == [("eth0",)]


def test_check_fails_with_the_cause_and_the_pod_under_strict_check(engine: Engine) -> None:
    engine.overlay["strictCheck"] = True
    add(engine)
    engine.runner.fail["CHECK", "web/n1"] = CniError("address is gone", code=100)
    with pytest.raises(CniError, match="^address is gone .*web/p1") as caught:
        engine.verbs.check(engine.request("CHECK"))
    assert caught.value.code == 100


def test_check_asks_no_binary(engine: Engine) -> None:
    """CRI-O waits for it in each pod start."""
    add_with_interface(engine)
    engine.runner.fail["CHECK", "web/n1"] = CniError("expected route not found")
    engine.verbs.check(engine.request("CHECK"))
    assert engine.runner.order == []
    engine.links.namespaces[NETNS].remove("net1")
    with pytest.raises(CniError, match='^interface "net1" is not there'):
        engine.verbs.check(engine.request("CHECK"))
    assert engine.runner.order == []


def add_with_interface(engine: Engine) -> None:
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.links.observed["net1"] = engine.runner.results["web/n1"]
    add(engine)
    engine.links.namespaces[NETNS].add("net1")


def test_a_plugin_that_fails_while_nothing_is_missing_fails_no_check(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Another plugin, which runs here too, may have moved a route of a built-in."""
    engine.runner.built_in = {"web/n1", "web/n2"}
    add_with_interface(engine)
    engine.runner.fail["CHECK", "web/n1"] = CniError("expected route not found")
    engine.verbs.check(engine.request("CHECK"))
    assert engine.runner.order[-1] == ("CHECK", "web/n2"), "the networks behind it are checked too"
    assert engine.checks_failed == 1
    (text,) = [message for _, kind, reason, message in engine.cluster.events if reason == "NetworkCheckFailed"]
    assert text.startswith("CHECK of network web/n1, interface net1, failed")
    assert "expected route not found" in text
    assert "expected route not found" in caplog.text


def test_a_plugin_that_fails_while_something_is_missing_fails_the_check(engine: Engine) -> None:
    engine.runner.built_in = {"web/n1"}
    add_with_interface(engine)
    engine.runner.fail["CHECK", "web/n1"] = CniError("expected route not found", code=100)
    engine.links.namespaces[NETNS].remove("net1")
    with pytest.raises(CniError, match="^expected route not found") as caught:
        engine.verbs.check(engine.request("CHECK"))
    assert caught.value.code == 100
    assert engine.checks_failed == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("text", ["CNI CHECK method is not implemented", "unknown CNI_COMMAND: CHECK"])
def test_a_plugin_without_check_fails_no_check(engine: Engine, strict: bool, text: str) -> None:
    engine.overlay["strictCheck"] = strict
    engine.runner.built_in = set() if strict else {"web/n1"}
    add_with_interface(engine)
    engine.runner.fail["CHECK", "web/n1"] = CniError(text)
    engine.verbs.check(engine.request("CHECK"))
    assert engine.checks_failed == 0
    engine.links.namespaces[NETNS].remove("net1")
    with pytest.raises(CniError, match='^interface "net1" is not there'):
        engine.verbs.check(engine.request("CHECK"))


def test_check_of_what_was_never_added_or_never_finished_is_code_3(engine: Engine) -> None:
    with pytest.raises(UnknownContainerError, match="c1"):
        engine.verbs.check(engine.request("CHECK"))
    add(engine)
    engine.store.records["c1"] = engine.store.saved[0]
    with pytest.raises(UnknownContainerError, match="never finished"):
        engine.verbs.check(engine.request("CHECK"))


def test_check_without_a_namespace_is_code_8(engine: Engine) -> None:
    add(engine)
    with pytest.raises(InvalidNetnsError):
        engine.verbs.check(engine.request("CHECK", netns="/gone"))


# --- CHECK of networks of before 0.4.0 --------------------------------------------------------------------------------


def add_old(engine: Engine, version: str = "0.3.1", **more: Any) -> None:
    engine.cluster.put_network(
        definition("web", "n1", json.dumps({"cniVersion": version, "name": "n1", "type": "fake", **more}))
    )
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.links.observed["net1"] = engine.runner.results["web/n1"]
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.links.namespaces[NETNS].add("net1")
    engine.runner.calls.clear()


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.3.1"])
def test_check_of_a_version_without_it_compares_the_kernel_with_the_record(engine: Engine, version: str) -> None:
    add_old(engine, version)
    engine.overlay["strictCheck"] = True
    engine.verbs.check(engine.request("CHECK"))
    assert engine.runner.order == [("CHECK", "kube-system/cluster")], "its plugins do not know the verb"
    engine.links.namespaces[NETNS].remove("net1")
    with pytest.raises(CniError) as caught:
        engine.verbs.check(engine.request("CHECK"))
    message = 'interface "net1" is not there (network="web/n1" interface="net1", CHECK) (pod web/p1)'
    assert caught.value.msg == message


def test_check_says_that_the_namespace_cannot_be_looked_into(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add_old(engine)

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(FakePodNetns, "missing", refuse)
    with pytest.raises(CniError, match=f"^{NETNS} can't be looked into: .*not permitted .*network=.*web/p1"):
        engine.verbs.check(engine.request("CHECK"))


def test_check_of_a_device_in_user_space_looks_for_no_interface(engine: Engine) -> None:
    add_old(engine)
    record = engine.store.records["c1"]
    cluster, old = record.attachments
    engine.store.save(replace(record, attachments=(cluster, replace(old, device_id="0000:03:02.0", observed=None))))
    engine.links.namespaces[NETNS].remove("net1")
    engine.verbs.check(engine.request("CHECK"))


def test_each_network_is_told_how_many_there_are(engine: Engine) -> None:
    """So that what is kept beside the record says whether it is whole."""
    engine.declare("n1,n2")
    engine.verbs.add(engine.request())
    assert engine.runner.networks == [3, 3, 3]
    engine.runner.networks.clear()
    engine.verbs.add_network(engine.plug())
    assert engine.runner.networks == [4]
