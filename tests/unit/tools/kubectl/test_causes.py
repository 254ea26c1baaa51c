"""Check which networks a pod lacks, by its annotations."""

import json

import pytest

from multus_tools.kubectl import causes
from tests.unit.tools.kubectl.conftest import NETWORKS_ANNOTATION, STATUS_ANNOTATION


def entry(name, interface):
    return {"name": name, "interface": interface, "ips": [], "dns": {}}


@pytest.mark.parametrize(
    ("wanted", "status", "lacks"),
    [
        ("blue", None, ("a/blue",)),
        ("blue,b/green", [entry("cluster", "eth0"), entry("a/blue", "net1")], ("b/green",)),
        ("blue", [entry("a/blue", "net1")], ()),
        ("blue,blue", [entry("a/blue", "net1")], ("a/blue",)),
        ("blue@x,blue", [entry("a/blue", "net2")], ("a/blue@x",)),
        ("blue,blue@x", [entry("a/blue", "x"), entry("a/blue", "net1")], ()),
        ("blue,blue@x", [entry("a/blue", "x")], ("a/blue",)),
        ('[{"name": "blue", "namespace": "b"}]', [], ("b/blue",)),
        ("", None, ()),
    ],
)
def test_what_is_asked_for_and_not_there(wanted, status, lacks):
    annotations = {NETWORKS_ANNOTATION: wanted}
    if status is not None:
        annotations[STATUS_ANNOTATION] = json.dumps(status)
    assert causes.networks_of("a", annotations).lacks == lacks


@pytest.mark.parametrize("status", ["", "{", "5", "[5]", '{"name": "a/blue"}', "[" * 100_000])
def test_a_status_that_is_none_has_nothing(status):
    found = causes.networks_of("a", {NETWORKS_ANNOTATION: "blue", STATUS_ANNOTATION: status})
    assert (found.lacks, found.attached) == (("a/blue",), ())


def test_an_annotation_that_can_not_be_read():
    found = causes.networks_of("a", {NETWORKS_ANNOTATION: '[{"nme": "blue"}]'})
    assert "name" in found.problem
    assert found.lacks == ('[{"nme": "blue"}]',)


def test_what_is_attached():
    status = json.dumps([entry("cluster", "eth0"), entry("a/blue", "net1")])
    assert causes.networks_of("a", {STATUS_ANNOTATION: status}).attached == ("cluster@eth0", "a/blue@net1")
