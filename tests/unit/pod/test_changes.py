"""What a change of a running pod's annotation asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.pod.annotation import Changes, between, interface_names, refuse_second_gateway, wanted
from multus_daemon.spec.attachment import LEAVING, Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection

CONFIG = conf.parse(b'{"cniVersion": "1.0.0", "name": "any", "type": "fake"}')


def attachment(name: str, ifname: str, wanted: str = "", **more: Any) -> Attachment:
    return Attachment(name, CONFIG, IfName(ifname), **{"selection": wanted, "result": Result(), **more})


def record(*items: Attachment) -> ContainerRecord:
    cluster = attachment("kube-system/cluster", "eth0", cluster_network=True)
    sandbox = Sandbox(ContainerId("c1"), "/run/netns/p1")
    owner = Namespace("web"), PodName("p1"), PodUid("u1")
    return ContainerRecord(sandbox, IfName("eth0"), *owner, (cluster, *items), complete=True)


def elements(annotation: str | list[dict[str, Any]]) -> tuple[NetworkSelection, ...]:
    text = annotation if isinstance(annotation, str) else json.dumps(annotation)
    return selection.parse(text, pod_namespace="web")


def attached(annotation: str, *ifnames: str) -> ContainerRecord:
    """The record of a pod whose ADD had this annotation."""
    pairs = zip(elements(annotation), ifnames, strict=True)
    return record(*(attachment(str(item), name, item.canonical) for item, name in pairs))


def asked(before: ContainerRecord, annotation: str) -> tuple[list[str], list[str], list[str]]:
    """Return interfaces that stay beside the cluster network's, those that leave, and the new networks."""
    found = between(before, elements(annotation))
    assert found.staying[0].cluster_network
    assert {item.ifname for item in found.staying + found.leaving} >= {item.ifname for item in before.attachments}
    assert len(found.staying) + len(found.leaving) == len(before.attachments)
    return (
        [item.ifname for item in found.staying[1:]],
        [item.ifname for item in found.leaving],
        [str(item) for item in found.new],
    )


def names(before: ContainerRecord, annotation: str, taken: Sequence[str] = ()) -> list[str]:
    found = between(before, elements(annotation))
    return [*interface_names(found, taken.__contains__)]


# --- what stays, leaves and comes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        ("a,b@data0", (["net1", "data0"], [], [])),
        ("b@data0,a", (["net1", "data0"], [], [])),
        (" web/a , web/b@data0 ", (["net1", "data0"], [], [])),
        ('[{"name": "b", "interface": "data0"}, {"namespace": "web", "name": "a"}]', (["net1", "data0"], [], [])),
        ("a", (["net1"], ["data0"], [])),
        ("a,b@data0,c", (["net1", "data0"], [], ["web/c"])),
        ("c,a", (["net1"], ["data0"], ["web/c"])),
        # A changed element is another one.
        ("a,b@data1", (["net1"], ["data0"], ["web/b"])),
        ("a@net1,b@data0", (["data0"], ["net1"], ["web/a"])),
        ('[{"name": "a", "mac": "02:00:00:00:00:01"}]', ([], ["net1", "data0"], ["web/a"])),
        ("other/a", ([], ["net1", "data0"], ["other/a"])),
        ("a,a,b@data0", (["net1", "data0"], [], ["web/a"])),
        ("[]", ([], ["net1", "data0"], [])),
    ],
)
def test_what_follows_from_an_annotation(annotation: str, wanted: tuple[list[str], ...]) -> None:
    assert asked(attached("a,b@data0", "net1", "data0"), annotation) == wanted


def test_equal_elements_are_counted() -> None:
    before = attached("a,a,a", "net1", "net2", "net3")
    assert asked(before, "a,a,a") == (["net1", "net2", "net3"], [], [])
    assert asked(before, "a") == (["net1"], ["net2", "net3"], [])
    assert asked(before, "a,a,a,a") == (["net1", "net2", "net3"], [], ["web/a"])


def test_other_spellings_are_equal_elements() -> None:
    one = elements([{"name": "a", "cni-args": {"x": 1, "y": {"b": 2, "a": 3}}, "interfaceRequest": "data0"}])
    two = elements(
        [{"cni-args": {"y": {"a": 3, "b": 2}, "x": 1}, "interface": "data0", "namespace": "web", "name": "a"}]
    )
    assert one[0].canonical == two[0].canonical
    assert wanted("b, a", "web") == wanted("web/a,web/b", "web")


@pytest.mark.parametrize(
    "key",
    [
        {"ips": ["10.1.0.9/24"]},
        {"mac": "02:00:00:00:00:01"},
        {"infiniband-guid": "c2:11:22:33:44:55:66:77"},
        {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]},
        {"bandwidth": {"ingressRate": 1000, "ingressBurst": 1000}},
        {"deviceID": "0000:01:00.1"},
        {"cni-args": {"x": 1}},
        {"default-route": ["10.1.0.1"]},
        {"default-route": []},
        {"ipam-claim-reference": "claim"},
        {"interface": "data0"},
        {"namespace": "other"},
    ],
)
def test_each_key_makes_another_element(key: dict[str, Any]) -> None:
    plain, other = elements([{"name": "a"}]), elements([{"name": "a", **key}])
    assert plain[0].canonical != other[0].canonical
    assert json.loads(other[0].canonical) == {"namespace": "web", "name": "a", **key}


def test_an_unknown_key_makes_no_other_element() -> None:
    assert elements([{"name": "a", "vendor": 1}])[0].canonical == elements([{"name": "a"}])[0].canonical


@pytest.mark.parametrize("cut_off", [{"result": None}, {"leaving": True}])
def test_what_was_cut_off_leaves_and_comes_anew(cut_off: dict[str, Any]) -> None:
    before = attached("a,b", "net1", "net2")
    cluster, first, second = before.attachments
    before = replace(before, attachments=(cluster, replace(first, **cut_off), second))
    assert before.attachments[1].attached_for == LEAVING
    assert asked(before, "a,b") == (["net2"], ["net1"], ["web/a"])
    assert names(before, "a,b") == ["net1"]
    assert asked(before, "b") == (["net2"], ["net1"], [])


def test_what_no_element_asked_for_never_leaves() -> None:
    hot = attachment("web/hot", "net5", hot_plugged=True)
    every = attachment("kube-system/every", "net1")
    auxiliary = attachment("chain", "eth0", auxiliary=True)
    before = record(every, auxiliary, hot)
    assert asked(before, "a") == (["net1", "eth0", "net5"], [], ["web/a"])
    assert asked(before, "[]") == (["net1", "eth0", "net5"], [], [])


@pytest.mark.parametrize(
    ("annotation", "new"),
    [
        ("a,b@data0", []),
        ("b,a@net1", []),
        ("a,b@data0,c", ["web/c"]),
        ("a,a", ["web/a"]),
        ("a@data7", ["web/a"]),
    ],
)
def test_after_an_upgrade_what_is_there_does_not_come_again(annotation: str, new: list[str]) -> None:
    before = record(attachment("web/a", "net1"), attachment("web/b", "data0"))
    assert asked(before, annotation) == (["net1", "data0"], [], new)


@pytest.mark.parametrize("annotation", ["a,a@net1", "a@net1,a"])
def test_after_an_upgrade_an_element_with_an_interface_takes_the_attachment_of_that_name(annotation: str) -> None:
    before = record(attachment("web/a", "net1"), attachment("web/a", "net2"))
    assert asked(before, annotation) == (["net1", "net2"], [], [])


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        ("a,b,c,d", ["net4"]),
        ("a,c,d", ["net2"]),
        ("d,c,e", ["net1", "net2"]),
        ("a,b,c,d@net4,e", ["net4", "net5"]),
        ("a,b,c,e,d@net4", ["net5", "net4"]),
        # The network under a name is replaced.
        ("a,b,d@net3", ["net3"]),
    ],
)
def test_names_of_new_networks(annotation: str, wanted: list[str]) -> None:
    assert names(attached("a,b,c", "net1", "net2", "net3"), annotation) == wanted


def test_names_of_links_that_are_nobodys_are_left_out() -> None:
    assert names(attached("a", "net1"), "a,b,c", taken=["net2", "net4"]) == ["net3", "net5"]


@pytest.mark.parametrize(
    ("annotation", "taken", "words"),
    [
        ("a,b@net1", (), "interface name 'net1' of network web/b is taken by network web/a"),
        ("a,b@eth0", (), "interface name 'eth0' of network web/b is taken by network kube-system/cluster"),
        ("a,b@vpn0", ("vpn0",), "interface 'vpn0' of network web/b already exists in the pod"),
    ],
)
def test_a_name_that_is_taken_is_refused(annotation: str, taken: Sequence[str], words: str) -> None:
    with pytest.raises(InvalidNetworkConfigError, match=words):
        names(attached("a", "net1"), annotation, taken)


def test_no_name_is_free() -> None:
    with pytest.raises(InvalidNetworkConfigError, match="no interface name is free for network web/b up to net256"):
        names(attached("a", "net1"), "b", taken=[f"net{number}" for number in range(1, 257)])


@pytest.mark.parametrize(("annotation", "is_refused"), [("a,b", False), ("a,GATE", True), ("GATE", False)])
def test_a_second_default_route_is_refused(annotation: str, is_refused: bool) -> None:
    gate = {"name": "gate", "default-route": ["10.1.0.1"]}
    items: list[dict[str, Any]] = [gate if name == "GATE" else {"name": name} for name in annotation.split(",")]
    before = record(attachment("web/a", "net1", elements("a")[0].canonical, default_route=("10.9.0.1",)))
    found = between(before, elements(items))
    if is_refused:
        with pytest.raises(InvalidNetworkConfigError, match="default-route is set twice: for network web/a"):
            refuse_second_gateway(found)
    else:
        refuse_second_gateway(found)


@pytest.mark.parametrize("annotation", ["a@@", "{", '["a"]', "a@b,c@b"])
def test_a_malformed_annotation_wants_nothing(annotation: str) -> None:
    with pytest.raises(CniError):
        wanted(annotation, "web")


# --- in general ------------------------------------------------------------------------------------------------------

ELEMENTS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "", "", "net1", "net2", "net4", "data0", "data1"])),
    max_size=8,
    unique_by=lambda item: item[1] or object(),
).map(lambda found: ",".join(f"{name}@{ifname}" if ifname else name for name, ifname in found) or "[]")


def apply(before: ContainerRecord, annotation: str) -> tuple[ContainerRecord, Changes]:
    """Return the record after the change, all of which succeeds, and the change. Raises CniError."""
    found = between(before, elements(annotation))
    ifnames = interface_names(found, lambda _: False)
    new = zip(found.new, ifnames, strict=True)
    made = tuple(attachment(str(item), name, item.canonical) for item, name in new)
    return replace(before, attachments=(*found.staying, *made)), found


@given(st.lists(ELEMENTS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_in_any_sequence_names_stay_and_never_collide(annotations: list[str], dice: Any) -> None:
    now = record()
    for annotation in annotations:
        before = {item.ifname: item for item in now.attachments}
        try:
            after, found = apply(now, annotation)
        except InvalidNetworkConfigError:
            # An explicit name is taken by what stays.
            explicit = {item.interface for item in elements(annotation)}
            assert explicit & set(before)
            continue
        ifnames = [item.ifname for item in after.attachments]
        assert len(set(ifnames)) == len(ifnames)
        assert all(before[item.ifname] is item for item in found.staying)
        # What the annotation asks for is attached, no more and no less.
        assert tuple(sorted(item.attached_for for item in after.attachments[1:])) == wanted(annotation, "web")
        pairs = zip(found.new, ifnames[len(found.staying) :], strict=True)
        assert all(item.interface in ("", name) for item, name in pairs)
        # Applied twice, it changes nothing; nor does another order.
        shuffled = [*elements(annotation)]
        dice.shuffle(shuffled)
        assert between(after, shuffled) == Changes(after.attachments)
        other = between(now, shuffled)
        assert (other.staying, other.leaving) == (found.staying, found.leaving)
        assert sorted(map(str, other.new)) == sorted(map(str, found.new))
        now = after


@given(ELEMENTS, ELEMENTS, st.sets(st.sampled_from(["net1", "net2", "net3", "data0"])))
def test_a_name_of_somebody_elses_link_is_never_given(before: str, after: str, taken: set[str]) -> None:
    now, _ = apply(record(), before)
    found = between(now, elements(after))
    try:
        ifnames = interface_names(found, taken.__contains__)
    except InvalidNetworkConfigError:
        return
    assert not taken.intersection(ifnames)
    assert not {item.ifname for item in found.staying}.intersection(ifnames)
