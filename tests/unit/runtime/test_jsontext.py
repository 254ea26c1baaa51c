"""Locate faults and duplicate keys in a JSON text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.runtime import jsontext
from multus_daemon.spec.cni import gojson


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("x", "line 1, column 1"),
        ('{"a": 1,\n  "b" 2}', "line 2, column 7"),
        ('{"a": 1,}', "line 1, column 9"),
        ('{"ä": 1 "b"}', "line 1, column 9"),
        ("[1,\n\n 2 3]", "line 3, column 4"),
        ('{\n"a":\n', "line 2, column 5"),
        ('{"a": "\x01"}', "line 1, column 8"),
    ],
)
def test_line_and_column_of_a_fault(text: str, where: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(ValueError, match="."):
            msgspec.json.decode(data)
        with pytest.raises(gojson.JsonError) as caught:
            gojson.loads(data)
        assert str(caught.value).endswith(f" ({where})")


def test_a_fault_without_a_place_is_told_as_it_is() -> None:
    assert jsontext.fault(b"{}", ValueError("too deep (byte x)")) == "too deep (byte x)"


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('{"a": 1, "b": {"a": 1}, "c": [{"a": 1}, {"a": 1}]}', []),
        ('{"a": 1, "b": 2, "a": 1}', ["a"]),
        ('{"a": 1, "A": 1}', ["a", "A"]),
        ('{"b": {"x": 1, "x": 2}, "c": [[], [{"y": {"z": 1, "z": 1}}]]}', ["b.x", "c[1][0].y.z"]),
        ('{"b": {"x": 1, "X": 2}}', []),
        ("[]", []),
    ],
)
def test_keys_that_are_there_twice(text: str, paths: list[str]) -> None:
    assert jsontext.repeated_keys(text.encode(), same=str.lower) == paths


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
    spans = jsontext.positions(text)
    assert {path: (span.key, text[span.start : span.end]) for path, span in spans.items()} == found


@given(json_values())
def test_every_value_is_where_it_is_said_to_be(value: Any) -> None:
    text = json.dumps(value, indent=1)
    for path, span in jsontext.positions(text).items():
        inner = value
        for name in path:
            inner = inner[name]
        assert json.loads(text[span.start : span.end]) == inner
        if path and isinstance(path[-1], str):
            assert text[span.key :].startswith(json.dumps(path[-1]))


def test_a_place_is_taken_out_of_a_message() -> None:
    message = "CNI configuration: trailing comma (line 2, column 7); more"
    assert jsontext.place_of_fault(message) == ("CNI configuration: trailing comma; more", (2, 7))
    assert jsontext.place_of_fault("no place") == ("no place", None)
