"""The configuration of the built-in bandwidth, and the numbers that the kernel gets."""

from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.shaping import Bucket
from multus_daemon.plugins.builtin import bandwidth
from multus_daemon.plugins.builtin.bandwidth import Limits
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import CniError, Origin

LIMIT = {"egressRate": 8_000_000, "egressBurst": 1_600_000}
MEANS = Limits(egress=Bucket(1_000_000, 225_000, 3_125_000))


def call(**keys: Any) -> Call:
    fields = {"cniVersion": "1.0.0", "name": "n", "type": "bandwidth", **keys}
    invocation = Invocation("ADD", "c1", "/nowhere", "eth0", "", "/opt/cni/bin", fields)
    return Call(invocation, "n", "1.0.0", None, Path("/"), lambda *_: pytest.fail("calls a plugin"), PodNetns(""))


@pytest.mark.parametrize(
    ("rate", "burst", "expected"),
    [
        (8_000_000, 1_600_000, (1_000_000, 225_000, 3_125_000)),
        (12_345_678, 7_654_321, (1_543_209, 995_370, 9_687_500)),
        # The kubelet's burst; the time that it takes has more than 32 bits.
        (1_000_000, 4_294_967_295, (125_000, 536_874_036, 2_684_354_435)),
        (64_000, 4_294_967_295, (8_000, 536_871_111, 3_288_332_382)),
        (80_000_000_000, 800_000_000, (10_000_000_000, 350_000_000, 156_250)),
    ],
)
def test_the_numbers_are_the_references(rate: int, burst: int, expected: tuple[int, int, int]) -> None:
    """But for the last rate, which it cuts to 32 bits."""
    assert bandwidth.read(call(ingressRate=rate, ingressBurst=burst)) == Limits(ingress=Bucket(*expected))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Limits()),
        ({"ingressRate": 0, "ingressBurst": None}, Limits()),
        (LIMIT, MEANS),
        ({"runtimeConfig": {"bandwidth": LIMIT}}, MEANS),
        ({"runtimeConfig": {"bandwidth": LIMIT}, "IngressRate": 0}, Limits()),
        ({"runtimeConfig": {"bandwidth": {"ingressRate": 1}}} | LIMIT, MEANS),
    ],
)
def test_who_sets_the_limits(keys: dict[str, Any], expected: Limits) -> None:
    assert bandwidth.read(call(**keys)) == expected
    assert bandwidth.keeps(call(**keys)) is (expected == MEANS)


@pytest.mark.parametrize(("rate", "code"), [("fast", 6), (-1, 6), (5, 7), (0, 7)])
def test_who_is_told_of_a_wrong_limit(rate: Any, code: int) -> None:
    wrong = {"ingressRate": rate, "ingressBurst": 8000}
    for keys, origin in ((wrong, Origin.NETWORK), ({"runtimeConfig": {"bandwidth": wrong}}, Origin.ANNOTATION)):
        with pytest.raises(CniError) as caught:
            bandwidth.read(call(**keys))
        assert caught.value.code == code
        assert code == 6 or caught.value.origin is origin
