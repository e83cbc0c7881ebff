"""What each stage does with the values of its records. Plain Python and numpy, no Spark.

A stage gets values and gives results: which input it is of, where it goes, and what is written.
An input may have none, one or several results. Nothing else is looked at: neither the time nor
other records, so that any record can be done again at any time, in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from orders_pipeline.orders import Codec, Order, UndecodableError

__all__ = ["ANALYTICS", "DLQ", "FULFILLMENT", "RAW", "SCORED", "VALIDATED", "Result", "Rule"]
__all__ += ["fan_out", "problem", "score", "scores", "validate"]

RAW, VALIDATED, DLQ = "raw-orders", "validated-orders", "orders-dlq"
SCORED, FULFILLMENT, ANALYTICS = "fraud-scored-orders", "fulfillment-orders", "analytics-events"

#: Orders with this score or more are not fulfilled.
REFUSED_FROM = 0.7

_CURRENCIES = frozenset({"EUR", "GBP", "JPY", "USD"})
_MAX_QUANTITY = 1000
#: What a long of Avro holds.
_MAX_CENTS = 2**63 - 1


class Result(NamedTuple):
    """One record that a stage writes."""

    #: The place of the input among the values.
    row: int
    topic: str
    value: bytes | None
    #: Why it is in the dead letter queue.
    error: str | None = None


Rule: TypeAlias = Callable[[Codec, Sequence[bytes | None]], list[Result]]


def validate(codec: Codec, values: Sequence[bytes | None]) -> list[Result]:
    """Good orders with their total; all others, as they came, to the dead letter queue."""
    results = []
    for row, value in enumerate(values):
        try:
            order = codec.decode(value)
        except UndecodableError as error:
            results.append(Result(row, DLQ, value, str(error)))
            continue
        wrong = problem(order)
        if wrong is not None:
            results.append(Result(row, DLQ, value, wrong))
            continue
        order["total_cents"] = order["quantity"] * order["unit_cents"]
        results.append(Result(row, VALIDATED, codec.encode("validated", order)))
    return results


def problem(order: Order) -> str | None:
    """What is wrong with an order, if anything is."""
    if not order["customer"] or not order["sku"]:
        return "customer or sku is empty"
    if not 1 <= order["quantity"] <= _MAX_QUANTITY:
        return f"quantity {order['quantity']} is not within 1 and {_MAX_QUANTITY}"
    if order["unit_cents"] < 0:
        return f"unit_cents {order['unit_cents']} is below zero"
    if order["quantity"] * order["unit_cents"] > _MAX_CENTS:
        return f"{order['quantity']} times {order['unit_cents']} cents is above {_MAX_CENTS}"
    if order["currency"] not in _CURRENCIES:
        return f"currency {order['currency']!r} is not known"
    return None


def score(codec: Codec, values: Sequence[bytes | None]) -> list[Result]:
    """Orders with their score, all of a batch scored at once."""
    decoded = [codec.decode(value) for value in values]
    found = scores(
        np.array([order["total_cents"] for order in decoded], np.float64),
        np.array([order["quantity"] for order in decoded], np.float64),
        np.array([order["country"] != order["ship_to"] for order in decoded], np.bool_),
    ).tolist()
    results = []
    for row, (order, points) in enumerate(zip(decoded, found, strict=True)):
        order["fraud_score"] = points
        order["approved"] = points < REFUSED_FROM
        results.append(Result(row, SCORED, codec.encode("scored", order)))
    return results


def scores(total_cents: NDArray[Any], quantity: NDArray[Any], far: NDArray[Any]) -> NDArray[Any]:
    """How likely each order is a fraud, 0 to 1: dear ones, many of a kind, sent abroad."""
    weight = np.log10(np.maximum(total_cents, 1)) - 5.0 + 0.08 * quantity + 2.0 * far
    result: NDArray[Any] = np.round(1 / (1 + np.exp(-weight)), 4)
    return result


def fan_out(codec: Codec, values: Sequence[bytes | None]) -> list[Result]:
    """Every order to analytics, the approved ones to fulfillment as well; values as they are."""
    results = []
    for row, value in enumerate(values):
        results.append(Result(row, ANALYTICS, value))
        if codec.decode(value)["approved"]:
            results.append(Result(row, FULFILLMENT, value))
    return results
