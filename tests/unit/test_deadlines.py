"""The table of deadlines: what has to stay below what, and where its values go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from multus_daemon import deadlines as d
from multus_daemon.metrics import VERBS
from multus_daemon.settings import Settings

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
    d.BRIDGE_PORT_UP_SECONDS,
    d.NETLINK_SECONDS,
)


def times() -> Iterator[tuple[str, float]]:
    """Every number of the table, with the name of its constant."""
    for name, value in vars(d).items():
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


def test_a_review_is_answered_before_its_connection_ends() -> None:
    assert d.WEBHOOK_LOOKUP_SECONDS < d.WEBHOOK_REVIEW_SECONDS < d.WEBHOOK_SECONDS
    assert d.METRICS_REVIEW_SECONDS < d.METRICS_SECONDS


def test_a_node_ends_its_archive_before_it_is_given_up() -> None:
    assert d.CTL_BUNDLE_SECONDS < d.KUBECTL_NODE_SECONDS
    assert 10 * d.KUBECTL_NODE_SECONDS < d.KUBECTL_BUNDLE_SECONDS


# --- a request, from the outside to the inside -----------------------------------------------------------------------


@pytest.mark.weak_spot(33, 34)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC", "STATUS"])
def test_the_daemon_answers_before_the_shim_gives_up(verb: str) -> None:
    assert d.VERB_SECONDS[verb] < SHIM_REPLY[verb]


@pytest.mark.weak_spot(33, 34)
def test_the_shim_answers_before_the_kubelet_gives_up() -> None:
    assert d.SHIM_REPLY_SECONDS < d.KUBELET_RUN_SANDBOX_SECONDS
    assert d.SHIM_DAEMON_WAIT_SECONDS + d.VERB_SECONDS["ADD"] < d.KUBELET_RUN_SANDBOX_SECONDS
    assert d.SHIM_DEL_WAIT_SECONDS + d.SHIM_DEL_REPLY_SECONDS < d.KUBELET_STOP_SANDBOX_SECONDS
    assert d.VERB_SECONDS["DEL"] < d.KUBELET_STOP_SANDBOX_SECONDS


def test_an_add_is_undone_before_the_kubelet_tries_again() -> None:
    assert d.VERB_SECONDS["ADD"] + d.UNDO_SECONDS < d.KUBELET_RUN_SANDBOX_SECONDS


def test_a_del_waits_for_the_daemon_no_longer_than_others() -> None:
    assert d.SHIM_DEL_WAIT_SECONDS < d.SHIM_DAEMON_WAIT_SECONDS
    assert d.SHIM_DEL_REPLY_SECONDS < d.SHIM_REPLY_SECONDS


def test_those_who_call_the_shim_read_its_error() -> None:
    assert d.SHIM_DAEMON_WAIT_SECONDS + d.SHIM_REPLY_SECONDS < d.CTL_SHIM_SECONDS


@pytest.mark.weak_spot(33, 34)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC"])
def test_a_busy_node_and_one_slow_plugin_are_no_deadline_of_the_verb(verb: str) -> None:
    assert d.SLOT_WAIT_SECONDS[verb] + d.DELEGATE_SECONDS < d.VERB_SECONDS[verb]


@pytest.mark.weak_spot(33, 34)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC", "DEL"])
def test_who_has_waited_for_a_turn_may_still_wait_for_a_plugin(verb: str) -> None:
    assert d.REQUEST_WAIT_SECONDS[verb] + d.SLOT_WAIT_SECONDS[verb] < d.VERB_SECONDS[verb]


def test_a_del_that_waits_for_its_turn_goes_to_the_spool_before_it_fails() -> None:
    assert d.REQUEST_WAIT_SECONDS["DEL"] > d.SHIM_DEL_REPLY_SECONDS


def test_a_status_is_told_that_the_node_is_busy() -> None:
    assert d.REQUEST_WAIT_SECONDS["STATUS"] < d.VERB_SECONDS["STATUS"]


@pytest.mark.weak_spot(33, 34)
def test_the_same_for_del_and_status() -> None:
    assert d.SLOT_WAIT_SECONDS["DEL"] + d.DELEGATE_DEL_SECONDS < d.DETACH_SECONDS < d.VERB_SECONDS["DEL"]
    assert d.SLOT_WAIT_SECONDS["STATUS"] < d.STATUS_PLUGINS_SECONDS < d.VERB_SECONDS["STATUS"]


def test_a_disk_that_hangs_is_told_before_the_shim_gives_up() -> None:
    assert d.RECORD_READ_SECONDS < d.SHIM_DEL_REPLY_SECONDS
    assert d.RECORD_READ_SECONDS < d.DETACH_SECONDS


def test_a_bin_dir_that_hangs_is_told_before_the_caller_gives_up() -> None:
    assert d.PLUGIN_LOOKUP_SECONDS < d.STATUS_PLUGINS_SECONDS
    assert 4 * d.PLUGIN_LOOKUP_SECONDS < d.SHIM_DEL_REPLY_SECONDS


def test_what_hangs_does_not_keep_the_error_of_another_network() -> None:
    assert d.SETTLE_SECONDS < d.DELEGATE_SECONDS


def test_a_gc_has_time_for_its_parts() -> None:
    assert d.GC_CONTAINER_SECONDS < d.GC_SWEEP_SECONDS
    assert d.GC_SWEEP_SECONDS + d.GC_NETWORK_SECONDS < d.GC_TOTAL_SECONDS < d.VERB_SECONDS["GC"]
    # The ADDs of the network wait meanwhile.
    assert d.VERB_SECONDS["ADD"] > d.GC_NETWORK_SECONDS


# --- plugins, their children and tools -------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", INSIDE_A_PLUGIN)
def test_a_built_in_tells_why_before_it_is_ended(seconds: float) -> None:
    assert seconds < d.DELEGATE_DEL_SECONDS < d.DELEGATE_SECONDS


def test_iptables_tells_of_its_lock_before_it_is_ended() -> None:
    assert d.IPTABLES_LOCK_SECONDS < d.TOOL_SECONDS


def test_a_del_whose_program_the_kernel_holds_is_over_before_that_of_its_plugin() -> None:
    assert d.TOOL_SECONDS + d.KILL_GRACE_SECONDS + d.KILLED_SECONDS < d.DELEGATE_DEL_SECONDS
    assert d.PIPES_AFTER_EXIT_SECONDS < d.KILLED_SECONDS


def test_a_plugin_can_be_undone() -> None:
    assert d.DELEGATE_DEL_SECONDS <= d.UNDO_SECONDS


def test_whole_seconds_are_whole() -> None:
    """iptables takes nothing else, and `struct timeval` is packed from them."""
    for seconds in (d.IPTABLES_LOCK_SECONDS, d.NETLINK_SECONDS, d.APPROVER_WATCH_SECONDS, *d.INFORMER_WATCH_SECONDS):
        assert isinstance(seconds, int)


# --- the API server --------------------------------------------------------------------------------------------------


def test_reads_of_an_add_are_the_shortest_requests() -> None:
    assert d.UNSYNCED_SECONDS <= d.POD_EVENT_SECONDS < d.API_READ_SECONDS < d.API_REQUEST_SECONDS
    assert d.VERB_SECONDS["ADD"] - d.DELEGATE_SECONDS > d.POD_EVENT_SECONDS + d.API_READ_SECONDS


def test_a_network_status() -> None:
    assert d.NETWORK_STATUS_PATIENCE_SECONDS < d.NETWORK_STATUS_SECONDS
    assert 2 * d.NETWORK_STATUS_ATTEMPT_SECONDS + d.NETWORK_STATUS_RETRY_SECONDS[1] <= 10
    assert d.NETWORK_STATUS_SECONDS < d.STATUSES_POD_SECONDS


def test_an_event() -> None:
    assert d.EVENT_ATTEMPT_SECONDS < d.EVENT_KEEP_TRYING_SECONDS


def test_watches_end_by_the_servers_word() -> None:
    assert d.APPROVER_WATCH_SECONDS < d.WATCH_INACTIVITY_SECONDS
    # Two bookmarks may be missing.
    assert 2 * 60 < d.INFORMER_INACTIVITY_SECONDS < d.INFORMER_WATCH_SECONDS[0]


def test_a_certificate() -> None:
    assert d.APPROVER_REQUEST_SECONDS < d.CERTIFICATE_SECONDS


# --- loops, and the end ----------------------------------------------------------------------------------------------


def test_a_spool_entry_that_is_cut_off_has_no_shim_any_more() -> None:
    assert d.SPOOL_CUT_OFF_SECONDS > SHIM_LIFE


def test_a_run_of_reconcile_ends_before_the_next() -> None:
    assert d.RECONCILE_CONTAINER_SECONDS < d.RECONCILE_RUN_SECONDS
    assert d.RECONCILE_RUN_SECONDS + d.RECONCILE_CONTAINER_SECONDS < d.RECONCILE_SECONDS
    assert d.RECONCILE_BLIND_SECONDS < d.RECONCILE_SECONDS


def test_what_is_set_aside_was_tried_many_times() -> None:
    assert 10 * d.RECONCILE_RETRY_SECONDS[1] < d.SET_ASIDE_SECONDS


def test_a_configuration_that_is_fought_over() -> None:
    assert d.RESTORE_SECONDS[1] < d.RESTORE_CALM_SECONDS


def test_what_follows_the_drain_takes_20_seconds_at_most() -> None:
    assert d.KILL_GRACE_SECONDS < d.CANCELLED_SECONDS
    # Both servers, the unix socket and the metrics, read what clients send, then close the connections.
    servers = 2 * (d.LINGER_SECONDS + d.CONNECTIONS_SECONDS)
    # And of the log, both ways: standard error and the file.
    assert d.CANCELLED_SECONDS + servers + d.REPORT_SECONDS + 2 * d.LOG_FLUSH_SECONDS <= 20
    assert d.DRAIN_SECONDS > d.SHIM_DEL_WAIT_SECONDS


# --- where they go ---------------------------------------------------------------------------------------------------


def test_every_verb_has_its_deadlines() -> None:
    assert (
        set(d.VERB_SECONDS) == set(d.SLOT_WAIT_SECONDS) == set(d.REQUEST_WAIT_SECONDS) == set(SHIM_REPLY) == set(VERBS)
    )


def test_defaults_of_settings() -> None:
    settings = Settings()
    assert settings.plugins.delegate_timeout_seconds == d.DELEGATE_SECONDS
    assert settings.deletes.reconcile_seconds == d.RECONCILE_SECONDS
