"""Calico's IPv6 default route has a link-local gateway, and the pod kept it beside another: it has the one asked for.

projectcalico/cni-plugin#429; kind: default routes.
"""

import pytest

from tests.reports.conftest import LINK, Site

COMMANDS = f"""{LINK}
in="ip -n $(basename "$CNI_NETNS")"
$in link set "$CNI_IFNAME" address ee:ee:ee:ee:ee:e1 up
$in -6 route add default via fe80::ecee:eeff:feee:eeee dev "$CNI_IFNAME" onlink metric 1024"""


@pytest.mark.parametrize(
    ("asked", "route"),
    [("", ("eth0", "fe80::ecee:eeff:feee:eeee")), (', "default-route": ["2001:db8:4::1"]', ("net1", "2001:db8:4::1"))],
)
def test_the_pod_has_one(site: Site, asked: str, route: tuple[str, str]) -> None:
    site.routed()
    config = {"cniVersion": "1.0.0", "name": "calico", "type": site.plugin("calico", commands=COMMANDS)}
    site.network("calico", config)
    site.add(f'[{{"name": "lan"{asked}}}]', default="calico")
    assert site.default_routes("-6") == [route]
