"""`make bench` runs every bench and sums up; no bench is run here."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import __main__ as runner
from bench import figures, verdict
from bench.__main__ import BENCHES, RECORDED, Ended

OK = Ended(verdict.OK, ("a table", f"{verdict.MARK}ADD: 1.00 ms, within the budget of 2 ms"))
MISSED = Ended(verdict.MISSED, ("a table", f"{verdict.MARK}ADD: 3.00 ms, over the budget of 2 ms"))
SKIPPED = Ended(verdict.SKIPPED, (f"{verdict.MARK}needs the program `ip`",))
BROKEN = Ended(1, ("half a table",))
KILLED = Ended(-9)

Run = Callable[..., tuple[list[str], int]]


@pytest.fixture
def run_all() -> Run:
    """The benches that were run, and the exit status, where the benches end as given."""

    def run_all(*ends: Ended) -> tuple[list[str], int]:
        by_name = dict(zip(("one", "two", "three", "four"), ends, strict=False))
        ran: list[str] = []

        def run(name: str) -> Ended:
            ran.append(name)
            return by_name[name]

        try:
            runner.main(run, tuple(by_name))
        except SystemExit as error:
            return ran, error.code if isinstance(error.code, int) else 1
        return ran, 0

    return run_all


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([OK, OK, OK], 0),
        ([OK, SKIPPED, OK], 0),
        ([MISSED, OK, OK], 1),
        ([OK, OK, MISSED], 1),
        ([BROKEN, OK, OK], 1),
        ([OK, KILLED, SKIPPED], 1),
        ([MISSED, BROKEN, MISSED], 1),
        ([SKIPPED, SKIPPED, SKIPPED], 1),
    ],
)
def test_every_bench_runs_and_the_exit_status_sums_up(run_all: Run, ends: list[Ended], status: int) -> None:
    assert run_all(*ends) == (["one", "two", "three"], status)


def test_the_summary_names_each_bench_with_its_result(run_all: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run_all(OK, MISSED, SKIPPED, BROKEN)
    _, _, summary = capsys.readouterr().out.partition("bench  ")
    assert [re.split(r"\s{2,}", line) for line in summary.splitlines()[1:]] == [
        ["one", "ok", "ADD: 1.00 ms, within the budget of 2 ms"],
        ["two", "missed", "ADD: 3.00 ms, over the budget of 2 ms"],
        ["three", "skipped", "needs the program `ip`"],
        ["four", "failed", "ended with status 1; its output is above"],
    ]


def test_a_bench_that_names_no_result_has_failed() -> None:
    assert runner.judge(Ended(verdict.OK, ("a table",)))[0] == "failed"


def test_what_a_bench_measured_before_it_broke_is_told() -> None:
    state, findings = runner.judge(Ended(1, OK.lines))
    assert state == "failed"
    assert findings == ["ADD: 1.00 ms, within the budget of 2 ms", "ended with status 1; its output is above"]


@pytest.mark.parametrize(
    ("values", "state"),
    [((2.0,), "ok"), ((2.01,), "missed"), ((1.0, 3.0), "missed"), ((3.0, 1.0), "missed"), ((1.0, 1.5), "ok")],
)
def test_the_runner_understands_how_a_bench_ends(
    values: tuple[float, ...], state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [verdict.Result("ADD", value, 2.0, "ms") for value in values]
    with pytest.raises(SystemExit) as ended:
        verdict.end(*results)
    assert isinstance(ended.value.code, int)
    lines = tuple(capsys.readouterr().out.splitlines())
    assert runner.judge(Ended(ended.value.code, lines)) == (state, [str(result) for result in results])


def test_the_runner_understands_that_a_bench_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verdict.skip("needs root")
    assert isinstance(ended.value.code, int)
    lines = tuple(capsys.readouterr().out.splitlines())
    assert runner.judge(Ended(ended.value.code, lines)) == ("skipped", ["needs root"])


def test_a_result_over_its_budget_says_so() -> None:
    assert str(verdict.Result("ADD", 12.1, 10.0, "ms")) == "ADD: 12.10 ms, over the budget of 10 ms"
    assert str(verdict.Result("ADD", 0.43, 0.5, "x")) == "ADD: 0.43 x, within the budget of 0.5 x"


def test_every_bench_of_the_folder_is_run() -> None:
    files = Path(runner.__file__).parent.glob("*.py")
    programs = {path.stem for path in files if '__name__ == "__main__"' in path.read_text()}
    assert programs - {"__main__", "page"} == set(BENCHES)


@pytest.mark.parametrize(
    ("quick", "record", "benches", "arguments"),
    [
        (False, False, BENCHES, []),
        (True, False, RECORDED, ["--quick"]),
        (False, True, BENCHES, ["--record", str(figures.FOLDER)]),
    ],
)
def test_options_reach_the_benches_that_know_them(
    monkeypatch: pytest.MonkeyPatch, quick: bool, record: bool, benches: tuple[str, ...], arguments: list[str]
) -> None:
    ran: dict[str, list[str]] = {}

    def start(name: str, given: Sequence[str]) -> Ended:
        ran[name] = list(given)
        return OK

    monkeypatch.setattr(runner, "start", start)
    runner.command(argparse.Namespace(quick=quick, record=record))
    assert ran == {name: arguments if name in RECORDED else [] for name in benches}
