"""What options demand of each other, and what follows from them.

Each rule checks the values of a config that is being made, or fills in what is in effect.
`RULES` has them in the order in which they are applied.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from asyncproducer.errors import ConfigError
from asyncproducer.option_kinds import (
    COMPRESSION_LEVELS,
    INT32_MAX,
    SASL_MECHANISMS,
    SECURITY_PROTOCOLS,
    Option,
    cut,
    entries,
    split_protocol,
)

__all__ = ["RULES", "Given", "Rule", "Values", "check_protocols"]

# For users it is all one: the configuration.
logger = logging.getLogger("asyncproducer.config")

#: With more requests in flight a broker cannot put an idempotent producer's batches in order.
MAX_IN_FLIGHT_IDEMPOTENT = 5


#: Every option's value by its name. The rules change it.
Values: TypeAlias = dict[str, Any]
#: The options that were given, even with their default value.
Given: TypeAlias = Mapping[str, Option]
Rule: TypeAlias = Callable[[Values, Given], None]


def _check_sasl_mechanism(values: Values, given: Given) -> None:
    protocol = values["security_protocol"]
    if protocol.startswith("SASL_") and values["sasl_mechanism"] is None:
        raise ConfigError(
            f"security_protocol={protocol} needs a sasl_mechanism: {', '.join(SASL_MECHANISMS)}"
            " (Java's default, GSSAPI, is not supported yet)"
        )


def _check_idempotence(values: Values, given: Given) -> None:
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


def _check_transactional_id(values: Values, given: Given) -> None:
    if values["transactional_id"] is not None and not values["enable_idempotence"]:
        raise ConfigError(
            "transactional_id needs idempotence: leave enable_idempotence, acks and retries"
            " as they are by default"
        )


def _check_two_phase_commit(values: Values, given: Given) -> None:
    # KIP-939: who takes part in a two-phase commit leaves its timing to the coordinator of it.
    if values["transaction_two_phase_commit_enable"] and "transaction_timeout_ms" in given:
        raise ConfigError(
            "transaction_timeout_ms cannot be set with transaction_two_phase_commit_enable=True"
        )


def _resolve_delivery_timeout(values: Values, given: Given) -> None:
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


def _check_memory(values: Values, given: Given) -> None:
    # Every batch takes batch_size at once. Java starts, and then each of its sends fails.
    size, memory = values["batch_size"], values["buffer_memory"]
    if size > memory:
        raise ConfigError(
            f"batch_size={size} is more than buffer_memory={memory}: no batch would ever fit;"
            " lower batch_size or raise buffer_memory"
        )


def _check_max_idle(values: Values, given: Given) -> None:
    # To Java it is a time, and each use makes a new connection; to librdkafka it means never.
    if values["connections_max_idle_ms"] == 0:
        raise ConfigError(
            "connections_max_idle_ms=0 would close a connection as soon as nothing is under way:"
            " -1 keeps it for ever, the default closes it after 540000 ms"
        )


def _check_rack(values: Values, given: Given) -> None:
    if values["partitioner_rack_aware"] and not values["client_rack"].strip():
        raise ConfigError("partitioner_rack_aware=True needs a client_rack")


def _refuse_later(values: Values, given: Given) -> None:
    # After Java's own rules, which then need no change when the feature is built.
    for name, option in given.items():
        if option.later and values[name] != option.default:
            raise ConfigError(f"not supported yet: {option.later} ({name}={values[name]!r})")


def _changed(values: Values, given: Given, start: str) -> list[str]:
    """The options with this beginning that were given another value than their default."""
    return [n for n, o in given.items() if n.startswith(start) and values[n] != o.default]


def _check_security_protocol(values: Values, given: Given) -> None:
    """Java only logs options that are not used. Who set one of these expects to be protected."""
    protocol = values["security_protocol"]
    for start, used, fitting in (
        ("ssl_", protocol.endswith("SSL"), "SSL or SASL_SSL"),
        ("sasl_", protocol.startswith("SASL_"), "SASL_SSL or SASL_PLAINTEXT"),
    ):
        names = _changed(values, given, start)
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


def check_protocols(servers: Any, protocol: str) -> None:
    """Raise if an address of bootstrap_servers, as it was given, is of another protocol.

    Names of listeners, as in advertised.listeners, may be there too: they say nothing.
    """
    for entry in entries(servers):
        written = split_protocol(entry)[0].upper()
        if written in SECURITY_PROTOCOLS and written != protocol:
            raise ConfigError(
                f"bootstrap_servers: {cut(entry)!r} contradicts security_protocol={protocol}:"
                f" set security_protocol to {written}, or leave {written}:// out"
            )


def _check_credentials(values: Values, given: Given) -> None:
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


def _resolve_ssl(values: Values, given: Given) -> None:
    if values["ssl_context"] is not None:
        others = [name for name in _changed(values, given, "ssl_") if name != "ssl_context"]
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


def _resolve_backoffs(values: Values, given: Given) -> None:
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


def _resolve_compression_level(values: Values, given: Given) -> None:
    codec = values["compression_type"]
    name = f"compression_{codec}_level"
    level = values["compression_level"]
    if level is not None:
        kind = COMPRESSION_LEVELS.get(codec)
        if kind is None:
            raise ConfigError(f"compression_level={level}: compression_type={codec} has no levels")
        if name in given:
            raise ConfigError(f"compression_level and {name} say the same: keep one")
        try:
            values[name] = kind.parse(level)
        except ValueError:
            raise ConfigError(
                f"compression_level={level} is out of range: for {codec} it must be {kind.expected}"
            ) from None
    values["compression_level"] = values.get(name)


def _resolve_batch_size(values: Values, given: Given) -> None:
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
