"""How an option is called: here, in Java, in librdkafka, in the environment, in messages.

The tables tell what other clients' names stand for, or why nothing here does. Looking up is done
by `Names`, which is made from the options of config.py.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from asyncproducer.errors import ConfigError
from asyncproducer.option_kinds import (
    INT32_MAX,
    INT64_MAX,
    Context,
    Number,
    Option,
    Partitioning,
    Provider,
    Servers,
    Words,
    shown,
)

logger = logging.getLogger("asyncproducer")

__all__ = [
    "JAVA_DEFAULTS",
    "LIBRDKAFKA",
    "REFUSED",
    "REFUSED_FAMILIES",
    "Foreign",
    "Names",
    "Refused",
    "drop_java_defaults",
]


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


def drop_java_defaults(options: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Take out of a mapping's `options` what is in JAVA_DEFAULTS; `over` are those beside it.

    What would switch on a feature is told: it was perhaps meant.
    """
    for name, (default, others) in JAVA_DEFAULTS.items():
        if options.get(name) == default and all(
            over.get(other, options.get(other)) is None for other in others
        ):
            del options[name]
            if default is True:
                logger.warning(
                    "%s=true has no effect: the feature does not exist here yet. It is Java's "
                    "default; set it to false, or leave it out, and nothing is logged",
                    name.replace("_", "."),
                )


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


_DECIMAL = Number(-INT64_MAX - 1, INT64_MAX, fraction=True)


def _is_same(value: object, default: object) -> bool:
    """Whether a value, perhaps in text, is Java's default."""
    if default is None:
        return False
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        # As numbers: Java's documentation writes 0.80, and its log 0.8.
        try:
            return bool((_DECIMAL.from_text(value) if isinstance(value, str) else value) == default)
        except ValueError:
            return False
    return str(shown(value)).lower() == str(default).lower()


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, tuple(names), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


#: What the Producer takes beside the options: a typo there ends up here.
_PRODUCER_ARGUMENTS = (
    "close_timeout",
    "config",
    "connector",
    "interceptors",
    "key_serializer",
    "value_serializer",
)


class Names:
    """The names of the options of a table, to look them up and to write them."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self.options = options
        #: Other snake_case names of an option, as aiokafka and Java's have them.
        self.aliases = {
            alias: option.name for option in options.values() for alias in option.aliases
        }
        #: Dotted name -> option: Java's names, and our own options written with dots.
        self.by_dotted = {
            **{name.replace("_", "."): name for name in options},
            **{alias.replace("_", "."): name for alias, name in self.aliases.items()},
            **{option.java: option.name for option in options.values() if option.java},
        }
        # The name of an option in a message. What is in quotes is somebody's value, or a name that
        # is meant as it stands; they are matched so that nothing within them is.
        self._in_messages = re.compile(
            r"(?<!\w)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
            rf"|(?<![\w.])(?P<name>{'|'.join(options)})(?!\w|\.\w)"
        )

    def canonical(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The same options by their own names. Raises ConfigError for names that are none."""
        known: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for given, value in options.items():
            name = self.aliases.get(given, given)
            if name not in self.options:
                self._check_unknown(given, value)
                continue
            if name in sources:
                raise ConfigError(f"{sources[name]!r} and {given!r} are the same option: keep one")
            sources[name] = given
            known[name] = value
        return known

    def translate(self, key: str, value: Any) -> tuple[str, Any] | None:
        """(option, value) for a dotted name; None if it asks for nothing. Raises ConfigError."""
        foreign = LIBRDKAFKA.get(key) or Foreign(self.by_dotted.get(key, ""))
        option = self.options.get(foreign.option)
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
        snake = self.aliases.get(key, key)
        if snake not in self.options and snake.replace("_", ".") in LIBRDKAFKA:
            snake = LIBRDKAFKA[snake.replace("_", ".")].option
        if snake in self.options:
            raise ConfigError(f"{key!r} is written {self.dotted(snake)!r} in a mapping")
        raise ConfigError(f"unknown option {key!r}{_nearest(key, [*self.by_dotted, *LIBRDKAFKA])}")

    def dotted(self, name: str) -> str:
        """How an option is written in a mapping."""
        return self.options[name].java or name.replace("_", ".")

    def variable(self, prefix: str, name: str) -> str:
        """The environment variable of an option; its own name if a text cannot stand for it."""
        if isinstance(self.options[name].kind, (Context, Provider)):
            return name
        return prefix + name.upper()

    def check_variable(self, variable: str, name: str, prefix: str) -> None:
        """Raise ConfigError if this variable was probably meant for us."""
        refused = _refused(name)
        if refused is not None and refused.hint.startswith("not supported"):
            raise ConfigError(f"{variable}: {refused.hint}")
        for known in (*self.options, *self.aliases):
            if _distance(name, known) <= (1 if len(known) < 8 else 2):
                raise ConfigError(
                    f"{variable} is not an option: did you mean {prefix}{known.upper()}?"
                    " (If it belongs to other software, give from_env another prefix.)"
                )

    def respelled(self, error: ConfigError, spell: Callable[[str], str]) -> ConfigError:
        """The same error, with the names that the user writes for the options."""
        notes: dict[str, str] = {}

        def respell(match: re.Match[str]) -> str:
            name = match["name"]
            if name is None:
                return match[0]
            spelled = spell(name)
            if spelled in LIBRDKAFKA and spelled != self.dotted(name):
                note = LIBRDKAFKA[spelled].note
                notes[spelled] = f"{spelled} is {name} here" + (f", {note}" if note else "")
            return spelled

        message = self._in_messages.sub(respell, str(error))
        return ConfigError(message + (f" ({'; '.join(notes.values())})" if notes else ""))

    def _check_unknown(self, name: str, value: object) -> None:
        """Raise with the best advice there is for a snake_case name that is no option."""
        refused = _refused(name)
        if refused is not None:
            _refuse(name, refused, value)
        elif name in self.by_dotted or name in LIBRDKAFKA:
            here = self.by_dotted.get(name) or LIBRDKAFKA[name].option
            raise ConfigError(f"{name!r} is written {here!r} here; from_mapping takes dotted names")
        elif name.replace("_", ".") in LIBRDKAFKA:
            here = LIBRDKAFKA[name.replace("_", ".")].option
            raise ConfigError(f"{name!r} is written {here!r} here")
        else:
            known = [*self.options, *self.aliases, *_PRODUCER_ARGUMENTS]
            raise ConfigError(f"unknown option {name!r}{_nearest(name, known)}")


def _as_logged(option: Option, text: str) -> str | None:
    """A text without what Java's log adds: it shows null as `null`, and lists in brackets."""
    nullable = option.default is None or isinstance(option.kind, Partitioning)
    if text == "null" and nullable and option.java:
        return None
    return _unbracketed(text) if isinstance(option.kind, (Servers, Words)) else text


def _unbracketed(text: str) -> str:
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _distance(a: str, b: str) -> int:
    """How many characters must be changed, added or left out to make `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        above, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (left != right)))
    return row[-1]
