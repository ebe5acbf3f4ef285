"""What the index of rows finds, and what it must not find."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from tests.support.host_server import keys_of
from tiered_kv.base import OffloadKey
from tiered_kv.server.session_request import RUN_MIN, RowIndex

KEYS = keys_of(100)
ROWS = random.Random(0).sample(range(200), len(KEYS))


class Rows:
    """An index of `ROWS`, the blocks that are there, and their generations."""

    def __init__(self) -> None:
        self.ready = dict(zip(KEYS, ROWS, strict=True))
        self.generations = memoryview(array("I", bytes(4 * 200)))
        self.index = RowIndex(self.ready.get, self.generations)

    def of(self, keys: Sequence[OffloadKey]) -> list[int]:
        return [self.ready[key] for key in keys if key in self.ready]

    def find(self, keys: Sequence[OffloadKey]) -> list[int]:
        return self.find_all([(b"".join(keys), len(keys))])

    def find_all(self, parts: Sequence[tuple[bytes, int]]) -> list[int]:
        return self.index.find_all(parts).tolist()


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.index.note(KEYS[:60], ROWS[:60])
    rows.index.note(KEYS[60:], ROWS[60:])
    return rows


def test_rows_are_found_from_any_key_on_and_across_messages(rows: Rows) -> None:
    assert rows.find(KEYS) == ROWS
    assert rows.find(KEYS[7:93]) == ROWS[7:93]
    assert rows.find_all([(b"".join(KEYS[:50]), 50), (b"".join(KEYS[50:]), 50)]) == ROWS


def test_rows_end_at_a_key_that_is_not_there(rows: Rows) -> None:
    assert rows.find([*KEYS[:20], *keys_of(1, 500), *KEYS[20:]]) == ROWS[:20]
    assert rows.find(keys_of(3, 500)) == []


def test_a_prefix_that_goes_on_elsewhere_is_found_if_its_runs_are_long(rows: Rows) -> None:
    assert rows.find([*KEYS[:RUN_MIN], *KEYS[70:90]]) == [*ROWS[:RUN_MIN], *ROWS[70:90]]
    assert rows.find([*KEYS[:3], *KEYS[70:90]]) == ROWS[:3]


def test_a_row_that_was_freed_is_not_found_though_its_key_is_stored_again(rows: Rows) -> None:
    rows.generations[ROWS[30]] += 1
    rows.ready[KEYS[30]] = 199
    assert rows.find(KEYS) == ROWS[:30]


def test_a_block_that_is_being_written_is_not_found(rows: Rows) -> None:
    del rows.ready[KEYS[0]]
    assert rows.find(KEYS) == []


def test_after_a_reset_no_row_is_found(rows: Rows) -> None:
    rows.generations[:] = memoryview(array("I", [each + 1 for each in rows.generations]))
    assert rows.find(KEYS) == []


def test_keys_of_another_length_are_not_found(rows: Rows) -> None:
    odd = OffloadKey(KEYS[0] + b"x"), OffloadKey(KEYS[1][1:])
    rows.ready.update(zip(odd, (198, 199), strict=True))
    rows.index.note(odd, [198, 199])
    assert rows.find(odd[:1]) == []
    assert rows.find_all([(b"".join(KEYS), 2 * len(KEYS))]) == []


def test_what_is_found_after_many_prefixes_is_true(rows: Rows) -> None:
    """Prefixes that share their heads go round the ring; blocks are freed, and stored again in other rows."""
    chosen = random.Random(1)
    for _ in range(200):
        head, tail = sorted(chosen.sample(range(len(KEYS)), 2))
        prefix = [*KEYS[:head], *KEYS[tail:]]
        rows.index.note(prefix, rows.of(prefix))
        for key in chosen.sample(KEYS, 3):
            rows.generations[rows.of([key])[0]] += 1
            unused = set(range(200)).difference(rows.ready.values())
            rows.ready[key] = chosen.choice(sorted(unused))
        found = rows.find(prefix)
        assert found == rows.of(prefix[: len(found)])
    rows.index.note(KEYS, rows.of(KEYS))
    assert rows.find(KEYS[3:]) == rows.of(KEYS[3:])


def test_no_row_is_found_before_one_is_noted() -> None:
    assert Rows().find(KEYS) == []
