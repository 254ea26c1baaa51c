"""The checker of the address tests finds what is wrong in a history, and nothing in one that is right."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.addresses.checker import (
    STILL,
    Bounds,
    Entry,
    Excuse,
    Fault,
    Fence,
    History,
    Kind,
    Orders,
    Place,
    Stay,
    check,
)

A, B = ip_address("10.9.0.1"), ip_address("10.9.0.2")
ONE, TWO, THREE = (Place(f"node{n}", f"ns{n}", f"default/p{n}") for n in (1, 2, 3))
BESIDE = Place("node1", "ns1b", "default/p1b")
END = 100.0
BOUNDS = Bounds(freed=10, held=5, restored=5)


def verdict(stays: list[Stay], entries: list[Entry], **orders: Any) -> list[Fault]:
    return check(
        stays, entries, Orders(**orders), end=END, bounds=BOUNDS, allowed=ip_network("10.9.0.0/24").__contains__
    )


def held(*stays: Stay) -> list[Entry]:
    """What the API server has if everything is right."""
    return [Entry(stay.address, stay.place.pod, stay.begin - 0.5, stay.end + 0.5) for stay in stays]


FIRST, SECOND = Stay(ONE, A, 10, 50), Stay(TWO, A, 30, 60)
OVERLAP = [FIRST, SECOND]
NEIGHBOUR = replace(SECOND, place=BESIDE)
LATER = Stay(TWO, A, 55, 60)


# --- what is right -------------------------------------------------------------------------------------------------


def test_one_after_the_other_is_right() -> None:
    stays = [FIRST, LATER, Stay(ONE, B, 10, 60)]
    assert verdict(stays, held(*stays)) == []


def test_what_is_taken_over_between_two_looks_is_right() -> None:
    stays = [Stay(ONE, A, 10, 30.0), Stay(TWO, A, 30.1, 60)]
    assert verdict(stays, held(*stays)) == []


def test_what_a_fenced_node_had_may_be_given_again() -> None:
    entries = [Entry(A, ONE.pod, 9, 29), Entry(A, TWO.pod, 29, 60)]
    assert verdict(OVERLAP, entries, fences=(Fence("node1", 25),)) == []


def test_the_pods_of_a_claim_share_its_address() -> None:
    assert verdict(OVERLAP, [Entry(A, ONE.pod, 9, 61)], shared={A: frozenset({ONE.pod, TWO.pod})}) == []


def test_while_the_api_is_away_nothing_is_freed() -> None:
    entries = [Entry(A, ONE.pod, 9, 85)]
    assert verdict([FIRST], entries, excuses=(Excuse(45, 80),)) == []
    assert verdict([FIRST], entries, excuses=(Excuse(45, 80, "node1"),)) == []


def test_after_a_restore_the_node_has_a_moment() -> None:
    stays = [Stay(ONE, A, 10, 60)]
    entries = [Entry(A, ONE.pod, 9, 40), Entry(A, ONE.pod, 44, 60)]
    assert verdict(stays, entries, restores=(40.0,)) == []


def test_what_a_dead_pod_has_after_a_restore_is_freed_before_it_is_asserted() -> None:
    stays = [Stay(TWO, A, 1, 5), Stay(ONE, A, 10, 60)]
    entries = [*held(stays[0]), Entry(A, ONE.pod, 9, 29), Entry(A, TWO.pod, 30, 38), Entry(A, ONE.pod, 38, 60)]
    assert verdict(stays, entries, restores=(30.0,)) == []
    entries[2:] = [Entry(A, TWO.pod, 30, 44), Entry(A, ONE.pod, 44, 60)]
    assert Kind.ANOTHERS in [fault.kind for fault in verdict(stays, entries, restores=(30.0,))]


def test_a_duplicate_of_a_restore_that_both_pods_were_told_of_may_be() -> None:
    # What the first pod had is lost as etcd stops.
    entries = [Entry(A, ONE.pod, 9, 27), Entry(A, TWO.pod, 29, 60)]
    reports = frozenset({(A, ONE.pod), (A, TWO.pod)})
    assert verdict(OVERLAP, entries, restores=(28.0,), reports=reports) == []


# --- what is wrong -------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[Stay], list[Entry], dict[str, Any], list[Kind]]] = {
    "two nodes": (OVERLAP, held(*OVERLAP), {}, [Kind.TWICE]),
    "two pods of one node": ([FIRST, NEIGHBOUR], held(FIRST, NEIGHBOUR), {}, [Kind.TWICE]),
    "the same pod, made anew elsewhere": (
        [FIRST, replace(SECOND, place=replace(TWO, pod=ONE.pod))], [Entry(A, ONE.pod, 9, 61)], {}, [Kind.TWICE]
    ),
    "the wrong node was fenced": (OVERLAP, held(*OVERLAP), {"fences": (Fence("node2", 25),)}, [Kind.TWICE]),
    "fenced too late": (OVERLAP, held(*OVERLAP), {"fences": (Fence("node1", 31),)}, [Kind.TWICE]),
    "fenced before the pod began": (OVERLAP, held(*OVERLAP), {"fences": (Fence("node1", 5),)}, [Kind.TWICE]),
    "freed by fencing, and given twice": (
        [FIRST, SECOND, Stay(THREE, A, 40, 60)],
        held(FIRST, SECOND, Stay(THREE, A, 40, 60)),
        {"fences": (Fence("node1", 25),)},
        [Kind.TWICE],
    ),
    "a third pod with the address of a claim": (
        [*OVERLAP, Stay(THREE, A, 52, 58)],
        [*held(*OVERLAP), Entry(A, THREE.pod, 51, 59)],
        {"shared": {A: frozenset({ONE.pod, TWO.pod})}},
        [Kind.TWICE],
    ),
    "given after a restore, and told to one pod only": (
        OVERLAP, held(*OVERLAP), {"restores": (28.0,), "reports": frozenset({(A, ONE.pod)})}, [Kind.UNREPORTED]
    ),
    "given long after a restore": (
        OVERLAP, held(*OVERLAP),
        {"restores": (20.0,), "reports": frozenset({(A, ONE.pod), (A, TWO.pod)})}, [Kind.TWICE],
    ),
    "never freed": ([FIRST], [Entry(A, ONE.pod, 9)], {}, [Kind.LEAKED, Kind.LEFT]),
    "freed late": ([FIRST], [Entry(A, ONE.pod, 9, 61)], {}, [Kind.LEAKED]),
    "freed late after the API came back": (
        [FIRST], [Entry(A, ONE.pod, 9, 75)], {"excuses": (Excuse(45, 60),)}, [Kind.LEAKED]
    ),
    "another node was cut off": (
        [FIRST], [Entry(A, ONE.pod, 9, 75)], {"excuses": (Excuse(45, 75, "node2"),)}, [Kind.LEAKED]
    ),
    "taken by an ADD that failed": ([], [Entry(B, ONE.pod, 9, 40)], {}, [Kind.LEAKED]),
    "freed while it lives": ([FIRST], [Entry(A, ONE.pod, 9, 30)], {}, [Kind.UNHELD]),
    "asserted late": ([FIRST], [Entry(A, ONE.pod, 9, 20), Entry(A, ONE.pod, 26, 50)], {}, [Kind.UNHELD]),
    "never taken": ([FIRST], [], {}, [Kind.UNHELD]),
    "in the hands of another pod": ([FIRST], [Entry(A, TWO.pod, 9, 50)], {}, [Kind.ANOTHERS]),
    "a namespace is left": ([replace(FIRST, end=STILL)], [Entry(A, ONE.pod, 9, END)], {}, [Kind.LEFT]),
    "not of the range": (
        [Stay(ONE, ip_address("10.9.1.0"), 10, 50)], [Entry(ip_address("10.9.1.0"), ONE.pod, 9, 50)], {}, [Kind.FOREIGN]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    stays, entries, orders, expected = WRONG[name]
    found = [fault for fault in verdict(stays, entries, **orders) if fault.kind in expected or fault.kind is Kind.TWICE]
    assert [fault.kind for fault in found] == expected, verdict(stays, entries, **orders)
    assert all(str(fault.address) in str(fault) for fault in found)


def test_an_ipv6_address_is_one_however_it_is_written() -> None:
    stays = [
        Stay(ONE, ip_address("fd00::1"), 10, 50),
        Stay(TWO, ip_address("FD00:0:0:0:0:0:0:1"), 30, 60),
    ]
    found = check(stays, held(*stays), Orders(), end=END)
    assert [fault.kind for fault in found] == [Kind.TWICE]


def test_how_long_it_was_twice_and_whose_it_was_is_said() -> None:
    [found] = verdict(OVERLAP, held(*OVERLAP))
    assert (found.seconds, found.node) == (20, "node1")


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 90), st.floats(0.1, 9)), max_size=8))
def test_it_says_twice_exactly_where_two_of_one_address_overlap(drawn: list[tuple[int, float, float]]) -> None:
    stays = [
        Stay(Place("n", f"ns{n}", f"d/p{n}"), A, begin, begin + length) for n, (_, begin, length) in enumerate(drawn)
    ]
    found = [fault for fault in check(stays, held(*stays), Orders(), end=END) if fault.kind is Kind.TWICE]
    pairs = sum(max(one.begin, two.begin) <= min(one.end, two.end) for n, one in enumerate(stays) for two in stays[:n])
    assert len(found) == pairs


# --- looks ---------------------------------------------------------------------------------------------------------


def test_looks_become_intervals_of_what_was_seen() -> None:
    history: History[str] = History()
    for at, found in ((1.0, ["a"]), (2.0, ["a", "b"]), (3.0, ["b"]), (4.0, ["a", "b"])):
        history.look(found, at)
    assert sorted(history.intervals()) == [("a", 1.0, 2.0), ("a", 4.0, STILL), ("b", 2.0, STILL)]


def test_a_look_at_one_place_ends_nothing_elsewhere() -> None:
    history: History[str] = History()
    history.look(["n1/a"], 1.0, lambda key: key.startswith("n1"))
    history.look(["n2/a"], 2.0, lambda key: key.startswith("n2"))
    history.look([], 3.0, lambda key: key.startswith("n1"))
    assert sorted(history.intervals()) == [("n1/a", 1.0, 1.0), ("n2/a", 2.0, STILL)]
