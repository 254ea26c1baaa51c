"""ADD for a whole pod."""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import replace
from functools import partial

import pytest

from multus_daemon import deadlines
from multus_daemon.pod import record_format
from multus_daemon.pod.engine import INDICATOR_GATE
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import BUILT_IN, ContainerRecord, Pod
from multus_daemon.spec.cni import conf, names
from multus_daemon.spec.cni.errors import (
    CniError,
    InternalError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    IoFailureError,
    PluginNotAvailableError,
    TryAgainLaterError,
    fault,
)
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION, STICKY_ANNOTATION
from multus_daemon.spec.ports import StatusWriteError, StoreUnavailableError
from tests.aside import Aside, together
from tests.counted import value_of
from tests.unit.pod.conftest import MORE, NETNS, Engine, definition


def attached(engine: Engine) -> list[tuple[str, str]]:
    return sorted(engine.runner.attached)


@pytest.mark.conformance("verbs-23")
def test_the_record_is_on_disk_before_the_first_plugin_runs(engine: Engine) -> None:
    engine.declare("n1")
    engine.runner.fail["ADD", "kube-system/cluster"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.verbs.add(engine.request())
    first = engine.store.saved[0]
    assert [item.name for item in first.attachments] == ["kube-system/cluster", "web/n1"]
    assert (first.complete, first.created, first.pod_uid) == (False, 1000.0, "u1")


@pytest.mark.conformance("verbs-9")
@pytest.mark.parametrize(
    ("at_once", "failing", "undone"),
    [
        (1, 1, ["cluster"]),
        (1, 2, ["n1", "cluster"]),
        (1, 3, ["n2", "n1", "cluster"]),
        (4, 1, ["cluster"]),
        (4, 2, ["n2", "n1", "cluster"]),
        (4, 3, ["n2", "n1", "cluster"]),
    ],
)
def test_a_failure_undoes_in_reverse_the_failed_one_included(
    engine: Engine, at_once: int, failing: int, undone: list[str]
) -> None:
    engine.attach_concurrency = at_once
    engine.verbs = engine.make_verbs()
    engine.declare("n1,n2")
    engine.runner.fail_at[failing] = CniError("no address left", code=101)
    with pytest.raises(CniError, match="^no address left") as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == 101
    assert "web/p1" in caught.value.msg
    assert [name.split("/")[1] for verb, name in engine.runner.order if verb == "DEL"] == undone
    assert attached(engine) == []
    assert engine.store.records == {}


def test_the_undoing_knows_the_results(engine: Engine) -> None:
    engine.declare("n1,n2")
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.runner.fail["ADD", "web/n2"] = CniError("no address left")
    with pytest.raises(CniError, match="^no address left"):
        engine.verbs.add(engine.request())
    undone = {call.attachment.name: call.attachment.result for call in engine.runner.calls if call.verb == "DEL"}
    assert undone["web/n1"] == engine.runner.results["web/n1"]
    assert undone["web/n2"] is None


def test_every_result_is_on_disk_before_the_status_is_written(engine: Engine) -> None:
    engine.runner.built_in.add("web/n2")
    engine.declare("n2,n1")
    before: list[list[str]] = []

    def told() -> list[str]:
        return [item.name for item in engine.runner.remembered]

    write = engine.cluster.write_network_status

    def noting(pod: Pod, value: str, *, keep_trying: bool) -> None:
        before.append(told())
        assert engine.store.saved[-1].complete
        write(pod, value, keep_trying=keep_trying)

    engine.cluster.write_network_status = noting  # type: ignore[method-assign]
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.verbs.add(engine.request())
    assert before == [["kube-system/cluster", "web/n1", "web/n2"]]
    assert told() == ["kube-system/cluster", "web/n1", "web/n2"]
    assert [item.result for item in engine.runner.remembered[:1]] == [engine.runner.results["kube-system/cluster"]]


def test_a_record_that_can_not_be_removed_does_not_hide_why_the_add_failed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(container_id: ContainerId) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(engine.store, "remove", remove)
    engine.declare("n1")
    engine.runner.fail["ADD", "web/n1"] = CniError("first cause")
    with pytest.raises(CniError, match="first cause"):
        engine.verbs.add(engine.request())
    assert attached(engine) == []


def test_every_delegate_is_planned_before_the_first_runs(engine: Engine) -> None:
    engine.declare("n1,n2")
    engine.runner.fail["PLAN", "web/n2"] = InvalidNetworkConfigError("no such plugin")
    with pytest.raises(InvalidNetworkConfigError, match="no such plugin .*web/p1"):
        engine.verbs.add(engine.request())
    assert [attachment.name for attachment in engine.runner.planned] == ["kube-system/cluster", "web/n1", "web/n2"]
    assert engine.runner.calls == []
    assert engine.store.saved == []


def test_who_serves_each_network_is_on_record_before_the_first_runs(engine: Engine) -> None:
    engine.declare("n1")
    engine.runner.built_in.add("web/n1")
    engine.verbs.add(engine.request())
    planned = {"kube-system/cluster": {"fake": "/fake/fake"}, "web/n1": {"fake": BUILT_IN}}
    for attachments in (
        [call.attachment for call in engine.runner.calls],
        engine.store.saved[0].attachments,
        engine.store.records["c1"].attachments,
    ):
        assert {attachment.name: dict(attachment.served_by) for attachment in attachments} == planned


@pytest.mark.npwg("4.1.2.1.11")
@pytest.mark.parametrize(
    ("name", "annotations", "claims"),
    [
        ("web-3", {}, ["", "", "web/vm.lan"]),
        ("web-3", {STICKY_ANNOTATION: "true"}, ["", "statefulset/web/web/3/net1", "web/vm.lan"]),
        ("a-b-10", {STICKY_ANNOTATION: "true"}, ["", "statefulset/web/a-b/10/net1", "web/vm.lan"]),
        ("web", {STICKY_ANNOTATION: "true"}, ["", "", "web/vm.lan"]),
        ("web-x", {STICKY_ANNOTATION: "true"}, ["", "", "web/vm.lan"]),
    ],
)
def test_what_holds_the_addresses_is_on_record(
    engine: Engine, name: str, annotations: dict[str, str], claims: list[str]
) -> None:
    elements = json.dumps([{"name": "n1"}, {"name": "n2", "ipam-claim-reference": "vm.lan"}])
    pod = Pod(Namespace("web"), PodName(name), PodUid("u1"), {NETWORKS_ANNOTATION: elements, **annotations})
    engine.cluster.put_pod(pod)
    args = names.kubernetes_args(f"IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME={name};K8S_POD_UID=u1")
    engine.verbs.add(replace(engine.request(), args=args))
    record = record_format.decode(record_format.encode(engine.store.records["c1"]))
    assert [item.address_claim for item in record.attachments] == claims


@pytest.mark.npwg("4.1.2.1.5")
def test_a_name_that_the_pod_has_already_is_refused_before_anything(engine: Engine) -> None:
    engine.declare("n1@eth5")
    engine.links.namespaces[NETNS].add("eth5")
    with pytest.raises(InvalidNetworkConfigError, match="'eth5' of network web/n1 already exists"):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []


@pytest.mark.conformance("verbs-1")
def test_a_store_that_can_not_be_written_refuses_before_a_plugin_runs(engine: Engine) -> None:
    engine.store.fail_at[2] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(IoFailureError, match="No space left"):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []


def test_an_exception_of_a_plugin_becomes_code_999_and_undoes(engine: Engine) -> None:
    engine.runner.fail["ADD", "kube-system/cluster"] = ZeroDivisionError("oops")
    with pytest.raises(InternalError, match="ZeroDivisionError: oops") as caught:
        engine.verbs.add(engine.request())
    assert attached(engine) == []
    # For its traceback, in the line that the log has of the request.
    assert fault(caught.value) is engine.runner.fail["ADD", "kube-system/cluster"]


# --- repeated --------------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(6)
def test_a_repeated_add_touches_nothing(engine: Engine) -> None:
    engine.declare("n1")
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    first = engine.verbs.add(engine.request())
    engine.links.namespaces[NETNS] |= {"eth0", "net1"}
    before = list(engine.runner.order)
    assert engine.verbs.add(engine.request()) == first
    assert engine.runner.order == before


def test_an_add_whose_interfaces_have_gone_starts_afresh(engine: Engine) -> None:
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.verbs.add(engine.request())
    engine.verbs.add(engine.request())
    assert [verb for verb, _ in engine.runner.order] == ["ADD", "DEL", "ADD"]


def test_an_add_that_a_crash_cut_off_is_undone_first(engine: Engine) -> None:
    engine.verbs.add(engine.request())
    engine.store.records["c1"] = engine.store.saved[0]  # as before the end of the ADD
    engine.verbs.add(engine.request())
    assert [verb for verb, _ in engine.runner.order] == ["ADD", "DEL", "ADD"]
    assert engine.store.records["c1"].complete


def test_what_is_left_of_such_an_add_is_still_unfinished(engine: Engine) -> None:
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.runner.fail["DEL", "web/n1"] = CniError("busy")
    with pytest.raises(CniError, match="busy"):
        # The container has another namespace now: its record is of one that is gone.
        engine.verbs.add(engine.request(netns="/run/netns/another"))
    record = engine.store.records["c1"]
    assert [item.name for item in record.attachments] == ["web/n1"]
    assert not record.complete


def test_another_interface_name_for_a_live_container_is_refused(engine: Engine) -> None:
    engine.verbs.add(engine.request())
    request = engine.request()
    other = type(request)(**{**{name: getattr(request, name) for name in request.__slots__}, "ifname": "eth9"})
    with pytest.raises(InvalidEnvironmentError, match="CNI_IFNAME is 'eth9'"):
        engine.verbs.add(other)
    assert attached(engine) == [("kube-system/cluster", "eth0")]


@pytest.mark.npwg("7.3")
def test_two_adds_for_one_container_go_one_after_the_other(engine: Engine) -> None:
    engine.runner.pause = 0.01
    together(partial(engine.verbs.add, engine.request()), partial(engine.verbs.add, engine.request()))
    assert engine.runner.most_at_once == 1


# --- which networks --------------------------------------------------------------------------------------------------


@pytest.mark.npwg("6.2")
@pytest.mark.conformance("verbs-12", "pods-1", "pods-10")
def test_default_networks_come_between_and_count_in_the_names(engine: Engine) -> None:
    engine.overlay["defaultNetworks"] = ["extra"]
    engine.cluster.put_network(definition("kube-system", "extra"))
    engine.declare("n1")
    engine.verbs.add(engine.request())
    assert [(call.attachment.name, call.attachment.ifname) for call in engine.runner.calls] == [
        ("kube-system/cluster", "eth0"),
        ("kube-system/extra", "net1"),
        ("web/n1", "net2"),
    ]


@pytest.mark.conformance("verbs-17", "pods-14")
def test_the_pods_own_default_network_takes_the_place_of_the_cluster_network(engine: Engine) -> None:
    engine.cluster.put_network(definition("kube-system", "other"))
    engine.declare("n1", annotations={DEFAULT_NETWORK_ANNOTATION: "other@main0"})
    engine.verbs.add(engine.request())
    assert [(call.attachment.name, call.attachment.ifname) for call in engine.runner.calls] == [
        ("kube-system/other", "main0"),
        ("web/n1", "net1"),
    ]
    assert engine.runner.calls[0].attachment.cluster_network


@pytest.mark.weak_spot(8)
@pytest.mark.conformance("config-13")
def test_system_namespaces_are_of_pods_not_their_names(engine: Engine) -> None:
    """Upstream compares the pod's name; a status is written for pods of system namespaces too, as it does."""
    engine.overlay |= {"defaultNetworks": ["extra"], "systemNamespaces": ["p1"]}
    engine.cluster.put_network(definition("kube-system", "extra"))
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.verbs.add(engine.request())
    assert engine.runner.order == [("ADD", "kube-system/cluster"), ("ADD", "kube-system/extra")]
    assert "web/p1" in engine.cluster.statuses


@pytest.mark.conformance("pods-11", "pods-22")
def test_pods_of_system_namespaces_get_what_they_ask_for_and_no_default_networks(engine: Engine) -> None:
    engine.overlay |= {"defaultNetworks": ["extra"], "systemNamespaces": ["web"]}
    engine.declare("n1")
    engine.verbs.add(engine.request())
    assert engine.runner.order == [("ADD", "kube-system/cluster"), ("ADD", "web/n1")]


@pytest.mark.weak_spot(10)
@pytest.mark.conformance("verbs-17")
@pytest.mark.parametrize("where", ["kube-system/other", "other"])
def test_isolation_lets_the_default_network_be_one_of_the_clusters(engine: Engine, where: str) -> None:
    engine.overlay["namespaceIsolation"] = True
    engine.cluster.put_network(definition("kube-system", "other"))
    engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: where})
    engine.verbs.add(engine.request())
    assert engine.runner.order == [("ADD", "kube-system/other")]


@pytest.mark.weak_spot(23)
@pytest.mark.parametrize("value", ["", "[]", "other,other", '[{"name":"a"},{"name":"b"}]', "[null]", "nope"])
def test_a_default_network_must_be_exactly_one_that_exists(engine: Engine, value: str) -> None:
    engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: value})
    with pytest.raises(CniError, match="pod web/p1"):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []
    assert len(engine.warnings) == 1


@pytest.mark.weak_spot(10)
@pytest.mark.npwg("7.4")
@pytest.mark.conformance("pods-20")
def test_namespace_isolation_holds_for_the_default_network(engine: Engine) -> None:
    engine.overlay["namespaceIsolation"] = True
    engine.cluster.put_network(definition("secret", "n1"))
    engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: "secret/n1"})
    with pytest.raises(InvalidNetworkConfigError, match="^network secret/n1 must not be used from namespace web"):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []


@pytest.mark.conformance("pods-21")
def test_global_namespaces_are_in_reach(engine: Engine) -> None:
    engine.overlay |= {"namespaceIsolation": True, "globalNamespaces": "shared, default"}
    engine.cluster.put_network(definition("shared", "n1"))
    engine.declare("shared/n1,n2")
    engine.verbs.add(engine.request())
    assert ("ADD", "shared/n1") in engine.runner.order


@pytest.mark.parametrize(
    ("spaces", "advice"),
    [
        (["other"], "write other/storage in the pod's annotation: namespace other has it"),
        (
            [f"team-{number}" for number in range(7)],
            "write team-0/storage or team-1/storage or team-2/storage in the pod's annotation: "
            "namespace team-0, team-1, team-2 has it",
        ),
    ],
)
def test_a_missing_network_of_another_namespace_says_what_to_write(
    engine: Engine, spaces: list[str], advice: str
) -> None:
    for space in spaces:
        engine.cluster.put_network(definition(space, "storage"))
    engine.declare("storage")
    with pytest.raises(InvalidNetworkConfigError) as caught:
        engine.verbs.add(engine.request())
    assert str(caught.value) == f"network web/storage does not exist (pod web/p1); {advice}"
    [(reason, message)] = engine.warnings
    assert (reason, message.endswith(f": {caught.value}{MORE}")) == ("NoNetworkFound", True)


def test_under_namespace_isolation_no_namespace_is_named_that_is_out_of_reach(engine: Engine) -> None:
    engine.overlay |= {"namespaceIsolation": True, "globalNamespaces": "shared"}
    for namespace in ("secret-customer", "shared"):
        engine.cluster.put_network(definition(namespace, "storage"))
    engine.declare("storage")
    with pytest.raises(InvalidNetworkConfigError) as caught:
        engine.verbs.add(engine.request())
    assert caught.value.explanation == "write shared/storage in the pod's annotation: namespace shared has it"
    engine.cluster.networks.pop(("shared", "storage"))
    with pytest.raises(InvalidNetworkConfigError) as caught:
        engine.verbs.add(engine.request())
    isolated = "another namespace has one, which cannot be used from here (namespaceIsolation)"
    assert caught.value.explanation.endswith(f"is known in namespace web; {isolated}")
    assert not [message for _, message in engine.warnings if "secret" in message]


@pytest.mark.weak_spot(53)
@pytest.mark.conformance("pods-13", "pods-15")
def test_a_missing_cluster_network_says_where_was_looked(engine: Engine) -> None:
    engine.overlay["clusterNetwork"] = "gone"
    with pytest.raises(InvalidNetworkConfigError, match="^clusterNetwork 'gone' does not exist") as caught:
        engine.verbs.add(engine.request())
    assert "/etc/cni/multus/net.d" in caught.value.explanation
    engine.cluster.put_network(definition("web", "gone"))
    with pytest.raises(InvalidNetworkConfigError) as caught:
        engine.verbs.add(engine.request())
    assert caught.value.explanation.endswith("; there is one of that name in namespace web")


@pytest.mark.conformance("pods-16")
def test_the_pods_own_default_network_takes_the_place_of_the_first_delegate(engine: Engine) -> None:
    """The others stay, and defaultNetworks go with a clusterNetwork only, as ever."""
    engine.overlay |= {"clusterNetwork": "", "defaultNetworks": ["n1"]}
    engine.overlay["delegates"] = [{"cniVersion": "0.4.0", "name": name, "type": "fake"} for name in ("a", "b")]
    engine.declare("n2", annotations={DEFAULT_NETWORK_ANNOTATION: "web/n1"})
    engine.verbs.add(engine.request())
    assert [(call.attachment.name, call.attachment.ifname) for call in engine.runner.calls] == [
        ("web/n1", "eth0"),
        ("b", "net1"),
        ("web/n2", "net2"),
    ]
    assert [call.attachment.cluster_network for call in engine.runner.calls] == [True, False, False]


@pytest.mark.npwg("6")
@pytest.mark.conformance("config-9")
def test_no_network_at_all_is_an_error(engine: Engine) -> None:
    engine.overlay["clusterNetwork"] = ""
    with pytest.raises(InvalidNetworkConfigError, match="^no cluster network"):
        engine.verbs.add(engine.request())


# --- the pod ---------------------------------------------------------------------------------------------------------


def test_a_store_that_is_away_is_try_again_later(engine: Engine) -> None:
    engine.cluster.fail_at(1, StoreUnavailableError("connection refused"))
    with pytest.raises(TryAgainLaterError, match="connection refused"):
        engine.verbs.add(engine.request())


@pytest.mark.conformance("verbs-20")
def test_another_incarnation_of_the_pod_is_refused(engine: Engine) -> None:
    engine.declare(uid="u2")
    with pytest.raises(TryAgainLaterError, match="^pod web/p1 has UID u2.*u1"):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []
    assert engine.cluster.events == []


@pytest.mark.conformance("pods-30")
def test_a_request_without_a_uid_takes_the_pod_of_that_name(engine: Engine) -> None:
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.verbs.add(engine.request(uid=""))
    assert engine.store.records["c1"].pod_uid == "u1"
    assert "10.0.0.2" in engine.cluster.statuses["web/p1"]


@pytest.mark.weak_spot(4)
@pytest.mark.conformance("verbs-26")
def test_a_pod_that_has_gone_is_no_empty_success(engine: Engine) -> None:
    """Upstream answers with an address of 0.0.0.0/0 there, and the runtime goes on with it."""
    engine.cluster.pods.clear()
    with pytest.raises(TryAgainLaterError) as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == 11
    assert "web/p1" in caught.value.msg
    assert engine.store.saved == []


def test_a_mirror_pods_annotation_must_be_there_for_another_uid(engine: Engine) -> None:
    engine.declare(uid="mirror", annotations={"kubernetes.io/config.source": "api"})
    with pytest.raises(TryAgainLaterError, match="UID mirror"):
        engine.verbs.add(engine.request())


@pytest.mark.conformance("e2e-3")
def test_a_static_pods_uid_may_differ(engine: Engine) -> None:
    engine.declare(uid="mirror", annotations={"kubernetes.io/config.source": "file"})
    engine.verbs.add(engine.request())
    assert engine.store.records["c1"].pod_uid == "u1"


# --- reporting -------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("verbs-13")
def test_status_and_events_tell_of_every_network(engine: Engine) -> None:
    engine.declare("n1")
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.verbs.add(engine.request())
    entries = json.loads(engine.cluster.statuses["web/p1"])
    assert [(item["name"], item["interface"], item.get("default")) for item in entries] == [
        ("kube-system/cluster", "eth0", True),
        ("web/n1", "net1", False),
    ]
    assert [message for _, _, _, message in engine.cluster.events] == [
        "Add eth0 [10.0.0.2/24] from kube-system/cluster",
        "Add net1 [10.1.0.2/24] from web/n1",
    ]


@pytest.mark.weak_spot(9)
@pytest.mark.conformance("pods-32")
def test_a_status_that_can_not_be_written_does_not_fail_the_add(engine: Engine) -> None:
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.cluster.fail_at(3, StatusWriteError("conflict"))
    engine.verbs.add(engine.request())
    assert engine.store.records["c1"].complete
    assert engine.cluster.events[-1][1:] == ("Warning", "NetworkStatusNotWritten", "network-status: conflict")
    assert engine.cluster.keeps_trying == [True]


@pytest.mark.weak_spot(38)
def test_a_status_write_that_hangs_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_pod: object, _value: str, *, keep_trying: bool) -> None:
        deadline.pause(60)

    monkeypatch.setattr(deadlines, "NETWORK_STATUS_SECONDS", 0.01)
    monkeypatch.setattr(engine.cluster, "write_network_status", hang)
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.verbs.add(engine.request())
    assert "not written within" in engine.cluster.events[-1][3]


def test_a_required_status_that_is_written(engine: Engine) -> None:
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.make_verbs("required").add(engine.request())
    assert engine.store.records["c1"].complete
    assert engine.cluster.keeps_trying == [False]


@pytest.mark.weak_spot(7)
@pytest.mark.conformance("pods-32")
@pytest.mark.parametrize("how", ["refused", "hangs"])
def test_a_required_status_that_can_not_be_written_undoes_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def hang(_pod: object, _value: str, *, keep_trying: bool) -> None:
        deadline.pause(60)

    engine.declare("n1")
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    if how == "hangs":
        monkeypatch.setattr(deadlines, "NETWORK_STATUS_SECONDS", 0.01)
        monkeypatch.setattr(engine.cluster, "write_network_status", hang)
    else:
        engine.cluster.fail_at(4, StatusWriteError("forbidden"))
    cause = "not written within 0.01 s" if how == "hangs" else "forbidden"
    with pytest.raises(TryAgainLaterError, match=f"^network-status can't be written: {cause} .pod web/p1") as caught:
        engine.make_verbs("required").add(engine.request())
    assert caught.value.code == 11
    assert engine.runner.order[2:] == [("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert engine.store.records == {}
    assert [reason for reason, _ in engine.warnings] == ["NetworkStatusNotWritten"]
    assert len(engine.cluster.events) == 1


def test_cancelling_while_the_status_is_written_undoes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ADD is on disk, and the status may be on its way: it must not say what is undone. The runtime asks again."""
    writing = threading.Event()

    def hang(_pod: object, _value: str, *, keep_trying: bool) -> None:
        writing.set()
        deadline.pause(60)

    monkeypatch.setattr(engine.cluster, "write_network_status", hang)
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    adding = Aside(engine.verbs.add, engine.request())
    assert writing.wait(30)
    adding.stop()
    with pytest.raises(Interrupted):
        adding.result()
    assert engine.store.records["c1"].complete
    monkeypatch.undo()
    engine.links.namespaces[NETNS].add("eth0")
    assert engine.verbs.add(engine.request()) == engine.runner.results["kube-system/cluster"]
    assert engine.runner.order == [("ADD", "kube-system/cluster")]


def test_an_add_whose_results_cannot_be_kept_announces_nothing(engine: Engine) -> None:
    """The disk is full when the plugins are through: the ADD is undone, and no status may say that it is attached."""
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    save = engine.store.save

    def full(record: ContainerRecord, *, durable: bool = True) -> None:
        if not durable:
            raise OSError(28, "No space left on device")
        save(record, durable=durable)

    engine.store.save = full  # type: ignore[method-assign]
    with pytest.raises(IoFailureError, match="No space left"):
        engine.verbs.add(engine.request())
    assert engine.runner.order == [("ADD", "kube-system/cluster"), ("DEL", "kube-system/cluster")]
    assert engine.cluster.keeps_trying == []
    assert engine.cluster.statuses == {}
    assert [reason for _, kind, reason, _ in engine.cluster.events if kind == "Normal"] == []


# --- what goes wrong is told, once -----------------------------------------------------------------------------------

HUGE = "x" * 200 * 1024


@pytest.mark.weak_spot(23)
@pytest.mark.npwg("4.1.2.1.3-10")
@pytest.mark.conformance("pods-4")
@pytest.mark.parametrize(
    ("networks", "code", "words"),
    [
        ("[null]", 6, "element 0"),
        ('[{"name": 7}]', 6, "element 0"),
        ('[{"name": "n1"}, {"name": "n2", "ips": "10.0.0.1"}]', 6, "element 1 'n2'"),
        ('{"name": "n1"}', 6, "a JSON list of objects is needed"),
        ("[", 6, "not JSON"),
        (HUGE, 7, "element 0"),
        ("[" * 200 * 1024, 6, "objects and arrays"),
        ('[{"name": "n1", "interface": "' + HUGE + '"}]', 7, "element 0 'n1'"),
        (",".join(["n1"] * 60_000), 7, "60000 networks"),
        ("n1@" + "i" * 16, 7, "interface name is too long"),
        ("n1@a,n2@a", 7, "asked for twice"),
        ("n1@eth0", 7, "'eth0'"),
        ("n1@..", 7, "interface"),
        ("N1", 7, "'N1'"),
        ('[{"name": "n1", "mac": "zz"}]', 7, "mac"),
    ],
)
def test_a_malformed_annotation(engine: Engine, networks: str, code: int, words: str) -> None:
    engine.declare(networks)
    with pytest.raises(CniError) as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == code
    [(reason, message)] = engine.warnings
    assert reason == "InvalidNetwork"
    for text in (str(caught.value), message):
        assert words in text
        assert "web/p1" in text
        assert len(text) < 1500
    assert engine.runner.calls == []
    assert engine.store.saved == []
    # The daemon lives.
    engine.declare("")
    engine.verbs.add(engine.request())


@pytest.mark.weak_spot(23)
@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ("{", 6, "too early"),
        ("[]", 6, "JSON object"),
        ('{"name": "bad"}', 7, "neither 'type' nor 'plugins'"),
        ('{"type": 7}', 6, "type"),
        ('{"plugins": []}', 7, "'plugins' is empty"),
        ('{"plugins": [{"name": "x"}]}', 7, "plugins[0]: 'type' is missing"),
        ('{"type": "../ptp"}', 7, "invalid plugin name"),
        ('{"type": "fake", "name": "a/b"}', 7, "invalid characters found in network name"),
        ('{"type": "fake", "cniVersion": "one"}', 7, "CNI version"),
        ('{"type": "\ud800"}', 6, "'utf-8' codec can't decode"),
        ("\ud800", 6, "JSON"),
        ("  ", 7, "spec.config is empty"),
    ],
)
def test_a_broken_definition(engine: Engine, config: str, code: int, words: str) -> None:
    engine.cluster.put_network(definition("web", "bad", config))
    engine.declare("n1,bad")
    with pytest.raises(CniError) as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == code
    [(reason, message)] = engine.warnings
    assert reason == "InvalidNetwork"
    for text in (str(caught.value), message):
        assert words in text
        assert "network web/bad" in text
        assert "pod web/p1" in text
    assert engine.runner.calls == []


@pytest.mark.conformance("pods-2")
@pytest.mark.parametrize("network", ["nowhere/n1", "web/nope"])
def test_an_unknown_namespace_or_network_keeps_upstreams_reason(engine: Engine, network: str) -> None:
    engine.declare(f"n2,{network}")
    with pytest.raises(InvalidNetworkConfigError, match=f"^network {network} does not exist .*pod web/p1"):
        engine.verbs.add(engine.request())
    namespace, name = network.split("/")
    [(reason, message)] = engine.warnings
    assert reason == "NoNetworkFound"
    upstreams = f"cannot find a network-attachment-definition ({name}) in namespace ({namespace})"
    assert message.startswith(f"{upstreams}: network {network} does not exist (pod web/p1)")


@pytest.mark.conformance("verbs-13")
def test_a_failed_plugin_is_told_once_and_nothing_as_added(engine: Engine) -> None:
    engine.declare("n1,n2")
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.runner.fail["ADD", "web/n1"] = CniError("no address left", code=101)
    engine.runner.fail["DEL", "web/n1"] = CniError("second cause")
    with pytest.raises(CniError, match="^no address left"):
        engine.verbs.add(engine.request())
    assert engine.cluster.events == [
        ("web/p1", "Warning", "FailedAddingInterface", f"no address left (pod web/p1){MORE}"),
    ]


def test_the_event_is_the_same_for_each_try(engine: Engine) -> None:
    """Kubernetes counts Events of one text; each try has a new container and a new namespace."""
    engine.declare("n1")
    for number in (1, 2):
        netns, container = f"/run/netns/try{number}", f"try{number}"
        engine.links.namespaces[netns] = set()
        engine.runner.fail["ADD", "web/n1"] = CniError(f"no way into {netns} of container {container}", code=101)
        with pytest.raises(CniError, match=netns):
            engine.verbs.add(engine.request(netns=netns, container=container))
    text = f"no way into the pod's network namespace of the container (pod web/p1){MORE}"
    assert engine.cluster.events == [("web/p1", "Warning", "FailedAddingInterface", text)] * 2


def test_a_cluster_network_from_the_nodes_files_is_no_warning(engine: Engine) -> None:
    """Upstream warns of the missing definition."""
    engine.overlay["clusterNetwork"] = "from-file"
    raw = b'{"cniVersion":"0.3.1","name":"from-file","type":"fake"}'
    engine.files.names["/etc/cni/multus/net.d", "from-file"] = conf.parse(raw)
    engine.verbs.add(engine.request())
    assert engine.warnings == []


@pytest.mark.conformance("verbs-5")
def test_a_namespace_that_is_spelt_like_the_container_does_not_wait_for_it(engine: Engine) -> None:
    """Locks of containers and of namespaces are in one file."""
    with deadline.within(1.0), pytest.raises(CniError) as caught:
        engine.verbs.add(engine.request(netns="c1", container="c1"))
    assert (caught.value.code, "is no network namespace" in caught.value.msg) == (8, True)


# --- what is measured ---


def counts(engine: Engine) -> dict[str, int]:
    return dict(engine.verbs.engine.records.view.counts)


def test_the_attachments_on_record_are_counted_by_network(engine: Engine) -> None:
    engine.declare("n1,n1")
    engine.verbs.add(engine.request())
    assert counts(engine) == {"kube-system/cluster": 1, "web/n1": 2}
    engine.verbs.delete(engine.request("DEL"))
    assert counts(engine) == {}


def test_an_add_that_is_undone_is_not_counted(engine: Engine) -> None:
    engine.declare("n1")
    engine.runner.fail_at[2] = CniError("no address left", code=101)
    with pytest.raises(CniError):
        engine.verbs.add(engine.request())
    assert counts(engine) == {}


def test_attachments_of_an_earlier_daemon_are_counted_once_they_are_read(engine: Engine) -> None:
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.verbs = engine.make_verbs()
    assert counts(engine) == {}
    engine.verbs.engine.records.refresh()
    assert counts(engine) == {"kube-system/cluster": 1, "web/n1": 1}
    # Another daemon has deleted it.
    engine.store.records.clear()
    engine.verbs.engine.records.refresh()
    assert counts(engine) == {}


def test_each_network_is_measured_with_its_outcome(engine: Engine) -> None:
    engine.declare("n1,n2")
    engine.runner.fail["ADD", "web/n1"] = InvalidNetworkConfigError("no such mode")
    with pytest.raises(CniError):
        engine.verbs.add(engine.request())
    name = "multus_network_add_duration_seconds_count"
    assert value_of(engine.metrics, name, network="kube-system/cluster", outcome="success") == 1
    assert value_of(engine.metrics, name, network="web/n1", outcome="refused") == 1
    assert value_of(engine.metrics, name, network="web/n2", outcome="success") is None


# --- the readiness indicator ------------------------------------------------------------------------------------------


REASON = "/run/ready (readinessindicatorfile) is not there: the primary network is not ready"


@pytest.mark.npwg("6.1.2")
@pytest.mark.conformance("server-11")
def test_no_add_begins(engine: Engine) -> None:
    engine.gates.close(INDICATOR_GATE, REASON)
    with pytest.raises(TryAgainLaterError, match="^/run/ready .readinessindicatorfile. is not there") as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == 11
    assert engine.runner.calls == []
    assert engine.store.containers() == []
    with pytest.raises(PluginNotAvailableError, match="is not there"):
        engine.verbs.status(b'{"cniVersion":"1.1.0","name":"multus"}')
    engine.gates.open(INDICATOR_GATE)
    engine.verbs.add(engine.request())
    assert engine.store.containers() == ["c1"]


@pytest.mark.npwg("6.1.2")
@pytest.mark.conformance("server-11")
def test_what_is_attached_is_served(engine: Engine) -> None:
    result = engine.verbs.add(engine.request())
    engine.gates.close(INDICATOR_GATE, REASON)
    assert engine.verbs.add(engine.request()) == result, "a repeated ADD changes nothing"
    engine.verbs.check(engine.request("CHECK"))
    engine.verbs.delete(engine.request("DEL"))
    assert engine.store.containers() == []


def test_other_gates_do_not_keep_from_an_add(engine: Engine) -> None:
    engine.gates.close("primary", "10-net.conf can't be read")
    engine.verbs.add(engine.request())
    assert engine.store.containers() == ["c1"]
