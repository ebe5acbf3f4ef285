"""Rows for the tests of eviction policies, which need no memory."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.policies import CachePolicy, RequestChain
from tiered_kv.cpu.row_table import RowTable
from tiered_kv.cpu.writers import PROMOTED


def make_rows(table: RowTable, count: int, first: int = 0) -> list[int]:
    """Return the rows from `first` on, each with a key of its own; their blocks are being written."""
    table.grow(max(0, first + count - len(table)))
    rows = list(range(first, first + count))
    for row in rows:
        table.key[row], table.ref_cnt[row] = OffloadKey(b"key-%d" % row), PROMOTED
    return rows


def make_ready(policy: CachePolicy, rows: Sequence[int]) -> None:
    """Add rows that have been written, or that are not pinned any more."""
    for row in rows:
        policy.table.ref_cnt[row] = 0
    policy.add(rows)


def pin(policy: CachePolicy, rows: Sequence[int]) -> None:
    """Pin ready blocks that have no pins."""
    policy.remove(rows)
    for row in rows:
        policy.table.ref_cnt[row] = 1


def stored(policy: CachePolicy, chain: RequestChain, count: int, first: int = 0) -> list[int]:
    """Store blocks of a request in the rows from `first` on, and return these rows."""
    rows = make_rows(policy.table, count, first)
    policy.admit(rows, chain)
    chain.extend(rows, policy.table)
    make_ready(policy, rows)
    return rows
