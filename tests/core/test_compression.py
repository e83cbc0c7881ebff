from __future__ import annotations

import random
import struct
import threading
import zlib
from collections.abc import Callable
from time import perf_counter

import cramjam
import lz4.block
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncproducer.core.compression import (
    DEFAULT_LEVELS,
    LEVELS,
    NONE,
    Codec,
    DecompressionError,
    RatioEstimator,
    codec,
    codec_by_id,
)
from asyncproducer.errors import ConfigError, ErrorCode, IllegalStateError

NAMES = ["gzip", "snappy", "lz4", "zstd"]

#: The one record of the golden vectors: key "k", value "v".
RECORD = bytes.fromhex("10000000026b027600")
#: Golden vector D behind its batch header: the block is stored, it did not shrink.
LZ4_RECORD = bytes.fromhex("04224d186040820900008010000000026b02760000000000")
#: Golden vector E behind its batch header.
SNAPPY_RECORD = bytes.fromhex("82534e415050590000000001000000010000000b092010000000026b027600")

LZ4_END = bytes(4)
XERIAL_HEADER = SNAPPY_RECORD[:16]

#: Longer than several blocks of every codec, and neither all alike nor all random.
LONG = b"".join(b"%d-%s" % (n, b"x" * (n % 40)) for n in range(20_000))
NOISE = random.Random(7).randbytes(200_000)

#: Every level worth the time: both ends, the default, and all of the small ranges.
CODECS = [
    codec("snappy"),
    *(codec("gzip", level) for level in (-1, *range(1, 10))),
    *(codec("lz4", level) for level in range(1, 18)),
    *(codec("zstd", level) for level in (-131072, -7, -1, 0, *range(1, 20), 22)),
]


def lz4_frame(**options: object) -> bytes:
    frame: bytes = lz4.frame.compress(LONG, **{"block_linked": False, **options})
    return frame


def changed(data: bytes, position: int, value: int) -> bytes:
    """`data` with one byte replaced."""
    return data[:position] + bytes([value]) + data[position + 1 :]


# The bytes that we write


def test_lz4_writes_golden_vector_d() -> None:
    """RC-01, CP-02: the block that does not shrink is stored, and the header is Java's."""
    assert codec("lz4").compress(RECORD) == LZ4_RECORD


@pytest.mark.parametrize("level", range(1, 18))
def test_lz4_header_is_the_same_at_every_level(level: int) -> None:
    """CP-02: exact header bytes, header checksum 0x82."""
    assert codec("lz4", level).compress(LONG)[:7].hex() == "04224d18604082"


def test_lz4_writes_blocks_of_64_kib_without_checksums() -> None:
    frame = codec("lz4").compress(NOISE)
    sizes = []
    position = 7
    while (size := struct.unpack_from("<I", frame, position)[0]) != 0:
        assert size & 0x80000000  # random bytes do not shrink
        sizes.append(size & 0x7FFFFFFF)
        position += 4 + sizes[-1]
    assert sizes == [65536, 65536, 65536, len(NOISE) - 3 * 65536]
    assert position + 4 == len(frame)


def test_lz4_blocks_are_independent() -> None:
    """Each block is decompressed by itself, which a linked block would not allow."""
    frame = codec("lz4").compress(LONG)
    position = 7
    records = b""
    while (size := struct.unpack_from("<I", frame, position)[0]) != 0:
        block = frame[position + 4 : position + 4 + size]
        records += lz4.block.decompress(block, uncompressed_size=65536)
        position += 4 + size
    assert records == LONG


def test_lz4_level_9_is_the_fast_compressor_and_all_others_are_hc() -> None:
    sizes = {level: len(codec("lz4", level).compress(LONG)) for level in range(1, 18)}
    fast = sizes.pop(9)
    assert fast == len(lz4_frame(compression_level=0, store_size=False))
    assert all(size < fast for size in sizes.values())


def test_lz4_levels_above_the_librarys_are_its_highest() -> None:
    assert codec("lz4", 17).compress(LONG) == codec("lz4", 12).compress(LONG)


def test_lz4_default_is_level_9() -> None:
    assert codec("lz4").compress(LONG) == codec("lz4", 9).compress(LONG)


def test_snappy_writes_golden_vector_e() -> None:
    """RC-01: xerial's header, one length, one raw block."""
    assert codec("snappy").compress(RECORD) == SNAPPY_RECORD


def test_snappy_writes_blocks_of_32_kib_of_input() -> None:
    stream = codec("snappy").compress(LONG)
    position = 16
    sizes = []
    while position < len(stream):
        (length,) = struct.unpack_from(">i", stream, position)
        position += 4
        sizes.append(cramjam.snappy.decompress_raw_len(stream[position : position + length]))
        position += length
    assert sizes[:-1] == [32768] * (len(LONG) // 32768)
    assert sum(sizes) == len(LONG)


def test_snappy_of_nothing_is_the_header_alone() -> None:
    assert codec("snappy").compress(b"") == XERIAL_HEADER


def test_gzip_writes_one_plain_member() -> None:
    member = codec("gzip").compress(LONG)
    assert member[:4] == b"\x1f\x8b\x08\x00"  # deflate, no name, no comment
    assert member[4:8] == bytes(4)  # no time: equal records make equal bytes
    assert zlib.decompress(member, wbits=31) == LONG


def test_gzip_default_is_zlibs_level_6() -> None:
    assert codec("gzip").compress(LONG) == codec("gzip", 6).compress(LONG)
    assert codec("gzip").compress(LONG) != codec("gzip", 1).compress(LONG)


def test_zstd_writes_no_content_size_and_no_checksum() -> None:
    parameters = zstandard.get_frame_parameters(codec("zstd").compress(LONG))
    assert parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
    assert not parameters.has_checksum


def test_zstd_level_is_used() -> None:
    sizes = [len(codec("zstd", level).compress(LONG)) for level in (-100, 3, 19)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert codec("zstd").compress(LONG) == codec("zstd", 3).compress(LONG)


# Round trips


@pytest.mark.parametrize("codec_", CODECS, ids=repr)
@pytest.mark.parametrize("data", [b"", b"\x00", RECORD, LONG[:70_000], NOISE[:70_000]], ids=len)
def test_round_trip_at_every_level(codec_: Codec, data: bytes) -> None:
    """CP-01: each codec across its valid levels."""
    assert codec_.decompress(codec_.compress(data)) == data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [32767, 32768, 32769, 65535, 65536, 65537, 131072, 131073])
def test_round_trip_at_the_edges_of_blocks(name: str, size: int) -> None:
    for data in (LONG[:size], NOISE[:size], bytes(size)):
        assert codec(name).decompress(codec(name).compress(data)) == data


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    data=st.builds(
        lambda piece, times, tail: piece * times + tail,
        st.binary(max_size=200),
        st.integers(0, 1000),
        st.binary(max_size=200),
    ),
)
def test_round_trip_of_anything(name: str, data: bytes) -> None:
    compressed = codec(name).compress(data)
    assert codec(name).decompress(compressed, len(data)) == data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "view",
    [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(b"__" + data + b"__"))[2:-2]],
    ids=["bytes", "bytearray", "memoryview", "slice of a bytearray"],
)
def test_any_buffer_will_do(name: str, view: Callable[[bytes], bytes]) -> None:
    compressed = codec(name).compress(view(LONG))
    assert compressed == codec(name).compress(LONG)
    assert type(compressed) is bytes
    records = codec(name).decompress(view(compressed))
    assert records == LONG
    assert type(records) is bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_input_is_neither_changed_nor_kept(name: str) -> None:
    data = bytearray(LONG)
    codec(name).compress(memoryview(data))
    assert data == LONG
    data.clear()  # BufferError if somebody still held it


@pytest.mark.parametrize("name", NAMES)
def test_one_codec_serves_several_threads(name: str) -> None:
    shared = codec(name)
    inputs = [bytes([n]) * 50_000 + LONG for n in range(4)]
    results: dict[int, bytes] = {}
    start = threading.Barrier(len(inputs))

    def work(n: int) -> None:
        start.wait()
        for _ in range(5):
            results[n] = shared.decompress(shared.compress(inputs[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[n] for n in range(len(inputs))] == inputs


# What other clients write


def test_snappy_reads_a_bare_raw_block() -> None:
    """As snappy-java does: some clients once wrote no stream header."""
    assert codec("snappy").decompress(bytes(cramjam.snappy.compress_raw(LONG))) == LONG


def test_snappy_reads_two_streams_joined() -> None:
    joined = codec("snappy").compress(b"first") + codec("snappy").compress(b"second")
    assert codec("snappy").decompress(joined) == b"firstsecond"


def test_snappy_reads_a_later_version_of_the_stream() -> None:
    assert codec("snappy").decompress(changed(SNAPPY_RECORD, 11, 2)) == RECORD


@pytest.mark.parametrize(
    "options",
    [
        {"content_checksum": True},
        {"block_checksum": True},
        {"store_size": True},
        {"store_size": False},
        {"content_checksum": True, "block_checksum": True, "store_size": True},
        {"block_size": lz4.frame.BLOCKSIZE_MAX256KB},
        {"block_size": lz4.frame.BLOCKSIZE_MAX1MB},
        {"block_size": lz4.frame.BLOCKSIZE_MAX4MB},
    ],
    ids=repr,
)
def test_lz4_reads_all_frames_that_java_reads(options: dict[str, object]) -> None:
    assert codec("lz4").decompress(lz4_frame(**options)) == LONG


@pytest.mark.parametrize(
    "compressor",
    [
        zstandard.ZstdCompressor(),
        zstandard.ZstdCompressor(write_checksum=True),
        zstandard.ZstdCompressor(write_content_size=False),
    ],
    ids=["size", "size and checksum", "neither"],
)
def test_zstd_reads_frames_with_and_without_size_and_checksum(
    compressor: zstandard.ZstdCompressor,
) -> None:
    assert codec("zstd").decompress(compressor.compress(LONG)) == LONG


def test_zstd_reads_a_streamed_frame() -> None:
    """As Java writes it: many flushed blocks, nothing known beforehand."""
    stream = zstandard.ZstdCompressor().compressobj()
    frame = b"".join(
        stream.compress(LONG[start : start + 16384])
        + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for start in range(0, len(LONG), 16384)
    )
    assert codec("zstd").decompress(frame + stream.flush()) == LONG


def test_zstd_reads_repeated_and_stored_blocks() -> None:
    # Frame header: window of 1 KiB. Blocks: 5 times "a" (kind 1), "bc" stored (kind 0, last).
    frame = bytes.fromhex("28b52ffd0000") + b"\x2a\x00\x00a" + b"\x11\x00\x00bc"
    assert codec("zstd").decompress(frame) == b"aaaaabc"


def test_gzip_reads_a_member_with_a_name() -> None:
    member = codec("gzip").compress(RECORD)
    named = changed(member, 3, 0x08)[:10] + b"records\x00" + member[10:]
    assert codec("gzip").decompress(named) == RECORD


# What is refused


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (changed(LZ4_RECORD, 0, 0x05), "bad magic"),
        (b"\x04\x22\x4d", "premature end in the header"),
        (b"", "premature end in the header"),
        (b"\x05", "bad magic"),
        (LZ4_RECORD[:6], "premature end in the header"),
        (changed(LZ4_RECORD, 6, 0x83), "headerChecksum"),
        (changed(LZ4_RECORD, 4, 0x20), "version 0"),
        (changed(LZ4_RECORD, 4, 0xA0), "version 2"),
        (changed(LZ4_RECORD, 4, 0x40), "dependent"),
        (changed(LZ4_RECORD, 4, 0x61), "reserved bits"),
        (changed(LZ4_RECORD, 4, 0x62), "reserved bits"),
        (changed(LZ4_RECORD, 5, 0x30), "block size code 3"),
        (changed(LZ4_RECORD, 5, 0xC0), "reserved bits"),
        (changed(LZ4_RECORD, 5, 0x41), "reserved bits"),
        (LZ4_RECORD[:-4], "premature end: no end mark"),
        (LZ4_RECORD[:-1], "premature end: no end mark"),
        (LZ4_RECORD[:15], "premature end: no end mark"),
        (LZ4_RECORD + b"\x00", "1 bytes behind the end mark"),
        (LZ4_RECORD[:7] + b"\x01\x00\x01\x80" + bytes(65537) + LZ4_END, "block of 65537 bytes"),
        (LZ4_RECORD[:7] + b"\x02\x00\x00\x00\xff\xff" + LZ4_END, "damaged frame"),
        (lz4_frame(block_linked=True), "dependent"),
        (lz4_frame(content_checksum=True)[:-1], "content checksum"),
        (lz4_frame(content_checksum=True) + b"\x00", "1 bytes behind"),
        (lz4_frame(content_checksum=True)[:-4] + b"\x00\x00\x00\x01", "contentChecksum"),
        (lz4_frame(block_checksum=True)[:-8] + bytes(8), "blockChecksum"),
    ],
)
def test_lz4_refuses(frame: bytes, message: str) -> None:
    """CP-02: bad magic, premature end, bad checksum, version, dependent blocks, block size."""
    with pytest.raises(DecompressionError, match=f"^lz4: .*{message}"):
        codec("lz4").decompress(frame)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"", "not a snappy block"),
        (SNAPPY_RECORD[:8], "premature end in the header"),
        (SNAPPY_RECORD[:15], "premature end in the header"),
        (SNAPPY_RECORD[:17], "premature end in a block's length"),
        (SNAPPY_RECORD[:-1], "block of 11 bytes at 20, 10 are left"),
        (XERIAL_HEADER + b"\xff\xff\xff\xff", "block of -1 bytes"),
        (XERIAL_HEADER + b"\x7f\xff\xff\xff\x00", "block of 2147483647 bytes"),
        (changed(SNAPPY_RECORD, 11, 0), "unsupported version 0"),
        (changed(SNAPPY_RECORD, 8, 0x80), "unsupported version -"),
        (changed(SNAPPY_RECORD, 21, 0x10), "not a snappy block"),
        (SNAPPY_RECORD + b"\x82SNAPPZ\x00" + bytes(8), "bad magic"),
        (SNAPPY_RECORD + XERIAL_HEADER[:12], "premature end in the header"),
        (b"\x82SNAPPX\x00" + SNAPPY_RECORD[8:], "not a snappy block"),
    ],
)
def test_snappy_refuses(stream: bytes, message: str) -> None:
    with pytest.raises(DecompressionError, match=f"^snappy: .*{message}"):
        codec("snappy").decompress(stream)


GZIP_RECORD = codec("gzip").compress(RECORD)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"", "premature end"),
        (GZIP_RECORD[:-1], "premature end"),
        (GZIP_RECORD[:12], "premature end"),
        (GZIP_RECORD + b"\x00", "1 bytes behind the end"),
        (changed(GZIP_RECORD, 0, 0), "not a gzip member"),
        (zlib.compress(RECORD), "not a gzip member"),
        (changed(GZIP_RECORD, len(GZIP_RECORD) - 8, GZIP_RECORD[-8] ^ 1), "incorrect data check"),
        (changed(GZIP_RECORD, len(GZIP_RECORD) - 1, 1), "incorrect length check"),
    ],
)
def test_gzip_refuses(member: bytes, message: str) -> None:
    with pytest.raises(DecompressionError, match=f"^gzip: .*{message}"):
        codec("gzip").decompress(member)


ZSTD_RECORD = codec("zstd").compress(RECORD)
ZSTD_CHECKED = zstandard.ZstdCompressor(write_checksum=True).compress(LONG)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "damaged frame"),
        (changed(ZSTD_RECORD, 0, 0), "damaged frame"),
        (ZSTD_RECORD[:5], "damaged frame"),
        (ZSTD_RECORD[:7], "premature end: no last block"),
        (ZSTD_RECORD[:-1], "premature end: 1 bytes are missing"),
        (ZSTD_CHECKED[:-1], "premature end: 1 bytes are missing"),
        (ZSTD_RECORD + b"\x00", "1 bytes behind the end"),
        (ZSTD_RECORD + ZSTD_RECORD, "bytes behind the end"),
        (changed(ZSTD_CHECKED, len(ZSTD_CHECKED) - 1, ZSTD_CHECKED[-1] ^ 1), "checksum"),
        # A block of the reserved kind 3, and a compressed block of nonsense.
        (bytes.fromhex("28b52ffd0000") + b"\x17\x00\x00xx", "damaged frame"),
        (bytes.fromhex("28b52ffd0000") + b"\x15\x00\x00\xff\xff", "damaged frame"),
        # A frame that decoders skip (RFC 8878, 3.1.2) holds no records.
        (bytes.fromhex("502a4d1802000000") + b"xx", "zstd"),
    ],
)
def test_zstd_refuses(frame: bytes, message: str) -> None:
    with pytest.raises(DecompressionError, match=message):
        codec("zstd").decompress(frame)


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_is_noticed(name: str) -> None:
    compressed = codec(name).compress(LONG[:700])
    for end in range(len(compressed)):
        if name == "snappy" and end == len(XERIAL_HEADER):
            continue  # a whole stream of no blocks
        with pytest.raises(DecompressionError):
            codec(name).decompress(compressed[:end])


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damage_never_raises_anything_else(name: str, damage: list[tuple[int, int]]) -> None:
    compressed = codec(name).compress(LONG[:1000])
    for position, value in damage:
        compressed = changed(compressed, position % len(compressed), value)
    try:
        records = codec(name).decompress(compressed, 10_000)
    except DecompressionError:
        return
    assert len(records) <= 10_000


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.binary(max_size=100))
def test_nonsense_never_raises_anything_else(name: str, data: bytes) -> None:
    for start in (b"", XERIAL_HEADER, LZ4_RECORD[:7], ZSTD_RECORD[:6], GZIP_RECORD[:10]):
        try:
            records = codec(name).decompress(start + data, 1000)
        except DecompressionError:
            continue
        assert len(records) <= 1000


def test_the_error_is_a_value_error_with_kafkas_code() -> None:
    with pytest.raises(ValueError, match="lz4") as caught:
        codec("lz4").decompress(b"nonsense")
    assert isinstance(caught.value, DecompressionError)
    assert caught.value.code == ErrorCode.CORRUPT_MESSAGE


# Bombs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"x", RECORD, LONG, NOISE, bytes(300_000)], ids=len)
def test_max_size_is_exact(name: str, data: bytes) -> None:
    compressed = codec(name).compress(data)
    assert codec(name).decompress(compressed, len(data)) == data
    for too_small in {len(data) - 1, len(data) // 2, 0}:
        with pytest.raises(DecompressionError, match=f"larger than {too_small} bytes"):
            codec(name).decompress(compressed, too_small)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_fits_into_nothing(name: str) -> None:
    assert codec(name).decompress(codec(name).compress(b""), 0) == b""


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        # Sizes that only the bytes in front claim.
        ("snappy", b"\xff\xff\xff\xff\x0f"),
        ("snappy", XERIAL_HEADER + b"\x00\x00\x00\x05\xff\xff\xff\xff\x0f"),
        ("zstd", bytes.fromhex("28b52ffde0") + b"\xff" * 7 + b"\x7f" + b"\x01\x00\x00"),
        # A thousand blocks of zeros: 128 KiB out of four bytes each.
        ("zstd", bytes.fromhex("28b52ffd0038") + b"\x02\x00\x10\x00" * 1000 + b"\x01\x00\x00"),
    ],
)
def test_a_bomb_is_refused_before_it_takes_memory(name: str, bomb: bytes) -> None:
    with pytest.raises(DecompressionError, match="larger than 1048576 bytes"):
        codec(name).decompress(bomb, 1024 * 1024)


def test_snappy_counts_all_blocks_together() -> None:
    compressed = codec("snappy").compress(bytes(100_000))
    with pytest.raises(DecompressionError, match="larger than 99999 bytes"):
        codec("snappy").decompress(compressed, 99_999)


# Choosing a codec


@pytest.mark.parametrize(
    ("name", "codec_id"), [("none", 0), ("gzip", 1), ("snappy", 2), ("lz4", 3), ("zstd", 4)]
)
def test_ids_are_those_of_the_batch_attributes(name: str, codec_id: int) -> None:
    assert codec(name).codec_id == codec_id
    assert codec_by_id(codec_id).name == name
    assert codec_by_id(codec_id).level == DEFAULT_LEVELS.get(name)


@pytest.mark.parametrize("codec_id", [-1, 5, 7])
def test_an_unknown_id_is_refused(codec_id: int) -> None:
    with pytest.raises(DecompressionError, match=f"codec {codec_id}"):
        codec_by_id(codec_id)


def test_an_unknown_name_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ConfigError, match=r"'brotli'.*none, gzip, snappy, lz4, zstd"):
        codec("brotli")


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("gzip", 0, "-1 or 1 to 9"),
        ("gzip", 10, "-1 or 1 to 9"),
        ("gzip", -2, "-1 or 1 to 9"),
        ("lz4", 0, "1 to 17"),
        ("lz4", 18, "1 to 17"),
        ("zstd", -131073, "-131072 to 22"),
        ("zstd", 23, "-131072 to 22"),
    ],
)
def test_a_level_out_of_range_is_refused(name: str, level: int, expected: str) -> None:
    """CP-01: the error names the codec, the value and the range."""
    with pytest.raises(ConfigError, match=f"level {level} for {name}: must be {expected}"):
        codec(name, level)


@pytest.mark.parametrize("name", ["none", "snappy"])
def test_a_level_where_there_are_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no levels"):
        codec(name, 1)


@pytest.mark.parametrize("name", LEVELS)
def test_both_ends_of_the_range_are_accepted(name: str) -> None:
    assert [codec(name, level).level for level in LEVELS[name]] == list(LEVELS[name])


def test_level_is_kept_and_shown() -> None:
    assert codec("zstd", -5).level == -5
    assert repr(codec("zstd", -5)) == "<Codec zstd:-5>"
    assert repr(codec("snappy")) == "<Codec snappy>"


def test_none_has_nothing_to_compress() -> None:
    assert codec("none") is NONE
    with pytest.raises(IllegalStateError, match="none"):
        NONE.compress(RECORD)


def test_none_decompresses_to_the_same_bytes() -> None:
    assert NONE.decompress(memoryview(RECORD), len(RECORD)) == RECORD
    with pytest.raises(DecompressionError, match="larger than 8 bytes"):
        NONE.decompress(RECORD, 8)


def test_the_base_class_compresses_nothing() -> None:
    with pytest.raises(NotImplementedError):
        Codec("own", 7).compress(b"")
    with pytest.raises(NotImplementedError):
        Codec("own", 7).decompress(b"")


# The ratio


def test_estimate_rises_fast_and_falls_slowly() -> None:
    """CP-03: the trajectory of the specification."""
    estimator = RatioEstimator()
    observed = [estimator.observe("t", 3, ratio) for ratio in (0.5, 0.5, 0.5, 0.99)]
    assert observed == pytest.approx([0.995, 0.99, 0.985, 1.035])
    assert estimator.estimate("t", 3) == observed[-1]


def test_estimate_begins_with_nothing_saved() -> None:
    """CP-03"""
    assert RatioEstimator().estimate("t", 4) == 1.0


def test_an_equal_ratio_changes_nothing() -> None:
    """CP-03"""
    assert RatioEstimator().observe("t", 1, 1.0) == 1.0


@pytest.mark.parametrize(("ratio", "expected"), [(1.3, 1.3), (1.01, 1.05), (0.999, 0.999)])
def test_estimate_jumps_to_a_ratio_beyond_its_step(ratio: float, expected: float) -> None:
    """CP-03: up by 0.05 or more, down by 0.005 or less."""
    assert RatioEstimator().observe("t", 1, ratio) == pytest.approx(expected)


def test_estimate_reaches_a_steady_ratio_and_stays() -> None:
    estimator = RatioEstimator()
    for _ in range(200):
        estimator.observe("t", 1, 0.25)
    assert estimator.estimate("t", 1) == 0.25


@pytest.mark.parametrize(("ratio", "expected"), [(0.4, 1.0), (1.0, 1.0), (1.2, 1.2)])
def test_a_split_sets_the_estimate_back(ratio: float, expected: float) -> None:
    """CP-03"""
    estimator = RatioEstimator()
    for _ in range(50):
        estimator.observe("t", 1, 0.3)
    estimator.reset_after_split("t", 1, ratio)
    assert estimator.estimate("t", 1) == expected


def test_topics_codecs_and_instances_have_their_own_estimates() -> None:
    estimator = RatioEstimator()
    estimator.observe("t", 1, 0.5)
    assert estimator.estimate("t", 1) == pytest.approx(0.995)
    assert estimator.estimate("t", 2) == 1.0
    assert estimator.estimate("u", 1) == 1.0
    assert RatioEstimator().estimate("t", 1) == 1.0


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("gzip", [-1, *range(1, 10)]),
        ("lz4", [9, *range(1, 9), *range(10, 18)]),  # 9 is the fast one
        ("zstd", [*range(-7, 23)]),
    ],
)
def test_the_slower_a_level_the_less_is_quick(name: str, levels: list[int]) -> None:
    quick = [codec(name, level).quick_bytes for level in levels]
    assert quick == sorted(quick, reverse=True)
    assert quick[0] > quick[-1]


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_a_small_batch_is_quick_at_the_default_level(name: str) -> None:
    assert codec(name).quick_bytes >= 16_384


@pytest.mark.parametrize("name", NAMES)
def test_the_event_loop_runs_while_a_thread_compresses(name: str) -> None:
    """The library lets go of the GIL: else compressing in a thread would be for nothing."""
    data = LONG * 20
    made = codec(name)
    began = ended = 0.0

    def compress() -> None:
        nonlocal began, ended
        before = perf_counter()
        made.compress(data)
        began, ended = before, perf_counter()

    meanwhile = 0
    for _ in range(10):  # the system may have given this thread no time
        thread = threading.Thread(target=compress)
        thread.start()
        ticks = []
        while thread.is_alive():
            ticks.append(perf_counter())
        thread.join()
        # Before it, and behind it, the interpreter may have run anything.
        margin = (ended - began) / 4
        meanwhile = max(meanwhile, sum(began + margin < tick < ended - margin for tick in ticks))
        if meanwhile > 10:
            break
    assert meanwhile > 10
