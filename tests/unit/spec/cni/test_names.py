"""Container ids, names of networks and interfaces, CNI_ARGS: containernetworking/cni `pkg/utils` and `pkg/types`."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.errors import InvalidEnvironmentError
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid, label_problem, subdomain_problem

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


# --- names of objects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a", "0", "a-b", "a" * 63])
def test_labels(value: str) -> None:
    assert label_problem(value) == ""
    assert subdomain_problem(value) == ""


@pytest.mark.parametrize("value", ["", "A", "-a", "a-", "a_b", "..", "a/b", "a\n", "ä", "a" * 254])
def test_neither(value: str) -> None:
    assert label_problem(value)
    assert subdomain_problem(value)


@pytest.mark.npwg("3.3")
@pytest.mark.parametrize("value", ["a.b", "a" * 253])
def test_only_subdomains(value: str) -> None:
    assert label_problem(value)
    assert subdomain_problem(value) == ""


@pytest.mark.parametrize("value", [".", "a.", ".a", "a..b", "a.-b"])
def test_parts_of_subdomains(value: str) -> None:
    assert subdomain_problem(value)


# --- CNI_ARGS ---------------------------------------------------------------------------------------------------------

KEYS = st.text(st.characters(blacklist_characters=";=", blacklist_categories=["Cs"]), min_size=1).filter(
    lambda text: text == text.strip() != ""
)
VALUES = st.text(st.characters(blacklist_characters=";", blacklist_categories=["Cs"])).filter(
    lambda text: text == text.strip()
)


@pytest.mark.conformance("config-17")
@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", ()),
        ("A=1", (("A", "1"),)),
        ("A=1;B=2", (("A", "1"), ("B", "2"))),
        ("B=2;A=1", (("B", "2"), ("A", "1"))),
        ("A=", (("A", ""),)),
        ("A=1;", (("A", "1"),)),  # an error in Go
        (";;A=1;;", (("A", "1"),)),  # an error in Go
        (" ; ", ()),
        ("A=x=y", (("A", "x=y"),)),  # an error in Go
        (" A = 1 ", (("A", "1"),)),
        ("A=1;A=2", (("A", "1"), ("A", "2"))),
        ("a=1;A=2", (("a", "1"), ("A", "2"))),
        ("A=é\u2003b", (("A", "é\u2003b"),)),
    ],
)
def test_parse(text: str, pairs: names.Pairs) -> None:
    assert names.parse_args(text) == pairs


@pytest.mark.conformance("pods-24")
@pytest.mark.parametrize("text", ["A", "A=1;B", "=1", " =1", "A=1;=", "="])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(InvalidEnvironmentError, match="CNI_ARGS") as caught:
        names.parse_args(text)
    assert caught.value.code == 4
    assert caught.value.details.strip("'").strip() in text


@given(st.lists(st.tuples(KEYS, VALUES)))
def test_what_is_rendered_is_read_back(pairs: list[tuple[str, str]]) -> None:
    assert names.parse_args(names.render_args(pairs)) == tuple(pairs)


def test_kubernetes() -> None:
    found = names.kubernetes_args(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=u;MAC=m;IP=i"
    )
    assert found == names.KubernetesArgs(Namespace("ns"), PodName("p"), PodUid("u"), "c", (("MAC", "m"), ("IP", "i")))
    assert found.has_pod


@pytest.mark.parametrize("text", ["", "K8S_POD_NAME=p", "K8S_POD_NAMESPACE=ns", "k8s_pod_name=p;k8s_pod_namespace=ns"])
def test_no_pod(text: str) -> None:
    assert not names.kubernetes_args(text).has_pod


def test_the_last_of_equal_keys_counts() -> None:
    assert names.kubernetes_args("K8S_POD_NAME=a;K8S_POD_NAME=b").name == "b"


@pytest.mark.conformance("config-17")
def test_a_delegate_gets_the_five_keys_first_and_in_order() -> None:
    pod = names.kubernetes_args("X=1;K8S_POD_UID=u;K8S_POD_NAME=p;K8S_POD_NAMESPACE=ns;IgnoreUnknown=0")
    assert names.render_args(names.plugin_args(pod, [("MAC", "02:00:00:00:00:01")])) == (
        "IgnoreUnknown=true;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID=;K8S_POD_UID=u"
        ";X=1;MAC=02:00:00:00:00:01"
    )
