"""asyncproducer: put records into Apache Kafka from asyncio.

async with Producer("localhost:9092") as producer:
    metadata = await producer.send("orders", b"value", key=b"k")
"""

# First, as it decides whether the compiled modules or their sources are imported below.
from asyncproducer._implementation import IMPLEMENTATION  # isort: split

from asyncproducer.bulk import TableResult
from asyncproducer.config import ProducerConfig
from asyncproducer.core.delivery import Delivery
from asyncproducer.core.partitioner import Murmur3Partitioner, RoundRobinPartitioner
from asyncproducer.errors import (
    AbortedError,
    AuthenticationError,
    AuthorizationError,
    BatchDeliveryError,
    BrokerError,
    BrokerRejected,
    BufferFull,
    BufferTimeout,
    ConfigError,
    ConnectionFailed,
    DeliveryError,
    DeliveryTimeout,
    ErrorCode,
    ForkError,
    IllegalStateError,
    InvalidPartition,
    InvalidTimestamp,
    InvalidTopic,
    KafkaError,
    MetadataNotReady,
    MetadataTimeout,
    ProducerClosed,
    ProducerFenced,
    ProducerNotStarted,
    ProducerStateError,
    ProtocolError,
    RecordError,
    RecordTooLarge,
    RequestTimedOut,
    SerializationError,
    TransactionAborted,
    TransactionError,
    TransactionTimeout,
    UnsupportedVersionError,
    WrongLoopError,
)
from asyncproducer.plugins import Interceptor, Partitioner, Serializer
from asyncproducer.portal import Portal
from asyncproducer.producer import Producer
from asyncproducer.records import (
    BatchResult,
    CloseReport,
    ConsumerGroupMetadata,
    Health,
    OffsetAndMetadata,
    OffsetRange,
    PartitionInfo,
    Record,
    RecordMetadata,
    TopicPartition,
)

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATION",
    "AbortedError",
    "AuthenticationError",
    "AuthorizationError",
    "BatchDeliveryError",
    "BatchResult",
    "BrokerError",
    "BrokerRejected",
    "BufferFull",
    "BufferTimeout",
    "CloseReport",
    "ConfigError",
    "ConnectionFailed",
    "ConsumerGroupMetadata",
    "Delivery",
    "DeliveryError",
    "DeliveryTimeout",
    "ErrorCode",
    "ForkError",
    "Health",
    "IllegalStateError",
    "Interceptor",
    "InvalidPartition",
    "InvalidTimestamp",
    "InvalidTopic",
    "KafkaError",
    "MetadataNotReady",
    "MetadataTimeout",
    "Murmur3Partitioner",
    "OffsetAndMetadata",
    "OffsetRange",
    "PartitionInfo",
    "Partitioner",
    "Portal",
    "Producer",
    "ProducerClosed",
    "ProducerConfig",
    "ProducerFenced",
    "ProducerNotStarted",
    "ProducerStateError",
    "ProtocolError",
    "Record",
    "RecordError",
    "RecordMetadata",
    "RecordTooLarge",
    "RequestTimedOut",
    "RoundRobinPartitioner",
    "SerializationError",
    "Serializer",
    "TableResult",
    "TopicPartition",
    "TransactionAborted",
    "TransactionError",
    "TransactionTimeout",
    "UnsupportedVersionError",
    "WrongLoopError",
    "__version__",
]
