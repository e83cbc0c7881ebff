"""The APIs of the embedded broker, one file per group, one function per API.

Each function names the versions that it can do, and where it knowingly differs from
Java's broker. It gets a `Call` and returns its response as a mapping for all versions.
"""

from asyncproducer.testing.handlers import (  # noqa: F401 - each fills the table
    api_versions,
    coordinators,
    fetch,
    list_offsets,
    metadata,
    offsets,
    produce,
    topics,
    transactions,
)
from asyncproducer.testing.handlers.api import APIS, Api, Call, CloseConnection

__all__ = ["APIS", "Api", "Call", "CloseConnection"]
