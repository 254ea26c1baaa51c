"""Figures: medians, intervals, quotients of pairs."""

import pytest

from bench import stats


def test_a_median_lies_in_its_interval() -> None:
    figure = stats.median([5.0, 1.0, 4.0, 2.0, 3.0], "ms")
    assert (figure.value, figure.unit, figure.n) == (3.0, "ms", 5)
    assert 1.0 <= figure.low <= 3.0 <= figure.high <= 5.0
    assert figure.low < figure.high


def test_the_same_values_give_the_same_interval() -> None:
    values = [1.0, 7.0, 2.0, 9.0, 4.0, 3.0]
    assert stats.median(values, "ms") == stats.median(values, "ms")


def test_the_interval_is_narrower_with_more_values() -> None:
    few, many = ([float(number % 10) for number in range(count)] for count in (10, 400))
    assert (
        stats.mean(many, "ms").high - stats.mean(many, "ms").low
        < stats.mean(few, "ms").high - stats.mean(few, "ms").low
    )


def test_a_mean_is_not_a_median() -> None:
    assert stats.mean([1.0, 1.0, 10.0], "ms").value == 4.0


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        stats.median([], "ms")


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    # The machine was ten times as slow in the second round, for both.
    ratio = stats.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 4.0])
    assert ratio.value == 2.0
    assert ratio.unit == "x"


def test_a_ratio_needs_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        stats.ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (100, 100)])
def test_percentile_by_nearest_rank(percent: float, value: float) -> None:
    assert stats.percentile([float(number) for number in range(100, 0, -1)], percent) == value


def test_percentile_of_one_value() -> None:
    assert stats.percentile([7.0], 99) == 7.0
