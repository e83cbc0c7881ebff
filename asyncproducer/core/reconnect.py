"""When a broker may be connected to again, and how long an attempt may take."""

from __future__ import annotations

from math import inf

from asyncproducer.core.backoff import ExponentialBackoff

__all__ = ["ReconnectState"]


class ReconnectState:
    """What is remembered of the attempts to connect to one broker (Java: ClusterConnectionStates).

    `backoff` spaces attempts, counted from the last failure or loss; `setup` is the time
    that an attempt may take (KIP-601). Both grow with consecutive failures, each with its
    own count: a connection that was lost after it worked makes the next attempt wait, but
    gives it no more time. Only a connection that became ready resets them, so a broker
    that accepts TCP and fails later does not look healthy.
    """

    __slots__ = (
        "_backoff",
        "_failures",
        "_setup",
        "_setup_failures",
        "failed_at",
        "last_attempt_at",
        "retry_at",
    )

    def __init__(self, backoff: ExponentialBackoff, setup: ExponentialBackoff) -> None:
        self._backoff = backoff
        self._setup = setup
        self._failures = 0
        self._setup_failures = 0
        #: The last start or end of a connection; -inf if there was none.
        self.last_attempt_at = -inf
        #: When the last attempt failed; -inf if there was none, or a later one succeeded.
        self.failed_at = -inf
        #: No attempt before this time.
        self.retry_at = -inf

    def can_connect(self, now: float) -> bool:
        """Whether the backoff after the last failure is over."""
        return now >= self.retry_at

    def connecting(self, now: float) -> float:
        """An attempt begins. Returns its deadline."""
        self.last_attempt_at = now
        return now + self._setup.delay(self._setup_failures)

    def ready(self) -> None:
        """The attempt succeeded."""
        self._failures = 0
        self._setup_failures = 0
        self.failed_at = -inf

    def failed(self, now: float, *, authentication: bool = False) -> None:
        """The attempt failed. Refused credentials count twice: they rarely mend by themselves."""
        self._setup_failures += 1
        self.failed_at = now
        if authentication:
            self._failures += 1
        self.lost(now)

    def lost(self, now: float) -> None:
        """An established connection ended, and not because we wanted it to."""
        self.last_attempt_at = now
        self.retry_at = now + self._backoff.delay(self._failures)
        self._failures += 1
