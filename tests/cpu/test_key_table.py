"""Tests of `KeyTable`: it is a dictionary, in less memory."""

from __future__ import annotations

import gc
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings

from tiered_kv.cpu import key_table
from tiered_kv.cpu.key_hashes import key_hash, key_hashes
from tiered_kv.cpu.key_shards import SHARDS, shard_of
from tiered_kv.cpu.key_table import KeyTable

# Few short keys, so that operations meet; keys of zeros, whose bytes also lie across records.
KEYS = st.one_of(
    st.sampled_from([b"", b"\0", b"\0\0", b"\0\0\0\0"]),
    st.integers(0, 63).map(lambda number: number.to_bytes(4, "little")),
    st.integers(0, 7).map(lambda number: b"longer" + bytes((number,))),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "pop", "set many"]), st.lists(KEYS, max_size=40), st.integers(0, 99))
)


def long_key(number: int, length: int = 36) -> bytes:
    return number.to_bytes(8, "little").rjust(length, b"\7")


def built(keys: Sequence[bytes]) -> KeyTable:
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    return KeyTable.build(rows, np.arange(len(keys), dtype=np.uint64))


@pytest.fixture(params=[4, 48], autouse=True, ids=["small shards", "shards"])
def slots_min(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least size of a shard: with a small one, few keys meet."""
    monkeypatch.setattr(key_table, "_SLOTS_MIN", request.param)


@pytest.mark.parametrize("slot_count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 48, 63, 64, 511, 512, 513, 100_000])
def test_a_window_begins_within_its_shard(slot_count: int) -> None:
    tags, records, slots = shard_of(slot_count, 44)
    assert (len(tags), len(records)) == (slot_count, 44 * slot_count)
    assert 1 <= slots <= max(1, slot_count)
    assert slots % 2 == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from([4, 8]))
def test_it_answers_as_a_dictionary(steps: list[tuple[str, list[bytes], int]], number_bytes: int) -> None:
    table, expected = KeyTable(number_bytes), dict[bytes, int]()
    for operation, keys, number in steps:
        if operation == "pop":
            assert [table.pop(key) for key in keys] == [expected.pop(key, -1) for key in keys]
        elif operation == "set":
            for key in keys:
                table.set(key, number)
                expected[key] = number
        else:
            numbers = range(number, number + len(keys))
            table.set_many(keys, numbers)
            expected.update(zip(keys, numbers, strict=True))
        assert len(table) == len(expected)
        assert dict(table.items()) == expected
        assert table.get_many(keys) == [expected.get(key, -1) for key in keys]
        assert all(key in table for key in expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.binary(min_size=2, max_size=2), st.integers(0, 1 << 31)), max_size=300), st.data())
def test_a_built_table_is_one_that_was_filled(items: list[tuple[bytes, int]], data: st.DataObject) -> None:
    keys = np.frombuffer(b"".join(key for key, _ in items), np.uint8).reshape(len(items), 2)
    table = KeyTable.build(keys, np.array([number for _, number in items], np.uint64))
    expected = dict(items)
    assert dict(table.items()) == expected
    assert len(table) == len(expected)
    for key in data.draw(st.lists(st.binary(min_size=2, max_size=2), max_size=20)):
        table.set(key, 1)
        expected[key] = 1
    assert table.get_many(expected) == list(expected.values())


@pytest.mark.parametrize("is_built", [False, True])
def test_many_keys_are_found_and_removed(is_built: bool) -> None:
    keys = [long_key(number) for number in range(20_000)]
    if is_built:
        matrix = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 36)
        table = KeyTable.build(matrix, np.arange(len(keys), dtype=np.uint32), 4)
    else:
        table = KeyTable(4)
        table.set_many(keys, range(len(keys)))
    assert table.get_many(keys) == list(range(len(keys)))
    assert table.get(long_key(len(keys))) == -1
    assert [table.pop(key) for key in keys[::2]] == list(range(0, len(keys), 2))
    assert table.get_many(keys[1::2]) == list(range(1, len(keys), 2))
    assert not any(key in table for key in keys[::2])
    assert len(table) == len(keys) // 2


def test_keys_are_found_by_their_numbers() -> None:
    keys = [long_key(number) for number in range(5_000)]
    table, hashes = KeyTable(), key_hashes(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 36)).tolist()
    table.set_many(keys, range(len(keys)))
    table.set(keys[7], 70_000)
    numbers = range(len(keys))
    expected = [None if number == 7 else key for number, key in enumerate(keys)]
    assert table.find_numbers(hashes, numbers) == expected
    assert table.pop_numbers(hashes[:100], numbers[:100]) == expected[:100]
    assert table.pop_numbers(hashes[:100], numbers[:100]) == [None] * 100
    assert table.get_many(keys[:101]) == [*[-1] * 7, 70_000, *[-1] * 92, 100]
    assert len(table) == len(keys) - 99


def test_the_bytes_of_a_number_within_a_key_are_not_that_number() -> None:
    table = KeyTable()
    keys = [(5).to_bytes(8, "little") * 2, bytes(16), (5).to_bytes(8, "little") + bytes(8)]
    table.set_many(keys, [1, 2, 3])
    hashes = [key_hash(key) for key in keys]
    assert table.find_numbers(hashes, [5] * 3) == [None] * 3
    assert table.find_numbers(hashes, [1, 2, 3]) == keys


def test_the_memory_of_a_table_is_given_back_in_slices() -> None:
    table = KeyTable()
    table.set_many([long_key(number) for number in range(1_000)], range(1_000))
    slices = 1
    while table.release():
        slices += 1
    assert slices == SHARDS


@pytest.mark.parametrize("is_built", [False, True])
def test_its_keys_are_no_objects(is_built: bool) -> None:
    keys = [long_key(number) for number in range(20_000)]
    table = built(keys) if is_built else KeyTable()
    table.set_many(keys, range(len(keys)))
    gc.collect()
    waiting, found = list[object]([table]), 0
    while waiting:
        referents = gc.get_referents(waiting.pop())
        found += len(referents)
        waiting += [each for each in referents if isinstance(each, (list, tuple, dict))]
    assert found < 12 * SHARDS < len(keys)


def test_its_hash_is_that_of_the_library() -> None:
    for key_bytes in range(1, 70):
        keys = [number.to_bytes(8, "little").ljust(key_bytes, b"\5")[-key_bytes:] for number in range(300)]
        rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, key_bytes)
        assert key_hashes(rows).tolist() == [xxhash.xxh32_intdigest(key) for key in keys]
        assert key_hashes(rows[:10]).tolist() == [xxhash.xxh32_intdigest(key) for key in keys[:10]]


def keys_of_one_hash(count: int) -> list[bytes]:
    """Return keys of 8 bytes: the second word of each undoes what its first word changes in the hash."""
    prime3, prime4, mask = 3_266_489_917, 668_265_263, (1 << 32) - 1
    keys = []
    for number in range(count):
        state = (374_761_393 + 8 + number * prime3) & mask
        state = ((state << 17 | state >> 15) * prime4) & mask
        keys.append(struct.pack("<II", number, -state * pow(prime3, -1, 1 << 32) & mask))
    assert len(set(map(key_hash, keys))) == 1
    return keys


def test_keys_of_one_hash_are_kept_apart() -> None:
    few = keys_of_one_hash(200)
    many = keys_of_one_hash(5_000)
    for keys, table in ((few, KeyTable()), (many, built(many)), (few, built([*few, *many])), (many, KeyTable())):
        table.set_many(keys, range(len(keys)))
        hashes = list(map(key_hash, keys))
        assert table.get_many(keys) == list(range(len(keys)))
        assert table.find_numbers(hashes, range(len(keys))) == keys
        assert table.pop_numbers(hashes[90:], range(90, len(keys))) == keys[90:]
        assert table.get_many(keys) == [*range(90), *[-1] * (len(keys) - 90)]
        table.set_many(keys[90:], range(90, len(keys)))
        assert [table.pop(key) for key in keys] == list(range(len(keys)))
        assert not any(key in table for key in keys)


def test_what_is_deleted_leaves_no_trace() -> None:
    """After many times as many keys as it holds at once, a table is as large as a new one."""
    table, lately, slots = KeyTable(), 30_000, 0
    for number in range(0, 8 * lately, 100):
        table.set_many([long_key(each) for each in range(number, number + 100)], range(number, number + 100))
        if number >= lately:
            slots = slots or sum(len(tags) for tags, _, _ in table.shards)
            old = range(number - lately, number - lately + 100)
            assert [table.pop(long_key(each)) for each in old] == list(old)
    assert len(table) == lately
    assert sum(len(tags) for tags, _, _ in table.shards) < 1.4 * slots


class Readers:
    """Threads that look up keys again and again until the block ends, and note each wrong answer."""

    def __init__(self, table: KeyTable, numbers: dict[bytes, int]) -> None:
        self.wrong = list[object]()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(look_up,))
            for look_up in (
                lambda: [key for key in numbers if key not in table],
                lambda: [key for key, number in numbers.items() if table.get(key) != number],
                lambda: [number for number in table.get_many(numbers) if number not in numbers.values()],
            )
        ]

    def _read(self, look_up: Callable[[], list[object]]) -> None:
        while not self._ended.is_set():
            self.wrong += look_up()

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("hasty")
def test_a_reader_finds_each_key_while_the_table_grows_and_others_are_deleted() -> None:
    table, present = KeyTable(), {long_key(number): number for number in range(500)}
    table.set_many([*present], [*present.values()])
    with Readers(table, present) as readers:
        for number in range(1_000, 40_000, 100):
            table.set_many([long_key(each) for each in range(number, number + 100)], range(number, number + 100))
            if number % 2_000 == 0:
                assert [table.pop(long_key(each)) for each in range(number, number + 90)] == [
                    *range(number, number + 90)
                ]
    assert readers.wrong == []


@pytest.mark.usefixtures("hasty")
def test_no_reader_gets_the_number_of_another_key() -> None:
    """One slot is used by key after key: a reader between two of them gets the key's own number, or none."""
    keys = keys_of_one_hash(50)
    table, numbers = KeyTable(), {key: 1_000 + number for number, key in enumerate(keys)}
    wrong, ended = list[tuple[bytes, int]](), threading.Event()

    def read() -> None:
        while not ended.is_set():
            for key, number in numbers.items():
                if (found := table.get(key)) not in (number, -1):
                    wrong.append((key, found))
            wrong.extend(
                (key, found)
                for (key, number), found in zip(numbers.items(), table.get_many(numbers), strict=True)
                if found not in (number, -1)
            )

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(200):
        for key, number in numbers.items():
            table.set(key, number)
            assert table.pop(key) == number
    ended.set()
    for reader in readers:
        reader.join()
    assert wrong == []
