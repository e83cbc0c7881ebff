"""Every option of the producer: its type, default, range and meaning.

`ProducerConfig` is the only table. Each field's default is an `Option`, which says how
a value is checked and what it is for. The same object stands for "not given", because
Kafka treats an option that was set differently from one that has its default: `acks=1`
switches an implied `enable_idempotence` off, but contradicts a demanded one. The Java
names, the names of environment variables, the error messages, `docs/options.md` and the
TypedDict in `options.py` (`python -m asyncproducer.cli.docs`) all come from this table.

A value goes this way: text of a mapping or of the environment is turned into numbers
and booleans (`Kind.from_text`); `Kind.parse` checks one option for itself (both in
option_kinds.py); then `RULES` (option_rules.py) compare options with each other, in the order
of Java's ProducerConfig and KafkaProducer, and fill in what follows from them. The fields of
a finished config are what is in effect.

Messages name an option as this table does. Where it was given under another name, in a
mapping or in the environment, `Names.respelled` puts in the names that are used there. All
names of other clients are in option_names.py.

Values that may be secret are in no message, `repr` or `explain`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import msgspec

from asyncproducer.errors import ConfigError
from asyncproducer.option_kinds import (
    ANY_INT32,
    ANY_INT64,
    BUFFER_SIZE,
    COMPRESSION_LEVELS,
    COMPRESSION_TYPES,
    FLAG,
    INT32,
    INT32_MAX,
    INT64,
    INT64_MAX,
    SASL_MECHANISMS,
    SECURITY_PROTOCOLS,
    TEXT,
    Acks,
    Choice,
    Context,
    Kind,
    Number,
    Option,
    Partitioning,
    Path,
    Provider,
    Servers,
    Text,
    Words,
    parse_address,
    shown,
)
from asyncproducer.option_names import Names, drop_java_defaults
from asyncproducer.option_rules import RULES, check_protocols
from asyncproducer.options import Options

if TYPE_CHECKING:
    from ssl import SSLContext

    from asyncproducer.plugins import Partitioner, TopicView

    PartitionerOption: TypeAlias = (
        str | Partitioner | Callable[[TopicView, bytes | None, bytes | None], int]
    )
    # A str, or an object with `token`: see OAuthToken in net/security.py.
    TokenProvider: TypeAlias = Callable[[], Awaitable[object]]
else:
    # Not resolved at run time: the rules in core/ read this module and must stay free of ssl,
    # and msgspec, which asks for the types when it decodes, cannot check such objects anyway.
    SSLContext = PartitionerOption = TokenProvider = Any

__all__ = [
    "NAMES",
    "OPTIONS",
    "SASL_MECHANISMS",
    "Option",
    "Options",
    "ProducerConfig",
    "generate_client_id",
]

HIDDEN = "[hidden]"


# ---------------------------------------------------------------- the options


def _option(
    default: object,
    kind: Kind,
    doc: str,
    *,
    java: str | None = "",
    aliases: tuple[str, ...] = (),
    later: str = "",
    secret: bool = False,
) -> Any:
    """Declare a field. `java`: its name there, "" for ours with dots, None for ours alone.

    The result is an Option; it is typed Any since mypy takes a field's type from its annotation.
    """
    return Option(default, kind, doc, java=java, aliases=aliases, later=later, secret=secret)


#: What to do with Java's own kinds of stores: Python's ssl reads neither.
TRUSTSTORE_TO_PEM = (
    "make a PEM file of a JKS or PKCS12 store with `keytool -list -rfc -keystore STORE > ca.pem`,"
    " then set ssl_cafile"
)
KEYSTORE_TO_PEM = (
    "make PKCS12 of a JKS store with `keytool -importkeystore -srckeystore STORE"
    " -destkeystore client.p12 -deststoretype PKCS12`, make a PEM file of that with"
    " `openssl pkcs12 -in client.p12 -out client.pem`,"
    " then set ssl_certfile, and ssl_password for its key"
)


def _store_type(hint: str) -> Choice:
    return Choice(("PEM",), fold=str.upper, hints=dict.fromkeys(("JKS", "PKCS12"), hint))


if TYPE_CHECKING:
    _OptionNames: TypeAlias = msgspec.StructMeta
else:

    class _OptionNames(msgspec.StructMeta):
        """Looks at the arguments first: msgspec would raise a TypeError."""

        def __call__(cls, bootstrap_servers=None, /, **options):
            if bootstrap_servers is not None:
                if "bootstrap_servers" in options:
                    raise ConfigError("bootstrap_servers is given twice")
                options["bootstrap_servers"] = bootstrap_servers
            return super().__call__(**NAMES.canonical(options))


class ProducerConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    dict=True,
    metaclass=_OptionNames,
):
    """All options, checked against each other; the fields hold what is in effect.

    Make one as a Producer is made, `ProducerConfig("localhost:9092", linger_ms=20)`, or with
    `from_mapping` or `from_env`. Numbers must be numbers here, and booleans booleans; aliases
    such as `sasl_plain_username` are understood. Immutable; one config may serve several
    producers. See docs/options.md for the options.

    Raises ConfigError (a ValueError) for an unknown option, a value of the wrong type or
    out of range, options that contradict each other, and features that are not built yet.
    """

    # Core. The order is that of the documentation.
    bootstrap_servers: tuple[str, ...] = _option(
        ...,
        Servers(),
        "Brokers to ask for the cluster first. One that answers is enough. A "
        "protocol before an address, as in `SSL://host:9093`, must be that of `security_protocol`.",
    )
    client_id: str | None = _option(
        None,
        TEXT,
        "Name told to the brokers, for their logs, quotas and our metrics. None: "
        "`producer-<n>`, or `producer-<transactional_id>`. An empty one is kept. (Java: empty)",
    )
    acks: int = _option(
        -1, Acks(), "Who must have a batch before it is acknowledged: all in-sync replicas "
        "(`all`, which is -1), the leader (1), nobody (0)."
    )  # fmt: skip
    enable_idempotence: bool = _option(
        True, FLAG, "No duplicates and no reordering by retries. Switched off by `acks` 0 or 1 or "
        "`retries=0` unless it is set; set and contradicted it is an error."
    )  # fmt: skip
    retries: int = _option(
        INT32_MAX, INT32, "Attempts after the first. Leave it and set `delivery_timeout_ms`."
    )
    delivery_timeout_ms: int = _option(
        120_000, INT32, "Longest time from the buffer to success or failure. At least "
        "`linger_ms + request_timeout_ms`: a smaller one is an error, the default is raised."
    )  # fmt: skip
    request_timeout_ms: int = _option(
        30_000, INT32, "How long an answer may take. Brokers wait as long for their replicas."
    )
    max_block_ms: int = _option(
        60_000,
        INT64,
        "How long a send may wait for metadata and buffer room together; and a "
        "call of a transaction for its end.",
    )
    linger_ms: float = _option(
        5, Number(0, INT64_MAX, fraction=True), "How long a batch waits for more records. "
        "Fractions are allowed; capped to 2^31-1."
    )  # fmt: skip
    adaptive_linger: bool = _option(
        True, FLAG, "Let a batch leave before `linger_ms` when nobody adds to it any more and its "
        "broker has nothing to do. Not in Java.", java=None
    )  # fmt: skip
    batch_size: int = _option(
        16_384, INT32, "Bytes from which a batch is full. 0 becomes 1: one record in each batch.",
        aliases=("max_batch_size",)
    )  # fmt: skip
    batch_max_bytes: int = _option(
        1_000_000, INT32, "To this many bytes, before compression, a full batch goes on growing "
        "while its broker is busy. `max_request_size` bounds it too; 0 switches it off. "
        "Not in Java.", java=None
    )  # fmt: skip
    buffer_memory: int = _option(
        33_554_432, INT64, "Bytes of all records that are not acknowledged yet."
    )
    buffer_memory_allocation_strategy: str = _option(
        "full", Choice(("full", "incremental"), fold=str.lower),
        "How a batch takes its memory.", later="incremental allocation of batches"
    )  # fmt: skip
    max_request_size: int = _option(
        1_048_576, INT32, "Largest record, uncompressed, and most bytes in one Produce request."
    )
    max_in_flight_requests_per_connection: int = _option(
        5, Number(1, INT32_MAX), "Unanswered requests per broker. At most 5 while "
        "`enable_idempotence` is not set to False. 1: one batch per partition at a time."
    )  # fmt: skip
    compression_type: str = _option(
        "none", Choice(COMPRESSION_TYPES, none="none"), "Codec of the batches. None is `none`."
    )
    compression_level: int | None = _option(
        None, Number(-131_072, 22, optional=True), "Level of the codec that `compression_type` "
        "names, in its range. In a finished config: the level in effect, None without levels. "
        "In a mapping -1 is the codec's default, as in librdkafka.", java=None
    )  # fmt: skip
    compression_gzip_level: int = _option(
        -1, COMPRESSION_LEVELS["gzip"], "Level of gzip; -1 is zlib's default."
    )
    compression_lz4_level: int = _option(
        9, COMPRESSION_LEVELS["lz4"], "Level of lz4; 9 is the fast compressor, any other is LZ4 HC."
    )
    compression_zstd_level: int = _option(3, COMPRESSION_LEVELS["zstd"], "Level of zstd.")
    partitioner: PartitionerOption = _option(
        "default", Partitioning(), "Who chooses a record's partition. `default` is Kafka's: "
        "murmur2 of the key, sticky and adaptive without one. Java's "
        "`org.apache.kafka.clients.producer.RoundRobinPartitioner` is read as `round_robin`, "
        "librdkafka's `murmur2_random` as `default`; its own default places keys by CRC32, which "
        "nothing here does.",
        java="partitioner.class", aliases=("partitioner_class",)
    )  # fmt: skip
    partitioner_ignore_keys: bool = _option(
        False, FLAG, "Place records with a key like those without."
    )
    partitioner_adaptive_partitioning_enable: bool = _option(
        True, FLAG, "Give partitions of slower brokers fewer records. Not for own partitioners."
    )
    partitioner_availability_timeout_ms: int = _option(
        0, INT64, "Avoid partitions of a broker that took nothing for so long. 0: never; needs "
        "`partitioner_adaptive_partitioning_enable`."
    )  # fmt: skip
    partitioner_rack_aware: bool = _option(
        False, FLAG, "Prefer partitions whose leader is in `client_rack`.",
        later="rack aware partitioning"
    )  # fmt: skip
    client_rack: str = _option(
        "", Text(optional=False), "Where this client is.", later="rack aware partitioning"
    )
    metadata_max_age_ms: int = _option(
        300_000, INT64, "Metadata is asked for again after so long without news."
    )
    metadata_max_idle_ms: int = _option(
        300_000, Number(5_000, INT64_MAX), "A topic not used for so long is forgotten."
    )
    metadata_recovery_strategy: str = _option(
        "rebootstrap", Choice(("none", "rebootstrap"), fold=str.lower),
        "What to do when no known broker can be reached: start again from `bootstrap_servers`."
    )  # fmt: skip
    metadata_recovery_rebootstrap_trigger_ms: int = _option(
        300_000, INT64, "Start again as well after so long without metadata."
    )
    metadata_cluster_check_enable: bool = _option(
        False, FLAG, "Let brokers check that they are the cluster and node we mean. (Java: True)",
        later="ApiVersions version 5, which carries the check"
    )  # fmt: skip
    retry_backoff_ms: int = _option(
        100, INT64, "Pause before the first retry; it doubles with each. Above the max: the max."
    )
    retry_backoff_max_ms: int = _option(1_000, INT64, "Longest pause before a retry.")
    reconnect_backoff_ms: int = _option(
        50, INT64, "Pause before a broker is connected again; it doubles with each failure."
    )
    reconnect_backoff_max_ms: int = _option(
        1_000, INT64, "Longest such pause. Follows `reconnect_backoff_ms` if only that is set."
    )
    socket_connection_setup_timeout_ms: int = _option(
        10_000, INT64, "How long a connection may take; it doubles with each failure. Above the "
        "max: the max."
    )  # fmt: skip
    socket_connection_setup_timeout_max_ms: int = _option(30_000, INT64, "Longest such time.")
    connections_max_idle_ms: int = _option(
        540_000,
        ANY_INT64,
        "An unused connection is closed after so long. Negative: never. "
        "0, which means never to librdkafka alone, is an error.",
    )
    send_buffer_bytes: int = _option(
        -1, BUFFER_SIZE, "SO_SNDBUF of the sockets. -1: as the system has it, which lets it grow. "
        "Java's 131072 holds a far broker's connection down, and costs more and smaller writes."
    )  # fmt: skip
    receive_buffer_bytes: int = _option(
        32_768, BUFFER_SIZE, "SO_RCVBUF of the sockets. -1: as the system has it."
    )
    client_dns_lookup: str = _option(
        "use_all_dns_ips",
        Choice(("use_all_dns_ips", "resolve_canonical_bootstrap_servers_only")),
        "Try all addresses of a name, or expand bootstrap names to the canonical ones.",
    )
    bootstrap_resolve_timeout_ms: int = _option(
        0, INT64, "0: unresolvable names are an error of the start.",
        later="resolving bootstrap names in the background"
    )  # fmt: skip
    transactional_id: str | None = _option(
        None, Text(blank=False), "Makes the producer transactional. Name under which transactions "
        "survive a restart: a new producer with it fences the one before."
    )  # fmt: skip
    transaction_timeout_ms: int = _option(
        60_000, ANY_INT32, "A broker aborts a transaction that is open for so long, and fences "
        "its producer. At most transaction.max.timeout.ms of the brokers."
    )  # fmt: skip
    transaction_two_phase_commit_enable: bool = _option(
        False, FLAG, "Take part in a two-phase commit (KIP-939).", later="two-phase commit"
    )
    enable_metrics_push: bool = _option(
        False, FLAG, "Push metrics to the brokers (KIP-714). (Java: True)",
        later="pushing metrics to brokers (KIP-714)"
    )  # fmt: skip
    metrics_num_samples: int = _option(2, Number(1, INT32_MAX), "Samples kept for each metric.")
    metrics_sample_window_ms: int = _option(30_000, INT64, "The time that one sample covers.")
    metrics_recording_level: str = _option(
        "INFO", Choice(("INFO", "DEBUG", "TRACE")), "Which metrics are recorded.",
        later="metrics of other levels than INFO"
    )  # fmt: skip

    # Security.
    security_protocol: str = _option(
        "PLAINTEXT",
        Choice(SECURITY_PROTOCOLS, fold=str.upper),
        "Whether connections are encrypted, and whether we say who we are. An `ssl_` or `sasl_` "
        "option without it is an error; one that an explicit protocol does not use, a warning.",
    )
    sasl_mechanism: str | None = _option(
        None,
        Choice(
            SASL_MECHANISMS,
            none=None,
            hints={"GSSAPI": "not supported yet: GSSAPI (Kerberos)"},
        ),
        "How we say who we are; needed with a `SASL_` protocol. (Java: GSSAPI, not supported yet)",
    )
    sasl_username: str | None = _option(
        None, Text(blank=False), "The user, for PLAIN and SCRAM.",
        java=None, aliases=("sasl_plain_username",)
    )  # fmt: skip
    sasl_password: str | None = _option(
        None, TEXT, "The password, for PLAIN and SCRAM.",
        java=None, aliases=("sasl_plain_password",), secret=True
    )  # fmt: skip
    sasl_oauth_token_provider: TokenProvider | None = _option(
        None, Provider(), "For OAUTHBEARER: awaited for a fresh token whenever we authenticate.",
        java=None
    )  # fmt: skip
    ssl_context: SSLContext | None = _option(
        None, Context(), "A ready context: instead of all other `ssl_` options.", java=None
    )
    ssl_cafile: str | None = _option(
        None, Path(), "PEM file of the authorities to trust; else the system's.", java=None
    )
    ssl_certfile: str | None = _option(
        None, Path(), "PEM file of our certificate, with its chain and perhaps its key.", java=None
    )
    ssl_keyfile: str | None = _option(
        None, Path(), "PEM file of the key, if it is not in `ssl_certfile`.", java=None
    )
    ssl_password: str | None = _option(
        None, TEXT, "Opens an encrypted key.",
        java="ssl.key.password", aliases=("ssl_key_password",), secret=True
    )  # fmt: skip
    ssl_truststore_type: str = _option(
        "PEM", _store_type(TRUSTSTORE_TO_PEM), f"Java's JKS is not supported: {TRUSTSTORE_TO_PEM}."
    )
    ssl_truststore_location: str | None = _option(
        None, Path(), "Java's name for `ssl_cafile`: a PEM file."
    )
    ssl_truststore_certificates: str | None = _option(
        None, Text(blank=False), "The authorities to trust, as PEM text.", secret=True
    )
    ssl_keystore_type: str = _option(
        "PEM", _store_type(KEYSTORE_TO_PEM), f"Java's JKS is not supported: {KEYSTORE_TO_PEM}."
    )
    ssl_keystore_location: str | None = _option(
        None, Path(), "Java's name for `ssl_certfile`: a PEM file."
    )
    ssl_keystore_certificate_chain: str | None = _option(
        None, Text(blank=False), "Our certificate and its chain, as PEM text.", secret=True
    )
    ssl_keystore_key: str | None = _option(
        None, Text(blank=False), "The key of that certificate, as PEM text.", secret=True
    )
    ssl_endpoint_identification_algorithm: str = _option(
        "https",
        Choice(("https", ""), fold=str.lower, none="", hints={"none": 'write ""'}),
        "Check that the broker's certificate is for its host name. Empty: do not.",
    )
    ssl_enabled_protocols: tuple[str, ...] = _option(
        ("TLSv1.2", "TLSv1.3"), Words(("TLSv1.2", "TLSv1.3")), "The versions of TLS to speak."
    )
    ssl_cipher_suites: tuple[str, ...] = _option(
        (), Words(), "Suites for TLS 1.2, by OpenSSL's names. Empty: the system's choice."
    )

    if TYPE_CHECKING:
        # What may be passed is more than what the fields hold then.
        def __init__(
            self,
            bootstrap_servers: str | Sequence[str] | None = None,
            /,
            **options: Unpack[Options],
        ) -> None: ...

    def __post_init__(self) -> None:
        given: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is option:
                values[name] = option.default
            else:
                values[name] = given[name] = option.parse(value)
        if "bootstrap_servers" not in given:
            raise ConfigError(
                "bootstrap_servers is required: name at least one broker as host:port"
            )
        given_options = {name: OPTIONS[name] for name in given}
        for rule in RULES:
            rule(values, given_options)
        check_protocols(self.bootstrap_servers, values["security_protocol"])
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)
        self.__dict__["_given"] = given

    # ------------------------------------------------------------ ways to make one

    @classmethod
    def from_options(
        cls, bootstrap_servers: str | Sequence[str] | None = None, /, **options: Any
    ) -> ProducerConfig:
        """The constructor, for names that no type checker can know: only we look at them.

        Raises ConfigError.
        """
        return cls(bootstrap_servers, **options)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], **over: Unpack[Options]) -> ProducerConfig:
        """Make a config from a mapping with dotted names, those of Java or of librdkafka.

        Values may be text, as in a properties file. A dump of all of Java's options is
        accepted: what has Java's default asks for nothing where we do not have it. `over` are
        snake_case options, typed as in the constructor; they replace what the mapping says.
        The mapping is left as it is.

        Raises ConfigError, also if the mapping sets one option under two names. It names
        options as the mapping does.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"from_mapping takes a mapping, not a {type(mapping).__name__}")
        replaced = NAMES.canonical(over)
        options: dict[str, Any] = {}
        sources: dict[str, str] = {}
        try:
            for key, value in mapping.items():
                if not isinstance(key, str):
                    raise ConfigError(f"the names of options are str, not {shown(key)!r}")
                translated = NAMES.translate(key, value)
                if translated is None:
                    continue
                name, option_value = translated
                if name in sources:
                    raise ConfigError(
                        f"{sources[name]!r} and {key!r} set the same option: keep one"
                    )
                sources[name] = key
                options[name] = option_value
            drop_java_defaults(options, replaced)
            return cls(**{**options, **replaced})
        except ConfigError as error:
            spelled = sources | {name: name for name in replaced}
            raise NAMES.respelled(
                error, lambda name: spelled.get(name) or NAMES.dotted(name)
            ) from None

    @classmethod
    def from_env(
        cls,
        prefix: str = "KAFKA_",
        environ: Mapping[str, str] | None = None,
        **over: Unpack[Options],
    ) -> ProducerConfig:
        """Make a config from environment variables: KAFKA_BOOTSTRAP_SERVERS, KAFKA_LINGER_MS, ...

        A variable is the prefix and an option's snake_case name in capitals. `environ` is
        `os.environ` if None; `over` are further options, which replace the variables.

        Other software has variables with this prefix too (KAFKA_HOME, KAFKA_OPTS, a broker's
        KAFKA_LOG_DIRS), so a name that is no option is ignored, unless it is an option of
        Java's that is not supported yet, or within one or two typing errors of one of ours:
        then it is a ConfigError, since nobody would notice that it is without effect.

        Raises ConfigError, which names the variables.
        """
        replaced = NAMES.canonical(over)
        options: dict[str, Any] = {}
        sources: dict[str, str] = {}
        try:
            for variable, text in (os.environ if environ is None else environ).items():
                word = variable.removeprefix(prefix)
                if not variable.startswith(prefix) or word != word.upper():
                    continue
                name = NAMES.aliases.get(word.lower(), word.lower())
                option = OPTIONS.get(name)
                if option is None:
                    NAMES.check_variable(variable, name, prefix)
                    continue
                if name in sources:
                    raise ConfigError(
                        f"{sources[name]} and {variable} set the same option: keep one"
                    )
                sources[name] = variable
                options[name] = option.from_text(variable, text)
            return cls(**{**options, **replaced})
        except ConfigError as error:
            spelled = sources | {name: name for name in replaced}
            raise NAMES.respelled(
                error, lambda name: spelled.get(name) or NAMES.variable(prefix, name)
            ) from None

    def replace(self, **options: Unpack[Options]) -> ProducerConfig:
        """A config from the options that were given to this one, and these.

        What was derived is derived anew. Raises ConfigError.
        """
        return type(self)(**{**self._options, **NAMES.canonical(options)})

    # ------------------------------------------------------------ what follows from the options

    @property
    def explicit(self) -> frozenset[str]:
        """The names of the options that were given, even with their default value."""
        return frozenset(self._options)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """`bootstrap_servers` as (host, port), IPv6 addresses without brackets."""
        return tuple(parse_address(entry) for entry in self.bootstrap_servers)

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        """Whether connections begin with SASL."""
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @property
    def ssl_check_hostname(self) -> bool:
        """Whether a broker's certificate must be for its host name. Not for an `ssl_context`."""
        return self.ssl_endpoint_identification_algorithm == "https"

    @property
    def guarantee_message_order(self) -> bool:
        """Whether a partition is muted while a batch of it is in flight (Java's name)."""
        return self.max_in_flight_requests_per_connection == 1

    def resolve_client_id(self) -> str:
        """The `client_id` that was given, even an empty one, else a new generated one.

        Call it once for each producer: every call takes a new number.
        """
        if self.client_id is not None:
            return self.client_id
        return generate_client_id(self.transactional_id)

    def explain(self) -> dict[str, object]:
        """Every option with the value in effect, to log or print: secrets are hidden."""
        return {name: _explained(option, self) for name, option in OPTIONS.items()}

    # ------------------------------------------------------------ Python's protocols

    @property
    def _options(self) -> dict[str, Any]:
        given: dict[str, Any] = self.__dict__["_given"]
        return given

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self.__rich_repr__())
        return f"ProducerConfig({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # msgspec's own would show secrets.
        return [(name, _explained(OPTIONS[name], self)) for name in self._options]

    def __copy__(self) -> ProducerConfig:
        return self

    def __deepcopy__(self, memo: object) -> ProducerConfig:
        return self

    def __replace__(self, **options: Unpack[Options]) -> ProducerConfig:
        return self.replace(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy must know what was given, too.
        return _rebuild, (type(self), self._options)


def _rebuild(cls: type[ProducerConfig], options: dict[str, Any]) -> ProducerConfig:
    return cls(**options)


def _explained(option: Option, config: ProducerConfig) -> object:
    value = getattr(config, option.name)
    return HIDDEN if option.secret and value is not None else shown(value)


def _collect(cls: type[ProducerConfig]) -> dict[str, Option]:
    table: dict[str, Option] = {}
    for name, option in zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True):
        option.name = name
        option.java = name.replace("_", ".") if option.java == "" else option.java
        table[name] = option
    return table


#: Every option by its name, in the order of the documentation.
OPTIONS: dict[str, Option] = _collect(ProducerConfig)

#: How they are called elsewhere.
NAMES = Names(OPTIONS)


# ---------------------------------------------------------------- client ids

_producer_numbers = itertools.count(1)


def generate_client_id(
    transactional_id: str | None = None, numbers: Iterator[int] | None = None
) -> str:
    """The client id of a producer that was given none, as Java makes it.

    `producer-<transactional_id>`, else `producer-<n>` with the next of `numbers`; without
    `numbers`, of a counter that all producers of this process share.
    """
    if transactional_id is not None:
        return f"producer-{transactional_id}"
    return f"producer-{next(_producer_numbers if numbers is None else numbers)}"
