from __future__ import annotations

from math import inf

import pytest

from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.reconnect import ReconnectState


def make() -> ReconnectState:
    """Java's defaults, without jitter."""
    return ReconnectState(
        ExponentialBackoff(0.05, 1.0, random=lambda: 0.5),
        ExponentialBackoff(10.0, 30.0, random=lambda: 0.5),
    )


def test_a_broker_that_was_never_tried_can_be_tried_at_once() -> None:
    """CC-04, NC-12: also one that was removed, for its state is new then."""
    state = make()
    assert state.can_connect(0.0)
    assert state.last_attempt_at == -inf


def test_a_lost_connection_is_made_again_after_the_backoff() -> None:
    """CC-01, NC-12."""
    state = make()
    state.connecting(0.0)
    state.ready()
    state.lost(7.0)
    assert not state.can_connect(7.0)
    assert not state.can_connect(7.049)
    assert state.can_connect(7.05)
    assert state.last_attempt_at == 7.0


def test_each_failure_in_a_row_makes_the_wait_longer_up_to_the_maximum() -> None:
    """CC-05."""
    state = make()
    waits = []
    for attempt in range(100):
        now = attempt * 60.0
        state.connecting(now)
        state.failed(now)
        waits.append(state.retry_at - now)
    assert waits[:6] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
    assert max(waits) == 1.0


def test_only_a_ready_connection_ends_the_growth() -> None:
    """CC-05: a broker that accepts TCP and fails later is not healthy."""
    state = make()
    for _ in range(5):
        state.failed(0.0)
    state.connecting(10.0)
    state.failed(10.0)
    assert state.retry_at == 11.0
    state.connecting(20.0)
    state.ready()
    state.lost(20.0)
    assert state.retry_at == pytest.approx(20.05)


def test_a_refusal_of_our_credentials_counts_twice() -> None:
    """CC-03: not connectable until a longer backoff is over."""
    state = make()
    state.failed(0.0, authentication=True)
    assert state.retry_at == pytest.approx(0.1)
    state.failed(1.0, authentication=True)
    assert state.retry_at == pytest.approx(1.4)


def test_the_time_for_an_attempt_doubles_with_failures_to_its_maximum() -> None:
    """CC-08."""
    state = make()
    times = []
    for _ in range(4):
        times.append(state.connecting(0.0))
        state.failed(0.0)
    assert times == pytest.approx([10.0, 20.0, 30.0, 30.0])


def test_a_ready_connection_resets_the_time_for_an_attempt_and_its_loss_does_not_grow_it() -> None:
    """CC-08."""
    state = make()
    state.connecting(0.0)
    state.failed(0.0)
    state.connecting(1.0)
    state.ready()
    state.lost(2.0)
    assert state.connecting(3.0) == 13.0
