"""Taken numbers and the book, against a plain set and a plain dict."""

import ipaddress

import hypothesis.strategies as st
import pytest
from hypothesis import given

from multus_daemon.plugins.builtin.host_local import index
from multus_daemon.plugins.builtin.host_local.config import text_of
from multus_daemon.plugins.builtin.host_local.index import Book, Numbers

FEW = st.integers(0, 20)


@given(st.lists(FEW), st.lists(st.tuples(st.booleans(), FEW)))
def test_numbers_are_a_set(begin, changes):
    numbers, expected = Numbers(begin), set(begin)
    for adds, value in [(True, None), *changes]:
        if value is not None:
            (numbers.add if adds else numbers.discard)(value)
            (expected.add if adds else expected.discard)(value)
        free = [next(number for number in range(start, 30) if number not in expected) for start in range(22)]
        assert [numbers.next_free(start) for start in range(22)] == free


NAMES = ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.03", "fd00::2", "fd00::3", "fd00::03", "note", "lock", "\udcff"]
CONTENTS = st.sampled_from([None, b"", b"c1\r\neth0", b"c2\r\neth0"])
STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), CONTENTS),
    st.tuples(st.just("drop"), st.sampled_from(NAMES)),
    st.tuples(st.just("relist"), st.sets(st.sampled_from(NAMES))),
)


@given(st.lists(STEPS))
def test_a_book_is_a_dict(steps):
    kept, expected = Book(), {}
    for step in steps:
        verb, *rest = step
        if verb == "put":
            name, content = rest
            kept.put(name, content)
            expected[name] = content
        elif verb == "drop":
            kept.drop(rest[0])
            expected.pop(rest[0], None)
        else:
            (names,) = rest
            new = names - expected.keys()
            kept.relist(names)
            assert new - {"lock"} <= kept.unread <= names
            expected = {name: expected.get(name) for name in names}
        assert kept.taken == expected.keys()
        assert len(kept) == len(expected)
        for content in (b"", b"c1\r\neth0", b"c2\r\neth0"):
            assert sorted(kept.holding(content)) == sorted(name for name, what in expected.items() if what == content)
        for first in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", "fd00::2"):
            address = ipaddress.ip_address(first)
            value = int(address)
            while text_of(value, address.version) in expected:
                value += 1
            assert kept.next_free(int(address), address.version) == value


@pytest.mark.parametrize("version", [4, 6])
def test_the_next_free_address_costs_the_same_behind_any_number_of_taken_ones(monkeypatch, version):
    seen = []

    def counted(*args):
        seen.append(args)
        return text_of(*args)

    monkeypatch.setattr(index, "text_of", counted)
    first = int(ipaddress.ip_address("10.0.0.2" if version == 4 else "fd00::2"))

    def looks(leases):
        kept = Book()
        kept.relist(text_of(first + number, version) for number in range(leases))
        assert kept.next_free(first, version) == first + leases
        seen.clear()
        for number in range(leases, leases + 5):
            assert kept.next_free(first, version) == first + number
            kept.put(text_of(first + number, version), b"")
        kept.drop(text_of(first + 3, version))
        assert kept.next_free(first, version) == first + 3
        return len(seen)

    assert looks(10) == looks(5000)
