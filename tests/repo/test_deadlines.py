"""Check the deadlines in the pages against the table (`multus_daemon/deadlines.py`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from multus_daemon import deadlines as d

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL: Final = "docs/protocol.md"


def one(*values: float) -> str:
    """Return the one value that all have in common, as the pages spell it."""
    (value,) = set(values)
    return f"{value:g}"


VERB, SLOT, TURN = d.VERB_SECONDS, d.SLOT_WAIT_SECONDS, d.REQUEST_WAIT_SECONDS
FIRST_RETRY, LAST_RETRY = d.SPOOL_RETRY_SECONDS
FIRST_RESTORE, LAST_RESTORE = d.RESTORE_SECONDS
LIFE_OF_A_STATUS: Final = one(d.NETWORK_STATUS_PATIENCE_SECONDS)
# As `tests/unit/test_deadlines.py` adds them.
STOP: Final = d.DRAIN_SECONDS + d.CANCELLED_SECONDS + d.REPORT_SECONDS
LONGEST_STOP: Final = STOP + 2 * (d.LINGER_SECONDS + d.CONNECTIONS_SECONDS + d.LOG_FLUSH_SECONDS)

PHRASES: Final = [
    (PROTOCOL, f"| head to arrive | {d.HEAD_SECONDS:g} s, then the connection is closed |"),
    (PROTOCOL, f"| body to arrive | {d.BODY_SECONDS:g} s, then code 5 |"),
    (PROTOCOL, f"| ADD, CHECK, GC | {one(VERB['ADD'], VERB['CHECK'], VERB['GC'])} s, then the verb is stopped"),
    (
        PROTOCOL,
        f"| DEL | {VERB['DEL']:g} s; the native shim waits {d.SHIM_DEL_REPLY_SECONDS:g} s and leaves the request",
    ),
    (PROTOCOL, f"| STATUS | {VERB['STATUS']:g} s |"),
    (PROTOCOL, f"`delegateTimeoutSeconds`, for DEL {d.DELEGATE_DEL_SECONDS:g} s at most"),
    (
        PROTOCOL,
        f"ADD, CHECK {one(SLOT['ADD'], SLOT['CHECK'])} s; DEL, GC {one(SLOT['DEL'], SLOT['GC'])} s; "
        f"STATUS {SLOT['STATUS']:g} s; then code 11",
    ),
    (
        PROTOCOL,
        f"ADD, CHECK {one(TURN['ADD'], TURN['CHECK'])} s; DEL {TURN['DEL']:g} s; GC {TURN['GC']:g} s; "
        f"STATUS {TURN['STATUS']:g} s; then the same",
    ),
    (PROTOCOL, f"until no request runs, for {d.DRAIN_SECONDS:g} s at most."),
    (PROTOCOL, f"until {d.ANNOUNCED_SECONDS:g} s after a client asked for the daemon's health"),
    (
        PROTOCOL,
        f"{d.SHIM_DAEMON_WAIT_SECONDS:g} s for ADD, CHECK and GC, {d.SHIM_DEL_WAIT_SECONDS:g} s at most for DEL",
    ),
    (PROTOCOL, f"The daemon looks every {d.SPOOL_LOOK_SECONDS:g} s,"),
    (
        PROTOCOL,
        f"is tried again after {FIRST_RETRY:g} s, {2 * FIRST_RETRY:g} s, ... up to {LAST_RETRY / 60:g} min,",
    ),
    ("docs/kubectl-multus.md", f"the answer of one node, by default {d.KUBECTL_NODE_SECONDS:g} s"),
    ("docs/kubectl-multus.md", f"for {d.KUBECTL_BUNDLE_SECONDS / 60:g} minutes in all"),
    ("docs/multusctl.md", f"It takes at most {d.CTL_BUNDLE_SECONDS:g} s."),
    ("docs/operations.md", f"shim waits for the daemon ({d.SHIM_DAEMON_WAIT_SECONDS:g} s)"),
    ("docs/operations.md", f"a daemon finishes the requests that run ({d.DRAIN_SECONDS:g} s)"),
    ("docs/reliability.md", f"it fails with code 11 after {SLOT['DEL']:g} s"),
    ("docs/reliability.md", f"serves each DEL that arrives, for {d.DRAIN_SECONDS:g} s at most"),
    ("docs/reliability.md", f"DEL waits {d.SHIM_DEL_WAIT_SECONDS:g} s, then goes to the spool"),
    ("docs/reliability.md", f"the disk did not answer within {d.RECORD_READ_SECONDS:g} s"),
    ("docs/configuration.md", f"it takes over after it was unchanged for {d.PRIMARY_SETTLE_SECONDS:g} s"),
    ("docs/configuration.md", f"waits for it until it was unreadable for {d.PRIMARY_SETTLE_SECONDS:g} s"),
    ("docs/configuration.md", f"primary file is gone | the daemon waits {d.PRIMARY_MISSING_SECONDS:g} s for it"),
    (
        "docs/configuration.md",
        f"if that goes on, after {FIRST_RESTORE:g} s, {2 * FIRST_RESTORE:g} s, ... up to {LAST_RESTORE:g} s",
    ),
    ("docs/configuration.md", f"network-status can't be written within {LIFE_OF_A_STATUS} s"),
    ("docs/configuration.md", f"| `{d.DELEGATE_SECONDS:g}` | How long one call of one plugin may take"),
    ("docs/configuration.md", f"{d.DELEGATE_DEL_SECONDS:g} s at most for a DEL. A whole ADD is ended after"),
    ("docs/configuration.md", f"A whole ADD is ended after {VERB['ADD']:g} s, a whole DEL after {VERB['DEL']:g} s"),
    ("docs/configuration.md", f"those that run get {d.SETTLE_SECONDS:g} s to finish"),
    ("docs/scaling.md", f"it waits for the event, up to {d.POD_EVENT_SECONDS:g} s"),
    ("docs/compatibility.md", f"{d.HEAD_SECONDS:g} s for the head, {d.BODY_SECONDS:g} s for the body"),
    ("docs/compatibility.md", f"one GET with a timeout of {d.API_READ_SECONDS:g} s"),
    ("docs/compatibility.md", f"one PATCH, repeated for {LIFE_OF_A_STATUS} s"),
    ("docs/compatibility.md", f"they get {d.DRAIN_SECONDS:g} s to finish"),
    ("docs/compatibility.md", f"a plugin that hangs is code 50 within {d.STATUS_PLUGINS_SECONDS:g} s"),
    (PROTOCOL, f"a plugin has run for {d.SLOW_ADD_SECONDS:g} s"),
    ("docs/reliability.md", f"An ADD waits up to {TURN['ADD']:g} s, then code 11"),
    ("docs/reliability.md", f"`terminationGracePeriodSeconds` must be above {LONGEST_STOP:g}"),
    ("docs/migration.md", f"a daemon that stops may need {LONGEST_STOP:g} s"),
    ("docs/security.md", f"for `delegateTimeoutSeconds` ({d.DELEGATE_SECONDS:g})"),
    ("docs/reliability.md", f"takes the socket back within {d.SOCKET_LOOK_SECONDS:g} s"),
    ("docs/reliability.md", f"ADD, CHECK and GC wait {d.SHIM_DAEMON_WAIT_SECONDS:g} s;"),
    ("docs/reliability.md", f"could not be read within {d.PLUGIN_LOOKUP_SECONDS:g} s"),
    ("docs/runbook.md", f"died silently is noticed after {d.INFORMER_INACTIVITY_SECONDS / 60:g} minutes"),
]


def read(page: str) -> str:
    """The page in one line."""
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(("page", "phrase"), PHRASES)
def test_the_pages_have_the_values_of_the_table(page: str, phrase: str) -> None:
    assert phrase in read(page)


def test_nothing_else_is_said_of_deadlines_in_the_protocol() -> None:
    """A time in these sections that no phrase above has would not be compared with the table."""
    text = read(PROTOCOL)
    for page, phrase in PHRASES:
        if page == PROTOCOL:
            text = text.replace(phrase, "")
    sections = re.search(r"## Limits and deadlines (.*?)## The spool (.*?)(?:## |$)", text)
    assert sections
    assert re.findall(r"\d+ (?:s|min)\b", " ".join(sections.groups())) == []
