"""The table of deadlines: what has to stay below what, and where its values go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from multus_daemon import deadlines as d
from multus_daemon.metrics.declared import VERBS
from multus_daemon.settings import Settings
from multus_tools import deadlines as tools

SHIM_REPLY = {
    "ADD": d.SHIM_REPLY_SECONDS,
    "DEL": d.SHIM_DEL_REPLY_SECONDS,
    "CHECK": d.SHIM_REPLY_SECONDS,
    "GC": d.SHIM_REPLY_SECONDS,
    "STATUS": d.SHIM_STATUS_REPLY_SECONDS,
}
SHIM_LIFE = d.SHIM_STDIN_SECONDS + d.SHIM_DAEMON_WAIT_SECONDS + d.SHIM_REPLY_SECONDS + d.SHIM_STDOUT_SECONDS
"""Lifetime of a shim that waits as long as it may at every step."""

INSIDE_A_PLUGIN = (
    d.BUILTIN_UNDO_SECONDS,
    d.TOOL_SECONDS + d.KILL_GRACE_SECONDS,
    d.HOST_LOCAL_LOCK_SECONDS,
    d.ADDRESSES_SECONDS,
    d.RETURN_SECONDS,
    d.BRIDGE_PORT_UP_SECONDS,
    d.NETLINK_SECONDS,
)


def times() -> Iterator[tuple[str, float]]:
    """Every number of both tables, with the name of its constant."""
    for name, value in (vars(d) | vars(tools)).items():
        if name.isupper():
            several = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
            yield from ((name, each) for each in several)


def test_every_value_is_a_time_in_seconds() -> None:
    found = list(times())
    assert len({name for name, _ in found}) > 60
    assert [name for name, value in found if not name.endswith("_SECONDS") or not value > 0] == []


@pytest.mark.parametrize("name", [name for name, value in vars(d).items() if isinstance(value, tuple)])
def test_a_range_begins_with_the_smaller(name: str) -> None:
    first, last = getattr(d, name)
    assert first < last


ORDERS: dict[str, list[tuple[float, ...]]] = {
    "a review is answered before its connection ends": [
        (tools.WEBHOOK_LOOKUP_SECONDS, tools.WEBHOOK_REVIEW_SECONDS, tools.WEBHOOK_SECONDS),
        (d.METRICS_REVIEW_SECONDS, d.METRICS_SECONDS),
    ],
    "a node ends its archive before it is given up": [
        (tools.CTL_BUNDLE_SECONDS, tools.KUBECTL_NODE_SECONDS),
        (10 * tools.KUBECTL_NODE_SECONDS, tools.KUBECTL_BUNDLE_SECONDS),
    ],
    # A request, from the outside to the inside.
    "the daemon answers before the shim gives up": [
        (d.VERB_SECONDS[verb], SHIM_REPLY[verb]) for verb in ("ADD", "CHECK", "GC", "STATUS")
    ],
    "the shim answers before the kubelet gives up": [
        (d.SHIM_REPLY_SECONDS, d.KUBELET_RUN_SANDBOX_SECONDS),
        (d.SHIM_DAEMON_WAIT_SECONDS + d.VERB_SECONDS["ADD"], d.KUBELET_RUN_SANDBOX_SECONDS),
        (d.SHIM_DEL_WAIT_SECONDS + d.SHIM_DEL_REPLY_SECONDS, d.KUBELET_STOP_SANDBOX_SECONDS),
        (d.VERB_SECONDS["DEL"], d.KUBELET_STOP_SANDBOX_SECONDS),
    ],
    "an ADD is undone before the kubelet tries again": [
        (d.VERB_SECONDS["ADD"] + d.UNDO_SECONDS, d.KUBELET_RUN_SANDBOX_SECONDS)
    ],
    "a DEL waits for the daemon no longer than others": [
        (d.SHIM_DEL_WAIT_SECONDS, d.SHIM_DAEMON_WAIT_SECONDS),
        (d.SHIM_DEL_REPLY_SECONDS, d.SHIM_REPLY_SECONDS),
    ],
    "those who call the shim read its error": [
        (d.SHIM_DAEMON_WAIT_SECONDS + d.SHIM_REPLY_SECONDS, tools.CTL_SHIM_SECONDS)
    ],
    "a busy node and one slow plugin are no deadline of the verb": [
        (d.SLOT_WAIT_SECONDS[verb] + d.DELEGATE_SECONDS, d.VERB_SECONDS[verb]) for verb in ("ADD", "CHECK", "GC")
    ]
    + [
        (d.SLOT_WAIT_SECONDS["DEL"] + d.DELEGATE_DEL_SECONDS, d.DETACH_SECONDS, d.VERB_SECONDS["DEL"]),
        (d.SLOT_WAIT_SECONDS["STATUS"], d.STATUS_PLUGINS_SECONDS, d.VERB_SECONDS["STATUS"]),
    ],
    "who has waited for a turn may still wait for a plugin": [
        (d.REQUEST_WAIT_SECONDS[verb] + d.SLOT_WAIT_SECONDS[verb], d.VERB_SECONDS[verb])
        for verb in ("ADD", "CHECK", "GC", "DEL")
    ],
    "a DEL that waits for its turn goes to the spool before it fails": [
        (d.SHIM_DEL_REPLY_SECONDS, d.REQUEST_WAIT_SECONDS["DEL"])
    ],
    "STATUS says that the node is busy": [(d.REQUEST_WAIT_SECONDS["STATUS"], d.VERB_SECONDS["STATUS"])],
    "a disk that hangs is named before the shim gives up": [
        (d.RECORD_READ_SECONDS, d.SHIM_DEL_REPLY_SECONDS),
        (d.RECORD_READ_SECONDS, d.DETACH_SECONDS),
    ],
    "a binDir that hangs is named before the caller gives up": [
        (d.PLUGIN_LOOKUP_SECONDS, d.STATUS_PLUGINS_SECONDS),
        (4 * d.PLUGIN_LOOKUP_SECONDS, d.SHIM_DEL_REPLY_SECONDS),
    ],
    "what hangs does not keep the error of another network": [(d.SETTLE_SECONDS, d.DELEGATE_SECONDS)],
    # The ADDs of the network wait meanwhile.
    "a GC has time for its parts": [
        (d.GC_CONTAINER_SECONDS, d.GC_SWEEP_SECONDS),
        (d.GC_SWEEP_SECONDS + d.GC_NETWORK_SECONDS, d.GC_TOTAL_SECONDS, d.VERB_SECONDS["GC"]),
        (d.GC_NETWORK_SECONDS, d.VERB_SECONDS["ADD"]),
    ],
    # Plugins, their children and tools.
    "a built-in says why before it is ended": [
        (seconds, d.DELEGATE_DEL_SECONDS, d.DELEGATE_SECONDS) for seconds in INSIDE_A_PLUGIN
    ],
    "iptables tells of its lock before it is ended": [(d.IPTABLES_LOCK_SECONDS, d.TOOL_SECONDS)],
    "a DEL whose program the kernel holds is over before that of its plugin": [
        (d.TOOL_SECONDS + d.KILL_GRACE_SECONDS + d.KILLED_SECONDS, d.DELEGATE_DEL_SECONDS),
        (d.PIPES_AFTER_EXIT_SECONDS, d.KILLED_SECONDS),
    ],
    "a plugin can be undone": [(d.DELEGATE_DEL_SECONDS, d.UNDO_SECONDS + 0.001)],
    # The API server.
    "reads of an ADD are the shortest requests": [
        (d.POD_EVENT_SECONDS, d.API_READ_SECONDS, d.API_REQUEST_SECONDS),
        (d.UNSYNCED_SECONDS, d.POD_EVENT_SECONDS + 0.001),
        (d.POD_EVENT_SECONDS + d.API_READ_SECONDS, d.VERB_SECONDS["ADD"] - d.DELEGATE_SECONDS),
    ],
    "network-status": [
        (d.NETWORK_STATUS_PATIENCE_SECONDS, d.NETWORK_STATUS_SECONDS, d.STATUSES_POD_SECONDS),
        (2 * d.NETWORK_STATUS_ATTEMPT_SECONDS + d.NETWORK_STATUS_RETRY_SECONDS[1], 10.001),
    ],
    "an Event": [(d.EVENT_ATTEMPT_SECONDS, d.EVENT_KEEP_TRYING_SECONDS)],
    # Two bookmarks may be missing.
    "watches end by the server's word": [
        (2 * 60, d.INFORMER_INACTIVITY_SECONDS, d.INFORMER_WATCH_SECONDS[0]),
    ],
    "a certificate": [(d.CERTIFICATE_REQUEST_SECONDS, d.CERTIFICATE_SECONDS)],
    # Loops, and the end.
    "a spool entry that is cut off has no shim any more": [(SHIM_LIFE, d.SPOOL_CUT_OFF_SECONDS)],
    "a run of reconcile ends before the next": [
        (d.RECONCILE_CONTAINER_SECONDS, d.RECONCILE_RUN_SECONDS),
        (d.RECONCILE_RUN_SECONDS + d.RECONCILE_CONTAINER_SECONDS, d.RECONCILE_SECONDS),
        (d.RECONCILE_BLIND_SECONDS, d.RECONCILE_SECONDS),
    ],
    "what is set aside was tried many times": [(10 * d.RECONCILE_RETRY_SECONDS[1], d.SET_ASIDE_SECONDS)],
    "a configuration that is fought over": [(d.RESTORE_SECONDS[1], d.RESTORE_CALM_SECONDS)],
    # Both servers, the unix socket and the metrics, read what clients send, then close the connections; and of the log
    # standard error and the file.
    "what follows the drain takes 20 seconds at most": [
        (d.KILL_GRACE_SECONDS, d.CANCELLED_SECONDS),
        (
            d.CANCELLED_SECONDS
            + 2 * (d.LINGER_SECONDS + d.CONNECTIONS_SECONDS)
            + d.REPORT_SECONDS
            + 2 * d.LOG_FLUSH_SECONDS,
            20.001,
        ),
        (d.SHIM_DEL_WAIT_SECONDS, d.DRAIN_SECONDS),
    ],
}
"""Each is longer than the one before it; with `+ 0.001` it may be as long."""


@pytest.mark.weak_spot(33, 34)
@pytest.mark.parametrize("name", ORDERS)
def test_what_is_inside_ends_before_what_is_outside(name: str) -> None:
    for seconds in ORDERS[name]:
        assert list(seconds) == sorted(set(seconds))


def test_whole_seconds_are_whole() -> None:
    """iptables takes nothing else, and `struct timeval` is packed from them."""
    for seconds in (
        d.IPTABLES_LOCK_SECONDS,
        d.NETLINK_SECONDS,
        *d.INFORMER_WATCH_SECONDS,
    ):
        assert isinstance(seconds, int)


# --- where they go ---------------------------------------------------------------------------------------------------


def test_every_verb_has_its_deadlines() -> None:
    assert (
        set(d.VERB_SECONDS) == set(d.SLOT_WAIT_SECONDS) == set(d.REQUEST_WAIT_SECONDS) == set(SHIM_REPLY) == set(VERBS)
    )


def test_defaults_of_settings() -> None:
    settings = Settings()
    assert settings.plugins.delegate_timeout_seconds == d.DELEGATE_SECONDS
    assert settings.deletes.reconcile_seconds == d.RECONCILE_SECONDS
