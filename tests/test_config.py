from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
import pickle
import re
import ssl
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer import Producer, option_names
from asyncproducer import config as config_module
from asyncproducer.config import (
    NAMES,
    OPTIONS,
    SASL_MECHANISMS,
    Option,
    Options,
    ProducerConfig,
    generate_client_id,
)
from asyncproducer.errors import ConfigError, KafkaError
from asyncproducer.option_kinds import Choice, Flag, Number
from asyncproducer.option_names import JAVA_DEFAULTS, LIBRDKAFKA, REFUSED, REFUSED_FAMILIES
from asyncproducer.plugins import TopicView

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
SECRET = "hunter2"

#: Java's numbers, written down from the specification and not from our table:
#: name, default, smallest, largest.
JAVA_NUMBERS = [
    ("bootstrap.resolve.timeout.ms", 0, 0, INT64_MAX),
    ("buffer.memory", 33554432, 0, INT64_MAX),
    ("retries", 2147483647, 0, INT32_MAX),
    ("compression.gzip.level", -1, -1, 9),
    ("compression.lz4.level", 9, 1, 17),
    ("compression.zstd.level", 3, -131072, 22),
    ("batch.size", 16384, 0, INT32_MAX),
    ("linger.ms", 5, 0, INT64_MAX),
    ("delivery.timeout.ms", 120000, 0, INT32_MAX),
    ("request.timeout.ms", 30000, 0, INT32_MAX),
    ("max.block.ms", 60000, 0, INT64_MAX),
    ("max.request.size", 1048576, 0, INT32_MAX),
    ("max.in.flight.requests.per.connection", 5, 1, INT32_MAX),
    ("transaction.timeout.ms", 60000, -INT32_MAX - 1, INT32_MAX),
    ("partitioner.availability.timeout.ms", 0, 0, INT64_MAX),
    ("metadata.max.age.ms", 300000, 0, INT64_MAX),
    ("metadata.max.idle.ms", 300000, 5000, INT64_MAX),
    ("metadata.recovery.rebootstrap.trigger.ms", 300000, 0, INT64_MAX),
    ("retry.backoff.ms", 100, 0, INT64_MAX),
    ("retry.backoff.max.ms", 1000, 0, INT64_MAX),
    ("reconnect.backoff.ms", 50, 0, INT64_MAX),
    ("reconnect.backoff.max.ms", 1000, 0, INT64_MAX),
    # Java checks no range for these two; a negative time makes no sense in them.
    ("socket.connection.setup.timeout.ms", 10000, 0, INT64_MAX),
    ("socket.connection.setup.timeout.max.ms", 30000, 0, INT64_MAX),
    ("connections.max.idle.ms", 540000, -INT64_MAX - 1, INT64_MAX),
    # Java's default is 131072.
    ("send.buffer.bytes", -1, -1, INT32_MAX),
    ("receive.buffer.bytes", 32768, -1, INT32_MAX),
    ("metrics.num.samples", 2, 1, INT32_MAX),
    ("metrics.sample.window.ms", 30000, 0, INT64_MAX),
]

#: The same for everything else, as the fields of a config with nothing set show it.
JAVA_OTHERS = {
    "client.dns.lookup": "use_all_dns_ips",
    "buffer.memory.allocation.strategy": "full",
    "acks": -1,
    "compression.type": "none",
    "enable.idempotence": True,
    "transactional.id": None,
    "transaction.two.phase.commit.enable": False,
    "client.rack": "",
    "partitioner.adaptive.partitioning.enable": True,
    "partitioner.ignore.keys": False,
    "partitioner.rack.aware": False,
    "metadata.recovery.strategy": "rebootstrap",
    "metrics.recording.level": "INFO",
    "security.protocol": "PLAINTEXT",
    "ssl.endpoint.identification.algorithm": "https",
    "ssl.enabled.protocols": ("TLSv1.2", "TLSv1.3"),
    "ssl.cipher.suites": (),
    "ssl.keystore.key": None,
    "ssl.keystore.certificate.chain": None,
    "ssl.keystore.location": None,
    "ssl.truststore.certificates": None,
    "ssl.truststore.location": None,
    "ssl.key.password": None,
}

#: Java's default is another one, on purpose.
OURS_DIFFER = {
    "bootstrap.servers",
    "client.id",
    "partitioner.class",
    "metadata.cluster.check.enable",
    "enable.metrics.push",
    "sasl.mechanism",
    "ssl.keystore.type",
    "ssl.truststore.type",
}

#: Java's options that we do not have.
JAVA_REFUSED = [
    "key.serializer",
    "value.serializer",
    "interceptor.classes",
    "metric.reporters",
    "config.providers",
    "security.providers",
    "sasl.jaas.config",
    "sasl.login.refresh.window.factor",
    "sasl.login.refresh.window.jitter",
    "sasl.login.refresh.min.period.seconds",
    "sasl.login.refresh.buffer.seconds",
    "sasl.login.retry.backoff.ms",
    "sasl.login.retry.backoff.max.ms",
    "sasl.login.connect.timeout.ms",
    "sasl.login.read.timeout.ms",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.assertion.file",
    "sasl.oauthbearer.scope.claim.name",
    "sasl.oauthbearer.sub.claim.name",
    "sasl.oauthbearer.clock.skew.seconds",
    "sasl.oauthbearer.header.urlencode",
    "sasl.kerberos.service.name",
    "sasl.kerberos.kinit.cmd",
    "sasl.kerberos.ticket.renew.window.factor",
    "sasl.kerberos.ticket.renew.jitter",
    "sasl.kerberos.min.time.before.relogin",
    "ssl.protocol",
]

#: What Java 4.3 writes out when it is asked for the defaults of ProducerConfig, as in a properties
#: file. What is null there is in JAVA_NULLS. (Metadata's cluster check: Java 4.4.)
JAVA_DUMP = """
    acks=all
    batch.size=16384
    bootstrap.resolve.timeout.ms=0
    buffer.memory=33554432
    buffer.memory.allocation.strategy=full
    client.dns.lookup=use_all_dns_ips
    client.rack=
    compression.gzip.level=-1
    compression.lz4.level=9
    compression.type=none
    compression.zstd.level=3
    config.providers=
    connections.max.idle.ms=540000
    delivery.timeout.ms=120000
    enable.idempotence=true
    enable.metrics.push=true
    interceptor.classes=
    linger.ms=5
    max.block.ms=60000
    max.in.flight.requests.per.connection=5
    max.request.size=1048576
    metadata.cluster.check.enable=true
    metadata.max.age.ms=300000
    metadata.max.idle.ms=300000
    metadata.recovery.rebootstrap.trigger.ms=300000
    metadata.recovery.strategy=rebootstrap
    metric.reporters=org.apache.kafka.common.metrics.JmxReporter
    metrics.num.samples=2
    metrics.recording.level=INFO
    metrics.sample.window.ms=30000
    partitioner.adaptive.partitioning.enable=true
    partitioner.availability.timeout.ms=0
    partitioner.ignore.keys=false
    partitioner.rack.aware=false
    receive.buffer.bytes=32768
    reconnect.backoff.max.ms=1000
    reconnect.backoff.ms=50
    request.timeout.ms=30000
    retries=2147483647
    retry.backoff.max.ms=1000
    retry.backoff.ms=100
    sasl.kerberos.kinit.cmd=/usr/bin/kinit
    sasl.kerberos.min.time.before.relogin=60000
    sasl.kerberos.ticket.renew.jitter=0.05
    sasl.kerberos.ticket.renew.window.factor=0.80
    sasl.login.refresh.buffer.seconds=300
    sasl.login.refresh.min.period.seconds=60
    sasl.login.refresh.window.factor=0.80
    sasl.login.refresh.window.jitter=0.05
    sasl.login.retry.backoff.max.ms=10000
    sasl.login.retry.backoff.ms=100
    sasl.mechanism=GSSAPI
    sasl.oauthbearer.assertion.algorithm=RS256
    sasl.oauthbearer.assertion.claim.exp.seconds=300
    sasl.oauthbearer.assertion.claim.jti.include=false
    sasl.oauthbearer.assertion.claim.nbf.seconds=60
    sasl.oauthbearer.clock.skew.seconds=30
    sasl.oauthbearer.expected.audience=
    sasl.oauthbearer.header.urlencode=false
    sasl.oauthbearer.jwks.endpoint.refresh.ms=3600000
    sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms=10000
    sasl.oauthbearer.jwks.endpoint.retry.backoff.ms=100
    sasl.oauthbearer.jwt.retriever.class=org.apache.kafka.common.security.oauthbearer.DefaultJwtRetriever
    sasl.oauthbearer.jwt.validator.class=org.apache.kafka.common.security.oauthbearer.DefaultJwtValidator
    sasl.oauthbearer.scope.claim.name=scope
    sasl.oauthbearer.sub.claim.name=sub
    security.protocol=PLAINTEXT
    send.buffer.bytes=131072
    socket.connection.setup.timeout.max.ms=30000
    socket.connection.setup.timeout.ms=10000
    ssl.cipher.suites=
    ssl.enabled.protocols=TLSv1.2,TLSv1.3
    ssl.endpoint.identification.algorithm=https
    ssl.keymanager.algorithm=SunX509
    ssl.keystore.type=JKS
    ssl.protocol=TLSv1.3
    ssl.trustmanager.algorithm=PKIX
    ssl.truststore.type=JKS
    transaction.timeout.ms=60000
    transaction.two.phase.commit.enable=false
"""

JAVA_NULLS = """
    key.serializer partitioner.class sasl.client.callback.handler.class sasl.jaas.config
    sasl.kerberos.service.name sasl.login.callback.handler.class sasl.login.class
    sasl.login.connect.timeout.ms sasl.login.read.timeout.ms sasl.oauthbearer.assertion.claim.aud
    sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.sub
    sasl.oauthbearer.assertion.file sasl.oauthbearer.assertion.private.key.file
    sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.template.file
    sasl.oauthbearer.client.credentials.client.id sasl.oauthbearer.client.credentials.client.secret
    sasl.oauthbearer.expected.issuer sasl.oauthbearer.jwks.endpoint.url sasl.oauthbearer.scope
    sasl.oauthbearer.token.endpoint.url security.providers ssl.engine.factory.class
    ssl.key.password ssl.keystore.certificate.chain ssl.keystore.key ssl.keystore.location
    ssl.keystore.password ssl.provider ssl.secure.random.implementation
    ssl.truststore.certificates ssl.truststore.location ssl.truststore.password transactional.id
    value.serializer
"""

SASL: dict[str, Any] = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "PLAIN",
    "sasl_username": "user",
    "sasl_password": SECRET,
}


def make(**options: Any) -> ProducerConfig:
    return ProducerConfig.from_options("a:9092", **options)


def refusal(**options: Any) -> str:
    """The message of the ConfigError that these options raise."""
    with pytest.raises(ConfigError) as info:
        make(**options)
    return str(info.value)


def mapped(mapping: Mapping[str, Any], **over: Any) -> ProducerConfig:
    return ProducerConfig.from_mapping({"bootstrap.servers": "a:9092", **mapping}, **over)


def mapping_refusal(mapping: Mapping[Any, Any], **over: Any) -> str:
    with pytest.raises(ConfigError) as info:
        mapped(mapping, **over)
    return str(info.value)


def java_dump() -> dict[str, str]:
    """Java's defaults as text. An empty `client.id` is not among them: here it is kept."""
    return dict(line.strip().split("=", 1) for line in JAVA_DUMP.strip().splitlines())


def from_env(environ: Mapping[str, str], **over: Any) -> ProducerConfig:
    environ = {"KAFKA_BOOTSTRAP_SERVERS": "a:9092", **environ}
    return ProducerConfig.from_env(environ=environ, **over)


def env_refusal(environ: Mapping[str, str]) -> str:
    with pytest.raises(ConfigError) as info:
        from_env(environ)
    return str(info.value)


async def token() -> str:
    return "token"


# ------------------------------------------------------------ the table


def test_every_java_option_is_an_option_or_refused() -> None:
    named = {name for name, *_ in JAVA_NUMBERS} | set(JAVA_OTHERS) | OURS_DIFFER
    assert named == {option.java for option in OPTIONS.values() if option.java is not None}
    assert not named & set(JAVA_REFUSED)


@pytest.mark.parametrize(("name", "default", "low", "high"), JAVA_NUMBERS)
def test_numbers_have_javas_default_and_range(name: str, default: int, low: int, high: int) -> None:
    option = OPTIONS[NAMES.by_dotted[name]]
    assert isinstance(option.kind, Number)
    assert getattr(make(), option.name) == default
    assert (option.kind.low, option.kind.high) == (low, high)


@pytest.mark.parametrize(("name", "default"), JAVA_OTHERS.items())
def test_other_options_have_javas_default(name: str, default: object) -> None:
    assert getattr(make(), NAMES.by_dotted[name]) == default


def test_defaults_that_differ_from_java() -> None:
    config = make()
    assert config.client_id is None
    assert config.partitioner == "default"
    assert config.metadata_cluster_check_enable is False
    assert config.enable_metrics_push is False
    assert config.sasl_mechanism is None
    assert (config.ssl_keystore_type, config.ssl_truststore_type) == ("PEM", "PEM")


def test_default_recovery_strategy_is_rebootstrap() -> None:
    """CF-08"""
    assert make().metadata_recovery_strategy == "rebootstrap"
    assert "one of none, rebootstrap" in refusal(metadata_recovery_strategy="reboot")


NUMBERS = [(o.name, o.kind) for o in OPTIONS.values() if isinstance(o.kind, Number)]


@pytest.mark.parametrize(("name", "kind"), NUMBERS)
def test_numbers_are_accepted_at_their_bounds(name: str, kind: Number) -> None:
    option = OPTIONS[name]
    assert option.parse(kind.low) == kind.low
    assert option.parse(kind.high) == kind.high


@pytest.mark.parametrize(("name", "kind"), NUMBERS)
def test_numbers_are_refused_outside_their_bounds(name: str, kind: Number) -> None:
    for value in (kind.low - 1, kind.high + 1, *kind.holes, 10**5000):
        message = refusal(**{name: value})
        assert message.startswith(f"{name} must be ")
        assert kind.range in message


@pytest.mark.parametrize(("name", "kind"), NUMBERS)
@pytest.mark.parametrize("value", [True, "5", b"5", [5], object(), math.nan, math.inf])
def test_numbers_are_no_other_types(name: str, kind: Number, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be {kind.expected}, not ")
    assert type(value).__name__ in message


def test_number_in_a_str_names_the_ways_that_read_it() -> None:
    assert "from_mapping and from_env" in refusal(retries="5")


@pytest.mark.parametrize("name", [n for n, k in NUMBERS if not k.fraction])
def test_whole_numbers_are_not_floats(name: str) -> None:
    assert "(float)" in refusal(**{name: 7.0})


@pytest.mark.parametrize("name", [n for n, k in NUMBERS if not k.optional])
def test_none_is_no_number(name: str) -> None:
    assert "None" in refusal(**{name: None})


@pytest.mark.parametrize("value", [0, 0.5, 5, 1000.25])
def test_linger_may_be_a_fraction(value: float) -> None:
    assert make(linger_ms=value).linger_ms == value


def test_linger_is_capped() -> None:
    assert make(linger_ms=2**40, request_timeout_ms=0).linger_ms == INT32_MAX


def test_batch_size_0_is_1() -> None:
    assert make(batch_size=0).batch_size == 1


@pytest.mark.parametrize("name", ["send_buffer_bytes", "receive_buffer_bytes"])
def test_socket_buffer_of_minus_1_but_not_minus_2(name: str) -> None:
    """CF-10"""
    assert getattr(make(**{name: -1}), name) == -1
    assert "-1..2^31-1" in refusal(**{name: -2})


FLAGS = [o for o in OPTIONS.values() if isinstance(o.kind, Flag)]


@pytest.mark.parametrize("option", FLAGS, ids=lambda o: o.name)
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flags_are_bools_only(option: Option, value: object) -> None:
    assert refusal(**{option.name: value}).startswith(f"{option.name} must be True or False, not ")


@pytest.mark.parametrize("option", FLAGS, ids=lambda o: o.name)
def test_flags_keep_what_is_set(option: Option) -> None:
    assert option.parse(True) is True
    assert option.parse(False) is False


CHOICES = [o for o in OPTIONS.values() if isinstance(o.kind, Choice)]


@pytest.mark.parametrize("option", CHOICES, ids=lambda o: o.name)
def test_choices_take_their_words_and_list_them_for_any_other(option: Option) -> None:
    assert isinstance(option.kind, Choice)
    for word, meaning in option.kind.words.items():
        assert option.parse(word) == meaning
    for value in ("nonsense", 17, True, b"none"):
        message = refusal(**{option.name: value})
        assert message.startswith(f"{option.name} must be one of ")
        assert all(word in message for word in option.kind.words)


@pytest.mark.parametrize(
    ("name", "written", "meant"),
    [
        ("security_protocol", "plaintext", "PLAINTEXT"),
        ("metadata_recovery_strategy", "NONE", "none"),
        ("buffer_memory_allocation_strategy", "FULL", "full"),
        ("ssl_truststore_type", "pem", "PEM"),
        ("ssl_endpoint_identification_algorithm", "HTTPS", "https"),
        ("acks", " ALL ", -1),
    ],
)
def test_words_that_java_reads_in_any_case(name: str, written: str, meant: object) -> None:
    """CF-02"""
    assert getattr(make(**{name: written}), name) == meant


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("compression_type", "LZ4"),
        ("client_dns_lookup", "USE_ALL_DNS_IPS"),
        ("metrics_recording_level", "info"),
        ("sasl_mechanism", "plain"),
    ],
)
def test_words_that_java_reads_in_one_case(name: str, written: str) -> None:
    """CF-02"""
    assert repr(written) in refusal(**{name: written})


@pytest.mark.parametrize("name", ["compression_type", "security_protocol"])
def test_unknown_words_are_refused(name: str) -> None:
    """CF-02"""
    assert "'zip'" in refusal(**{name: "zip"})


@pytest.mark.parametrize("written", ["use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"])
def test_both_ways_to_look_up_names(written: str) -> None:
    assert make(client_dns_lookup=written).client_dns_lookup == written


def test_no_compression_may_be_written_as_none() -> None:
    assert make(compression_type=None).compression_type == "none"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("all", -1), ("-1", -1), ("0", 0), ("1", 1), (-1, -1), (0, 0), (1, 1), (" all ", -1)],
)
def test_acks_as_text_or_number(written: object, meant: int) -> None:
    """CF-03"""
    assert make(acks=written).acks == meant


@pytest.mark.parametrize("written", ["2", "any", 2, -2, "", None, True, 1.0])
def test_acks_of_anything_else(written: object) -> None:
    """CF-03"""
    assert refusal(acks=written).startswith("acks must be one of all, -1, 0, 1, not ")


TEXTS = ["client_id", "client_rack", "transactional_id", "sasl_username", "ssl_cafile"]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [5, b"x", ["x"]])
def test_texts_are_str_only(name: str, value: object) -> None:
    assert type(value).__name__ in refusal(**{name: value})


@pytest.mark.parametrize("name", ["transactional_id", "sasl_username", "ssl_cafile"])
def test_texts_that_may_not_be_empty(name: str) -> None:
    assert "not empty" in refusal(**{name: ""})


def test_paths_may_be_path_objects() -> None:
    config = make(security_protocol="SSL", ssl_cafile=Path("/etc/ca.pem"))
    assert config.ssl_cafile == "/etc/ca.pem"


def test_words_as_sequence_or_with_commas() -> None:
    for written in (["A", "B"], ("A", "B"), "A, B"):
        config = make(security_protocol="SSL", ssl_cipher_suites=written)
        assert config.ssl_cipher_suites == ("A", "B")
    assert make(ssl_cipher_suites="").ssl_cipher_suites == ()


@pytest.mark.parametrize(
    "written", ["TLSv1.1", "", [], "TLSv1.2,TLSv1.2", "TLSv1.2,", 5, [5], {"TLSv1.2"}]
)
def test_tls_versions_that_are_refused(written: object) -> None:
    message = refusal(security_protocol="SSL", ssl_enabled_protocols=written)
    assert message.startswith("ssl_enabled_protocols must be ")


def test_long_values_are_cut_in_messages() -> None:
    assert len(refusal(acks="x" * 10_000)) < 200


# ------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("lingr_ms", "linger_ms"),
        ("bootstrap_server", "bootstrap_servers"),
        ("compresion_type", "compression_type"),
        ("sasl_plain_pasword", "sasl_plain_password"),
    ],
)
def test_unknown_option_names_the_nearest(given_name: str, meant: str) -> None:
    assert refusal(**{given_name: 1}) == f"unknown option {given_name!r}: did you mean {meant!r}?"


def test_unknown_option_without_a_near_one() -> None:
    assert refusal(xyzzy=1) == "unknown option 'xyzzy'"


def test_unknown_option_in_the_constructor_is_no_type_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'linger_ms'"):
        ProducerConfig("a:1", lingr_ms=1)  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize(
    ("given_name", "here"),
    [
        ("max_in_flight", "max_in_flight_requests_per_connection"),
        ("queue_buffering_max_ms", "linger_ms"),
        ("message_timeout_ms", "delivery_timeout_ms"),
    ],
)
def test_names_of_librdkafka_in_snake_case_say_how_they_are_written(
    given_name: str, here: str
) -> None:
    assert refusal(**{given_name: 1}) == f"{given_name!r} is written {here!r} here"
    dotted = OPTIONS[here].java
    assert mapping_refusal({given_name: 1}) == f"{given_name!r} is written {dotted!r} in a mapping"


def test_arguments_of_the_producer_are_known_where_one_is_misspelt() -> None:
    parameters = inspect.signature(Producer).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(option_names._PRODUCER_ARGUMENTS) == names
    assert "did you mean 'key_serializer'?" in refusal(key_serialiser=str)


@pytest.mark.parametrize(
    ("given_name", "here"),
    [("linger.ms", "linger_ms"), ("metadata.broker.list", "bootstrap_servers")],
)
def test_dotted_name_among_options_says_where_it_belongs(given_name: str, here: str) -> None:
    message = refusal(**{given_name: 1})
    assert here in message
    assert "from_mapping" in message


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("max_batch_size", "batch_size", 7),
        ("partitioner_class", "partitioner", "round_robin"),
        ("sasl_plain_username", "sasl_username", "user2"),
        ("sasl_plain_password", "sasl_password", "other"),
        ("ssl_key_password", "ssl_password", "other"),
    ],
)
def test_aliases(alias: str, name: str, value: object) -> None:
    options = {k: v for k, v in SASL.items() if k != name}
    assert getattr(make(**options, **{alias: value}), name) == value
    message = refusal(**{alias: value, name: value})
    assert alias in message
    assert name in message


def test_aliases_in_the_constructor() -> None:
    options: dict[str, Any] = {"bootstrap_servers": ("a:1",), "max_batch_size": 9}
    assert ProducerConfig(**options).batch_size == 9


# ------------------------------------------------------------ bootstrap_servers


@pytest.mark.parametrize(
    ("written", "servers", "addresses"),
    [
        ("a:1", ("a:1",), (("a", 1),)),
        (" a:1 , b-c.d_e:65535 ", ("a:1", "b-c.d_e:65535"), (("a", 1), ("b-c.d_e", 65535))),
        (["a:1", "b:2"], ("a:1", "b:2"), (("a", 1), ("b", 2))),
        (("127.0.0.1:9092",), ("127.0.0.1:9092",), (("127.0.0.1", 9092),)),
        ("[::1]:9092", ("[::1]:9092",), (("::1", 9092),)),
        ("[fe80::1%eth0]:1", ("[fe80::1%eth0]:1",), (("fe80::1%eth0", 1),)),
        ("plaintext://a:1", ("a:1",), (("a", 1),)),
        ("PLAINTEXT://[2001:db8::5]:1,://b:2", ("[2001:db8::5]:1", "b:2"), None),
        # The name of a listener, as in advertised.listeners.
        ("EXTERNAL://a:1", ("a:1",), (("a", 1),)),
    ],
)
def test_addresses_that_are_read(
    written: Any, servers: tuple[str, ...], addresses: tuple[tuple[str, int], ...] | None
) -> None:
    config = ProducerConfig.from_options(written)
    assert config.bootstrap_servers == servers
    if addresses is not None:
        assert config.addresses == addresses


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("a", "host:port"),
        ("a:", "host:port"),
        (":9092", "host:port"),
        ("a:b", "host:port"),
        ("a:-1", "host:port"),
        ("a:1_0", "host:port"),
        ("a:٣", "host:port"),
        ("a:0", "1..65535"),
        ("a:65536", "1..65535"),
        ("a:123456", "host:port"),
        ("a:1/path", "host:port"),
        ("a b:1", "host:port"),
        ("bücher:1", "host:port"),
        ("::1:9092", "[ipv6-address]:port"),
        ("[::1]", "[ipv6-address]:port"),
        ("[:::]:9", "[ipv6-address]:port"),
        ("[a]:9", "host:port"),
        ("a:1,,b:2", "empty"),
        ("a:1,", "empty"),
        ("", "empty"),
        ("  ", "empty"),
        ([], "empty"),
        (["a:1", ""], "empty"),
        (["a:1,b:2"], "host:port"),
        ("a:1,a:1", "comes twice"),
        ("A:1,a:1", "comes twice"),
        ("a:1,PLAINTEXT://a:1", "comes twice"),
        ("[::1]:1,[::1]:1", "comes twice"),
        (5, "int"),
        ([5], "list"),
        ([None], "list"),
        ({"a:1"}, "set"),
        (b"a:1", "bytes"),
        ({"linger.ms": 1}, "from_mapping"),
    ],
)
def test_addresses_that_are_refused(written: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match="bootstrap_servers") as info:
        ProducerConfig.from_options(written)
    assert hint in str(info.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("localhost", "localhost:9092"),
        ("localhost:", "localhost:9092"),
        ("a:1,SSL://b", "b:9092"),
        ("[::1]", "[::1]:9092"),
    ],
)
def test_an_address_without_a_port_is_shown_with_the_usual_one(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f": did you mean {meant!r}?") + "$"):
        ProducerConfig(written)


@pytest.mark.parametrize("written", ["a:b", "::1", "::1:9092", "a:0", "a b", "[a]", "x" * 300])
def test_no_address_is_shown_that_would_be_refused_or_that_nobody_meant(written: str) -> None:
    with pytest.raises(ConfigError) as info:
        ProducerConfig(written)
    shown = re.search("did you mean '(.*)'", str(info.value))
    assert (shown is not None) is (written == "x" * 300)
    assert len(str(info.value)) < 300


@pytest.mark.parametrize(
    ("written", "options", "protocol"),
    [
        ("SSL://a:9093", {}, "PLAINTEXT"),
        (["a:1", "ssl://b:9093"], {"security_protocol": "plaintext"}, "PLAINTEXT"),
        ("PLAINTEXT://a:1", {"security_protocol": "SSL"}, "SSL"),
        ("SSL://a:1", SASL, "SASL_SSL"),
    ],
)
def test_a_protocol_before_an_address_must_be_the_one_that_is_spoken(
    written: Any, options: dict[str, Any], protocol: str
) -> None:
    """Java ignores it, and would speak plaintext to a port of TLS."""
    with pytest.raises(ConfigError) as info:
        ProducerConfig(written, **options)
    assert f"contradicts security_protocol={protocol}: set security_protocol to" in str(info.value)


def test_a_protocol_before_an_address_that_agrees_is_left_out() -> None:
    config = ProducerConfig("SASL_SSL://a:1,sasl_ssl://b:2", **SASL)
    assert config.bootstrap_servers == ("a:1", "b:2")


def test_bootstrap_servers_are_required() -> None:
    for build in (ProducerConfig, ProducerConfig.from_options):
        with pytest.raises(ConfigError, match="bootstrap_servers is required"):
            build()


def test_bootstrap_servers_twice() -> None:
    assert "twice" in refusal(bootstrap_servers="b:1")
    with pytest.raises(ConfigError, match="twice"):
        ProducerConfig("a:1", bootstrap_servers="b:1")


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        config = ProducerConfig.from_options(text)
    except ConfigError:
        return
    # What was accepted is in normal form: it is read the same once more.
    assert ProducerConfig.from_options(config.bootstrap_servers) == config


# ------------------------------------------------------------ rules: idempotence


SPOILERS = {"acks": {"acks": 1}, "acks 0": {"acks": "0"}, "retries": {"retries": 0}}


@pytest.mark.parametrize("options", SPOILERS.values(), ids=SPOILERS)
def test_contradicted_idempotence_is_an_error_when_it_was_set(options: dict[str, Any]) -> None:
    """CF-03, CF-04"""
    assert "enable_idempotence=True contradicts" in refusal(enable_idempotence=True, **options)


@pytest.mark.parametrize("options", SPOILERS.values(), ids=SPOILERS)
def test_contradicted_idempotence_is_switched_off_when_it_is_the_default(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """CF-03, CF-04"""
    with caplog.at_level(logging.INFO, "asyncproducer.config"):
        assert make(**options).enable_idempotence is False
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "idempotence is off" in caplog.text


@pytest.mark.parametrize("options", [*SPOILERS.values(), {"enable_idempotence": False}])
def test_transactions_need_idempotence(options: dict[str, Any]) -> None:
    """CF-03, CF-04"""
    assert "transactional_id needs idempotence" in refusal(transactional_id="t", **options)


def test_explicit_idempotence_outranks_the_transactional_rule() -> None:
    """CF-04"""
    message = refusal(transactional_id="t", enable_idempotence=True, retries=0)
    assert "contradicts retries=0" in message


@pytest.mark.parametrize("acks", ["all", -1, 0, 1])
def test_idempotence_switched_off_goes_with_all_acks(acks: object) -> None:
    """CF-03"""
    assert make(enable_idempotence=False, acks=acks).enable_idempotence is False


def test_idempotence_stays_on_with_acks_all() -> None:
    """CF-03"""
    assert make(acks="all", enable_idempotence=True).enable_idempotence is True
    assert make(acks=-1).enable_idempotence is True


@pytest.mark.parametrize("options", [{}, {"enable_idempotence": True}, {"acks": 1}, {"retries": 0}])
def test_more_than_5_in_flight_is_an_error_unless_idempotence_is_set_to_false(
    options: dict[str, Any],
) -> None:
    """CF-05. Also where acks or retries are about to switch idempotence off (Java 4)."""
    message = refusal(max_in_flight_requests_per_connection=6, **options)
    assert "max_in_flight_requests_per_connection=6" in message
    assert "enable_idempotence=False" in message


def test_5_in_flight_are_fine_and_6_without_idempotence() -> None:
    """CF-05"""
    make(max_in_flight_requests_per_connection=5, enable_idempotence=True)
    config = make(max_in_flight_requests_per_connection=6, enable_idempotence=False)
    assert config.max_in_flight_requests_per_connection == 6


def test_order_is_guaranteed_by_muting_with_one_in_flight_only() -> None:
    assert make(max_in_flight_requests_per_connection=1).guarantee_message_order
    assert not make(max_in_flight_requests_per_connection=2).guarantee_message_order


# ------------------------------------------------------------ rules: times


def test_short_delivery_timeout_is_an_error_when_it_was_set() -> None:
    """CF-06"""
    message = refusal(delivery_timeout_ms=29_999)
    assert "delivery_timeout_ms=29999" in message
    assert "at least 30005" in message
    assert "must be at least" in refusal(delivery_timeout_ms=120_000, request_timeout_ms=120_000)
    assert make(delivery_timeout_ms=30_005).delivery_timeout_ms == 30_005


@pytest.mark.parametrize(
    ("options", "effective"),
    [
        ({"request_timeout_ms": 200_000}, 200_005),
        ({"linger_ms": 100_000.5}, 130_001),
        ({"linger_ms": INT32_MAX}, INT32_MAX),
        ({"linger_ms": INT64_MAX}, INT32_MAX),
        ({"request_timeout_ms": INT32_MAX}, INT32_MAX),
    ],
)
def test_short_delivery_timeout_is_raised_when_it_is_the_default(
    options: dict[str, Any], effective: int, caplog: pytest.LogCaptureFixture
) -> None:
    """CF-06"""
    assert make(**options).delivery_timeout_ms == effective
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(effective) in caplog.text


def test_largest_delivery_timeout_goes_with_everything() -> None:
    """CF-06"""
    config = make(delivery_timeout_ms=INT32_MAX, request_timeout_ms=INT32_MAX, linger_ms=INT64_MAX)
    assert config.delivery_timeout_ms == INT32_MAX


@pytest.mark.parametrize(
    ("options", "size"),
    [({"buffer_memory": 10_000}, 16_384), ({"buffer_memory": 0, "batch_size": 0}, 1)],
)
def test_a_batch_must_fit_into_the_buffer(options: dict[str, Any], size: int) -> None:
    """Java notices it with each send."""
    memory = options["buffer_memory"]
    message = refusal(**options)
    assert f"batch_size={size} is more than buffer_memory={memory}" in message
    assert make(buffer_memory=size, batch_size=size).batch_size == size


def test_connections_are_not_closed_after_no_time_at_all() -> None:
    """Nor is it left open whether this 0 is Java's or librdkafka's, which means never."""
    message = refusal(connections_max_idle_ms=0)
    assert message.startswith("connections_max_idle_ms=0 would close")
    assert "-1 keeps it for ever" in message
    with pytest.raises(ConfigError, match=r"connections\.max\.idle\.ms=0 would close"):
        mapped({"connections.max.idle.ms": "0"})


def test_first_reconnect_backoff_alone_switches_growth_off() -> None:
    for first in (20, 5_000):
        config = make(reconnect_backoff_ms=first)
        assert config.reconnect_backoff_max_ms == first
        assert config.reconnect_backoff_ms == first
    assert make(reconnect_backoff_ms=20, reconnect_backoff_max_ms=80).reconnect_backoff_max_ms == 80
    assert make(reconnect_backoff_max_ms=80).reconnect_backoff_ms == 50


@pytest.mark.parametrize(
    ("first", "largest", "options", "effective"),
    [
        ("retry_backoff_ms", "retry_backoff_max_ms", (5_000, None), 1_000),
        ("retry_backoff_ms", "retry_backoff_max_ms", (None, 30), 30),
        ("retry_backoff_ms", "retry_backoff_max_ms", (500, 400), 400),
        ("reconnect_backoff_ms", "reconnect_backoff_max_ms", (500, 400), 400),
        (
            "socket_connection_setup_timeout_ms",
            "socket_connection_setup_timeout_max_ms",
            (40_000, None),
            30_000,
        ),
    ],
)
def test_first_pause_above_the_longest_is_constant(
    first: str,
    largest: str,
    options: tuple[int | None, int | None],
    effective: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given_options = {
        name: value
        for name, value in zip((first, largest), options, strict=True)
        if value is not None
    }
    config = make(**given_options)
    assert getattr(config, first) == getattr(config, largest) == effective
    assert len(caplog.records) == 1
    assert f"it is always {effective} ms" in caplog.text


def test_nothing_is_logged_for_a_plain_config(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        make(linger_ms=1, **SASL)
    assert not caplog.records


# ------------------------------------------------------------ rules: what is not built yet


def test_two_phase_commit_with_a_transaction_timeout() -> None:
    """CF-07"""
    message = refusal(
        transaction_two_phase_commit_enable=True,
        transaction_timeout_ms=60_000,
        transactional_id="t",
    )
    assert "transaction_timeout_ms cannot be set" in message


def test_rack_aware_partitioning_needs_a_rack() -> None:
    """RA-33, as far as there is rack awareness: the contradiction is told, the option refused."""
    for rack in ({}, {"client_rack": " "}):
        assert "needs a client_rack" in refusal(partitioner_rack_aware=True, **rack)


@pytest.mark.parametrize(
    "options",
    [
        {"transaction_two_phase_commit_enable": True},
        {"enable_metrics_push": True},
        {"partitioner_rack_aware": True, "client_rack": "r"},
        {"client_rack": "r"},
        {"bootstrap_resolve_timeout_ms": 1},
        {"buffer_memory_allocation_strategy": "incremental"},
        {"metadata_cluster_check_enable": True},
    ],
)
def test_features_of_later_releases_are_refused(options: dict[str, Any]) -> None:
    message = refusal(**options)
    assert message.startswith("not supported yet: ")
    assert any(name in message for name in options)


def test_every_option_for_later_is_accepted_with_its_default() -> None:
    later = {o.name: o.default for o in OPTIONS.values() if o.later}
    assert len(later) == 8
    assert make(**later) == make()


def test_first_of_several_errors_is_javas() -> None:
    everything: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "enable_idempotence": True,
        "acks": 1,
        "transactional_id": "t",
        "transaction_two_phase_commit_enable": True,
        "transaction_timeout_ms": 1,
        "delivery_timeout_ms": 1,
        "partitioner_rack_aware": True,
        "ssl_keyfile": "k",
    }
    cures: list[tuple[str, dict[str, Any]]] = [
        ("needs a sasl_mechanism", {**SASL}),
        ("contradicts acks=1", {"enable_idempotence": False}),
        ("transactional_id needs", {"enable_idempotence": True, "acks": "all"}),
        ("transaction_timeout_ms cannot", {"transaction_two_phase_commit_enable": False}),
        ("delivery_timeout_ms=1 is less", {"delivery_timeout_ms": 60_000}),
        ("needs a client_rack", {"partitioner_rack_aware": False}),
        ("ssl_keyfile needs", {"ssl_certfile": "c"}),
    ]
    for message, cure in cures:
        assert message in refusal(**everything)
        everything |= cure
    make(**everything)


@pytest.mark.parametrize("name", JAVA_REFUSED)
def test_options_that_we_do_not_have_are_refused_with_a_hint(name: str) -> None:
    snake = name.replace(".", "_")
    message = refusal(**{snake: "x"})
    assert message.startswith(f"{snake!r} is not an option here: ")
    assert mapping_refusal({name: "x"}).startswith(f"{name!r} is not an option here: ")
    assert mapped({name: None}) == make(**{snake: None}) == make()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("key_serializer", "argument of Producer"),
        ("interceptors", "argument of Producer"),
        ("sasl_jaas_config", "sasl_username"),
        ("sasl_oauthbearer_token_endpoint_url", "sasl_oauth_token_provider"),
        ("sasl_oauthbearer_scope", "sasl_oauth_token_provider"),
        ("sasl_kerberos_service_name", "GSSAPI"),
        ("api_version", "agreed on"),
        ("loop", "loop"),
        ("group_id", "consumers"),
        ("schema_registry_url", "serializer"),
        ("metric_reporters", "not supported yet"),
        ("error_cb", "Producer.health"),
        ("stats_cb", "Producer.metrics()"),
        ("throttle_cb", "produce_throttle_time_avg"),
        ("on_delivery", "add_done_callback"),
        ("dr_msg_cb", "add_done_callback"),
        ("log_cb", "logger 'asyncproducer'"),
        ("logger", "logger 'asyncproducer'"),
        ("log_connection_close", "it is not needed, leave it out"),
    ],
)
def test_hints(name: str, hint: str) -> None:
    """CF-14 (metric_reporters)"""
    assert hint in refusal(**{name: "com.example.Reporter"})


def test_javas_defaults_of_refused_options_ask_for_nothing() -> None:
    dump = {
        name.replace("_", "."): refused.default
        for name, refused in REFUSED.items()
        if refused.default is not None
    }
    assert len(dump) > 20
    assert mapped(dump) == make()
    assert mapped({name: str(value) for name, value in dump.items()}) == make()
    assert mapped({"interceptor.classes": [], "config.providers": ()}) == make()
    assert "not an option" in mapping_refusal({"ssl.provider": "None"})


#: What a dump of Java's defaults asks for: it does mean something.
ASKED: dict[str, Any] = {"send_buffer_bytes": 131072}


def test_a_dump_of_javas_defaults_asks_for_no_more(caplog: pytest.LogCaptureFixture) -> None:
    dump = java_dump()
    written = {*dump, *JAVA_NULLS.split()}
    named = {name for name, *_ in JAVA_NUMBERS} | set(JAVA_OTHERS) | OURS_DIFFER
    assert {*named, *JAVA_REFUSED} - written == {"bootstrap.servers", "client.id"}
    nulls = dict.fromkeys(JAVA_NULLS.split())
    with caplog.at_level(logging.DEBUG):
        assert mapped({**dump, **nulls}) == mapped(dump) == make(**ASKED)
    assert all("=true has no effect" in r.getMessage() for r in caplog.records)
    for protocol in ("SSL", "SASL_SSL"):
        config = mapped({**dump, **nulls, "security.protocol": protocol}, **sasl_of(protocol))
        assert config == make(security_protocol=protocol, **sasl_of(protocol), **ASKED)


def sasl_of(protocol: str) -> dict[str, Any]:
    """Options with which a protocol is complete."""
    return {} if protocol == "SSL" else {k: v for k, v in SASL.items() if "protocol" not in k}


def test_a_dump_of_java_as_its_log_has_it() -> None:
    """ProducerConfig values: ... Lists in brackets, classes after `class`, and null."""
    lists = ("config.providers", "interceptor.classes", "metric.reporters", "ssl.cipher.suites")
    log = {**java_dump(), **dict.fromkeys(JAVA_NULLS.split(), "null")}
    log |= {name: f"[{log[name]}]" for name in lists}
    log |= {n: f"class {v}" for n, v in log.items() if n.startswith("sasl.oauthbearer.jwt.")}
    log["ssl.enabled.protocols"] = "[TLSv1.2, TLSv1.3]"
    log["bootstrap.servers"] = "[a:9092, [::1]:9092]"
    assert mapped(log) == ProducerConfig("a:9092,[::1]:9092", **ASKED)


@pytest.mark.parametrize("name", [n for n in java_dump() if NAMES.by_dotted.get(n) not in OPTIONS])
def test_what_is_not_javas_default_is_refused_in_a_dump_too(name: str) -> None:
    for value in ("7", "0.81", "x", "nan", True, 7, 0.81):
        if str(value).lower() != java_dump()[name]:
            assert mapping_refusal({**java_dump(), name: value}).startswith(
                f"{name!r} is not an option here: "
            )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"security.protocol": "SASL_SSL"}, "needs a sasl.mechanism: PLAIN, "),
        ({"enable.metrics.push": "yes"}, "enable.metrics.push must be"),
        (
            {"transaction.two.phase.commit.enable": "true", "transaction.timeout.ms": "1"},
            "transaction.timeout.ms cannot be set with transaction.two.phase.commit.enable=True",
        ),
        ({"client.rack": "r"}, "not supported yet: rack aware"),
        ({"ssl.keystore.type": "PKCS12"}, "ssl.keystore.type must be one of PEM, not 'PKCS12'"),
        ({"ssl.keystore.location": "a.jks"}, "ssl.keystore.type must be one of PEM, not 'JKS'"),
        ({"ssl.truststore.location": "a.jks"}, "ssl.truststore.type must be one of PEM"),
        ({"ssl.ca.pem": "PEM"}, "ssl.truststore.type must be one of PEM"),
    ],
)
def test_options_that_were_changed_in_a_dump_are_refused(
    changed: dict[str, str], message: str
) -> None:
    """With a location Java's JKS means something: a file that we cannot read."""
    assert message in mapping_refusal({**java_dump(), **changed})


def test_a_location_beside_the_mapping_counts_too() -> None:
    """CF-13"""
    jks = {"ssl.truststore.type": "JKS", "security.protocol": "SSL"}
    assert "must be one of PEM" in mapping_refusal(jks, ssl_truststore_location="a.jks")
    config = mapped({**jks, "ssl.truststore.location": "a.jks"}, ssl_truststore_location=None)
    assert config.ssl_truststore_type == "PEM"


def test_a_feature_that_is_dropped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """CF-13"""
    features = ["enable.metrics.push", "metadata.cluster.check.enable"]
    mapped({**dict.fromkeys(features, "false"), "ssl.truststore.type": "JKS"})
    assert not caplog.records
    mapped(dict.fromkeys(features, "true"))
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert [r.getMessage().split("=")[0] for r in caplog.records] == features


def test_javas_defaults_are_only_dropped_from_mappings() -> None:
    """Who writes one of them in Python has not dumped all options, and expects it to work."""
    for name, (default, _) in JAVA_DEFAULTS.items():
        assert name in refusal(**{name: default})
        assert name in mapping_refusal({}, **{name: default})


def test_no_option_is_refused_as_well() -> None:
    assert not set(REFUSED) & {*OPTIONS, *NAMES.aliases}
    assert not [n for n in OPTIONS if n.startswith(tuple(REFUSED_FAMILIES))]


# ------------------------------------------------------------ rules: SASL


@pytest.mark.parametrize("protocol", ["SASL_SSL", "sasl_plaintext"])
def test_sasl_without_mechanism_lists_what_there_is(protocol: str) -> None:
    message = refusal(security_protocol=protocol)
    assert all(mechanism in message for mechanism in SASL_MECHANISMS)
    assert "GSSAPI, is not supported" in message
    assert message == refusal(security_protocol=protocol, sasl_mechanism=None)


def test_gssapi_is_refused() -> None:
    assert "not supported yet: GSSAPI" in refusal(**{**SASL, "sasl_mechanism": "GSSAPI"})


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_passwords(mechanism: str) -> None:
    options = {**SASL, "sasl_mechanism": mechanism}
    config = make(**options)
    assert (config.sasl_mechanism, config.sasl_username) == (mechanism, "user")
    assert config.sasl_password == SECRET
    for name in ("sasl_username", "sasl_password"):
        without = {k: v for k, v in options.items() if k != name}
        assert refusal(**without) == f"sasl_mechanism={mechanism} needs {name}"
    message = refusal(**options, sasl_oauth_token_provider=token)
    assert "does not go with sasl_oauth_token_provider" in message


def test_oauth_needs_a_provider_and_no_password() -> None:
    options = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
    assert make(**options, sasl_oauth_token_provider=token).sasl_oauth_token_provider is token
    assert "needs sasl_oauth_token_provider" in refusal(**options)
    message = refusal(**options, sasl_oauth_token_provider=token, sasl_username="u")
    assert "does not go with sasl_username" in message


class TokenProvider:
    async def token(self) -> str:
        return "token"


@pytest.mark.parametrize("value", ["token", 5, TokenProvider, object()])
def test_token_provider_is_a_callable(value: object) -> None:
    assert "must be an async callable" in refusal(sasl_oauth_token_provider=value)


def test_token_provider_of_aiokafka_is_told_how_to_pass() -> None:
    assert "provider.token" in refusal(sasl_oauth_token_provider=TokenProvider())
    config = make(
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=TokenProvider().token,
    )
    assert config.sasl_oauth_token_provider is not None


@pytest.mark.parametrize(
    ("protocol", "tls", "sasl"),
    [
        ("PLAINTEXT", False, False),
        ("SSL", True, False),
        ("SASL_PLAINTEXT", False, True),
        ("SASL_SSL", True, True),
    ],
)
def test_what_a_protocol_uses(protocol: str, tls: bool, sasl: bool) -> None:
    config = make(**{**SASL, "security_protocol": protocol})
    assert (config.uses_tls, config.uses_sasl) == (tls, sasl)


# ------------------------------------------------------------ rules: TLS


@pytest.mark.parametrize(
    ("options", "protocol"),
    [
        ({"ssl_cafile": "ca"}, "SSL or SASL_SSL"),
        ({"ssl_password": SECRET}, "SSL or SASL_SSL"),
        ({"sasl_mechanism": "PLAIN"}, "SASL_SSL or SASL_PLAINTEXT"),
        ({"sasl_password": SECRET}, "SASL_SSL or SASL_PLAINTEXT"),
    ],
)
def test_forgotten_security_protocol_is_an_error(options: dict[str, Any], protocol: str) -> None:
    """CF-13: Java only logs it, and then sends everything in clear text."""
    message = refusal(**options)
    assert f"{next(iter(options))} would have no effect" in message
    assert protocol in message


def test_unused_security_options_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """CF-13"""
    make(security_protocol="PLAINTEXT", ssl_cafile="ca", ssl_certfile="c", sasl_username="u")
    assert [record.getMessage() for record in caplog.records] == [
        "unused options: ssl_cafile, ssl_certfile have no effect with security_protocol=PLAINTEXT",
        "unused options: sasl_username have no effect with security_protocol=PLAINTEXT",
    ]


def test_security_defaults_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """CF-13"""
    make(ssl_endpoint_identification_algorithm="https", ssl_keystore_type="PEM", sasl_password=None)
    assert not caplog.records


def test_context_goes_alone() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert make(security_protocol="SSL", ssl_context=context).ssl_context is context
    message = refusal(
        security_protocol="SSL", ssl_context=context, ssl_cafile="c", ssl_password=SECRET
    )
    assert message.startswith("ssl_cafile, ssl_password would have no effect beside ssl_context")
    make(
        security_protocol="SSL", ssl_context=context, ssl_endpoint_identification_algorithm="https"
    )


@pytest.mark.parametrize("value", [ssl.SSLContext, "context", True])
def test_context_is_an_ssl_context(value: object) -> None:
    assert "must be an ssl.SSLContext" in refusal(security_protocol="SSL", ssl_context=value)


@pytest.mark.parametrize(("store", "ours"), [("truststore", "cafile"), ("keystore", "certfile")])
def test_stores_are_pem_files(store: str, ours: str) -> None:
    location = {"security_protocol": "SSL", f"ssl_{store}_location": "file"}
    for options in (location, {**location, f"ssl_{store}_type": "pem"}):
        config = make(**options)
        assert getattr(config, f"ssl_{ours}") == "file"
        assert config.replace(linger_ms=1).ssl_keyfile is None


@pytest.mark.parametrize("kind", ["JKS", "PKCS12", "jks"])
@pytest.mark.parametrize(
    ("store", "advice"),
    [
        ("truststore", "`keytool -list -rfc -keystore STORE > ca.pem`, then set ssl_cafile"),
        ("keystore", "`openssl pkcs12 -in client.p12 -out client.pem`, then set ssl_certfile"),
    ],
)
def test_other_kinds_of_stores_are_refused_with_the_way_to_pem(
    store: str, advice: str, kind: str
) -> None:
    """Also without a location, where Java would take no notice."""
    for location in ({}, {f"ssl_{store}_location": "file"}):
        message = refusal(security_protocol="SSL", **location, **{f"ssl_{store}_type": kind})
        assert message.startswith(f"ssl_{store}_type must be one of PEM, not {kind!r} (str): make ")
        assert advice in message
    mapping = {f"ssl.{store}.type": kind, f"ssl.{store}.location": "file"}
    dotted = advice.replace("ssl_cafile", "ssl.cafile").replace("ssl_certfile", "ssl.certfile")
    assert dotted in mapping_refusal(mapping)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ssl_cafile": "c", "ssl_truststore_certificates": "PEM"},
            "ssl_cafile and ssl_truststore_certificates say the same",
        ),
        (
            {
                "ssl_certfile": "c",
                "ssl_keystore_location": "c",
                "ssl_keystore_type": "PEM",
            },
            "ssl_certfile and ssl_keystore_location say the same",
        ),
        ({"ssl_keyfile": "k"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_keystore_key": SECRET}, "ssl_keystore_certificate_chain is missing"),
        ({"ssl_keystore_certificate_chain": "PEM"}, "ssl_keystore_key is missing"),
    ],
)
def test_tls_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    assert message in refusal(security_protocol="SSL", **options)


def test_tls_options_that_go_together() -> None:
    config = make(
        security_protocol="SSL",
        ssl_cafile="ca",
        ssl_certfile="c",
        ssl_keyfile="k",
        ssl_password="p",
    )
    assert (config.ssl_certfile, config.ssl_keyfile, config.ssl_password) == ("c", "k", "p")
    config = make(
        security_protocol="SSL",
        ssl_truststore_certificates="A",
        ssl_keystore_certificate_chain="B",
        ssl_keystore_key="C",
    )
    assert config.ssl_keystore_key == "C"


@pytest.mark.parametrize(("written", "checks"), [("https", True), ("", False), (None, False)])
def test_check_of_host_names(written: str | None, checks: bool) -> None:
    config = make(security_protocol="SSL", ssl_endpoint_identification_algorithm=written)
    assert config.ssl_check_hostname is checks


# ------------------------------------------------------------ compression and partitioner


@pytest.mark.parametrize(
    ("codec", "level"), [("none", None), ("snappy", None), ("gzip", -1), ("lz4", 9), ("zstd", 3)]
)
def test_level_in_effect_is_that_of_the_codec(codec: str, level: int | None) -> None:
    assert make(compression_type=codec).compression_level == level


@pytest.mark.parametrize(("codec", "level"), [("gzip", 1), ("lz4", 17), ("zstd", -7)])
def test_one_level_for_any_codec(codec: str, level: int) -> None:
    for name in ("compression_level", f"compression_{codec}_level"):
        config = make(compression_type=codec, **{name: level})
        assert config.compression_level == level
        assert getattr(config, f"compression_{codec}_level") == level


@pytest.mark.parametrize(("codec", "level"), [("gzip", 0), ("gzip", 10), ("lz4", 18), ("lz4", 0)])
def test_level_outside_the_codecs_range(codec: str, level: int) -> None:
    message = refusal(compression_type=codec, compression_level=level)
    assert f"compression_level={level} is out of range: for {codec}" in message


def test_level_given_twice() -> None:
    message = refusal(compression_type="zstd", compression_level=3, compression_zstd_level=3)
    assert message == "compression_level and compression_zstd_level say the same: keep one"
    make(compression_type="zstd", compression_level=3, compression_gzip_level=3)


@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_level_of_a_codec_without_levels(codec: str) -> None:
    assert "has no levels" in refusal(compression_type=codec, compression_level=3)


class ByHand:
    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None, /) -> int:
        return 0


def by_function(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
    return 0


BY_HAND = ByHand()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("default", "default"),
        ("murmur2", "murmur2"),
        ("murmur3", "murmur3"),
        ("round_robin", "round_robin"),
        ("org.apache.kafka.clients.producer.RoundRobinPartitioner", "round_robin"),
        (None, "default"),
        (BY_HAND, BY_HAND),
        (by_function, by_function),
    ],
)
@pytest.mark.parametrize("name", ["partitioner", "partitioner_class"])
def test_partitioners(name: str, written: object, meant: object) -> None:
    assert make(**{name: written}).partitioner == meant


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("crc32", "murmur2"),
        ("org.apache.kafka.clients.producer.internals.DefaultPartitioner", "Kafka 4.0 removed"),
        ("org.apache.kafka.clients.producer.UniformStickyPartitioner", "Kafka 4.0 removed"),
        (ByHand, "an instance"),
        (5, "int"),
        (object(), "object"),
        ("consistent", "librdkafka places keys by CRC32"),
        ("consistent_random", "they would go to other partitions than before"),
        ("consistent_random", "'murmur2_random' places them as Java's clients do"),
        ("consistent_random", "give a function that computes CRC32, as in lambda topic, key"),
        ("fnv1a", "librdkafka places keys by FNV-1a"),
        ("fnv1a_random", "give a function that computes FNV-1a"),
        ("random", "set partitioner_ignore_keys"),
    ],
)
def test_partitioners_that_are_refused(written: object, hint: str) -> None:
    assert hint in refusal(partitioner=written)


@pytest.mark.parametrize("name", ["murmur2", "murmur2_random"])
def test_partitioners_of_librdkafka_that_place_keys_as_java_does(name: str) -> None:
    assert mapped({"partitioner": name}).partitioner in ("default", "murmur2")


def test_the_function_in_the_hint_is_librdkafkas_partitioner() -> None:
    """rd_kafka_msg_partitioner_consistent: the CRC32 of zlib, modulo the partitions."""
    match = re.search(r"lambda .*partition_count", refusal(partitioner="consistent"))
    assert match is not None
    place: Any = eval(match[0], {"zlib": zlib})
    make(partitioner=place)
    topic = types.SimpleNamespace(partition_count=7)
    # The check value of this CRC: that of b"123456789".
    assert place(topic, b"123456789", None) == 0xCBF43926 % 7
    assert place(topic, None, None) == 0


# ------------------------------------------------------------ from_mapping


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda o: o.name)
def test_every_option_has_a_dotted_name(option: Option) -> None:
    assert NAMES.by_dotted[option.name.replace("_", ".")] == option.name
    if option.java is not None:
        assert NAMES.by_dotted[option.java] == option.name


def test_mapping_of_text_as_a_properties_file_has_it() -> None:
    config = mapped(
        {
            "linger.ms": " 0.5 ",
            "retries": "+7",
            "acks": "all",
            "partitioner.ignore.keys": " TRUE ",
            "enable.idempotence": "false",
            "connections.max.idle.ms": "-1",
            "partitioner.class": "org.apache.kafka.clients.producer.RoundRobinPartitioner",
            "ssl.enabled.protocols": "TLSv1.3",
            "security.protocol": "ssl",
            "ssl.key.password": "007",
        }
    )
    assert config.explicit == {
        "bootstrap_servers",
        "linger_ms",
        "retries",
        "acks",
        "partitioner_ignore_keys",
        "enable_idempotence",
        "connections_max_idle_ms",
        "partitioner",
        "ssl_enabled_protocols",
        "security_protocol",
        "ssl_password",
    }
    assert config.linger_ms == 0.5
    assert config.retries == 7
    assert config.partitioner_ignore_keys is True
    assert config.enable_idempotence is False
    assert config.connections_max_idle_ms == -1
    assert config.partitioner == "round_robin"
    assert config.ssl_enabled_protocols == ("TLSv1.3",)
    assert config.ssl_password == "007"


def test_mapping_of_typed_values() -> None:
    config = mapped({"linger.ms": 7, "partitioner.ignore.keys": True, "compression.level": None})
    assert config == make(linger_ms=7, partitioner_ignore_keys=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("linger.ms", "soon"),
        ("linger.ms", "1e3"),
        ("linger.ms", "nan"),
        ("linger.ms", "."),
        ("retries", ""),
        ("retries", "1_000"),
        ("retries", "1.0"),
        ("retries", "٣"),
        ("retries", "9" * 5000),
        ("enable.idempotence", "yes"),
        ("enable.idempotence", "1"),
    ],
)
def test_text_that_is_no_number_or_boolean(name: str, text: str) -> None:
    message = mapping_refusal({name: text})
    assert message.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("mapping", "name", "value"),
    [
        ({"metadata.broker.list": "b:1"}, "bootstrap_servers", ("b:1",)),
        ({"request.required.acks": "-1"}, "acks", -1),
        ({"request.required.acks": 1}, "acks", 1),
        ({"message.send.max.retries": "3"}, "retries", 3),
        ({"message.timeout.ms": 40_000}, "delivery_timeout_ms", 40_000),
        ({"message.timeout.ms": "0"}, "delivery_timeout_ms", INT32_MAX),
        ({"queue.buffering.max.ms": "0.5"}, "linger_ms", 0.5),
        ({"queue.buffering.max.kbytes": "32"}, "buffer_memory", 32_768),
        ({"message.max.bytes": 1000}, "max_request_size", 1000),
        ({"max.in.flight": "1"}, "max_in_flight_requests_per_connection", 1),
        ({"compression.codec": "lz4"}, "compression_type", "lz4"),
        ({"compression.codec": "zstd", "compression.level": "7"}, "compression_level", 7),
        ({"compression.codec": "zstd", "compression.level": "-1"}, "compression_level", 3),
        ({"socket.send.buffer.bytes": 0}, "send_buffer_bytes", -1),
        ({"socket.receive.buffer.bytes": "4096"}, "receive_buffer_bytes", 4096),
        ({"enable.idempotence": "false"}, "enable_idempotence", False),
        ({"partitioner": "murmur2_random"}, "partitioner", "default"),
        ({"ssl.ca.location": "ca"}, "ssl_cafile", "ca"),
        ({"ssl.ca.pem": "PEM"}, "ssl_truststore_certificates", "PEM"),
        ({"ssl.certificate.location": "c", "ssl.key.location": "k"}, "ssl_keyfile", "k"),
        ({"ssl.certificate.pem": "c", "ssl.key.pem": "k"}, "ssl_keystore_key", "k"),
        ({"ssl.endpoint.identification.algorithm": "none"}, "ssl_check_hostname", False),
        ({"ssl.endpoint.identification.algorithm": "https"}, "ssl_check_hostname", True),
    ],
)
def test_names_of_librdkafka(mapping: dict[str, Any], name: str, value: object) -> None:
    servers: Options = {} if "metadata.broker.list" in mapping else {"bootstrap_servers": "a:1"}
    config = ProducerConfig.from_mapping({"security.protocol": "ssl", **mapping}, **servers)
    assert getattr(config, name) == value


def test_sasl_names_of_librdkafka() -> None:
    config = mapped(
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": "u",
            "sasl.password": SECRET,
        }
    )
    assert (config.sasl_mechanism, config.sasl_username) == ("SCRAM-SHA-512", "u")
    assert config.sasl_password == SECRET


def test_values_of_librdkafka_are_checked_too() -> None:
    for name in ("queue.buffering.max.kbytes", "message.timeout.ms"):
        for value in (False, "x"):
            assert mapping_refusal({name: value}).startswith(f"{name} must be an int in ")


def test_names_of_librdkafka_all_lead_to_options() -> None:
    assert {foreign.option for foreign in LIBRDKAFKA.values()} <= set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batch.num.messages", "set batch.size"),
        ("queue.buffering.max.messages", "set buffer.memory"),
        ("socket.timeout.ms", "set request.timeout.ms"),
        ("topic.metadata.refresh.interval.ms", "set metadata.max.age.ms"),
        ("sticky.partitioning.linger.ms", "set batch.size"),
        ("statistics.interval.ms", "metrics()"),
        ("enable.ssl.certificate.verification", "ssl.context"),
        ("key.serializer", "argument of Producer"),
        ("oauth_cb", "set sasl.oauth.token.provider"),
        ("error_cb", "Producer.health"),
        ("log.connection.close", "it is not needed"),
        ("group.id", "consumers"),
    ],
)
def test_mapping_names_that_are_refused_with_a_hint(name: str, hint: str) -> None:
    """The hint names options as they are written in a mapping, where it can be followed."""
    message = mapping_refusal({name: "100"})
    assert message.startswith(f"{name!r} is not an option here: ")
    assert hint in message
    for word in re.findall(r"set ([a-z.]+)", message):
        assert word in NAMES.by_dotted or word == "the"


def test_librdkafkas_defaults_of_refused_options_ask_for_nothing() -> None:
    assert mapped({"log.connection.close": "true", "delivery.report.only.error": False}) == make()


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"message.timeout.ms": 5000},
            "message.timeout.ms=5000 is less than linger.ms=5 plus request.timeout.ms=30000: it"
            " must be at least 30005 (message.timeout.ms is delivery_timeout_ms here, 0 is 2^31-1)",
        ),
        (
            {"delivery.timeout.ms": "5000", "queue.buffering.max.ms": "7"},
            "delivery.timeout.ms=5000 is less than queue.buffering.max.ms=7 plus request.timeout.ms"
            "=30000: it must be at least 30007 (queue.buffering.max.ms is linger_ms here)",
        ),
        (
            {"queue.buffering.max.kbytes": -1},
            "queue.buffering.max.kbytes must be an int in 0..2^63-1, not -1024 (int)"
            " (queue.buffering.max.kbytes is buffer_memory here, times 1024)",
        ),
        ({"acks": "7"}, "acks must be one of all, -1, 0, 1, not '7' (str)"),
        ({"retries": "x"}, "retries must be an int in 0..2^31-1, not 'x' (str)"),
        ({"ssl.key.password": "p"}, "ssl.key.password would have no effect: set security.protocol"),
        ({"ssl.password": "p"}, "ssl.password would have no effect: set security.protocol"),
        ({"client.rack": "linger_ms"}, "(client.rack='linger_ms')"),
        ({"security.protocol": "linger_ms"}, "not 'linger_ms' (str)"),
        ({"partitioner.class": "crc"}, "partitioner.class must be one of default, murmur2, "),
        ({"bootstrap.servers": "a"}, "bootstrap.servers: 'a' is neither host:port nor "),
        (
            {"ssl.endpoint.identification.algorithm": "x"},
            "ssl.endpoint.identification.algorithm must be one of ",
        ),
    ],
)
def test_errors_name_options_as_the_mapping_does(mapping: dict[str, object], message: str) -> None:
    told = mapping_refusal(mapping)
    assert message in told
    assert told.count(" here") == message.count(" here")


def test_only_whole_names_outside_quotes_are_spelled_anew() -> None:
    text = "retries, xretries retries_x a.retries retries.a 'retries' \"retries\" it's (retries)."
    assert str(NAMES.respelled(ConfigError(text), str.upper)) == (
        "RETRIES, xretries retries_x a.retries retries.a 'retries' \"retries\" it's (RETRIES)."
    )


def test_a_mapping_without_servers_is_told_their_dotted_name() -> None:
    with pytest.raises(ConfigError, match=r"^bootstrap\.servers is required"):
        ProducerConfig.from_mapping({"linger.ms": 1})


def test_errors_name_what_came_beside_the_mapping_as_it_was_written() -> None:
    message = mapping_refusal({"request.timeout.ms": 7}, delivery_timeout_ms=3)
    assert message.startswith("delivery_timeout_ms=3 is less than linger.ms=5 plus request.timeout")


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        ("linger.ms", "queue.buffering.max.ms", "1"),
        ("queue.buffering.max.ms", "linger.ms", "1"),
        ("max.request.size", "message.max.bytes", "1000"),
        ("partitioner.class", "partitioner", "default"),
        ("ssl.key.password", "ssl.password", "1"),
    ],
)
def test_two_names_of_one_option_are_an_error(first: str, second: str, value: str) -> None:
    message = mapping_refusal({first: value, second: value})
    assert message == f"{first!r} and {second!r} set the same option: keep one"


def test_unknown_name_in_a_mapping() -> None:
    assert "did you mean 'linger.ms'?" in mapping_refusal({"lingr.ms": 1})
    assert "did you mean 'message.timeout.ms'?" in mapping_refusal({"mesage.timeout.ms": 1})
    assert mapping_refusal({"xyzzy": 1}) == "unknown option 'xyzzy'"


@pytest.mark.parametrize(
    ("name", "dotted"),
    [("linger_ms", "linger.ms"), ("max_batch_size", "batch.size"), ("ssl_cafile", "ssl.cafile")],
)
def test_snake_case_in_a_mapping_says_how_it_is_written(name: str, dotted: str) -> None:
    assert mapping_refusal({name: 1}) == f"{name!r} is written {dotted!r} in a mapping"


@pytest.mark.parametrize("key", [1, None, b"linger.ms", ("linger.ms",)])
def test_names_that_are_no_text(key: object) -> None:
    """CF-11"""
    assert "are str" in mapping_refusal({key: 1})


@pytest.mark.parametrize("value", ["linger.ms=1", [("linger.ms", 1)], None])
def test_mapping_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="takes a mapping"):
        ProducerConfig.from_mapping(value)


def test_options_replace_what_the_mapping_says() -> None:
    config = mapped({"sasl.username": "a", "linger.ms": "1"}, **SASL, linger_ms=2)
    assert (config.linger_ms, config.sasl_username) == (2, "user")
    config = mapped({"batch.size": 5}, max_batch_size=6)
    assert config.batch_size == 6


def test_options_beside_a_mapping_are_strict() -> None:
    assert "linger_ms must be" in mapping_refusal({}, linger_ms="2")
    assert "did you mean 'linger_ms'" in mapping_refusal({}, lingr_ms=2)


def test_mapping_is_left_as_it_is() -> None:
    servers = ["a:1", "b:2"]
    mapping = {"bootstrap.servers": servers, "queue.buffering.max.kbytes": "32", "acks": "all"}
    before = copy.deepcopy(mapping)
    ProducerConfig.from_mapping(mapping, linger_ms=2)
    assert mapping == before
    servers.append("c:3")
    assert ProducerConfig.from_mapping(before).bootstrap_servers == ("a:1", "b:2")


# ------------------------------------------------------------ from_env


def test_environment() -> None:
    config = from_env(
        {
            "KAFKA_LINGER_MS": "20",
            "KAFKA_ENABLE_IDEMPOTENCE": "False",
            "KAFKA_ACKS": "1",
            "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "KAFKA_SASL_MECHANISM": "PLAIN",
            "KAFKA_SASL_PLAIN_USERNAME": "u",
            "KAFKA_SASL_PASSWORD": SECRET,
            "PATH": "/bin",
        }
    )
    assert (config.linger_ms, config.enable_idempotence, config.acks) == (20, False, 1)
    assert (config.sasl_username, config.sasl_password) == ("u", SECRET)


def test_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_BOOTSTRAP_SERVERS", "b:1,c:2")
    config = ProducerConfig.from_env("ORDERS_")
    assert config.bootstrap_servers == ("b:1", "c:2")


def test_options_replace_the_environment() -> None:
    assert from_env({"KAFKA_BATCH_SIZE": "5"}, max_batch_size=6).batch_size == 6


#: What Kafka's own scripts and containers, and other programs, call their variables.
OTHER_SOFTWARE = re.split(
    r"\s+",
    """
    HOME OPTS HEAP_OPTS JVM_PERFORMANCE_OPTS GC_LOG_OPTS JMX_PORT JMX_OPTS LOG4J_OPTS VERSION DEBUG
    LOG_DIRS LOG_DIR BROKER_ID NODE_ID PROCESS_ROLES LISTENERS ADVERTISED_LISTENERS CLUSTER_ID
    ZOOKEEPER_CONNECT CONTROLLER_QUORUM_VOTERS INTER_BROKER_LISTENER_NAME NUM_PARTITIONS BROKERS
    BROKER TOPIC TOPICS GROUP_ID HOST PORT URL SERVER SERVERS USERNAME PASSWORD USER ENABLED ACL
    TRANSACTION_MAX_TIMEOUT_MS METADATA_MAX_IDLE_INTERVAL_MS SOCKET_SEND_BUFFER_BYTES
    SOCKET_RECEIVE_BUFFER_BYTES SOCKET_REQUEST_MAX_BYTES MESSAGE_MAX_BYTES REST_URL CONNECT_URL
    AUTO_CREATE_TOPICS_ENABLE REPLICA_FETCH_MAX_BYTES SCHEMA_REGISTRY_URL AUTO_OFFSET_RESET
    TRANSACTION_STATE_LOG_MIN_ISR SASL_ENABLED_MECHANISMS KEY_SERIALIZER API_VERSION
""".strip(),
)


@pytest.mark.parametrize("word", [*OTHER_SOFTWARE, "linger_ms", "Linger_Ms", "", "_"])
def test_variables_of_other_software_are_ignored(word: str) -> None:
    assert from_env({f"KAFKA_{word}": "whatever"}) == make()


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("BOOTSTRAP_SERVER", "BOOTSTRAP_SERVERS"),
        ("LINGERMS", "LINGER_MS"),
        ("LIGNER_MS", "LINGER_MS"),
        ("ACK", "ACKS"),
        ("SASL_MECHANISMS", "SASL_MECHANISM"),
        ("SASL_PLAIN_USER_NAME", "SASL_PLAIN_USERNAME"),
    ],
)
def test_misspelt_variables_are_an_error(word: str, meant: str) -> None:
    assert f"KAFKA_{word} is not an option: did you mean KAFKA_{meant}?" in env_refusal(
        {f"KAFKA_{word}": "1"}
    )


@pytest.mark.parametrize("word", ["SASL_JAAS_CONFIG", "SASL_KERBEROS_REALM", "METRIC_REPORTERS"])
def test_variables_of_features_that_are_missing_are_an_error(word: str) -> None:
    message = env_refusal({f"KAFKA_{word}": SECRET})
    assert message.startswith(f"KAFKA_{word}: not supported")
    assert SECRET not in message


def test_variable_with_a_wrong_value_is_named() -> None:
    assert env_refusal({"KAFKA_RETRIES": "many"}).startswith("KAFKA_RETRIES must be an int")
    assert env_refusal({"KAFKA_ACKS": "2"}).startswith("KAFKA_ACKS must be one of all, -1, 0, 1")


@pytest.mark.parametrize("prefix", ["KAFKA_", "ORDERS_", ""])
def test_missing_variables_are_named_with_the_prefix_in_use(prefix: str) -> None:
    with pytest.raises(ConfigError, match=f"^{prefix}BOOTSTRAP_SERVERS is required"):
        ProducerConfig.from_env(prefix, {})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "KAFKA_SASL_MECHANISM": "PLAIN"},
            "KAFKA_SASL_MECHANISM=PLAIN needs KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD",
        ),
        (
            {"KAFKA_SASL_PLAIN_USERNAME": "u"},
            "KAFKA_SASL_PLAIN_USERNAME would have no effect: set KAFKA_SECURITY_PROTOCOL to",
        ),
        ({"KAFKA_BOOTSTRAP_SERVERS": "a"}, "KAFKA_BOOTSTRAP_SERVERS: 'a' is neither"),
        ({"KAFKA_SASL_JAAS_CONFIG": "x"}, "set KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD"),
        # What no text can stand for has no variable.
        ({"KAFKA_SASL_OAUTHBEARER_SCOPE": "x"}, "Set sasl_oauth_token_provider"),
    ],
)
def test_errors_name_variables(environ: dict[str, str], message: str) -> None:
    assert message in env_refusal(environ)


def test_errors_name_what_came_beside_the_environment_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^delivery_timeout_ms=3 is less than KAFKA_LINGER_MS=7"):
        from_env({"KAFKA_LINGER_MS": "7"}, delivery_timeout_ms=3)


def test_two_variables_for_one_option() -> None:
    message = env_refusal({"KAFKA_SASL_USERNAME": "u", "KAFKA_SASL_PLAIN_USERNAME": "u"})
    assert (
        message == "KAFKA_SASL_USERNAME and KAFKA_SASL_PLAIN_USERNAME set the same option: keep one"
    )


# ------------------------------------------------------------ secrets


SECRETS = [o.name for o in OPTIONS.values() if o.secret]


def shown(config: ProducerConfig) -> Iterator[str]:
    yield repr(config)
    yield str(config)
    yield repr(config.__rich_repr__())
    yield repr(config.explain())
    yield repr(config.replace(linger_ms=7))


def test_which_options_are_secret() -> None:
    assert set(SECRETS) == {
        "sasl_password",
        "ssl_password",
        "ssl_truststore_certificates",
        "ssl_keystore_certificate_chain",
        "ssl_keystore_key",
    }


def test_secrets_are_not_shown() -> None:
    secrets: dict[str, Any] = dict.fromkeys(SECRETS, SECRET)
    config = make(**{**SASL, **secrets})
    for text in shown(config):
        assert SECRET not in text
        assert "sasl_password" in text
    assert config.explain()["sasl_password"] == "[hidden]"
    assert make().explain()["sasl_password"] is None


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("value", [SECRET.encode(), [SECRET], {"p": SECRET}, 424242])
def test_secrets_of_the_wrong_type_are_not_shown(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be a str")
    assert SECRET not in message
    assert "424242" not in message


@pytest.mark.parametrize(
    "build",
    [
        lambda: make(sasl_pasword=SECRET),
        lambda: make(sasl_jaas_config=SECRET),
        lambda: make(ssl_keystore_password=SECRET),
        lambda: make(sasl_password=SECRET),
        lambda: make(**{**SASL, "sasl_username": None}),
        lambda: make(**SASL, sasl_plain_password=SECRET),
        lambda: make(acks={"password": SECRET}),
        lambda: make(acks=(SECRET,)),
        lambda: ProducerConfig.from_options(f"SASL_SSL://user:{SECRET}@a:1"),
        lambda: mapped({"sasl.password": SECRET, "sasl.plain.password": SECRET}),
        lambda: mapped({"sasl.oauthbearer.client.credentials.client.secret": SECRET}),
        lambda: mapped({"sasl.passwort": SECRET}),
        lambda: from_env({"KAFKA_SASL_PASSWORT": SECRET}),
    ],
)
def test_secrets_are_not_in_errors(build: Callable[[], ProducerConfig]) -> None:
    with pytest.raises(ConfigError) as info:
        build()
    error: BaseException | None = info.value
    while error is not None:
        assert SECRET not in str(error)
        assert SECRET not in repr(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_objects_are_shown_by_name() -> None:
    provider = functools.partial(token_of, secret=SECRET)
    config = make(
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=provider,
        partitioner=by_function,
    )
    for text in shown(config):
        assert SECRET not in text
    assert config.explain()["sasl_oauth_token_provider"] == "<partial>"
    assert config.explain()["partitioner"] == "<by_function>"


async def token_of(secret: str) -> str:
    return secret


# ------------------------------------------------------------ client ids


def test_generated_client_ids_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """CF-09"""
    monkeypatch.setattr(config_module, "_producer_numbers", itertools.count(1))
    config = make()
    assert [config.resolve_client_id() for _ in range(3)] == [
        "producer-1",
        "producer-2",
        "producer-3",
    ]
    assert generate_client_id() == "producer-4"


def test_numbers_of_client_ids_can_be_given() -> None:
    """CF-09"""
    assert generate_client_id(numbers=iter([42])) == "producer-42"


def test_generated_client_id_of_a_transactional_producer() -> None:
    """CF-09"""
    assert generate_client_id("etl", numbers=iter([])) == "producer-etl"


@pytest.mark.parametrize("client_id", ["orders", ""])
def test_client_id_that_was_set_is_kept(client_id: str) -> None:
    """CF-09. An empty one, too."""
    config = make(client_id=client_id)
    assert config.client_id == client_id
    assert config.resolve_client_id() == client_id


# ------------------------------------------------------------ the object


def test_constructor_validates_and_normalises() -> None:
    config = ProducerConfig(bootstrap_servers=(" PLAINTEXT://a:1",), batch_size=0, acks=1)
    assert config.bootstrap_servers == ("a:1",)
    assert config.batch_size == 1
    assert config.enable_idempotence is False
    with pytest.raises(ConfigError, match="retries must be"):
        ProducerConfig(bootstrap_servers=("a:1",), retries=-1)


def test_constructor_takes_what_the_producer_takes() -> None:
    """Each of these lines is checked by mypy as well."""
    config = ProducerConfig("a:1,b:2", acks="all", ssl_cafile=None, max_batch_size=7)
    assert (config.bootstrap_servers, config.acks, config.batch_size) == (("a:1", "b:2"), -1, 7)
    assert ProducerConfig(bootstrap_servers="a:1") == ProducerConfig(["a:1"])
    assert config.replace(bootstrap_servers="a:1", acks=1).acks == 1
    options: Options = {"linger_ms": 20, "compression_type": None}
    assert ProducerConfig("a:1", **options).linger_ms == 20
    with pytest.raises(ConfigError, match="retries must be an int"):
        ProducerConfig("a:1", retries="5")  # type: ignore[arg-type]  # that is the point


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown option") as info:
        make(nothing=1)
    assert isinstance(info.value, KafkaError)


def test_explicit_tells_what_was_given_even_if_it_is_the_default() -> None:
    assert make(linger_ms=5, max_batch_size=3).explicit == {
        "bootstrap_servers",
        "linger_ms",
        "batch_size",
    }


def test_replace_derives_anew() -> None:
    config = make(acks=1, request_timeout_ms=200_000, reconnect_backoff_ms=20)
    assert config.delivery_timeout_ms == 200_005
    changed = config.replace(acks="all", request_timeout_ms=1_000, max_batch_size=8)
    assert changed.enable_idempotence is True
    assert changed.delivery_timeout_ms == 120_000
    assert changed.reconnect_backoff_max_ms == 20
    assert changed.batch_size == 8
    assert config.acks == 1
    with pytest.raises(ConfigError, match="contradicts acks=1"):
        config.replace(enable_idempotence=True)
    with pytest.raises(ConfigError, match="did you mean 'linger_ms'"):
        config.replace(lingr_ms=1)  # type: ignore[call-arg]  # that is the point


def test_replace_of_python_3_13_keeps_what_was_given() -> None:
    config = make(acks=1).__replace__(acks="all")
    assert config.enable_idempotence is True


def test_frozen() -> None:
    config = make()
    with pytest.raises(AttributeError):
        config.linger_ms = 7  # type: ignore[misc]  # that is the point
    with pytest.raises(AttributeError):
        config.nothing = 7  # type: ignore[attr-defined]  # that is the point


def test_equal_options_are_equal_configs() -> None:
    assert make(linger_ms=5) == make()
    assert hash(make(linger_ms=5)) == hash(make())
    assert make(linger_ms=6) != make()


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
)
def test_copies_know_what_was_given(
    duplicate: Callable[[ProducerConfig], ProducerConfig],
) -> None:
    config = make(acks=1, **SASL)
    other = duplicate(config)
    assert other == config
    assert other.explicit == config.explicit
    assert other.sasl_password == SECRET


def test_msgspec_decodes_and_checks() -> None:
    config = msgspec.json.decode(b'{"bootstrap_servers": ["a:1"], "acks": 1}', type=ProducerConfig)
    assert config.enable_idempotence is False
    for text in (
        b'{"bootstrap_servers": ["a"]}',
        b'{"bootstrap_servers": ["a:1"], "retries": -1}',
        b'{"bootstrap_servers": ["a:1"], "nothing": 1}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=ProducerConfig)


def test_explain_shows_every_option_in_effect() -> None:
    explained = make(acks=0, request_timeout_ms=300_000).explain()
    assert list(explained) == list(OPTIONS)
    assert explained["enable_idempotence"] is False
    assert explained["delivery_timeout_ms"] == 300_005


def test_repr_shows_what_was_given() -> None:
    config = make(linger_ms=1.5, compression_type="lz4")
    assert repr(config) == (
        "ProducerConfig(bootstrap_servers=('a:9092',), linger_ms=1.5, compression_type='lz4')"
    )


def test_a_marker_of_a_missing_option_has_a_name() -> None:
    assert repr(OPTIONS["linger_ms"]) == "<option linger_ms>"


# ------------------------------------------------------------ documentation


def test_the_typed_dict_has_every_option_and_alias() -> None:
    assert set(Options.__annotations__) == {*OPTIONS, *NAMES.aliases}
    assert not Options.__required_keys__


#: Values of each type that may be passed for an option, valid for one or the other.
OF_TYPE: dict[str, list[Any]] = {
    "bool": [True],
    "int": [1, 5_000],
    "float": [0.5],
    "str": ["a:1", "default", "TLSv1.2"],
    "None": [None],
    "Sequence[str]": [["a:1"], ("TLSv1.3",)],
    "os.PathLike[str]": [Path("x")],
    "PartitionerOption": [by_function],
    "SSLContext": [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)],
    "TokenProvider": [token],
}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda o: o.name)
def test_the_typed_dict_has_the_types_that_are_taken(option: Option) -> None:
    typed = set(option.kind.annotation.split(" | "))
    if "float" in typed:
        typed.add("int")  # as for type checkers
    if "PartitionerOption" in typed:
        typed |= {"str", "TokenProvider"}  # it names str; and any callable may be meant
    if "TokenProvider" in typed:
        typed.add("PartitionerOption")
    words = list(option.kind.words) if isinstance(option.kind, Choice) else []
    candidates = {**OF_TYPE, "str": [*OF_TYPE["str"], *words]}
    assert {name for name, values in candidates.items() if takes(option, values)} == typed


def takes(option: Option, values: list[Any]) -> bool:
    for value in values:
        try:
            option.parse(value)
        except ConfigError:
            continue
        return True
    return False


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda o: o.name)
def test_every_option_is_explained(option: Option) -> None:
    assert option.doc.rstrip(")").endswith((".", "Java: True", "empty", "yet"))
    assert option.kind.type_name
    assert option.kind.expected
