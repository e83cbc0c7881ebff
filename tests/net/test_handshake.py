from __future__ import annotations

from typing import TypeVar

import pytest

from asyncproducer.core import wire
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import AuthenticationError, BrokerError, ErrorCode
from asyncproducer.net import handshake
from asyncproducer.net.security import OAuthBearer, OAuthToken, Plain

R = TypeVar("R")

VERSIONS: dict[int, tuple[int, int]] = {
    ApiKey.SASL_HANDSHAKE: (0, 1),
    ApiKey.SASL_AUTHENTICATE: (0, 2),
}


class Channel:
    """A broker that answers from a script, and notes what it was asked, at which version."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []
        self.tokens: list[bytes] = []

    async def ask(self, request: wire.Request[R], version: int) -> R:
        self.asked.append((request.api_key.name, version))
        if isinstance(request, wire.SaslAuthenticateRequest):
            self.tokens.append(request.auth_bytes)
        return self.answers.pop(0)  # type: ignore[return-value]

    async def exchange_raw(self, token: bytes) -> bytes:
        self.asked.append(("raw", 0))
        self.tokens.append(token)
        return self.answers.pop(0)  # type: ignore[return-value]


def api_versions(
    error_code: int = 0, versions: dict[int, tuple[int, int]] | None = None
) -> wire.ApiVersionsResponse:
    return wire.ApiVersionsResponse(error_code, versions or {}, {}, -1, 0)


def accepted(*mechanisms: str, error_code: int = 0) -> wire.SaslHandshakeResponse:
    return wire.SaslHandshakeResponse(error_code, mechanisms)


def token(
    challenge: bytes = b"", *, error_code: int = 0, message: str | None = None, lifetime: int = 0
) -> wire.SaslAuthenticateResponse:
    return wire.SaslAuthenticateResponse(error_code, message, challenge, lifetime)


# --- ApiVersions ---


NEWEST = wire.SUPPORTED[ApiKey.API_VERSIONS][1]


async def test_the_newest_version_is_asked_first() -> None:
    """NC-05: success."""
    channel = Channel(api_versions(0, {3: (0, 13)}))
    assert (await handshake.negotiate(channel)).versions == {3: (0, 13)}
    assert channel.asked == [("API_VERSIONS", NEWEST)]


async def test_an_older_broker_is_asked_again_with_the_version_that_it_lists() -> None:
    """NC-05: 35 with a version list."""
    old = api_versions(35, {ApiKey.API_VERSIONS: (0, 2)})
    channel = Channel(old, api_versions(0, {3: (0, 5)}))
    assert (await handshake.negotiate(channel)).versions == {3: (0, 5)}
    assert channel.asked == [("API_VERSIONS", NEWEST), ("API_VERSIONS", 2)]


async def test_a_very_old_broker_is_asked_again_with_version_0() -> None:
    """NC-05: 35 without a list."""
    channel = Channel(api_versions(35), api_versions(0, {3: (0, 5)}))
    await handshake.negotiate(channel)
    assert channel.asked[1] == ("API_VERSIONS", 0)


async def test_a_list_that_goes_beyond_us_is_cut_to_our_own() -> None:
    channel = Channel(api_versions(35, {ApiKey.API_VERSIONS: (0, 99)}), api_versions())
    await handshake.negotiate(channel)
    assert channel.asked[1] == ("API_VERSIONS", NEWEST)


@pytest.mark.parametrize("code", [ErrorCode.INVALID_REQUEST, ErrorCode.REBOOTSTRAP_REQUIRED])
async def test_any_other_error_is_the_end(code: ErrorCode) -> None:
    """NC-05: ApiVersions error other than 35. NC-21: 129 is told as it is."""
    channel = Channel(api_versions(code))
    with pytest.raises(BrokerError, match=f"{code.name}.*ApiVersions version {NEWEST}") as e:
        await handshake.negotiate(channel)
    assert e.value.code == code
    assert len(channel.asked) == 1


async def test_a_broker_that_refuses_twice_is_not_asked_a_third_time() -> None:
    channel = Channel(api_versions(35), api_versions(35))
    with pytest.raises(BrokerError, match="ApiVersions version 0"):
        await handshake.negotiate(channel)


async def test_before_sasl_only_version_0_is_asked() -> None:
    channel = Channel(api_versions(0, VERSIONS))
    assert await handshake.discover(channel) == VERSIONS
    assert channel.asked == [("API_VERSIONS", 0)]


async def test_before_sasl_an_error_is_the_end() -> None:
    with pytest.raises(BrokerError, match="version 0"):
        await handshake.discover(Channel(api_versions(35)))


# --- SASL ---


async def test_tokens_travel_in_sasl_authenticate() -> None:
    channel = Channel(accepted(), token(lifetime=3_600_000))
    lifetime = await handshake.authenticate(channel, Plain("u", "p"), VERSIONS)
    assert lifetime == 3600.0
    assert channel.asked == [("SASL_HANDSHAKE", 1), ("SASL_AUTHENTICATE", 2)]
    assert channel.tokens == [b"\0u\0p"]


async def test_the_lifetime_that_counts_is_that_of_the_last_answer() -> None:
    class TwoSteps:
        name = "TWO"

        def initial(self) -> bytes:
            return b"first"

        def step(self, challenge: bytes) -> bytes | None:
            return b"second" if challenge == b"go on" else None

    channel = Channel(accepted(), token(b"go on", lifetime=0), token(lifetime=500))
    assert await handshake.authenticate(channel, TwoSteps(), VERSIONS) == 0.5
    assert channel.tokens == [b"first", b"second"]


async def test_a_broker_before_1_0_gets_bare_tokens_after_handshake_0() -> None:
    channel = Channel(accepted(), b"")
    lifetime = await handshake.authenticate(
        channel, Plain("u", "p"), {ApiKey.SASL_HANDSHAKE: (0, 1)}
    )
    assert channel.asked == [("SASL_HANDSHAKE", 0), ("raw", 0)]
    assert channel.tokens == [b"\0u\0p"]
    assert lifetime == 0.0


async def test_an_unknown_mechanism_lists_what_the_broker_offers() -> None:
    channel = Channel(accepted("SCRAM-SHA-512", "OAUTHBEARER", error_code=33))
    with pytest.raises(
        AuthenticationError, match=r"not offer PLAIN .* offers SCRAM-SHA-512, OAUTHBEARER"
    ) as e:
        await handshake.authenticate(channel, Plain("u", "secret"), VERSIONS)
    assert e.value.code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert "secret" not in str(e.value)


async def test_a_listener_without_sasl_says_to_change_the_protocol() -> None:
    with pytest.raises(AuthenticationError, match="set security_protocol to PLAINTEXT"):
        await handshake.authenticate(Channel(accepted(error_code=34)), Plain("u", "p"), VERSIONS)


async def test_another_handshake_error_is_named() -> None:
    with pytest.raises(AuthenticationError, match="INVALID_REQUEST"):
        await handshake.authenticate(Channel(accepted(error_code=42)), Plain("u", "p"), VERSIONS)


async def test_a_peer_that_knows_no_handshake_is_an_authentication_error() -> None:
    with pytest.raises(AuthenticationError, match=r"does not speak SASL.*security_protocol"):
        await handshake.authenticate(Channel(), Plain("u", "p"), {})


@pytest.mark.parametrize(("message", "said"), [("bad user", "bad user"), (None, "FAILED")])
async def test_a_refused_token_is_told_in_the_brokers_words(message: str | None, said: str) -> None:
    channel = Channel(accepted(), token(error_code=58, message=message))
    with pytest.raises(AuthenticationError, match=f"PLAIN: .*{said}") as e:
        await handshake.authenticate(channel, Plain("u", "secret"), VERSIONS)
    assert e.value.code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert not e.value.retriable
    assert "secret" not in str(e.value)


async def test_a_refused_oauth_token_is_told_with_the_brokers_document() -> None:
    channel = Channel(
        accepted(), token(b'{"status":"invalid_token"}'), token(error_code=58, message="no")
    )
    with pytest.raises(AuthenticationError, match=r"OAUTHBEARER: no; .*status='invalid_token'"):
        await handshake.authenticate(channel, OAuthBearer(OAuthToken("t0k3n")), VERSIONS)
    assert channel.tokens[1] == b"\x01"
