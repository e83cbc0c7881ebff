from __future__ import annotations

import socket

from asyncproducer.net.addresses import AddressRotation
from asyncproducer.net.transport import Address

ONE, TWO, THREE = (Address(socket.AF_INET, f"10.0.0.{n}", 9092) for n in (1, 2, 3))


def test_nothing_is_known_before_the_first_lookup() -> None:
    assert AddressRotation().exhausted


def test_a_single_address_is_looked_up_and_used_again() -> None:
    """CC-07."""
    rotation = AddressRotation()
    for _ in range(3):
        assert rotation.exhausted
        rotation.resolved([ONE])
        assert rotation.take() == ONE


def test_each_attempt_takes_the_next_address_and_then_looks_up_again() -> None:
    """CC-07."""
    rotation = AddressRotation()
    rotation.resolved([ONE, TWO, THREE])
    assert [rotation.take(), rotation.take(), rotation.take()] == [ONE, TWO, THREE]
    assert rotation.exhausted


def test_a_new_lookup_does_not_begin_with_the_address_tried_last() -> None:
    """CC-07, NC-17."""
    rotation = AddressRotation()
    rotation.resolved([ONE, TWO])
    assert rotation.take() == ONE
    rotation.forget()
    assert rotation.exhausted
    rotation.resolved([ONE, TWO])
    assert rotation.take() == TWO


def test_a_new_lookup_may_begin_with_any_other_address() -> None:
    """CC-07."""
    rotation = AddressRotation()
    rotation.resolved([ONE, TWO])
    assert rotation.take() == ONE
    rotation.forget()
    rotation.resolved([TWO, ONE])
    assert [rotation.take(), rotation.take()] == [TWO, ONE]


def test_the_callers_list_is_left_alone() -> None:
    addresses = [ONE, TWO]
    rotation = AddressRotation()
    rotation.resolved(addresses)
    rotation.take()
    assert addresses == [ONE, TWO]
