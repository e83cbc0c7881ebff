"""Percentiles out of the buckets of `audit_latency`, which can be added to each other."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["below_zero", "bounds_us", "quantile_us"]


def bounds_us(bucket: int) -> tuple[float, float]:
    """The latencies of a bucket, from the first to the last, in microseconds.

    Bucket n > 0 begins at 2 ** ((n - 1) / 8), bucket 0 is 0, and those below are mirrored.
    """
    if bucket == 0:
        return 0.0, 0.0
    size = abs(bucket)
    low, high = 2 ** ((size - 1) / 8), 2 ** (size / 8)
    return (low, high) if bucket > 0 else (-high, -low)


def quantile_us(buckets: Mapping[int, int], share: float) -> float:
    """The upper bound of the bucket with this share of all records: at most 9 % too much.

    `buckets`: how many records each one has. Raises ValueError for none at all.
    """
    left = sum(buckets.values()) * share
    if not buckets or not 0.0 <= share <= 1.0:
        raise ValueError(f"no quantile {share} of {len(buckets)} buckets")
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return bounds_us(bucket)[1]
    return bounds_us(max(buckets))[1]


def below_zero(buckets: Mapping[int, int], resolution_us: int = 1000) -> int:
    """How many records are earlier than sent: one of the two clocks is wrong.

    The log keeps milliseconds: what is less than that below zero is its rounding.
    """
    return sum(count for bucket, count in buckets.items() if bounds_us(bucket)[1] <= -resolution_us)
