"""Rows for the tests of eviction policies, which need no memory."""

from __future__ import annotations

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.policies import CachePolicy, RequestChain
from tiered_kv.cpu.row_table import RowTable


def make_rows(table: RowTable, count: int, first: int = 0) -> list[int]:
    """Return the rows from `first` on, each with a key of its own."""
    table.grow(max(0, first + count - len(table)))
    rows = list(range(first, first + count))
    for row in rows:
        table.key[row] = OffloadKey(b"key-%d" % row)
    return rows


def stored(policy: CachePolicy, chain: RequestChain, count: int, first: int = 0) -> list[int]:
    """Store blocks of a request in the rows from `first` on, and return these rows."""
    rows = make_rows(policy.table, count, first)
    policy.admit(rows, chain)
    chain.extend(rows, policy.table)
    policy.add(rows)
    return rows
