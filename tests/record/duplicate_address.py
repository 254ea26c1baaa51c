"""Pods are force-deleted while their containers run; others start in the same range of `whereabouts`.

Upstream is not Multus here: it is the plugin and the reconciler of whereabouts, below our daemon.
"""

from __future__ import annotations

import time

from tests.e2e.addresses.fleet import Fleet, Subject
from tests.e2e.addresses.rows import RECONCILED, Row
from tests.e2e.build_tools import WHEREABOUTS, pinned
from tests.record.incident import Incident, Seen
from tests.record.side import Side


def show(side: Side) -> Seen:
    subject = Subject.BINARY if side.release else Subject.BUILTIN
    with Fleet(subject, server=side.server) as fleet:
        row = Row(fleet, 1 if side.release else 2)
        row.lan()
        old = row.start_many(0, 0)
        for pod in old:
            fleet.server.delete_pod(pod.name)
        time.sleep(RECONCILED)
        new = row.start_many(0, 0)
        time.sleep(1)
        assert len(old) == len(new) == 2
        version = pinned("github.com/k8snetworkplumbingwg/whereabouts", WHEREABOUTS)
        who = f"whereabouts {version}" if side.release else "the built-in"
        return Seen(row.twice() > 0, f"{who}: {row.twice()} of 2 addresses are in two running pods at once")


ROW = Incident(
    __name__,
    "whereabouts' reconciler frees addresses of containers that still run, and gives them to other pods",
    "https://github.com/k8snetworkplumbingwg/whereabouts/issues/207",
    show,
)
