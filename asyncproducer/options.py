"""The options as keyword arguments, for type checkers and editors.

Generated from the table in config.py: python -m asyncproducer.cli.docs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ssl import SSLContext

    from asyncproducer.config import PartitionerOption, TokenProvider
else:
    SSLContext = PartitionerOption = TokenProvider = Any

__all__ = ["Options"]


class Options(TypedDict, total=False):
    """Every option, and what may be passed for it. See docs/options.md.

    `options: Options = {"linger_ms": 20}`, then `Producer("localhost:9092", **options)`.
    """

    bootstrap_servers: str | Sequence[str]
    """Brokers to ask for the cluster first. One that answers is enough. A protocol before an
    address, as in `SSL://host:9093`, must be that of `security_protocol`.
    """

    client_id: str | None
    """Name told to the brokers, for their logs, quotas and our metrics. None: `producer-<n>`, or
    `producer-<transactional_id>`. An empty one is kept. (Java: empty)
    """

    acks: int | str
    """Who must have a batch before it is acknowledged: all in-sync replicas (`all`, which is -1),
    the leader (1), nobody (0).
    """

    enable_idempotence: bool
    """No duplicates and no reordering by retries. Switched off by `acks` 0 or 1 or `retries=0`
    unless it is set; set and contradicted it is an error.
    """

    retries: int
    """Attempts after the first. Leave it and set `delivery_timeout_ms`."""

    delivery_timeout_ms: int
    """Longest time from the buffer to success or failure. At least `linger_ms +
    request_timeout_ms`: a smaller one is an error, the default is raised.
    """

    request_timeout_ms: int
    """How long an answer may take. Brokers wait as long for their replicas."""

    max_block_ms: int
    """How long a send may wait for metadata and buffer room together; and a call of a transaction
    for its end.
    """

    linger_ms: float
    """How long a batch waits for more records. Fractions are allowed; capped to 2^31-1."""

    adaptive_linger: bool
    """Let a batch leave before `linger_ms` when nobody adds to it any more and its broker has
    nothing to do. Not in Java.
    """

    batch_size: int
    """Bytes from which a batch is full. 0 becomes 1: one record in each batch."""

    batch_max_bytes: int
    """To this many bytes, before compression, a full batch goes on growing while its broker is
    busy. `max_request_size` bounds it too; 0 switches it off. Not in Java.
    """

    buffer_memory: int
    """Bytes of all records that are not acknowledged yet."""

    buffer_memory_allocation_strategy: str
    """How a batch takes its memory."""

    max_request_size: int
    """Largest record, uncompressed, and most bytes in one Produce request."""

    max_in_flight_requests_per_connection: int
    """Unanswered requests per broker. At most 5 while `enable_idempotence` is not set to False. 1:
    one batch per partition at a time.
    """

    compression_type: str | None
    """Codec of the batches. None is `none`."""

    compression_level: int | None
    """Level of the codec that `compression_type` names, in its range. In a finished config: the
    level in effect, None without levels. In a mapping -1 is the codec's default, as in librdkafka.
    """

    compression_gzip_level: int
    """Level of gzip; -1 is zlib's default."""

    compression_lz4_level: int
    """Level of lz4; 9 is the fast compressor, any other is LZ4 HC."""

    compression_zstd_level: int
    """Level of zstd."""

    partitioner: PartitionerOption | None
    """Who chooses a record's partition. `default` is Kafka's: murmur2 of the key, sticky and
    adaptive without one. Java's `org.apache.kafka.clients.producer.RoundRobinPartitioner` is read
    as `round_robin`, librdkafka's `murmur2_random` as `default`; its own default places keys by
    CRC32, which nothing here does.
    """

    partitioner_ignore_keys: bool
    """Place records with a key like those without."""

    partitioner_adaptive_partitioning_enable: bool
    """Give partitions of slower brokers fewer records. Not for own partitioners."""

    partitioner_availability_timeout_ms: int
    """Avoid partitions of a broker that took nothing for so long. 0: never; needs
    `partitioner_adaptive_partitioning_enable`.
    """

    partitioner_rack_aware: bool
    """Prefer partitions whose leader is in `client_rack`."""

    client_rack: str
    """Where this client is."""

    metadata_max_age_ms: int
    """Metadata is asked for again after so long without news."""

    metadata_max_idle_ms: int
    """A topic not used for so long is forgotten."""

    metadata_recovery_strategy: str
    """What to do when no known broker can be reached: start again from `bootstrap_servers`."""

    metadata_recovery_rebootstrap_trigger_ms: int
    """Start again as well after so long without metadata."""

    metadata_cluster_check_enable: bool
    """Let brokers check that they are the cluster and node we mean. (Java: True)"""

    retry_backoff_ms: int
    """Pause before the first retry; it doubles with each. Above the max: the max."""

    retry_backoff_max_ms: int
    """Longest pause before a retry."""

    reconnect_backoff_ms: int
    """Pause before a broker is connected again; it doubles with each failure."""

    reconnect_backoff_max_ms: int
    """Longest such pause. Follows `reconnect_backoff_ms` if only that is set."""

    socket_connection_setup_timeout_ms: int
    """How long a connection may take; it doubles with each failure. Above the max: the max."""

    socket_connection_setup_timeout_max_ms: int
    """Longest such time."""

    connections_max_idle_ms: int
    """An unused connection is closed after so long. Negative: never. 0, which means never to
    librdkafka alone, is an error.
    """

    send_buffer_bytes: int
    """SO_SNDBUF of the sockets. -1: as the system has it, which lets it grow. Java's 131072 holds a
    far broker's connection down, and costs more and smaller writes.
    """

    receive_buffer_bytes: int
    """SO_RCVBUF of the sockets. -1: as the system has it."""

    client_dns_lookup: str
    """Try all addresses of a name, or expand bootstrap names to the canonical ones."""

    bootstrap_resolve_timeout_ms: int
    """0: unresolvable names are an error of the start."""

    transactional_id: str | None
    """Makes the producer transactional. Name under which transactions survive a restart: a new
    producer with it fences the one before.
    """

    transaction_timeout_ms: int
    """A broker aborts a transaction that is open for so long, and fences its producer. At most
    transaction.max.timeout.ms of the brokers.
    """

    transaction_two_phase_commit_enable: bool
    """Take part in a two-phase commit (KIP-939)."""

    enable_metrics_push: bool
    """Push metrics to the brokers (KIP-714). (Java: True)"""

    metrics_num_samples: int
    """Samples kept for each metric."""

    metrics_sample_window_ms: int
    """The time that one sample covers."""

    metrics_recording_level: str
    """Which metrics are recorded."""

    security_protocol: str
    """Whether connections are encrypted, and whether we say who we are. An `ssl_` or `sasl_` option
    without it is an error; one that an explicit protocol does not use, a warning.
    """

    sasl_mechanism: str | None
    """How we say who we are; needed with a `SASL_` protocol. (Java: GSSAPI, not supported yet)"""

    sasl_username: str | None
    """The user, for PLAIN and SCRAM."""

    sasl_password: str | None
    """The password, for PLAIN and SCRAM."""

    sasl_oauth_token_provider: TokenProvider | None
    """For OAUTHBEARER: awaited for a fresh token whenever we authenticate."""

    ssl_context: SSLContext | None
    """A ready context: instead of all other `ssl_` options."""

    ssl_cafile: str | os.PathLike[str] | None
    """PEM file of the authorities to trust; else the system's."""

    ssl_certfile: str | os.PathLike[str] | None
    """PEM file of our certificate, with its chain and perhaps its key."""

    ssl_keyfile: str | os.PathLike[str] | None
    """PEM file of the key, if it is not in `ssl_certfile`."""

    ssl_password: str | None
    """Opens an encrypted key."""

    ssl_truststore_type: str
    """Java's JKS is not supported: make a PEM file of a JKS or PKCS12 store with `keytool -list
    -rfc -keystore STORE > ca.pem`, then set ssl_cafile.
    """

    ssl_truststore_location: str | os.PathLike[str] | None
    """Java's name for `ssl_cafile`: a PEM file."""

    ssl_truststore_certificates: str | None
    """The authorities to trust, as PEM text."""

    ssl_keystore_type: str
    """Java's JKS is not supported: make PKCS12 of a JKS store with `keytool -importkeystore
    -srckeystore STORE -destkeystore client.p12 -deststoretype PKCS12`, make a PEM file of that with
    `openssl pkcs12 -in client.p12 -out client.pem`, then set ssl_certfile, and ssl_password for its
    key.
    """

    ssl_keystore_location: str | os.PathLike[str] | None
    """Java's name for `ssl_certfile`: a PEM file."""

    ssl_keystore_certificate_chain: str | None
    """Our certificate and its chain, as PEM text."""

    ssl_keystore_key: str | None
    """The key of that certificate, as PEM text."""

    ssl_endpoint_identification_algorithm: str | None
    """Check that the broker's certificate is for its host name. Empty: do not."""

    ssl_enabled_protocols: str | Sequence[str]
    """The versions of TLS to speak."""

    ssl_cipher_suites: str | Sequence[str]
    """Suites for TLS 1.2, by OpenSSL's names. Empty: the system's choice."""

    max_batch_size: int
    """Another name of `batch_size`."""

    partitioner_class: PartitionerOption | None
    """Another name of `partitioner`."""

    sasl_plain_username: str | None
    """Another name of `sasl_username`."""

    sasl_plain_password: str | None
    """Another name of `sasl_password`."""

    ssl_key_password: str | None
    """Another name of `ssl_password`."""
