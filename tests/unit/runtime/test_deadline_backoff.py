import itertools
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.runtime.deadline import backoff


def first(delays: Iterator[float], count: int) -> list[float]:
    return list(itertools.islice(delays, count))


def test_delays_double_up_to_the_last() -> None:
    assert first(backoff(0.5, 5), 6) == [0.5, 1, 2, 4, 5, 5]


@given(st.floats(0.01, 10), st.floats(10, 100), st.floats(0, 0.9))
def test_jitter_is_a_share_of_the_delay(start: float, last: float, jitter: float) -> None:
    for delay, plain in zip(
        first(backoff(start, last, jitter=jitter), 12), first(backoff(start, last), 12), strict=True
    ):
        assert plain * (1 - jitter) - 1e-9 <= delay <= plain * (1 + jitter) + 1e-9


def test_jitter_differs() -> None:
    assert len(set(first(backoff(1, 1, jitter=0.5), 20))) > 1
