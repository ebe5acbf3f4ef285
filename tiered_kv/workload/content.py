"""Block contents that are cheap to write and to check: a function of the block's id and the offset in it.

A block is cut into chunks of 64 KiB. A chunk is one fixed random tile, each of its 64-bit words XORed with a
word that is mixed from the block's id and the chunk's number. So a flipped bit makes its word differ. A block,
or a sector, of another id or another place differs in every word, and so do zeros.
Both directions run at memory speed, because the tile and the scratch stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Cells = Rows | Words

_CHUNK_BYTES = 64 << 10
_WORD_BYTES = 8
# The seed is arbitrary, but must never change: the blocks of an earlier run are checked against it.
_TILE_SEED = 0x7469657265646B76


class BlockContent:
    """Writes and checks the bytes of blocks of one size. One instance serves one thread.

    Args:
        block_bytes: Bytes of a block, at least 1.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        # Blocks of whole words are handled as words, which is fast; others as bytes.
        self._cell = np.dtype(np.uint8 if block_bytes % _WORD_BYTES else np.uint64)
        self._cells_per_chunk = _CHUNK_BYTES // self._cell.itemsize
        counters = np.arange(_TILE_SEED, _TILE_SEED + _CHUNK_BYTES // _WORD_BYTES, dtype=np.uint64)
        self._tile = _mix(counters)
        self._scratch = np.empty_like(self._tile)
        self._expected: Cells = self._scratch.view(self._cell)
        chunks = -(-block_bytes // _CHUNK_BYTES)
        self._chunk_numbers = np.arange(chunks, dtype=np.uint64)

    def fill(self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Write the content of each block into its row.

        Args:
            rows: C-contiguous uint8 array of shape (n, block_bytes).
            row_ids: The rows to write.
            block_ids: The blocks whose content is written, 0 to 2**64 - 1 each, in the order of `row_ids`.
        """
        cells: Cells = rows.view(self._cell)
        for row_id, masks in zip(row_ids, self._masks(block_ids), strict=True):
            row = cells[row_id]
            for number, mask in enumerate(masks):
                chunk = self._chunk(row, number)
                chunk[:] = self._expect(mask, len(chunk))

    def check(self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Compare each row with the content of its block; the arguments are those of `fill`.

        Returns:
            For each row that differs, its position in `row_ids` and the offset of its first wrong byte.
        """
        cells: Cells = rows.view(self._cell)
        wrong: list[tuple[int, int]] = []
        for position, (row_id, masks) in enumerate(zip(row_ids, self._masks(block_ids), strict=True)):
            row = cells[row_id]
            for number, mask in enumerate(masks):
                chunk = self._chunk(row, number)
                expected = self._expect(mask, len(chunk))
                if not (chunk == expected).all():
                    differs = chunk.view(np.uint8) != expected.view(np.uint8)
                    wrong.append((position, number * _CHUNK_BYTES + int(differs.argmax())))
                    break
        return wrong

    def _masks(self, block_ids: Sequence[int]) -> Words:
        """Return the word of each chunk of each block, of shape (len(block_ids), chunks)."""
        ids = np.array(block_ids, dtype=np.uint64)
        return _mix(_mix(ids)[:, np.newaxis] + self._chunk_numbers)

    def _chunk(self, row: Cells, number: int) -> Cells:
        first = number * self._cells_per_chunk
        return row[first : first + self._cells_per_chunk]

    def _expect(self, mask: np.uint64, cells: int) -> Cells:
        words = -(-cells * self._cell.itemsize // _WORD_BYTES)
        np.bitwise_xor(self._tile[:words], mask, out=self._scratch[:words])
        return self._expected[:cells]


def _mix(values: Words) -> Words:
    """Return `values` mixed one-to-one over 64 bits (the finalizer of SplitMix64, Steele et al., 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
