"""Names of Kubernetes objects."""

import pytest

from multus_daemon.spec.cni.names import label_problem, subdomain_problem


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
