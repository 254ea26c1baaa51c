"""Container ids, network names and interface names, by the rules of containernetworking/cni `pkg/utils`."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import names

LETTERS_AND_DIGITS = string.ascii_letters + string.digits
GOOD = ["a", "A", "0", "a.b_c-D", "0-", "a..", "k8s_POD_x", "9.9"]
BAD = [
    "-a",
    ".a",
    "_a",
    "a b",
    "a/b",
    "a\n",
    "\na",
    "a\0",
    "é",
    "aé",
    "a:b",
    "a;b",
    "а",
    " ",
    "..",
    "a\u2028",
]  # а: Cyrillic


@pytest.mark.parametrize("value", GOOD)
def test_good_identifiers(value: str) -> None:
    assert names.container_id_problem(value) == ""
    assert names.network_name_problem(value) == ""


@pytest.mark.parametrize("value", BAD)
def test_bad_identifiers(value: str) -> None:
    assert names.container_id_problem(value) == "invalid characters in containerID"
    assert names.network_name_problem(value) == "invalid characters found in network name"


def test_empty_identifiers() -> None:
    assert names.container_id_problem("") == "missing containerID"
    assert names.network_name_problem("") == "missing network name"


def test_container_id_is_limited_because_files_are_named_after_it() -> None:
    assert names.container_id_problem("a" * 128) == ""
    assert names.container_id_problem("a" * 129) == "containerID is longer than 128 bytes"


def test_network_name_has_no_limit() -> None:
    assert names.network_name_problem("a" * 5000) == ""


@given(st.text(max_size=40))
def test_an_identifier_is_ascii_and_starts_with_a_letter_or_digit(value: str) -> None:
    expected = value[:1] in tuple(LETTERS_AND_DIGITS) and all(c in LETTERS_AND_DIGITS + "_.-" for c in value)
    assert (names.network_name_problem(value) == "") is expected
    assert (names.container_id_problem(value) == "") is expected


@pytest.mark.parametrize("value", ["eth0", "a", "net1.100", "veth-1_2", "...", "a" * 15, "é" * 7, "@", "e\\0"])
def test_good_interface_names(value: str) -> None:
    assert names.ifname_problem(value) == ""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "interface name is empty"),
        ("a" * 16, "interface name is too long"),
        ("é" * 8, "interface name is too long"),  # 16 bytes in 8 characters
        ("/" * 16, "interface name is too long"),  # the length is looked at first
        (".", "interface name is . or .."),
        ("..", "interface name is . or .."),
        ("a/b", "interface name contains / or : or whitespace characters"),
        ("e:0", "interface name contains / or : or whitespace characters"),
        ("a b", "interface name contains / or : or whitespace characters"),
        ("eth0\n", "interface name contains / or : or whitespace characters"),
        ("\teth0", "interface name contains / or : or whitespace characters"),
        ("a\v", "interface name contains / or : or whitespace characters"),
        ("a\x85b", "interface name contains / or : or whitespace characters"),
        ("a\u00a0b", "interface name contains / or : or whitespace characters"),
        ("a\u2003b", "interface name contains / or : or whitespace characters"),
        ("a\u3000b", "interface name contains / or : or whitespace characters"),
        ("a\0b", "interface name contains / or : or whitespace characters"),
        ("e%d", "interface name contains %, which the kernel replaces with a number"),
        ("%:", "interface name contains / or : or whitespace characters"),
    ],
)
def test_bad_interface_names(value: str, problem: str) -> None:
    assert names.ifname_problem(value) == problem


@pytest.mark.parametrize("value", ["", "/", "a", "/var//lib/../x", "é" * 127, "/" + "d/" * 1791, "/\ud800"])
def test_good_paths(value: str) -> None:
    assert names.path_problem(value) == ""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("/a\0", "it has a NUL byte"),
        ("/" + "d/" * 1792, "it has more than 3583 bytes"),
        ("/a/" + "é" * 128, "a component has more than 255 bytes"),
    ],
)
def test_bad_paths(value: str, problem: str) -> None:
    assert names.path_problem(value) == problem


def test_a_link_may_have_a_longer_name_beside_its_own() -> None:
    assert names.ifname_problem("a" * 127, longest=names.ALTERNATIVE_NAME_MAX_BYTES) == ""
    assert names.ifname_problem("a" * 128, longest=names.ALTERNATIVE_NAME_MAX_BYTES) == "interface name is too long"


@given(st.text(alphabet=st.characters()))
def test_any_text_is_judged(value: str) -> None:
    problem = names.ifname_problem(value)
    if not problem:
        assert 0 < len(value.encode("utf-8", "surrogatepass")) <= 15
        assert not any(character.isspace() for character in value)
        assert "/" not in value
        assert ":" not in value


def test_a_name_that_is_no_utf8_is_judged_too() -> None:
    assert names.ifname_problem(b"eth\xff".decode("utf-8", "surrogateescape")) == ""
