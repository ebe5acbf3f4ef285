"""Block contents: what is written is recognised, and nothing else is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.workload.content import BlockContent, Rows

SIZES = [1, 7, 8, 4096, 65536, 65544, 131072, 100_001]


def filled(block_bytes: int, ids: list[int]) -> tuple[BlockContent, Rows]:
    content = BlockContent(block_bytes)
    rows = np.zeros((len(ids), block_bytes), dtype=np.uint8)
    content.fill(rows, range(len(ids)), ids)
    return content, rows


@pytest.mark.parametrize("block_bytes", SIZES)
def test_what_was_written_is_right(block_bytes: int) -> None:
    ids = [0, 1, 2**64 - 1, 12345]
    content, rows = filled(block_bytes, ids)
    assert content.check(rows, range(4), ids) == []


def test_rows_are_matched_with_ids_in_the_order_given() -> None:
    content = BlockContent(4096)
    rows = np.zeros((8, 4096), dtype=np.uint8)
    content.fill(rows, [5, 2], [50, 20])
    assert content.check(rows, [2, 5], [20, 50]) == []
    assert [position for position, _ in content.check(rows, [5, 2], [20, 50])] == [0, 1]
    assert not rows[[0, 1, 3, 4, 6, 7]].any()


@given(st.data())
def test_any_flipped_bit_is_found_at_its_offset(data: st.DataObject) -> None:
    block_bytes = data.draw(st.sampled_from(SIZES))
    offset = data.draw(st.integers(0, block_bytes - 1))
    content, rows = filled(block_bytes, [3, 4])
    rows[1, offset] ^= 1 << data.draw(st.integers(0, 7))
    assert content.check(rows, [0, 1], [3, 4]) == [(1, offset)]


def test_a_sector_or_a_block_of_another_zeros_and_chunks_that_changed_places_are_found() -> None:
    content, rows = filled(131072, [3, 4])
    rows[0, 4096:4608] = rows[1, 4096:4608]
    assert content.check(rows, [0, 1], [3, 5]) == [(0, 4096), (1, 0)]
    rows[0], rows[1] = 0, np.roll(rows[1], 65536)
    assert content.check(rows, [0, 1], [3, 4]) == [(0, 0), (1, 0)]


def test_contents_stay_the_same_from_version_to_version() -> None:
    _, rows = filled(100_001, [7])
    assert hashlib.sha256(rows.tobytes()).hexdigest() == (
        "0c3c17c792882e5f53039d7499b7ced19d79de03265d0b84696c28fae7d326ae"
    )
