"""Shared memory on huge pages on request: bytes stay, others may write meanwhile, and a kernel that refuses is told."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from tiered_kv.system import collapse as module
from tiered_kv.system.collapse import Collapse, CollapseThread, huge_bytes, refusal
from tiered_kv.system.huge_pages import map_aligned
from tiered_kv.system.limits import Limits

PAGE_BYTES = Limits().collapsed_size()
PAGES = 8
WAIT_S = 60.0

needs_kernel = pytest.mark.skipif(bool(refusal(PAGE_BYTES)), reason="this kernel makes no huge pages on request")


@dataclass
class File:
    """Shared memory of some huge pages, and a second mapping as another process has it."""

    fd: int
    size_bytes: int
    array: np.ndarray[tuple[int], np.dtype[np.uint8]]
    other: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def collapse(self) -> Collapse:
        return Collapse(self.array.ctypes.data, self.size_bytes, PAGE_BYTES)


def mapped(fd: int, size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    mapping, start = map_aligned(size_bytes, PAGE_BYTES or mmap.PAGESIZE, fd=fd)
    return np.frombuffer(mapping, np.uint8, size_bytes, start)


@pytest.fixture
def file() -> Iterator[File]:
    size_bytes = PAGES * (PAGE_BYTES or 2 << 20)
    fd = os.memfd_create("collapsed")
    try:
        os.ftruncate(fd, size_bytes)
        yield File(fd, size_bytes, mapped(fd, size_bytes), mapped(fd, size_bytes))
    finally:
        os.close(fd)


@needs_kernel
@pytest.mark.parametrize("is_allocated", [False, True])
def test_memory_is_on_huge_pages_afterwards_with_the_same_bytes(file: File, is_allocated: bool) -> None:
    expected = np.zeros(file.size_bytes, np.uint8)
    if is_allocated:
        expected[:] = np.random.default_rng(0).integers(0, 256, file.size_bytes, dtype=np.uint8)
        file.other[:] = expected
    collapse = file.collapse()
    assert collapse.count() == 0
    collapse.within(WAIT_S)
    assert collapse.count() == collapse.whole_bytes == file.size_bytes
    assert not collapse.advice()
    assert np.array_equal(file.other, expected), "another process sees the same bytes"
    assert huge_bytes(file.other.ctypes.data, file.size_bytes) == file.size_bytes, "on the same pages"


@needs_kernel
def test_both_ways_to_count_find_the_same_huge_pages(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    file.array[:] = 1
    address = file.array.ctypes.data
    for page in (1, 2, 5):
        assert Collapse(address, file.size_bytes, PAGE_BYTES).part(page * PAGE_BYTES, PAGE_BYTES)

    ways = [module._in_smaps]
    with suppress(OSError):  # before Linux 6.7
        module._scanned(address, 1)
        ways.append(module._scanned)
    assert [count(address, file.size_bytes) for count in (*ways, huge_bytes)] == [3 * PAGE_BYTES] * (len(ways) + 1)
    monkeypatch.setattr(module, "_REGIONS_MAX", 1)
    for scanned_bytes in (PAGE_BYTES, 1 << 30):
        monkeypatch.setattr(module, "_SCANNED_BYTES", scanned_bytes)
        for count in ways[1:]:
            assert count(address, file.size_bytes) == 3 * PAGE_BYTES, "by several calls"
            assert count(address + 2 * PAGE_BYTES, 3 * PAGE_BYTES) == PAGE_BYTES
            assert count(address + 100, file.size_bytes - 100) == 3 * PAGE_BYTES


def test_a_kernel_that_does_not_move_on_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, asked = np.zeros(4 * mmap.PAGESIZE, np.uint8), []

    def stand_still(file: object, request: int, argument: bytearray) -> int:
        asked.append(bytes(argument))
        return 0

    monkeypatch.setattr("fcntl.ioctl", stand_still)
    monkeypatch.setattr(module, "_in_smaps", lambda address, size_bytes: 7)
    assert huge_bytes(memory.ctypes.data, memory.size) == 7, "counted in the other way"
    assert len(asked) == 1


@needs_kernel
def test_only_whole_pages_count(file: File) -> None:
    """The kernel answers 0 for a range without a whole huge page."""
    shifted = Collapse(file.array.ctypes.data + mmap.PAGESIZE, 2 * PAGE_BYTES - 2 * mmap.PAGESIZE, PAGE_BYTES)
    assert shifted.is_over
    assert not shifted.part(0, PAGE_BYTES)
    assert Collapse(file.array.ctypes.data, PAGE_BYTES - 1, PAGE_BYTES).is_over
    middle = Collapse(file.array.ctypes.data + mmap.PAGESIZE, 3 * PAGE_BYTES, PAGE_BYTES)
    assert middle.whole_bytes == 2 * PAGE_BYTES
    middle.within(WAIT_S)
    assert middle.count() <= middle.whole_bytes
    assert not file.array.any()


@needs_kernel
def test_others_write_meanwhile_and_nothing_is_lost(file: File) -> None:
    rng, has_ended = np.random.default_rng(1), threading.Event()
    expected = np.zeros(file.size_bytes, np.uint8)
    thread = CollapseThread(file.collapse(), has_ended.set)
    while not has_ended.is_set():
        at = int(rng.integers(0, file.size_bytes - 8192))
        expected[at : at + 8192] = file.other[at : at + 8192] = int(rng.integers(1, 256))
    assert thread.wait(WAIT_S)
    assert np.array_equal(file.array, expected)
    assert np.array_equal(file.other, expected)
    assert huge_bytes(file.array.ctypes.data, file.size_bytes) == file.size_bytes


class Kernel:
    """Answers calls for huge pages with errors, in turn; 0 and all later ones go to the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: list[int]) -> None:
        self.calls = 0
        self._errors, self._advise = errors, module._advise
        monkeypatch.setattr(module, "_advise", self._answer)
        monkeypatch.setattr(module, "_PAUSE_S", 0.0)

    def _answer(self, address: int, length: int, advice: int) -> None:
        if advice == module._MADV_COLLAPSE:
            self.calls += 1
            if self._errors and (number := self._errors.pop(0)):
                raise OSError(number, os.strerror(number))
        self._advise(address, length, advice)


@needs_kernel
def test_pages_that_were_in_use_are_tried_again(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, [errno.EAGAIN, 0, errno.EAGAIN])
    collapse, has_ended = file.collapse(), threading.Event()
    assert CollapseThread(collapse, has_ended.set).wait(WAIT_S)
    assert has_ended.is_set()
    parts = file.size_bytes // collapse.part_bytes
    assert kernel.calls == parts + 2
    assert collapse.count() == file.size_bytes


@needs_kernel
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EINVAL, "Linux 6.1"),
        (errno.ENOMEM, "sysctl vm.compact_memory=1"),
        (errno.EBUSY, "a limit of memory"),
        (errno.EAGAIN, "in use"),
    ],
)
def test_a_kernel_that_refuses_is_not_asked_for_ever(
    file: File, number: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAILURES_MAX", 3)
    kernel = Kernel(monkeypatch, [number] * 1000)
    collapse = file.collapse()
    assert CollapseThread(collapse, lambda: None).wait(WAIT_S)
    assert collapse.is_over
    assert kernel.calls == (1 if number == errno.EINVAL else 3)
    assert advice in collapse.advice()
    assert collapse.count() == 0
    file.array[:] = 7
    assert file.other.all(), "the memory works as before"


@needs_kernel
def test_a_thread_that_is_closed_leaves_at_once_and_says_nothing(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(monkeypatch, [errno.EAGAIN] * 1000)
    monkeypatch.setattr(module, "_PAUSE_S", WAIT_S)
    has_ended = threading.Event()
    thread = CollapseThread(file.collapse(), has_ended.set)
    thread.close()
    assert thread.wait(0)
    assert not has_ended.is_set()


def test_a_machine_without_huge_pages_is_told_what_would_give_them() -> None:
    assert "shmem_enabled" in refusal(0)
    assert "reserve" in refusal(0)
