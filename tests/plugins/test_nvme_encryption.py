"""Encrypted blocks in segments: they move without their key, survive a crash, and what is refused is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.codecs import AES_ID, ZSTD_AES_ID, CodecSet
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv_nvme.disk import Scratch
from tiered_kv_nvme.layout import PAGE_BYTES

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench

SECRET = bytes(range(32))
BATCHES = 60
"""Batches of 40 blocks: more than twice what the bench's capacity holds."""


def codecs(codec_id: int = AES_ID, *, key_id: int = 1) -> CodecSet:
    name = "aes-256-gcm" if codec_id == AES_ID else "zstd+aes-256-gcm"
    return CodecSet(name, Cipher({key_id: SECRET}, key_id))


def shares_eight_bytes(clear: bytes, stored: bytes) -> bool:
    """Return whether any eight bytes of `clear`, from every eighth on, stand anywhere in `stored`."""
    windows = [np.frombuffer(stored, np.uint64, (len(stored) - at) // 8, at) for at in range(8)]
    pieces = np.sort(np.frombuffer(clear, np.uint64, len(clear) // 8))
    return any(bool((pieces[np.searchsorted(pieces[:-1], window)] == window).any()) for window in windows)


@pytest.mark.parametrize(
    ("codec_id", "want_direct", "block_bytes"),
    [(AES_ID, True, 70_000), (AES_ID, False, 1000), (ZSTD_AES_ID, True, 4096)],
)
def test_what_is_stored_comes_back_and_is_nowhere_in_clear(
    bench: StoreBench, codec_id: int, want_direct: bool, block_bytes: int
) -> None:
    bench.block_bytes, bench.segment_bytes, bench.capacity_bytes = block_bytes, 1 << 20, 16 << 20
    store = bench.open(codecs=codecs(codec_id), want_direct=want_direct)
    keys = make_keys(9)
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)
    store.close()
    stored = b"".join(path.read_bytes() for path in bench.segments)
    blocks = bench.memory(len(keys))
    clear = bench.open(codecs=codecs(codec_id), want_direct=not want_direct)
    assert clear.load(keys, blocks).successful_keys is None
    assert not shares_eight_bytes(b"".join(blocks), stored)
    assert shares_eight_bytes(b"".join(blocks), b"odd" + bytes(blocks[-1][-8:])), "it would find them"


def test_used_blocks_move_on_without_their_key(bench: StoreBench) -> None:
    prompts = [make_keys(40, f"prompt {number}") for number in range(20)]  # nearly all that the tier has room for
    used = [key for prompt in prompts for key in prompt[::8]]
    store = bench.open(codecs=codecs())
    for prompt in prompts:
        bench.put(store, prompt)
    store.close()
    store = bench.open(codecs=codecs(key_id=2))  # which has no key for them
    for number in range(BATCHES):
        bench.put(store, make_keys(40, f"batch {number}"))
        store.touch(used)
    left = {key for key, is_there in zip(used, store.contains(used), strict=True) if is_there}
    assert left
    assert store.stats()["relocated_blocks_total"] > 0, "only those are used, so only those move"
    store.close()
    bench.capacity_bytes *= 2  # so that nothing is evicted once it is open
    assert bench.get(bench.open(codecs=codecs()), sorted(left)) == left


def test_a_rotten_byte_is_told_from_a_changed_one(bench: StoreBench) -> None:
    """Whoever changes a block on purpose writes a right checksum: see tests/trust/test_encryption.py."""
    keys = make_keys(2)
    store = bench.open(codecs=codecs())
    bench.put(store, keys)
    with bench.segments[0].open("r+b") as file:
        file.seek(2 * PAGE_BYTES + 100)  # within the first payload, behind the segment's header and the batch's
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    outcome = store.load(keys, bench.memory(2))
    assert (list(outcome.successful_keys or ()), outcome.reason) == (keys[1:], "checksum")
    assert store.stats()["corrupt_blocks_total"] == {"checksum": 1}


def test_batches_without_a_summary_are_recovered_without_a_key(bench: StoreBench) -> None:
    """As a crash leaves them: their checksums are verified, and for those no key is needed."""
    keys = make_keys(20)
    store = bench.open(codecs=codecs())
    bench.put(store, keys)
    copies = {path: path.read_bytes() for path in bench.segments}
    store.close()
    for path, data in copies.items():
        path.write_bytes(data)
    assert bench.open(codecs=codecs(key_id=2)).stats()["recovered_blocks_total"] == 20


def test_a_large_buffer_begins_on_a_huge_page() -> None:
    for size in (2 << 20, (2 << 20) + 4096, 9 << 20):
        buffer = Scratch().take(size)
        assert len(buffer) == size
        assert np.frombuffer(buffer, dtype=np.uint8).ctypes.data % (2 << 20) == 0
