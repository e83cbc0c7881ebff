"""What goes wrong: with the brokers (processes, leaders, replicas, addresses), and on the wire.

Each fault is a coroutine that ends when the cluster, or the wire, is whole again. It returns one
line for the log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, get_args

from asyncproducer.testing.proxy import Kind, ProxyFault

if TYPE_CHECKING:
    from asyncproducer.testing.kafka import KafkaCluster
    from asyncproducer.testing.proxy import FaultProxy
    from tests.chaos.loads import Load

__all__ = ["BROKER_FAULTS", "OF_TRANSACTIONS", "WIRE_FAULTS", "Chaos", "Fault"]

#: The node whose address changes. The others keep theirs: who loses all brokers that it knows
#: begins again with its bootstrap addresses, and some of these must be right.
WANDERER = 3

#: A fault of the wire happens with one of the next requests, of which there are many a second. But
#: a transaction may have to wait until two faults of the brokers are over, one after the other.
WIRE_PATIENCE_S = 90.0


class Chaos:
    """What the faults work on."""

    def __init__(
        self, cluster: KafkaCluster, proxy: FaultProxy, loads: list[Load], rng: random.Random
    ) -> None:
        self.cluster = cluster
        self.proxy = proxy
        self.loads = loads
        self.rng = rng

    @property
    def topics(self) -> list[str]:
        return [load.topic for load in self.loads]

    def led_by_others(self, node: int) -> bool:
        view = self.cluster.view(*self.topics).topics
        partitions = [p for topic in view.values() for p in topic.values()]
        return bool(partitions) and all(p.leader not in (node, -1) for p in partitions)

    def in_sync(self) -> bool:
        """All nodes must agree: one that was frozen may still take itself for a leader."""
        views = [self.cluster.view(*self.topics, node=n).topics for n in self.cluster.running]
        first = views[0]
        return (
            len(first) == len(self.topics)
            and all(view == first for view in views)
            and all(len(p.isr) == 3 and p.leader > 0 for t in first.values() for p in t.values())
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(partial(self.cluster.wait_until, condition, timeout_s=60))

    async def whole(self) -> None:
        await asyncio.to_thread(self.cluster.heal)
        await self.until(self.in_sync)

    async def a_while(self, longest: float) -> None:
        await asyncio.sleep(self.rng.uniform(0, longest))

    def some_node(self) -> int:
        return self.rng.choice(self.cluster.running)


Fault: TypeAlias = Callable[[Chaos], Awaitable[str]]


# -- brokers ---------------------------------------------------------------------------------


async def kill(chaos: Chaos) -> str:
    """SIGKILL; comes back when the others lead."""
    node = chaos.some_node()
    await asyncio.to_thread(chaos.cluster.kill, node)
    await chaos.until(lambda: chaos.led_by_others(node))
    await chaos.a_while(1)
    await chaos.whole()
    return f"node {node}, until the others led"


async def kill_and_start(chaos: Chaos) -> str:
    """SIGKILL, and a start at once, on the same files."""
    node = chaos.some_node()
    await asyncio.to_thread(chaos.cluster.kill, node)
    await chaos.whole()
    return f"node {node}, started at once"


async def stop(chaos: Chaos) -> str:
    """SIGTERM: hands its leaders over."""
    node = chaos.some_node()
    await asyncio.to_thread(chaos.cluster.stop_node, node)
    await chaos.a_while(1)
    await chaos.whole()
    return f"node {node}"


async def pause(chaos: Chaos) -> str:
    """SIGSTOP and SIGCONT, while it stays the leader."""
    node = chaos.some_node()
    await asyncio.to_thread(chaos.cluster.pause, node)
    seconds = chaos.rng.uniform(0.2, 2.5)
    await asyncio.sleep(seconds)
    await chaos.whole()
    return f"node {node}, {seconds:.1f} s"


async def pause_and_depose(chaos: Chaos) -> str:
    """SIGSTOP until others lead; then it wakes, and does what it had been sent."""
    node = chaos.some_node()
    await asyncio.to_thread(chaos.cluster.pause, node)
    await chaos.until(lambda: chaos.led_by_others(node))
    await chaos.a_while(1)
    await chaos.whole()
    return f"node {node}, until the others led"


async def move_leaders(chaos: Chaos) -> str:
    """Other preferred leaders, and an election, with all brokers well."""
    moved = 0
    for topic, partitions in chaos.cluster.view(*chaos.topics).topics.items():
        replicas = {}
        for number, view in partitions.items():
            nodes = list(view.replicas)
            chaos.rng.shuffle(nodes)
            replicas[number] = nodes
            moved += nodes[0] != view.leader
        await asyncio.to_thread(chaos.cluster.admin.reassign, topic, replicas)
        await asyncio.to_thread(chaos.cluster.admin.elect_preferred_leaders, topic, *replicas)
    await chaos.whole()
    return f"{moved} leaders"


async def too_few_replicas(chaos: Chaos) -> str:
    """Three in-sync replicas are asked for, and one broker is gone: nothing is taken."""
    admin = chaos.cluster.admin
    for topic in chaos.topics:
        await asyncio.to_thread(admin.alter_topic, topic, {"min.insync.replicas": "3"})
    node = chaos.some_node()
    await asyncio.to_thread(chaos.cluster.kill, node)
    before = sum(load.retries for load in chaos.loads)
    await chaos.until(lambda: chaos.led_by_others(node))
    await asyncio.sleep(chaos.rng.uniform(1, 3))
    refused = sum(load.retries for load in chaos.loads) - before
    await asyncio.to_thread(chaos.cluster.heal)
    for topic in chaos.topics:
        await asyncio.to_thread(
            chaos.cluster.admin.alter_topic, topic, {"min.insync.replicas": "2"}
        )
    await chaos.whole()
    return f"without node {node}, {refused} records were sent again"


async def move_address(chaos: Chaos) -> str:
    """SIGKILL, and a start on another port."""
    old = chaos.cluster.addresses[WANDERER][1]
    await asyncio.to_thread(partial(chaos.cluster.restart, WANDERER, new_port=True))
    await chaos.whole()
    return f"node {WANDERER} from port {old} to {chaos.cluster.addresses[WANDERER][1]}"


async def kill_two(chaos: Chaos) -> str:
    """SIGKILL for two of three: no quorum, no controller, too few replicas."""
    nodes = chaos.rng.sample(chaos.cluster.running, 2)
    for node in nodes:
        await asyncio.to_thread(chaos.cluster.kill, node)
    await asyncio.sleep(chaos.rng.uniform(1, 3))
    await chaos.whole()
    return f"nodes {nodes[0]} and {nodes[1]}"


async def kill_coordinator(chaos: Chaos, of: str = "transaction") -> str:
    """SIGKILL for the broker that coordinates the transactions, or the group of their offsets."""
    (load,) = (load for load in chaos.loads if load.promise.transactional)
    # After the fault before, or before the group's first offset, there may be none for a while.
    found: list[int] = []

    def ask() -> bool:
        admin = chaos.cluster.admin
        asked = admin.group_coordinator if of == "group" else admin.transaction_coordinator
        found.append(asked(load.topic))
        return True

    await chaos.until(ask)
    (node,) = found
    await asyncio.to_thread(chaos.cluster.kill, node)
    await chaos.until(lambda: chaos.led_by_others(node))
    await chaos.a_while(1)
    await chaos.whole()
    return f"node {node}, {load.commits} commits so far"


BROKER_FAULTS: dict[str, Fault] = {
    **{
        fault.__name__: fault
        for fault in (
            *(kill, kill_and_start, stop, pause, pause_and_depose),
            *(move_leaders, too_few_replicas, move_address, kill_two, kill_coordinator),
        )
    },
    "kill_group_coordinator": partial(kill_coordinator, of="group"),
}


# -- the wire --------------------------------------------------------------------------------


async def on_the_wire(kind: Kind, api: str, chaos: Chaos) -> str:
    """A fault of the proxy with one of the next requests, and the time that it lasts."""
    rng = chaos.rng
    seconds = {"delay": 1.5, "throttle": 2.0, "black_hole": 2.0, "refuse": 1.5}.get(kind, 0.0)
    seconds *= rng.uniform(0.3, 1.0)
    before = len(chaos.proxy.injected)
    chaos.proxy.inject(
        ProxyFault(
            kind=kind, api=api, after=rng.randrange(5), seconds=seconds, bytes_per_second=20_000
        )
    )
    async with asyncio.timeout(WIRE_PATIENCE_S):
        await chaos.proxy.happened(before + 1)
    await asyncio.sleep(seconds)
    chaos.proxy.clear()
    told = f"{api}, node {chaos.proxy.injected[-1].node}"
    return f"{told}, {seconds:.1f} s" if seconds else told


WIRE_FAULTS: dict[str, Fault] = {
    **{kind: partial(on_the_wire, kind, "produce") for kind in get_args(Kind)},
    "cut_metadata": partial(on_the_wire, "cut_after", "metadata"),
    "lose_end_txn": partial(on_the_wire, "cut_before", "end_txn"),
    "cut_end_txn": partial(on_the_wire, "cut_after", "end_txn"),
    "lose_offsets": partial(on_the_wire, "cut_before", "txn_offset_commit"),
    "cut_offsets": partial(on_the_wire, "cut_after", "txn_offset_commit"),
}

#: They need a transactional load.
OF_TRANSACTIONS = {
    *("kill_coordinator", "kill_group_coordinator"),
    *("lose_end_txn", "cut_end_txn", "lose_offsets", "cut_offsets"),
}
