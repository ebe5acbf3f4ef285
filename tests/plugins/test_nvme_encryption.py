"""Encrypted blocks in segments: nothing is stored in clear, and relocation and recovery need no key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.codecs import AES_ID, ZSTD_AES_ID, CodecSet
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv_nvme.layout import PAGE_BYTES

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench


def codecs(codec_id: int = AES_ID, *, key_id: int = 1) -> CodecSet:
    name = "aes-256-gcm" if codec_id == AES_ID else "zstd+aes-256-gcm"
    return CodecSet(name, Cipher({key_id: bytes(range(32))}, key_id))


@pytest.mark.parametrize(
    ("codec_id", "want_direct", "block_bytes"),
    [(AES_ID, True, 70_000), (AES_ID, False, 1000), (ZSTD_AES_ID, True, 4096)],
)
def test_blocks_come_back_and_are_nowhere_stored_in_clear(
    bench: StoreBench, codec_id: int, want_direct: bool, block_bytes: int
) -> None:
    bench.block_bytes, bench.segment_bytes, bench.capacity_bytes = block_bytes, 1 << 20, 16 << 20
    store = bench.open(codecs=codecs(codec_id), want_direct=want_direct)
    keys = make_keys(9)
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)
    store.close()
    stored = b"".join(path.read_bytes() for path in bench.segments)
    store = bench.open(codecs=codecs(codec_id), want_direct=not want_direct)
    assert bench.get(store, keys) == set(keys)
    blocks = bench.memory(len(keys))
    store.load(keys, blocks)
    for at in (0, block_bytes // 2, block_bytes - 8):
        assert not any(bytes(block[at : at + 8]) in stored for block in blocks)


def test_used_blocks_move_on_without_their_key(bench: StoreBench) -> None:
    store = bench.open(codecs=codecs())
    bench.fill(store, range(1000, 1020))  # nearly all that the tier has room for
    used = [key for number in range(1000, 1020) for key in bench.batch(number)[::8]]
    store.close()
    store = bench.open(codecs=codecs(key_id=2))  # a key that does not decrypt them
    for number in range(60):
        bench.fill(store, [number])
        store.touch(used)
    left = {key for key, is_stored in zip(used, store.contains(used), strict=True) if is_stored}
    assert left
    assert store.stats()["relocated_blocks_total"] > 0, "only those are used, so only those move"
    store.close()
    bench.capacity_bytes *= 2  # so that nothing is evicted once it is open
    assert bench.get(bench.open(codecs=codecs()), sorted(left)) == left


def test_a_flipped_bit_counts_as_damage_and_not_as_an_attack(bench: StoreBench) -> None:
    """An attacker would write a right checksum: see tests/trust/test_encryption.py."""
    keys = make_keys(2)
    store = bench.open(codecs=codecs())
    bench.put(store, keys)
    with bench.segments[0].open("r+b") as file:
        file.seek(2 * PAGE_BYTES + 100)  # in the first payload, behind the headers of the segment and the batch
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    outcome = store.load(keys, bench.memory(2))
    assert (list(outcome.successful_keys or ()), outcome.reason) == (keys[1:], "checksum")
    assert store.stats()["corrupt_blocks_total"] == {"checksum": 1}


def test_batches_without_a_summary_are_recovered_without_a_key(bench: StoreBench) -> None:
    store = bench.open(codecs=codecs())
    bench.put(store, make_keys(20))
    bench.crash()
    store.close()
    assert bench.open(codecs=codecs(key_id=2)).stats()["recovered_blocks_total"] == 20
