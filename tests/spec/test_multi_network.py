"""The requirements of the NPWG multi-network specification, version 1.3, for a delegating plugin.

The engine runs whole: the real resolver, chain, store and result cache, over a pod that is declared in memory and
plugins that note how they were called. Numbers in docstrings are the specification's sections; where this program
takes upstream's side instead, `docs/compatibility.md` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.cluster.kube import objects
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, UnsupportedFieldError
from multus_daemon.spec.nad.selection import RESOURCE_NAME_ANNOTATION, NetworkAttachmentDefinition
from tests.fakes.runner import PluginCall
from tests.unit.pod.conftest import NETNS, Engine

ADDRESS = "10.1.0.9"
MAC = "02:00:00:00:00:09"

# Key of a selection element, a good value, the capability, and what the plugin reads as runtimeConfig.
REQUESTS: dict[str, tuple[Any, str, Any]] = {
    "ips": ([f"{ADDRESS}/24"], "ips", [f"{ADDRESS}/24"]),
    "mac": (MAC, "mac", MAC),
    "portMappings": (
        [{"hostPort": 8080, "containerPort": 80, "protocol": "TCP"}, {"hostPort": 53, "containerPort": 53}],
        "portMappings",
        [
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
            {"hostPort": 53, "containerPort": 53, "protocol": "tcp"},
        ],
    ),
    "bandwidth": (
        {"ingressRate": 2048, "ingressBurst": 300, "egressRate": 8000, "egressBurst": 200},
        "bandwidth",
        {"ingressRate": 2048, "ingressBurst": 300, "egressRate": 8000, "egressBurst": 200},
    ),
    "infiniband-guid": ("24:8a:07:03:00:8d:ae:2f", "infinibandGUID", "24:8a:07:03:00:8d:ae:2f"),
}

INVALID: list[tuple[str, Any]] = [
    ("ips", ["10.1.0.300"]),
    ("ips", ["10.1.0.9/33"]),
    ("ips", ADDRESS),
    ("mac", "02:00:00:00:00"),
    ("mac", "02:00:00:00:00:01:02:03"),
    ("interface", "a/b"),
    ("interface", "sixteen-letters-"),
    ("portMappings", [{"hostPort": 8080}]),
    ("portMappings", [{"hostPort": 0, "containerPort": 80}]),
    ("portMappings", [{"hostPort": 8080, "containerPort": 65536}]),
    ("portMappings", [{"hostPort": 8080, "containerPort": 80, "protocol": "icmp"}]),
    ("bandwidth", {}),
    ("bandwidth", {"ingressRate": 0}),
    ("bandwidth", {"ingressBurst": 300}),
    ("bandwidth", {"egressRate": 8000, "ingressBurst": 300}),
    ("infiniband-guid", MAC),
    ("default-route", ["10.1.0.0/24"]),
    ("name", ""),
    ("name", 7),
    ("namespace", "Web"),
    ("ipam-claim-reference", 7),
]


def made(invocation: Invocation) -> bytes:
    """Return the result of a plugin that made the interface with the requested IP and hardware addresses."""
    config = json.loads(invocation.stdin)
    asked = config.get("runtimeConfig", {})
    address = asked.get("ips", [f"10.1.0.{2 + int(invocation.ifname[-1])}/24"])[0]
    interface = {"name": invocation.ifname, "sandbox": NETNS, "mac": asked.get("mac", "02:00:00:00:00:01")}
    return json.dumps(
        {"cniVersion": config["cniVersion"], "interfaces": [interface], "ips": [{"address": address, "interface": 0}]}
    ).encode()


class Node:
    """A node with one pod `web/p1`, whose cluster network is `cluster`."""

    def __init__(self, directory: Path) -> None:
        self.engine = Engine()
        # SPEC sections 7.2 and 7.3 ask for this; see attachConcurrency.
        self.engine.attach_concurrency = 1
        self.plugins = self.engine.use_files(directory)
        self.plugins.answers |= {(plugin, "ADD"): made for plugin in ("main", "first", "second", "cluster")}
        self.conf_dir = directory / "net.d"
        self.conf_dir.mkdir()
        self.engine.files = NodeConfFiles()  # type: ignore[assignment]  # a real one serves as well
        # CHECK is that of the SPEC, which calls the plugins.
        self.engine.overlay |= {"confDir": str(self.conf_dir), "strictCheck": True}
        self.define("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "cluster"}, namespace="kube-system")

    def define(
        self, name: str, config: Mapping[str, Any] | str, *, namespace: str = "web", annotations: Mapping[str, str] = {}
    ) -> None:
        """A NetworkAttachmentDefinition."""
        text = config if isinstance(config, str) else json.dumps(config)
        self.engine.cluster.put_network(NetworkAttachmentDefinition(namespace, name, text, annotations))

    def single(self, name: str, **fields: Any) -> None:
        """A definition of one plugin, `main`."""
        self.define(name, {"cniVersion": "1.0.0", "name": name, "type": "main", **fields})

    def call(self, verb: str, annotation: Any = None, **stdin: Any) -> list[PluginCall]:
        """One verb of the runtime, the pod asking for `annotation`; the plugins' calls for it."""
        if annotation is not None:
            self.engine.declare(annotation if isinstance(annotation, str) else json.dumps(annotation))
        self.engine.stdin = stdin
        self.plugins.calls.clear()
        # A daemon that has just started: what DEL and CHECK know is on disk.
        verbs = self.engine.make_verbs()
        work = {"ADD": verbs.add, "DEL": verbs.delete, "CHECK": verbs.check}
        work[verb](self.engine.request(verb))
        return list(self.plugins.calls)

    @property
    def status(self) -> list[dict[str, Any]]:
        """The pod's network-status."""
        entries: list[dict[str, Any]] = json.loads(self.engine.cluster.statuses["web/p1"])
        return entries


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def of(calls: list[PluginCall], *plugins: str) -> list[PluginCall]:
    return [call for call in calls if call.plugin_type in plugins]


# --- 3: definitions --------------------------------------------------------------------------------------------------


@pytest.mark.npwg("3.2a", "3.2b")
@pytest.mark.conformance("pods-6")
@pytest.mark.parametrize("spec", [{}, {"spec": None}, {"spec": {}}, {"spec": {"config": None}}, {"spec": {"other": 1}}])
def test_a_definition_without_a_configuration_names_one_of_the_nodes(node: Node, spec: dict[str, Any]) -> None:
    """3.2."""
    on_disk(node, "a.conflist", plugins=[{"type": "first"}])
    declared = {"metadata": {"namespace": "web", "name": "net-a"}, **spec}
    node.engine.cluster.put_network(objects.decode_network(json.dumps(declared).encode()).value)
    assert [call.plugin_type for call in node.call("ADD", "net-a")] == ["cluster", "first"]


@pytest.mark.npwg("3.2c", "3.4.2")
@pytest.mark.parametrize(
    "config",
    [
        {"cniVersion": "1.0.0", "type": "main"},
        {"cniVersion": "1.0.0", "name": "", "plugins": [{"type": "first"}, {"type": "second"}]},
    ],
    ids=["single", "list"],
)
def test_a_missing_name_is_that_of_the_definition(node: Node, config: dict[str, Any]) -> None:
    """3.2, 3.4.2."""
    node.define("net-a", config)
    for verb in ("ADD", "CHECK", "DEL"):
        calls = of(node.call(verb, "net-a"), "main", "first", "second")
        assert len(calls) == len(config.get("plugins", [1]))
        assert {call.config["name"] for call in calls} == {"net-a"}


@pytest.mark.npwg("3.4.3", "5.3.1")
def test_the_names_of_definition_and_configuration_may_differ(node: Node) -> None:
    """3.4.3."""
    node.define("net-a", {"cniVersion": "1.0.0", "name": "datacentre-7", "type": "main"})
    (call,) = of(node.call("ADD", "net-a"), "main")
    assert call.config["name"] == "datacentre-7"
    assert node.status[1]["name"] == "web/net-a"


def on_disk(node: Node, file: str, **fields: Any) -> None:
    (node.conf_dir / file).write_text(json.dumps({"cniVersion": "1.0.0", "name": "net-a"} | fields))


@pytest.mark.npwg("3.4.1")
def test_a_definition_with_a_configuration_is_not_looked_up_on_the_node(node: Node) -> None:
    """3.4.1, first rule."""
    on_disk(node, "a.conflist", plugins=[{"type": "first"}])
    node.single("net-a")
    assert [call.plugin_type for call in node.call("ADD", "net-a")] == ["cluster", "main"]


@pytest.mark.npwg("3.4.1")
def test_a_list_on_the_node_comes_before_a_single_configuration(node: Node) -> None:
    """3.4.1, second and third rule."""
    on_disk(node, "a.conf", type="main")
    node.define("net-a", "")
    assert [call.plugin_type for call in node.call("ADD", "net-a")] == ["cluster", "main"]
    node.call("DEL")
    on_disk(node, "z.conflist", plugins=[{"type": "first"}, {"type": "second"}])
    assert [call.plugin_type for call in node.call("ADD", "net-a")] == ["cluster", "first", "second"]


@pytest.mark.npwg("3.4.1")
def test_a_network_that_nobody_knows_fails(node: Node) -> None:
    """3.4.1, last rule."""
    on_disk(node, "a.conf", type="main", name="net-b")
    node.define("net-a", "")
    with pytest.raises(InvalidNetworkConfigError, match="^spec.config is empty"):
        node.call("ADD", "net-a")
    assert node.plugins.calls == []


# --- 4: selection ----------------------------------------------------------------------------------------------------


@pytest.mark.npwg("4.1", "4.1.1", "4.1.2", "4.1.2.1.1-2", "5.3.1")
@pytest.mark.parametrize(
    "annotation",
    ["net-a,net-b,other-ns/net-c", [{"name": "net-a"}, {"name": "net-b"}, {"name": "net-c", "namespace": "other-ns"}]],
    ids=["comma", "json"],
)
def test_both_formats(node: Node, annotation: Any) -> None:
    """4.1, 4.1.1, 4.1.2, 4.1.2.1.1, 4.1.2.1.2."""
    node.single("net-a")
    node.single("net-b")
    node.define("net-c", {"cniVersion": "1.0.0", "name": "net-c", "type": "main"}, namespace="other-ns")
    calls = of(node.call("ADD", annotation), "main")
    assert [(call.config["name"], call.invocation.ifname) for call in calls] == [
        ("net-a", "net1"),
        ("net-b", "net2"),
        ("net-c", "net3"),
    ]
    assert [entry["name"] for entry in node.status[1:]] == ["web/net-a", "web/net-b", "other-ns/net-c"]


@pytest.mark.npwg("4.1.2.1")
def test_keys_of_others_are_passed_over(node: Node) -> None:
    """4.1.2.1."""
    node.single("net-a")
    (call,) = of(node.call("ADD", [{"name": "net-a", "org.foo.bar.key-name": {"x": 1}}]), "main")
    assert call.config.keys() == {"cniVersion", "name", "type"}


@pytest.mark.npwg(
    "4.1.2.1.1-2", "4.1.2.1.3-10", "4.1.2.1.3a", "4.1.2.1.4", "4.1.2.1.5", "4.1.2.1.7", "4.1.2.1.8a", "4.1.2.1.10"
)
@pytest.mark.parametrize(("key", "value"), INVALID)
def test_an_invalid_value_fails_the_add_before_anything_is_attached(node: Node, key: str, value: Any) -> None:
    """4.1.2.1.x: the annotation shall be ignored. So it is, and the pod does not start without its networks."""
    node.single("net-a", capabilities={capability: True for _, capability, _ in REQUESTS.values()})
    with pytest.raises(CniError) as caught:
        node.call("ADD", [{"name": "net-a"}, {"name": "net-a", key: value}])
    assert caught.value.code in (6, 7)
    assert "element 1" in str(caught.value)
    assert node.plugins.calls == []
    assert [reason for reason, _ in node.engine.warnings] == ["InvalidNetwork"]


@pytest.mark.npwg("4.1.2.1.3.2", "4.1.2.1.4.2", "4.1.2.1.7", "4.1.2.1.7.2", "4.1.2.1.8.2a", "4.1.2.1.10.2")
@pytest.mark.conformance("config-15", "verbs-11")
@pytest.mark.parametrize("key", REQUESTS)
def test_a_request_reaches_the_plugins_that_declare_it(node: Node, key: str) -> None:
    """4.1.2.1.3.2, .4.2, .7.2, .8.2, .10.2: in runtimeConfig, on ADD and DEL alike."""
    value, capability, expected = REQUESTS[key]
    plugins = [{"type": "first"}, {"type": "second", "capabilities": {capability: True}}]
    node.define("net-a", {"cniVersion": "1.0.0", "name": "net-a", "plugins": plugins})
    node.engine.overlay["strictRequests"] = True
    # The last result of a list counts; `first` answers by its runtimeConfig, which is empty.
    for verb in ("ADD", "CHECK", "DEL"):
        calls = of(node.call(verb, [{"name": "net-a", key: value}]), "first", "second")
        seen = {call.plugin_type: call.config.get("runtimeConfig") for call in calls}
        assert seen == {"first": None, "second": {capability: expected}}


@pytest.mark.npwg("4.1.2.1.3.2", "4.1.2.1.4.2", "4.1.2.1.7.2", "4.1.2.1.8.2a", "4.1.2.1.10.2")
@pytest.mark.parametrize("declares", ["nothing", "something else", "that it does not"])
@pytest.mark.parametrize("key", REQUESTS)
def test_what_no_plugin_declares_fails_where_requests_are_strict(node: Node, key: str, declares: str) -> None:
    """4.1.2.1.3.2, .4.2, .7, .8, .10.2: the entire attachment request must fail."""
    value, capability, _ = REQUESTS[key]
    declared = {"nothing": {}, "something else": {"other": True}, "that it does not": {capability: False}}[declares]
    node.single("net-a", capabilities=declared)
    node.engine.overlay["strictRequests"] = True
    with pytest.raises(
        UnsupportedFieldError, match=f'^{key} .*no plugin of network .* declares the capability "'
    ) as caught:
        node.call("ADD", [{"name": "net-a", key: value}])
    assert f'"{capability}"' in caught.value.msg
    assert node.plugins.calls == []


@pytest.mark.npwg("4.1.2.1.3.2")
@pytest.mark.parametrize("key", REQUESTS)
def test_what_no_plugin_declares_is_told_where_requests_are_not_strict(node: Node, key: str) -> None:
    """Upstream gives no warning here."""
    node.single("net-a")
    value, _, _ = REQUESTS[key]
    (call,) = of(node.call("ADD", [{"name": "net-a", key: value}]), "main")
    assert "runtimeConfig" not in call.config
    [(reason, message)] = node.engine.warnings
    assert reason == "RequestNotMet"
    assert message.startswith(key)


@pytest.mark.npwg("4.1.2.1.3b")
def test_an_address_without_a_prefix_length_is_left_to_the_plugin(node: Node) -> None:
    """4.1.2.1.3."""
    node.single("net-a", capabilities={"ips": True})
    node.plugins.answers["main", "ADD"] = CniError("a prefix length is needed", code=100)
    with pytest.raises(CniError, match="^a prefix length is needed"):
        node.call("ADD", [{"name": "net-a", "ips": [ADDRESS]}])


@pytest.mark.npwg("4.1.2.1.5.1")
def test_a_requested_interface_name_is_that_of_every_call(node: Node) -> None:
    """4.1.2.1.5, .5.1."""
    node.define("net-a", {"cniVersion": "1.0.0", "name": "net-a", "plugins": [{"type": "first"}, {"type": "second"}]})
    for verb in ("ADD", "CHECK", "DEL"):
        calls = of(node.call(verb, [{"name": "net-a", "interface": "data0"}]), "first", "second")
        assert [call.invocation.ifname for call in calls] == ["data0", "data0"]


@pytest.mark.npwg("4.2.1", "4.1.2.1.5")
@pytest.mark.parametrize("taken", ["eth0", "data0", "net1"])
def test_an_interface_name_that_is_taken_fails(node: Node, taken: str) -> None:
    """4.1.2.1.5: by the cluster network, by another request, by a name that is generated."""
    node.single("net-a")
    first = {"name": "net-a"} | ({"interface": taken} if taken == "data0" else {})
    with pytest.raises(InvalidNetworkConfigError, match=f"'{taken}'"):
        node.call("ADD", [first, {"name": "net-a", "interface": taken}])
    assert node.plugins.calls == []


@pytest.mark.npwg("4.1.2.1.6", "4.1.2.1.6.2")
@pytest.mark.conformance("config-20")
def test_cni_args_come_before_those_of_the_definition(node: Node) -> None:
    """4.1.2.1.6, .6.2; CNI CONVENTIONS puts them under `args.cni`."""
    node.single("net-a", args={"cni": {"spoofchk": "off", "vlan": 7}, "org.example": {"kept": True}})
    for verb in ("ADD", "DEL"):
        (call,) = of(node.call(verb, [{"name": "net-a", "cni-args": {"spoofchk": "on", "new": [1]}}]), "main")
        assert call.config["args"] == {
            "cni": {"spoofchk": "on", "vlan": 7, "new": [1]},
            "org.example": {"kept": True},
        }


@pytest.mark.npwg("4.1.2.1.9a", "4.1.2.1.9b", "5.3.6.4")
@pytest.mark.conformance("pods-5")
def test_the_default_route_goes_to_one_network(node: Node) -> None:
    """4.1.2.1.9, 5.3.6.4."""
    node.single("net-a")
    node.single("net-b")
    node.call("ADD", [{"name": "net-a"}, {"name": "net-b", "default-route": ["10.1.0.1", "10.1.0.254"]}])
    [(_, first), (_, second)] = node.engine.links.default_routes[NETNS, True]
    assert [(first.gw, first.priority), (second.gw, second.priority)] == [("10.1.0.1", 0), ("10.1.0.254", 1)]
    assert {name for name, _ in node.engine.links.default_routes[NETNS, True]} == {"net2"}
    assert [entry.get("default-route") for entry in node.status] == [None, None, ["10.1.0.1", "10.1.0.254"]]


@pytest.mark.npwg("4.1.2.1.9a")
def test_two_networks_with_default_routes_are_refused(node: Node) -> None:
    """4.1.2.1.9."""
    node.single("net-a")
    element = {"name": "net-a", "default-route": ["10.1.0.1"]}
    with pytest.raises(InvalidNetworkConfigError, match="^default-route is set twice"):
        node.call("ADD", [element, element])
    assert node.plugins.calls == []


@pytest.mark.npwg("4.1.2.1.11")
def test_an_ipam_claim_is_no_hindrance_for_a_plugin_that_knows_none(node: Node) -> None:
    """4.1.2.1.11: a plugin that does follows the annotation by itself."""
    node.single("net-a")
    plain = node.call("ADD", [{"name": "net-a"}])
    node.call("DEL")
    assert node.call("ADD", [{"name": "net-a", "ipam-claim-reference": "vm123.tenantblue"}]) == plain


@pytest.mark.npwg("4.1.2.1.11.1")
def test_addresses_and_an_ipam_claim_exclude_each_other(node: Node) -> None:
    """4.1.2.1.11.1."""
    node.single("net-a", capabilities={"ips": True})
    with pytest.raises(InvalidNetworkConfigError, match="^ips and ipam-claim-reference exclude each other"):
        node.call("ADD", [{"name": "net-a", "ips": [ADDRESS], "ipam-claim-reference": "vm123"}])
    assert node.plugins.calls == []


@pytest.mark.npwg("4.2", "4.2.1")
def test_the_same_network_twice_is_two_of_everything(node: Node) -> None:
    """4.2, 4.2.1, 4.2.2: (container, network, interface) is the same for all that is done to an attachment."""
    node.single("net-a")
    tuples = {}
    for verb in ("ADD", "CHECK", "DEL"):
        calls = of(node.call(verb, "net-a,net-a"), "main")
        tuples[verb] = sorted(
            (call.invocation.container_id, call.config["name"], call.invocation.ifname) for call in calls
        )
    assert tuples["ADD"] == [("c1", "net-a", "net1"), ("c1", "net-a", "net2")]
    assert tuples["ADD"] == tuples["CHECK"] == tuples["DEL"]
    assert [(entry["name"], entry["interface"]) for entry in node.status] == [
        ("kube-system/cluster", "eth0"),
        ("web/net-a", "net1"),
        ("web/net-a", "net2"),
    ]


# --- 5: status -------------------------------------------------------------------------------------------------------


def answer(node: Node, plugin: str, result: Mapping[str, Any]) -> None:
    node.plugins.answers[plugin, "ADD"] = json.dumps(result).encode()


@pytest.mark.npwg("5", "5.1", "5.1.1a", "5.3.2", "5.3.3", "5.3.4", "5.3.6")
def test_the_status_is_that_of_the_first_interface_in_the_pod(node: Node) -> None:
    """5, 5.1.1, 5.3.2.1, 5.3.3.1, 5.3.4.1; further interfaces in the pod have entries of their own behind it."""
    node.single("net-a")
    answer(
        node,
        "main",
        {
            "cniVersion": "1.0.0",
            "interfaces": [
                {"name": "br0", "mac": "02:00:00:00:00:0a"},
                {"name": "net1", "mac": MAC, "sandbox": NETNS},
                {"name": "net1.7", "mac": "02:00:00:00:00:0b", "sandbox": NETNS},
            ],
            "ips": [{"address": "10.1.0.1/24", "interface": 0}, {"address": "10.1.0.9/24", "interface": 1}],
            "dns": {"nameservers": ["10.1.0.53"], "domain": "example.org", "search": ["a.example.org"]},
        },
    )
    node.call("ADD", "net-a")
    _, entry, further = node.status
    assert entry == {
        "name": "web/net-a",
        "interface": "net1",
        "ips": ["10.1.0.9"],
        "mac": MAC,
        "default": False,
        "dns": {"nameservers": ["10.1.0.53"], "domain": "example.org", "search": ["a.example.org"]},
    }
    assert further["interface"] == "net1.7"


@pytest.mark.npwg("5.1.1b", "5.2", "5.3.2", "5.3.3")
@pytest.mark.parametrize(
    ("version", "result", "ips"),
    [
        ("1.0.0", {"cniVersion": "1.0.0"}, None),
        ("1.0.0", {"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24"}]}, ["10.1.0.9"]),
        (
            "0.2.0",
            {"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.9/24"}, "ip6": {"ip": "fd00::9/64"}},
            ["10.1.0.9", "fd00::9"],
        ),
    ],
)
def test_every_attachment_has_an_entry(node: Node, version: str, result: dict[str, Any], ips: list[str] | None) -> None:
    """4.2, 5.1.1, 5.2: the cluster network too, also where the result tells little or nothing."""
    node.single("net-a", cniVersion=version)
    node.define("cluster", {"cniVersion": version, "name": "cluster", "type": "cluster"}, namespace="kube-system")
    answer(node, "main", result)
    answer(node, "cluster", result)
    node.call("ADD", "net-a")
    expected = [("kube-system/cluster", "eth0", ips, True), ("web/net-a", "net1", ips, False)]
    assert [(entry["name"], entry["interface"], entry.get("ips"), entry["default"]) for entry in node.status] == (
        expected
    )


@pytest.mark.npwg("5.2", "5.3.5")
@pytest.mark.parametrize("interfaces", [1, 2, 3])
def test_one_entry_is_the_default(node: Node, interfaces: int) -> None:
    """5.2, 5.3.5: there in each entry, and true in one."""
    node.single("net-a")
    inside = [{"name": f"if{number}", "sandbox": NETNS} for number in range(interfaces)]
    for plugin in ("cluster", "main"):
        answer(node, plugin, {"cniVersion": "1.0.0", "interfaces": inside})
    node.call("ADD", "net-a")
    assert [entry["default"] for entry in node.status] == [True] + [False] * (2 * interfaces - 1)


@pytest.mark.npwg("5.3.7", "DI 4.2-4.2.1", "DI 5.1", "DI 6.1.1")
def test_device_information(node: Node) -> None:
    """5.3.7; device information SPEC 1.1.0, 4.2.1, 5.1, 6.1.1."""
    info = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:01:00.1"}}
    node.define(
        "net-a",
        {"cniVersion": "1.0.0", "name": "net-a", "type": "main", "capabilities": {"CNIDeviceInfoFile": True}},
        annotations={RESOURCE_NAME_ANNOTATION: "example.org/vf"},
    )
    node.engine.devices.pods["web/p1"] = {"example.org/vf": ["0000:01:00.1"]}
    node.engine.device_files.written["example.org/vf", "0000:01:00.1"] = json.dumps(info).encode()
    (call,) = of(node.call("ADD", "net-a"), "main")
    path = call.config["runtimeConfig"]["CNIDeviceInfoFile"]
    assert path in node.engine.device_files.files
    assert [entry.get("device-info") for entry in node.status] == [None, info]
    (call,) = of(node.call("DEL"), "main")
    assert call.config["runtimeConfig"]["CNIDeviceInfoFile"] == path
    assert node.engine.device_files.files == {}


# --- 6 and 7: the cluster's network, and what goes wrong -------------------------------------------------------------


@pytest.mark.npwg("6", "6.2")
@pytest.mark.parametrize("annotation", ["", "[]", "net-a"])
def test_every_pod_gets_the_cluster_network_first(node: Node, annotation: str) -> None:
    """6, 6.2."""
    node.single("net-a")
    calls = node.call("ADD", annotation)
    assert [call.plugin_type for call in calls] == ["cluster", "main"][: len(calls)]
    assert len(calls) == (2 if annotation == "net-a" else 1)
    assert [entry["name"] for entry in node.status if entry["default"]] == ["kube-system/cluster"]


@pytest.mark.npwg("7.1")
def test_every_plugin_of_a_list_has_its_name_and_version(node: Node) -> None:
    """7.1."""
    plugins = [{"type": "first", "cniVersion": "9.9.9", "name": "own"}, {"type": "second"}]
    node.define("net-a", {"cniVersion": "0.4.0", "name": "net-a", "plugins": plugins})
    for verb in ("ADD", "CHECK", "DEL"):
        for call in of(node.call(verb, "net-a"), "first", "second"):
            assert (call.config["cniVersion"], call.config["name"]) == ("0.4.0", "net-a")


def refuse(words: str) -> Callable[[Invocation], bytes]:
    def plugin(_invocation: Invocation) -> bytes:
        raise CniError(words, code=101)

    return plugin


@pytest.mark.npwg("7.2a")
def test_the_first_failure_ends_the_add_and_nothing_stays(node: Node) -> None:
    """7.2."""
    node.single("net-a")
    node.define("net-b", {"cniVersion": "1.0.0", "name": "net-b", "type": "broken"})
    node.plugins.answers["broken", "ADD"] = refuse("no address left")
    with pytest.raises(CniError, match="^no address left"):
        node.call("ADD", "net-b,net-a")
    assert node.plugins.order == [("cluster", "ADD"), ("broken", "ADD"), ("broken", "DEL"), ("cluster", "DEL")]


@pytest.mark.npwg("7.2b")
@pytest.mark.parametrize("broken", ["main", "first", "cluster"])
def test_a_failed_detachment_stops_no_other_and_is_told(node: Node, broken: str) -> None:
    """7.2."""
    node.single("net-a")
    node.define("net-b", {"cniVersion": "1.0.0", "name": "net-b", "plugins": [{"type": "second"}, {"type": "first"}]})
    node.call("ADD", "net-a,net-b")
    node.plugins.answers[broken, "DEL"] = refuse("the lease is held")
    node.plugins.holds[broken] = True
    with pytest.raises(CniError, match="^the lease is held") as caught:
        node.call("DEL")
    assert caught.value.code == 101
    assert node.plugins.order == [("first", "DEL"), ("second", "DEL"), ("main", "DEL"), ("cluster", "DEL")]


@pytest.mark.npwg("7.4")
def test_a_network_that_is_not_allowed_fails_the_add(node: Node) -> None:
    """7.4."""
    node.define("net-a", {"cniVersion": "1.0.0", "name": "net-a", "type": "main"}, namespace="other-ns")
    node.engine.overlay["namespaceIsolation"] = True
    with pytest.raises(InvalidNetworkConfigError, match="^network other-ns/net-a must not be used from namespace web"):
        node.call("ADD", "other-ns/net-a")
    assert node.plugins.calls == []


@pytest.mark.npwg("7.5")
@pytest.mark.conformance("config-1")
def test_the_runtimes_options_are_for_the_cluster_network_only(node: Node) -> None:
    """7.5."""
    capabilities = {"portMappings": True, "bandwidth": True, "ips": True, "dns": True}
    node.define(
        "cluster",
        {"cniVersion": "1.0.0", "name": "cluster", "type": "cluster", "capabilities": capabilities},
        namespace="kube-system",
    )
    node.single("net-a", capabilities=capabilities)
    options = {"portMappings": [{"hostPort": 80, "containerPort": 80}], "bandwidth": {"ingressRate": 1}, "dns": {}}
    for verb in ("ADD", "CHECK", "DEL"):
        calls = node.call(verb, "net-a", runtimeConfig=options)
        seen = {call.plugin_type: call.config.get("runtimeConfig") for call in calls}
        assert seen == {"cluster": options, "main": None}
