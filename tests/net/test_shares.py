"""One broker does not take the memory of the others: shares of the pool, and their lines."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from asyncproducer.errors import BufferTimeout, ProducerClosed
from asyncproducer.net.buffer_pool import BufferPool, Share, Ticket

pytestmark = pytest.mark.virtual_time

TOTAL = 91


class Asker(Ticket):
    """Wants memory for a broker, and counts it there when it comes, as the accumulator does."""

    def __init__(
        self,
        pool: BufferPool,
        log: list[str],
        name: str,
        node: int | None,
        size: int = 1,
        *,
        claims: Callable[[], bool] = lambda: False,
        deadline: float = math.inf,
    ) -> None:
        self.pool, self.log, self.name, self.node, self.size = pool, log, name, node, size
        self.claims = claims
        self.error: BaseException | None = None
        pool.enter(size, deadline, self)

    def share(self) -> Share | None:
        return None if self.node is None else self.pool.share(self.node)

    def claim(self) -> bool:
        claimed = self.claims()
        if claimed:
            self.log.append(f"{self.name} claimed")
        return claimed

    def granted(self) -> None:
        self.log.append(self.name)
        share = self.share()
        if share is not None:
            share.held += self.size

    def refused(self, error: BaseException) -> None:
        self.error = error
        self.log.append(f"{self.name} {type(error).__name__}")


def take(pool: BufferPool, node: int, size: int = 1) -> bool:
    share = pool.share(node)
    if not pool.try_reserve(size, share):
        return False
    share.held += size
    return True


def give(pool: BufferPool, node: int, size: int = 1) -> None:
    pool.share(node).held -= size
    pool.release(size)


def held(pool: BufferPool, *nodes: int) -> list[int]:
    return [pool.share(node).held for node in nodes]


@pytest.fixture
async def pool() -> BufferPool:
    return BufferPool(TOTAL, loop=asyncio.get_running_loop())


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
async def flooded(pool: BufferPool) -> BufferPool:
    """Broker 1 has as much as it may, next to broker 2, which has one byte."""
    assert take(pool, 2)
    while take(pool, 1):
        pass
    assert held(pool, 1, 2) == [80, 1]
    assert pool.available == 10
    return pool


async def test_who_can_do_with_less_leaves_the_others_theirs(pool: BufferPool) -> None:
    """A batch that doubles would take all that is left."""
    assert take(pool, 2)
    assert take(pool, 1, 60)
    assert not pool.try_reserve(25, pool.share(1), spares=True)
    assert pool.try_reserve(18, pool.share(1), spares=True)
    pool.share(1).held += 18
    assert not pool.try_reserve(4, pool.share(1), spares=True)
    assert not take(pool, 1, 4)
    # Nine would not do for another that needs ten: then they are kept for nobody.
    assert take(pool, 1, 10)
    assert not take(pool, 1, 1)


async def test_who_has_nothing_gets_something_however_large(
    pool: BufferPool, log: list[str]
) -> None:
    assert take(pool, 2, 10)
    Asker(pool, log, "a", 1, 81)
    assert log == ["a"]
    Asker(pool, log, "b", 3, 20)
    Asker(pool, log, "c", 1)
    give(pool, 2, 10)
    assert log == ["a"]
    assert pool.held == 10
    give(pool, 1, 81)
    assert log == ["a", "b", "c"]


async def test_one_that_wants_more_than_is_left_does_not_hold_up_the_others(
    pool: BufferPool, log: list[str]
) -> None:
    """It steps aside, instead of holding what is free until its broker gives the rest."""
    assert take(pool, 2)
    assert take(pool, 1, 78)
    Asker(pool, log, "large", 1, 50)
    assert (pool.held, pool.available) == (0, 12)
    Asker(pool, log, "of 2", 2, 5)
    assert log == ["of 2"]
    give(pool, 1, 11)
    assert (pool.held, pool.available, log) == (0, 18, ["of 2"])
    # Others have the rest that it needs: it takes what there is, and waits for that.
    give(pool, 1, 30)
    assert (pool.held, pool.available, log) == (48, 0, ["of 2"])
    give(pool, 2, 2)
    assert log == ["of 2", "large"]


async def test_a_broker_that_is_gone_is_no_other(pool: BufferPool) -> None:
    """Nor are partitions without a leader, as long as nothing is for them."""
    share = pool.move(None, 1)
    gone = pool.move(None, 2)
    pool.move(None, -1)
    assert pool.move(gone, 1) is share
    while take(pool, 1):
        pass
    assert held(pool, 1) == [TOTAL]
    give(pool, 1, 5)
    gone.held = 1  # it counts while something is for it
    assert not take(pool, 1)
    gone.held = 0
    assert take(pool, 1)


async def test_who_stepped_aside_is_asked_again_when_its_broker_is_the_only_one(
    flooded: BufferPool, log: list[str]
) -> None:
    """The other's last partition has become its own: nothing else tells."""
    flooded.move(None, 1)
    other = flooded.move(None, 2)
    give(flooded, 2)
    Asker(flooded, log, "a", 1)
    assert log == []
    assert flooded.available == 11
    flooded.move(other, 1)
    await asyncio.sleep(0)
    assert log == ["a"]


async def test_the_only_broker_has_everything(pool: BufferPool, log: list[str]) -> None:
    while take(pool, 1):
        pass
    assert held(pool, 1) == [TOTAL]
    Asker(pool, log, "a", 1)
    assert (pool.waiting, len(pool.tickets), len(pool.set_aside)) == (1, 1, 0)


async def test_of_two_that_stand_still_a_third_gets_what_is_left(pool: BufferPool) -> None:
    pool.share(3)
    while take(pool, 1) | take(pool, 2):
        pass
    # 8/17 of it for each.
    assert held(pool, 1, 2) == [43, 42]
    for _ in range(5):
        assert take(pool, 3)
        give(pool, 3)


async def test_who_asks_for_no_broker_in_particular_has_no_bound(flooded: BufferPool) -> None:
    assert not flooded.try_reserve(1, flooded.share(1))
    assert flooded.try_reserve(9)


async def test_who_wants_more_steps_aside_for_the_others(
    flooded: BufferPool, log: list[str]
) -> None:
    Asker(flooded, log, "a", 1)
    Asker(flooded, log, "b", 2)
    Asker(flooded, log, "c", 1)
    assert log == ["b"]
    assert (flooded.waiting, len(flooded.tickets), len(flooded.set_aside)) == (2, 0, 2)
    assert flooded.is_held_up(flooded.share(1))
    assert not flooded.is_held_up(flooded.share(2))
    assert flooded.is_wanted(flooded.share(1))
    assert not flooded.is_wanted(flooded.share(2))
    # Of what it gives back, the first byte is that of b.
    give(flooded, 1, 9)
    assert log == ["b", "a", "c"]
    assert flooded.waiting == 0
    assert held(flooded, 1, 2) == [73, 2]


async def test_called_back_when_the_others_give_back(flooded: BufferPool, log: list[str]) -> None:
    assert take(flooded, 2, 4)
    Asker(flooded, log, "a", 1)
    give(flooded, 1, 3)
    assert log == []
    give(flooded, 2, 3)
    assert log == ["a"]
    assert held(flooded, 1, 2) == [78, 2]


async def test_nobody_overtakes_in_the_line_of_a_broker(
    flooded: BufferPool, log: list[str]
) -> None:
    Asker(flooded, log, "large", 1, 20)
    Asker(flooded, log, "small", 1)
    give(flooded, 1, 5)
    # That would do for the small one.
    assert log == []
    assert not take(flooded, 1)
    assert take(flooded, 2)
    assert (flooded.available, flooded.held) == (14, 0)
    give(flooded, 1, 20)
    assert log == ["large", "small"]


async def test_called_back_in_vain_it_is_first_again(pool: BufferPool, log: list[str]) -> None:
    """Between being called back and its turn, what was free has gone to another."""
    assert take(pool, 2, 45)
    assert take(pool, 1, 45)
    Asker(pool, log, "a", 1, 5)
    Asker(pool, log, "b", 1, 5)
    Asker(pool, log, "of 3", 3, 20)  # has nothing: it does not step aside
    assert (len(pool.tickets), len(pool.set_aside)) == (1, 2)
    # Broker 1 has nothing more, so a is called, behind the one that waits for 20.
    pool.share(1).held = 0
    pool.serve()
    assert (len(pool.tickets), len(pool.set_aside)) == (2, 1)
    pool.share(1).held = 45
    give(pool, 2, 20)
    assert log == ["of 3"]
    assert [ticket.name for ticket in pool.share(1).line] == ["a", "b"]  # type: ignore[attr-defined]
    give(pool, 1, 10)
    assert log == ["of 3", "a"]
    give(pool, 1, 10)
    assert log == ["of 3", "a", "b"]


async def test_who_has_nothing_is_not_starved_by_a_line_that_never_ends(
    pool: BufferPool, log: list[str]
) -> None:
    """Broker 1 gave back all it had, and there are always others in the line of all."""
    for node in range(1, 10):
        assert take(pool, node, 10)
    Asker(pool, log, "1", 1, 10)
    assert len(pool.set_aside) == 1
    nodes = iter(range(100, 200))
    for _ in range(3):
        Asker(pool, log, "new", next(nodes), 10)
    give(pool, 1, 10)
    assert log == ["new"]
    for node in range(2, 9):
        Asker(pool, log, "new", next(nodes), 10)
        give(pool, node, 10)
    assert log[:5] == ["new", "new", "new", "1", "new"]


async def test_what_needs_no_memory_is_claimed_there(flooded: BufferPool, log: list[str]) -> None:
    fits: list[str] = []
    for name in "abc":
        Asker(flooded, log, name, 1, claims=lambda name=name: name in fits)  # type: ignore[misc]
    fits += "ab"
    flooded.serve()
    assert log == ["a claimed", "b claimed"]
    assert flooded.waiting == 1
    assert held(flooded, 1) == [80]


async def test_out_of_time_there(flooded: BufferPool, log: list[str]) -> None:
    loop = asyncio.get_running_loop()
    waiting = Asker(flooded, log, "a", 1, 3, deadline=loop.time() + 5)
    vain = Asker(flooded, log, "b", 1, deadline=loop.time())
    assert isinstance(vain.error, BufferTimeout)
    await asyncio.sleep(6)
    assert isinstance(waiting.error, BufferTimeout)
    assert str(waiting.error) == (
        "no 3 bytes of buffer_memory within 5.000 s: 10 of 91 bytes are free, 0 others wait; "
        "broker 1 has 80 of them, and what is free is kept for the others: it does not keep up "
        "(raise buffer_memory or max_block_ms, or send less)"
    )
    assert (flooded.waiting, flooded.exhausted) == (0, 2)
    assert flooded.waited_seconds == pytest.approx(5)


async def test_without_a_leader(pool: BufferPool) -> None:
    pool.move(None, 1)
    while take(pool, -1):
        pass
    assert pool.told_of(pool.share(-1)) == (
        "partitions without a leader have 80 of them, and what is free is kept for the others"
    )
    assert pool.try_reserve(11)
    assert pool.told_of(pool.share(-1)) == "partitions without a leader have 80 of them"


async def test_leaving_it(flooded: BufferPool, log: list[str]) -> None:
    first = Asker(flooded, log, "a", 1)
    second = Asker(flooded, log, "b", 1)
    flooded.leave(first)
    flooded.leave(first)
    give(flooded, 1)
    assert log == ["b"]
    assert second.error is None


async def test_leaving_after_being_called_back(pool: BufferPool, log: list[str]) -> None:
    assert take(pool, 2, 45)
    assert take(pool, 1, 45)
    first, second = Asker(pool, log, "a", 1, 5), Asker(pool, log, "b", 1, 5)
    Asker(pool, log, "of 3", 3, 20)
    pool.share(1).held = 0
    pool.serve()
    assert pool.share(1).called is first
    pool.leave(first)
    assert pool.share(1).called is second
    pool.leave(second)
    assert (pool.share(1).called, pool.waiting) == (None, 1)


async def test_closed_it_refuses_those_too(flooded: BufferPool, log: list[str]) -> None:
    asker = Asker(flooded, log, "a", 1)
    assert flooded.everybody() == [asker]
    flooded.close()
    assert isinstance(asker.error, ProducerClosed)
    assert (flooded.waiting, flooded.everybody()) == (0, [])


async def test_a_leader_that_changes_takes_along_who_waits(
    flooded: BufferPool, log: list[str]
) -> None:
    """Called back from the line of one broker, it may wait in that of another."""
    asker = Asker(flooded, log, "a", 1)
    asker.node = 3
    flooded.share(3).held = 80
    flooded.share(1).held = 10
    flooded.release(0)
    assert log == []
    assert [len(flooded.share(node).line) for node in (1, 3)] == [0, 1]
    flooded.share(3).held = 10
    flooded.release(0)
    assert log == ["a"]


async def test_who_waited_for_a_broker_comes_before_those_who_come_for_the_next(
    flooded: BufferPool, log: list[str]
) -> None:
    """Its partition has another leader: it is at the head of all again, before who waits there,
    and who waits for the first broker's other partitions waits for them as before."""
    moving = Asker(flooded, log, "a", 1)
    Asker(flooded, log, "b", 1)
    Asker(flooded, log, "large", 3, 20)
    assert flooded.held == 10
    moving.node = 2
    flooded.move(flooded.share(1), 2)
    flooded.move(flooded.share(2), 2)
    flooded.move(None, 4)
    later = Asker(flooded, log, "later", 2)
    assert log == ["a"]
    assert [*flooded.tickets][1:] == [later]
    assert flooded.held == 9
    assert len(flooded.share(1).line) == 1
    await asyncio.sleep(0)
    give(flooded, 1, 21)
    assert log == ["a", "large", "later", "b"]


async def test_who_was_called_back_is_recalled_first(pool: BufferPool, log: list[str]) -> None:
    assert take(pool, 2, 45)
    assert take(pool, 1, 45)
    asker = Asker(pool, log, "a", 1, 5)
    Asker(pool, log, "b", 1, 5)
    Asker(pool, log, "of 3", 3, 20)
    pool.share(1).held = 0
    pool.serve()
    assert pool.share(1).called is asker
    pool.move(pool.share(1), 1)
    assert [ticket.name for ticket in pool.tickets] == ["a", "b", "of 3"]  # type: ignore[attr-defined]
    assert (pool.share(1).called, asker._called, len(pool.set_aside)) == (None, None, 0)
    pool.share(1).held = 45
    await asyncio.sleep(0)
    assert len(pool.share(1).line) == 2
    give(pool, 2, 20)
    assert log == ["of 3"]


async def test_who_cannot_tell_its_broker_waits_with_all(
    flooded: BufferPool, log: list[str]
) -> None:
    class Confused(Asker):
        def share(self) -> Share | None:
            if self not in self.pool.everybody():
                return None
            raise ValueError("which?")

    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    Confused(flooded, log, "a", 1)
    assert log == ["a"]
    assert [str(e["exception"]) for e in errors] == ["which?"]
    assert "Confused.share() failed" in errors[0]["message"]


@pytest.mark.parametrize("seed", range(40))
async def test_at_random(pool: BufferPool, seed: int) -> None:
    """Whatever happens: each broker's are served in order, none has more than it may when it gets
    some, and when all is given back nobody waits."""
    chance = random.Random(seed)
    nodes = range(chance.randint(1, 6))
    served: dict[int, list[int]] = {node: [] for node in nodes}
    asked: dict[int, list[int]] = {node: [] for node in nodes}
    tickets: dict[int, Random] = {}
    taken: list[tuple[int, int]] = []

    class Random(Ticket):
        def __init__(self, number: int, node: int, size: int) -> None:
            self.number, self.node, self.size = number, node, size

        def share(self) -> Share:
            return pool.share(self.node)

        def granted(self) -> None:
            served[self.node].append(self.number)
            taken.append((self.node, self.size))
            pool.share(self.node).held += self.size

        def refused(self, error: BaseException) -> None:
            raise AssertionError(error)

    def check() -> None:
        assert pool.available + pool.held + pool.reserved == TOTAL
        assert sum(size for _, size in taken) == pool.reserved
        assert pool.waiting == len(pool.everybody())
        assert sorted(pool.set_aside, key=id) == sorted(
            (t for node in nodes for t in pool.share(node).line), key=id
        )

    for number in range(400):
        node, size = chance.choice(nodes), chance.choice((1, 5, 5, 30))
        what = chance.random()
        if what < 0.55:
            share = pool.share(node)
            before = not share.held or share.held <= 8 * pool.available
            before = before or not any(pool.share(n).held for n in nodes if n != node)
            if chance.random() < 0.5 and pool.try_reserve(size, share):
                assert before
                assert not any(asked[node][len(served[node]) :])
                share.held += size
                taken.append((node, size))
            else:
                asked[node].append(number)
                ticket = tickets[number] = Random(number, node, size)
                pool.enter(size, math.inf, ticket)
        elif what < 0.6 and tickets:
            number = chance.choice(list(tickets))
            ticket = tickets.pop(number)
            if pool._waits(ticket):
                asked[ticket.node].remove(number)
            pool.leave(ticket)
        elif taken:
            give(pool, *taken.pop(chance.randrange(len(taken))))
        check()
        for of in nodes:
            assert served[of] == asked[of][: len(served[of])]
    while taken:
        give(pool, *taken.pop(chance.randrange(len(taken))))
        check()
    assert pool.waiting == 0
    assert served == asked
    assert pool.available == TOTAL
    assert held(pool, *nodes) == [0] * len(nodes)
