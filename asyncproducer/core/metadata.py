"""The cluster as last heard: brokers, topics, leaders, epochs, ids, and when to ask again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from asyncproducer.core.answers import (
    METADATA,
    METADATA_PARTITION,
    METADATA_TOPIC,
    Answer,
    answer_for,
)
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.errors import ErrorCode, IllegalStateError
from asyncproducer.logs import guarded

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig

__all__ = [
    "ClusterMetadata",
    "LeaderHint",
    "MetadataChange",
    "MetadataPlan",
    "MetadataResponse",
    "Node",
    "PartitionMetadata",
    "PartitionUpdate",
    "TopicMetadata",
    "TopicUpdate",
]

logger = guarded("asyncproducer.core.metadata")

#: Older Metadata responses may carry an epoch that an older controller wrote (KAFKA-9212).
FIRST_VERSION_WITH_RELIABLE_EPOCHS = 9


class Node(NamedTuple):
    """A broker and where it listens."""

    node_id: int
    host: str
    port: int
    rack: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port} (id {self.node_id})"


class PartitionMetadata(NamedTuple):
    """One partition: -1 where there is no leader, or no epoch is known."""

    partition: int
    leader: int = -1
    leader_epoch: int = -1


class TopicMetadata:
    """One topic as last heard. Never changed after it is made: news make a new one.

    `partitions[i]` is partition i; one that the broker did not tell of has no leader.
    `available` are the partitions with a leader, ascending.
    """

    __slots__ = ("available", "internal", "name", "partition_count", "partitions", "topic_id")

    def __init__(
        self,
        name: str,
        partitions: tuple[PartitionMetadata, ...],
        *,
        topic_id: bytes | None = None,
        internal: bool = False,
    ) -> None:
        self.name = name
        self.partitions = partitions
        self.partition_count = len(partitions)
        self.topic_id = topic_id
        self.internal = internal
        self.available = tuple([entry.partition for entry in partitions if entry.leader >= 0])

    def __repr__(self) -> str:
        leaders = f"{len(self.available)} of {len(self.partitions)} partitions have a leader"
        return f"<TopicMetadata {self.name!r}: {leaders}>"


class PartitionUpdate(NamedTuple):
    """One partition in a Metadata response; -1 for no leader or no epoch."""

    partition: int
    error_code: int
    leader: int
    leader_epoch: int


class TopicUpdate(NamedTuple):
    """One topic in a Metadata response. An all-zero topic id is None here."""

    name: str | None
    topic_id: bytes | None
    error_code: int
    internal: bool
    partitions: tuple[PartitionUpdate, ...]


class MetadataResponse(NamedTuple):
    """A decoded Metadata response. `version` is the version of the request."""

    version: int
    throttle_ms: int
    error_code: int
    cluster_id: str | None
    controller_id: int
    nodes: tuple[Node, ...]
    topics: tuple[TopicUpdate, ...]


class MetadataPlan(NamedTuple):
    """What the next Metadata request asks for.

    `full`: every topic in use, and the answer replaces what is known; else only
    `topics`, and the answer is merged. Zero topics mean none, never all.
    """

    topics: tuple[str, ...]
    full: bool
    request_version: int


class MetadataChange(NamedTuple):
    """What an answer, or a hint in a Produce response, changed."""

    #: False when the answer was of no use, and counted as a failed update.
    applied: bool = True
    #: Topics whose entry is new, different or gone.
    topics: frozenset[str] = frozenset()
    #: Of these, the ones that are not known any more.
    removed: frozenset[str] = frozenset()
    #: Whether any partition has another leader, or a newer leader epoch, than before.
    leaders_changed: bool = False
    #: Whether a broker came, went or moved.
    nodes_changed: bool = False


class LeaderHint(NamedTuple):
    """The leader that a broker named when it refused a Produce request (KIP-951)."""

    topic: str
    partition: int
    leader: int
    leader_epoch: int


class ClusterMetadata:
    """What is known of the cluster, and when and what to ask next (Java: ProducerMetadata).

    Holds no clock: whoever drives it passes `now`, in seconds of any monotonic clock.
    All times given to the constructor are seconds.

    An update is wanted when somebody asked for one or the last full one is older than
    `max_age`. How soon it may happen is another matter: `backoff` spaces requests that
    fail and, apart from that, answers that bring nothing new (KIP-580), so that waiting
    for a leader election does not become a flood. Both delays are drawn once, when the
    answer or failure comes in. Topics that nobody adds for `max_idle` are forgotten
    (KIP-526).

    A *partial* update asks for the new topics only and is merged; its cost does not
    depend on the number of other topics. A *full* one asks for every topic in use and
    replaces what is known.

    `rebootstrap_trigger` is None for `metadata_recovery_strategy=none`.
    """

    def __init__(
        self,
        *,
        max_age: float,
        max_idle: float,
        backoff: ExponentialBackoff,
        rebootstrap_trigger: float | None = None,
    ) -> None:
        #: Grows with everything that changes what can be read here.
        self.version = 0
        #: The brokers by id. A new dict whenever one comes, goes or moves.
        self.nodes: dict[int, Node] = {}
        self.cluster_id: str | None = None
        self.controller_id = -1
        self.closed = False

        self._max_age = max_age
        self._max_idle = max_idle
        self._backoff = backoff
        self._rebootstrap_trigger = rebootstrap_trigger

        self._topics: dict[str, TopicMetadata] = {}
        self._names: dict[bytes, str] = {}
        self._errors: dict[str, int] = {}
        # Topics whose last answer had partition numbers that cannot be: told once.
        self._nonsense: set[str] = set()
        # Survives an answer that leaves the topic out, so that a stale broker cannot
        # bring an old leader back; goes when the topic is no longer in use.
        self._last_seen_epochs: dict[str, dict[int, int]] = {}

        # Every topic in use, and when it is forgotten. The heap has each of them once,
        # with a time that may be too early: sending only writes the dict.
        self._expires_at: dict[str, float] = {}
        self._expiry_heap: list[tuple[float, str]] = []
        self._new_topics: dict[str, None] = {}

        self._full_update_needed = False
        self._partial_update_needed = False
        self._request_version = 0
        self._full_update_at = -inf
        self._failures = 0
        self._failures_over_at = -inf
        self._equivalent_responses = 0
        self._equivalents_over_at = -inf

        self._bootstrap_nodes: dict[int, Node] = {}
        #: Since when an update is due and being tried without an answer; None when none is.
        self.attempt_started_at: float | None = None
        self._rebootstrap_required = False

    @classmethod
    def from_config(cls, config: ProducerConfig, random: Callable[[], float]) -> ClusterMetadata:
        """The rules with a producer's settings. `random` returns floats in [0, 1)."""
        rebootstraps = config.metadata_recovery_strategy == "rebootstrap"
        return cls(
            max_age=config.metadata_max_age_ms / 1000,
            max_idle=config.metadata_max_idle_ms / 1000,
            backoff=ExponentialBackoff(
                config.retry_backoff_ms / 1000,
                config.retry_backoff_max_ms / 1000,
                random=random,
            ),
            rebootstrap_trigger=(
                config.metadata_recovery_rebootstrap_trigger_ms / 1000 if rebootstraps else None
            ),
        )

    # What is known

    def topic(self, name: str) -> TopicMetadata | None:
        """The topic, or None while it is not known."""
        return self._topics.get(name)

    def topic_name(self, topic_id: bytes) -> str | None:
        """The name of a known topic's id (KIP-516), as Produce responses have from version 13."""
        return self._names.get(topic_id)

    def topic_error(self, name: str) -> int:
        """The error code that the last answer about this topic had as a whole; 0 for none.

        Stays until the next answer that mentions the topic, so everybody who waits for
        it sees it. (Java raises it to one waiter only.)
        """
        return self._errors.get(name, 0)

    def leader(self, topic: str, partition: int) -> PartitionMetadata | None:
        """The partition's leader and epoch, or None when topic or partition are not known."""
        entry = self._topics.get(topic)
        if entry is None or not 0 <= partition < len(entry.partitions):
            return None
        return entry.partitions[partition]

    @property
    def controller(self) -> Node | None:
        """The broker that the last Metadata response named as controller, if it did."""
        # -1 means none, and is also the id of the first bootstrap address.
        return self.nodes.get(self.controller_id) if self.controller_id >= 0 else None

    def age(self, now: float) -> float:
        """Seconds since the last full update; 0 before the first one (Java: metadata-age)."""
        return now - self._full_update_at if self._full_update_at > -inf else 0.0

    @property
    def bootstrapping(self) -> bool:
        """Whether the nodes are the configured addresses, not brokers that the cluster named."""
        return self.nodes is self._bootstrap_nodes

    # What is wanted

    def add_topic(self, name: str, now: float) -> bool:
        """Keep the topic in use for another `max_idle`. True when it is new.

        A new topic makes a partial update due at once, whatever the backoff says.
        """
        is_new = name not in self._expires_at
        expires_at = self._expires_at[name] = now + self._max_idle
        if is_new:
            heappush(self._expiry_heap, (expires_at, name))
            self._new_topics[name] = None
            self._request_update_for_new_topics()
        return is_new

    def request_update(self, *, reset_backoff: bool = False) -> int:
        """Want a full update, as soon as the backoff allows.

        `reset_backoff` forgets that the last answers brought nothing new. Returns the
        version that is going to be replaced.
        """
        self._full_update_needed = True
        if reset_backoff:
            self._reset_equivalent_responses()
        return self.version

    def request_update_for_topic(self, name: str) -> int:
        """Want news of this topic: a partial update while it is new, else a full one."""
        if name in self._new_topics:
            self._request_update_for_new_topics()
            return self.version
        return self.request_update()

    def next_update_at(self, now: float) -> float:
        """When the next request should be made: `now` if it is due, inf is never returned."""
        expires_at = self._full_update_at + self._max_age
        if now >= expires_at:
            # An update because of age is not one more try for news that did not come.
            self._reset_equivalent_responses()
        wanted = self._full_update_needed or self._partial_update_needed
        wanted_at = -inf if wanted else expires_at
        return max(now, wanted_at, self._failures_over_at, self._equivalents_over_at)

    def plan(self, now: float) -> MetadataPlan:
        """What to ask now. The answer, or its failure, comes back with this plan."""
        self.begin_attempt(now)
        full = self._full_update_needed or now >= self._full_update_at + self._max_age
        topics = self._expires_at if full else self._new_topics
        return MetadataPlan(tuple(topics), full, self._request_version)

    # What came back

    def update(self, plan: MetadataPlan, response: MetadataResponse, now: float) -> MetadataChange:
        """Take in the answer to a request.

        An answer with an error or without any broker counts as a failed update.
        REBOOTSTRAP_REQUIRED makes `rebootstrap_due()` true at once (KIP-1102).

        Raises: IllegalStateError after `close()`.
        """
        if self.closed:
            raise IllegalStateError("the metadata is closed and cannot take an update")
        if response.error_code != ErrorCode.NONE or not response.nodes:
            if answer_for(METADATA, response.error_code) is Answer.REBOOTSTRAP:
                self.require_rebootstrap()
            self.failed_update(now)
            return MetadataChange(applied=False)

        # A topic that was added after the request was built still waits for its own.
        self._partial_update_needed = plan.request_version < self._request_version
        if plan.full:
            self._full_update_needed = False
            self._full_update_at = now
        self.attempt_started_at = None
        self._rebootstrap_required = False
        # Taken back below by any partition that has news.
        self._equivalent_responses += 1

        forgotten = self._forget_idle_topics(now)
        nodes_changed, leaderless = self._take_nodes(response, full=plan.full)
        changed, gone, leaders_changed = self._take_topics(plan, response)

        self._failures = 0
        self._failures_over_at = now + self._backoff.delay(0)
        self._equivalents_over_at = now + (
            self._backoff.delay(self._equivalent_responses - 1)
            if self._equivalent_responses
            else 0.0
        )
        self.version += 1
        return MetadataChange(
            topics=frozenset(changed | leaderless | forgotten),
            removed=frozenset(gone | forgotten),
            leaders_changed=leaders_changed or bool(leaderless or forgotten),
            nodes_changed=nodes_changed,
        )

    def failed_update(self, now: float) -> None:
        """A request got no usable answer: wait longer before each further one."""
        self._failures_over_at = now + self._backoff.delay(self._failures)
        self._failures += 1
        self._reset_equivalent_responses()

    def update_leaders(self, hints: Iterable[LeaderHint], nodes: Iterable[Node]) -> MetadataChange:
        """Take in the new leaders that a Produce response named, and where they listen (KIP-951).

        A hint counts only when its epoch is newer than the partition's, and its leader's
        address is known or comes with it. The rest is left alone; nothing is asked less
        often because of hints.
        """
        known_nodes = self.nodes | {node.node_id: node for node in nodes}
        news: dict[str, dict[int, PartitionMetadata]] = {}
        for name, partition, leader, epoch in hints:
            if self.leader(name, partition) is None or leader not in known_nodes:
                continue
            if epoch <= self._last_seen_epochs[name].get(partition, -1):
                continue
            news.setdefault(name, {})[partition] = PartitionMetadata(partition, leader, epoch)
        if not news:
            return MetadataChange(applied=False)

        for name, changes in news.items():
            entry = self._topics[name]
            partitions = list(entry.partitions)
            epochs = self._last_seen_epochs[name]
            for partition, metadata in changes.items():
                partitions[partition] = metadata
                epochs[partition] = metadata.leader_epoch
            self._topics[name] = TopicMetadata(
                name, tuple(partitions), topic_id=entry.topic_id, internal=entry.internal
            )
        nodes_changed = known_nodes != self.nodes
        if nodes_changed:
            self.nodes = known_nodes
        self.version += 1
        return MetadataChange(
            topics=frozenset(news), leaders_changed=True, nodes_changed=nodes_changed
        )

    def update_leader(
        self, topic: str, partition: int, leader: int, leader_epoch: int, nodes: Iterable[Node]
    ) -> bool:
        """`update_leaders` for a single partition. True when the hint was news."""
        return self.update_leaders(
            [LeaderHint(topic, partition, leader, leader_epoch)], nodes
        ).applied

    # Starting, and starting over

    def bootstrap(self, nodes: Iterable[Node]) -> None:
        """Begin with the configured addresses, whose ids are negative. An update is due at once."""
        self._bootstrap_nodes = {node.node_id: node for node in nodes}
        self.nodes = self._bootstrap_nodes
        self._full_update_needed = True
        self.version += 1

    def begin_attempt(self, now: float) -> None:
        """An update is due and is being tried, though perhaps no broker can be reached yet."""
        if self.attempt_started_at is None:
            self.attempt_started_at = now

    @property
    def can_rebootstrap(self) -> bool:
        """Whether `metadata_recovery_strategy` allows starting over (KIP-899)."""
        return self._rebootstrap_trigger is not None

    @property
    def rebootstrap_at(self) -> float:
        """When to start over if no answer comes until then; inf for never (KIP-1102)."""
        if self._rebootstrap_trigger is None:
            return inf
        if self._rebootstrap_required:
            return -inf
        if self.attempt_started_at is None:
            return inf
        # Java waits for more than the trigger, counted in whole milliseconds.
        return self.attempt_started_at + self._rebootstrap_trigger + 0.001

    def require_rebootstrap(self) -> None:
        """A broker demands it: it does not belong to the cluster that we know (KIP-1242)."""
        self._rebootstrap_required = True

    def rebootstrap_due(self, now: float) -> bool:
        """Whether to close all connections and begin again with the configured addresses."""
        return now >= self.rebootstrap_at

    def rebootstrap(self, now: float) -> MetadataChange:
        """Forget the brokers and leaders, and begin again with the configured addresses.

        The topics in use stay, with as many partitions as they had but without leaders and
        ids, so that records can still be partitioned and buffered. (Java forgets the
        partitions too: there each send waits until a broker can be reached.) The wait for
        `rebootstrap_trigger` starts anew.
        """
        changed = frozenset(self._topics)
        for name, entry in self._topics.items():
            partitions = tuple([PartitionMetadata(index) for index in range(len(entry.partitions))])
            self._topics[name] = TopicMetadata(name, partitions, internal=entry.internal)
        self._names = {}
        self._errors = {}
        self.controller_id = -1
        self.bootstrap(self._bootstrap_nodes.values())
        self.attempt_started_at = now
        self._rebootstrap_required = False
        return MetadataChange(topics=changed, leaders_changed=bool(changed), nodes_changed=True)

    def close(self) -> None:
        """No update is taken any more. What is known can still be read."""
        self.closed = True

    # Inside

    def _request_update_for_new_topics(self) -> None:
        self._partial_update_needed = True
        self._request_version += 1
        self._failures_over_at = -inf
        self._reset_equivalent_responses()

    def _reset_equivalent_responses(self) -> None:
        self._equivalent_responses = 0
        self._equivalents_over_at = -inf

    def _take_nodes(self, response: MetadataResponse, *, full: bool) -> tuple[bool, set[str]]:
        """Whether the brokers changed, and which topics lost a leader by it.

        Every Metadata response lists all brokers, a partial one as well.
        """
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        nodes = {node.node_id: node for node in response.nodes}
        if nodes == self.nodes and not self.bootstrapping:
            return False, set()
        gone = self.nodes.keys() - nodes.keys()
        self.nodes = nodes
        return True, set() if full or not gone else self._drop_leaders(gone)

    def _drop_leaders(self, gone: AbstractSet[int]) -> set[str]:
        """A broker left while only some topics were asked for: see to the others as well.

        This looks at every topic, but brokers do not leave often.
        """
        touched = set()
        for name, entry in self._topics.items():
            if any(metadata.leader in gone for metadata in entry.partitions):
                partitions = tuple(
                    [
                        metadata._replace(leader=-1) if metadata.leader in gone else metadata
                        for metadata in entry.partitions
                    ]
                )
                self._topics[name] = TopicMetadata(
                    name, partitions, topic_id=entry.topic_id, internal=entry.internal
                )
                touched.add(name)
                self._full_update_needed = True
        return touched

    def _take_topics(
        self, plan: MetadataPlan, response: MetadataResponse
    ) -> tuple[set[str], set[str], bool]:
        """The topics that changed, the ones that are gone, and whether a leader changed."""
        before = self._topics
        changed: set[str] = set()
        leaders_changed = False
        mentioned: set[str] = set()
        for news in response.topics:
            name = self._name_of(news)
            if name is None or name not in self._expires_at:
                continue
            mentioned.add(name)
            old = before.get(name)
            entry = self._take_topic(name, news, old, version=response.version)
            # A new topic's errors are followed up by full updates (Java: ProducerMetadata).
            self._new_topics.pop(name, None)
            if entry is old:
                continue
            changed.add(name)
            if entry is None:
                self._remove_entry(name)
            else:
                self._put_entry(entry, old)
            if entry is None or old is None or entry.partitions != old.partitions:
                leaders_changed = True
        self._ask_again(plan, mentioned)
        if not plan.full:
            return changed, {name for name in changed if name not in self._topics}, leaders_changed

        for name in self._topics.keys() - mentioned:
            self._remove_entry(name)
            changed.add(name)
            leaders_changed = True
        for name in self._errors.keys() - mentioned:
            del self._errors[name]
        return changed, {name for name in changed if name not in self._topics}, leaders_changed

    def _ask_again(self, plan: MetadataPlan, mentioned: AbstractSet[str]) -> None:
        """A broker answers for each topic that it was asked for, if only with an error.

        One that does not (it starts up, or there is a proxy between us) cannot make us do
        without the topic until the metadata is old.
        """
        for name in plan.topics:
            if name in self._expires_at and name not in mentioned:
                self._new_topics.pop(name, None)
                self._full_update_needed = True

    def _name_of(self, news: TopicUpdate) -> str | None:
        if news.name is not None or news.topic_id is None:
            return news.name
        return self._names.get(news.topic_id)

    def _take_topic(
        self, name: str, news: TopicUpdate, old: TopicMetadata | None, *, version: int
    ) -> TopicMetadata | None:
        """The topic's entry after this answer: `old` itself when there is nothing new."""
        if news.error_code != ErrorCode.NONE:
            self._errors[name] = news.error_code
            if answer_for(METADATA_TOPIC, news.error_code) is Answer.REPEAT:
                self._full_update_needed = True
            return None
        self._errors.pop(name, None)

        epochs = self._last_seen_epochs.setdefault(name, {})
        if news.topic_id is not None and (old is None or old.topic_id != news.topic_id):
            # Another topic of the same name, or one whose id we lost sight of: its
            # epochs have nothing to do with those seen so far (KIP-516).
            epochs.clear()
            known: tuple[PartitionMetadata, ...] = ()
        else:
            known = old.partitions if old is not None else ()
        count = self._partition_count(name, news, known)
        if not count:
            # It is being created or deleted. Nothing can be sent to such a topic.
            self._full_update_needed = True
            return None
        entries: list[PartitionMetadata | None] = [None] * count
        for update in news.partitions:
            # An error does not make the epoch less true.
            if answer_for(METADATA_PARTITION, update.error_code) is Answer.REPEAT:
                self._full_update_needed = True
            if 0 <= update.partition < count:
                reliable = version >= FIRST_VERSION_WITH_RELIABLE_EPOCHS
                entries[update.partition] = self._take_partition(update, epochs, known, reliable)
        partitions = tuple(
            [
                PartitionMetadata(partition) if entry is None else entry
                for partition, entry in enumerate(entries)
            ]
        )
        if (
            old is not None
            and partitions == old.partitions
            and news.topic_id == old.topic_id
            and news.internal == old.internal
        ):
            return old
        return TopicMetadata(name, partitions, topic_id=news.topic_id, internal=news.internal)

    def _partition_count(
        self, name: str, news: TopicUpdate, known: tuple[PartitionMetadata, ...]
    ) -> int:
        """One more than the highest number that can be: partitions are numbered from 0.

        An answer lists all of them. It may leave some out that we know. But a number for
        which there are not enough entries is no broker's, and must not make us fill memory
        with all those below it.
        """
        limit = max(len(news.partitions), len(known))
        numbers = [update.partition for update in news.partitions]
        possible = [number for number in numbers if 0 <= number < limit]
        if len(possible) == len(numbers):
            self._nonsense.discard(name)
        elif name not in self._nonsense:
            self._nonsense.add(name)
            odd = next(number for number in numbers if not 0 <= number < limit)
            logger.warning(
                "an answer with %d partitions of topic %s calls one of them %d: what it says of"
                " such partitions is ignored",
                len(numbers),
                name,
                odd,
            )
        return max(possible, default=-1) + 1

    def _take_partition(
        self,
        update: PartitionUpdate,
        epochs: dict[int, int],
        known: tuple[PartitionMetadata, ...],
        reliable: bool,
    ) -> PartitionMetadata | None:
        """The partition's entry after this answer; None leaves it without a leader."""
        partition, _, leader, epoch = update
        if not reliable or epoch < 0:
            epochs.pop(partition, None)
            self._reset_equivalent_responses()
            epoch = -1
        else:
            last_seen = epochs.get(partition, -1)
            if epoch < last_seen:
                # The broker that answered is behind. What we know is better.
                if partition >= len(known):
                    return None
                leader, epoch = known[partition].leader, known[partition].leader_epoch
            elif epoch > last_seen:
                epochs[partition] = epoch
                self._reset_equivalent_responses()
        # A leader that is not among the brokers cannot be reached.
        return PartitionMetadata(partition, leader if leader in self.nodes else -1, epoch)

    def _put_entry(self, entry: TopicMetadata, old: TopicMetadata | None) -> None:
        if old is not None and old.topic_id is not None and old.topic_id != entry.topic_id:
            self._names.pop(old.topic_id, None)
        if entry.topic_id is not None:
            self._names[entry.topic_id] = entry.name
        self._topics[entry.name] = entry

    def _remove_entry(self, name: str) -> None:
        entry = self._topics.pop(name, None)
        if entry is not None and entry.topic_id is not None:
            self._names.pop(entry.topic_id, None)

    def _forget_idle_topics(self, now: float) -> set[str]:
        """Forget the topics that nobody added for `max_idle`, and say which ones had an entry."""
        forgotten = set()
        heap = self._expiry_heap
        again = []
        while heap and heap[0][0] <= now:
            _, name = heappop(heap)
            expires_at = self._expires_at[name]
            if expires_at > now or name in self._new_topics:
                again.append((expires_at, name))
                continue
            del self._expires_at[name]
            self._last_seen_epochs.pop(name, None)
            self._errors.pop(name, None)
            self._nonsense.discard(name)
            if name in self._topics:
                self._remove_entry(name)
                forgotten.add(name)
        for item in again:
            heappush(heap, item)
        return forgotten
