"""What tests of a producer need: brokers embedded and real, virtual time, an in-memory network.

The names are loaded when they are first used: importing this package costs next to
nothing, and needs neither pytest nor Java.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncproducer.testing.batches import StoredRecord
    from asyncproducer.testing.broker import EmbeddedCluster, TransactionView
    from asyncproducer.testing.clock import DeadlockError, VirtualTimeLoop
    from asyncproducer.testing.faults import Fault, ReceivedRequest
    from asyncproducer.testing.kafka import KafkaCluster, KafkaUnavailable
    from asyncproducer.testing.ledger import Ledger, Verdict
    from asyncproducer.testing.network import MemoryNetwork
    from asyncproducer.testing.proxy import FaultPlan, FaultProxy, ProxyFault
    from asyncproducer.testing.raw_client import RawClient
    from asyncproducer.testing.transactions import TransactionState

__all__ = [
    "DeadlockError",
    "EmbeddedCluster",
    "Fault",
    "FaultPlan",
    "FaultProxy",
    "KafkaCluster",
    "KafkaUnavailable",
    "Ledger",
    "MemoryNetwork",
    "ProxyFault",
    "RawClient",
    "ReceivedRequest",
    "StoredRecord",
    "TransactionState",
    "TransactionView",
    "Verdict",
    "VirtualTimeLoop",
]

_MODULES = {
    "DeadlockError": "clock",
    "EmbeddedCluster": "broker",
    "Fault": "faults",
    "FaultPlan": "proxy",
    "FaultProxy": "proxy",
    "KafkaCluster": "kafka",
    "KafkaUnavailable": "kafka",
    "Ledger": "ledger",
    "MemoryNetwork": "network",
    "ProxyFault": "proxy",
    "RawClient": "raw_client",
    "ReceivedRequest": "faults",
    "StoredRecord": "batches",
    "TransactionState": "transactions",
    "TransactionView": "broker",
    "Verdict": "ledger",
    "VirtualTimeLoop": "clock",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
