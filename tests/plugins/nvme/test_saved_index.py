"""A clean end saves the index; the next opening uses it if it is of these segments, and never twice.

Whatever is wrong with the file, the opening finds what it finds without one.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.entries import rig_of
from tests.support.segment_map import PAGE_BYTES
from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv_nvme import saved_index
from tiered_kv_nvme.directory import DIRECTORY_RESERVE_BYTES, SEGMENT_RESERVE_BYTES
from tiered_kv_nvme.layout import checksum
from tiered_kv_nvme.pool import FREE_SEGMENTS
from tiered_kv_nvme.store import SegmentStore

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench

_NUMBERS = itertools.count()
KEYS = [make_keys(40, f"batch {number}") for number in range(12)]


@pytest.fixture
def saved(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> StoreBench:
    """A directory with a saved index of several parts."""
    monkeypatch.setattr(saved_index, "_PART_BUCKETS", 16)
    store = bench.open_ready()
    for keys in KEYS:
        bench.put(store, keys)
    store.close()
    assert index_of(bench).exists()
    return bench


def index_of(bench: StoreBench) -> Path:
    return bench.path / "index"


def was_used(store: SegmentStore) -> bool:
    return store.describe()["index"] == "as the last end saved it"


def test_blocks_that_another_can_read_are_in_the_index_after_one_that_cannot(tmp_path: Path) -> None:
    keys = make_keys(4)

    def opened(number: int) -> TierRig:
        encryption = {"keys": {number: f"{number:064x}"}, "write_key": number}
        entry = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB", "codec": "aes-256-gcm"}
        return rig_of({**entry, "encryption": encryption}, block_bytes=4096)

    with closing(opened(1)) as owner:
        assert owner.store(keys).success
    with closing(opened(2)) as stranger:
        assert stranger.load(keys) == set()
        assert stranger.lookup_all(keys) == [False] * 4
        assert stranger.store(make_keys(4, "the stranger's")).success
    with closing(opened(1)) as owner:
        assert owner.load(keys) == set(keys)


def all_keys() -> list[OffloadKey]:
    return [*chain(*KEYS)]


def reopened(bench: StoreBench, *, used: bool) -> SegmentStore:
    """Return the store, opened again, in which all blocks are found and nothing is left of the file."""
    store = bench.open()
    assert not index_of(bench).exists()
    assert was_used(store) is used
    assert all(store.contains(all_keys()))
    assert bench.get(store, all_keys()) == set(all_keys())
    return store


def test_a_clean_end_saves_the_index_and_the_next_opening_uses_it_once(saved: StoreBench) -> None:
    assert index_of(saved).stat().st_mode & 0o777 == 0o600
    store = reopened(saved, used=True)
    assert store.counters["recovered_blocks_total"] == len(all_keys())
    saved.crash()
    reopened(saved, used=False)


def test_what_was_evicted_moved_or_dropped_is_not_in_it(bench: StoreBench) -> None:
    store = bench.open_ready()
    bench.fill(store)
    bench.wait_until_ready(store)
    keys = [*chain(*map(bench.batch, range(bench.BATCHES)))]
    there = {key for key, has in zip(keys, store.contains(keys), strict=True) if has}
    store.close()
    store = bench.open_ready()
    assert was_used(store)
    assert {key for key, has in zip(keys, store.contains(keys), strict=True) if has} == there
    assert bench.get(store, sorted(there)) == there
    bench.fill(store, range(bench.BATCHES, 2 * bench.BATCHES))  # all of these are evicted by their hashes
    bench.wait_until_ready(store)
    assert not any(store.contains(keys))
    assert len(store.pool.index.places) == sum(store.contains([*chain(*map(bench.batch, range(2 * bench.BATCHES)))]))


def test_it_takes_the_place_of_free_segments_within_the_capacity(bench: StoreBench) -> None:
    bench.capacity_bytes = DIRECTORY_RESERVE_BYTES + 15 * ((256 << 10) + SEGMENT_RESERVE_BYTES)
    store = bench.open_ready()
    bench.fill(store)
    bench.wait_until_ready(store)
    files = len(bench.segments)
    store.close()
    assert index_of(bench).exists()
    assert len(bench.segments) == files - 1
    assert sum(path.stat().st_size for path in bench.path.iterdir()) <= bench.capacity_bytes
    bench.open_ready()
    assert len(bench.segments) == files


def test_without_memory_none_is_saved_and_the_directory_is_released(
    saved: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    store = reopened(saved, used=True)
    monkeypatch.setattr(saved_index, "_hashes_of", refuse)
    assert store.close()
    reopened(saved, used=False)


def test_without_room_or_time_none_is_saved(bench: StoreBench) -> None:
    store = bench.open_ready()
    bench.put(store, KEYS[0])
    store.close(save_until_s=0.0)
    assert not index_of(bench).exists()
    store = bench.open_ready()
    bench.path.joinpath("foreign").write_bytes(bytes(bench.capacity_bytes))
    store.close()
    assert not index_of(bench).exists()


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disk_that_refuses_it_costs_the_file_only(
    saved: StoreBench, monkeypatch: pytest.MonkeyPatch, code: int, after: int
) -> None:
    store = reopened(saved, used=True)
    writes = iter(range(1000))

    write = saved.disk.pwritev

    def refuse(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/index") and next(writes) >= after:
            raise OSError(code, os.strerror(code))
        return write(fd, buffers, offset)

    monkeypatch.setattr(saved.disk, "pwritev", refuse)
    before = store.counters["io_errors_total"]
    assert store.close()
    assert store.counters["io_errors_total"] == before + 1
    reopened(saved, used=False)


def test_a_process_that_ends_while_it_saves_leaves_nothing_that_is_used(saved: StoreBench) -> None:
    """Its header is written last, so a file without one has been left."""
    data = bytearray(index_of(saved).read_bytes())
    data[:PAGE_BYTES] = bytes(PAGE_BYTES)
    index_of(saved).write_bytes(data)
    reopened(saved, used=False)


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_each_byte_of_it_counts(saved: StoreBench, every: int) -> None:
    data = index_of(saved).read_bytes()
    saved.close()
    size = len(data)
    places = [*range(0, 128, 5), 200, PAGE_BYTES - 1, PAGE_BYTES, *range(PAGE_BYTES + 3, size, size // 40), size - 1]
    for at in places[::every]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        index_of(saved).write_bytes(changed)
        reopened(saved, used=False).close()
    index_of(saved).write_bytes(data)
    reopened(saved, used=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:PAGE_BYTES],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: data + data,
    ],
    ids=["cut", "grown", "header only", "part of a header", "empty", "twice"],
)
def test_a_file_of_another_size_is_ignored(saved: StoreBench, change: Callable[[bytes], bytes]) -> None:
    index_of(saved).write_bytes(change(index_of(saved).read_bytes()))
    reopened(saved, used=False)


def with_field(data: bytes, at: int, form: str, value: int) -> bytes:
    """Return a file with another value in its header, and the right checksum."""
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    header_bytes = struct.unpack_from("<I", data, 28)[0]
    changed[8:24] = checksum(bytes(changed[24:header_bytes]))
    return bytes(changed)


@pytest.mark.one_quick(3)
@pytest.mark.parametrize(
    ("at", "form", "values"),
    [
        (24, "<I", [0, 2]),
        (28, "<I", [0, PAGE_BYTES - 1, 2 * PAGE_BYTES, 2**32 - 1]),
        (32, "<Q", [0]),
        (48, "<Q", [0, 2**64 - 1]),
        (56, "<Q", [0, 1, 2**64 - 1]),
        (64, "<Q", [0, 1, 2**64 - 1]),
        (72, "<I", [0, 1, 31, 33, 2**32 - 1]),
        (76, "<I", [0, 1, 2**32 - 1]),
        (80, "<I", [0, 1, 2**32 - 1]),
        (84, "<I", [77, 2**32 - 1]),
        (88, "<I", [0, 2**32 - 1]),
        (92, "<Q", [0, 2**64 - 1]),
    ],
)
def test_no_value_with_a_right_checksum_makes_an_opening_fail(
    saved: StoreBench, at: int, form: str, values: list[int]
) -> None:
    data = index_of(saved).read_bytes()
    for value in values:
        index_of(saved).write_bytes(with_field(data, at, form, value))
        reopened(saved, used=False).close()


def test_it_is_ignored_once_the_segments_have_changed(saved: StoreBench) -> None:
    data = index_of(saved).read_bytes()
    store = reopened(saved, used=True)
    more = make_keys(40, "more")
    saved.put(store, more)
    saved.crash()
    index_of(saved).write_bytes(data)  # as if its deletion had not reached the device
    store = saved.open()
    assert not was_used(store)
    assert all(store.contains([*all_keys(), *more]))
    store.close()
    index_of(saved).write_bytes(data)
    assert not was_used(saved.open())


def test_it_is_ignored_after_a_reset(saved: StoreBench) -> None:
    data = index_of(saved).read_bytes()
    store = saved.open()
    store.reset()
    saved.wait_until(lambda: store.has_saved_reset)
    store.close()
    index_of(saved).write_bytes(data)
    store = saved.open()
    assert not was_used(store)
    assert not any(store.contains(all_keys()))


def test_that_of_another_directory_is_ignored(saved: StoreBench, tmp_path: Path) -> None:
    data = index_of(saved).read_bytes()
    own, saved.path = saved.path, tmp_path / "other"
    store = saved.open_ready()
    for keys in KEYS[::-1]:
        saved.put(store, keys)
    store.close()
    index_of(saved).write_bytes(data)
    reopened(saved, used=False).close()
    saved.path = own


def test_one_without_a_segment_that_it_names_is_ignored(saved: StoreBench) -> None:
    saved.segments[0].unlink()
    store = saved.open()
    assert not was_used(store)
    assert 0 < sum(store.contains(all_keys())) < len(all_keys())
    assert not index_of(saved).exists()


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "directory"])
def test_what_may_be_another_s_is_not_read(saved: StoreBench, tmp_path: Path, kind: str) -> None:
    index, other = index_of(saved), tmp_path / "elsewhere"
    if kind == "directory":
        index.unlink()
        index.mkdir()
    else:
        index.rename(other)
        index.symlink_to(other) if kind == "symbolic link" else index.hardlink_to(other)
    store = saved.open()
    assert not was_used(store)
    assert all(store.contains(all_keys()))
    assert other.exists() is (kind != "directory")


def test_a_file_that_cannot_be_deleted_is_not_used(saved: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(path: str, **more: int) -> None:
        if path == "index":
            raise PermissionError(errno.EPERM, "immutable")
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refuse)
    store = saved.open()
    assert not was_used(store)
    assert all(store.contains(all_keys()))
    assert store.counters["io_errors_total"] == 1


def test_a_read_that_fails_costs_the_file_only(saved: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fail(fd: int, *rest: object) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/index (deleted)"):
            raise OSError(errno.EIO, "injected")
        return real(fd, *rest)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(os, "preadv", fail)
    reopened(saved, used=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 4)
@given(st.data())
def test_after_any_ends_it_has_the_blocks_that_were_there(bench: StoreBench, data: st.DataObject) -> None:
    """Stores, evictions, resets, crashes and clean ends: after a clean end exactly the blocks from before are found."""
    bench.path = bench.path.with_name(f"example-{next(_NUMBERS)}")
    keys = [*chain(*map(bench.batch, range(100)))]
    store = bench.open()
    for _ in range(data.draw(st.integers(1, 4), label="ends")):
        for number in data.draw(st.lists(st.integers(0, 99), max_size=12), label="stored"):
            bench.put(store, bench.batch(number))
        if data.draw(st.booleans(), label="reset"):
            store.reset()
            bench.put(store, bench.batch(data.draw(st.integers(0, 99))))
            bench.wait_until(lambda: store.has_saved_reset)  # noqa: B023 -- called here
        bench.wait_until(lambda: store.stats()["free_segments"] >= FREE_SEGMENTS)  # noqa: B023 -- called here
        before = {key for key, has in zip(keys, store.contains(keys), strict=True) if has}
        if crashes := data.draw(st.booleans(), label="crash"):
            copy = bench.path.with_name(f"crashed-{next(_NUMBERS)}")
            shutil.copytree(bench.path, copy)
        store.close()
        bench.path = copy if crashes else bench.path
        store = bench.open()
        assert was_used(store) is (not crashes and bool(before))
        there = {key for key, has in zip(keys, store.contains(keys), strict=True) if has}
        assert there == before
        assert bench.get(store, sorted(there)) == there, "a phantom"
    store.close()
