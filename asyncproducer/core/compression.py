"""The four codecs of record batches, their levels, and the guess how well a topic compresses.

| name   | id | format                                              | library   |
|--------|----|-----------------------------------------------------|-----------|
| gzip   | 1  | one gzip member (RFC 1952)                          | zlib      |
| snappy | 2  | xerial's stream: 16 bytes of header, 32 KiB blocks  | cramjam   |
| lz4    | 3  | one LZ4 frame, 64 KiB independent blocks, no sums   | lz4       |
| zstd   | 4  | one zstd frame without content size                 | zstandard |

Only the records of a batch are compressed, never its header. `compress` writes what
Java's producer writes; `decompress` reads what Kafka's clients write, more strictly than
Java: it stops at `max_size` bytes, so that a small batch cannot fill the memory, and it
refuses bytes behind the end of the member or frame (Java leaves them unread).

All four libraries compress `bytes`, `bytearray` and `memoryview` in place, and all four
(zlib, cramjam, lz4, zstandard) release the GIL for it: other threads run meanwhile, seen
with 60 MB each. Decompressing, only lz4 copies a memoryview first. A codec may be used
from several threads at once.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from typing import TypeAlias

import cramjam
import lz4.frame
import zstandard

from asyncproducer.errors import ConfigError, ErrorCode, IllegalStateError, KafkaError

__all__ = [
    "DEFAULT_LEVELS",
    "DEFAULT_MAX_SIZE",
    "LEVELS",
    "NONE",
    "Codec",
    "DecompressionError",
    "RatioEstimator",
    "codec",
    "codec_by_id",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

#: Lowest and highest level per codec (KIP-390). Level 0 of gzip is invalid all the same.
LEVELS: dict[str, tuple[int, int]] = {"gzip": (-1, 9), "lz4": (1, 17), "zstd": (-131072, 22)}

#: What is used where no level is given. gzip's -1 is zlib's own default, 6.
DEFAULT_LEVELS: dict[str, int] = {"gzip": -1, "lz4": 9, "zstd": 3}

#: Where `decompress` stops unless told otherwise, in bytes: far above what a broker's
#: message.max.bytes lets through in practice, far below what hurts.
DEFAULT_MAX_SIZE = 128 * 1024 * 1024


class DecompressionError(KafkaError, ValueError):
    """The compressed records are damaged, of a kind that Kafka does not use, or too large."""

    code = ErrorCode.CORRUPT_MESSAGE


#: Codec → (up to this level, so many bytes in about 0.3 ms), with JSON on one core of a server of
#: 2023, alone and again and again with the same bytes; where much is going on, in twice the time.
#: With two thirds as many, a tenth of the throughput went for threads (lz4, zstd); with a fifth
#: more for zstd, what the loop computes in a turn was longer than 2 ms now and then (p99.9).
_QUICK_BYTES: dict[str, tuple[tuple[int, int], ...]] = {
    "gzip": ((6, 16_384), (9, 8_192)),
    "snappy": ((0, 147_456),),
    "lz4": ((8, 16_384), (9, 147_456), (17, 4_096)),
    "zstd": ((4, 81_920), (8, 16_384), (9, 8_192), (14, 2_048), (22, 0)),
}


class Codec:
    """One way to compress the records of a batch, at one level.

    `name` and `codec_id` are Kafka's; the id is what bits 0 to 2 of a batch's attributes
    hold. `level` is None for codecs that have none. `quick_bytes` is how much this codec
    compresses in a third of a millisecond or so: what an event loop can do between two turns.
    """

    __slots__ = ("codec_id", "level", "name", "quick_bytes")

    def __init__(self, name: str, codec_id: int, level: int | None = None) -> None:
        self.name = name
        self.codec_id = codec_id
        self.level = level
        if level is None:
            level = DEFAULT_LEVELS.get(name, 0)
        self.quick_bytes = next(
            (size for most, size in _QUICK_BYTES.get(name, ()) if level <= most), 0
        )

    def __repr__(self) -> str:
        return f"<Codec {self.name}>" if self.level is None else f"<Codec {self.name}:{self.level}>"

    def compress(self, data: Buffer) -> bytes:
        """The compressed form of `data`, which is not changed. Blocks the calling thread."""
        raise NotImplementedError

    def decompress(self, data: Buffer, max_size: int = DEFAULT_MAX_SIZE) -> bytes:
        """What was compressed. Blocks the calling thread.

        Raises:
            DecompressionError: `data` is damaged, or holds more than `max_size` bytes.
        """
        raise NotImplementedError

    def _damaged(self, what: str) -> DecompressionError:
        return DecompressionError(f"{self.name}: {what}")

    def _too_large(self, max_size: int) -> DecompressionError:
        return self._damaged(f"the records are larger than {max_size} bytes")


class _NoCodec(Codec):
    __slots__ = ()

    def compress(self, data: Buffer) -> bytes:
        # A copy of every plain batch would go unseen here, so this is an error instead.
        raise IllegalStateError("compression_type is none: the records are sent as they are")

    def decompress(self, data: Buffer, max_size: int = DEFAULT_MAX_SIZE) -> bytes:
        if len(data) > max_size:
            raise self._too_large(max_size)
        return bytes(data)


class _Gzip(Codec):
    """One gzip member with an empty name and time 0. Java's differs in the OS byte only."""

    __slots__ = ()

    #: 15 is zlib's largest window, 16 asks for gzip's header and trailer around it.
    _WBITS = 15 + 16

    def compress(self, data: Buffer) -> bytes:
        level = DEFAULT_LEVELS["gzip"] if self.level is None else self.level
        return zlib.compress(data, level, self._WBITS)

    def decompress(self, data: Buffer, max_size: int = DEFAULT_MAX_SIZE) -> bytes:
        stream = zlib.decompressobj(self._WBITS)
        try:
            # One byte more than allowed tells "too large" from "just fits".
            records = stream.decompress(data, max_size + 1)
        except zlib.error as exc:
            raise self._damaged(f"not a gzip member: {exc}") from exc
        if len(records) > max_size:
            raise self._too_large(max_size)
        if not stream.eof:
            raise self._damaged(f"premature end after {len(data)} bytes")
        if stream.unused_data:
            raise self._damaged(f"{len(stream.unused_data)} bytes behind the end of the member")
        return records


class _Snappy(Codec):
    """snappy-java's stream format, which is not the framing that snappy itself defines.

    The header is written once; each block is its compressed length (i32, big-endian) and a
    raw snappy block of up to 32 KiB of input. Old clients wrote one bare raw block without
    any of this, so the reader takes that as well, as snappy-java's does.
    """

    __slots__ = ()

    _MAGIC = b"\x82SNAPPY\x00"
    #: The magic, the version and the lowest version that can read it, both 1.
    _HEADER = _MAGIC + struct.pack(">ii", 1, 1)
    _BLOCK_SIZE = 32 * 1024
    _LENGTH = struct.Struct(">i")
    #: The magic read as a block length. A second header in mid-stream means that two
    #: streams were joined, which snappy-java allows. As a length it would be negative.
    _MAGIC_AS_LENGTH = _LENGTH.unpack_from(_MAGIC)[0]

    def compress(self, data: Buffer) -> bytes:
        view = memoryview(data)
        parts: list[bytes | cramjam.Buffer] = [self._HEADER]
        for start in range(0, len(view), self._BLOCK_SIZE):
            block = cramjam.snappy.compress_raw(view[start : start + self._BLOCK_SIZE])
            parts.append(self._LENGTH.pack(len(block)))
            parts.append(block)
        return b"".join(parts)

    def decompress(self, data: Buffer, max_size: int = DEFAULT_MAX_SIZE) -> bytes:
        view = memoryview(data)
        if view[: len(self._MAGIC)] != self._MAGIC:
            return bytes(self._block(view, max_size, max_size))
        parts: list[cramjam.Buffer] = []
        room = max_size
        position = self._skip_header(view, 0)
        while position < len(view):
            length = self._block_length(view, position)
            if length == self._MAGIC_AS_LENGTH:
                position = self._skip_header(view, position)
                continue
            position += self._LENGTH.size
            if not 0 <= length <= len(view) - position:
                left = len(view) - position
                raise self._damaged(f"block of {length} bytes at {position}, {left} are left")
            block = self._block(view[position : position + length], room, max_size)
            parts.append(block)
            room -= len(block)
            position += length
        return b"".join(parts)

    def _skip_header(self, view: memoryview, position: int) -> int:
        end = position + len(self._HEADER)
        if len(view) < end:
            raise self._damaged(f"premature end in the header at {position}")
        if view[position : position + len(self._MAGIC)] != self._MAGIC:
            raise self._damaged(f"bad magic at {position}")
        (version,) = self._LENGTH.unpack_from(view, position + len(self._MAGIC))
        if version < 1:
            raise self._damaged(f"unsupported version {version}")
        return end

    def _block_length(self, view: memoryview, position: int) -> int:
        if len(view) - position < self._LENGTH.size:
            raise self._damaged(f"premature end in a block's length at {position}")
        (length,) = self._LENGTH.unpack_from(view, position)
        return int(length)

    def _block(self, block: memoryview, room: int, max_size: int) -> cramjam.Buffer:
        """One raw block. Its size stands in front, so one that is too large is seen early."""
        try:
            if cramjam.snappy.decompress_raw_len(block) > room:
                raise self._too_large(max_size)
            return cramjam.snappy.decompress_raw(block)
        except cramjam.DecompressionError as exc:
            raise self._damaged(f"not a snappy block: {exc}") from exc


class _Lz4(Codec):
    """An LZ4 frame in the profile that every Kafka reader accepts.

    Header 04 22 4D 18 60 40 82: version 1, independent blocks of at most 64 KiB, no
    checksums, no content size. Each block is its size (u32, little-endian; bit 31 set when
    the block is stored as it is because it did not shrink) and its data; a size of 0 ends
    the frame.
    """

    __slots__ = ("_library_level",)

    _MAGIC = b"\x04\x22\x4d\x18"
    _STORED = 0x80000000
    _SIZE = struct.Struct("<I")

    def __init__(self, name: str, codec_id: int, level: int | None) -> None:
        super().__init__(name, codec_id, level)
        self._library_level = self._to_library_level(
            DEFAULT_LEVELS["lz4"] if level is None else level
        )

    @staticmethod
    def _to_library_level(level: int) -> int:
        # Kafka's 9 is the fast compressor (0 for liblz4), every other level means HC. The
        # frame functions of liblz4 know HC levels 3 to 12: they take lower ones for "fast",
        # and Java's range ends at 17 only because lz4-java clamps there in the same way.
        return 0 if level == 9 else min(max(level, 3), 12)

    def compress(self, data: Buffer) -> bytes:
        # All that differs from the library's defaults is what Java's reader refuses
        # (linked blocks) or does not write (the content size).
        frame: bytes = lz4.frame.compress(
            data,
            compression_level=self._library_level,
            block_size=lz4.frame.BLOCKSIZE_MAX64KB,
            block_linked=False,
            content_checksum=False,
            block_checksum=False,
            store_size=False,
        )
        return frame

    def decompress(self, data: Buffer, max_size: int = DEFAULT_MAX_SIZE) -> bytes:
        limit = min(self._walk(memoryview(data)), max_size)
        try:
            stream = lz4.frame.LZ4FrameDecompressor()
            records: bytes = stream.decompress(data, max_length=limit + 1)
        except (RuntimeError, ValueError) as exc:
            # liblz4 checks what is left: the checksums, and each block's contents.
            raise self._damaged(f"damaged frame: {exc}") from exc
        if len(records) > max_size:
            raise self._too_large(max_size)
        return records

    def _walk(self, view: memoryview) -> int:
        """Check the frame as Java's Lz4BlockInputStream does; the most that it can hold."""
        position, max_block, block_checksum = self._read_header(view)
        most = 0
        while True:
            if len(view) - position < 4:
                raise self._damaged(f"premature end: no end mark after {position} bytes")
            (size,) = self._SIZE.unpack_from(view, position)
            position += 4
            if size == 0:
                break
            stored = bool(size & self._STORED)
            size &= ~self._STORED
            if size > max_block:
                raise self._damaged(f"block of {size} bytes, at most {max_block} are declared")
            # A sequence of the block format makes at most 255 bytes out of one.
            most += size if stored else min(max_block, 255 * size)
            position += size + (4 if block_checksum else 0)
        if view[4] & 0x04:  # a checksum of the contents follows the end mark
            position += 4
        if position > len(view):
            raise self._damaged("premature end in the content checksum")
        if position < len(view):
            raise self._damaged(f"{len(view) - position} bytes behind the end mark")
        return most

    def _read_header(self, view: memoryview) -> tuple[int, int, bool]:
        """Where the blocks start, the largest block in bytes, whether blocks have checksums."""
        if view[:4] != self._MAGIC[: len(view)]:
            raise self._damaged("bad magic: not an LZ4 frame")
        if len(view) < 7:
            raise self._damaged("premature end in the header")
        flags, block_descriptor = view[4], view[5]
        if flags >> 6 != 1:
            raise self._damaged(f"version {flags >> 6} of the frame format is unsupported")
        if flags & 0x03:
            # Bit 0 announces a dictionary, which Kafka has none of.
            raise self._damaged(f"reserved bits are set in the flags {flags:#04x}")
        if not flags & 0x20:
            raise self._damaged("dependent (linked) blocks are unsupported")
        if block_descriptor & 0x8F:
            raise self._damaged(f"reserved bits are set in the descriptor {block_descriptor:#04x}")
        size_code = block_descriptor >> 4
        if size_code < 4:
            raise self._damaged(f"block size code {size_code} is not between 4 and 7")
        end = 7 + (8 if flags & 0x08 else 0)  # a content size, where announced
        return end, 1 << (8 + 2 * size_code), bool(flags & 0x10)


class _Zstd(Codec):
    """One zstd frame. Needs Produce v7 (KIP-110), which is the request's business."""

    __slots__ = ("_idle", "_idle_large")

    #: What is larger gets a compressor of its own: its tables have 2.4 MiB at zstd's default level,
    #: those for no more than this 0.8.
    _LARGE_BYTES = 64 * 1024

    #: Blocks never hold more, whatever the window (RFC 8878, 3.1.1.2.4).
    _MAX_BLOCK = 128 * 1024

    def __init__(self, name: str, codec_id: int, level: int | None) -> None:
        super().__init__(name, codec_id, level)
        # A compressor keeps its tables between batches but serves one thread at a time, so
        # each call takes one and puts it back: as many exist as calls ever overlapped.
        self._idle: list[zstandard.ZstdCompressor] = []
        self._idle_large: list[zstandard.ZstdCompressor] = []

    def compress(self, data: Buffer) -> bytes:
        idle = self._idle_large if len(data) > self._LARGE_BYTES else self._idle
        try:
            compressor = idle.pop()
        except IndexError:
            level = DEFAULT_LEVELS["zstd"] if self.level is None else self.level
            # Java streams, so its frames have no content size either.
            compressor = zstandard.ZstdCompressor(level=level, write_content_size=False)
        compressed = compressor.compress(data)
        idle.append(compressor)
        if idle is self._idle:
            return compressed
        # A copy: it was made in room for what cannot be compressed at all, and as long as it is
        # there, what is left over behind it is too little for the next.
        return bytes(memoryview(compressed))

    def decompress(self, data: Buffer, max_size: int = DEFAULT_MAX_SIZE) -> bytes:
        view = memoryview(data)
        try:
            # The library makes room for the size that a frame declares, true or not.
            declared = zstandard.get_frame_parameters(view).content_size
            if declared != zstandard.CONTENTSIZE_UNKNOWN and declared > max_size:
                raise self._too_large(max_size)
            room = min(self._walk(view), max_size)
            # 0 would mean "as much as it takes".
            records = zstandard.ZstdDecompressor().decompress(view, max_output_size=max(room, 1))
        except zstandard.ZstdError as exc:
            self._refuse_larger(view, max_size)
            raise self._damaged(f"damaged frame: {exc}") from exc
        if len(records) > max_size:
            raise self._too_large(max_size)
        return records

    def _walk(self, view: memoryview) -> int:
        """Find the frame's end without decompressing; the most that it can hold.

        The library cannot tell a frame that is cut off from one that does not fit into the
        room it was given, so the first is found here.
        """
        parameters = zstandard.get_frame_parameters(view)
        position = zstandard.frame_header_size(view)
        most = 0
        last = False
        while not last:
            if len(view) - position < 3:
                raise self._damaged(f"premature end: no last block after {position} bytes")
            header = int.from_bytes(view[position : position + 3], "little")
            last = bool(header & 1)
            kind, size = header >> 1 & 3, header >> 3
            # Kind 1 repeats one byte; only kind 2 is compressed (0 is stored, 3 reserved).
            most += min(self._MAX_BLOCK, parameters.window_size) if kind == 2 else size
            position += 3 + (1 if kind == 1 else size)
        position += 4 if parameters.has_checksum else 0
        if position > len(view):
            raise self._damaged(f"premature end: {position - len(view)} bytes are missing")
        if position < len(view):
            raise self._damaged(f"{len(view) - position} bytes behind the end of the frame")
        return most

    def _refuse_larger(self, view: memoryview, max_size: int) -> None:
        """Raise if it was the size that made the library give up on this frame."""
        size = 0
        with (
            contextlib.suppress(zstandard.ZstdError),
            zstandard.ZstdDecompressor().stream_reader(view) as reader,
        ):
            while chunk := reader.read(self._MAX_BLOCK):
                size += len(chunk)
                if size > max_size:
                    raise self._too_large(max_size)


NONE: Codec = _NoCodec("none", 0)

_CLASSES: dict[str, tuple[type[Codec], int]] = {
    "gzip": (_Gzip, 1),
    "snappy": (_Snappy, 2),
    "lz4": (_Lz4, 3),
    "zstd": (_Zstd, 4),
}


def codec(name: str, level: int | None = None) -> Codec:
    """The codec of this name (`compression_type`) at this level, None for the default one.

    Raises:
        ConfigError: there is no such codec, it has no levels, or not this one.
    """
    if name == "none" and level is None:
        return NONE
    if name not in _CLASSES and name != "none":
        known = ", ".join(["none", *_CLASSES])
        raise ConfigError(f"unknown compression_type {name!r}: use one of {known}")
    if name not in LEVELS:
        if level is not None:
            raise ConfigError(f"compression level {level} for {name}: {name} has no levels")
    elif level is None:
        level = DEFAULT_LEVELS[name]
    else:
        _check_level(name, level)
    kind, codec_id = _CLASSES[name]
    return kind(name, codec_id, level)


def _check_level(name: str, level: int) -> None:
    low, high = LEVELS[name]
    if name == "gzip":
        # zlib's 0 stores without compressing; Kafka does not allow it.
        valid, expected = level == -1 or 1 <= level <= high, f"-1 or 1 to {high}"
    else:
        valid, expected = low <= level <= high, f"{low} to {high}"
    if not valid:
        raise ConfigError(f"compression level {level} for {name}: must be {expected}")


_BY_ID = (NONE, *(codec(name) for name in _CLASSES))


def codec_by_id(codec_id: int) -> Codec:
    """The codec that a batch's attributes name, at its default level.

    Raises:
        DecompressionError: Kafka has no such codec.
    """
    if not 0 <= codec_id < len(_BY_ID):
        raise DecompressionError(f"unknown compression codec {codec_id}: 0 to 4 are known")
    return _BY_ID[codec_id]


class RatioEstimator:
    """How far a topic's records shrink: compressed size / plain size, per topic and codec.

    The guess decides how many records a batch may take before it is compressed. It rises
    fast and falls slowly, because a batch that comes out too large must be split
    (Java: CompressionRatioEstimator). Java keeps one table per process, where producers
    with different records spoil each other's guesses; here each instance has its own.
    """

    __slots__ = ("_ratios",)

    #: Until a batch was compressed, expect that nothing is saved.
    INITIAL = 1.0
    RISE = 0.05
    FALL = 0.005

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, int], float] = {}

    def estimate(self, topic: str, codec_id: int) -> float:
        """The ratio to expect of the next batch."""
        return self._ratios.get((topic, codec_id), self.INITIAL)

    def observe(self, topic: str, codec_id: int, ratio: float) -> float:
        """A batch was closed with this ratio. Returns the new estimate."""
        estimate = self.estimate(topic, codec_id)
        if ratio > estimate:
            estimate = max(estimate + self.RISE, ratio)
        elif ratio < estimate:
            estimate = max(estimate - self.FALL, ratio)
        self._ratios[topic, codec_id] = estimate
        return estimate

    def reset_after_split(self, topic: str, codec_id: int, ratio: float) -> None:
        """A batch of this ratio was too large and is split: expect nothing to be saved."""
        self._ratios[topic, codec_id] = max(self.INITIAL, ratio)
