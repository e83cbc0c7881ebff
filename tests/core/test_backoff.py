from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.core.backoff import ExponentialBackoff


def always(number: float) -> Callable[[], float]:
    return lambda: number


LOWEST = always(0.0)
MIDDLE = always(0.5)
HIGHEST = always(1.0)


def test_delay_doubles_with_each_failure_up_to_the_maximum() -> None:
    backoff = ExponentialBackoff(0.1, 1.0, random=MIDDLE)
    assert [backoff.delay(n) for n in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("initial", "maximum", "windows"),
    [
        (100, 1000, [(80, 120), (160, 240), (320, 480), (640, 960), (800, 1000), (800, 1000)]),
        (50, 1000, [(40, 60), (80, 120), (160, 240), (320, 480), (640, 960), (800, 1000)]),
        (10000, 30000, [(8000, 12000), (16000, 24000), (24000, 30000), (24000, 30000)]),
    ],
)
def test_jitter_spreads_each_delay_and_the_cap_comes_after_it(
    initial: float, maximum: float, windows: list[tuple[float, float]]
) -> None:
    """CC-05, CC-08: the windows of retry, reconnect and connection setup."""
    low = ExponentialBackoff(initial, maximum, random=LOWEST)
    high = ExponentialBackoff(initial, maximum, random=HIGHEST)
    found = [(low.delay(n), high.delay(n)) for n in range(len(windows))]
    assert [edge for pair in found for edge in pair] == pytest.approx(
        [float(edge) for pair in windows for edge in pair]
    )


def test_many_failures_neither_overflow_nor_exceed_the_maximum() -> None:
    """CC-05."""
    backoff = ExponentialBackoff(0.05, 1.0, random=HIGHEST)
    assert backoff.delay(100) == backoff.delay(10**9) == 1.0


@pytest.mark.parametrize("initial", [1.0, 5.0])
def test_an_initial_delay_not_below_the_maximum_gives_the_maximum_without_jitter(
    initial: float,
) -> None:
    backoff = ExponentialBackoff(initial, 1.0, random=LOWEST)
    assert [backoff.delay(n) for n in (0, 1, 7)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("maximum", [0.0, 1.0])
def test_an_initial_delay_of_zero_means_no_delay(maximum: float) -> None:
    backoff = ExponentialBackoff(0.0, maximum, random=HIGHEST)
    assert [backoff.delay(n) for n in (0, 1, 50)] == [0.0, 0.0, 0.0]


def test_without_jitter_the_delays_are_exact() -> None:
    backoff = ExponentialBackoff(1.0, 100.0, random=LOWEST, jitter=0.0, base=3.0)
    assert [backoff.delay(n) for n in range(3)] == pytest.approx([1.0, 3.0, 9.0])


@given(
    initial=st.just(0.0) | st.floats(0.001, 100.0),
    maximum=st.floats(0.0, 100.0),
    failures=st.integers(0, 10_000),
    seed=st.integers(),
)
def test_delay_is_never_negative_nor_above_the_maximum(
    initial: float, maximum: float, failures: int, seed: int
) -> None:
    backoff = ExponentialBackoff(initial, maximum, random=random.Random(seed).random)
    assert 0.0 <= backoff.delay(failures) <= maximum
