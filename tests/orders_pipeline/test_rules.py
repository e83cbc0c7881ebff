"""What the stages do, value by value."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from orders_pipeline import rules
from orders_pipeline.orders import Codec, Order, orders
from orders_pipeline.rules import Result

CODEC = Codec({"raw": 1, "validated": 2, "scored": 3})

GOOD: Order = {
    "order_id": "o-1",
    "customer": "c-1",
    "country": "DE",
    "ship_to": "DE",
    "sku": "sku-1",
    "quantity": 3,
    "unit_cents": 250,
    "currency": "EUR",
    "placed_us": 1,
}


def raw(**changes: object) -> bytes:
    return CODEC.encode("raw", GOOD | changes)


def scored(**changes: object) -> bytes:
    whole = GOOD | {"total_cents": 750, "fraud_score": 0.1, "approved": True}
    return CODEC.encode("scored", whole | changes)


def test_a_good_order_gets_its_total() -> None:
    (result,) = rules.validate(CODEC, [raw()])
    assert (result.row, result.topic, result.error) == (0, rules.VALIDATED, None)
    assert CODEC.decode(result.value) == GOOD | {"total_cents": 750}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"customer": ""}, "empty"),
        ({"sku": ""}, "empty"),
        ({"quantity": 0}, "quantity 0 "),
        ({"quantity": 1001}, "quantity 1001 "),
        ({"unit_cents": -1}, "unit_cents -1 "),
        ({"unit_cents": 2**63 - 1, "quantity": 2}, "2 times 9223372036854775807 cents is above"),
        ({"currency": "XXX"}, "'XXX'"),
    ],
)
def test_a_bad_order_goes_to_the_dead_letters_as_it_came(wrong: Order, why: str) -> None:
    value = raw(**wrong)
    (result,) = rules.validate(CODEC, [value])
    assert (result.topic, result.value) == (rules.DLQ, value)
    assert why in (result.error or "")


@pytest.mark.parametrize("value", [None, b"", b"no order", raw()[:-1]])
def test_what_is_no_order_goes_to_the_dead_letters_too(value: bytes | None) -> None:
    (result,) = rules.validate(CODEC, [value])
    assert (result.topic, result.value) == (rules.DLQ, value)
    assert result.error


def test_each_value_has_one_result_in_its_place() -> None:
    values = [value for _, value in itertools.islice(orders(CODEC, 3, itertools.count(1)), 2000)]
    results = rules.validate(CODEC, values)
    assert [result.row for result in results] == list(range(2000))
    assert {result.topic for result in results} == {rules.VALIDATED, rules.DLQ}


def test_dear_orders_many_of_a_kind_and_those_sent_abroad_score_higher() -> None:
    plain, dear, many, far = rules.scores(
        np.array([5_000, 5_000_000, 5_000, 5_000]),
        np.array([1, 1, 40, 1]),
        np.array([False, False, False, True]),
    )
    assert 0 < plain < min(dear, many, far)
    assert max(dear, many, far) < 1


def test_scores_depend_on_no_other_order() -> None:
    numbers = np.array([100, 10_000_000, 40_000]), np.array([1, 20, 2]), np.array([True, True, 0])
    together = rules.scores(*numbers)
    alone = [rules.scores(*(column[n : n + 1] for column in numbers))[0] for n in range(3)]
    assert together.tolist() == alone


def test_the_score_decides_what_is_approved() -> None:
    orders_in = [
        GOOD | {"total_cents": 750},
        GOOD | {"total_cents": 90_000_000, "quantity": 50, "ship_to": "JP"},
    ]
    results = rules.score(CODEC, [CODEC.encode("validated", order) for order in orders_in])
    assert [(result.row, result.topic) for result in results] == [
        (0, rules.SCORED),
        (1, rules.SCORED),
    ]
    found = [CODEC.decode(result.value) for result in results]
    assert [order["approved"] for order in found] == [True, False]
    assert [order["fraud_score"] < rules.REFUSED_FROM for order in found] == [True, False]


def test_approved_orders_are_fulfilled_and_all_are_counted() -> None:
    values = [scored(), scored(approved=False)]
    assert sorted(rules.fan_out(CODEC, values)) == sorted(
        [
            Result(0, rules.ANALYTICS, values[0]),
            Result(0, rules.FULFILLMENT, values[0]),
            Result(1, rules.ANALYTICS, values[1]),
        ]
    )


def test_of_the_load_some_orders_are_refused_and_most_are_not() -> None:
    values = [value for _, value in itertools.islice(orders(CODEC, 1, itertools.count(1)), 5000)]
    valid = [each.value for each in rules.validate(CODEC, values) if each.topic == rules.VALIDATED]
    found = rules.fan_out(CODEC, [each.value for each in rules.score(CODEC, valid)])
    fulfilled = sum(result.topic == rules.FULFILLMENT for result in found)
    assert 0.8 * len(valid) < fulfilled < 0.99 * len(valid)
    assert 0.9 * len(values) < len(valid) < 0.99 * len(values)


def test_no_value_is_no_trouble() -> None:
    assert rules.validate(CODEC, []) == rules.score(CODEC, []) == rules.fan_out(CODEC, []) == []
