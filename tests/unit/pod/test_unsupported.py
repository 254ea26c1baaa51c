"""A pod requests more of its networks than it gets (NPWG multi-network SPEC 4.1.2.1.3.2 and following)."""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from multus_daemon.metrics.declared import REQUESTS
from multus_daemon.pod import unsupported
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, UnsupportedFieldError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.nad.selection import DEFAULT_NETWORK_ANNOTATION
from multus_daemon.spec.netconf import NetConf
from tests.unit.pod.conftest import NETNS, Engine, definition

MAC = "02:00:00:00:00:0a"
OTHER = "02:00:00:00:00:0b"
GUID = "c2:11:22:33:44:55:66:77"
PORTS = [{"hostPort": 8080, "containerPort": 80}]
RATES = {"ingressRate": 1000}
# Key of the selection element, its value, the capability by CNI CONVENTIONS and NPWG SPEC 4.1.2.1.10.2.
REQUEST = [
    ("ips", ["10.1.0.7/24"], "ips"),
    ("mac", MAC, "mac"),
    ("infiniband-guid", GUID, "infinibandGUID"),
    ("portMappings", PORTS, "portMappings"),
    ("bandwidth", RATES, "bandwidth"),
]


def network(name: str, *capabilities: str, version: str = "1.0.0") -> Any:
    """A list of which the second plugin declares `capabilities`."""
    second = {"type": "b", "capabilities": dict.fromkeys(capabilities, True) | {"other": True}}
    fields = {"cniVersion": version, "name": name, "plugins": [{"type": "a", "capabilities": {"mac": False}}, second]}
    return definition("web", name, json.dumps(fields))


def shown(mac: str = MAC, *addresses: str, name: str = "net1", sandbox: str = NETNS) -> Result:
    return Result(
        (Interface(name, mac=mac, sandbox=sandbox),), tuple(IpConfig(text, interface=0) for text in addresses)
    )


def beside(other: Interface) -> Result:
    return Result((other, Interface("net1", mac=OTHER, sandbox=NETNS)))


WAYS = ("selected", "default-network", "plugged")
# A hot-plug request has no more than these.
CASES = [(way, *request) for way in WAYS for request in REQUEST if way != "plugged" or request[0] in ("ips", "mac")]


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest, engine: Engine) -> Callable[..., Any]:
    """Let the pod ask the network `web/n1` for something, in one of the ways to do so; attach it."""

    def selected(**asked: Any) -> None:
        engine.declare(json.dumps([{"name": "n1"} | asked]))
        engine.verbs.add(engine.request())

    def default_network(**asked: Any) -> None:
        element = {"name": "n1", "namespace": "web", "interface": "net1"} | asked
        engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: json.dumps([element])})
        engine.verbs.add(engine.request())

    def plugged(**asked: Any) -> None:
        config = engine.cluster.networks["web", "n1"].config
        if "ips" in asked:
            asked["ips"] = tuple(asked["ips"])
        engine.verbs.add_network(engine.plug(network="n1", ifname="net1", config=config, **asked))

    ways = {"selected": selected, "default-network": default_network, "plugged": plugged}
    return ways[request.param]


def told(engine: Engine) -> list[str]:
    return [message for reason, message in engine.warnings if reason == unsupported.EVENT]


def test_the_metric_knows_every_request() -> None:
    assert set(unsupported.KEYS.values()) == REQUESTS


class TestCapability:
    @pytest.mark.parametrize(("ask", "key", "value", "capability"), CASES, indirect=["ask"])
    def test_that_is_declared_is_no_matter(
        self, engine: Engine, ask: Callable[..., Any], key: str, value: Any, capability: str
    ) -> None:
        engine.cluster.put_network(network("n1", capability))
        engine.runner.results["web/n1"] = shown(MAC, "10.1.0.7/24")
        for engine.overlay["strictRequests"] in (False, True):
            ask(**{key: value})
            engine.verbs.delete(engine.request("DEL"))
        assert engine.warnings == []

    @pytest.mark.parametrize(
        ("ask", "key", "value", "capability"),
        [case for case in CASES if case[1] not in ("ips", "mac")],  # these may come by CNI_ARGS
        indirect=["ask"],
    )
    def test_that_nobody_declares_is_told_and_no_hindrance(
        self,
        engine: Engine,
        ask: Callable[..., Any],
        caplog: pytest.LogCaptureFixture,
        key: str,
        value: Any,
        capability: str,
    ) -> None:
        engine.cluster.put_network(network("n1"))
        with caplog.at_level(logging.WARNING, "multus_daemon.pod.publish"):
            ask(**{key: value})
        [message] = told(engine)
        assert all(words in message for words in (key, "web/n1", "web/p1", f'"{capability}": true')), message
        assert [record.getMessage() for record in caplog.records] == [message]
        assert engine.unsupported_args == {key: 1}
        assert ("ADD", "web/n1") in engine.runner.order

    def test_what_the_runtime_wants_is_no_request_of_the_pod(self, engine: Engine) -> None:
        engine.overlay |= {"strictRequests": True, "runtimeConfig": {"portMappings": PORTS, "bandwidth": RATES}}
        engine.verbs.add(engine.request())
        assert engine.warnings == []


class TestResult:
    @pytest.mark.npwg("4.1.2.1.3.2")
    @pytest.mark.parametrize(
        ("asked", "result", "problem"),
        [
            ({"mac": "02-00-00-00-00-0A"}, shown(), ""),
            ({"mac": "0200.0000.000a"}, shown(), ""),
            ({"mac": MAC}, shown(OTHER), f"mac {MAC} not met: net1 of network web/n1 has {OTHER}"),
            ({"mac": MAC}, beside(Interface("cni0", mac=MAC)), f"has {OTHER}"),
            ({"mac": MAC}, beside(Interface("x", mac=MAC, sandbox=NETNS)), f"has {OTHER}"),
            (
                {"mac": MAC},
                Result((Interface("net1", mac=MAC), *shown(OTHER, name="renamed").interfaces)),
                f"has {OTHER}",
            ),
            ({"mac": MAC}, shown(name="renamed"), ""),
            ({"mac": MAC}, shown(OTHER, name="renamed"), f"has {OTHER}"),
            # A result of 0.2.0 has no interfaces to look at.
            ({"mac": MAC}, Result((), (IpConfig("10.1.0.7/24"),)), ""),
            ({"mac": MAC}, Result((Interface("net1", sandbox=NETNS),)), ""),
            ({"ips": ["10.1.0.7"]}, shown(MAC, "10.1.0.7/24"), ""),
            ({"ips": ["10.1.0.7/24"]}, shown(MAC, "10.1.0.7/24"), ""),
            (
                {"ips": ["10.1.0.7/16"]},
                shown(MAC, "10.1.0.7/24"),
                "ips 10.1.0.7/16 not met: net1 of network web/n1 has ",
            ),
            ({"ips": ["10.1.0.7"]}, shown(MAC, "10.1.0.70/24"), "has 10.1.0.70/24"),
            ({"ips": ["10.1.0.7"]}, shown(MAC), "has none"),
            ({"ips": ["10.1.0.7", "fd00:0::7"]}, shown(MAC, "fd00::7/64", "10.1.0.7/24"), ""),
            ({"ips": ["10.1.0.7", "fd00::8"]}, shown(MAC, "10.1.0.7/24", "fd00::7/64"), "has 10.1.0.7/24, fd00::7/64"),
            ({"ips": ["::ffff:10.1.0.7/120"]}, shown(MAC, "10.1.0.7/24"), ""),
            ({"ips": ["::ffff:10.1.0.7/64"]}, shown(MAC, "10.1.0.7/0"), ""),
            ({"ips": ["::ffff:10.1.0.7"]}, Result((), (IpConfig("10.1.0.7/24"),)), ""),
        ],
    )
    @pytest.mark.parametrize("declared", [True, False])
    def test_it_is_compared_with_what_was_asked_for(
        self,
        engine: Engine,
        ask: Callable[..., Any],
        declared: bool,
        asked: dict[str, Any],
        result: Result,
        problem: str,
    ) -> None:
        [key] = asked
        engine.cluster.put_network(network("n1", *([key] if declared else [])))
        engine.runner.results["web/n1"] = result
        ask(**asked)
        if not problem:
            assert (told(engine), engine.unsupported_args) == ([], {})
            return
        [message] = told(engine)
        assert problem in message
        assert "pod web/p1" in message
        assert ("ignored the request" if declared else f'"{key}": true') in message
        assert engine.unsupported_args == {key: 1}

    @pytest.mark.parametrize("asked", [{"mac": MAC}, {"ips": ["10.1.0.7"]}])
    def test_a_difference_fails_and_undoes_the_add_if_strict(
        self, engine: Engine, ask: Callable[..., Any], asked: dict[str, Any]
    ) -> None:
        [key] = asked
        engine.overlay["strictRequests"] = True
        engine.cluster.put_network(network("n1", key))
        engine.runner.results["web/n1"] = shown(OTHER, "10.1.0.8/24")
        with pytest.raises(UnsupportedFieldError, match=f"^{key} .* not met: net1 of network web/n1 has .*pod web/p1"):
            ask(**asked)
        assert ("DEL", "web/n1") in engine.runner.order
        assert not engine.runner.attached
        assert not engine.store.records
        assert [reason for reason, _ in engine.warnings] == [unsupported.EVENT]
        assert engine.cluster.statuses == {}

    def test_what_is_long_is_cut(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NetConf, "max_requested_addresses", 10_000)
        engine.runner.results["web/n1"] = shown(MAC, *(f"10.2.{item // 250}.{item % 250}/16" for item in range(2000)))
        engine.declare(
            json.dumps([{"name": "n1", "ips": [f"10.1.{item // 250}.{item % 250}" for item in range(2000)]}])
        )
        engine.verbs.add(engine.request())
        assert len(told(engine)[0]) < 800

    def test_a_failed_add_tells_its_own_reason(self, engine: Engine) -> None:
        engine.declare(json.dumps([{"name": "n1", "mac": MAC}]))
        engine.runner.fail["ADD", "web/n1"] = CniError("no")
        with pytest.raises(CniError, match=r"^no "):
            engine.verbs.add(engine.request())
        assert [reason for reason, _ in engine.warnings] == ["FailedAddingInterface"]


class TestRuntimeConfig:
    """NPWG SPEC 7.5: what the runtime gives goes to the cluster network only."""

    THEIRS: ClassVar = {
        "portMappings": [{"hostPort": 53, "containerPort": 53, "protocol": "UDP"}, *PORTS],
        "bandwidth": RATES,
    }

    def args(self, engine: Engine) -> list[dict[str, Any]]:
        engine.verbs.add(engine.request())
        return [dict(item.capability_args) for item in engine.store.records["c1"].attachments]

    @pytest.mark.weak_spot(18)
    @pytest.mark.conformance("config-22")
    def test_it_goes_to_the_cluster_network_only(self, engine: Engine) -> None:
        engine.overlay["runtimeConfig"] = self.THEIRS
        engine.overlay["defaultNetworks"] = ["cluster"]
        engine.cluster.put_network(network("n1", "portMappings", "bandwidth"))
        engine.declare("n1")
        assert self.args(engine) == [self.THEIRS, {}, {}]

    @pytest.mark.conformance("config-21")
    def test_of_a_default_network_element_each_key_wins_and_ports_are_joined(self, engine: Engine) -> None:
        engine.overlay["runtimeConfig"] = self.THEIRS
        own = [{"hostPort": 8080, "containerPort": 90, "protocol": "TCP"}, {"hostPort": 53, "containerPort": 54}]
        element = {"name": "n1", "portMappings": own, "bandwidth": {"egressRate": 5}, "mac": MAC}
        engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: json.dumps([element | {"namespace": "web"}])})
        [args] = self.args(engine)
        assert args == {
            "portMappings": [
                {"hostPort": 53, "containerPort": 53, "protocol": "UDP"},
                {"hostPort": 8080, "containerPort": 90, "protocol": "tcp"},
                {"hostPort": 53, "containerPort": 54, "protocol": "tcp"},
            ],
            "bandwidth": {"egressRate": 5},
            "mac": MAC,
        }

    @pytest.mark.parametrize("theirs", [None, 7, ["odd"], [{"hostPort": [1]}]])
    def test_what_the_runtime_gives_is_not_judged(self, engine: Engine, theirs: Any) -> None:
        engine.overlay["runtimeConfig"] = {"portMappings": theirs}
        element = {"name": "n1", "namespace": "web", "portMappings": PORTS}
        engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: json.dumps([element])})
        [args] = self.args(engine)
        kept = theirs if isinstance(theirs, list) else []
        assert args["portMappings"] == [*kept, {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]


class TestDeprecatedArgs:
    @pytest.mark.parametrize(
        ("ips", "capabilities", "expected"),
        [
            (["10.1.0.7/24"], [], "10.1.0.7/24"),
            (["10.1.0.7/24"], ["ips"], "10.1.0.7/24"),
            (["10.1.0.7", "fd00::7"], [], "10.1.0.7,fd00::7"),
            (["10.1.0.7", "fd00::7"], ["mac"], "10.1.0.7,fd00::7"),
            (["10.1.0.7", "fd00::7"], ["ips"], None),
        ],
    )
    def test_several_addresses_stand_there_only_where_there_is_no_other_way(
        self, engine: Engine, ask: Callable[..., Any], ips: list[str], capabilities: list[str], expected: str | None
    ) -> None:
        engine.cluster.put_network(network("n1", *capabilities))
        ask(ips=ips, mac=MAC)
        [attachment] = [call.attachment for call in engine.runner.calls if call.attachment.ifname == "net1"]
        found = dict(attachment.cni_args)
        assert (found.get("IP"), found["MAC"]) == (expected, MAC)
        assert attachment.capability_args["ips"] == ips


def test_many_addresses_are_each_read_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairwise comparison of 2,000 addresses in an annotation took 36 s, and no other request was served meanwhile."""
    asked = [f"10.{number // 250}.{number % 250}.7/24" for number in range(2000)]
    monkeypatch.setattr(NetConf, "max_requested_addresses", len(asked))
    engine.cluster.put_network(network("n1", "ips"))
    engine.declare(json.dumps([{"name": "n1", "ips": asked}]))
    engine.runner.results["web/n1"] = shown(MAC, *asked)
    read: list[str] = []
    for name in ("ip_address", "ip_interface"):
        real = getattr(ipaddress, name)

        def noted(text: Any, real: Callable[[Any], Any] = real) -> Any:
            read.append(str(text))
            return real(text)

        monkeypatch.setattr(ipaddress, name, noted)
    engine.verbs.add(engine.request())
    assert told(engine) == []
    # The annotation's parser, CNI_ARGS and the comparison look at each a few times, whatever their number.
    assert len(read) <= 10 * len(asked)


# --- unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_misspelt_key_is_an_event_and_a_line_in_the_log_and_the_pod_starts(
    engine: Engine, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    engine.overlay["strictRequests"] = strict
    engine.declare(
        '[{"name": "n1", "interfce": "data0"}, {"name": "n2"}]',
        annotations={DEFAULT_NETWORK_ANNOTATION: '[{"name": "cluster", "ip": "10.0.0.9"}]'},
    )
    engine.verbs.add(engine.request())
    message = (
        "network kube-system/cluster: unknown key 'ip', is ips meant? / "
        "network web/n1: unknown key 'interfce', is interface meant? (pod web/p1); "
        "correct the annotation in the pod's template"
    )
    assert engine.warnings == [("UnknownKey", message)]
    assert message in caplog.text


def test_a_misspelt_key_is_told_before_what_it_makes_fail(engine: Engine) -> None:
    engine.declare('[{"name": "n9", "namspace": "other"}]')
    with pytest.raises(CniError):
        engine.verbs.add(engine.request())
    assert [reason for reason, _ in engine.warnings] == ["UnknownKey", "NoNetworkFound"]


def test_the_message_of_unknown_keys_is_bounded(engine: Engine) -> None:
    keys = {f"{'k' * 70}{number}": 1 for number in range(100)}
    engine.declare(json.dumps([{"name": "n1", **keys}]))
    engine.verbs.add(engine.request())
    [(_, message)] = engine.warnings
    assert len(message) <= 1000


class TestTooManyAddresses:
    ASKED: ClassVar = [f"10.1.0.{number}/24" for number in range(1, 5)]

    @pytest.mark.parametrize("key", ["ips", "cni-args"])
    @pytest.mark.parametrize("most", [3, 4])
    def test_of_an_annotation(self, engine: Engine, key: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NetConf, "max_requested_addresses", most)
        engine.declare(json.dumps([{"name": "n1", key: self.ASKED if key == "ips" else {"IPs": self.ASKED}}]))
        if most == 4:
            engine.verbs.add(engine.request())
            return
        with pytest.raises(InvalidNetworkConfigError) as caught:
            engine.verbs.add(engine.request())
        place = "ips" if key == "ips" else "cni-args.ips"
        assert caught.value.msg.startswith(f"{place}: 4 addresses, and at most 3 are allowed (network web/n1)")
        assert (engine.runner.order, engine.store.records) == ([], {})

    @pytest.mark.parametrize("asked", [{"ips": tuple(ASKED)}, {"cni_args": {"ips": ASKED}}])
    def test_of_a_hot_plug(self, engine: Engine, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NetConf, "max_requested_addresses", 3)
        with pytest.raises(InvalidNetworkConfigError, match=r"4 addresses, and at most 3 are allowed \(network hot\)"):
            engine.verbs.add_network(engine.plug(**asked))
        assert engine.runner.order == []
