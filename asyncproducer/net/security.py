"""TLS contexts and SASL mechanisms.

A mechanism does no I/O: `initial()` is the first token for the broker, `step(challenge)`
the answer to the broker's, and None when the exchange is complete. `Connection` carries
the tokens. Nothing in here puts a password or a token into a message or a repr.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import json
import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from asyncproducer.config import KEYSTORE_TO_PEM, TRUSTSTORE_TO_PEM
from asyncproducer.errors import AuthenticationError, ConfigError, ErrorCode, KafkaError

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig

__all__ = [
    "Mechanism",
    "OAuthBearer",
    "OAuthToken",
    "Plain",
    "Scram",
    "authentication_error",
    "mechanism",
    "ssl_context",
]


# --- TLS ---


def ssl_context(config: ProducerConfig) -> ssl.SSLContext | None:
    """The context for `security_protocol` SSL or SASL_SSL, else None.

    `config.ssl_context` is used as it is. Without a CA of their own (`ssl_cafile`,
    `ssl_truststore_certificates`) brokers are checked against the system's.
    Reads files, so it blocks for some milliseconds.
    Raises ConfigError naming the option whose file or text cannot be used.
    """
    if not config.uses_tls:
        return None
    if config.ssl_context is not None:
        return config.ssl_context
    context = _trusting_context(config)
    context.check_hostname = config.ssl_check_hostname
    versions = [_TLS_VERSIONS[name] for name in config.ssl_enabled_protocols]
    context.minimum_version, context.maximum_version = min(versions), max(versions)
    if config.ssl_cipher_suites:
        _set_ciphers(context, config.ssl_cipher_suites)
    if config.ssl_certfile is not None:
        _load_certificate(context, config, "ssl_certfile", config.ssl_certfile, config.ssl_keyfile)
    elif config.ssl_keystore_certificate_chain is not None:
        # OpenSSL's Python binding takes files only.
        descriptor, path = tempfile.mkstemp(suffix=".pem")  # readable by us alone
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{config.ssl_keystore_key}\n{config.ssl_keystore_certificate_chain}\n")
            _load_certificate(context, config, "ssl_keystore_certificate_chain", path, None)
        finally:
            os.unlink(path)
    return context


_TLS_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


def _trusting_context(config: ProducerConfig) -> ssl.SSLContext:
    file, text = config.ssl_cafile, config.ssl_truststore_certificates
    try:
        return ssl.create_default_context(cafile=file, cadata=text)
    except (OSError, TypeError) as exc:  # ssl.SSLError is an OSError; TypeError: not ASCII
        option = "ssl_truststore_certificates" if file is None else f"ssl_cafile={file!r}"
        # Who says it in Java's words may have Java's kind of file.
        hint = f"; {TRUSTSTORE_TO_PEM}" if config.ssl_truststore_location is not None else ""
        raise ConfigError(f"{option} cannot be read as PEM: {_cause(exc)}{hint}") from exc


def _set_ciphers(context: ssl.SSLContext, suites: Sequence[str]) -> None:
    try:
        context.set_ciphers(":".join(suites))
    except ssl.SSLError as exc:
        raise ConfigError(
            f"ssl_cipher_suites={','.join(suites)!r}: OpenSSL knows none of them (its names look"
            " like ECDHE-RSA-AES256-GCM-SHA384)"
        ) from exc


def _load_certificate(
    context: ssl.SSLContext,
    config: ProducerConfig,
    option: str,
    certfile: str,
    keyfile: str | None,
) -> None:
    try:
        # Never None: OpenSSL would ask for the password on the terminal, and wait.
        context.load_cert_chain(certfile, keyfile, password=config.ssl_password or "")
    except (OSError, ValueError) as exc:
        if config.ssl_certfile is not None:
            option += f"={certfile!r}" + (f", ssl_keyfile={keyfile!r}" if keyfile else "")
        hint = f"; {KEYSTORE_TO_PEM}" if config.ssl_keystore_location is not None else ""
        raise ConfigError(
            f"{option}: our certificate cannot be loaded: {_cause(exc)}; check that it is PEM, that"
            f" key and certificate belong together, and ssl_password{hint}"
        ) from exc


def _cause(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return exc.reason or str(exc)
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


# --- SASL ---


class Mechanism(Protocol):
    """One authentication. Used once."""

    @property
    def name(self) -> str:
        """Kafka's name of the mechanism."""

    def initial(self) -> bytes:
        """The first token for the broker."""

    def step(self, challenge: bytes) -> bytes | None:
        """The answer to the broker's token; None when nothing is left to say.

        Raises AuthenticationError when the broker's token is not acceptable.
        """


def authentication_error(message: str, code: int | None = None) -> AuthenticationError:
    """An `AuthenticationError` with the broker's error code."""
    error = AuthenticationError(message)
    error.code = ErrorCode.SASL_AUTHENTICATION_FAILED if code is None else code
    return error


async def mechanism(config: ProducerConfig) -> Mechanism:
    """A fresh mechanism for one authentication, as `sasl_mechanism` says.

    Waits for `sasl_oauth_token_provider` when that is asked; cancelling it is safe.
    Raises AuthenticationError when the token provider fails.
    """
    provider = config.sasl_oauth_token_provider
    if provider is not None:  # `config` sees to it that this means OAUTHBEARER
        return OAuthBearer(await _ask_for_token(provider))
    name = config.sasl_mechanism or ""
    username, password = config.sasl_username or "", config.sasl_password or ""
    return Plain(username, password) if name == "PLAIN" else Scram(name, username, password)


class Plain:
    """PLAIN (RFC 4616): name and password, readable for whoever sees the bytes. Use TLS."""

    __slots__ = ("_password", "_username")

    name = "PLAIN"

    def __init__(self, username: str, password: str) -> None:
        if "\0" in username or "\0" in password:
            raise ConfigError("sasl_username and sasl_password must not contain a NUL character")
        self._username = username
        self._password = password

    def initial(self) -> bytes:
        """NUL name NUL password: we act as nobody else."""
        return f"\0{self._username}\0{self._password}".encode()

    def step(self, challenge: bytes) -> bytes | None:
        """The broker's answer to PLAIN is empty."""
        return None


#: Java: ScramMechanism.minIterations. With fewer, whoever listens could guess the password.
MIN_ITERATIONS = 4096
#: Brokers store at most 16384 (ScramMechanism.maxIterations). The count comes from a peer
#: that has not proved yet who it is, and hashing keeps the event loop busy: 200000 is 0.1 s.
MAX_ITERATIONS = 200_000


class Scram:
    """SCRAM (RFC 5802, RFC 7677), without channel binding.

    The password is hashed as its UTF-8 bytes, without SASLprep, because brokers
    store it so (Java: ScramFormatter.normalize).
    """

    __slots__ = ("_first_bare", "_hash", "_nonce", "_password", "_server_signature", "name")

    def __init__(
        self, name: str, username: str, password: str, *, nonce: str | None = None
    ) -> None:
        self.name = name
        self._hash = name.removeprefix("SCRAM-").replace("-", "").lower()
        self._password = password.encode()
        self._nonce = secrets.token_urlsafe(24) if nonce is None else nonce
        saslname = username.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={saslname},r={self._nonce}"
        self._server_signature: bytes | None = None

    def initial(self) -> bytes:
        """client-first-message."""
        return f"n,,{self._first_bare}".encode()

    def step(self, challenge: bytes) -> bytes | None:
        """client-final-message, and then the check that the broker knows the password too."""
        try:
            message = challenge.decode()
        except UnicodeDecodeError as exc:
            raise self._malformed("it is not UTF-8") from exc
        expected = self._server_signature
        if expected is None:
            return self._final(message)
        self._verify(message, expected)
        return None

    _SERVER_FIRST = re.compile(r"r=([\x21-\x2b\x2d-\x7e]+),s=([A-Za-z0-9/+=]+),i=(\d{1,9})(?:,.*)?")

    def _final(self, server_first: str) -> bytes:
        match = self._SERVER_FIRST.fullmatch(server_first)
        if match is None:
            raise self._malformed("the first message is not r=...,s=...,i=...")
        nonce, salt, iterations = match[1], _unbase64(match[2]), int(match[3])
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise self._malformed("its nonce does not go on from ours")
        if salt is None:
            raise self._malformed("the salt is not base64")
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise authentication_error(
                f"{self.name}: the broker asks for {iterations} iterations; we accept"
                f" {MIN_ITERATIONS} to {MAX_ITERATIONS}"
            )
        without_proof = f"c=biws,r={nonce}"  # biws: base64 of "n,,", our channel binding header
        message = f"{self._first_bare},{server_first},{without_proof}".encode()
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, salt, iterations)
        client_key = self._hmac(salted, b"Client Key")
        stored_key = hashlib.new(self._hash, client_key).digest()
        signature = self._hmac(stored_key, message)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), message)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def _verify(self, server_final: str, expected: bytes) -> None:
        value = server_final.split(",", 1)[0]
        if value.startswith("e="):
            raise authentication_error(f"{self.name}: the broker answers {value[2:]!r}")
        signature = _unbase64(value[2:]) if value.startswith("v=") else None
        if signature is None:
            raise self._malformed("the final message has no signature")
        if not hmac.compare_digest(signature, expected):
            raise authentication_error(
                f"{self.name}: the peer could not prove that it knows the password:"
                " it is not the broker that it pretends to be"
            )

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._hash)

    def _malformed(self, why: str) -> AuthenticationError:
        return authentication_error(f"{self.name}: the broker's answer is malformed: {why}")


def _unbase64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error, or text that is not ASCII
        return None


class OAuthToken:
    """What a token provider returns when the token alone is not enough.

    `lifetime` is in seconds, for the provider's own bookkeeping: when to authenticate
    again is said by the broker (KIP-368). `extensions` go to the broker as they are
    (KIP-342). The repr shows neither the token nor the extensions.
    """

    __slots__ = ("extensions", "lifetime", "token")

    def __init__(
        self,
        token: str,
        lifetime: float | None = None,
        extensions: Mapping[str, str] | None = None,
    ) -> None:
        self.token = token
        self.lifetime = lifetime
        self.extensions = dict(extensions or {})

    def __repr__(self) -> str:
        return f"OAuthToken(lifetime={self.lifetime})"


class OAuthBearer:
    """OAUTHBEARER (RFC 7628): a token that the broker trusts. Use TLS.

    A broker refuses a token with a JSON document; its text is in the error that
    `refusal` describes, after the broker has been answered as the RFC wants it.
    """

    __slots__ = ("_extensions", "_token", "refusal")

    name = "OAUTHBEARER"

    # RFC 6750 b64token; Java: OAuthBearerClientInitialResponse.TOKEN_REGEX is the same.
    _TOKEN = re.compile(r"[-_.~+/A-Za-z0-9]+=*")
    _KEY = re.compile(r"[A-Za-z]+")
    _VALUE = re.compile(r"[\x21-\x7e \t\r\n]+")

    def __init__(self, token: OAuthToken) -> None:
        if not self._TOKEN.fullmatch(token.token):
            raise AuthenticationError(
                "OAUTHBEARER: the token contains characters that a bearer token cannot have"
            )
        for key, value in token.extensions.items():
            # "auth" is the token's own key (RFC 7628, section 3.1).
            if not self._KEY.fullmatch(key) or key == "auth" or not self._VALUE.fullmatch(value):
                raise AuthenticationError(f"OAUTHBEARER: the extension {key!r} is not valid")
        self._token = token.token
        self._extensions = token.extensions
        #: The broker's reason, once it has refused the token.
        self.refusal: str | None = None

    def initial(self) -> bytes:
        """The token and the extensions, each ended by ^A."""
        extensions = "".join(f"{key}={value}\x01" for key, value in self._extensions.items())
        return f"n,,\x01auth=Bearer {self._token}\x01{extensions}\x01".encode()

    def step(self, challenge: bytes) -> bytes | None:
        """None when the token was accepted. Else ^A: only then the broker ends the exchange."""
        if self.refusal is not None:
            raise authentication_error(f"OAUTHBEARER: {self.refusal}")
        if not challenge:
            return None
        self.refusal = _refusal(challenge)
        return b"\x01"


def _refusal(challenge: bytes) -> str:
    """`{"status": "invalid_token", "scope": ...}` in words (RFC 7628, section 3.2.2)."""
    known = ("status", "scope", "openid-configuration")
    try:
        document = json.loads(challenge)
        if not isinstance(document, dict):
            return "the broker refused the token"
        said = ", ".join(f"{key}={document[key]!r:.200}" for key in known if key in document)
    # A document may be nested deeper than Python reads, or writes.
    except (ValueError, RecursionError):
        return "the broker refused the token"
    return f"the broker refused the token ({said})" if said else "the broker refused the token"


async def _ask_for_token(provider: Callable[[], Awaitable[object]]) -> OAuthToken:
    try:
        answer = provider()
        found = await answer if inspect.isawaitable(answer) else answer
    except KafkaError:
        raise
    # Whatever the user's code raises. Its text may hold a secret: only the chain shows it.
    except Exception as exc:
        raise AuthenticationError(
            f"sasl_oauth_token_provider failed with {type(exc).__name__}"
        ) from exc
    if isinstance(found, str):
        return OAuthToken(found)
    token = getattr(found, "token", None)
    if not isinstance(token, str):
        raise AuthenticationError(
            "sasl_oauth_token_provider must return a str or an object with `token`, not"
            f" {type(found).__name__}"
        )
    return OAuthToken(token, getattr(found, "lifetime", None), getattr(found, "extensions", None))
