"""What the sink is told: by Spark's names and by Kafka's, and refused before a job begins."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest

from asyncproducer import ConfigError
from asyncproducer.spark.columns import TASKS, TOPICS, SinkColumns
from asyncproducer.spark.connector import connector_version
from asyncproducer.spark.options import Keying, SinkOptions

PLAIN = {"kafka.bootstrap.servers": "h:9092", "topic": "out"}
ONCE = {**PLAIN, "delivery": "exactly_once", "sink.id": "s"}
GROUP = {**ONCE, "tasks": "8"}
SOURCE = {**ONCE, "marker": "source"}


def options(given: dict[str, str], *, streaming: bool = True) -> SinkOptions:
    return SinkOptions.of(given, streaming=streaming)


@pytest.mark.parametrize("prefix", ["kafka.", ""])
def test_kafkas_names_with_the_prefix_and_without(prefix: str) -> None:
    given = {f"{prefix}bootstrap.servers": "h:9092", f"{prefix}linger.ms": "7", "topic": "out"}
    config = options(given).config()
    assert (config.bootstrap_servers, config.linger_ms) == (("h:9092",), 7)


def test_what_is_said_to_spark_is_not_ours() -> None:
    found = options({**PLAIN, "checkpointLocation": "/ck", "includeHeaders": "true"})
    assert found.keying is Keying.NONE
    assert set(found.producer) == {"bootstrap.servers", "linger.ms", "batch.size"}


def test_names_are_the_same_in_any_case() -> None:
    found = options({**PLAIN, "Delivery": "Exactly_Once", "SINK.ID": "s", "Tasks": "3"})
    assert (found.keying, found.sink_id, found.tasks) == (Keying.GROUP, "s", 3)


@pytest.mark.parametrize("given", [PLAIN, GROUP, SOURCE])
def test_options_travel_to_the_tasks(given: dict[str, str]) -> None:
    found = options(given)
    assert pickle.loads(pickle.dumps(found)) == found


def test_secrets_are_not_shown() -> None:
    given = {
        **PLAIN,
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "u",
        "kafka.sasl.password": "hidden",
    }
    assert "hidden" not in repr(options(given))


def test_the_topic_has_the_markers_unless_another_one_is_named() -> None:
    assert options(GROUP).marker_topic == "out"
    assert options({**GROUP, "marker.topic": "m"}).marker_topic == "m"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({**PLAIN, "topc": "x"}, "unknown option 'topc': did you mean 'topic'?"),
        ({**PLAIN, "sink_id": "x"}, "unknown option 'sink_id': did you mean 'sink.id'?"),
        ({**PLAIN, "kafka.lingr.ms": "1"}, "linger.ms"),
        ({**PLAIN, "kafka.linger.ms": "soon"}, "linger.ms"),
        (
            {**PLAIN, "kafka.linger.ms": "1", "linger.ms": "2"},
            "'kafka.linger.ms' and 'linger.ms' set the same option: keep one",
        ),
        ({**PLAIN, "LINGER_MS": "1", "linger.ms": "2"}, "'LINGER_MS' and 'linger.ms' set the same"),
        ({**PLAIN, "kafka.topic": "x"}, "unknown option 'kafka.topic': did you mean 'topic'?"),
        ({**PLAIN, "transactional_id": "x"}, "give sink.id"),
        ({**PLAIN, "kafka.transactional.id": "x"}, "give sink.id"),
        ({**PLAIN, "kafka.value.serializer": "x"}, "cast them"),
        ({**PLAIN, "kafka.enable.idempotence": "false"}, "always on"),
        ({**PLAIN, "path": "/x"}, "a topic is not a path"),
        ({"topic": "out"}, "bootstrap.servers"),
        ({**PLAIN, "delivery": "twice"}, "must be at_least_once or exactly_once"),
        ({**PLAIN, "sink.id": "s"}, "add delivery=exactly_once"),
        ({**PLAIN, "marker": "group"}, "add delivery=exactly_once"),
        ({**PLAIN, "marker.topic": "m"}, "add delivery=exactly_once"),
        ({**PLAIN, "tasks": "8"}, "add delivery=exactly_once"),
        ({**PLAIN, "job.id": "1"}, "add delivery=exactly_once"),
        ({**PLAIN, "adopt": "1"}, "add delivery=exactly_once"),
        ({**PLAIN, "source.bootstrap.servers": "h:1"}, "add delivery=exactly_once"),
        ({**GROUP, "source.bootstrap.servers": "h:1"}, "is for marker=source"),
        ({**GROUP, "marker": "row"}, "must be group or source"),
        ({**GROUP, "sink.id": "a b"}, "exactly-once delivery needs a name"),
        ({**GROUP, "sink.id": ""}, "exactly-once delivery needs a name"),
        ({**GROUP, "topic": ""}, "marker.topic is missing"),
        (ONCE, "tasks is missing"),
        ({**GROUP, "tasks": "0"}, "must be a whole number, 1 or more"),
        ({**GROUP, "adopt": "yes"}, "must be a whole number, 0 or more"),
        ({**GROUP, "adopt": str(2**63)}, "must be at most 9223372036854775807"),
        ({**GROUP, "tasks": "9" * 5000}, "must be a whole number, 1 or more"),
        ({**PLAIN, "topic": "a b"}, "topic: topic 'a b': a topic's name has"),
        ({**GROUP, "marker.topic": ".."}, "marker.topic: topic '..': a topic's name has"),
        ({**SOURCE, "source.bootstrap.servers": "foo"}, "source.bootstrap.servers: "),
        ({**SOURCE, "tasks": "8"}, "tasks is for marker=group"),
        ({**GROUP, "kafka.acks": "1"}, "acks=1: exactly-once delivery needs acks=all"),
        ({**GROUP, "asyncProgressTrackingEnabled": "true"}, "switch it off"),
        ({**GROUP, "job.id": "1"}, "job.id is for batch jobs"),
    ],
)
def test_what_is_refused_says_what_to_change(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        options(given)


def test_what_the_sink_does_not_allow_is_not_advised() -> None:
    with pytest.raises(ConfigError, match=r"lower it$"):
        options({**PLAIN, "kafka.max.in.flight.requests.per.connection": "6"})


def test_names_as_errors_have_them_are_names_too() -> None:
    given = {**PLAIN, "max_request_size": "500000", "kafka.buffer_memory": "4000000"}
    assert options(given).config().max_request_size == 500_000
    assert options(given).config().buffer_memory == 4_000_000


def test_a_batch_job_adopts_itself() -> None:
    with pytest.raises(ConfigError, match=r"adopt=8 is above job\.id=7.* give adopt=7"):
        options({**GROUP, "job.id": "7", "adopt": "8"}, streaming=False)


def test_a_batch_job_has_a_number() -> None:
    with pytest.raises(ConfigError, match=r"job\.id is missing"):
        options(GROUP, streaming=False)
    assert options({**GROUP, "job.id": "7"}, streaming=False).job_id == 7


def test_adopt_has_no_effect_for_a_batch_job_of_sources() -> None:
    for given in (SOURCE, {**GROUP, "job.id": "7"}):
        assert options({**given, "adopt": "7"}, streaming=given is SOURCE).adopt == 7
    with pytest.raises(ConfigError, match="never expects a marker"):
        options({**SOURCE, "job.id": "7", "adopt": "7"}, streaming=False)


# -- columns -----------------------------------------------------------------------------------


def schema(**columns: str) -> Any:
    """Looks like a StructType."""
    fields = [
        SimpleNamespace(
            name=name,
            dataType=SimpleNamespace(simpleString=lambda kind=kind: kind),
            metadata={},
        )
        for name, kind in columns.items()
    ]
    return SimpleNamespace(fields=fields, names=list(columns))


READ = {"__topic": "string", "__partition": "int", "__offset": "bigint"}


def test_the_columns_of_sparks_own_sink() -> None:
    found = SinkColumns.of(
        schema(
            key="string",
            value="binary",
            topic="string",
            partition="int",
            timestamp="timestamp",
            headers="array<struct<key:string,value:binary>>",
        ),
        options({"kafka.bootstrap.servers": "h:9092"}),
    )
    assert found.of_table() == {
        "value": "value",
        "key": "key",
        "headers": "headers",
        "partition": "partition",
        "timestamp": "timestamp",
        "topic_column": "topic",
    }


def test_a_column_is_found_in_any_case_and_called_as_it_is() -> None:
    assert SinkColumns.of(schema(Value="string"), options(PLAIN)).value == "Value"


def test_the_option_topic_is_stronger_than_the_column() -> None:
    columns = schema(value="string", topic="string")
    assert SinkColumns.of(columns, options(PLAIN)).topic is None


@pytest.mark.parametrize(
    ("columns", "given", "says"),
    [
        ({"vaule": "string"}, PLAIN, "no column 'vaule'; did you mean 'value'?"),
        ({"key": "string"}, PLAIN, "there is no column 'value', only 'key'"),
        ({"value": "int"}, PLAIN, "value.cast('string')"),
        ({"value": "struct<a:int>"}, PLAIN, "to_json(value).alias('value')"),
        ({"value": "string", "Value": "string"}, PLAIN, "two columns"),
        ({"value": "string", "partition": "string"}, PLAIN, "it must be int or bigint"),
        ({"value": "string", "headers": "map<string,binary>"}, PLAIN, "an array of structs"),
        ({"value": "string"}, {"kafka.bootstrap.servers": "h:9092"}, "where do the rows go?"),
        ({"value": "string"}, SOURCE, "the columns __topic, __partition, __offset"),
        ({"value": "string", **READ, "__offset": "int"}, SOURCE, "it must be bigint"),
        ({"value": "string", "__origin": "bigint"}, SOURCE, "does not say of which topics"),
        ({"value": "string", "__origin": "bigint", **READ}, SOURCE, "drop one or the other"),
        ({"value": "string", "__origin": "string"}, SOURCE, "it must be bigint"),
        ({"value": "string"}, GROUP, "by_kafka_partition"),
    ],
)
def test_columns_that_do_not_fit_say_what_to_change(
    columns: dict[str, str], given: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        SinkColumns.of(schema(**columns), options(given))


def test_the_sink_has_the_tasks_of_the_frame() -> None:
    """Else some groups are written by the time that the job fails."""
    placed = schema(value="string", partition="int")
    assert SinkColumns.of(placed, options(PLAIN)).partition == "partition"
    with pytest.raises(ConfigError, match=r"by_kafka_partition\(df, tasks=8, \.\.\.\) returns"):
        SinkColumns.of(placed, options(GROUP))
    placed.fields[1].metadata[TASKS] = 2
    with pytest.raises(ConfigError, match="tasks=8, and by_kafka_partition was given tasks=2"):
        SinkColumns.of(placed, options(GROUP))
    placed.fields[1].metadata[TASKS] = 8
    assert SinkColumns.of(placed, options(GROUP)).partition == "partition"


def test_where_rows_were_read_may_stay_in_any_frame() -> None:
    assert SinkColumns.of(schema(value="string", **READ), options(PLAIN)).offset == "__offset"
    assert SinkColumns.of(schema(value="string", **READ), options(SOURCE)).offset == "__offset"
    packed = schema(value="string", __origin="bigint")
    packed.fields[1].metadata[TOPICS] = ["a", "b"]
    for given in (PLAIN, SOURCE):
        found = SinkColumns.of(packed, options(given))
        assert (found.origin, found.topics) == ("__origin", ("a", "b"))


# -- the connector, which is Spark's own


def test_the_connector_is_one_that_runs_with_the_pyspark_that_is_here() -> None:
    assert connector_version("4.1.4") == "4.1.3"
    assert connector_version("4.2.1") == connector_version("4.3.0") == "4.2.0"
