"""What a value of an option may be: kinds of values, and the declaration of one option.

A `Kind` checks a value for itself and brings it into its normal form; an `Option` adds what
else is to be said of one option. Which options there are, and of which kind, is in config.py.

Messages show plain values. Objects are shown by the name of their type, since their own
`repr` may hold anything.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from asyncproducer.errors import ConfigError

__all__ = [
    "ANY_INT32",
    "ANY_INT64",
    "BUFFER_SIZE",
    "COMPRESSION_LEVELS",
    "COMPRESSION_TYPES",
    "FLAG",
    "INT32",
    "INT32_MAX",
    "INT64",
    "INT64_MAX",
    "PARTITIONERS",
    "SASL_MECHANISMS",
    "SECURITY_PROTOCOLS",
    "TEXT",
    "Acks",
    "Choice",
    "Context",
    "Flag",
    "Kind",
    "Number",
    "Option",
    "Partitioning",
    "Path",
    "Provider",
    "Servers",
    "Text",
    "Words",
    "cut",
    "entries",
    "parse_address",
    "shown",
    "split_protocol",
]

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
COMPRESSION_TYPES = ("none", "gzip", "snappy", "lz4", "zstd")
PARTITIONERS = ("default", "murmur2", "murmur3", "round_robin")
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def shown(value: object) -> object:
    """The value as a message may show it: plain values as they are, others by their name."""
    if _is_plain(value):
        return value
    if isinstance(value, tuple):
        return tuple(shown(item) for item in value)
    return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"


def cut(text: str) -> str:
    """The text as far as a message shows it."""
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
    """A bool, and no number that is as good as one."""

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
    """A path, or None. Normal form: a str."""

    type_name = "path or None"
    annotation = "str | os.PathLike[str] | None"
    expected = "a path: a str or an os.PathLike of str, not empty"

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
        words = entries(value)
        if len(set(words)) < len(words) or not all(words):
            raise ValueError("an entry is empty, or comes twice")
        if self.words and (not words or not set(words) <= set(self.words)):
            raise ValueError
        return words


def entries(value: Any) -> tuple[str, ...]:
    """The entries of a sequence of str, or of a str with commas, without spaces around them."""
    if isinstance(value, str):
        value = value.split(",") if value.strip() else []
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(item.strip() for item in value)


class Servers(Kind):
    """`host:port` entries. Normal form: without `proto://` and spaces, IPv6 in brackets.

    Java tolerates a `proto://`, and ignores it. The `check_protocols` of option_rules.py does not.
    """

    type_name = "str, or sequence of str"
    annotation = "str | Sequence[str]"
    range = "host:port, ..."
    expected = "a str like 'host1:9092,host2:9092', or a sequence of such"

    def parse(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, Mapping):
            raise ValueError("a mapping of options goes to from_mapping")
        seen: dict[tuple[str, int], str] = {}
        for entry in entries(value):
            host, port = parse_address(entry)
            # Host names do not differ by case, so neither do brokers.
            if (host.lower(), port) in seen:
                raise ConfigError(f"bootstrap_servers: {entry!r} comes twice")
            seen[host.lower(), port] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not seen:
            raise ConfigError("bootstrap_servers is empty: name at least one broker as host:port")
        return tuple(seen.values())


_PROTOCOL = re.compile(r"([0-9a-zA-Z\-%._]*)://")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[0-9a-zA-Z\-%._]+)):(?P<port>[0-9]{1,5})")


def split_protocol(entry: str) -> tuple[str, str]:
    """("SSL", "host:port") of `SSL://host:port`; the first is empty where none is written."""
    match = _PROTOCOL.match(entry)
    return (match[1], entry[match.end() :]) if match else ("", entry)


def parse_address(entry: str) -> tuple[str, int]:
    """(host, port) of `host:port`, `[ipv6]:port`, each perhaps with `proto://` before it."""
    if "@" in entry:
        # Not shown: what stands before the @ of an address is a user's name and password.
        raise ConfigError(
            "bootstrap_servers: an entry holds '@'. It takes host:port only;"
            " credentials go to sasl_username and sasl_password"
        )
    if not entry:
        raise ConfigError("bootstrap_servers: an entry is empty")
    _, address = split_protocol(entry)
    match = _ADDRESS.fullmatch(address)
    if match is None or (match["v6"] and not _is_ipv6(match["v6"])):
        raise ConfigError(
            f"bootstrap_servers: {cut(entry)!r} is neither host:port nor [ipv6-address]:port"
            + _with_port(address)
        )
    if not 1 <= int(match["port"]) <= 65535:
        raise ConfigError(f"bootstrap_servers: the port of {cut(entry)!r} is not in 1..65535")
    return match["v6"] or match["name"], int(match["port"])


def _with_port(address: str) -> str:
    """What may have been meant by an address without a port. 9092 is Kafka's usual one."""
    match = _ADDRESS.fullmatch(f"{address.removesuffix(':')}:9092")
    if match is None or (match["v6"] and not _is_ipv6(match["v6"])):
        return ""
    return f": did you mean {cut(match[0])!r}?"


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
    """An `ssl.SSLContext`, or None."""

    type_name = "ssl.SSLContext"
    annotation = "SSLContext | None"
    expected = "an ssl.SSLContext"

    def parse(self, value: Any) -> Any:
        # By its method: no module of the options imports ssl, see config.py.
        if value is None or (not isinstance(value, type) and hasattr(value, "wrap_bio")):
            return value
        raise ValueError


class Provider(Kind):
    """A function that is awaited for tokens, or None."""

    type_name = "async callable"
    annotation = "TokenProvider | None"
    expected = "an async callable without arguments that returns a token"

    def parse(self, value: Any) -> Any:
        if value is None or (callable(value) and not isinstance(value, type)):
            return value
        if callable(getattr(value, "token", None)) and not isinstance(value, type):
            raise ValueError("pass its method: provider.token")
        raise ValueError


INT32 = Number(0, INT32_MAX)
INT64 = Number(0, INT64_MAX)
ANY_INT32 = Number(-INT32_MAX - 1, INT32_MAX)
ANY_INT64 = Number(-INT64_MAX - 1, INT64_MAX)
BUFFER_SIZE = Number(-1, INT32_MAX)
FLAG = Flag()
TEXT = Text()

#: What the level of a codec may be. The others have none.
COMPRESSION_LEVELS = {
    "gzip": Number(-1, 9, holes=(0,)),
    "lz4": Number(1, 17),
    "zstd": Number(-131_072, 22),
}


# ---------------------------------------------------------------- one option


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
        got = f"{cut(repr(value))} ({type(value).__name__})"
    else:
        got = f"a value of type {type(value).__name__}"
    return ConfigError(
        f"{label} must be {option.kind.expected}, not {got}" + (f": {hint}" if hint else "")
    )
