"""JSON as Go reads and writes it. The expected texts were made with encoding/json of Go 1.26."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.gojson import JsonError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":1}', {"a": 1}),
        (b' {"a" : null}\n', {"a": None}),
        ("null", None),
        ("[]", []),
        ('"x"', "x"),
        ('{"a":1,"a":2}', {"a": 2}),
        ('"\\ud83d\\ude00"', "😀"),
        ("12345678901234567890123", 12345678901234567890123),
        ("1.5", 1.5),
    ],
)
def test_loads(text: bytes | str, value: object) -> None:
    assert gojson.loads(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "{",
        "{}{}",
        "{} x",
        "{'a':1}",
        '{"a":1,}',
        "[1,]",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "[-1e400]",
        "01",
        "nul",
        '"a\nb"',
        b'"\xff"',
        "// x\n{}",
        "\ufeff{}",
        "9" * 5000,
        "[" * 100_000,
        "\ud800",
    ],
)
def test_loads_refuses(text: bytes | str) -> None:
    with pytest.raises(JsonError):
        gojson.loads(text)


def test_nothing_is_told_apart_from_something_wrong() -> None:
    with pytest.raises(JsonError, match="unexpected end of JSON input"):
        gojson.loads(b" ")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_has_a_limit_that_does_not_depend_on_the_callers_stack(opening: str) -> None:
    def nested(levels: int) -> str:
        return opening * levels + "1" + {"[": "]", '{"a":': "}"}[opening] * levels

    value = gojson.loads(nested(gojson.NESTING_MAX))
    assert gojson.loads(gojson.dumps(value)) == value
    beside = f"[{nested(gojson.NESTING_MAX - 1)},[],[]]"
    assert gojson.loads(beside)[1:] == [[], []]
    with pytest.raises(JsonError, match="nested deeper than 200 levels"):
        gojson.loads(nested(gojson.NESTING_MAX + 1))


def test_many_brackets_are_no_deep_nesting() -> None:
    assert gojson.loads("[" + "[{}]," * 5000 + '"' + "[" * 500 + '"]')[-1] == "[" * 500


@given(st.binary() | st.text())
def test_loads_raises_nothing_else(data: bytes | str) -> None:
    try:
        value = gojson.loads(data)
    except JsonError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize("text", ["null", "[]", "1", '"x"', "true"])
def test_loads_object_refuses(text: str) -> None:
    with pytest.raises(JsonError, match="a JSON object is needed, not"):
        gojson.loads_object(text)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "a boolean"),
        (1, "a number"),
        (1.5, "a number"),
        ("", "a string"),
        ([], "an array"),
        ({}, "an object"),
    ],
)
def test_kind_of(value: object, kind: str) -> None:
    assert gojson.kind_of(value) == kind


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        ({}, "a", None),
        ({"a": 1}, "a", 1),
        ({"A": 1}, "a", 1),
        ({"bandWidth": 1}, "bandwidth", 1),
        ({"CNIVersion": "x"}, "cniVersion", "x"),
        ({"a": 1, "A": 2}, "a", 2),
        ({"A": 2, "a": 1}, "a", 1),
        ({"a": 1, "A": 2}, "A", 2),
        ({"a": None}, "a", None),
        ({"ab": 1}, "a", None),
        ({"a": 1, "ab": 2}, "ab", 2),
    ],
)
def test_get_ignores_case_and_takes_the_last(fields: dict[str, object], key: str, value: object) -> None:
    assert gojson.get(fields, key) == value


def test_with_keys_replaces_every_spelling() -> None:
    fields = {"Name": "a", "NAME": "b", "x": 1}
    assert gojson.with_keys(fields, {"name": "c"}) == {"x": 1, "name": "c"}
    assert fields == {"Name": "a", "NAME": "b", "x": 1}
    assert gojson.with_keys(fields, {}) == fields


@pytest.mark.parametrize(
    ("reader", "good", "bad"),
    [
        (gojson.get_str, ["", "x"], [1, True, [], {}, 1.5]),
        (gojson.get_int, [0, -1, 2**63], [True, "1", 1.5, [], {}]),
        (gojson.get_bool, [True, False], [0, 1, "true", [], {}]),
        (gojson.get_object, [{}, {"a": 1}], [[], "x", 1, False]),
        (gojson.get_list, [[], [1, None]], [{}, "x", 1, False]),
        (gojson.get_strings, [[], ["a", ""]], [["a", 1], [None], {}, "x"]),
    ],
)
def test_typed_readers(reader: object, good: list[object], bad: list[object]) -> None:
    assert callable(reader)
    assert reader({}, "k") is None
    assert reader({"K": None}, "k") is None
    for value in good:
        assert reader({"K": value}, "k") == value
    for value in bad:
        with pytest.raises(JsonError, match=r"^k"):
            reader({"k": value}, "k")


@pytest.mark.parametrize(("text", "value"), [("1.0", 1), ("1e3", 1000), ("-2.0", -2), ("0.0", 0)])
def test_whole_numbers_are_integers_however_they_are_written(text: str, value: int) -> None:
    # libcni passes every number through a float64, and Go writes 1.0 as 1; a plugin never sees the fraction.
    assert gojson.get_int(gojson.loads_object(f'{{"a":{text}}}'), "a") == value


def test_numbers_are_written_as_go_writes_them() -> None:
    assert gojson.dumps(gojson.loads('{"a":1.0,"b":1e3,"c":1e16,"d":1e20,"e":1e21,"g":0.1}')) == (
        b'{"a":1,"b":1000,"c":10000000000000000,"d":100000000000000000000,"e":1e+21,"g":0.1}'
    )


def test_large_integers_lose_nothing() -> None:
    # Better than libcni, which rounds from 2^53 on.
    assert gojson.dumps(gojson.loads("[9007199254740993]")) == b"[9007199254740993]"


def test_escapes() -> None:
    assert gojson.dumps('a<b>&\u2028\u2029\u007f\b\f\x01\t"\\/é') == (
        b'"a\\u003cb\\u003e\\u0026\\u2028\\u2029\x7f\\b\\f\\u0001\\t\\"\\\\/\xc3\xa9"'
    )


def test_escapes_apply_to_keys_too() -> None:
    assert gojson.dumps({"<": 1}) == b'{"\\u003c":1}'


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    assert gojson.dumps("a\udcffb\ud800") == '"a\ufffdb\ufffd"'.encode()


def test_order_of_keys() -> None:
    value = {"b": {"z": 1, "Y": 2}, "a": 3}
    assert gojson.dumps(value) == b'{"a":3,"b":{"Y":2,"z":1}}'
    assert gojson.dumps(value, sort_keys=False) == b'{"b":{"z":1,"Y":2},"a":3}'


def test_indented() -> None:
    assert (
        gojson.dumps_indented({"b": [1, {}], "a": []})
        == b'{\n    "a": [],\n    "b": [\n        1,\n        {}\n    ]\n}'
    )
    assert gojson.dumps_indented({"b": 1, "a": "<"}, sort_keys=False) == b'{\n    "b": 1,\n    "a": "\\u003c"\n}'


@given(JSON)
def test_what_is_written_is_read_back(value: object) -> None:
    for data in (gojson.dumps(value), gojson.dumps_indented(value)):
        assert not data.endswith(b"\n")
        assert not set(data) & set(b"<>&")
        assert _same(gojson.loads(data), value)


def _same(left: object, right: object) -> bool:
    if isinstance(left, float | int) and isinstance(right, float | int):
        return math.isclose(left, right, rel_tol=0)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right


@pytest.mark.parametrize("text", ["YQ", "YQ==x", "Y Q==", "é", "\ud800", "****"])
def test_bytes_that_are_no_base64(text):
    with pytest.raises(gojson.JsonError, match="a: standard base64 with padding is needed"):
        gojson.get_bytes({"a": text}, "a")


def test_bytes():
    assert gojson.get_bytes({"A": "YWJj"}, "a") == b"abc"
    assert gojson.get_bytes({"a": "YW\r\nJj\n"}, "a") == b"abc"
    assert gojson.get_bytes({"a": ""}, "a") == b""
    assert gojson.get_bytes({"a": None}, "a") is None


@pytest.mark.parametrize("piece", [b"[],", b"{},"])
def test_more_objects_than_any_text_needs_are_refused(piece: bytes) -> None:
    inner = gojson.CONTAINERS_MAX - 1
    assert len(gojson.loads(b"[" + (piece * inner)[:-1] + b"]")) == inner
    with pytest.raises(JsonError, match="more than 100000 objects and arrays"):
        gojson.loads(b"[" + piece * inner + b"[]]")
