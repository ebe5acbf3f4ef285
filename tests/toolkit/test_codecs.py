"""Codecs: lossless for any bytes, bounded on hostile ones, and absent without their library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stacks import ReplaceModule
from tiered_kv.errors import MissingExtraError
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.codecs import AES_ID, PLAIN, RAW_ID, ZSTD_AES_ID, ZSTD_ID, CodecSet, Zstd, payload_bytes_range
from tiered_kv.toolkit.encryption import Cipher

OK, BAD_PAYLOAD = RecordStatus.OK, RecordStatus.BAD_PAYLOAD


def bfloat16_block(size_bytes: int) -> bytes:
    """Return normally distributed values, their low 16 bits cut off, as a model's keys look."""
    values = np.random.default_rng(7).normal(size=size_bytes // 2).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2").tobytes()


@given(block=st.binary(max_size=300), repeats=st.integers(1, 40))
def test_every_codec_gives_back_the_bytes_it_was_given(block: bytes, repeats: int) -> None:
    block = block * repeats
    for name in ("raw", "zstd"):
        draft = CodecSet(name).draft(memoryview(block))
        assert draft.payload_bytes == len(draft.content) <= len(block)
        assert draft.payload_bytes in payload_bytes_range(draft.codec_id, len(block))
        out = bytearray(len(block))
        assert PLAIN.decode(draft.codec_id, draft.content, memoryview(out), b"") is OK
        assert out == block


def test_byte_planes_compress_better_than_one_frame() -> None:
    block = bfloat16_block(1 << 16)
    payload = Zstd().compress(memoryview(block))
    assert len(payload) < 0.9 * len(zstandard.ZstdCompressor(level=1).compress(block))


def test_a_frame_that_claims_to_be_huge_is_refused_before_anything_is_allocated() -> None:
    # RFC 8878: magic, a descriptor with an 8-byte content size and a single segment, 2**62 bytes claimed.
    frame = bytes.fromhex("28b52ffd") + bytes([0b11100000]) + (1 << 62).to_bytes(8, "little") + bytes(16)
    payload = len(frame).to_bytes(4, "little") + frame + frame
    assert PLAIN.decode(ZSTD_ID, memoryview(payload), memoryview(bytearray(64)), b"") is BAD_PAYLOAD


def test_a_frame_of_another_size_or_with_a_tail_is_refused() -> None:
    payload = Zstd().compress(memoryview(bytes(64)))
    for size in (0, 63, 65):
        assert Zstd().decompress(memoryview(payload), memoryview(bytearray(size))) is BAD_PAYLOAD
    assert Zstd().decompress(memoryview(payload + b"x"), memoryview(bytearray(64))) is BAD_PAYLOAD


def test_without_zstandard_zstd_names_the_extra_and_only_compressed_blocks_are_not_read(
    replace_module: ReplaceModule,
) -> None:
    replace_module("zstandard")
    with pytest.raises(MissingExtraError, match=r"\.\[zstd\]"):
        CodecSet("zstd")
    assert CodecSet().refusal(ZSTD_ID) is RecordStatus.UNKNOWN_CODEC
    assert CodecSet().refusal(RAW_ID) is OK
    encrypting = CodecSet("aes-256-gcm", Cipher({1: bytes(32)}, 1))
    assert encrypting.refusal(AES_ID) is OK
    assert encrypting.refusal(ZSTD_AES_ID) is RecordStatus.UNKNOWN_CODEC


def test_the_toolkit_loads_neither_zstandard_nor_asyncio() -> None:
    script = (
        "import sys, tiered_kv.toolkit, tiered_kv.toolkit.record\n"
        "print([name for name in ('zstandard', 'asyncio') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
