from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from asyncproducer.config import ProducerConfig
from asyncproducer.errors import AuthenticationError, ConfigError, ConnectionFailed
from asyncproducer.net import security
from asyncproducer.net.security import OAuthBearer, OAuthToken, Plain, Scram

PASSWORD = "correct horse"


def config(**options: object) -> ProducerConfig:
    return ProducerConfig.from_options("localhost:9092", **options)


# --- TLS ---


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def leaf(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert("client")


def pem_of(authority: trustme.CA) -> str:
    return authority.cert_pem.bytes().decode()


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
def test_plaintext_has_no_context(protocol: str) -> None:
    sasl = {"sasl_mechanism": "PLAIN", "sasl_username": "u", "sasl_password": "p"}
    options = sasl if protocol.startswith("SASL") else {}
    assert security.ssl_context(config(security_protocol=protocol, **options)) is None


def test_the_users_own_context_is_used_as_it_is() -> None:
    own = ssl.create_default_context()
    assert security.ssl_context(config(security_protocol="SSL", ssl_context=own)) is own


def test_default_context_checks_certificate_and_name_and_refuses_old_tls() -> None:
    context = security.ssl_context(config(security_protocol="SSL"))
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.maximum_version is ssl.TLSVersion.TLSv1_3


def test_an_empty_identification_algorithm_leaves_the_name_unchecked_but_not_the_certificate() -> (
    None
):
    context = security.ssl_context(
        config(security_protocol="SSL", ssl_endpoint_identification_algorithm="")
    )
    assert context is not None
    assert not context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_enabled_protocols_limit_the_versions() -> None:
    context = security.ssl_context(
        config(security_protocol="SSL", ssl_enabled_protocols=("TLSv1.3",))
    )
    assert context is not None
    assert context.minimum_version is context.maximum_version is ssl.TLSVersion.TLSv1_3


def test_cipher_suites_are_set() -> None:
    suite = "ECDHE-RSA-AES256-GCM-SHA384"
    context = security.ssl_context(config(security_protocol="SSL", ssl_cipher_suites=(suite,)))
    assert context is not None
    old = [c["name"] for c in context.get_ciphers() if not c["name"].startswith("TLS_")]
    assert old == [suite]


def test_unknown_cipher_suites_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="ssl_cipher_suites='NOPE'"):
        security.ssl_context(config(security_protocol="SSL", ssl_cipher_suites=("NOPE",)))


def test_own_authority_from_file_and_from_text_replaces_the_systems(
    authority: trustme.CA, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    for option in (
        {"ssl_cafile": str(file)},
        {"ssl_truststore_certificates": pem_of(authority)},
    ):
        context = security.ssl_context(config(security_protocol="SSL", **option))
        assert context is not None
        assert len(context.get_ca_certs()) == 1


def test_a_ca_file_that_is_missing_or_no_pem_is_a_config_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssl_cafile='.*nowhere.pem'.*No such file"):
        security.ssl_context(
            config(security_protocol="SSL", ssl_cafile=str(tmp_path / "nowhere.pem"))
        )
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(ConfigError, match="ssl_cafile"):
        security.ssl_context(config(security_protocol="SSL", ssl_cafile=str(tmp_path / "text.pem")))
    for text in ("hello", "grün"):
        with pytest.raises(ConfigError, match="ssl_truststore_certificates cannot be read"):
            security.ssl_context(config(security_protocol="SSL", ssl_truststore_certificates=text))


def test_a_store_of_javas_is_a_config_error_with_the_way_to_pem(tmp_path: Path) -> None:
    """Whoever gives its location alone hears of it when it is read."""
    jks = tmp_path / "store.jks"
    jks.write_bytes(b"\xfe\xed\xfe\xed" + bytes(100))
    for store, tool in (("truststore", "keytool -list"), ("keystore", "openssl pkcs12")):
        with pytest.raises(ConfigError, match=rf"store\.jks'.*PEM.*{tool}"):
            security.ssl_context(
                config(security_protocol="SSL", **{f"ssl_{store}_location": str(jks)})
            )
    with pytest.raises(ConfigError) as caught:
        security.ssl_context(config(security_protocol="SSL", ssl_cafile=str(jks)))
    assert "keytool" not in str(caught.value)


def test_client_certificate_from_files(
    authority: trustme.CA, leaf: trustme.LeafCert, tmp_path: Path
) -> None:
    cert, key, both = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "both.pem"))
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    leaf.private_key_and_cert_chain_pem.write_to_path(both)
    for option in ({"ssl_certfile": cert, "ssl_keyfile": key}, {"ssl_certfile": both}):
        assert security.ssl_context(config(security_protocol="SSL", **option)) is not None
    other = str(tmp_path / "other.pem")
    authority.issue_cert("other").private_key_pem.write_to_path(other)
    with pytest.raises(ConfigError, match=r"ssl_certfile='.*', ssl_keyfile='.*other.pem'"):
        security.ssl_context(config(security_protocol="SSL", ssl_certfile=cert, ssl_keyfile=other))


def test_client_certificate_from_text_leaves_no_file_behind(
    leaf: trustme.LeafCert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    key = leaf.private_key_pem.bytes().decode()
    chain = leaf.cert_chain_pems[0].bytes().decode()
    options = {"ssl_keystore_key": key, "ssl_keystore_certificate_chain": chain}
    assert security.ssl_context(config(security_protocol="SSL", **options)) is not None
    options["ssl_keystore_key"] = "no key"
    with pytest.raises(ConfigError, match="ssl_keystore_certificate_chain: our certificate") as e:
        security.ssl_context(config(security_protocol="SSL", **options))
    assert "no key" not in str(e.value)
    assert os.listdir(tmp_path) == []


def test_an_encrypted_key_without_password_fails_and_does_not_ask_the_terminal(
    leaf: trustme.LeafCert, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    encrypted = loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(PASSWORD.encode()),
    )
    (tmp_path / "key.pem").write_bytes(encrypted)
    leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    files = {
        "ssl_certfile": str(tmp_path / "cert.pem"),
        "ssl_keyfile": str(tmp_path / "key.pem"),
    }
    with pytest.raises(ConfigError, match="ssl_password"):
        security.ssl_context(config(security_protocol="SSL", **files))
    assert security.ssl_context(config(security_protocol="SSL", ssl_password=PASSWORD, **files))


# --- PLAIN ---


def test_plain_sends_name_and_password_once() -> None:
    plain = Plain("alice", PASSWORD)
    assert plain.initial() == b"\0alice\0correct horse"
    assert plain.step(b"") is None


def test_plain_refuses_a_nul_that_would_move_the_border_between_name_and_password() -> None:
    for pair in (("a\0b", "p"), ("a", "p\0")):
        with pytest.raises(ConfigError, match="NUL"):
            Plain(*pair)


# --- SCRAM ---


@pytest.mark.parametrize(
    ("name", "nonce", "server_first", "client_final", "server_final"),
    [
        pytest.param(
            "SCRAM-SHA-1",
            "fyko+d2lbbFgONRv9qkxdawL",
            "r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
            "c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
            "v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
            id="RFC 5802, section 5",
        ),
        pytest.param(
            "SCRAM-SHA-256",
            "rOprNGfwEbeRWgbNEkqO",
            "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
            ",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
            "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
            ",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
            "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
            id="RFC 7677, section 3",
        ),
    ],
)
def test_scram_says_what_the_rfcs_say(
    name: str, nonce: str, server_first: str, client_final: str, server_final: str
) -> None:
    scram = Scram(name, "user", "pencil", nonce=nonce)
    assert scram.initial() == f"n,,n=user,r={nonce}".encode()
    assert scram.step(server_first.encode()) == client_final.encode()
    assert scram.step(server_final.encode()) is None


def scram_server(
    hash_name: str, password: bytes, first: bytes, final_of: Callable[[bytes], bytes | None]
) -> bytes:
    """The other side, written from the formulas of RFC 5802, section 3. Its signature."""
    bare = first.removeprefix(b"n,,")
    salt, iterations = b"0123456789abcdef", 4096
    nonce = bare.split(b"r=")[1] + b"srv"
    server_first = b"r=%s,s=%s,i=%d" % (nonce, base64.b64encode(salt), iterations)
    final = final_of(server_first)
    assert final is not None
    without_proof, proof = final.rsplit(b",p=", 1)
    message = b",".join((bare, server_first, without_proof))
    salted = hashlib.pbkdf2_hmac(hash_name, password, salt, iterations)
    stored = hashlib.new(hash_name, hmac.digest(salted, b"Client Key", hash_name)).digest()
    signature = hmac.digest(stored, message, hash_name)
    key = bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True))
    assert hashlib.new(hash_name, key).digest() == stored, "the client's proof is wrong"
    server_key = hmac.digest(salted, b"Server Key", hash_name)
    return hmac.digest(server_key, message, hash_name)


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_convinces_a_server_and_is_convinced(name: str) -> None:
    scram = Scram(name, "alice", PASSWORD)
    hash_name = "sha" + name[-3:]
    signature = scram_server(hash_name, PASSWORD.encode(), scram.initial(), scram.step)
    assert scram.step(b"v=" + base64.b64encode(signature)) is None


def test_scram_hashes_the_password_as_it_is_because_brokers_do() -> None:
    """RFC 5802 wants SASLprep, Java's ScramFormatter stores the plain UTF-8."""
    scram = Scram("SCRAM-SHA-256", "alice", "\u2168 \u00aa")
    scram_server("sha256", "\u2168 \u00aa".encode(), scram.initial(), scram.step)


def test_scram_escapes_the_name() -> None:
    assert Scram("SCRAM-SHA-256", "a=b,c", "p", nonce="N").initial() == b"n,,n=a=3Db=2Cc,r=N"


def test_scram_nonces_differ() -> None:
    assert Scram("SCRAM-SHA-256", "a", "p").initial() != Scram("SCRAM-SHA-256", "a", "p").initial()


def test_scram_refuses_a_server_that_does_not_know_the_password() -> None:
    scram = Scram("SCRAM-SHA-256", "alice", PASSWORD)
    scram_server("sha256", PASSWORD.encode(), scram.initial(), scram.step)
    with pytest.raises(AuthenticationError, match="could not prove"):
        scram.step(b"v=" + base64.b64encode(bytes(32)))


@pytest.mark.parametrize(
    ("server_first", "said"),
    [
        (b"r=other,s=AAAA,i=4096", "nonce"),
        (b"r=N,s=AAAA,i=4096", "nonce"),
        (b"r=Nx,s=AAA,i=4096", "salt"),
        (b"r=Nx,s=AAAA,i=4095", "4095 iterations"),
        (b"r=Nx,s=AAAA,i=200001", "200001 iterations"),
        (b"r=Nx,s=AAAA,i=99999999999999999999", "malformed"),
        (b"m=ext,r=Nx,s=AAAA,i=4096", "malformed"),
        (b"", "malformed"),
        (b"\xff", "UTF-8"),
    ],
)
def test_scram_refuses_a_bad_first_message(server_first: bytes, said: str) -> None:
    with pytest.raises(AuthenticationError, match=said):
        Scram("SCRAM-SHA-256", "alice", PASSWORD, nonce="N").step(server_first)


@pytest.mark.parametrize(
    ("server_final", "said"),
    [
        (b"e=unknown-user", "unknown-user"),
        (b"v=?", "no signature"),
        ("v=é".encode(), "no signature"),
        (b"", "no signature"),
        (b"x=1", "no signature"),
    ],
)
def test_scram_refuses_a_bad_final_message(server_final: bytes, said: str) -> None:
    scram = Scram("SCRAM-SHA-256", "alice", PASSWORD, nonce="N")
    scram.step(b"r=Nx,s=AAAA,i=4096")
    with pytest.raises(AuthenticationError, match=said):
        scram.step(server_final)


# --- OAUTHBEARER ---


def test_oauth_first_message_is_that_of_rfc_7628_with_kip_342_extensions() -> None:
    assert OAuthBearer(OAuthToken("abc.def")).initial() == b"n,,\x01auth=Bearer abc.def\x01\x01"
    token = OAuthToken("t", extensions={"logicalCluster": "lkc-1", "poolId": "p 1"})
    assert OAuthBearer(token).initial() == (
        b"n,,\x01auth=Bearer t\x01logicalCluster=lkc-1\x01poolId=p 1\x01\x01"
    )


def test_oauth_is_done_when_the_broker_answers_nothing() -> None:
    assert OAuthBearer(OAuthToken("t")).step(b"") is None


def test_oauth_answers_a_refusal_with_control_a_and_keeps_its_reason() -> None:
    bearer = OAuthBearer(OAuthToken("t"))
    assert bearer.step(b'{"status":"invalid_token","scope":"kafka","x":1}') == b"\x01"
    assert bearer.refusal == "the broker refused the token (status='invalid_token', scope='kafka')"
    with pytest.raises(AuthenticationError, match="invalid_token"):
        bearer.step(b"")


@pytest.mark.parametrize("challenge", [b"nonsense", b"[]", b"{}", b"\xff"])
def test_oauth_survives_a_refusal_that_is_no_json_object(challenge: bytes) -> None:
    bearer = OAuthBearer(OAuthToken("t"))
    assert bearer.step(challenge) == b"\x01"
    assert bearer.refusal == "the broker refused the token"


@pytest.mark.parametrize("token", ["", "se cret", "se\x01cret", "sécret", "secret\n"])
def test_oauth_refuses_a_token_that_would_break_the_message(token: str) -> None:
    with pytest.raises(AuthenticationError, match="characters") as e:
        OAuthBearer(OAuthToken(token))
    assert "cret" not in str(e.value)


@pytest.mark.parametrize("extension", [("auth", "x"), ("a1", "x"), ("a", ""), ("a", "x\x01")])
def test_oauth_refuses_an_extension_that_would_break_the_message(
    extension: tuple[str, str],
) -> None:
    with pytest.raises(AuthenticationError, match=f"extension '{extension[0]}'"):
        OAuthBearer(OAuthToken("t", extensions=dict([extension])))


# --- which mechanism ---


def sasl(mechanism: str, **options: object) -> ProducerConfig:
    if mechanism != "OAUTHBEARER":
        options = {"sasl_username": "alice", "sasl_password": PASSWORD, **options}
    return config(security_protocol="SASL_SSL", sasl_mechanism=mechanism, **options)


@pytest.mark.parametrize("name", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_mechanism_is_the_configured_one(name: str) -> None:
    assert (await security.mechanism(sasl(name))).name == name


class Token:
    def __init__(self) -> None:
        self.token = "from-object"
        self.extensions = {"a": "b"}


@pytest.mark.parametrize(
    ("found", "initial"),
    [
        ("from-str", b"n,,\x01auth=Bearer from-str\x01\x01"),
        (OAuthToken("from-token", 60.0), b"n,,\x01auth=Bearer from-token\x01\x01"),
        (Token(), b"n,,\x01auth=Bearer from-object\x01a=b\x01\x01"),
    ],
)
async def test_token_provider_is_awaited_for_each_authentication(
    found: object, initial: bytes
) -> None:
    calls = []

    async def provider() -> object:
        await asyncio.sleep(0)
        calls.append(1)
        return found

    for _ in range(2):
        mechanism = await security.mechanism(
            sasl("OAUTHBEARER", sasl_oauth_token_provider=provider)
        )
        assert mechanism.initial() == initial
    assert len(calls) == 2


async def test_token_provider_may_return_only_a_token() -> None:
    async def provider() -> object:
        return b"bytes"

    with pytest.raises(AuthenticationError, match=r"must return a str .* not bytes"):
        await security.mechanism(sasl("OAUTHBEARER", sasl_oauth_token_provider=provider))


async def test_failing_token_provider_is_an_authentication_error_without_its_text() -> None:
    async def provider() -> str:
        raise ValueError("client_secret=hunter2")

    with pytest.raises(AuthenticationError, match="failed with ValueError") as e:
        await security.mechanism(sasl("OAUTHBEARER", sasl_oauth_token_provider=provider))
    assert "hunter2" not in str(e.value)
    assert isinstance(e.value.__cause__, ValueError)


async def test_our_own_errors_pass_through_the_token_provider() -> None:
    async def provider() -> str:
        raise ConnectionFailed("the token service is down")

    with pytest.raises(ConnectionFailed, match="token service"):
        await security.mechanism(sasl("OAUTHBEARER", sasl_oauth_token_provider=provider))


async def test_no_repr_shows_a_secret() -> None:
    objects = [
        Plain("alice", PASSWORD),
        Scram("SCRAM-SHA-256", "alice", PASSWORD),
        OAuthToken(PASSWORD.replace(" ", "."), 5.0, {"key": PASSWORD}),
        OAuthBearer(OAuthToken("correct.horse")),
    ]
    assert not [o for o in objects if "horse" in repr(o)]
    assert repr(objects[2]) == "OAuthToken(lifetime=5.0)"


@pytest.mark.parametrize(
    "document",
    [b"[" * 50_000, b'{"status":' + b"[" * 980 + b"]" * 980 + b"}", b'{"status":' * 50_000],
)
def test_a_refusal_that_is_nested_deeper_than_can_be_read_is_a_refusal(document: bytes) -> None:
    mechanism = OAuthBearer(OAuthToken("token"))
    assert mechanism.step(document) == b"\x01"
    with pytest.raises(AuthenticationError, match="the broker refused the token"):
        mechanism.step(b"")
