"""The sink's options, as Spark hands them over: text by lower-case names.

Those of the producer have Kafka's dotted names, with `kafka.` before them as for Spark's own
Kafka sink, or without.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from asyncproducer.config import ProducerConfig
from asyncproducer.errors import ConfigError, InvalidTopic
from asyncproducer.records import check_topic

__all__ = ["Keying", "SinkOptions"]


class Keying(Enum):
    """What is delivered exactly once as a unit, and who tells one unit from the other."""

    #: Nothing: at least once.
    NONE = "at_least_once"
    #: The rows of one Kafka partition that Spark has read, by their offsets.
    SOURCE = "source"
    #: The rows of one Spark partition, by the number of the batch.
    GROUP = "group"


#: Our own options by their lower-case names.
_OWN = {
    name.lower(): name
    for name in (
        "topic",
        "delivery",
        "marker",
        "marker.topic",
        "sink.id",
        "tasks",
        "job.id",
        "adopt",
        "trust",
        "source.bootstrap.servers",
        "report.file",
    )
}
#: What is said to Spark, and reaches us as well.
_SPARKS = frozenset(
    {
        "checkpointlocation",
        "includeheaders",
        "outputmode",
        "path",
        "queryname",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
    }
)
#: For rows by the million, where the caller has given nothing else.
_DEFAULTS = {"linger.ms": "20", "batch.size": "262144"}
#: What the sink decides.
_RESERVED = {
    "transactional.id": "give sink.id, the transactional ids are made of it",
    "enable.idempotence": "it is always on: leave it out",
    "key.serializer": "columns are sent as they are: cast them to string or binary",
    "value.serializer": "columns are sent as they are: cast them to string or binary",
}
_NOT_HERE = ", or set enable.idempotence=False"
_SINK_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: Of batches and jobs: their numbers are kept as offsets.
_MOST = 2**63 - 1


@dataclass(frozen=True)
class SinkOptions:
    """Everything that the sink was told. Picklable: it goes to the tasks. `of` makes it."""

    producer: dict[str, str] = field(repr=False)
    topic: str | None = None
    keying: Keying = Keying.NONE
    sink_id: str = ""
    #: How many Spark partitions the rows are in, with Keying.GROUP.
    tasks: int = 0
    marker_topic: str = ""
    #: The number of a batch job.
    job_id: int | None = None
    #: The batch before which there need be no marker of ours.
    adopt: int | None = None
    #: The batch whose replay need not look the same, with Keying.GROUP.
    trust: int | None = None
    #: Where the rows were read, if not where they go.
    source_servers: str | None = None
    #: Where the driver appends a line of JSON for each commit.
    report_file: str | None = None
    streaming: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Check them all. Raises ConfigError, which says what to change."""
        own: dict[str, str] = {}
        producer: dict[str, str] = {}
        spelled: dict[str, str] = {}
        for name, value in given.items():
            key = name.lower()
            if key in _OWN:
                own[key] = value
            elif key not in _SPARKS:
                # Its errors have names as in Python.
                dotted = key.removeprefix("kafka.").replace("_", ".")
                if dotted in spelled:
                    raise ConfigError(
                        f"{spelled[dotted]!r} and {name!r} set the same option: keep one"
                    )
                spelled[dotted] = name
                _add_producer_option(producer, name, dotted, value)
        if given.get("path"):
            raise ConfigError(
                f"path={given['path']!r}: a topic is not a path; call save() or start() without "
                "arguments, and give the option topic"
            )
        keying = _keying(own)
        options = cls(
            producer={**_DEFAULTS, **producer},
            topic=own.get("topic") or None,
            keying=keying,
            sink_id=own.get("sink.id", ""),
            tasks=_number(own, "tasks", 1) or 0,
            marker_topic=own.get("marker.topic") or own.get("topic") or "",
            job_id=_number(own, "job.id", 0),
            adopt=_number(own, "adopt", 0),
            trust=_number(own, "trust", 0),
            source_servers=own.get("source.bootstrap.servers") or None,
            report_file=own.get("report.file") or None,
            streaming=streaming,
        )
        options.config()
        for name in ("topic", "marker.topic"):
            _check_topic(name, own.get(name))
        if options.source_servers is not None:
            over = {**options.producer, "bootstrap.servers": options.source_servers}
            try:
                ProducerConfig.from_mapping(over)
            except ConfigError as error:
                raise ConfigError(f"source.bootstrap.servers: {error}") from None
        if keying is not Keying.NONE:
            options._check_exactly_once(given)
        else:
            for name in sorted(own.keys() - {"topic", "delivery", "report.file"}):
                raise ConfigError(
                    f"{name} is for exactly-once delivery: add delivery=exactly_once, or leave "
                    f"{name} out"
                )
        return options

    @property
    def servers(self) -> str:
        """The cluster that is written to."""
        return self.producer.get("bootstrap.servers", "")

    def config(self, **over: Any) -> ProducerConfig:
        """The producer's options. Raises ConfigError."""
        try:
            return ProducerConfig.from_mapping(self.producer, **over)
        except ConfigError as error:
            # What the producer may advise besides is refused here.
            raise ConfigError(str(error).removesuffix(_NOT_HERE)) from None

    def _check_exactly_once(self, given: Mapping[str, str]) -> None:
        if not _SINK_ID.fullmatch(self.sink_id):
            raise ConfigError(
                f"sink.id={self.sink_id!r}: exactly-once delivery needs a name for this sink that "
                "no other query uses and that never changes; up to 200 letters, digits, '.', '_' "
                "and '-'"
            )
        if not self.marker_topic:
            raise ConfigError(
                "marker.topic is missing: without the option topic, name a topic whose partition 0 "
                "the sink may keep its markers under (nothing is written into it)"
            )
        if self.config().acks != -1:
            raise ConfigError(
                f"acks={self.config().acks}: exactly-once delivery needs acks=all, which is also "
                "what you get when you leave it out"
            )
        if (
            given.get(
                "asyncProgressTrackingEnabled", given.get("asyncprogresstrackingenabled", "")
            ).lower()
            == "true"
        ):
            raise ConfigError(
                "asyncProgressTrackingEnabled=true: after a crash several batches would be "
                "replayed, and a marker knows the last one only; switch it off"
            )
        if self.streaming and self.job_id is not None:
            raise ConfigError(
                "job.id is for batch jobs: a streaming query numbers its batches itself"
            )
        if not self.streaming and self.job_id is None:
            raise ConfigError(
                "job.id is missing: exactly-once delivery of a batch job needs its number, the "
                "same when the job is run again, and a higher one for the next job of this sink"
            )
        if not self.streaming and self.adopt is not None and self.adopt > (self.job_id or 0):
            raise ConfigError(
                f"adopt={self.adopt} is above job.id={self.job_id}: it names the job that is run "
                f"now; give adopt={self.job_id}, or leave it out"
            )
        if self.keying is Keying.GROUP and not self.tasks:
            raise ConfigError(
                "tasks is missing: give the number that asyncproducer.spark.by_kafka_partition was "
                "given; it belongs to sink.id and never changes"
            )
        if self.keying is Keying.GROUP and self.source_servers is not None:
            raise ConfigError(
                "source.bootstrap.servers is for marker=source: with marker=group it has no "
                "effect, leave it out"
            )
        if self.keying is Keying.SOURCE and not self.streaming and self.adopt is not None:
            raise ConfigError(
                "adopt is for streaming queries and marker=group: a batch job with marker=source "
                "never expects a marker, leave it out"
            )
        if self.keying is Keying.SOURCE and self.trust is not None:
            raise ConfigError(
                "trust is for marker=group: with marker=source a batch that differs has no way on, "
                "leave it out"
            )
        if self.keying is Keying.SOURCE and self.tasks:
            raise ConfigError(
                "tasks is for marker=group: with marker=source each Kafka partition that is read "
                "has a marker of its own"
            )


def _keying(own: Mapping[str, str]) -> Keying:
    delivery = _choice(own, "delivery", ("at_least_once", "exactly_once"))
    marker = _choice(own, "marker", ("group", "source"))
    return Keying.NONE if delivery == "at_least_once" else Keying(marker)


def _choice(own: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = own.get(name, known[0])
    if value.lower() not in known:
        raise ConfigError(f"{name}={value!r}: must be {' or '.join(known)}")
    return value.lower()


def _number(own: Mapping[str, str], name: str, least: int) -> int | None:
    text = own.get(name)
    if text is None:
        return None
    # The longest that there may be has 19 digits; of more, Python would refuse to make a number.
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) < least:
        raise ConfigError(f"{name}={text[:80]!r}: must be a whole number, {least} or more")
    if int(text) > _MOST:
        raise ConfigError(f"{name}={text}: must be at most {_MOST}, an offset tells it")
    return int(text)


def _check_topic(name: str, topic: str | None) -> None:
    try:
        if topic:
            check_topic(topic)
    except InvalidTopic as error:
        raise ConfigError(f"{name}: {error}") from None


def _add_producer_option(producer: dict[str, str], given: str, name: str, value: str) -> None:
    if name in _RESERVED:
        if name == "enable.idempotence" and value.lower() == "true":
            return
        raise ConfigError(f"{given}: {_RESERVED[name]}")
    try:
        # On its own, and beside what it needs, so that a wrong name is told from a wrong value.
        ProducerConfig.from_mapping({"bootstrap.servers": "localhost:9092", name: value})
    except ConfigError as error:
        if "unknown option" in str(error):
            near = difflib.get_close_matches(name, _OWN, 1, 0.7)
            if near:
                raise ConfigError(
                    f"unknown option {given!r}: did you mean {_OWN[near[0]]!r}?"
                ) from None
            raise ConfigError(f"{error} (of the producer)") from None
    producer[name] = value
