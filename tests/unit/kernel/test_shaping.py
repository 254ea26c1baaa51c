"""Requests about limits, as pyroute2 reads them. The kernel reads them in tests/netns/test_bandwidth.py."""

from __future__ import annotations

from typing import Any

import pytest
from pyroute2.netlink.rtnl import RTM_NEWQDISC, RTM_NEWTFILTER
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from multus_daemon.kernel import shaping
from multus_daemon.kernel.shaping import Bucket
from multus_daemon.kernel.transport import HEADER, Request


def decoded(request: Request) -> Any:
    message = tcmsg(HEADER.pack(HEADER.size + len(request.body), request.kind, 0, 0, 0) + request.body)
    message.decode()
    return message


@pytest.mark.parametrize(("rate", "told"), [(1_000_000, 1_000_000), (10_000_000_000, 2**32 - 1)])
def test_a_bucket(rate: int, told: int) -> None:
    request = shaping.add_bucket(7, Bucket(rate, 225_000, 3_125_000))
    found = decoded(request)
    assert (request.kind, found["index"], found["handle"], found["parent"]) == (RTM_NEWQDISC, 7, 0x10000, 0xFFFFFFFF)
    assert found.get_attr("TCA_KIND") == "tbf"
    sent = found.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
    given = {key: value for key, value in sent.items() if value and isinstance(value, int)}
    assert given == {"rate": told, "limit": 225_000, "buffer": 3_125_000}


def test_a_redirection() -> None:
    request = shaping.add_redirect(7, 9)
    found = decoded(request)
    assert (request.kind, found["index"], found["parent"]) == (RTM_NEWTFILTER, 7, 0xFFFF0000)
    assert found.get_attr("TCA_KIND") == "u32"
    options = found.get_attr("TCA_OPTIONS")
    assert options.get_attr("TCA_U32_CLASSID") == 0x10001
    selector = options.get_attr("TCA_U32_SEL")
    assert (selector["flags"], selector["nkeys"]) == (1, 1)
    assert [(key["key_mask"], key["key_val"]) for key in selector["keys"]] == [(0, 0)]
    action = options.get_attr("TCA_U32_ACT").get_attr("TCA_ACT_PRIO_1")
    assert action.get_attr("TCA_ACT_KIND") == "mirred"
    mirred = action.get_attr("TCA_ACT_OPTIONS").get_attr("TCA_MIRRED_PARMS")
    assert (mirred["action"], mirred["eaction"], mirred["ifindex"]) == (4, 1, 9)
