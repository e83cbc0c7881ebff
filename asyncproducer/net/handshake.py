"""What is said on a connection before it is ready: ApiVersions, and SASL where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from asyncproducer.core import wire
from asyncproducer.core.answers import API_VERSIONS, Answer, answer_for
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import (
    AuthenticationError,
    BrokerError,
    ErrorCode,
    UnsupportedVersionError,
    error_name,
)
from asyncproducer.net.security import Mechanism, OAuthBearer, authentication_error

__all__ = ["Channel", "authenticate", "discover", "negotiate"]

R = TypeVar("R")


class Channel(Protocol):
    """What the conversation needs of a connection."""

    async def ask(self, request: wire.Request[R], version: int) -> R:
        """One request and its response."""

    async def exchange_raw(self, token: bytes) -> bytes:
        """One token and its answer, framed by their size alone."""


async def negotiate(channel: Channel) -> wire.ApiVersionsResponse:
    """The versions that the broker speaks, asked in the newest words we have (KIP-511).

    Raises BrokerError when the broker refuses.
    """
    request = wire.ApiVersionsRequest()
    version = wire.SUPPORTED[ApiKey.API_VERSIONS][1]
    response = await channel.ask(request, version)
    if version > 0 and answer_for(API_VERSIONS, response.error_code) is Answer.OLDER:
        # An older broker. What it does speak is in its answer, or it is too old to say so.
        _, highest = response.versions.get(ApiKey.API_VERSIONS, (0, 0))
        version = min(version, highest)
        response = await channel.ask(request, version)
    if response.error_code:
        raise BrokerError(response.error_code, f"the broker refuses ApiVersions version {version}")
    return response


async def discover(channel: Channel) -> Mapping[int, tuple[int, int]]:
    """The versions that the broker speaks, asked before SASL.

    Always at version 0: an old broker takes a version that it does not know for the
    first token of GSSAPI, and hangs up (Java: SaslClientAuthenticator).
    Raises BrokerError when the broker refuses.
    """
    response = await channel.ask(wire.ApiVersionsRequest(), 0)
    if response.error_code:
        raise BrokerError(response.error_code, "the broker refuses ApiVersions version 0")
    return response.versions


async def authenticate(
    channel: Channel, mechanism: Mechanism, versions: Mapping[int, tuple[int, int]]
) -> float:
    """Who we are. Returns the session's lifetime in seconds, 0.0 when it has no end (KIP-368).

    Raises AuthenticationError with the broker's reason.
    """
    wrapped = ApiKey.SASL_AUTHENTICATE in versions
    # Version 1 of the handshake announces SaslAuthenticate; after version 0 the tokens
    # follow bare (KIP-152). Only brokers older than 1.0 want that.
    version = _choose(ApiKey.SASL_HANDSHAKE, versions, cap=None if wrapped else 0)
    handshake = await channel.ask(wire.SaslHandshakeRequest(mechanism.name), version)
    if handshake.error_code:
        raise _handshake_refused(mechanism.name, handshake.error_code, handshake.mechanisms)
    token: bytes | None = mechanism.initial()
    lifetime_ms = 0
    while token is not None:
        if wrapped:
            version = _choose(ApiKey.SASL_AUTHENTICATE, versions)
            response = await channel.ask(wire.SaslAuthenticateRequest(token), version)
            if response.error_code:
                raise _refused(mechanism, response.error_code, response.error_message)
            lifetime_ms = response.session_lifetime_ms
            challenge = response.auth_bytes
        else:
            challenge = await channel.exchange_raw(token)
        token = mechanism.step(challenge)
    return lifetime_ms / 1000


def _choose(
    api_key: ApiKey, versions: Mapping[int, tuple[int, int]], *, cap: int | None = None
) -> int:
    try:
        return wire.choose_version(api_key, versions, cap=cap)
    except UnsupportedVersionError as exc:
        raise authentication_error(
            f"the broker does not speak SASL here ({exc}); check security_protocol"
        ) from exc


def _handshake_refused(name: str, code: int, offered: Sequence[str]) -> AuthenticationError:
    if code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
        return authentication_error(
            f"the broker does not offer {name} on this listener; it offers"
            f" {', '.join(offered) or 'nothing'}: set sasl_mechanism",
            code,
        )
    if code == ErrorCode.ILLEGAL_SASL_STATE:
        return authentication_error(
            "the listener does not use SASL: set security_protocol to PLAINTEXT or SSL, or use"
            " the broker's SASL port",
            code,
        )
    return authentication_error(f"the broker refused the SASL handshake: {error_name(code)}", code)


def _refused(mechanism: Mechanism, code: int, message: str | None) -> AuthenticationError:
    text = f"{mechanism.name}: {message or error_name(code)}"
    if isinstance(mechanism, OAuthBearer) and mechanism.refusal:
        text += f"; {mechanism.refusal}"
    return authentication_error(text, code)
