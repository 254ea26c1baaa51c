"""`00-multus.conf`: upstream's recorded output, its thirteen specified cases, and what upstream gets wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon import settings
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, IncompatibleVersionError
from multus_daemon.spec.netconf import choose_version, generate

RECORDS = json.loads((Path(__file__).parents[3] / "data" / "upstream-v4.3.0.json").read_text())
PATH = "/host/etc/cni/net.d/10-net.conflist"


def generated(daemon: dict[str, Any], primary: dict[str, Any], path: str = PATH) -> str:
    found = settings.from_object(daemon, "test")
    return generate(found.given, conf.parse(json.dumps(primary).encode()), path).decode()


@pytest.mark.conformance("node-1")
@pytest.mark.parametrize(
    "record", [record for record in RECORDS if "generated-config" in record["name"]], ids=lambda record: record["name"]
)
def test_every_byte_is_upstreams(record: dict[str, Any]) -> None:
    suffix = "conflist" if "plugins" in record["primary"] else "conf"
    path = f"/etc/cni/net.d/10-cluster.{suffix}"
    assert generated(record["daemonConfig"], record["primary"], path) == record["content"]


def test_the_five_records_are_there() -> None:
    assert sum("generated-config" in record["name"] for record in RECORDS) == 5


@pytest.mark.conformance("node-1")
def test_basic() -> None:
    assert generated({"cniVersion": "0.4.0", "name": "ignored"}, {"name": "a", "type": "x", "cniVersion": "1.0.0"}) == (
        '{"cniVersion":"0.4.0","name":"multus-cni-network","clusterNetwork":"' + PATH + '","type":"multus-shim"}'
    )


@pytest.mark.conformance("node-12")
def test_every_key_in_its_place() -> None:
    daemon = {
        "overrideNetworkName": True,
        "daemonSocketDir": "/run/m",
        "auxiliaryCNIChainName": "aux",
        "cniDir": "/c",
        "type": "multus-x",
        "globalNamespaces": "a,b",
        "namespaceIsolation": True,
        "clusterNetwork": "laid over requests",
        "logOptions": {"compress": True, "maxBackups": 1, "maxSize": 2, "maxAge": 3},
        "logToStderr": True,
        "logLevel": "debug",
        "logFile": "/l<>&",
        "cniVersion": "0.3.1",
        "capabilities": {"zone": True, "off": False},
        "binDir": "/b",
        # Keys that stay with the daemon:
        "chrootDir": "/hostroot",
        "cniConfigDir": "/host/etc/cni/net.d",
        "confDir": "/d",
        "defaultNetworks": ["x"],
        "forceCNIVersion": True,
        "kubeconfig": "/k",
        "metricsPort": 1,
        "multusAutoconfigDir": "/host/etc/cni/net.d",
        "multusConfigFile": "auto",
        "multusMasterCNI": "10-net.conflist",
        "multusNamespace": "n",
        "readinessindicatorfile": "/r",
        "runtimeConfig": {"mac": "x"},
        "socketDir": "/s",
        "systemNamespaces": [],
    }
    assert generated(daemon, {"name": "net", "type": "x", "capabilities": {"mac": True}}) == (
        '{"binDir":"/b","capabilities":{"mac":true,"off":false,"zone":true},"cniVersion":"0.3.1",'
        '"logFile":"/l\\u003c\\u003e\\u0026","logLevel":"debug","logToStderr":true,'
        '"logOptions":{"maxAge":3,"maxSize":2,"maxBackups":1,"compress":true},"name":"net",'
        f'"clusterNetwork":"{PATH}","namespaceIsolation":true,"globalNamespaces":"a,b","type":"multus-x",'
        '"cniDir":"/c","auxiliaryCNIChainName":"aux","daemonSocketDir":"/run/m","overrideNetworkName":true}'
    )


@pytest.mark.parametrize("daemon", [{"logToStderr": False}, {"namespaceIsolation": False}, {"logFile": ""}, {}])
def test_what_is_empty_is_left_out(daemon: dict[str, Any]) -> None:
    keys = json.loads(generated(daemon, {"name": "a", "type": "x", "cniVersion": "1.0.0"}))
    assert list(keys) == ["cniVersion", "name", "clusterNetwork", "type"]


CAPABILITIES: list[tuple[dict[str, Any], dict[str, bool] | None]] = [
    ({"type": "x"}, None),
    ({"type": "x", "capabilities": None}, None),
    ({"type": "x", "capabilities": {"portMappings": True}}, {"portMappings": True}),
    ({"type": "x", "capabilities": {"b": True, "a": True}}, {"a": True, "b": True}),
    ({"type": "x", "capabilities": {"a": True, "b": False, "c": None}}, {"a": True}),
    ({"plugins": [{"type": "x", "capabilities": {"a": True}}, {"type": "y"}]}, {"a": True}),
    (
        {"plugins": [{"type": "x", "capabilities": {"a": True}}, {"type": "y", "capabilities": {"b": True}}]},
        {"a": True, "b": True},
    ),
    (
        {"plugins": [{"type": "x", "capabilities": {"a": False}}, {"type": "y", "capabilities": {"b": True}}]},
        {"b": True},
    ),
    ({"plugins": [{"type": "x"}], "capabilities": {"a": True}}, None),
]


@pytest.mark.conformance("node-2", "node-3", "node-4", "node-5", "node-6", "node-7")
@pytest.mark.parametrize(("primary", "capabilities"), CAPABILITIES)
def test_capabilities_are_those_of_all_plugins(primary: dict[str, Any], capabilities: dict[str, bool] | None) -> None:
    assert json.loads(generated({}, {"name": "a", **primary})).get("capabilities") == capabilities


def test_configured_capabilities_stay_beside_those_of_the_primary() -> None:
    found = json.loads(
        generated({"capabilities": {"a": False, "b": False}}, {"name": "n", "type": "x", "capabilities": {"a": True}})
    )
    assert found["capabilities"] == {"a": True, "b": False}


@pytest.mark.weak_spot(48)
@pytest.mark.conformance("node-12")
def test_capabilities_and_name_are_those_of_now() -> None:
    daemon = {"overrideNetworkName": True}
    before = json.loads(generated(daemon, {"name": "one", "type": "x", "capabilities": {"a": True}}))
    after = json.loads(generated(daemon, {"name": "two", "type": "x", "capabilities": {"b": True}}))
    assert (before["name"], before["capabilities"]) == ("one", {"a": True})
    assert (after["name"], after["capabilities"]) == ("two", {"b": True})


@pytest.mark.conformance("node-13")
@pytest.mark.parametrize(
    ("wanted", "primary", "version"),
    [
        ("0.4.0", "0.3.1", "0.4.0"),  # upstream refuses this one
        ("1.1.0", "0.3.1", "1.1.0"),
        ("0.3.1", "1.1.0", "0.3.1"),
        ("0.4.0", "", "0.4.0"),
        ("", "0.3.1", "0.3.1"),
        ("", "1.1.0", "1.1.0"),
        ("", "1.2.0", "1.1.0"),
        ("", "0.9.0", "0.3.1"),
        ("", "", "0.3.1"),
    ],
)
def test_no_primary_network_is_too_old_or_too_new(wanted: str, primary: str, version: str) -> None:
    assert choose_version(wanted, primary) == version
    config = {"name": "a", "type": "x", "cniVersion": primary}
    assert json.loads(generated({"cniVersion": wanted}, config))["cniVersion"] == version


@pytest.mark.parametrize("version", ["0.4", "2.0.0", "latest", "1.0.0 "])
def test_a_version_that_there_is_not_is_named(version: str) -> None:
    with pytest.raises(IncompatibleVersionError, match=r"^cniVersion '.*' is not supported; use one of 0\.1\.0"):
        generated({"cniVersion": version}, {"name": "a", "type": "x"})


@pytest.mark.weak_spot(24)
@pytest.mark.parametrize(
    "primary",
    [
        b'{"name":"a","plugins":{}}',
        b'{"name":"a","plugins":[1]}',
        b'{"name":"a","plugins":[]}',
        b'{"name":"a","plugins":[{"type":"x","capabilities":{"a":"true"}}]}',
        b'{"name":"a","type":"x","capabilities":{"a":1}}',
        b'{"name":"a","type":"x","capabilities":[]}',
        b'{"name":1,"type":"x"}',
        b'{"name":"a","type":1}',
        b'{"name":"a","type":"x","cniVersion":1}',
        b'{"name":"a"}',
        b"[]",
        b"null",
        b"",
        b'{"name":"a","ty',
    ],
)
def test_a_malformed_primary_is_an_error_with_its_cause(primary: bytes) -> None:
    with pytest.raises(CniError) as caught:
        generate({}, conf.parse(primary), PATH)
    assert caught.value.msg


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYS = st.sampled_from(["name", "type", "plugins", "capabilities", "cniVersion", "cniVersions", "ipam"])


@pytest.mark.weak_spot(24)
@given(st.dictionaries(KEYS, JSON | st.lists(st.dictionaries(KEYS, JSON))))
def test_nothing_but_cni_errors_is_raised(primary: dict[str, Any]) -> None:
    try:
        data = generate({}, conf.parse(json.dumps(primary).encode()), PATH)
    except CniError:
        return
    assert json.loads(data)["clusterNetwork"] == PATH


def test_the_daemons_null_is_absent() -> None:
    found = json.loads(generated({"capabilities": None, "logOptions": None}, {"name": "a", "type": "x"}))
    assert list(found) == ["cniVersion", "name", "clusterNetwork", "type"]
