"""CNI_ARGS, by the rules of containernetworking/cni `pkg/types/args.go` and our leniency."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.errors import InvalidEnvironmentError
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid

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


@given(st.text())
def test_parse_raises_nothing_else(text: str) -> None:
    try:
        pairs = names.parse_args(text)
    except InvalidEnvironmentError:
        return
    assert names.parse_args(names.render_args(pairs)) == pairs


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
