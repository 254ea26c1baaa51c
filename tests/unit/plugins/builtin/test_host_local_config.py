"""Configurations that host-local accepts and refuses; the words are from runs of the reference plugin's binary."""

import ipaddress
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.plugins.builtin import host_local_config as config
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)


def read(ipam, *, version="1.0.0", args="", **fields):
    given = {**fields} if ipam is None else {"ipam": {"type": "host-local", **ipam}, **fields}
    return config.with_args(config.read(given, name="net", cni_version=version), args)


def one(**keys):
    return {"ranges": [[keys]]}


V4 = {"subnet": "10.0.0.0/24"}
INVALID = InvalidNetworkConfigError

BAD = [
    (None, INVALID, "IPAM config missing 'ipam' key"),
    ({}, INVALID, "no IP ranges specified"),
    ({"ranges": []}, INVALID, "no IP ranges specified"),
    ({"subnet": "x"}, INVALID, "invalid CIDR address: x"),
    ({"subnet": ""}, INVALID, "invalid CIDR address: "),
    ({"subnet": "10.0.0.0"}, INVALID, "invalid CIDR address: 10.0.0.0"),
    ({"subnet": "10.0.0.0/255.255.255.0"}, INVALID, "invalid CIDR address: 10.0.0.0/255.255.255.0"),
    ({"subnet": "fe80::%eth0/64"}, INVALID, "invalid CIDR address: fe80::%eth0/64"),
    ({"subnet": 5}, DecodingFailureError, "host-local: subnet: a string is needed, not a number"),
    ({"ranges": {}}, DecodingFailureError, "host-local: ranges: an array is needed, not an object"),
    ({"ranges": [{}]}, DecodingFailureError, "host-local: ranges[0]: an array of ranges is needed, not an object"),
    ({"ranges": [["x"]]}, DecodingFailureError, "host-local: ranges[0]: an object is needed, not a string"),
    ({**V4, "rangeStart": "x"}, INVALID, "invalid IP address: x"),
    ({**V4, "rangeEnd": "10.0.0.01"}, INVALID, "invalid IP address: 10.0.0.01"),
    ({**V4, "gateway": "fe80::1%2"}, INVALID, "invalid IP address: fe80::1%2"),
    ({"ranges": [[]]}, INVALID, "invalid range set 0: empty range set"),
    ({"ranges": [None]}, INVALID, "invalid range set 0: empty range set"),
    ({**V4, "ranges": [[]]}, INVALID, "invalid range set 1: empty range set"),
    (one(rangeStart="10.0.0.1"), INVALID, "invalid range set 0: IP <nil> not v4 nor v6"),
    ({"ranges": [[None]]}, INVALID, "invalid range set 0: IP <nil> not v4 nor v6"),
    ({"subnet": "10.0.0.0/31"}, INVALID, "invalid range set 0: Network 10.0.0.0/31 too small to allocate from"),
    ({"subnet": "10.0.0.0/32"}, INVALID, "invalid range set 0: Network 10.0.0.0/32 too small to allocate from"),
    ({"subnet": "fd00::/127"}, INVALID, "invalid range set 0: Network fd00::/127 too small to allocate from"),
    (
        {"subnet": "10.0.0.1/29"},
        INVALID,
        "invalid range set 0: Network has host bits set. "
        "For a subnet mask of length 29 the network address is 10.0.0.0",
    ),
    ({"subnet": "::ffff:10.0.0.0/120"}, INVALID, "invalid range set 0: IPNet IP and Mask version mismatch"),
    ({**V4, "rangeStart": "10.0.1.1"}, INVALID, "invalid range set 0: RangeStart 10.0.1.1 not in network 10.0.0.0/24"),
    ({**V4, "rangeStart": "fd00::1"}, INVALID, "invalid range set 0: RangeStart fd00::1 not in network 10.0.0.0/24"),
    ({**V4, "rangeEnd": "10.0.1.1"}, INVALID, "invalid range set 0: RangeEnd 10.0.1.1 not in network 10.0.0.0/24"),
    (
        {**V4, "rangeStart": "10.0.0.5", "rangeEnd": "10.0.0.3"},
        INVALID,
        "invalid range set 0: RangeStart 10.0.0.5 not in network 10.0.0.0/24",
    ),
    # The end lies before the start that is implied.
    ({**V4, "rangeEnd": "10.0.0.0"}, INVALID, "invalid range set 0: RangeEnd 10.0.0.0 not in network 10.0.0.0/24"),
    ({"ranges": [[V4, {"subnet": "fd00::/64"}]]}, INVALID, "invalid range set 0: mixed address families"),
    (
        {"ranges": [[{"subnet": "10.0.0.0/29"}, {"subnet": "10.0.0.0/28"}]]},
        INVALID,
        "invalid range set 0: subnets 10.0.0.1-10.0.0.6 and 10.0.0.1-10.0.0.14 overlap",
    ),
    ({**V4, "ranges": [[{"subnet": "10.9.0.0/24"}], [V4]]}, INVALID, "range set 0 overlaps with 2"),
    ({**V4, "routes": [{"dst": "x"}]}, DecodingFailureError, None),
    ({**V4, "routes": ["x"]}, DecodingFailureError, "host-local: routes: an object is needed, not a string"),
]


@pytest.mark.parametrize(("ipam", "kind", "message"), BAD, ids=[json.dumps(row[0]) for row in BAD])
def test_refused(ipam, kind, message):
    with pytest.raises(CniError) as caught:
        read(ipam)
    assert type(caught.value) is kind
    if message is not None:
        assert caught.value.msg == message


@pytest.mark.parametrize(
    ("version", "sets", "allowed"),
    [
        ("0.2.0", ["10.0.0.0/24", "10.1.0.0/24"], False),
        ("0.1.0", ["fd00::/64", "fd01::/64"], False),
        ("0.2.0", ["10.0.0.0/24", "fd00::/64"], True),
        ("0.3.0", ["10.0.0.0/24", "10.1.0.0/24"], True),
    ],
)
def test_old_versions_have_one_address_per_family(version, sets, allowed):
    ipam = {"ranges": [[{"subnet": subnet}] for subnet in sets]}
    if allowed:
        assert len(read(ipam, version=version).range_sets) == 2
        return
    with pytest.raises(
        InvalidNetworkConfigError, match=rf"CNI version {version} does not support more than 1 address per family"
    ):
        read(ipam, version=version)


@pytest.mark.parametrize(
    ("keys", "text", "gateway"),
    [
        ({"subnet": "10.0.0.0/29"}, "10.0.0.1-10.0.0.6", "10.0.0.1"),
        ({"subnet": "10.0.0.0/30"}, "10.0.0.1-10.0.0.2", "10.0.0.1"),
        # IPv6 has no broadcast address.
        ({"subnet": "fd01::/126"}, "fd01::1-fd01::3", "fd01::1"),
        ({"subnet": "FD01:0:0:0::/64"}, "fd01::1-fd01::ffff:ffff:ffff:ffff", "fd01::1"),
        ({**V4, "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.9"}, "10.0.0.9-10.0.0.9", "10.0.0.1"),
        # The ends of the subnet may be asked for.
        ({**V4, "rangeStart": "10.0.0.0", "rangeEnd": "10.0.0.255"}, "10.0.0.0-10.0.0.255", "10.0.0.1"),
        ({**V4, "rangeStart": "::ffff:10.0.0.7", "gateway": "::ffff:10.0.0.254"}, "10.0.0.7-10.0.0.254", "10.0.0.254"),
        ({**V4, "gateway": "192.168.7.7"}, "10.0.0.1-10.0.0.254", "192.168.7.7"),
        ({**V4, "gateway": "", "rangeStart": None}, "10.0.0.1-10.0.0.254", "10.0.0.1"),
        ({"SUBNET": "10.0.0.0/24", "RangeSTART": "10.0.0.5"}, "10.0.0.5-10.0.0.254", "10.0.0.1"),
    ],
)
def test_range_defaults(keys, text, gateway):
    (range_set,) = read(one(**keys)).range_sets
    assert str(range_set) == text
    assert str(range_set.ranges[0].gateway) == gateway
    assert str(read(keys if "subnet" in keys else one(**keys)).range_sets[0]) == text


def test_order_of_sets():
    found = read(
        {"subnet": "10.1.0.0/30", "ranges": [[{"subnet": "10.2.0.0/30"}]]},
        runtimeConfig={"ipRanges": [[{"subnet": "10.3.0.0/30"}, {"subnet": "10.4.0.0/30"}]]},
    )
    assert [str(item) for item in found.range_sets] == [
        "10.3.0.1-10.3.0.2,10.4.0.1-10.4.0.2",
        "10.1.0.1-10.1.0.2",
        "10.2.0.1-10.2.0.2",
    ]


def test_other_keys():
    found = read({**V4, "dataDir": "/d", "resolvConf": "/r", "routes": [{"dst": "10.0.0.0/8", "gw": "10.0.0.1"}]})
    assert (found.name, found.data_dir, found.resolv_conf) == ("net", "/d", "/r")
    assert [(route.dst, route.gw) for route in found.routes] == [("10.0.0.0/8", "10.0.0.1")]
    plain = read(V4)
    assert (plain.data_dir, plain.resolv_conf, plain.routes, plain.requested) == ("/var/lib/cni/networks", "", (), ())


def test_requested_addresses_add_up():
    found = config.read(
        {
            "ipam": V4,
            "args": {"cni": {"ips": ["10.0.0.8", "fd00:0::8/64"], "other": 1}},
            "runtimeConfig": {"ips": ["::ffff:10.0.0.7"]},
        },
        name="net",
        cni_version="1.0.0",
    )
    found = config.with_args(found, "IgnoreUnknown=1;IP=10.0.0.9/8;K8S_POD_NAME=p")
    assert [str(item) for item in found.requested] == ["10.0.0.9", "10.0.0.8", "fd00::8", "10.0.0.7"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("FOO=1;BAR=2", 'ARGS: unknown args ["FOO" "BAR"]'),
        ("ip=10.0.0.9", 'ARGS: unknown args ["ip"]'),
        ("IgnoreUnknown=0;FOO=1", 'ARGS: unknown args ["FOO"]'),
        ("IgnoreUnknown=FALSE;FOO=1", 'ARGS: unknown args ["FOO"]'),
        (
            "IgnoreUnknown=maybe",
            'ARGS: error parsing value of pair "IgnoreUnknown=maybe": boolean unmarshal error: invalid input maybe',
        ),
        ("IP=x", 'ARGS: error parsing value of pair "IP=x": invalid IP address x'),
        ("IP", "ARGS: invalid pair 'IP'"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(InvalidEnvironmentError) as caught:
        read(V4, args=args)
    assert caught.value.msg == message


@pytest.mark.parametrize("args", ["", "IP=", "IgnoreUnknown=1;FOO=1", "IgnoreUnknown=TRUE;MAC=a", "IgnoreUnknown=0"])
def test_arguments_without_an_address(args):
    assert read(V4, args=args).requested == ()


@pytest.mark.parametrize(
    ("ips", "message"),
    [(["zz"], "invalid IP address zz"), ([""], "cannot understand ip: IP <nil> not v4 nor v6"), (["1.2.3.4/33"], None)],
)
def test_bad_requested_addresses(ips, message):
    for fields in ({"args": {"cni": {"ips": ips}}}, {"runtimeConfig": {"ips": ips}}):
        with pytest.raises(InvalidNetworkConfigError) as caught:
            config.read({"ipam": V4, **fields}, name="n", cni_version="1.0.0")
        assert message in (None, caught.value.msg)


@pytest.mark.parametrize("text", ["0.0.0.0", "10.0.0.255", "::", "fd00::1:0:0:1", "1:0:0:2::3", "::1.2.3.4"])
def test_text_of(text):
    address = ipaddress.ip_address(text)
    assert config.text_of(int(address), address.version) == str(address)


RANGES = st.tuples(st.integers(0, 40), st.integers(0, 6)).map(
    lambda ends: config.Range(4, 24, ends[0], sum(ends), ipaddress.ip_address("10.0.0.254"))
)


@given(st.lists(RANGES, max_size=8))
def test_an_overlap_is_found_where_there_is_one(ranges):
    pairs = [
        (first, second)
        for first, second in itertools.combinations(range(len(ranges)), 2)
        if ranges[first].overlaps(ranges[second])
    ]
    found = config._overlap(ranges)
    assert (found in pairs) if pairs else found is None


@pytest.mark.parametrize("sets", [True, False])
def test_every_range_is_compared_with_its_neighbour_only(monkeypatch, sets):
    """Pair by pair, 10,000 ranges took 87 s of an ADD."""
    compared = []
    real = config.Range.overlaps

    def noted(self, other):
        compared.append(other)
        return real(self, other)

    monkeypatch.setattr(config.Range, "overlaps", noted)
    ranges = [{"subnet": f"10.{number // 256}.{number % 256}.0/24"} for number in range(2000)]
    read({"ranges": [[item] for item in ranges] if sets else [ranges]})
    assert len(compared) <= 2 * len(ranges)
