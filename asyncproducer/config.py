"""Every option of the producer: its type, default, range, meaning, and what it goes with.

`ProducerConfig` is the only table. Each field's default is an `Option`, which says how
a value is checked and what it is for. The same object stands for "not given", because
Kafka treats an option that was set differently from one that has its default: `acks=1`
switches an implied `enable_idempotence` off, but contradicts a demanded one. The Java
names, the names of environment variables, the error messages, `docs/options.md` and the
TypedDict in `options.py` (`python -m asyncproducer.cli.docs`) all come from this table.

A value goes this way: text of a mapping or of the environment is turned into numbers
and booleans (`Kind.from_text`); `Kind.parse` checks one option for itself; then `RULES`
compare options with each other, in the order of Java's ProducerConfig and KafkaProducer,
and fill in what follows from them. The fields of a finished config are what is in effect.

Messages name an option as this table does. Where it was given under another name, in a
mapping or in the environment, `_respelled` puts in the names that are used there.

Values that may be secret are in no message, `repr` or `explain`. Objects are shown by
the name of their type, since their own `repr` may hold anything.
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

import msgspec

from asyncproducer.errors import ConfigError
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
    "OPTIONS",
    "SASL_MECHANISMS",
    "Option",
    "Options",
    "ProducerConfig",
    "generate_client_id",
    "options_table",
]

logger = logging.getLogger("asyncproducer.config")

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

#: With more requests in flight a broker cannot put an idempotent producer's batches in order.
MAX_IN_FLIGHT_IDEMPOTENT = 5

SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
COMPRESSION_TYPES = ("none", "gzip", "snappy", "lz4", "zstd")
PARTITIONERS = ("default", "murmur2", "murmur3", "round_robin")
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

HIDDEN = "[hidden]"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _shown(value: object) -> object:
    """The value as a message may show it: plain values as they are, others by their name."""
    if _is_plain(value):
        return value
    if isinstance(value, tuple):
        return tuple(_shown(item) for item in value)
    return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------- kinds of values


class Kind:
    """One type of value. Subclasses say what is valid, and bring it into its normal form."""

    type_name = ""
    #: What a caller may pass, as an annotation: see options.py.
    annotation = ""
    #: The valid values, for the documentation.
    range = ""
    #: The same as a phrase that follows "must be".
    expected = ""

    def parse(self, value: Any) -> Any:
        """The normal form of a valid value. Raises ValueError for any other."""
        raise NotImplementedError

    def from_text(self, text: str) -> Any:
        """What a string from a mapping or from the environment stands for."""
        return text


class Number(Kind):
    """An int from `low` to `high`, without `holes`; with `fraction` a float as well."""

    def __init__(
        self,
        low: int,
        high: int,
        *,
        holes: tuple[int, ...] = (),
        fraction: bool = False,
        optional: bool = False,
    ) -> None:
        self.low = low
        self.high = high
        self.holes = holes
        self.fraction = fraction
        self.optional = optional
        self.type_name = ("float" if fraction else "int") + (" or None" if optional else "")
        self.annotation = self.type_name.replace(" or ", " | ")
        self.range = f"{_bound(low)}..{_bound(high)}"
        if holes:
            self.range += " without " + ", ".join(map(str, holes))
        self.expected = f"{'a number' if fraction else 'an int'} in {self.range}"

    def parse(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        types = (int, float) if self.fraction else int
        if isinstance(value, bool) or not isinstance(value, types):
            raise ValueError
        # Written so that NaN, which compares with nothing, is refused.
        if not self.low <= value <= self.high or value in self.holes:
            raise ValueError
        return value

    def from_text(self, text: str) -> int | float | None:
        text = text.strip()
        # int() alone would read "1_000" and digits of other scripts too.
        if re.fullmatch(r"[+-]?[0-9]{1,30}", text):
            return int(text)
        if self.fraction and re.fullmatch(r"[+-]?[0-9]{0,30}\.[0-9]{1,30}", text):
            return float(text)
        raise ValueError


def _bound(value: int) -> str:
    return {
        INT32_MAX: "2^31-1",
        INT64_MAX: "2^63-1",
        -INT32_MAX - 1: "-2^31",
        -INT64_MAX - 1: "-2^63",
    }.get(value, str(value))


class Flag(Kind):
    type_name = annotation = "bool"
    expected = "True or False"
    range = "True, False"

    def parse(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    def from_text(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in ("true", "false"):
            raise ValueError
        return word == "true"


class Text(Kind):
    """A str; None too if `optional`. `blank` says whether it may be empty."""

    def __init__(self, *, blank: bool = True, optional: bool = True) -> None:
        self.blank = blank
        self.optional = optional
        self.type_name = "str or None" if optional else "str"
        self.annotation = self.type_name.replace(" or ", " | ")
        self.range = "" if blank else "not empty"
        self.expected = "a str" if blank else "a str that is not empty"

    def parse(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if not isinstance(value, str) or not (value or self.blank):
            raise ValueError
        return value


class Path(Kind):
    type_name = "path or None"
    annotation = "str | os.PathLike[str] | None"
    expected = "a path: a str or an os.PathLike of str, not empty"
    range = ""

    def parse(self, value: Any) -> str | None:
        if value is None:
            return None
        path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path:
            raise ValueError
        return path


def _same(text: str) -> str:
    return text


class Choice(Kind):
    """One of some words. `words` maps what is written to what it means."""

    def __init__(
        self,
        words: Iterable[str] | Mapping[str, Any],
        *,
        fold: Callable[[str], str] = _same,
        none: Any = ...,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        self.words: Mapping[str, Any] = (
            words if isinstance(words, Mapping) else dict(zip(words, words, strict=True))
        )
        self.fold = fold
        self.none = none
        self.hints = hints or {}
        self.type_name = "str"
        self.annotation = "str" if none is ... else "str | None"
        self.range = ", ".join(word or '""' for word in self.words)
        self.expected = f"one of {self.range}"

    def parse(self, value: Any) -> Any:
        if value is None and self.none is not ...:
            return self.none
        if not isinstance(value, str):
            raise ValueError
        word = self.fold(value)
        if word in self.words:
            return self.words[word]
        raise ValueError(self.hints.get(word, ""))


class Acks(Choice):
    """`all`, `0`, `1` or `-1`, as Java writes them or as ints. Normal form: -1, 0, 1."""

    def __init__(self) -> None:
        super().__init__(
            {"all": -1, "-1": -1, "0": 0, "1": 1}, fold=lambda text: text.strip().lower()
        )
        self.type_name = "int or str"
        self.annotation = "int | str"

    def parse(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        return super().parse(value)


class Words(Kind):
    """Several words: a sequence, or a str with commas."""

    annotation = "str | Sequence[str]"

    def __init__(self, words: Collection[str] = ()) -> None:
        self.words = words
        self.type_name = "tuple of str"
        self.range = "some of " + ", ".join(words) if words else ""
        self.expected = f"a sequence of str, or a str with commas; {self.range or 'no duplicates'}"

    def parse(self, value: Any) -> tuple[str, ...]:
        words = _split(value)
        if len(set(words)) < len(words) or not all(words):
            raise ValueError("an entry is empty, or comes twice")
        if self.words and (not words or not set(words) <= set(self.words)):
            raise ValueError
        return words


def _split(value: Any) -> tuple[str, ...]:
    """The entries of a sequence of str, or of a str with commas, without spaces around them."""
    if isinstance(value, str):
        value = value.split(",") if value.strip() else []
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(item.strip() for item in value)


class Servers(Kind):
    """`host:port` entries. Normal form: without `proto://` and spaces, IPv6 in brackets.

    Java tolerates a `proto://`, and ignores it. `_check_protocols` does not.
    """

    type_name = "str, or sequence of str"
    annotation = "str | Sequence[str]"
    range = "host:port, ..."
    expected = "a str like 'host1:9092,host2:9092', or a sequence of such"

    def parse(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, Mapping):
            raise ValueError("a mapping of options goes to from_mapping")
        seen: dict[tuple[str, int], str] = {}
        for entry in _split(value):
            host, port = _parse_address(entry)
            # Host names do not differ by case, so neither do brokers.
            if (host.lower(), port) in seen:
                raise ConfigError(f"bootstrap_servers: {entry!r} comes twice")
            seen[host.lower(), port] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not seen:
            raise ConfigError("bootstrap_servers is empty: name at least one broker as host:port")
        return tuple(seen.values())


_PROTO = re.compile(r"([0-9a-zA-Z\-%._]*)://")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[0-9a-zA-Z\-%._]+)):(?P<port>[0-9]{1,5})")


def _parse_address(entry: str) -> tuple[str, int]:
    """(host, port) of `host:port`, `[ipv6]:port`, each perhaps with `proto://` before it."""
    if "@" in entry:
        # Not shown: what stands before the @ of an address is a user's name and password.
        raise ConfigError(
            "bootstrap_servers: an entry holds '@'. It takes host:port only;"
            " credentials go to sasl_username and sasl_password"
        )
    if not entry:
        raise ConfigError("bootstrap_servers: an entry is empty")
    proto = _PROTO.match(entry)
    address = entry[proto.end() :] if proto else entry
    match = _ADDRESS.fullmatch(address)
    if match is None or (match["v6"] and not _is_ipv6(match["v6"])):
        raise ConfigError(
            f"bootstrap_servers: {_cut(entry)!r} is neither host:port nor [ipv6-address]:port"
            + _with_port(address)
        )
    if not 1 <= int(match["port"]) <= 65535:
        raise ConfigError(f"bootstrap_servers: the port of {_cut(entry)!r} is not in 1..65535")
    return match["v6"] or match["name"], int(match["port"])


def _with_port(address: str) -> str:
    """What may have been meant by an address without a port. 9092 is Kafka's usual one."""
    match = _ADDRESS.fullmatch(f"{address.removesuffix(':')}:9092")
    if match is None or (match["v6"] and not _is_ipv6(match["v6"])):
        return ""
    return f": did you mean {_cut(match[0])!r}?"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


class Partitioning(Kind):
    """The name of a partitioner, or an object that partitions."""

    type_name = "str, or object"
    annotation = "PartitionerOption | None"
    range = ", ".join(PARTITIONERS) + ", a Partitioner, a callable"
    expected = f"one of {', '.join(PARTITIONERS)}, an object with .partition, or a callable"

    #: Names of other clients for what we have as well.
    synonyms = {  # noqa: RUF012 (a constant)
        "org.apache.kafka.clients.producer.RoundRobinPartitioner": "round_robin",
        "murmur2_random": "default",
    }

    #: librdkafka's names of what we do not have, by the hash of the key.
    foreign = {  # noqa: RUF012 (a constant)
        **dict.fromkeys(("consistent", "consistent_random"), "CRC32"),
        **dict.fromkeys(("fnv1a", "fnv1a_random"), "FNV-1a"),
    }

    def parse(self, value: Any) -> Any:
        if value is None:
            return "default"
        if isinstance(value, str):
            value = self.synonyms.get(value, value)
            if value in PARTITIONERS:
                return value
            if value.endswith(("DefaultPartitioner", "UniformStickyPartitioner")):
                raise ValueError("Kafka 4.0 removed this class; leave the option out")
            raise ValueError(self._hint(value))
        if isinstance(value, type):
            raise ValueError("give an instance, not the class")
        if callable(value) or callable(getattr(value, "partition", None)):
            return value
        raise ValueError

    def _hint(self, name: str) -> str:
        if name == "random":
            return "set partitioner_ignore_keys, which places all records as those without a key"
        if name not in self.foreign:
            return ""
        own = "lambda topic, key, value: zlib.crc32(key or b'') % topic.partition_count"
        same = f", as in {own}" if self.foreign[name] == "CRC32" else ""
        return (
            f"librdkafka places keys by {self.foreign[name]}, and there is nothing here that does:"
            " they would go to other partitions than before. 'murmur2_random' places them as"
            " Java's clients do; to keep each key where it is, give a function that computes"
            f" {self.foreign[name]}{same}"
        )


class Context(Kind):
    type_name = "ssl.SSLContext"
    annotation = "SSLContext | None"
    expected = "an ssl.SSLContext"
    range = ""

    def parse(self, value: Any) -> Any:
        # By its method: this module does not import ssl, see above.
        if value is None or (not isinstance(value, type) and hasattr(value, "wrap_bio")):
            return value
        raise ValueError


class Provider(Kind):
    type_name = "async callable"
    annotation = "TokenProvider | None"
    expected = "an async callable without arguments that returns a token"
    range = ""

    def parse(self, value: Any) -> Any:
        if value is None or (callable(value) and not isinstance(value, type)):
            return value
        if callable(getattr(value, "token", None)) and not isinstance(value, type):
            raise ValueError("pass its method: provider.token")
        raise ValueError


# ---------------------------------------------------------------- the options


class Option:
    """The declaration of one option, and at once the mark of a field that was not given."""

    __slots__ = ("aliases", "default", "doc", "java", "kind", "later", "name", "required", "secret")

    def __init__(
        self,
        default: object,
        kind: Kind,
        doc: str,
        *,
        java: str | None,
        aliases: tuple[str, ...],
        later: str,
        secret: bool,
    ) -> None:
        self.name = ""
        self.required = default is ...
        self.default = None if self.required else default
        self.kind = kind
        self.doc = doc
        self.java = java
        self.aliases = aliases
        #: Not empty: only the default is accepted until the feature named here exists.
        self.later = later
        self.secret = secret

    def __repr__(self) -> str:
        return f"<option {self.name}>"

    def parse(self, value: object) -> Any:
        """The value in its normal form. Raises ConfigError when it is not valid."""
        try:
            return self.kind.parse(value)
        except ConfigError:
            raise
        except ValueError as error:
            hint = str(error)
        if not hint and isinstance(value, str) and isinstance(self.kind, (Number, Flag)):
            hint = "strings are read as numbers and booleans by from_mapping and from_env only"
        raise _invalid(self, self.name, value, hint) from None

    def from_text(self, label: str, text: str) -> Any:
        """What a text found under the name `label` stands for. Raises ConfigError."""
        try:
            return self.kind.from_text(text)
        except ValueError:
            raise _invalid(self, label, text) from None


def _invalid(option: Option, label: str, value: object, hint: str = "") -> ConfigError:
    if isinstance(value, int) and value.bit_length() > 128:
        got = f"an int of {value.bit_length()} bits"  # repr() refuses very long ones
    elif _is_plain(value) and not option.secret:
        got = f"{_cut(repr(value))} ({type(value).__name__})"
    else:
        got = f"a value of type {type(value).__name__}"
    return ConfigError(
        f"{label} must be {option.kind.expected}, not {got}" + (f": {hint}" if hint else "")
    )


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


INT32 = Number(0, INT32_MAX)
INT64 = Number(0, INT64_MAX)
ANY_INT32 = Number(-INT32_MAX - 1, INT32_MAX)
ANY_INT64 = Number(-INT64_MAX - 1, INT64_MAX)
BUFFER_SIZE = Number(-1, INT32_MAX)
DECIMAL = Number(-INT64_MAX - 1, INT64_MAX, fraction=True)
FLAG = Flag()
TEXT = Text()

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
            return super().__call__(**_canonical(options))


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
        60_000, INT64, "How long a send may wait for metadata and buffer room together."
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
        -1, Number(-1, 9, holes=(0,)), "Level of gzip; -1 is zlib's default."
    )
    compression_lz4_level: int = _option(
        9, Number(1, 17), "Level of lz4; 9 is the fast compressor, any other is LZ4 HC."
    )
    compression_zstd_level: int = _option(3, Number(-131_072, 22), "Level of zstd.")
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
        131_072, BUFFER_SIZE, "SO_SNDBUF of the sockets. -1: as the system has it."
    )
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
        None, Text(blank=False), "Name under which transactions survive a restart.",
        later="transactions"
    )  # fmt: skip
    transaction_timeout_ms: int = _option(
        60_000, ANY_INT32, "A broker aborts a transaction that is open for so long.",
        later="transactions"
    )  # fmt: skip
    transaction_two_phase_commit_enable: bool = _option(
        False, FLAG, "Take part in a two-phase commit (KIP-939).", later="transactions"
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
        for rule in RULES:
            rule(values, given)
        _check_protocols(self.bootstrap_servers, values["security_protocol"])
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
        replaced = _canonical(over)
        options: dict[str, Any] = {}
        sources: dict[str, str] = {}
        try:
            for key, value in mapping.items():
                if not isinstance(key, str):
                    raise ConfigError(f"the names of options are str, not {_shown(key)!r}")
                translated = _translate(key, value)
                if translated is None:
                    continue
                name, option_value = translated
                if name in sources:
                    raise ConfigError(
                        f"{sources[name]!r} and {key!r} set the same option: keep one"
                    )
                sources[name] = key
                options[name] = option_value
            _drop_java_defaults(options, replaced)
            return cls(**{**options, **replaced})
        except ConfigError as error:
            spelled = sources | {name: name for name in replaced}
            raise _respelled(error, lambda name: spelled.get(name) or _dotted(name)) from None

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
        replaced = _canonical(over)
        options: dict[str, Any] = {}
        sources: dict[str, str] = {}
        try:
            for variable, text in (os.environ if environ is None else environ).items():
                word = variable.removeprefix(prefix)
                if not variable.startswith(prefix) or word != word.upper():
                    continue
                name = ALIASES.get(word.lower(), word.lower())
                option = OPTIONS.get(name)
                if option is None:
                    _check_stray_variable(variable, name, prefix)
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
            raise _respelled(
                error, lambda name: spelled.get(name) or _variable(prefix, name)
            ) from None

    def replace(self, **options: Unpack[Options]) -> ProducerConfig:
        """A config from the options that were given to this one, and these.

        What was derived is derived anew. Raises ConfigError.
        """
        return type(self)(**{**self._options, **_canonical(options)})

    # ------------------------------------------------------------ what follows from the options

    @property
    def explicit(self) -> frozenset[str]:
        """The names of the options that were given, even with their default value."""
        return frozenset(self._options)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """`bootstrap_servers` as (host, port), IPv6 addresses without brackets."""
        return tuple(_parse_address(entry) for entry in self.bootstrap_servers)

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
    return HIDDEN if option.secret and value is not None else _shown(value)


def _collect(cls: type[ProducerConfig]) -> dict[str, Option]:
    table: dict[str, Option] = {}
    for name, option in zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True):
        option.name = name
        option.java = name.replace("_", ".") if option.java == "" else option.java
        table[name] = option
    return table


#: Every option by its name, in the order of the documentation.
OPTIONS: dict[str, Option] = _collect(ProducerConfig)

#: Other snake_case names of an option, as aiokafka and Java's have them.
ALIASES: dict[str, str] = {
    alias: option.name for option in OPTIONS.values() for alias in option.aliases
}

#: Dotted name -> option: Java's names, and our own options written with dots.
DOTTED: dict[str, str] = {
    **{name.replace("_", "."): name for name in OPTIONS},
    **{alias.replace("_", "."): name for alias, name in ALIASES.items()},
    **{option.java: option.name for option in OPTIONS.values() if option.java},
}


# ---------------------------------------------------------------- names


class Foreign(NamedTuple):
    """Which option a name of librdkafka stands for, and how its values are written here."""

    option: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


def _if(this: object, then: object) -> Callable[[Any], Any]:
    return lambda value: then if type(value) is type(this) and value == this else value


def _kilobytes(value: Any) -> Any:
    return value * 1024 if type(value) is int else value


#: librdkafka's names, as far as they differ from Java's. (CONFIGURATION.md of librdkafka)
LIBRDKAFKA: dict[str, Foreign] = {
    "metadata.broker.list": Foreign("bootstrap_servers"),
    "request.required.acks": Foreign("acks"),
    "message.send.max.retries": Foreign("retries"),
    "message.timeout.ms": Foreign("delivery_timeout_ms", _if(0, INT32_MAX), "0 is 2^31-1"),
    "queue.buffering.max.ms": Foreign("linger_ms"),
    "queue.buffering.max.kbytes": Foreign("buffer_memory", _kilobytes, "times 1024"),
    "message.max.bytes": Foreign("max_request_size"),
    "max.in.flight": Foreign("max_in_flight_requests_per_connection"),
    "compression.codec": Foreign("compression_type"),
    "compression.level": Foreign("compression_level", _if(-1, None), "-1 is None"),
    "socket.send.buffer.bytes": Foreign("send_buffer_bytes", _if(0, -1), "0 is -1"),
    "socket.receive.buffer.bytes": Foreign("receive_buffer_bytes", _if(0, -1), "0 is -1"),
    "sasl.mechanisms": Foreign("sasl_mechanism"),
    "ssl.ca.location": Foreign("ssl_cafile"),
    "ssl.ca.pem": Foreign("ssl_truststore_certificates"),
    "ssl.certificate.location": Foreign("ssl_certfile"),
    "ssl.certificate.pem": Foreign("ssl_keystore_certificate_chain"),
    "ssl.key.location": Foreign("ssl_keyfile"),
    "ssl.key.pem": Foreign("ssl_keystore_key"),
    "ssl.endpoint.identification.algorithm": Foreign(
        "ssl_endpoint_identification_algorithm", _if("none", ""), "none is empty"
    ),
}


#: Java's default of options where ours is another, as we do not have the feature. In a mapping it
#: is dropped, since it may be there only because somebody wrote out all options; but not beside
#: one of the options that follow, with which it means something.
JAVA_DEFAULTS: dict[str, tuple[object, tuple[str, ...]]] = {
    "enable_metrics_push": (True, ()),
    "metadata_cluster_check_enable": (True, ()),
    "sasl_mechanism": ("GSSAPI", ()),
    "ssl_truststore_type": ("JKS", ("ssl_truststore_location", "ssl_truststore_certificates")),
    "ssl_keystore_type": (
        "JKS",
        ("ssl_keystore_location", "ssl_keystore_certificate_chain", "ssl_keystore_key"),
    ),
}


def _drop_java_defaults(options: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, (default, others) in JAVA_DEFAULTS.items():
        if options.get(name) == default and all(
            over.get(other, options.get(other)) is None for other in others
        ):
            del options[name]


class Refused(NamedTuple):
    """An option of other clients that we do not have: why, and Java's default.

    None and that default are accepted and dropped, since some programs write out
    all of Java's options: they ask for nothing.
    """

    hint: str
    default: object = None


_ARGUMENT = "it is an argument of Producer, not an option"
_JVM = "it is about Java's own machinery"
_KERBEROS = "not supported yet: GSSAPI (Kerberos)"
_OAUTH = "not supported yet: fetching OAuth tokens. Set sasl_oauth_token_provider"
_REFRESH = "sasl_oauth_token_provider is asked for a token whenever it is needed"
_PEM_PASSWORD = "PEM files have no such password; ssl_password opens the key"
_NO_OPTION = "nothing here corresponds to it"
_DELIVERIES = (
    "each send has its own outcome: await it, or call add_done_callback of what enqueue returns"
)
_LOGGER = "set the level and the handlers of Python's logger 'asyncproducer'"
_JWT = "org.apache.kafka.common.security.oauthbearer.DefaultJwt"

#: snake_case name -> why we refuse it.
REFUSED: dict[str, Refused] = {
    "key_serializer": Refused(_ARGUMENT),
    "value_serializer": Refused(_ARGUMENT),
    "interceptor_classes": Refused(f"{_ARGUMENT} (interceptors=)", ""),
    "interceptors": Refused(_ARGUMENT),
    "metric_reporters": Refused(
        "not supported yet: metric reporters", "org.apache.kafka.common.metrics.JmxReporter"
    ),
    "auto_include_jmx_reporter": Refused(_JVM),
    "config_providers": Refused("not supported yet: config providers", ""),
    "security_providers": Refused(f"not supported yet: {_JVM}"),
    "sasl_jaas_config": Refused("not supported: set sasl_username and sasl_password"),
    "sasl_login_refresh_window_factor": Refused(_REFRESH, 0.8),
    "sasl_login_refresh_window_jitter": Refused(_REFRESH, 0.05),
    "sasl_login_refresh_min_period_seconds": Refused(_REFRESH, 60),
    "sasl_login_refresh_buffer_seconds": Refused(_REFRESH, 300),
    "sasl_login_retry_backoff_ms": Refused(_OAUTH, 100),
    "sasl_login_retry_backoff_max_ms": Refused(_OAUTH, 10_000),
    "sasl_login_connect_timeout_ms": Refused(_OAUTH),
    "sasl_login_read_timeout_ms": Refused(_OAUTH),
    "sasl_login_class": Refused(_JVM),
    "sasl_login_callback_handler_class": Refused(_JVM),
    "sasl_client_callback_handler_class": Refused(_JVM),
    "sasl_oauthbearer_token_endpoint_url": Refused(_OAUTH),
    "sasl_oauthbearer_scope_claim_name": Refused(_OAUTH, "scope"),
    "sasl_oauthbearer_sub_claim_name": Refused(_OAUTH, "sub"),
    "sasl_oauthbearer_clock_skew_seconds": Refused(_OAUTH, 30),
    "sasl_oauthbearer_header_urlencode": Refused(_OAUTH, False),
    "sasl_oauthbearer_expected_audience": Refused(_OAUTH, ""),
    "sasl_oauthbearer_assertion_algorithm": Refused(_OAUTH, "RS256"),
    "sasl_oauthbearer_assertion_claim_jti_include": Refused(_OAUTH, False),
    "sasl_oauthbearer_assertion_claim_exp_seconds": Refused(_OAUTH, 300),
    "sasl_oauthbearer_assertion_claim_nbf_seconds": Refused(_OAUTH, 60),
    "sasl_oauthbearer_jwt_retriever_class": Refused(_OAUTH, f"{_JWT}Retriever"),
    "sasl_oauthbearer_jwt_validator_class": Refused(_OAUTH, f"{_JWT}Validator"),
    "sasl_oauthbearer_jwks_endpoint_refresh_ms": Refused(_OAUTH, 3_600_000),
    "sasl_oauthbearer_jwks_endpoint_retry_backoff_ms": Refused(_OAUTH, 100),
    "sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms": Refused(_OAUTH, 10_000),
    "sasl_kerberos_service_name": Refused(_KERBEROS),
    "sasl_kerberos_domain_name": Refused(_KERBEROS),
    "sasl_kerberos_kinit_cmd": Refused(_KERBEROS, "/usr/bin/kinit"),
    "sasl_kerberos_ticket_renew_window_factor": Refused(_KERBEROS, 0.8),
    "sasl_kerberos_ticket_renew_jitter": Refused(_KERBEROS, 0.05),
    "sasl_kerberos_min_time_before_relogin": Refused(_KERBEROS, 60_000),
    "ssl_protocol": Refused("set ssl_enabled_protocols", "TLSv1.3"),
    "ssl_provider": Refused(_JVM),
    "ssl_keymanager_algorithm": Refused(_JVM, "SunX509"),
    "ssl_trustmanager_algorithm": Refused(_JVM, "PKIX"),
    "ssl_secure_random_implementation": Refused(_JVM),
    "ssl_engine_factory_class": Refused("set ssl_context"),
    "ssl_keystore_password": Refused(_PEM_PASSWORD),
    "ssl_truststore_password": Refused(_PEM_PASSWORD),
    # aiokafka and kafka-python
    "ssl_check_hostname": Refused('to switch it off set ssl_endpoint_identification_algorithm=""'),
    "ssl_ciphers": Refused("set ssl_cipher_suites"),
    "loop": Refused("the producer uses the loop that it is started in"),
    "api_version": Refused("versions are agreed on with each broker", "auto"),
    # librdkafka
    "batch_num_messages": Refused("batches are bounded in bytes: set batch_size"),
    "queue_buffering_max_messages": Refused("the buffer is bounded in bytes: set buffer_memory"),
    "queue_buffering_backpressure_threshold": Refused(_NO_OPTION),
    "socket_timeout_ms": Refused("set request_timeout_ms"),
    "topic_metadata_refresh_interval_ms": Refused("set metadata_max_age_ms"),
    "api_version_request": Refused("versions are agreed on with each broker", True),
    "broker_version_fallback": Refused("versions are agreed on with each broker"),
    "broker_address_family": Refused(_NO_OPTION, "any"),
    "socket_keepalive_enable": Refused(_NO_OPTION, False),
    "socket_nagle_disable": Refused("it always is", True),
    "enable_ssl_certificate_verification": Refused("give an ssl_context that does not", True),
    "sticky_partitioning_linger_ms": Refused("the partition changes by bytes: set batch_size"),
    "oauth_cb": Refused("set sasl_oauth_token_provider"),
    "error_cb": Refused(
        "errors are raised by the calls and by the deliveries, and what is retried is logged;"
        " Producer.health tells whether brokers can be reached"
    ),
    "stats_cb": Refused("call Producer.metrics() whenever you want them"),
    "throttle_cb": Refused("produce_throttle_time_avg of Producer.metrics() tells"),
    **dict.fromkeys(("on_delivery", "dr_cb", "dr_msg_cb"), Refused(_DELIVERIES)),
    "delivery_report_only_error": Refused(_DELIVERIES, False),
    "statistics_interval_ms": Refused("call Producer.metrics() whenever you want them", 0),
    **dict.fromkeys(("log_cb", "logger", "log_level"), Refused(_LOGGER)),
    "debug": Refused(_LOGGER, ""),
    "log_connection_close": Refused(f"it is not needed, leave it out: {_LOGGER}", True),
    # consumers
    **dict.fromkeys(
        (
            "group_id",
            "auto_offset_reset",
            "enable_auto_commit",
            "session_timeout_ms",
            "isolation_level",
            "max_poll_records",
        ),
        Refused("it is an option of consumers"),
    ),
}

#: Names with these beginnings are refused as a family.
REFUSED_FAMILIES: dict[str, Refused] = {
    "sasl_oauthbearer_": Refused(_OAUTH),
    "sasl_kerberos_": Refused(_KERBEROS),
    "schema_registry_": Refused("it goes to the serializer"),
    "config_providers_": Refused("not supported yet: config providers"),
}


def _refused(name: str) -> Refused | None:
    if name in REFUSED:
        return REFUSED[name]
    families = (known for start, known in REFUSED_FAMILIES.items() if name.startswith(start))
    return next(families, None)


def _refuse(label: str, refused: Refused, value: object) -> None:
    """Raise, unless the value asks for nothing: None, an empty list, Java's default."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return
    if not _is_same(value, refused.default):
        raise ConfigError(f"{label!r} is not an option here: {refused.hint}")


def _is_same(value: object, default: object) -> bool:
    """Whether a value, perhaps in text, is Java's default."""
    if default is None:
        return False
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        # As numbers: Java's documentation writes 0.80, and its log 0.8.
        try:
            return bool((DECIMAL.from_text(value) if isinstance(value, str) else value) == default)
        except ValueError:
            return False
    return str(_shown(value)).lower() == str(default).lower()


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, tuple(names), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options by their own names. Raises ConfigError for names that are none."""
    known: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if name not in OPTIONS:
            _unknown(given, value)
            continue
        if name in sources:
            raise ConfigError(f"{sources[name]!r} and {given!r} are the same option: keep one")
        sources[name] = given
        known[name] = value
    return known


#: What the Producer takes beside the options: a typo there ends up here.
_PRODUCER_ARGUMENTS = (
    "close_timeout",
    "config",
    "connector",
    "interceptors",
    "key_serializer",
    "value_serializer",
)


def _unknown(name: str, value: object) -> None:
    """Raise with the best advice there is for a snake_case name that is no option."""
    refused = _refused(name)
    if refused is not None:
        _refuse(name, refused, value)
    elif name in DOTTED or name in LIBRDKAFKA:
        here = DOTTED.get(name) or LIBRDKAFKA[name].option
        raise ConfigError(f"{name!r} is written {here!r} here; from_mapping takes dotted names")
    elif name.replace("_", ".") in LIBRDKAFKA:
        here = LIBRDKAFKA[name.replace("_", ".")].option
        raise ConfigError(f"{name!r} is written {here!r} here")
    else:
        known = [*OPTIONS, *ALIASES, *_PRODUCER_ARGUMENTS]
        raise ConfigError(f"unknown option {name!r}{_nearest(name, known)}")


def _translate(key: str, value: Any) -> tuple[str, Any] | None:
    """(option, value) for a dotted name; None if it asks for nothing. Raises ConfigError."""
    foreign = LIBRDKAFKA.get(key) or Foreign(DOTTED.get(key, ""))
    option = OPTIONS.get(foreign.option)
    if option is not None:
        if isinstance(value, str):
            value = _as_logged(option, value)
        if isinstance(value, str):
            value = option.from_text(key, value)
        return option.name, foreign.convert(value)
    refused = _refused(key.replace(".", "_"))
    if refused is not None:
        if isinstance(value, str):
            value = None if value == "null" else _unbracketed(value).removeprefix("class ")
        _refuse(key, refused, value)
        return None
    snake = ALIASES.get(key, key)
    if snake not in OPTIONS and snake.replace("_", ".") in LIBRDKAFKA:
        snake = LIBRDKAFKA[snake.replace("_", ".")].option
    if snake in OPTIONS:
        raise ConfigError(f"{key!r} is written {_dotted(snake)!r} in a mapping")
    raise ConfigError(f"unknown option {key!r}{_nearest(key, [*DOTTED, *LIBRDKAFKA])}")


def _as_logged(option: Option, text: str) -> str | None:
    """A text without what Java's log adds: it shows null as `null`, and lists in brackets."""
    nullable = option.default is None or isinstance(option.kind, Partitioning)
    if text == "null" and nullable and option.java:
        return None
    return _unbracketed(text) if isinstance(option.kind, (Servers, Words)) else text


def _unbracketed(text: str) -> str:
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _dotted(name: str) -> str:
    """How an option is written in a mapping."""
    return OPTIONS[name].java or name.replace("_", ".")


def _variable(prefix: str, name: str) -> str:
    """The environment variable of an option; its own name if a text cannot stand for it."""
    if isinstance(OPTIONS[name].kind, (Context, Provider)):
        return name
    return prefix + name.upper()


#: The name of an option in a message. What is in quotes is somebody's value, or a name that is
#: meant as it stands; they are matched so that nothing within them is.
_NAME = re.compile(
    r"(?<!\w)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    rf"|(?<![\w.])(?P<name>{'|'.join(OPTIONS)})(?!\w|\.\w)"
)


def _respelled(error: ConfigError, spell: Callable[[str], str]) -> ConfigError:
    """The same error, with the names that the user writes for the options."""
    notes: dict[str, str] = {}

    def respell(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return match[0]
        spelled = spell(name)
        if spelled in LIBRDKAFKA and spelled != _dotted(name):
            note = LIBRDKAFKA[spelled].note
            notes[spelled] = f"{spelled} is {name} here" + (f", {note}" if note else "")
        return spelled

    message = _NAME.sub(respell, str(error))
    return ConfigError(message + (f" ({'; '.join(notes.values())})" if notes else ""))


def _check_stray_variable(variable: str, name: str, prefix: str) -> None:
    """Raise ConfigError if this variable was probably meant for us."""
    refused = _refused(name)
    if refused is not None and refused.hint.startswith("not supported"):
        raise ConfigError(f"{variable}: {refused.hint}")
    for known in (*OPTIONS, *ALIASES):
        if _distance(name, known) <= (1 if len(known) < 8 else 2):
            raise ConfigError(
                f"{variable} is not an option: did you mean {prefix}{known.upper()}?"
                " (If it belongs to other software, give from_env another prefix.)"
            )


def _distance(a: str, b: str) -> int:
    """How many characters must be changed, added or left out to make `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        above, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (left != right)))
    return row[-1]


# ---------------------------------------------------------------- options among each other


Values: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Values, Collection[str]], None]


def _check_sasl_mechanism(values: Values, given: Collection[str]) -> None:
    protocol = values["security_protocol"]
    if protocol.startswith("SASL_") and values["sasl_mechanism"] is None:
        raise ConfigError(
            f"security_protocol={protocol} needs a sasl_mechanism: {', '.join(SASL_MECHANISMS)}"
            " (Java's default, GSSAPI, is not supported yet)"
        )


def _check_idempotence(values: Values, given: Collection[str]) -> None:
    """Java: ProducerConfig.postProcessAndValidateIdempotenceConfigs, as of 4.0."""
    if not values["enable_idempotence"]:
        return
    spoilers = []
    if values["retries"] == 0:
        spoilers.append("retries=0")
    if values["acks"] != -1:
        spoilers.append(f"acks={values['acks']}")
    if spoilers and "enable_idempotence" in given:
        raise ConfigError(
            f"enable_idempotence=True contradicts {' and '.join(spoilers)}:"
            " it needs acks='all' and retries above 0"
        )
    # Also when idempotence is about to be switched off: only an explicit False lifts the limit.
    in_flight = values["max_in_flight_requests_per_connection"]
    if in_flight > MAX_IN_FLIGHT_IDEMPOTENT:
        raise ConfigError(
            f"max_in_flight_requests_per_connection={in_flight} is more than"
            f" {MAX_IN_FLIGHT_IDEMPOTENT}, the most that the idempotent producer may have:"
            " lower it, or set enable_idempotence=False"
        )
    if spoilers:
        logger.info("idempotence is off because of %s", " and ".join(spoilers))
        values["enable_idempotence"] = False


def _check_transactional_id(values: Values, given: Collection[str]) -> None:
    if values["transactional_id"] is not None and not values["enable_idempotence"]:
        raise ConfigError(
            "transactional_id needs idempotence: leave enable_idempotence, acks and retries"
            " as they are by default"
        )


def _check_two_phase_commit(values: Values, given: Collection[str]) -> None:
    # KIP-939: who takes part in a two-phase commit leaves its timing to the coordinator of it.
    if values["transaction_two_phase_commit_enable"] and "transaction_timeout_ms" in given:
        raise ConfigError(
            "transaction_timeout_ms cannot be set with transaction_two_phase_commit_enable=True"
        )


def _resolve_delivery_timeout(values: Values, given: Collection[str]) -> None:
    values["linger_ms"] = linger = min(values["linger_ms"], INT32_MAX)
    request = values["request_timeout_ms"]
    timeout = values["delivery_timeout_ms"]
    least = min(INT32_MAX, math.ceil(linger + request))
    if timeout >= least:
        return
    if "delivery_timeout_ms" in given:
        raise ConfigError(
            f"delivery_timeout_ms={timeout} is less than linger_ms={linger} plus"
            f" request_timeout_ms={request}: it must be at least {least}"
        )
    logger.warning(
        "delivery_timeout_ms is raised from its default to linger_ms + request_timeout_ms = %d",
        least,
    )
    values["delivery_timeout_ms"] = least


def _check_memory(values: Values, given: Collection[str]) -> None:
    # Every batch takes batch_size at once. Java starts, and then each of its sends fails.
    size, memory = values["batch_size"], values["buffer_memory"]
    if size > memory:
        raise ConfigError(
            f"batch_size={size} is more than buffer_memory={memory}: no batch would ever fit;"
            " lower batch_size or raise buffer_memory"
        )


def _check_max_idle(values: Values, given: Collection[str]) -> None:
    # To Java it is a time, and each use makes a new connection; to librdkafka it means never.
    if values["connections_max_idle_ms"] == 0:
        raise ConfigError(
            "connections_max_idle_ms=0 would close a connection as soon as nothing is under way:"
            " -1 keeps it for ever, the default closes it after 540000 ms"
        )


def _check_rack(values: Values, given: Collection[str]) -> None:
    if values["partitioner_rack_aware"] and not values["client_rack"].strip():
        raise ConfigError("partitioner_rack_aware=True needs a client_rack")


def _refuse_later(values: Values, given: Collection[str]) -> None:
    # After Java's own rules, which then need no change when the feature is built.
    for name in given:
        option = OPTIONS[name]
        if option.later and values[name] != option.default:
            raise ConfigError(f"not supported yet: {option.later} ({name}={values[name]!r})")


def _check_security_protocol(values: Values, given: Collection[str]) -> None:
    """Java only logs options that are not used. Who set one of these expects to be protected."""
    protocol = values["security_protocol"]
    for start, used, fitting in (
        ("ssl_", protocol.endswith("SSL"), "SSL or SASL_SSL"),
        ("sasl_", protocol.startswith("SASL_"), "SASL_SSL or SASL_PLAINTEXT"),
    ):
        names = [n for n in given if n.startswith(start) and values[n] != OPTIONS[n].default]
        if used or not names:
            continue
        if "security_protocol" not in given:
            raise ConfigError(
                f"{', '.join(names)} would have no effect: set security_protocol to {fitting}"
            )
        logger.warning(
            "unused options: %s have no effect with security_protocol=%s",
            ", ".join(names),
            protocol,
        )


def _check_protocols(servers: Any, protocol: str) -> None:
    """Raise if an address of bootstrap_servers, as it was given, is of another protocol.

    Names of listeners, as in advertised.listeners, may be there too: they say nothing.
    """
    for entry in _split(servers):
        match = _PROTO.match(entry)
        written = match[1].upper() if match else ""
        if written in SECURITY_PROTOCOLS and written != protocol:
            raise ConfigError(
                f"bootstrap_servers: {_cut(entry)!r} contradicts security_protocol={protocol}:"
                f" set security_protocol to {written}, or leave {written}:// out"
            )


def _check_credentials(values: Values, given: Collection[str]) -> None:
    if not values["security_protocol"].startswith("SASL_"):
        return
    mechanism = values["sasl_mechanism"]
    password = ("sasl_username", "sasl_password")
    token = ("sasl_oauth_token_provider",)
    needed, foreign = (token, password) if mechanism == "OAUTHBEARER" else (password, token)
    missing = [name for name in needed if values[name] is None]
    if missing:
        raise ConfigError(f"sasl_mechanism={mechanism} needs {' and '.join(missing)}")
    extra = [name for name in foreign if values[name] is not None]
    if extra:
        raise ConfigError(f"sasl_mechanism={mechanism} does not go with {' and '.join(extra)}")


def _resolve_ssl(values: Values, given: Collection[str]) -> None:
    if values["ssl_context"] is not None:
        others = [
            name
            for name in given
            if name.startswith("ssl_")
            and name != "ssl_context"
            and values[name] != OPTIONS[name].default
        ]
        if others:
            raise ConfigError(
                f"{', '.join(others)} would have no effect beside ssl_context: set it up there"
            )
    _only_one(values, "ssl_cafile", "ssl_truststore_location", "ssl_truststore_certificates")
    _only_one(values, "ssl_certfile", "ssl_keystore_location", "ssl_keystore_certificate_chain")
    _together(values, "ssl_keystore_certificate_chain", "ssl_keystore_key")
    if values["ssl_keyfile"] is not None and values["ssl_certfile"] is None:
        raise ConfigError("ssl_keyfile needs ssl_certfile")
    if values["ssl_truststore_location"] is not None:
        values["ssl_cafile"] = values["ssl_truststore_location"]
    if values["ssl_keystore_location"] is not None:
        values["ssl_certfile"] = values["ssl_keystore_location"]


def _only_one(values: Values, *names: str) -> None:
    present = [name for name in names if values[name] is not None]
    if len(present) > 1:
        raise ConfigError(f"{' and '.join(present)} say the same in two ways: keep one")


def _together(values: Values, *names: str) -> None:
    missing = [name for name in names if values[name] is None]
    if missing and len(missing) < len(names):
        raise ConfigError(f"{' and '.join(names)} belong together: {missing[0]} is missing")


def _resolve_backoffs(values: Values, given: Collection[str]) -> None:
    # Java: who sets only the first pause between connects wants it constant.
    if "reconnect_backoff_ms" in given and "reconnect_backoff_max_ms" not in given:
        values["reconnect_backoff_max_ms"] = values["reconnect_backoff_ms"]
    for first, largest in (
        ("retry_backoff_ms", "retry_backoff_max_ms"),
        ("reconnect_backoff_ms", "reconnect_backoff_max_ms"),
        ("socket_connection_setup_timeout_ms", "socket_connection_setup_timeout_max_ms"),
    ):
        if values[first] > values[largest]:
            logger.warning(
                "%s=%d is more than %s=%d: it is always %d ms",
                first,
                values[first],
                largest,
                values[largest],
                values[largest],
            )
            values[first] = values[largest]


def _resolve_compression_level(values: Values, given: Collection[str]) -> None:
    codec = values["compression_type"]
    name = f"compression_{codec}_level"
    level = values["compression_level"]
    if level is not None:
        if name not in OPTIONS:
            raise ConfigError(f"compression_level={level}: compression_type={codec} has no levels")
        if name in given:
            raise ConfigError(f"compression_level and {name} say the same: keep one")
        kind = OPTIONS[name].kind
        try:
            values[name] = kind.parse(level)
        except ValueError:
            raise ConfigError(
                f"compression_level={level} is out of range: for {codec} it must be {kind.expected}"
            ) from None
    values["compression_level"] = values.get(name)


def _resolve_batch_size(values: Values, given: Collection[str]) -> None:
    values["batch_size"] = max(1, values["batch_size"])


#: What options demand of each other and what follows from them. The order up to
#: _check_rack is Java's, and so decides which of several errors is told.
RULES: tuple[Rule, ...] = (
    _check_sasl_mechanism,
    _check_idempotence,
    _check_transactional_id,
    _check_two_phase_commit,
    _resolve_delivery_timeout,
    _check_rack,
    _refuse_later,
    _check_security_protocol,
    _check_credentials,
    _resolve_ssl,
    _resolve_backoffs,
    _resolve_compression_level,
    _resolve_batch_size,
    _check_memory,
    _check_max_idle,
)


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


# ---------------------------------------------------------------- documentation

_INTRODUCTION = """\
# Options

<!-- Generated: python -m asyncproducer.cli.docs -->

Options are Java's, in snake_case: `Producer("localhost:9092", linger_ms=20)`. The defaults are
those of Kafka 4 unless the text says otherwise. An option that is unknown, out of range, not
supported or in contradiction to another one raises `ConfigError`; nothing is ignored silently.

There are three other ways to give options:

- `ProducerConfig.from_mapping(mapping)` takes Java's dotted names, or librdkafka's (see below).
  Values may be text: `"true"`, `"20"`. An option set under two names is an error. A dump of all of
  Java's options loads: what has Java's default asks for nothing, where we do not have it.
- `ProducerConfig.from_env(prefix="KAFKA_")` takes `KAFKA_LINGER_MS` for `linger_ms` and so on.
  Variables that are no option are ignored, since `KAFKA_HOME`, `KAFKA_OPTS` and others belong to
  other software, except those within one or two typing errors of an option, and the names below
  that are not supported yet: they are errors. Beside a broker, whose containers use such names
  too, choose another prefix.
- `ProducerConfig(...)` itself, with the same checks.

An error names the options as they were given: `linger_ms`, `linger.ms` or `KAFKA_LINGER_MS`. For
type checkers and editors, `asyncproducer.config.Options` is a TypedDict of all options.

`config.replace(...)` changes options, `config.explain()` shows what is in effect.
"""


def options_table() -> str:
    """All options and names as Markdown: the text of docs/options.md."""
    core = [o for o in OPTIONS.values() if not _is_security(o)]
    security = [o for o in OPTIONS.values() if _is_security(o)]
    head = ("option", "Java", "type", "default", "valid", "meaning")
    parts = [
        _INTRODUCTION,
        "## Sending\n",
        _table(head, map(_option_row, core)),
        "## Security\n",
        _table(head, map(_option_row, security)),
        "## Other names\n",
        "Aliases among the options:\n",
        _table(
            ("alias", "option"), ((f"`{alias}`", f"`{name}`") for alias, name in ALIASES.items())
        ),
        "librdkafka's names in `from_mapping`, where they differ from Java's:\n",
        _table(
            ("librdkafka", "option", "value"),
            ((f"`{name}`", f"`{f.option}`", f.note) for name, f in LIBRDKAFKA.items()),
        ),
        "## Not supported\n",
        "These names of other clients are refused with a hint. Java's default is accepted and "
        "dropped.\n",
        _table(("name", "why"), ((f"`{n}`", _cell(r.hint)) for n, r in _all_refused())),
    ]
    return "\n".join(parts)


def _all_refused() -> Iterator[tuple[str, Refused]]:
    yield from REFUSED.items()
    yield from ((f"{start}*", refused) for start, refused in REFUSED_FAMILIES.items())


def _is_security(option: Option) -> bool:
    return option.name.startswith(("security_", "sasl_", "ssl_"))


def _option_row(option: Option) -> tuple[str, ...]:
    doc = option.doc
    if option.later:
        doc += f" Not supported yet: {option.later}; only the default is accepted."
    return (
        f"`{option.name}`",
        f"`{option.java}`" if option.java else "",
        option.kind.type_name,
        "required" if option.required else f"`{option.default!r}`",
        _cell(option.kind.range),
        _cell(doc),
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
