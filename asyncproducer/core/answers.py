"""What error codes mean in the answers to our other requests: one table for each.

Those of Produce, which decide about records, are in outcome.py. None of these ends a
batch by itself: what cannot be known or done yet waits, as long as its own timeout says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from asyncproducer.errors import REFRESH, ErrorCode, is_retriable, needs_refresh

__all__ = [
    "API_VERSIONS",
    "CONTROL",
    "INIT_PRODUCER_ID",
    "METADATA",
    "METADATA_PARTITION",
    "METADATA_TOPIC",
    "SASL_AUTHENTICATE",
    "SASL_HANDSHAKE",
    "Answer",
    "answer_for",
]

_Table = Mapping[int, "Answer"]


class Answer(Enum):
    """What happens after an answer."""

    #: Take what it says.
    TAKE = "take"
    #: Ask again, after the backoff.
    REPEAT = "repeat"
    #: The same, as long as somebody waits for it.
    WANTED = "repeat if wanted"
    #: Ask again at once, in a version that the broker speaks.
    OLDER = "older"
    #: Forget the brokers, and begin again with `bootstrap_servers` (KIP-1102).
    REBOOTSTRAP = "rebootstrap"
    #: Close the connection, and connect again after the backoff.
    DISCONNECT = "disconnect"
    #: The same, and tell those who wait for metadata: AuthenticationError.
    REFUSED = "refused"
    #: Tell those who wait: AuthorizationError. It may be allowed later.
    DENIED = "denied"
    #: Tell those who wait: InvalidTopic.
    INVALID = "invalid"
    #: The producer has failed for good.
    FATAL = "fatal"


def _table(other: Answer, retriable: Answer | None = None, **special: Answer) -> _Table:
    """`other` for what nobody expects, `retriable` for what may pass; `special` by name."""
    table = {
        int(code): retriable if retriable is not None and is_retriable(code) else other
        for code in ErrorCode
    }
    table[ErrorCode.NONE] = Answer.TAKE
    table.update({ErrorCode[name]: answer for name, answer in special.items()})
    return table


#: OLDER for the first answer only: a broker that refuses its own version is not asked a third time.
API_VERSIONS = _table(
    Answer.DISCONNECT, UNSUPPORTED_VERSION=Answer.OLDER, REBOOTSTRAP_REQUIRED=Answer.REBOOTSTRAP
)

#: SASL: whatever it is, we are not let in.
SASL_HANDSHAKE = _table(Answer.REFUSED)
SASL_AUTHENTICATE = _table(Answer.REFUSED)

#: The answer as a whole, from version 13 on.
METADATA = _table(Answer.REPEAT, REBOOTSTRAP_REQUIRED=Answer.REBOOTSTRAP)

#: One topic of it. Who waits for it gives up after `max_block_ms`.
METADATA_TOPIC = _table(
    Answer.WANTED,
    INVALID_TOPIC_EXCEPTION=Answer.INVALID,
    TOPIC_AUTHORIZATION_FAILED=Answer.DENIED,
    **{code.name: Answer.REPEAT for code in REFRESH},
)

#: One partition. What the answer tells of leader and epoch is true all the same.
METADATA_PARTITION: _Table = {
    int(code): Answer.REPEAT if needs_refresh(code) else Answer.TAKE for code in ErrorCode
}

#: Without a transactional id.
INIT_PRODUCER_ID = _table(Answer.FATAL, Answer.REPEAT, CLUSTER_AUTHORIZATION_FAILED=Answer.DENIED)

#: By the request's name, in the order in which they are sent.
CONTROL: Mapping[str, _Table] = {
    "ApiVersions": API_VERSIONS,
    "SaslHandshake": SASL_HANDSHAKE,
    "SaslAuthenticate": SASL_AUTHENTICATE,
    "Metadata": METADATA,
    "... topic": METADATA_TOPIC,
    "... partition": METADATA_PARTITION,
    "InitProducerId": INIT_PRODUCER_ID,
}


def answer_for(table: _Table, code: int) -> Answer:
    """What follows from an error code; an unknown one counts as UNKNOWN_SERVER_ERROR."""
    return table.get(code, table[ErrorCode.UNKNOWN_SERVER_ERROR])
