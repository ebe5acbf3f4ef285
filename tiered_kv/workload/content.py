"""Contents of blocks, as a function of the block's id and the offset in it: cheap to write and to check.

A block is fixed random words, each XORed with a word that is mixed from the block's id. So a block of another id, a
sector of another offset, and zeros differ in every word. The replay and the bench call it, each on its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.uint8]]

_WORD_BYTES = 8
# It must never change: the blocks of earlier runs are checked against it.
_SEED = 0x7469657265646B76


class BlockContent:
    """Writes and checks the bytes of blocks of one size. One instance serves one thread."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        words = -(-block_bytes // _WORD_BYTES)
        self._fixed = _mix(np.arange(_SEED, _SEED + words, dtype=np.uint64))
        self._expected = np.empty(words, "<u8")
        """A buffer for expected bytes: little-endian numbers, so that the bytes are equal on every machine."""

    def fill(self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Write the content of each block, with ids from 0 to 2**64 - 1, into its row of a C-contiguous array."""
        for row_id, block_id in zip(row_ids, block_ids, strict=True):
            rows[row_id] = self._expect(block_id)

    def check(self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return, for each row that differs from its block, the position in `row_ids` and the first wrong offset."""
        wrong: list[tuple[int, int]] = []
        for position, (row_id, block_id) in enumerate(zip(row_ids, block_ids, strict=True)):
            differs = rows[row_id] != self._expect(block_id)
            if differs.any():
                wrong.append((position, int(differs.argmax())))
        return wrong

    def _expect(self, block_id: int) -> Rows:
        np.bitwise_xor(self._fixed, _mix(np.array([block_id], dtype=np.uint64)), out=self._expected)
        return self._expected.view(np.uint8)[: self.block_bytes]


def _mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return `values` mixed one-to-one over 64 bits (the finalizer of SplitMix64, Steele et al., 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
