"""What the subcommands' arguments may be: types for argparse, with texts that say what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from asyncproducer.config import ProducerConfig
from asyncproducer.errors import ConfigError

__all__ = ["addresses", "positive", "within"]


def within(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from `low` to `high`, if there is a highest one."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{text} is more than {high}")
        return value

    return number


#: A whole number above 0.
positive = within(1)


def addresses(text: str) -> str:
    """The addresses of brokers, as the option bootstrap_servers takes them."""
    try:
        return ",".join(ProducerConfig(text).bootstrap_servers)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("bootstrap_servers: ")) from None
