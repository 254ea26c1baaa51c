"""A timeline keeps the steps of a request, from any thread, within bounds."""

import time

import pytest

from multus_daemon.runtime import threads, timeline
from multus_daemon.runtime.timeline import NOTES_MAX, TEXT_MAX, Timelines


def test_steps_are_kept_in_order_and_also_those_of_other_threads():
    kept = Timelines()
    with kept.of({"verb": "ADD"}) as item:
        timeline.note("first", 0.5)
        threads.start(lambda: timeline.note("second")).result()
    timeline.note("of nobody")
    assert [what for what, _, _ in item.steps] == ["first", "second"]
    assert item.ended is not None
    assert item.steps[0][1] <= item.steps[1][1] <= item.ended
    assert [took for _, _, took in item.steps] == [0.5, 0.0]
    assert list(kept) == [item]


def test_stages_are_added_up_also_from_other_threads_and_after_a_failure():
    with Timelines().of({"verb": "ADD"}) as item:
        with timeline.stage("plan"):
            time.sleep(0.001)
        first = item.stages["plan"]
        with pytest.raises(KeyError), timeline.stage("plan"):
            raise KeyError

        def work():
            with timeline.stage("keep"):
                time.sleep(0.001)

        threads.start(work).result()
    assert first >= 0.001
    assert item.stages["plan"] > first
    assert item.stages["keep"] >= 0.001
    assert item.ended is not None
    assert sum(item.stages.values()) <= item.ended


def test_a_stage_outside_of_a_request_does_nothing():
    with Timelines().of({}) as item:
        pass
    with timeline.stage("plan"):
        pass
    assert item.stages == {}


def test_an_error_is_kept_and_the_first_end_counts():
    kept = Timelines()
    with kept.of({}) as item:
        item.end((7, "no such network"))
        ended = item.ended
    assert (item.error, item.ended) == ((7, "no such network"), ended)


def test_what_comes_from_outside_is_bounded():
    kept = Timelines(limit=2)
    for number in range(3):
        with kept.of({"number": str(number)}) as item:
            for _ in range(NOTES_MAX + 5):
                timeline.note("x" * 10 * TEXT_MAX)
            item.end((999, "y" * 10 * TEXT_MAX))
    assert [item.subject["number"] for item in kept] == ["1", "2"]
    *_, item = kept
    assert (len(item.steps), item.dropped) == (NOTES_MAX, 5)
    assert {len(what) for what, _, _ in item.steps} == {TEXT_MAX}
    assert item.error is not None
    assert len(item.error[1]) == TEXT_MAX


def test_what_is_kept_of_all_requests_together_is_little():
    assert NOTES_MAX * TEXT_MAX * 1000 <= 32 * 1024 * 1024


def test_what_runs_is_shown_while_it_runs():
    with timeline.doing("of nobody", 1.0), Timelines().of({"verb": "ADD"}) as item:
        with timeline.doing("plugin", 120.0):
            began, limit = item.doing["plugin"]
            assert (item.began <= began, limit) == (True, 120.0)
        assert item.doing == {}


def test_where_few_run_at_once_fewer_are_kept():
    kept = Timelines(at_once=5)
    for number in range(105):
        with kept.of({"number": str(number)}):
            pass
    assert [item.subject["number"] for item in kept][:2] == ["5", "6"]
    assert len(list(kept)) == 100
