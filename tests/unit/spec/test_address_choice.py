"""The order in which addresses are tried, beside a model that is too slow to be wrong."""

from __future__ import annotations

import ipaddress
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.addresses import AddressRange, candidates

NETWORK = ipaddress.ip_network("10.9.0.0/26")
FIRST = int(NETWORK.network_address)
offsets = st.integers(0, 63)


def source(spans: list[tuple[int, int]]) -> AddressRange:
    return AddressRange(NETWORK, tuple(range(FIRST + low, FIRST + high) for low, high in spans))


@st.composite
def ranges(draw: st.DrawFn) -> AddressRange:
    cuts = sorted(draw(st.sets(offsets, max_size=8)))
    return source(list(zip(cuts[::2], cuts[1::2], strict=False)))


@given(ranges(), st.sets(offsets), st.sets(offsets), st.lists(offsets, max_size=2), st.integers())
def test_each_free_address_once_those_that_cool_last(
    given: AddressRange, held: set[int], cooling: set[int], wanted: list[int], seed: int
) -> None:
    addresses = [NETWORK[offset] for offset in range(64) if NETWORK[offset] in given]
    free = [address for address in addresses if int(address) - FIRST not in held]
    cool = {NETWORK[offset] for offset in cooling}
    preferred = list(dict.fromkeys(NETWORK[offset] for offset in wanted))
    found = list(
        candidates(given, {FIRST + offset for offset in held}, cool.__contains__, preferred, Random(seed).randrange)
    )
    first = [address for address in preferred if address in free]
    rest = [address for address in free if address not in first]
    warm = [address for address in rest if address not in cool]
    assert found[: len(first)] == first
    assert found[len(first) :][: len(warm)][:1] == warm[:1]
    assert set(found[len(first) :][: len(warm)]) == set(warm)
    assert sorted(found) == free


@given(ranges(), st.integers(-3, 70))
def test_all_addresses_from_any_position_on(given: AddressRange, start: int) -> None:
    numbers = [number for span in given.spans for number in span]
    cut = min(max(start, 0), len(numbers))
    assert list(given.numbers(start)) == numbers[cut:] + numbers[:cut]
    assert given.size == len(numbers)


def test_an_address_that_was_taken_meanwhile_is_passed_over() -> None:
    taken: set[int] = set()
    found = candidates(source([(1, 9)]), taken, lambda _: False, chance=lambda _: 0)
    assert next(found) == NETWORK[1]
    taken |= {FIRST + 2, FIRST + 3}
    assert next(found) == NETWORK[4]


def test_a_crowd_does_not_queue_for_the_same_address() -> None:
    """Nodes that have lost the lowest one go apart."""
    whole = source([(1, 63)])
    seconds = set()
    for seed in range(100):
        found = candidates(whole, set(), lambda _: False, chance=Random(seed).randrange)
        assert next(found) == NETWORK[1]
        seconds.add(next(found))
    assert len(seconds) > 30


def test_a_large_network_of_ipv6() -> None:
    network = ipaddress.ip_network("fd00::/64")
    first = int(network.network_address)
    whole = AddressRange(network, (range(first + 1, first + 2**64 - 1),))
    assert whole.size == 2**64 - 2
    found = candidates(whole, {first + 1}, lambda _: False, chance=lambda size: size - 1)
    assert [str(next(found)), str(next(found))] == ["fd00::2", "fd00::ffff:ffff:ffff:fffe"]
    assert ipaddress.ip_address("0.0.0.2") not in AddressRange(ipaddress.ip_network("::/64"), (range(1, 9),))
