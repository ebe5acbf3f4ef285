"""Tests of `KeyTable`: it is a dictionary, in less memory."""

from __future__ import annotations

import gc
import threading
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tiered_kv.cpu.key_hashes import key_hashes
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
    hashes = [zlib.crc32(key) for key in keys]
    assert table.find_numbers(hashes, [5] * 3) == [None] * 3
    assert table.find_numbers(hashes, [1, 2, 3]) == keys


def test_the_memory_of_a_table_is_given_back_in_slices() -> None:
    table = KeyTable()
    table.set_many([long_key(number) for number in range(1_000)], range(1_000))
    slices = 1
    while table.release(10):
        slices += 1
    assert slices > 10


@pytest.mark.parametrize("is_built", [False, True])
def test_no_collection_walks_its_buckets(is_built: bool) -> None:
    keys = [long_key(number) for number in range(1_000)]
    table = KeyTable()
    if is_built:
        rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 36)
        table = KeyTable.build(rows, np.arange(len(keys), dtype=np.uint64))
    table.set_many([*keys, *(long_key(number) for number in range(2_000, 3_000))], range(2_000))
    lists = [each for each in gc.get_referents(table) if isinstance(each, list)]
    assert len(lists) == 1
    assert not gc.is_tracked(lists[0])


def test_keys_of_one_hash_are_kept_apart() -> None:
    # A checksum is linear: a key and its sum with any multiple of the polynomial have one checksum.
    polynomial = 0x1_04C1_1DB7
    keys = []
    for multiple in range(1, 200):
        product = 0
        for bit in range(8):
            if multiple >> bit & 1:
                product ^= polynomial << bit
        reflected = bytes(int(f"{byte:08b}"[::-1], 2) for byte in product.to_bytes(8, "big"))
        keys.append(bytes(8) + reflected)
    assert len({zlib.crc32(key) for key in keys}) == 1
    table = KeyTable()
    table.set_many(keys, range(len(keys)))
    built = KeyTable.build(
        np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16), np.arange(len(keys), dtype=np.uint64)
    )
    for each in (table, built):
        assert each.get_many(keys) == list(range(len(keys)))
        assert each.find_numbers([zlib.crc32(key) for key in keys], range(len(keys))) == keys
        assert each.pop_numbers([zlib.crc32(key) for key in keys[90:]], range(90, len(keys))) == keys[90:]
        each.set_many(keys[90:], range(90, len(keys)))
        assert [each.pop(key) for key in keys] == list(range(len(keys)))
        assert len(each) == 0


def test_a_reader_finds_each_key_while_the_table_grows() -> None:
    table, present = KeyTable(), [long_key(number) for number in range(2_000)]
    table.set_many(present, range(len(present)))
    ended, lost = threading.Event(), list[bytes]()

    def read() -> None:
        while not ended.is_set():
            lost.extend(key for key in present if key not in table)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(2_000, 12_000):
        table.set(long_key(number), number)
    ended.set()
    for reader in readers:
        reader.join()
    assert lost == []
