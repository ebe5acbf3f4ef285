"""The hottest blocks of the primary tier: what a restart, or another server, loads first.

A stack asks at its clean end, and its HTTP server when another one asks. Any thread may call: it reads the rows while
the scheduler's thread changes them. What must stay true: it holds the interpreter lock for short times only, and a key
that is wrong by then costs a lookup, never a byte.
"""

from __future__ import annotations

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.row_table import NO_KEY
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.system.step import give_way

_SLICE = 256  # rows that are read without a pause


def hottest_keys(rows: PrimaryRows, keys_max: int) -> list[OffloadKey]:
    """Return the keys of at most `keys_max` ready blocks: the hottest by the policy first, a head before its tail."""
    table, index, heat_of = rows.table, rows.index, rows.policy.heat
    by_heat: dict[tuple[float, float], list[tuple[int, OffloadKey]]] = {}
    for row in range(len(table)):
        if row % _SLICE == 0:
            give_way()
        key = table.key[row]
        if key is not NO_KEY and index.get(key) == row:
            by_heat.setdefault(heat_of(row), []).append((table.position[row], key))
    found: list[OffloadKey] = []
    for heat in sorted(by_heat, reverse=True):
        if len(found) >= keys_max:
            break
        give_way()
        found += [key for _, key in sorted(by_heat[heat])]
    return found[:keys_max]
