"""A write that is said to have come short has left bytes out, and nothing else is counted.

That a process is killed by one is seen in `tests/trust/test_planted_defects.py`: nobody else finds a torn batch.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.short_writes import ShortWrites, kept_bytes
from tiered_kv_nvme.disk import Disk, Scratch, refusal_of_direct

PAGE = mmap.PAGESIZE


def written_to(path: Path, work: Callable[[int], None], flags: int = 0) -> bytes:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        work(fd)
    finally:
        os.close(fd)
    return path.read_bytes()


@pytest.mark.parametrize("size", [2, 24, PAGE, PAGE + 128, 4 * PAGE])
def test_half_of_a_buffered_write_is_written_to_the_byte(tmp_path: Path, size: int) -> None:
    short = ShortWrites(str(tmp_path), 0, ends=False)
    data = os.urandom(size)
    parts = [data[:1], data[1:]]
    came: list[int] = []
    found = written_to(tmp_path / "file", lambda fd: came.append(short.write("writev", fd, parts)))
    assert (came, found) == ([size // 2], data[: size // 2])
    assert short.was_hit
    assert short.count == 1


def test_a_direct_write_comes_short_by_whole_pages(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    refusal = refusal_of_direct(Disk(), fd)
    os.close(fd)
    if refusal:
        pytest.skip(refusal)
    short = ShortWrites(str(tmp_path), 0, ends=False)
    page = Scratch().take(5 * PAGE)
    page[:] = os.urandom(len(page))

    def write(fd: int) -> None:
        assert kept_bytes(fd, PAGE) == 0
        assert short.write("pwritev", fd, [page[:PAGE]], 0) == PAGE
        assert not short.was_hit, "a page was written whole"
        assert short.count == 0
        assert short.write("pwritev", fd, [page], 0) == 2 * PAGE

    assert written_to(tmp_path / "file", write, os.O_DIRECT) == bytes(page[: 2 * PAGE])
    assert short.was_hit
    assert short.count == 1


def test_writes_elsewhere_and_of_other_numbers_are_left_alone(tmp_path: Path) -> None:
    short = ShortWrites(str(tmp_path / "here"), 1, ends=False)
    assert written_to(tmp_path / "there", lambda fd: print(short.write("write", fd, b"1234"))) == b"1234"
    assert written_to(tmp_path / "here", lambda fd: print(short.write("write", fd, b"1234"))) == b"1234"
    assert not short.was_hit
    assert short.count == 1
