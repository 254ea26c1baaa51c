"""Results and their conversion: CNI SPEC section 5 of each version, and containernetworking/cni v1.3.0."""

from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import gojson, result, versions
from multus_daemon.spec.cni.errors import DecodingFailureError, IncompatibleVersionError
from multus_daemon.spec.cni.result import Dns, Interface, IpConfig, Result, Route

OLDEST = ("0.1.0", "0.2.0")
MIDDLE = ("0.3.0", "0.3.1", "0.4.0")
NEWEST = ("1.0.0", "1.1.0")
# --- conversion (tests/spec/test_add_results.py has each result in each version) --------------------------------------


def converted(fields: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    return result.to_object(result.from_object({"cniVersion": source, **fields}, ""), target)


@pytest.mark.parametrize("source", MIDDLE)
def test_what_an_old_version_does_not_know_is_not_even_looked_at(source: str) -> None:
    odd = {"interfaces": [{"name": "a", "mtu": "x", "socketPath": 1, "pciID": []}]}
    assert converted(odd, source, "1.1.0")["interfaces"] == [{"name": "a"}]


@pytest.mark.parametrize("source", OLDEST)
def test_addresses_and_routes_of_old_versions_come_ipv4_first(source: str) -> None:
    fields = {
        "ip6": {"ip": "fd00::3/64", "routes": [{"dst": "::/0"}]},
        "ip4": {"ip": "10.1.2.3/24", "routes": [{"dst": "0.0.0.0/0"}]},
    }
    found = result.from_object(fields, source)
    assert [item.address for item in found.ips] == ["10.1.2.3/24", "fd00::3/64"]
    assert [item.dst for item in found.routes] == ["0.0.0.0/0", "::/0"]


def test_no_version_is_the_oldest() -> None:
    assert result.from_object({"ip4": {"ip": "10.0.0.1/8"}}, "") == result.Result(ips=(IpConfig("10.0.0.1/8"),))
    assert result.to_object(Result(ips=(IpConfig("10.0.0.1/8"),)), "")["cniVersion"] == "0.1.0"


@pytest.mark.conformance("config-19", "routes-8")
@pytest.mark.parametrize("version", ["0.5.0", "1.2.0", "1.0", "x", "1.1.0\n"])
def test_unknown_versions(version: str) -> None:
    with pytest.raises(IncompatibleVersionError, match="unsupported CNI result version") as caught:
        result.from_object({"cniVersion": version}, "1.0.0")
    assert caught.value.code == 1
    with pytest.raises(IncompatibleVersionError, match=r"no converter for CNI result version 1\.1\.0 to"):
        result.to_object(Result(), version)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_the_implied_version_counts_only_where_the_plugin_names_none() -> None:
    fields = b'{"ips":[{"address":"10.0.0.1/8"}]}'
    assert result.decode(fields, "0.4.0").ips == (IpConfig("10.0.0.1/8"),)
    assert result.decode(fields, "0.2.0").ips == ()
    assert result.decode(b'{"cniVersion":"","ips":[{"address":"10.0.0.1/8"}]}', "0.4.0").ips == (
        IpConfig("10.0.0.1/8"),
    )
    assert result.decode(b'{"CNIVersion":"1.0.0","ips":[{"address":"10.0.0.1/8"}]}', "0.2.0").ips != ()


@pytest.mark.parametrize("data", [b"null", b"{}", b'{"ips":null,"routes":null,"interfaces":null,"dns":null}'])
def test_empty_results(data: bytes) -> None:
    assert result.decode(data, "1.0.0") == Result()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "unexpected end of JSON input"),
        (b"[]", "a JSON object is needed, not an array"),
        (b"x", "result"),
        (b'{"cniVersion":1}', "cniVersion: a string"),
        (b'{"ips":{}}', "ips: an array"),
        (b'{"ips":[null]}', r"ips\[0\]: an object is needed, not null"),
        (b'{"ips":[{}]}', "ips.address"),
        (b'{"ips":[{"address":"10.0.0.1"}]}', "ips.address"),
        (b'{"ips":[{"address":"10.0.0.1/8","gateway":"x"}]}', "ips.gateway: 'x' is not an IP address"),
        (b'{"ips":[{"address":"10.0.0.1/8","gateway":"fe80::1%eth0"}]}', "ips.gateway"),
        (b'{"ips":[{"address":"10.0.0.1/8","interface":"0"}]}', "interface: an integer"),
        (b'{"ips":[{"address":"10.0.0.1/8","interface":0.5}]}', "interface: an integer"),
        (b'{"interfaces":["eth0"]}', r"interfaces\[0\]: an object"),
        (b'{"interfaces":[{"name":1}]}', "name: a string"),
        (b'{"interfaces":[{"mtu":"1"}]}', "mtu: an integer"),
        (b'{"routes":[{}]}', "routes.dst"),
        (b'{"routes":[{"dst":"0.0.0.0/0","gw":"1"}]}', "routes.gw"),
        (b'{"routes":[{"dst":"0.0.0.0/0","table":true}]}', "table: an integer"),
        (b'{"dns":[]}', "dns: an object"),
        (b'{"dns":{"search":["a",1]}}', r"search\[1\]: a string"),
    ],
)
def test_results_that_can_not_be_read(data: bytes, message: str) -> None:
    with pytest.raises(DecodingFailureError, match=message) as caught:
        result.decode(data, "1.1.0")
    assert caught.value.code == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.1.2.3/24", "10.1.2.3/24"),  # host bits stay
        ("10.1.2.3/024", "10.1.2.3/24"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("FD00::0:1/64", "fd00::1/64"),
        ("::/0", "::/0"),
        ("::ffff:10.1.2.3/120", "10.1.2.3/24"),
        ("2001:db8:0:0:1:0:0:1/128", "2001:db8::1:0:0:1/128"),
    ],
)
def test_cidr(text: str, expected: str) -> None:
    assert result.cidr(text, "x") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("::ffff:0:0/0", "0.0.0.0/0"),
        ("::ffff:0:0/95", "0.0.0.0/0"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        ("::ffff:10.1.2.3/0", "10.1.2.3/0"),
        ("::ffff:10.1.2.3/64", "10.1.2.3/0"),
        ("::ffff:a01:203/96", "10.1.2.3/0"),
        ("::ffff:10.1.2.3/97", "10.1.2.3/1"),
        ("0::ffff:0a01:0203/112", "10.1.2.3/16"),
        ("::ffff:10.1.2.3/00120", "10.1.2.3/24"),
        ("::ffff:10.1.2.3/128", "10.1.2.3/32"),
        # Not mapped.
        ("::10.1.2.3/96", "::a01:203/96"),
        ("::ffff:0:0:0/80", "::ffff:0:0:0/80"),
    ],
)
def test_mapped_prefixes(text: str, expected: str) -> None:
    """Go 1.26 prints this for a `net.IPNet` of the address and the mask that ParseCIDR returns."""
    assert result.cidr(text, "x") == expected


def test_a_mapped_default_route() -> None:
    found = result.from_object({"routes": [{"dst": "::ffff:0:0/0", "gw": "::ffff:10.0.0.1"}]}, "1.0.0")
    assert found.routes == (Route("0.0.0.0/0", "10.0.0.1"),)
    assert found.routes[0].is_default


@pytest.mark.parametrize(
    "text",
    [
        None, "", "/", "10.0.0.1", "10.0.0.1/", "/24", "10.0.0.1/33", "fd00::/129", "10.0.0.1/-1", "10.0.0.1/+8",
        "10.0.0.1/255.0.0.0", "10.0.0.1/8/8", "010.0.0.1/8", "10.0.1/8", " 10.0.0.1/8", "10.0.0.1/8 ", "10.0.0.1/8\n",
        "fe80::1%eth0/64", "10.0.0.1/８", "10.0.0.256/8", "10.0.0.1/" + "0" * 5000,
    ],
)  # fmt: skip
def test_cidr_refuses(text: str | None) -> None:
    with pytest.raises(gojson.JsonError, match=r"^x: "):
        result.cidr(text, "x")


def test_mapped_gateways_are_ipv4() -> None:
    found = result.from_object({"ips": [{"address": "10.0.0.2/8", "gateway": "::ffff:10.0.0.1"}]}, "1.0.0")
    assert found.ips[0].gateway == "10.0.0.1"


def test_properties() -> None:
    assert IpConfig("10.1.2.3/24").ip == "10.1.2.3"
    assert IpConfig("10.1.2.3/24").is_ipv4
    assert not IpConfig("fd00::/64").is_ipv4
    assert [Route(dst).is_default for dst in ("0.0.0.0/0", "::/0", "10.0.0.0/8", "0.0.0.0/1", "10.0.0.0/0")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert Route("0.0.0.0/0").is_ipv4
    assert not Route("::/0").is_ipv4
    assert not Dns()
    assert all((Dns(nameservers=("a",)), Dns(domain="a"), Dns(search=("a",)), Dns(options=("a",))))


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.0.0", b'{\n    "cniVersion": "1.0.0"\n}'),
        ("0.3.0", b'{\n    "cniVersion": "0.3.0",\n    "dns": {}\n}'),
    ],
)
def test_stdout_of_nothing(version: str, expected: bytes) -> None:
    assert result.to_stdout(Result(), version) == expected


def test_stdout_is_escaped_as_gos() -> None:
    assert b'"\\u003ca\\u0026b\\u003e"' in result.to_stdout(Result(dns=Dns(domain="<a&b>")), "1.0.0")


# --- as who gets it sees it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", NEWEST)
def test_nothing_is_lost_in_1_x(version: str) -> None:
    # Keys of interfaces that only 1.1.0 has stay in 1.0.0: nothing checks them there, and libraries pass them on.
    found = Result((Interface("eth0", "m", 1400, "/n", "/s", "0000:00:01.0"),), (IpConfig("10.0.0.1/8", "", 0),))
    assert result.in_version(found, version) is found


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_nothing_can_be_said_in_every_version(version: str) -> None:
    assert result.in_version(Result(), version) == Result()
    # A process prints it like this.
    assert result.decode(result.empty_stdout(version), "") == Result()


@pytest.mark.parametrize("found", [Result(), Result((Interface("eth0"),))])
def test_a_version_that_nobody_knows_is_refused(found: Result) -> None:
    with pytest.raises(IncompatibleVersionError):
        result.in_version(found, "9.9.9")


# --- any result ------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
COUNTS = st.integers(0, 2**31)


def is_plain(ip: IPv4Address | IPv6Address) -> bool:
    """False for `::ffff:a.b.c.d`, which Go prints as IPv4."""
    return isinstance(ip, IPv4Address) or ip.ipv4_mapped is None


IPV6 = st.ip_addresses(v=6).filter(is_plain)
CIDRS = st.builds("{}/{}".format, st.ip_addresses(v=4), st.integers(0, 32)) | st.builds(
    "{}/{}".format, IPV6, st.integers(0, 128)
)
GATEWAYS = st.just("") | st.ip_addresses(v=4).map(str) | IPV6.map(str)
PLAIN_INTERFACES = st.builds(Interface, TEXT, mac=TEXT, sandbox=TEXT)
INTERFACES_1_1 = st.builds(Interface, TEXT, TEXT, COUNTS, TEXT, TEXT, TEXT)
OPTIONAL = st.none() | COUNTS
ROUTE_VALUES = st.builds(Route, CIDRS, GATEWAYS, COUNTS, COUNTS, COUNTS, OPTIONAL, OPTIONAL)
DNS_VALUES = st.builds(Dns, st.lists(TEXT).map(tuple), TEXT, st.lists(TEXT).map(tuple), st.lists(TEXT).map(tuple))


def results(interfaces: st.SearchStrategy[Interface]) -> st.SearchStrategy[Result]:
    return st.builds(
        Result,
        st.lists(interfaces, max_size=3).map(tuple),
        st.lists(st.builds(IpConfig, CIDRS, GATEWAYS, st.none() | st.integers(-1, 9)), max_size=4).map(tuple),
        st.lists(ROUTE_VALUES, max_size=3).map(tuple),
        DNS_VALUES,
    )


@pytest.mark.parametrize("version", NEWEST)
@given(value=results(INTERFACES_1_1))
def test_1_x_keeps_everything(version: str, value: Result) -> None:
    assert result.from_object(result.to_object(value, version), "") == value
    assert result.decode(result.to_stdout(value, version), "") == value


@pytest.mark.parametrize("version", MIDDLE)
@given(value=results(PLAIN_INTERFACES))
def test_0_3_and_0_4_keep_all_but_what_is_new_in_interfaces(version: str, value: Result) -> None:
    assert result.decode(result.to_stdout(value, version), "") == value


@pytest.mark.parametrize("version", OLDEST)
@given(value=results(INTERFACES_1_1))
def test_oldest_versions_once_written_stay_as_they_are(version: str, value: Result) -> None:
    if not value.ips:
        with pytest.raises(IncompatibleVersionError):
            result.to_object(value, version)
        return
    written = result.to_object(value, version)
    assert result.to_object(result.from_object(written, ""), version) == written


@pytest.mark.parametrize("version", versions.SUPPORTED)
@given(value=results(INTERFACES_1_1))
def test_in_version_is_what_comes_back_from_a_process(version: str, value: Result) -> None:
    try:
        printed = result.to_stdout(value, version)
    except IncompatibleVersionError:
        if value == Result():
            assert result.in_version(value, version) == value
            return
        with pytest.raises(IncompatibleVersionError):
            result.in_version(value, version)
        return
    seen = result.in_version(value, version)
    assert seen == result.decode(printed, "")
    assert result.in_version(seen, version) == seen
