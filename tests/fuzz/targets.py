"""What is fed with hostile bytes, and what must hold each time.

A target makes an input (broken a little, from a valid one) and runs one. `run` returns
when all is well, whether the input was taken or refused; whatever it raises is a
finding. So is an input that needs too much time or memory, which the runner watches.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

from kio.schema.errors import ErrorCode

from asyncproducer.core import batch, wire
from asyncproducer.core.compression import codec_by_id
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import AuthenticationError, KafkaError, ProtocolError
from asyncproducer.net import handshake
from asyncproducer.net.frames import MAX_FRAME_BYTES, FrameReader
from asyncproducer.net.security import Mechanism, OAuthBearer, OAuthToken, Plain, Scram
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork, batches, clock
from asyncproducer.testing.handlers import APIS
from asyncproducer.testing.messages import (
    BytesBehind,
    MalformedRequest,
    decode_body,
    decode_header,
    decode_response,
    request_class,
    response_class,
)
from asyncproducer.testing.raw_client import RawClient
from asyncproducer.testing.shapes import inner_type
from asyncproducer.testing.storage import AppendRefused, LogConfig, PartitionLog

from .expected import expected
from .messages import broken_answer, broken_request, encode, records, sample
from .mutator import mutate
from .producer import Complaints, one_history

__all__ = ["TARGETS", "Target"]

R = TypeVar("R")


class Target(ABC):
    """Something that reads what a peer sends."""

    name: ClassVar[str]
    #: What is to be covered: the files, below asyncproducer/.
    files: ClassVar[tuple[str, ...]]
    #: The memory that one input may take, in MiB.
    memory: ClassVar[int] = 64
    #: The CPU time that one input may take, in seconds; a larger one as often as it has MiB.
    seconds: ClassVar[float] = 1.0

    @abstractmethod
    def make(self, rng: random.Random) -> bytes:
        """An input."""

    @abstractmethod
    def run(self, data: bytes) -> None:
        """Feeds one input. Raises when something does not hold."""


def pieces(data: bytes) -> Iterator[bytes]:
    """An input that is several: each with its size in two bytes. What is cut ends it."""
    position = 0
    while position + 2 <= len(data):
        end = position + 2 + int.from_bytes(data[position : position + 2], "big")
        yield data[position + 2 : end]
        position = end


def joined(*parts: bytes) -> bytes:
    cut = [part[:65535] for part in parts]
    return b"".join(len(part).to_bytes(2, "big") + part for part in cut)


# -- answers ---------------------------------------------------------------------------------------

#: What reading an answer needs to know of its request.
_REQUESTS: dict[ApiKey, Any] = {ApiKey.FIND_COORDINATOR: wire.FindCoordinatorRequest(0, ["a key"])}


def _decoders() -> list[tuple[ApiKey, int]]:
    keys = {ApiKey.PRODUCE}
    for request in wire.Request.__subclasses__():
        keys.add(request.api_key)
        _REQUESTS.setdefault(request.api_key, object.__new__(request))
    return [
        (k, v) for k in sorted(keys) for v in range(wire.SUPPORTED[k][0], wire.SUPPORTED[k][1] + 1)
    ]


DECODERS = _decoders()


class Answers(Target):
    """Every answer that we read, of every version: its value, or ProtocolError.

    Where kio reads the same bytes, it must be the same value.
    """

    name = "answers"
    files = ("core/wire.py", "core/produce.py", "core/primitives.py")

    def make(self, rng: random.Random) -> bytes:
        key, version = rng.choice(DECODERS)
        return bytes([key, version]) + broken_answer(rng, key, version)

    def run(self, data: bytes) -> None:
        if len(data) < 2 or (data[0], data[1]) not in DECODERS:
            return
        key, version = ApiKey(data[0]), data[1]
        try:
            _, body = wire.split_frame(key, version, data[2:])
            if key == ApiKey.PRODUCE:
                answer: Any = wire.decode_produce(version, body)
            else:
                answer = _REQUESTS[key].decode(version, body)
        except ProtocolError:
            return
        self._compare(key, version, data[2:], answer)

    def _compare(self, key: ApiKey, version: int, frame: bytes, ours: Any) -> None:
        try:
            _, theirs = decode_response(key, version, frame)
        except BytesBehind:
            # A broker that does not speak the version answers in the oldest one.
            if (key, ours[0]) != (ApiKey.API_VERSIONS, ErrorCode.unsupported_version):
                raise
        # kio refuses more than we do: error codes and tags that are newer than itself.
        except Exception:
            return
        else:
            assert ours == expected(key, version, theirs)


# -- frames ----------------------------------------------------------------------------------------


class Frames(Target):
    """However the stream is cut, the same frames come out, and the same error."""

    name = "frames"
    files = ("net/frames.py",)

    def make(self, rng: random.Random) -> bytes:
        stream = bytearray()
        for _ in range(rng.randrange(6)):
            payload = rng.randbytes(rng.choice((0, 1, 3, 4, 5, 700)))
            stream += len(payload).to_bytes(4, "big") + payload
        return rng.randbytes(4) + mutate(rng, bytes(stream), (), b"HTTP/1.1 400\r\n")

    def run(self, data: bytes) -> None:
        rng, stream = random.Random(data[:4]), data[4:]
        expected, end, fails = self._frames(stream)
        reader = FrameReader()
        got: list[bytes] = []
        position = 0
        try:
            while position < len(stream):
                size = rng.choice((1, 2, 3, 4, 5, 100, len(stream)))
                got += map(bytes, reader.feed(stream[position : position + size]))
                position += size
        except ProtocolError:
            assert fails
            assert got == expected[: len(got)]
            return
        assert not fails
        assert got == expected
        assert reader.incomplete == (end < len(stream))

    def _frames(self, stream: bytes) -> tuple[list[bytes], int, bool]:
        """The frames, where the last one ends, and whether the size behind it is impossible."""
        frames: list[bytes] = []
        at = 0
        while at + 4 <= len(stream):
            (size,) = struct.unpack_from(">i", stream, at)
            if not 0 <= size <= MAX_FRAME_BYTES:
                return frames, at, True
            if at + 4 + size > len(stream):
                break
            frames.append(stream[at + 4 : at + 4 + size])
            at += 4 + size
        return frames, at, False


# -- the handshake and SASL ------------------------------------------------------------------------


class _Script:
    """A channel whose peer says what the input says."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        self._answers = answers
        self.asked = 0

    def _next(self) -> bytes:
        self.asked += 1
        assert self.asked < 10, "the conversation does not end"
        try:
            return next(self._answers)
        except StopIteration:
            raise ProtocolError("the peer has hung up") from None

    async def ask(self, request: wire.Request[R], version: int) -> R:
        wire.encode_frame(request, version, 0, "fuzz")
        return request.decode(version, self._next())

    async def exchange_raw(self, token: bytes) -> bytes:
        return self._next()


def _at_once(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("it waits")


_NONCE = "fyko+d2lbbFgONRv9qkxdawL"


def _mechanism(number: int) -> Mechanism:
    return (
        Plain("user", "secret"),
        Scram("SCRAM-SHA-256", "user", "secret", nonce=_NONCE),
        Scram("SCRAM-SHA-512", "user", "secret", nonce=_NONCE),
        OAuthBearer(OAuthToken("token")),
    )[number % 4]


def _challenges(rng: random.Random, number: int) -> list[bytes]:
    """What a broker would say."""
    if number == 0:
        return [b""]
    if number == 3:
        refusal = b'{"status":"invalid_token","scope":["a",{"b":null}],"openid-configuration":1.5}'
        return rng.choice(([b""], [refusal, b""], [b"[" * 50_000, b""], [b'{"status":' * 900]))
    first = f"r={_NONCE}server,s={base64.b64encode(b'salt salt').decode()},i=4096"
    return [first.encode(), _server_final(first, ("sha256", "sha512")[number - 1])]


def _server_final(server_first: str, algorithm: str) -> bytes:
    """RFC 5802: what a server that knows the password answers."""
    salted = hashlib.pbkdf2_hmac(algorithm, b"secret", b"salt salt", 4096)
    key = hmac.digest(salted, b"Server Key", algorithm)
    message = f"n=user,r={_NONCE},{server_first},c=biws,r={_NONCE}server"
    return b"v=" + base64.b64encode(hmac.digest(key, message.encode(), algorithm))


class Sasl(Target):
    """Tokens of a broker, or of who pretends to be one: a step on, or AuthenticationError."""

    name = "sasl"
    files = ("net/security.py",)

    def make(self, rng: random.Random) -> bytes:
        number = rng.randrange(4)
        tokens = _challenges(rng, number)
        at = rng.randrange(len(tokens))
        tokens[at] = mutate(rng, tokens[at], (), b"r=x,s=,i=1")
        return bytes([number]) + joined(*tokens)

    def run(self, data: bytes) -> None:
        mechanism = _mechanism(data[0] if data else 0)
        mechanism.initial()
        genuine = (_challenges(random.Random(0), data[0] % 4) if data else [])[1:]
        try:
            for number, challenge in enumerate(pieces(data[1:])):
                if mechanism.step(challenge) is None:
                    # Nobody gets in who does not know the password.
                    assert not isinstance(mechanism, Scram) or (number == 1 and genuine)
                    return
        except AuthenticationError as refused:
            text = str(refused)
        else:
            text = ""
        assert "secret" not in text
        assert len(text) < 2000 + len(data)


class Handshake(Target):
    """ApiVersions and SASL in one piece: ready, or an error of ours. Never endless."""

    name = "handshake"
    files = ("net/handshake.py", "net/security.py", "core/wire.py")

    def make(self, rng: random.Random) -> bytes:
        number = rng.randrange(8)
        answers: list[bytes] = []
        if number & 4:
            for key, version, fields in (
                (18, 0, {"error_code": ErrorCode.none}),
                (17, 1, {"error_code": ErrorCode.none}),
            ):
                answers.append(self._answer(rng, key, version, fields))
            for token in _challenges(rng, number % 4):
                answer = {"error_code": ErrorCode.none, "auth_bytes": token}
                answers.append(self._answer(rng, 36, 2, answer))
        else:
            for _ in range(2):
                code = rng.choice((ErrorCode.none, ErrorCode.unsupported_version))
                version = rng.choice((0, 1, 3, 4))
                answers.append(self._answer(rng, 18, version, {"error_code": code}))
        if rng.random() < 0.5:
            at = rng.randrange(len(answers))
            answers[at] = mutate(rng, answers[at], (), answers[0])
        return bytes([number]) + joined(*answers)

    def _answer(self, rng: random.Random, key: int, version: int, fields: dict[str, Any]) -> bytes:
        kind = response_class(key, version)
        if key == 18:
            api, _ = inner_type(kind.__dataclass_fields__["api_keys"].type)
            fields["api_keys"] = tuple(
                api(api_key=k, min_version=0, max_version=high)
                for k, high in ((17, 1), (36, 2), (18, rng.choice((2, 4))))
            )
        return encode(sample(rng, kind, **fields))

    def run(self, data: bytes) -> None:
        number = data[0] if data else 0
        channel = _Script(pieces(data[1:]))
        try:
            if number & 4:
                versions = _at_once(handshake.discover(channel))
                lifetime = _at_once(
                    handshake.authenticate(channel, _mechanism(number % 4), versions)
                )
                assert isinstance(lifetime, float)
            else:
                versions = _at_once(handshake.negotiate(channel)).versions
        except KafkaError:
            return
        for key, (low, high) in wire.SUPPORTED.items():
            try:
                assert low <= wire.choose_version(key, versions) <= high
            except KafkaError:
                pass


# -- record batches --------------------------------------------------------------------------------


class Batches(Target):
    """A batch in a broker's hands: stored, and then readable, or refused."""

    name = "batches"
    files = ("testing/batches.py", "testing/storage.py", "core/compression.py")
    #: What a small batch may be blown up to (compression.DEFAULT_MAX_SIZE), and its copies.
    memory = 600
    seconds = 5.0

    def make(self, rng: random.Random) -> bytes:
        data = records(rng)
        if rng.random() < 0.6:
            codec = rng.choice((1, 2, 3, 4))
            head = batches.read_header(data)._replace(attributes=codec)
            packed = codec_by_id(codec).compress(data[batches.HEADER_BYTES :])
            data = batches.with_header(data[: batches.HEADER_BYTES] + packed, head)
        data = mutate(rng, data, (), records(rng))
        if rng.random() < 0.8 and len(data) >= batches.HEADER_BYTES:
            # With a size and a CRC that fit: else nobody looks any further.
            size = len(data) - batches.LOG_OVERHEAD
            data = data[:8] + size.to_bytes(4, "big") + data[12:16] + b"\2" + data[17:]
            data = batches.with_header(data, batches.read_header(data))
        return data

    def run(self, data: bytes) -> None:
        try:
            for part in batches.split_batches(data):
                batches.decode_batch(part)
        except batches.BatchError:
            pass
        for is_checked in (True, False):
            log = PartitionLog(LogConfig(), validate_records=is_checked)
            try:
                appended = log.append(data, leader_epoch=3, now_ms=1_700_000_000_000)
            except AppendRefused:
                assert log.end_offset == 0
                continue
            assert appended.base_offset == 0
            assert log.end_offset > 0
            try:
                assert len(log.records()) == log.end_offset
            except batches.BatchError:
                assert not is_checked


class OwnRecords(Target):
    """Our own reader, which splits a batch that was too large: all of it, or ProtocolError."""

    name = "own-records"
    files = ("core/batch.py",)

    def make(self, rng: random.Random) -> bytes:
        region = records(rng)[batches.HEADER_BYTES :]
        return bytes([rng.choice((1, 2, 7, 255))]) + mutate(rng, region, (), records(rng))

    def run(self, data: bytes) -> None:
        count = data[0] if data else 0
        try:
            found = list(batch.read_records(data[1:], count))
        except ProtocolError:
            return
        assert len(found) == count


# -- the embedded broker ---------------------------------------------------------------------------


def _any_request(rng: random.Random) -> bytes:
    api = rng.choice(list(APIS.values()))
    return broken_request(rng, api.key, rng.randint(api.min_version, api.max_version))


class Requests(Target):
    """What a client sends: a message, or MalformedRequest. kio must not end the process."""

    name = "requests"
    files = ("testing/messages.py", "testing/shapes.py")

    def make(self, rng: random.Random) -> bytes:
        return _any_request(rng)

    def run(self, data: bytes) -> None:
        try:
            header = decode_header(data)
            api = APIS.get(header.api_key)
            if api is None or not api.min_version <= header.api_version <= api.max_version:
                return
            _, message, left = decode_body(header.api_key, header.api_version, data)
        except MalformedRequest:
            return
        assert 0 <= left < len(data)
        assert type(message) is request_class(header.api_key, header.api_version)


class Broker(Target):
    """A whole broker: it answers or closes the connection, and goes on for everybody else."""

    name = "broker"
    files = ("testing/node.py", "testing/messages.py", "testing/handlers/*.py", "testing/state.py")
    seconds = 3.0

    def make(self, rng: random.Random) -> bytes:
        return joined(*(_any_request(rng) for _ in range(rng.choice((1, 2, 5)))))

    def run(self, data: bytes) -> None:
        with Complaints() as complaints:
            clock.run(self._run(list(pieces(data)), complaints), limit=1e7)
        complaints.check()

    async def _run(self, frames: list[bytes], complaints: Complaints) -> None:
        complaints.watch_loop()
        network = MemoryNetwork()
        cluster = EmbeddedCluster(topics={"t": 2}, network=network, start_time_ms=1_700_000_000_000)
        async with cluster:
            client = await RawClient.connect(cluster.bootstrap_servers, network)
            async with client:
                for frame in frames:
                    client.writer.write(len(frame).to_bytes(4, "big") + frame)
                client.writer.write_eof()
                await client.reader.read()
            async with await RawClient.connect(cluster.bootstrap_servers, network) as other:
                answer = await other.request("api_versions", 0)
                assert answer.error_code == ErrorCode.none


# -- the producer ----------------------------------------------------------------------------------


class _Histories(Target):
    files = (
        "core/metadata.py",
        "core/outcome.py",
        "core/produce.py",
        "core/sequences.py",
        "core/transactions.py",
        "core/wire.py",
        "net/cluster.py",
        "net/connection.py",
        "net/frames.py",
        "net/in_flight.py",
        "net/link.py",
        "net/scheduler.py",
        "net/transactions.py",
    )
    seconds = 10.0
    side: ClassVar[str]

    def make(self, rng: random.Random) -> bytes:
        return b"%d" % rng.getrandbits(40)

    def run(self, data: bytes) -> None:
        with Complaints() as complaints:
            clock.run(self._run(random.Random(data), complaints), limit=600)
        complaints.check()

    async def _run(self, rng: random.Random, complaints: Complaints) -> None:
        complaints.watch_loop()
        await one_history(rng, self.side)


class AnswersToTheProducer(_Histories):
    """Somebody changes what brokers answer. See producer.py for what must hold."""

    name = "producer-answers"
    side = "answers"


class RequestsOfTheProducer(_Histories):
    """Somebody changes what the producer asks."""

    name = "producer-requests"
    side = "requests"


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Answers(),
        Frames(),
        Handshake(),
        Sasl(),
        Batches(),
        OwnRecords(),
        Requests(),
        Broker(),
        AnswersToTheProducer(),
        RequestsOfTheProducer(),
    )
}
