"""CNI versions, by the rules of containernetworking/cni `pkg/version`."""

import pytest

from multus_daemon.spec.cni import versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 1, 0)),
        ("0.3.1", (0, 3, 1)),
        ("1.1.0", (1, 1, 0)),
        ("1", (1, 0, 0)),
        ("1.2", (1, 2, 0)),
        ("10.20.30", (10, 20, 30)),
        ("01.0.0", (1, 0, 0)),
    ],
)
def test_parse(text: str, expected: tuple[int, int, int]) -> None:
    assert versions.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["1.0.0.0", "a", "1.a", "1.0.0\n", " 1.0.0", "1..0", "1.0.", ".", "-1.0.0", "v1.0.0", "１.0.0", "²"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="one to three numbers"):
        versions.parse(text)


@pytest.mark.parametrize(
    ("version", "minimum", "expected"),
    [
        ("0.4.0", "0.4.0", True),
        ("0.3.1", "0.4.0", False),
        ("1.0.0", "0.4.0", True),
        ("0.10.0", "0.4.0", True),  # numbers, not text
        ("", "0.2.0", False),
        ("1", "1.0.0", True),
    ],
)
def test_at_least(version: str, minimum: str, expected: bool) -> None:
    assert versions.at_least(version, minimum) is expected


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION"])
@pytest.mark.parametrize("version", ["", *versions.SUPPORTED])
def test_verbs_of_each_version(version: str, verb: str) -> None:
    expected = {
        "CHECK": version in ("0.4.0", "1.0.0", "1.1.0"),
        "STATUS": version == "1.1.0",
        "GC": version == "1.1.0",
    }
    assert versions.allows(version, verb) is expected.get(verb, True)


def test_supported_are_those_of_the_libraries_in_order() -> None:
    assert versions.SUPPORTED == ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
    assert versions.SUPPORTED[-1] == versions.CURRENT


@pytest.mark.parametrize(
    ("version", "expected"),
    [("", True), ("0.1.0", True), ("1.1.0", True), ("1.2.0", False), ("1.0", False), ("1", False)],
)
def test_is_supported_wants_the_exact_text(version: str, expected: bool) -> None:
    assert versions.is_supported(version) is expected
