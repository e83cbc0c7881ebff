"""What a consumer group has committed, as its coordinator tells it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from asyncproducer.core import wire
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.outcome import FIND_COORDINATOR, OFFSET_FETCH, TxnAction, txn_action_for
from asyncproducer.errors import (
    AuthorizationError,
    BrokerError,
    ConnectionFailed,
    ErrorCode,
    KafkaError,
    ProtocolError,
    RequestTimedOut,
)
from asyncproducer.records import OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.net.cluster import Cluster

__all__ = ["GROUP_TABLES", "committed_offsets", "look"]

#: What a code asks for in the answers to the two requests about a group.
GROUP_TABLES = {"FindCoordinator": FIND_COORDINATOR, "OffsetFetch": OFFSET_FETCH}

_DENIED = {
    ErrorCode.GROUP_AUTHORIZATION_FAILED: "grant Describe on the group",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "grant Describe on the topics",
}


async def committed_offsets(
    cluster: Cluster,
    group_id: str,
    partitions: Sequence[TopicPartition],
    *,
    config: ProducerConfig,
    deadline: float,
    coordinators: MutableMapping[tuple[int, str], int],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """The group's offsets of these partitions, of those that it has one for.

    `coordinators` are those that are known, by kind and name; what is learned is kept there.
    Whatever may pass is repeated until `deadline` (the loop's clock). Raises RequestTimedOut,
    AuthorizationError, BrokerError, UnsupportedVersionError, ProducerClosed.
    """
    loop = asyncio.get_running_loop()
    backoff = ExponentialBackoff(
        config.retry_backoff_ms / 1000, config.retry_backoff_max_ms / 1000, random=random.random
    )
    find = wire.FindCoordinatorRequest(wire.FindCoordinatorRequest.GROUP, [group_id])
    fetch = wire.OffsetFetchRequest(group_id, partitions)
    key = (wire.FindCoordinatorRequest.GROUP, group_id)
    attempts = 0
    trouble: KafkaError | None = None
    while loop.time() < deadline:
        try:
            coordinator = coordinators.get(key)
            if coordinator is None:
                found = await cluster.request(find, deadline=deadline)
                trouble, coordinator = _found(found, group_id)
                if coordinator is not None:
                    coordinators[key] = coordinator
            else:
                until = min(deadline, loop.time() + config.request_timeout_ms / 1000)
                answer = await cluster.request(
                    fetch, deadline=until, node_id=coordinator, once=True
                )
                action, trouble = _outcome(answer, group_id)
                if trouble is None:
                    return {
                        p: found for p, (_, found) in answer.offsets.items() if found.offset >= 0
                    }
                if action is TxnAction.FIND:
                    coordinators.pop(key, None)
        except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
            coordinators.pop(key, None)
            trouble = error
        if trouble is not None:
            pause = backoff.delay(attempts)
            attempts += 1
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
    raise RequestTimedOut(
        f"group {group_id!r}: its offsets are not known after {config.max_block_ms} ms "
        f"(max_block_ms): {trouble}"
    ) from trouble


def _found(
    response: wire.FindCoordinatorResponse, group_id: str
) -> tuple[KafkaError | None, int | None]:
    for each in response.coordinators:
        if each.key == group_id:
            what = f"find the coordinator of {group_id!r}"
            _, error = look(FIND_COORDINATOR, each.error_code, what)
            return error, None if error else each.node_id
    return ProtocolError(f"the answer names no coordinator of group {group_id!r}"), None


def _outcome(
    response: wire.OffsetFetchResponse, group_id: str
) -> tuple[TxnAction, KafkaError | None]:
    """What is wrong with the answer as a whole, or with the first partition of which it is."""
    what = f"fetch the offsets of group {group_id!r}"
    codes = [response.error_code, *(code for code, _ in response.offsets.values())]
    return look(OFFSET_FETCH, next((code for code in codes if code), 0), what)


def look(
    table: Mapping[int, TxnAction], code: int, what: str
) -> tuple[TxnAction, KafkaError | None]:
    """What follows from a code, and its error. Raises it unless it may pass."""
    action = txn_action_for(table, code)
    if action is TxnAction.DONE:
        return action, None
    error: KafkaError = BrokerError(code, what)
    advice = _DENIED.get(ErrorCode(code)) if code in _CODES else None
    if advice is not None:
        error = AuthorizationError(f"{ErrorCode(code).name}: not allowed to {what}: {advice}")
        error.code = code
    if action not in (TxnAction.REPEAT, TxnAction.FIND):
        raise error
    return action, error


_CODES = frozenset(int(code) for code in ErrorCode)
