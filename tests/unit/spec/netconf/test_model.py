import json
from typing import Any

import pytest

from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InvalidNetworkConfigError
from multus_daemon.spec.netconf import NetConf, load

DELEGATE = {"name": "a", "cniVersion": "1.0.0", "type": "bridge"}


def read(fields: object, **overlay: Any) -> NetConf:
    return load(json.dumps(fields).encode(), overlay)


@pytest.mark.conformance("config-5")
def test_defaults() -> None:
    assert load(b"{}", {}) == NetConf(
        name="",
        cni_version="",
        cluster_network="",
        delegates=(),
        default_networks=(),
        system_namespaces=("kube-system",),
        multus_namespace="kube-system",
        namespace_isolation=False,
        global_namespaces=frozenset({"default"}),
        conf_dir="/etc/cni/multus/net.d",
        runtime_config={},
        valid_attachments=None,
    )


@pytest.mark.conformance("config-1", "config-6")
def test_every_key() -> None:
    found = read(
        {
            "cniVersion": "1.1.0",
            "name": "multus-cni-network",
            "type": "multus-shim",
            "clusterNetwork": "flannel",
            "defaultNetworks": ["a", "b"],
            "systemNamespaces": ["x"],
            "multusNamespace": "m",
            "namespaceIsolation": True,
            "globalNamespaces": "default, other ,,",
            "confDir": "/c",
            "runtimeConfig": {"portMappings": []},
            "somethingElse": 1,
        }
    )
    assert found == NetConf(
        name="multus-cni-network",
        cni_version="1.1.0",
        cluster_network="flannel",
        default_networks=("a", "b"),
        system_namespaces=("x",),
        multus_namespace="m",
        namespace_isolation=True,
        global_namespaces=frozenset({"default", "other"}),
        conf_dir="/c",
        runtime_config={"portMappings": []},
    )


@pytest.mark.parametrize(
    "key",
    ["clusterNetwork", "defaultNetworks", "multusNamespace", "globalNamespaces", "confDir", "runtimeConfig", "name"],
)
def test_null_is_absent(key: str) -> None:
    assert read({key: None}) == load(b"{}", {})


@pytest.mark.parametrize("key", ["multusNamespace", "globalNamespaces", "confDir", "clusterNetwork"])
def test_empty_text_is_the_default(key: str) -> None:
    assert read({key: ""}) == load(b"{}", {})


def test_an_empty_list_of_system_namespaces_is_meant() -> None:
    assert read({"systemNamespaces": []}).system_namespaces == ()


# --- the daemon's keys over those of the request ---------------------------------------------------------------------


@pytest.mark.conformance("server-9")
@pytest.mark.parametrize("spelling", ["clusterNetwork", "ClusterNetwork", "clusternetwork"])
@pytest.mark.parametrize("overlaid", ["clusterNetwork", "CLUSTERNETWORK"])
def test_the_daemons_keys_win_in_any_case(spelling: str, overlaid: str) -> None:
    assert read({spelling: "request", "name": "n"}, **{overlaid: "daemon"}).cluster_network == "daemon"


@pytest.mark.conformance("server-10")
def test_no_second_spelling_in_the_request_gets_around_the_daemons_key() -> None:
    assert read({"clusterNetwork": "request", "CLUSTERNETWORK": "trick"}, clusterNetwork="daemon").cluster_network == (
        "daemon"
    )


@pytest.mark.conformance("server-10")
def test_other_keys_of_the_request_stay() -> None:
    found = read({"name": "n", "confDir": "/request", "clusterNetwork": "c"}, multusNamespace="daemon")
    assert (found.name, found.conf_dir, found.multus_namespace) == ("n", "/request", "daemon")
    assert found.cluster_network == "c"


@pytest.mark.conformance("config-7")
@pytest.mark.parametrize("previous", [{"cniVersion": "9.9.9"}, {"ips": [{"address": "10.1.0.2/24"}]}, {}, 1, None])
def test_the_runtimes_previous_result_is_not_looked_at(previous: object) -> None:
    """It is the cluster network's, of which a record is kept: what counts for CHECK and DEL is in there."""
    assert read({"name": "n", "prevResult": previous}) == read({"name": "n"})


@pytest.mark.conformance("server-10")
def test_lists_and_objects_are_replaced_not_merged() -> None:
    found = read({"defaultNetworks": ["a"], "systemNamespaces": ["x"]}, defaultNetworks=["b"], systemNamespaces=[])
    assert (found.default_networks, found.system_namespaces) == (("b",), ())


def test_the_overlay_is_not_changed() -> None:
    overlay = {"confDir": "/c"}
    load(b'{"confdir":"/x"}', overlay)
    assert overlay == {"confDir": "/c"}


# --- delegates -------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("config-1", "config-23")
def test_delegates() -> None:
    found = read({"delegates": [DELEGATE, {"name": "b", "plugins": [{"type": "x"}]}]})
    assert [(delegate.name, delegate.type, delegate.is_list) for delegate in found.delegates] == [
        ("a", "bridge", False),
        ("b", "x", True),
    ]


def test_delegates_are_passed_over_where_there_is_a_cluster_network() -> None:
    assert read({"clusterNetwork": "c", "delegates": [{"broken": 1}]}).delegates == ()


@pytest.mark.conformance("config-10", "verbs-10")
@pytest.mark.parametrize(
    ("delegates", "kind", "message"),
    [
        ([DELEGATE, {"name": "b"}], InvalidNetworkConfigError, r"neither 'type' nor 'plugins' \(delegates\[1\] of"),
        ([{"name": "b", "plugins": []}], InvalidNetworkConfigError, r"no plugins in list \(delegates\[0\] of"),
        ([{"type": "x"}], InvalidNetworkConfigError, r"missing network name \(delegates\[0\] of"),
        ([DELEGATE, DELEGATE, {"name": 1}], DecodingFailureError, r"name: a string .*\(delegates\[2\] of"),
        ([DELEGATE, "x"], DecodingFailureError, r"delegates\[1\]: an object is needed, not a string"),
        ([None], DecodingFailureError, r"delegates\[0\]: an object is needed, not null"),
        ({}, DecodingFailureError, "delegates: an array is needed"),
    ],
)
def test_delegates_that_can_not_be_used_are_named_by_their_index(
    delegates: object, kind: type[CniError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read({"delegates": delegates})


# --- GC --------------------------------------------------------------------------------------------------------------

KNOWN = [{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c2", "ifname": "eth1"}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"cni.dev/valid-attachments": None}, ()),
        ({"CNI.dev/Attachments": None}, ()),
        ({"cni.dev/valid-attachments": None, "cni.dev/attachments": None}, ()),
        ({"cni.dev/valid-attachments": None, "cni.dev/attachments": KNOWN[:1]}, (("c1", "eth0"),)),
        ({"cni.dev/valid-attachments": []}, ()),
        ({"cni.dev/valid-attachments": KNOWN}, (("c1", "eth0"), ("c2", "eth1"))),
        ({"cni.dev/attachments": KNOWN}, (("c1", "eth0"), ("c2", "eth1"))),
        ({"cni.dev/attachments": KNOWN, "cni.dev/valid-attachments": KNOWN[:1]}, (("c1", "eth0"),)),
        ({"cni.dev/valid-attachments": KNOWN[:1], "cni.dev/attachments": KNOWN}, (("c1", "eth0"),)),
        ({"cni.dev/attachments": KNOWN, "cni.dev/valid-attachments": []}, ()),
        ({"cni.dev/valid-attachments": [{"ContainerId": "c", "IfName": "i", "x": 1}]}, (("c", "i"),)),
    ],
)
def test_valid_attachments(fields: object, expected: object) -> None:
    assert read(fields).valid_attachments == expected


@pytest.mark.parametrize("value", [{}, "x", ["c1"], [None], [{"containerID": 1}], [{"containerID": "c", "ifname": []}]])
@pytest.mark.parametrize("key", ["cni.dev/valid-attachments", "cni.dev/attachments"])
def test_valid_attachments_of_another_shape(key: str, value: object) -> None:
    # To take them for "none are valid" would remove every container's networks.
    with pytest.raises(DecodingFailureError, match="is needed"):
        read({key: value})


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("config-2")
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", "unexpected end of JSON input"),
        (b"[]", "a JSON object is needed"),
        (b'{"name":[]}', "name: a string"),
        (b'{"clusterNetwork":1}', "clusterNetwork: a string"),
        (b'{"defaultNetworks":"a"}', "defaultNetworks: an array"),
        (b'{"defaultNetworks":["a",1]}', r"defaultNetworks\[1\]: a string"),
        (b'{"systemNamespaces":{}}', "systemNamespaces: an array"),
        (b'{"namespaceIsolation":"true"}', "namespaceIsolation: a boolean"),
        (b'{"globalNamespaces":["a"]}', "globalNamespaces: a string"),
        (b'{"runtimeConfig":[]}', "runtimeConfig: an object"),
    ],
)
def test_what_can_not_be_decoded(stdin: bytes, message: str) -> None:
    with pytest.raises(DecodingFailureError, match=message) as caught:
        load(stdin, {})
    assert caught.value.msg.startswith("Multus CNI configuration: ")


# --- isolation -------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("config-5")
@pytest.mark.parametrize(
    ("isolation", "namespace", "expected"),
    [
        (False, "other", True),
        (True, "own", True),
        (True, "default", False),
        (True, "shared", True),
        (True, "other", False),
    ],
)
def test_namespace_isolation(isolation: bool, namespace: str, expected: bool) -> None:
    found = read({"namespaceIsolation": isolation, "globalNamespaces": "shared"})
    assert found.allows("own", namespace) is expected
