"""Every exception that this package raises, and what Kafka's error codes mean.

KafkaError                            .code .retriable
├─ ConfigError                        (ValueError)
├─ ProducerStateError                 (RuntimeError)
│  ├─ ProducerNotStarted
│  ├─ ProducerClosed
│  ├─ WrongLoopError
│  └─ ForkError
├─ IllegalStateError                  (RuntimeError) a state machine was asked for a move it has not
├─ BufferFull                         send_nowait: no room in the buffer now
│  └─ BufferTimeout                   (TimeoutError) no room within max_block_ms
├─ MetadataNotReady                   send_nowait: the topic is not known yet
│  └─ MetadataTimeout                 (TimeoutError) the topic or partition did not appear in time
├─ RecordError                        (ValueError) the record was refused before it was buffered
│  ├─ SerializationError
│  ├─ RecordTooLarge
│  ├─ InvalidPartition
│  ├─ InvalidTopic
│  └─ InvalidTimestamp
├─ DeliveryError                      .topic .partition .persisted .attempts .elapsed
│  ├─ DeliveryTimeout                 (TimeoutError) delivery_timeout_ms passed
│  ├─ BrokerRejected                  .record_index .broker_message
│  └─ AbortedError                    closed by force, or given up with a fatal error
├─ TransactionError
│  ├─ TransactionAborted              it can only be aborted, or was: nothing of it counts
│  ├─ TransactionTimeout              (TimeoutError) not within max_block_ms: call it again
│  └─ ProducerFenced                  another producer has taken over the transactional id
├─ AuthenticationError
├─ AuthorizationError
├─ UnsupportedVersionError
├─ BrokerError                        a broker answered a request with an error code
├─ ConnectionFailed                   (ConnectionError)
│  └─ ProtocolError                   the peer does not speak Kafka, or broke its rules
└─ RequestTimedOut                    (TimeoutError)

BatchDeliveryError (ExceptionGroup)   what send_many and send_table raise

Errors known before a record is in the buffer are raised by the call; later ones
come through its Delivery as a DeliveryError, whose cause is the last thing that
went wrong and whose `persisted` says whether the record may be in the log.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, TypeVar

__all__ = [
    "AbortedError",
    "AuthenticationError",
    "AuthorizationError",
    "BatchDeliveryError",
    "BrokerError",
    "BrokerRejected",
    "BufferFull",
    "BufferTimeout",
    "ConfigError",
    "ConnectionFailed",
    "DeliveryError",
    "DeliveryTimeout",
    "ErrorCode",
    "ForkError",
    "IllegalStateError",
    "InvalidPartition",
    "InvalidTimestamp",
    "InvalidTopic",
    "KafkaError",
    "MetadataNotReady",
    "MetadataTimeout",
    "Persisted",
    "ProducerClosed",
    "ProducerFenced",
    "ProducerNotStarted",
    "ProducerStateError",
    "ProtocolError",
    "RecordError",
    "RecordTooLarge",
    "RequestTimedOut",
    "SerializationError",
    "TransactionAborted",
    "TransactionError",
    "TransactionTimeout",
    "UnsupportedVersionError",
    "WrongLoopError",
    "error_name",
    "is_retriable",
    "needs_refresh",
]

Persisted = Literal["no", "maybe", "yes"]


class ErrorCode(IntEnum):
    """Kafka's protocol error codes, by the names of the protocol's page."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    DELEGATION_TOKEN_AUTH_DISABLED = 61
    DELEGATION_TOKEN_NOT_FOUND = 62
    DELEGATION_TOKEN_OWNER_MISMATCH = 63
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    DELEGATION_TOKEN_EXPIRED = 66
    INVALID_PRINCIPAL_TYPE = 67
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INCONSISTENT_VOTER_SET = 94
    INVALID_UPDATE_VERSION = 95
    FEATURE_UPDATE_FAILED = 96
    PRINCIPAL_DESERIALIZATION_FAILURE = 97
    SNAPSHOT_NOT_FOUND = 98
    POSITION_OUT_OF_RANGE = 99
    UNKNOWN_TOPIC_ID = 100
    DUPLICATE_BROKER_REGISTRATION = 101
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_TOPIC_ID = 103
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    INELIGIBLE_REPLICA = 107
    NEW_LEADER_ELECTED = 108
    OFFSET_MOVED_TO_TIERED_STORAGE = 109
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    UNKNOWN_CONTROLLER_ID = 116
    UNKNOWN_SUBSCRIPTION_ID = 117
    TELEMETRY_TOO_LARGE = 118
    INVALID_REGISTRATION = 119
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    FENCED_STATE_EPOCH = 124
    INVALID_VOTER_KEY = 125
    DUPLICATE_VOTER = 126
    VOTER_NOT_FOUND = 127
    INVALID_REGULAR_EXPRESSION = 128
    REBOOTSTRAP_REQUIRED = 129
    STREAMS_INVALID_TOPOLOGY = 130
    STREAMS_INVALID_TOPOLOGY_EPOCH = 131
    STREAMS_TOPOLOGY_FENCED = 132
    SHARE_SESSION_LIMIT_REACHED = 133


#: Answers after which the metadata is known to be stale, and the request is
#: worth repeating once it is fresh (Java: InvalidMetadataException).
REFRESH = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.LISTENER_NOT_FOUND,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        ErrorCode.ELECTION_NOT_NEEDED,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
    }
)

#: Answers after which the same request may succeed later (Java: RetriableException).
RETRIABLE = REFRESH | {
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.NOT_CONTROLLER,
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.OFFSET_NOT_AVAILABLE,
    ErrorCode.UNSTABLE_OFFSET_COMMIT,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    ErrorCode.SHARE_SESSION_NOT_FOUND,
    ErrorCode.INVALID_SHARE_SESSION_EPOCH,
    ErrorCode.SHARE_SESSION_LIMIT_REACHED,
}


def error_name(code: int) -> str:
    """The protocol's name of an error code, `UNKNOWN_SERVER_ERROR(999)` for one we do not know."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"UNKNOWN_SERVER_ERROR({code})"


def is_retriable(code: int) -> bool:
    """Whether the same request may succeed later. An unknown code is not retriable."""
    return code in RETRIABLE


def needs_refresh(code: int) -> bool:
    """Whether this answer says that our metadata is stale."""
    return code in REFRESH


class KafkaError(Exception):
    """The root of all errors of this package."""

    #: Kafka's error code, where a broker gave one.
    code: int | None = None
    #: Whether doing the same again later may succeed.
    retriable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class again: arguments make the text, they are not kept.
        return _rebuild, (type(self), self.args, self.__dict__)


E = TypeVar("E", bound=BaseException)


def _rebuild(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def again(error: E) -> E:
    """The same error, to be raised once more: one that is raised in many places collects all
    their tracebacks, and keeps alive what their frames hold."""
    fresh = _rebuild(type(error), error.args, error.__dict__)
    fresh.__cause__ = error.__cause__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh


class ConfigError(KafkaError, ValueError):
    """An option is unknown, out of range, or does not go with another one."""


class ProducerStateError(KafkaError, RuntimeError):
    """The producer cannot do this in the state it is in."""


class ProducerNotStarted(ProducerStateError):
    """`send` before `start()` or outside `async with`."""


class ProducerClosed(ProducerStateError):
    """The producer is closed, or was closed while this call waited."""


class WrongLoopError(ProducerStateError):
    """The producer belongs to another event loop or thread: use `producer.portal()` there."""


class ForkError(ProducerStateError):
    """The process was forked after `start()`: make a producer in the child."""


class IllegalStateError(KafkaError, RuntimeError):
    """A state machine has no such move. The message names the state and the event."""


class BufferFull(KafkaError):
    """There is no room for the record in `buffer_memory` right now."""

    retriable = True


class BufferTimeout(BufferFull, TimeoutError):
    """There was no room for the record within `max_block_ms`."""


class MetadataNotReady(KafkaError):
    """The topic's partitions are not known yet."""

    retriable = True


class MetadataTimeout(MetadataNotReady, TimeoutError):
    """The topic, or the partition asked for, did not appear within `max_block_ms`."""


class RecordError(KafkaError, ValueError):
    """The record was refused before it was buffered: nothing was sent."""


class SerializationError(RecordError):
    """The key, value or a header could not be turned into bytes."""


class RecordTooLarge(RecordError):
    """The record can never be sent: it exceeds `max_request_size` or `buffer_memory`."""


class InvalidPartition(RecordError):
    """The partition does not exist, or a partitioner raised or returned nonsense."""


class InvalidTopic(RecordError):
    """The topic's name is not one that Kafka accepts."""

    code = ErrorCode.INVALID_TOPIC_EXCEPTION


class InvalidTimestamp(RecordError):
    """The timestamp is negative, or a datetime without a time zone."""


class DeliveryError(KafkaError):
    """A buffered record was not acknowledged. `__cause__` is the last thing that went wrong.

    `persisted`: "no" (it is certainly not in the log), "maybe" (a request that
    carried it got no clear answer) or "yes" (it is in the log all the same, unless its
    topic was deleted: a leader said so, but fewer replicas have it than
    min.insync.replicas wants).
    `attempts`: how often it was sent. `elapsed`: seconds since it was buffered.
    """

    def __init__(
        self,
        message: str,
        *,
        topic: str = "",
        partition: int = -1,
        persisted: Persisted = "no",
        attempts: int = 0,
        elapsed: float = 0.0,
        code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.persisted = persisted
        self.attempts = attempts
        self.elapsed = elapsed
        if code is not None:
            self.code = code
            self.retriable = is_retriable(code)


class DeliveryTimeout(DeliveryError, TimeoutError):
    """`delivery_timeout_ms` passed before the record was acknowledged."""

    retriable = True


class BrokerRejected(DeliveryError):
    """A broker refused the record, or the batch it was in.

    `record_index` is the record's place in its batch, where the broker named this very record
    (KIP-467), else None. `code` is INVALID_RECORD where it named several, and None for a record
    that only shared the batch of those.
    """

    record_index: int | None = None
    broker_message: str | None = None


class AbortedError(DeliveryError):
    """The record was given up: its transaction was aborted, the producer was closed by force, or
    it failed for good."""


class TransactionError(KafkaError):
    """Something is wrong with a transaction, or with all of this producer."""


class TransactionAborted(TransactionError):
    """The transaction cannot be committed. `__cause__` says why, `code` where a broker did.

    Nothing of it counts. Raised by the calls within it: `abort_transaction()`, then begin again.
    Raised by `async with producer.transaction()`: it is aborted already. Raised by
    `abort_transaction()`: so is this one, but the next one has got no epoch; the same call asks
    for it again.
    """


class TransactionTimeout(TransactionError, TimeoutError):
    """A transactional call had no answer within `max_block_ms`. It goes on: call the same again
    to wait for its end."""

    retriable = True


class ProducerFenced(TransactionError):
    """Another producer has taken over the transactional id, or the broker has given up a
    transaction that was open for too long. Close this producer."""

    code = ErrorCode.PRODUCER_FENCED


class AuthenticationError(KafkaError):
    """The broker did not accept who we are."""


class AuthorizationError(KafkaError):
    """The broker does not let us do this."""


class UnsupportedVersionError(KafkaError):
    """The broker speaks no version of a request that we speak as well."""

    code = ErrorCode.UNSUPPORTED_VERSION


class BrokerError(KafkaError):
    """A broker answered a control request with an error code."""

    def __init__(self, code: int, message: str | None = None) -> None:
        super().__init__(f"{error_name(code)}: {message}" if message else error_name(code))
        self.code = code
        self.retriable = is_retriable(code)


class ConnectionFailed(KafkaError, ConnectionError):
    """The broker could not be reached, or the connection was lost."""

    code = ErrorCode.NETWORK_EXCEPTION
    retriable = True


class ProtocolError(ConnectionFailed):
    """The peer sent what a Kafka broker does not send. The connection is closed."""


class RequestTimedOut(KafkaError, TimeoutError):
    """A broker did not answer within `request_timeout_ms`; its connection is closed."""

    code = ErrorCode.REQUEST_TIMED_OUT
    retriable = True


class BatchDeliveryError(ExceptionGroup[Exception]):
    """Some records of a `send_many` or a `send_table` were not acknowledged.

    `result` is what the call would have returned: which they are, and what became of the others.
    """

    result: Any = None
