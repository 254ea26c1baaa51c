"""The book of a directory, against a plain dict."""

import hypothesis.strategies as st
from hypothesis import given

from multus_daemon.plugins.builtin.host_local_index import Book

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
