"""Check the answer of ADD in each CNI version: `results/<case>.txt` holds the exact bytes, each below `== <version>`.

They are written from the specification, not printed by this code: CNI SPEC section "Result" of each version for
the keys, containernetworking/cni `pkg/types` for what a conversion keeps, for the order of keys (1.x sorted, 0.x in
the order of the structs) and for `"dns": {}`, which only 0.x prints.
"""

import functools
import re
from pathlib import Path

import pytest

from multus_daemon.spec.cni import result, versions
from multus_daemon.spec.cni.errors import IncompatibleVersionError
from multus_daemon.spec.cni.result import Dns, Interface, IpConfig, Result, Route

RESULTS = Path(__file__).parent / "results"
NETNS = "/var/run/netns/cni-1"

CASES: dict[str, Result] = {
    "dual-stack": Result(
        interfaces=(
            Interface("cni0", "0a:58:0a:f4:01:01", 1450),
            Interface("veth8c1d2a3b", "5e:11:22:33:44:55", 1450),
            Interface("eth0", "0a:58:0a:f4:01:07", 1450, NETNS),
        ),
        ips=(
            IpConfig("10.244.1.7/24", "10.244.1.1", interface=2),
            IpConfig("fd00:244:1::7/64", "fd00:244:1::1", interface=2),
        ),
        routes=(Route("0.0.0.0/0", "10.244.1.1"), Route("10.96.0.0/12"), Route("::/0", "fd00:244:1::1")),
        dns=Dns(
            nameservers=("10.96.0.10", "fd00:96::10"),
            domain="cluster.local",
            search=("ns.svc.cluster.local", "svc.cluster.local"),
            options=("ndots:5",),
        ),
    ),
    "ipam-ip6-only": Result(ips=(IpConfig("2001:db8:5::9/128"),), routes=(Route("2001:db8::/32", "fe80::1"),)),
    "several-addresses": Result(
        interfaces=(Interface("net1", sandbox=NETNS),),
        ips=(
            IpConfig("192.168.1.2/24", interface=0),
            IpConfig("192.168.1.3/24", interface=-1),
            IpConfig("fd01::2/64", interface=0),
            IpConfig("fd01::3/64"),
        ),
    ),
    "routes-with-extras": Result(
        ips=(IpConfig("10.9.8.7/16", "10.9.0.1"),),
        routes=(
            Route("10.0.0.0/8", "10.9.0.1", mtu=1400, advmss=1360, priority=7, table=0, scope=0),
            Route("172.16.0.0/12", table=100, scope=253),
            Route("fd02::/16", "fd01::1"),
        ),
        dns=Dns(search=("a.example",)),
    ),
    "device-without-address": Result(
        interfaces=(Interface("net2", "02:00:00:00:00:09", 9000, NETNS, "/var/run/vhost/net2.sock", "0000:3b:02.1"),),
    ),
}
# The first two formats have no place for a result without an address.
IMPOSSIBLE = {("device-without-address", "0.1.0"), ("device-without-address", "0.2.0")}
POSSIBLE = [(case, version) for case in CASES for version in versions.SUPPORTED if (case, version) not in IMPOSSIBLE]


@functools.cache
def answers(case: str) -> dict[str, bytes]:
    _, *sections = re.split(rb"^== (.+)\n", (RESULTS / f"{case}.txt").read_bytes(), flags=re.MULTILINE)
    return {
        version.decode(): data.removesuffix(b"\n") for version, data in zip(sections[::2], sections[1::2], strict=True)
    }


def golden(case: str, version: str) -> bytes:
    return answers(case)[version]


def test_there_is_an_answer_for_each_case_and_version_and_no_other() -> None:
    assert {path.name for path in RESULTS.iterdir()} == {f"{case}.txt" for case in CASES}
    assert [(case, version) for case in CASES for version in answers(case)] == POSSIBLE


@pytest.mark.parametrize(("case", "version"), POSSIBLE)
def test_a_result_is_printed_in_the_version_that_is_asked_for(case: str, version: str) -> None:
    assert result.to_stdout(CASES[case], version) == golden(case, version)


@pytest.mark.parametrize(("case", "version"), sorted(IMPOSSIBLE))
def test_a_result_that_a_version_can_not_express_is_an_error(case: str, version: str) -> None:
    with pytest.raises(IncompatibleVersionError, match="no valid IP addresses"):
        result.to_stdout(CASES[case], version)


@pytest.mark.parametrize(("case", "version"), POSSIBLE)
def test_what_was_printed_is_printed_again(case: str, version: str) -> None:
    data = golden(case, version)
    assert result.to_stdout(result.decode(data, "9.9.9"), version) == data


@pytest.mark.parametrize("source", ["1.0.0", "1.1.0"])
@pytest.mark.parametrize(("case", "version"), POSSIBLE)
def test_a_plugins_1_x_result_becomes_that_of_the_runtimes_version(case: str, version: str, source: str) -> None:
    assert result.to_stdout(result.decode(golden(case, source), ""), version) == golden(case, version)
