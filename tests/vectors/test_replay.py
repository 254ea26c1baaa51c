"""Every recorded call of upstream v4.3.0, played to our shim and our daemon over real plugins in real namespaces.

What comes back is what upstream showed, after `normalise` and the rows of `differences.TABLE`, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.programs import require
from tests.vectors import differences, normalise, replay
from tests.vectors.records import RECORDS, SESSIONS, Record, Session

REFERENCE = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
SESSION_OF = {record.id: session for session in SESSIONS for record in session.records}

Play = Callable[[Session, replay.Caller], replay.Played]


@pytest.fixture(scope="module")
def play() -> Play:
    """Plays a session when the first of its records is asked for."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urnm`")
    require("ip", "nsenter", "unshare")
    if not (REFERENCE / "bridge").exists():
        pytest.skip("needs the reference plugins: apt-get install containernetworking-plugins, or CNI_REFERENCE_DIR")

    @cache
    def once(session: Session, caller: replay.Caller) -> replay.Played | Exception:
        try:
            return replay.played(session, caller, REFERENCE)
        except Exception as error:
            return error

    def result(session: Session, caller: replay.Caller) -> replay.Played:
        found = once(session, caller)
        if isinstance(found, Exception):
            raise found
        return found

    return result


def expected(record: Record, caller: replay.Caller) -> tuple[dict[str, differences.Expected], set[tuple[int, str]]]:
    """Return `differences.expected` of a record."""
    first, _, again = record.id.partition("#")
    before = next((replay.upstream(other, caller) for other in RECORDS if again and other.id == first), None)
    return differences.expected(record.id, replay.upstream(record, caller), before)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.id)
def test_record(record: Record, play: Play) -> None:
    callers = replay.callers(record)
    assert callers, "covered by nothing"
    for caller in callers:
        result = play(SESSION_OF[record.id], caller)
        shown = result.views[record.id]
        wanted, _ = expected(record, caller)
        wrong = [
            part
            for part in sorted(set(shown) | set(wanted))
            if not differences.meets(shown.get(part), wanted.get(part))
        ]
        assert {part: shown.get(part) for part in wrong} == {part: wanted.get(part) for part in wrong}, (
            f"played by the {caller}; the daemon's log:\n{result.log[-4000:]}"
        )


def test_there_are_all_records() -> None:
    assert len(RECORDS) == len({record.id for record in RECORDS}) == 190


def test_no_row_of_the_table_is_without_effect() -> None:
    effective = {use for record in RECORDS for caller in replay.callers(record) for use in expected(record, caller)[1]}
    stale = [
        (pattern, row.what)
        for number, row in enumerate(differences.TABLE)
        for pattern in row.records
        if (number, pattern) not in effective
    ]
    assert not stale


def test_what_is_expected_instead_is_not_what_upstream_showed() -> None:
    """So that a difference that goes away is a failure of its record."""
    for record in RECORDS:
        for caller in replay.callers(record):
            wanted, _ = expected(record, caller)
            for part, text in replay.upstream(record, caller).items():
                ours = wanted[part]
                assert isinstance(ours, str) or not ours.matches(text), (record.id, caller, part)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("eth0 6a:58:57:1d:41:43, 10.244.0.17/24", "eth0 <mac 1>, <10.244.0 1>/24"),
        ("10.201.0.1 10.210.0.7 02:00:00:00:00:07 vethernet", "10.201.0.1 10.210.0.7 02:00:00:00:00:07 vethernet"),
        ("10.201.0.2 10.204.0.2 10.201.0.3 10.201.0.2", "<10.201.0 1> <10.204.0 1> <10.201.0 2> <10.201.0 1>"),
        ("veth0123abcd vethffffffff veth0123abcd", "<veth 1> <veth 2> <veth 1>"),
    ],
)
def test_only_what_is_random_gets_a_name(text: str, named: str) -> None:
    assert normalise.Names().replace(text) == named
