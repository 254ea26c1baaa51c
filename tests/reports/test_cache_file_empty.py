"""A power failure left an empty file of upstream for a container, which no DEL could read: the pod ends, and what is
unknown is kept.

k8snetworkplumbingwg/multus-cni#1087; kind: DEL with less than ADD had.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("content", ["null", "[]"])
def test_a_file_that_names_no_network_ends_at_once(site: Site, content: str) -> None:
    (site.node.cni_dir / site.container).write_text(content)
    assert site.call("DEL").code == 0


@pytest.mark.parametrize("content", ["", '[{"Conf": {'])
def test_an_unreadable_one_is_named_and_the_pod_ends(site: Site, content: str) -> None:
    path = site.node.cni_dir / site.container
    path.write_text(content)
    answers = [site.call("DEL") for _ in range(5)]
    assert str(path) in answers[0].stdout.decode()
    assert answers[-1].code == 0
    assert path.exists()
    path.unlink()
