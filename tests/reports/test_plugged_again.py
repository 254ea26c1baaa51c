"""The hot-plug controller lost the answer of an ADD and asked again, which failed for ever: the second is answered
as the first.

k8snetworkplumbingwg/multus-dynamic-networks-controller#235; kind: requests that are repeated.
"""

import json

from tests.reports.conftest import Site


def test_the_second_answer_is_the_first(site: Site) -> None:
    site.vendor("tenant")
    site.add()
    first, second = (site.plug("ADD", "tenant", "ens58") for _ in range(2))
    assert first[0] == second[0] == 200, second[1]
    assert json.loads(first[1])["Result"]["interfaces"] == json.loads(second[1])["Result"]["interfaces"]
    assert site.links() == ["ens58", "eth0"]
