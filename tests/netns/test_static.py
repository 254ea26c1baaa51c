"""The built-in static beside the reference plugin: the same answer, or the same refusal, to every configuration."""

from __future__ import annotations

import ipaddress
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.netns import outcome, reference

pytestmark = reference.needs("static")

V4 = {"address": "10.1.2.3/24", "gateway": "10.1.2.1"}
V6 = {"address": "fd01::3/64", "gateway": "fd01::1"}
DNS = {"nameservers": ["192.0.2.53"], "domain": "example.org", "search": ["a.example"], "options": ["ndots:5"]}
ROUTE = {"dst": "192.0.2.7/24", "gw": "10.1.2.254", "mtu": 1400, "advmss": 1000, "priority": 5, "table": 0, "scope": 0}


def static(addresses: Any = None, *, version: str = "1.0.0", ipam: Any = None, **keys: Any) -> dict[str, Any]:
    section = {"type": "static", "addresses": addresses, **(ipam or {})}
    return {"cniVersion": version, "name": "testnet", "type": "ptp", "ipam": section, **keys}


IPS = {"ips": ["10.9.0.2/16", "fd09::2/48"]}
# A configuration and CNI_ARGS.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "one": (static([V4]), ""),
    "dual": (static([V4, V6]), ""),
    "dual-0.3.1": (static([V6, V4], version="0.3.1"), ""),
    "dual-0.2.0": (static([V6, V4], version="0.2.0", ipam={"routes": [{"dst": "0.0.0.0/0"}], "dns": DNS}), ""),
    "none": (static(), ""),
    "none-but-routes": (static(ipam={"routes": [{"dst": "192.0.2.7/24", "gw": "10.1.2.254"}]}), ""),
    "none-0.2.0": (static(version="0.2.0"), ""),
    "without-gateway": (static([{"address": "10.1.2.3/32"}, {"address": "FD01:0::A/128", "gateway": ""}]), ""),
    "gateway-elsewhere": (static([{"address": "10.1.2.3/24", "gateway": "fd01::1"}]), ""),
    "version-key": (static([V4 | {"version": "4"}]), ""),
    "any-case": ({"cniVersion": "1.0.0", "name": "n", "IPAM": {"Addresses": [{"ADDRESS": "10.1.2.3/24"}]}}, ""),
    "mapped": (static([{"address": "::ffff:10.1.2.3/120", "gateway": "::ffff:10.1.2.1"}]), ""),
    "mapped-short": (static([{"address": "::ffff:10.1.2.3/64"}], ipam={"routes": [{"dst": "::ffff:0:0/0"}]}), ""),
    "no-ipam": ({"cniVersion": "1.0.0", "name": "n"}, ""),
    "null-ipam": ({"cniVersion": "1.0.0", "name": "n", "ipam": None}, ""),
    "no-cidr": (static([{"address": "10.1.2.3"}]), ""),
    "no-address": (static([{"gateway": "10.1.2.3"}]), ""),
    "null-address": (static([None]), ""),
    "netmask": (static([{"address": "10.1.2.3/255.255.255.0"}]), ""),
    "zone": (static([{"address": "fe80::1%eth0/64"}]), ""),
    "bad-gateway": (static([{"address": "10.1.2.3/24", "gateway": "10.1.2"}]), ""),
    "bad-type": (static("10.1.2.3/24"), ""),
    "bad-type-of-ipam": ({"cniVersion": "1.0.0", "name": "n", "ipam": []}, ""),
    "bad-type-of-an-address": (static([5]), ""),
    "bad-type-of-a-route": (static([V4], ipam={"routes": [5]}), ""),
    "bad-type-of-dns": (static([V4], ipam={"dns": {"nameservers": 5}}), ""),
    "bad-type-of-ips": (static([V4], runtimeConfig={"ips": 5}), ""),
    "bad-type-of-args": (static([V4], args="x"), ""),
    "bad-route": (static([V4], ipam={"routes": [{"dst": "10.0.0.0/8", "gw": "10.1"}]}), ""),
    "two-of-a-family-0.2.0": (static([V4, {"address": "10.2.0.1/24"}], version="0.2.0"), ""),
    "two-of-a-family-0.3.0": (static([V4, {"address": "10.2.0.1/24"}], version="0.3.0"), ""),
    "args-ips": (static([V4], args={"cni": IPS}), ""),
    "args-ips-empty": (static([V4], args={"cni": {"ips": []}}), ""),
    "runtime-ips": (static([V4], runtimeConfig=IPS), ""),
    "runtime-before-args": (static([V4], runtimeConfig=IPS, args={"cni": {"ips": ["10.8.0.1/8"]}}), ""),
    "runtime-without-length": (static([V4], runtimeConfig={"ips": ["10.9.0.2"]}), ""),
    "args-without-length-replaced": (static([V4], runtimeConfig=IPS, args={"cni": {"ips": ["10.8.0.1"]}}), ""),
    "bad-address-replaced": (static([{"address": "nonsense"}], runtimeConfig=IPS), ""),
    "env": (static([V4]), "IP=10.5.0.2/24"),
    "env-two": (static(), "IP=10.5.0.2/24, fd05::2/64;GATEWAY=10.5.0.1 ,fd05::1"),
    "env-gateway-for-env-only": (static([V4 | {"gateway": ""}]), "IP=10.5.0.2/24;GATEWAY=10.1.2.1,10.5.0.9,10.5.0.1"),
    "env-empty": (static([V4]), "IP=;GATEWAY="),
    "env-replaced": (static([V4], runtimeConfig=IPS), "IP=10.5.0.2/24"),
    "env-without-length": (static([V4]), "IP=10.5.0.2"),
    "env-bad-gateway": (static([V4]), "IP=10.5.0.2/24;GATEWAY=10.5.0"),
    "env-bad-second": (static([V4]), "IP=10.5.0.2/24,x"),
    "env-bad-flag": (static([V4]), "IgnoreUnknown=maybe"),
    "env-no-pair": (static([V4]), "FOO"),
    "env-unknown-ignored": (static([V4]), "IgnoreUnknown=1;MAC=02:00:00:00:00:01;K8S_POD_NAME=p"),
}
# What v1.1.1 does not know.
NEW_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "1.1.0": (static([V4, V6], version="1.1.0", ipam={"routes": [ROUTE], "dns": DNS}), ""),
    "route-keys-0.4.0": (static([V4], version="0.4.0", ipam={"routes": [ROUTE]}), ""),
}


def require_same(verb: str, config: dict[str, Any], args: str) -> outcome.Outcome:
    ours = outcome.builtin("static", verb, "/nowhere", config, args=args)
    theirs = outcome.of_reference("static", verb, "/nowhere", config, args=args)
    if ours.failed or theirs.failed:
        outcome.require_same_failure(ours, theirs)
        assert ours.details == theirs.details
    assert ours.result == theirs.result
    return ours


def test_an_unknown_argument_is_named_without_its_value() -> None:
    ours = outcome.builtin("static", "ADD", "/nowhere", static([V4]), args="MAC=02:00:00:00:00:01")
    theirs = outcome.of_reference("static", "ADD", "/nowhere", static([V4]), args="MAC=02:00:00:00:00:01")
    assert (theirs.msg, theirs.details) == ('ARGS: unknown args ["MAC=02:00:00:00:00:01"]', "")
    assert (ours.msg, ours.details) == ('ARGS: unknown args ["MAC"]', "")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=reference.needs_new()) for case in NEW_CASES)])
def test_add_and_del(case: str) -> None:
    config, args = (CASES | NEW_CASES)[case]
    require_same("ADD", config, args)
    # Nothing has been taken, and so nothing is looked at.
    assert require_same("DEL", config, args) == outcome.Outcome()


@pytest.mark.parametrize(
    ("given", "fails"),
    [
        ([V4], False),
        ([V4 | {"gateway": "10.1.2.9"}], True),
        ([{"address": "10.1.2.3/24"}], True),
        ([{"address": "10.1.2.4/24"}], False),
        ([{"address": "10.1.2.3/16", "gateway": "10.1.2.1"}], False),
        ([], False),
        (None, True),
    ],
)
def test_check(given: Any, fails: bool) -> None:
    previous: dict[str, Any] = {} if given is None else {"prevResult": {"cniVersion": "1.0.0", "ips": given}}
    assert (require_same("CHECK", static([V4], **previous), "")).failed is fails
    without_gateway = static([{"address": "10.1.2.3/24"}], **previous)
    assert (require_same("CHECK", without_gateway, "")).failed is (given is None)


@pytest.mark.parametrize("verb", ["STATUS", "GC"])
def test_the_verbs_without_a_handler(verb: str) -> None:
    assert (outcome.builtin("static", verb, "", static(version="1.1.0"))) == outcome.Outcome()


_V4 = st.builds(lambda ip, bits: f"{ip}/{bits}", st.ip_addresses(v=4), st.integers(0, 33))
# Not those that hold an IPv4 address: Go writes them in a form of its own.
_V6_PLAIN = st.ip_addresses(v=6).filter(lambda ip: not (isinstance(ip, ipaddress.IPv6Address) and int(ip) >> 48 == 0))
_V6 = st.builds(lambda ip, bits: f"{ip}/{bits}", _V6_PLAIN, st.integers(0, 129))
_CIDR = st.one_of(_V4, _V6, st.sampled_from(["", "10.0.0.1", "fd00::1/", "10.0.0.1/-1", "010.0.0.1/8", " 10.0.0.1/8"]))
_GATEWAY = st.one_of(st.none(), st.ip_addresses(v=4).map(str), _V6_PLAIN.map(str), st.just("10.1"))
_ADDRESS = st.fixed_dictionaries({"address": _CIDR}, optional={"gateway": _GATEWAY})
_IPS = st.fixed_dictionaries({}, optional={"ips": st.lists(_CIDR, max_size=2)})
_VERSION = st.sampled_from(["0.1.0", "0.2.0", "0.3.1", "0.4.0", "1.0.0"])


@hypothesis.given(
    addresses=st.lists(_ADDRESS, max_size=3),
    routes=st.lists(st.fixed_dictionaries({"dst": _CIDR}, optional={"gw": _GATEWAY}), max_size=2),
    runtime=_IPS,
    given=_IPS,
    version=_VERSION,
    ip=st.one_of(st.none(), _CIDR),
)
@hypothesis.settings(
    max_examples=120, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_configuration(addresses: Any, routes: Any, runtime: Any, given: Any, version: str, ip: str | None) -> None:
    config = static(addresses, version=version, ipam={"routes": routes}, runtimeConfig=runtime, args={"cni": given})
    args = "" if ip is None else f"IP={ip}"
    ours = outcome.builtin("static", "ADD", "/nowhere", config, args=args)
    theirs = outcome.of_reference("static", "ADD", "/nowhere", config, args=args)
    assert (ours.result, ours.failed) == (theirs.result, theirs.failed), (ours.msg, theirs.msg)
