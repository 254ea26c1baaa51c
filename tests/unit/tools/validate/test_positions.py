"""Locate each value of a JSON text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_tools.validate import positions


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1", {(): (0, "1")}),
        (' {"a" : 1.5e3}', {(): (1, '{"a" : 1.5e3}'), ("a",): (2, "1.5e3")}),
        ("[[],{}, null]", {(): (0, "[[],{}, null]"), (0,): (1, "[]"), (1,): (4, "{}"), (2,): (8, "null")}),
        (
            '{"a{\\"": ["x,]", {"b": "\\\\"}]}',
            {
                (): (0, '{"a{\\"": ["x,]", {"b": "\\\\"}]}'),
                ('a{"',): (1, '["x,]", {"b": "\\\\"}]'),
                ('a{"', 0): (10, '"x,]"'),
                ('a{"', 1): (17, '{"b": "\\\\"}'),
                ('a{"', 1, "b"): (18, '"\\\\"'),
            },
        ),
        ('{"a": 1, "a": 2}', {(): (0, '{"a": 1, "a": 2}'), ("a",): (9, "2")}),
    ],
)
def test_where_keys_and_values_are(text: str, found: dict[tuple[str | int, ...], tuple[int, str]]) -> None:
    spans, _ = positions.positions(text)
    assert {path: (span.key, text[span.start : span.end]) for path, span in spans.items()} == found


@given(json_values())
def test_every_value_is_where_it_is_said_to_be(value: Any) -> None:
    text = json.dumps(value, indent=1)
    for path, span in positions.positions(text)[0].items():
        inner = value
        for name in path:
            inner = inner[name]
        assert json.loads(text[span.start : span.end]) == inner
        if path and isinstance(path[-1], str):
            assert text[span.key :].startswith(json.dumps(path[-1]))


def test_a_place_is_taken_out_of_a_message() -> None:
    message = "CNI configuration: trailing comma (line 2, column 7); more"
    assert positions.place_of_fault(message) == ("CNI configuration: trailing comma; more", (2, 7))
    assert positions.place_of_fault("no place") == ("no place", None)
