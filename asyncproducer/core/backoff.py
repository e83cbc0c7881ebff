"""Exponential backoff with jitter: retries, reconnects, connection setup, metadata."""

from __future__ import annotations

from collections.abc import Callable
from math import log

__all__ = ["ExponentialBackoff"]


class ExponentialBackoff:
    """How long to wait after a number of failures (KIP-580, KIP-601).

    `initial * base ** failures`, times a random factor of 1 ± `jitter`, never more than
    `maximum`. The cap comes after the jitter, as in Java, so the last delays lie between
    `maximum * (1 - jitter)` and `maximum`. An `initial` that is not below `maximum` makes
    every delay `maximum` exactly.

    `random` returns floats in [0, 1). The unit of the times is the caller's.
    """

    __slots__ = ("_base", "_initial", "_jitter", "_largest_exponent", "_maximum", "_random")

    def __init__(
        self,
        initial: float,
        maximum: float,
        *,
        random: Callable[[], float],
        jitter: float = 0.2,
        base: float = 2.0,
    ) -> None:
        self._initial = min(initial, maximum)
        self._maximum = maximum
        self._jitter = jitter
        self._base = base
        self._random = random
        # An initial delay of zero stays zero however often it is doubled.
        grows = 0 < initial < maximum
        self._largest_exponent = log(maximum / initial, base) if grows else 0.0

    def delay(self, failures: int) -> float:
        """The time to wait after `failures` earlier failures in a row, counted from 0.

        Draws a new random factor each time: ask once per wait, and keep the answer.
        """
        if self._largest_exponent == 0.0:
            return self._initial
        delay: float = self._initial * self._base ** min(failures, self._largest_exponent)
        return min(delay * (1 + self._jitter * (2 * self._random() - 1)), self._maximum)
