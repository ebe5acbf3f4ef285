"""The codec `zstd` suits keys and values, reads the frames of any writer, and survives damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.zstd import LIBRARIES, frame_writer, read_frame
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit import zstd
from tiered_kv.toolkit.codecs import PLAIN, ZSTD_ID, CodecSet
from tiered_kv.toolkit.zstd import Zstd
from tiered_kv.toolkit.zstd_library import ZstdLibrary

OK, BAD_PAYLOAD = RecordStatus.OK, RecordStatus.BAD_PAYLOAD
SIZES = (0, 1, 2, 3, 4, 5, 63, 64, 4097, 1 << 16, (1 << 18) + 1, (1 << 21) + 2)


def values(count: int, seed: int = 7) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return normally distributed values of 128 channels with scales of their own, as a model's keys look."""
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(size=128).astype(np.float32)
    return (rng.standard_normal((-(-count // 128), 128), dtype=np.float32) * scales).reshape(-1)[:count]


def bfloat16_block(size_bytes: int, seed: int = 7) -> bytes:
    return (values(-(-size_bytes // 2), seed).view("<u4") >> 16).astype("<u2").tobytes()[:size_bytes]


def float16_block(size_bytes: int) -> bytes:
    """Return values whose second half repeats the first one, as the first layer does for a prompt that repeats."""
    half = values(size_bytes // 4).astype("<f2").tobytes()
    return half + half


def int8_block(size_bytes: int) -> bytes:
    half = np.clip(np.round(values(size_bytes // 2) * 20), -127, 127).astype(np.int8).tobytes()
    return half + half


def payload_by(compress: Callable[[bytes], bytes], block: bytes) -> bytes:
    """Return a payload as the format describes it, of frames that another writer makes."""
    evens, odds = compress(block[0::2]), compress(block[1::2])
    return len(evens).to_bytes(4, "little") + evens + odds


level_1 = frame_writer(1)


@pytest.fixture(params=LIBRARIES, ids=lambda each: type(each).__name__)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ZstdLibrary:
    """Each library that is here, which the codec uses."""
    library: ZstdLibrary = request.param
    monkeypatch.setattr(zstd, "zstd_library", lambda: library)
    return library


def decoded(payload: bytes, size_bytes: int) -> bytes | RecordStatus:
    block = bytearray(size_bytes)
    status = PLAIN.decode(ZSTD_ID, memoryview(payload), memoryview(block), b"")
    return bytes(block) if status is OK else status


def test_byte_planes_compress_better_than_one_frame() -> None:
    block = bfloat16_block(1 << 16)
    assert len(Zstd().compress(memoryview(block))) < 0.9 * len(level_1(block))


@pytest.mark.parametrize("size_bytes", [1 << 14, 1 << 16, 360 << 10])
def test_repetitions_by_chance_are_not_encoded(size_bytes: int) -> None:
    block = bfloat16_block(size_bytes)
    assert len(Zstd().compress(memoryview(block))) < 0.99 * len(payload_by(level_1, block))


@pytest.mark.parametrize("block_of", [float16_block, int8_block])
def test_distant_repetitions_of_types_with_many_values_are_encoded(block_of: Callable[[int], bytes]) -> None:
    block = block_of(1 << 19)
    assert len(Zstd().compress(memoryview(block))) <= len(payload_by(level_1, block)) < 0.7 * len(block)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_frames_of_other_writers_are_read(size_bytes: int, library: ZstdLibrary) -> None:
    block = bfloat16_block(size_bytes)
    for writer in (level_1, frame_writer(19), frame_writer(-3), frame_writer(1, has_checksum=True)):
        payload = payload_by(writer, block)
        codec, out = Zstd(), bytearray(size_bytes)
        assert codec.decompress(memoryview(payload), memoryview(out)) is OK
        assert out == block


def test_nothing_but_one_frame_is_read(library: ZstdLibrary) -> None:
    """Valid data all of it: a library alone returns the first frame, both, or an error."""
    block = bfloat16_block(1 << 12)
    evens, odds = (level_1(block[at::2]) for at in (0, 1))
    note = bytes.fromhex("502a4d1804000000") + b"note"  # a skippable frame
    half = len(block) // 4
    of_two = level_1(block[1::2][:half]) + level_1(block[1::2][half:])
    assert decoded(len(evens).to_bytes(4, "little") + evens + odds, len(block)) == block
    for one, other in [(evens + level_1(b""), odds), (evens, odds + note), (evens, note + odds), (evens, of_two)]:
        payload = len(one).to_bytes(4, "little") + one + other
        assert decoded(payload, len(block)) is BAD_PAYLOAD


@pytest.mark.parametrize("size_bytes", SIZES)
def test_other_readers_read_its_frames(size_bytes: int, library: ZstdLibrary) -> None:
    codec = Zstd()
    for seed in range(3):  # after the first one, noise is not compressed
        block = bfloat16_block(size_bytes, seed)
        payload = codec.compress(memoryview(block))
        first = 4 + int.from_bytes(payload[:4], "little")
        assert read_frame(payload[4:first]) == block[0::2]
        assert read_frame(payload[first:]) == block[1::2]
        out = bytearray(size_bytes)
        assert codec.decompress(memoryview(payload), memoryview(out)) is OK
        assert out == block


def test_noise_is_not_compressed_and_what_comes_after_it_is() -> None:
    """Whether or not a sample of the bytes tells it from noise."""
    codec = Zstd()
    noise = [bfloat16_block(1 << 17, seed) for seed in range(20)]
    for block in noise:
        assert len(codec.compress(memoryview(block))) < 1.001 * len(Zstd().compress(memoryview(block)))
    assert len(codec.compress(memoryview(bytes(1 << 17)))) < 100
    for block in noise:
        codec.compress(memoryview(block))
    repeated = noise[0][: 1 << 13] * 16
    sizes = [len(codec.compress(memoryview(repeated))) for _ in range(16)]
    assert min(sizes) < len(repeated) // 4 < len(repeated) // 2 < max(sizes)


def test_a_block_of_few_rows_that_repeat_is_compressed_as_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    row = bfloat16_block(768)
    block = b"".join(row if number % 3 else bfloat16_block(768, number) for number in range(16))
    size = len(Zstd().compress(memoryview(block)))
    monkeypatch.setattr("tiered_kv.toolkit.zstd._SHORT_BYTES", 0)
    assert size < 0.98 * len(Zstd().compress(memoryview(block)))


def test_a_block_may_begin_at_any_address() -> None:
    block, room, target = bfloat16_block(4096), bytearray(4100), bytearray(4100)
    for start in range(4):
        room[start : start + 4096] = block
        payload = Zstd().compress(memoryview(room)[start : start + 4096])
        assert Zstd().decompress(memoryview(payload), memoryview(target)[start : start + 4096]) is OK
        assert target[start : start + 4096] == block


def test_a_thread_makes_its_contexts_once(monkeypatch: pytest.MonkeyPatch, library: ZstdLibrary) -> None:
    made: list[str] = []

    def count(name: str) -> None:
        make = getattr(library, name)

        def counted(*args: object) -> object:
            made.append(name)
            return make(*args)

        monkeypatch.setattr(library, name, counted)

    count("compressor")
    count("decompressor")
    codec, block, target = Zstd(), bfloat16_block(4096), bytearray(4096)
    for _ in range(20):
        assert codec.decompress(memoryview(codec.compress(memoryview(block))), memoryview(target)) is OK
    assert made.count("compressor") <= 3
    assert made.count("decompressor") == 1


@pytest.mark.skipif(len(LIBRARIES) < 2, reason="there is one library of Zstandard here")
@pytest.mark.parametrize("block_of", [bfloat16_block, float16_block, int8_block])
def test_all_libraries_make_the_same_bytes(block_of: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    for size_bytes in SIZES:
        payloads = set()
        for library in LIBRARIES:
            monkeypatch.setattr(zstd, "zstd_library", lambda library=library: library)
            payloads.add(Zstd().compress(memoryview(block_of(size_bytes))))
        assert len(payloads) == 1


def test_threads_share_a_codec() -> None:
    codecs = CodecSet("zstd")

    def round_trips(thread: int) -> bool:
        for number in range(8):
            block = bfloat16_block((4096 << thread) + number, seed=8 * thread + number)
            draft = codecs.draft(memoryview(block))
            out = bytearray(len(block))
            status = codecs.decode(draft.codec_id, draft.content, memoryview(out), b"")
            if draft.codec_id != ZSTD_ID or status is not OK or out != block:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trips, range(8)))


def test_a_thread_reads_on_after_a_damaged_frame(library: ZstdLibrary) -> None:
    block = bfloat16_block(1 << 16)
    payload = Zstd().compress(memoryview(block))
    for position in range(0, len(payload), 997):
        damaged = bytearray(payload)
        damaged[position] ^= 0x55
        decoded(bytes(damaged), len(block))  # whether right or wrong, it is an answer: the checksum is above this
        assert decoded(payload[:position], len(block)) is BAD_PAYLOAD
        assert decoded(payload, len(block)) == block


def test_blocks_of_several_sizes_are_read_in_turn() -> None:
    blocks = [bfloat16_block(size_bytes) for size_bytes in SIZES]
    payloads = [Zstd().compress(memoryview(block)) for block in blocks]
    for _ in range(2):
        for block, payload in zip(blocks, payloads, strict=True):
            assert decoded(payload, len(block)) == block or len(payload) >= len(block)


def test_a_frame_that_claims_to_be_huge_is_refused_before_anything_is_allocated(library: ZstdLibrary) -> None:
    # RFC 8878: magic, a descriptor with an 8-byte content size and a single segment, 2**62 bytes claimed.
    frame = bytes.fromhex("28b52ffd") + bytes([0b11100000]) + (1 << 62).to_bytes(8, "little") + bytes(16)
    payload = len(frame).to_bytes(4, "little") + frame + frame
    assert PLAIN.decode(ZSTD_ID, memoryview(payload), memoryview(bytearray(64)), b"") is BAD_PAYLOAD


def test_a_frame_of_another_size_or_with_a_tail_is_refused(library: ZstdLibrary) -> None:
    payload = Zstd().compress(memoryview(bytes(64)))
    for size in (0, 63, 65):
        assert Zstd().decompress(memoryview(payload), memoryview(bytearray(size))) is BAD_PAYLOAD
    assert Zstd().decompress(memoryview(payload + b"x"), memoryview(bytearray(64))) is BAD_PAYLOAD
