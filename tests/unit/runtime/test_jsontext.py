"""Locate faults and duplicate keys in a JSON text."""

from __future__ import annotations

import msgspec
import pytest

from multus_daemon.runtime import jsontext
from multus_daemon.spec.cni import gojson


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
    assert jsontext.fault(b"{}", ValueError("too deep (byte x)")) == "not JSON: too deep (byte x)"


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
