"""Check the layout of pods and networks of the benches, and the order in which sides take turns; nothing is run."""

import ipaddress
import itertools
from pathlib import Path

import pytest

from bench import sides


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_entry_is_at_every_place_as_often(count: int) -> None:
    entries = list(range(count))
    orders = [sides.in_turn(entries, number) for number in range(2 * count)]
    assert all(sorted(order) == entries for order in orders)
    for place in range(count):
        assert sorted(order[place] for order in orders) == sorted(2 * entries)


def test_each_of_two_is_before_the_other_as_often() -> None:
    orders = [sides.in_turn(["a", "b", "c"], number) for number in range(6)]
    for one, other in itertools.permutations("abc", 2):
        assert sum(order.index(one) < order.index(other) for order in orders) == 3


def test_the_subnets_of_all_networks_are_apart() -> None:
    subnets = [
        ipaddress.ip_network(ranges[0]["subnet"])
        for config in sides.definitions(Path("/data")).values()
        for ranges in config["ipam"]["ranges"]
    ]
    four = [subnet for subnet in subnets if isinstance(subnet, ipaddress.IPv4Network)]
    assert len(four) == sides.MOST + 2
    assert not [pair for pair in itertools.combinations(four, 2) if pair[0].overlaps(pair[1])]
    assert len(subnets) == len(four) + 1, "one network has IPv6 too"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, {}),
        (1, {sides.NETWORKS: "n0"}),
        (3, {sides.NETWORKS: "n0,n1,n2"}),
        (sides.DUAL, {sides.DEFAULT_NETWORK: "space/dual"}),
        ("l10", {sides.DEFAULT_NETWORK: "space/l10"}),
    ],
)
def test_the_annotations_of_a_pod_by_its_size(size: sides.Size, expected: dict[str, str]) -> None:
    assert sides.pod_annotations(size, "space") == expected


def test_every_network_of_the_largest_pod_is_defined() -> None:
    assert set(sides.names(sides.MOST)) <= sides.definitions(Path("/data")).keys()
