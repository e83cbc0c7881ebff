"""The load: orders with the audit's stamps, and the books of what became of them."""

from __future__ import annotations

import asyncio
import time
from itertools import islice

from asyncproducer import Producer
from asyncproducer.spark.audit.ledger import StampedLedger
from asyncproducer.spark.audit.stamps import HEADER, encode_stamp
from orders_pipeline.orders import Codec, orders
from orders_pipeline.rules import RAW

__all__ = ["send_orders"]

#: The clock is looked at once for so many orders.
_AT_ONCE = 100


async def send_orders(
    servers: str, ledger: StampedLedger, codec: Codec, count: int, rate: int, seed: int
) -> None:
    """Send `count` orders, at most `rate` in a second (0: as fast as it goes).

    The ledger knows how many it were, also while they are sent.
    """
    now = asyncio.get_running_loop().time
    new = islice(orders(codec, seed, iter(_now_us, -1)), count)
    async with Producer(servers, linger_ms=20, compression_type="lz4") as producer:
        began = now()
        for number, (key, value) in enumerate(new):
            if rate and number % _AT_ONCE == 0:
                await asyncio.sleep(began + number / rate - now())
            stamp = encode_stamp(ledger.run, ledger.lane, number, _now_us(), value)
            ledger.next_record()  # it only counts: the order goes in its place
            delivery = await producer.enqueue(RAW, value, key=key, headers={HEADER: stamp})
            ledger.track(delivery, now())
        await producer.flush()


def _now_us() -> int:
    return time.time_ns() // 1000
