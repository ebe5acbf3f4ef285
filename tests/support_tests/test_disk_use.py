"""What a directory occupies while entries come and go."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import disk_use
from tests.support.disk_use import occupied_beyond, occupied_bytes

KIB = 1 << 10
FILES = 8
FILE_BYTES = 16 * KIB


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "looked-at"
    path.mkdir()
    for number in range(FILES):
        write(path / str(number))
    return path


def write(path: Path) -> None:
    path.write_bytes(os.urandom(FILE_BYTES))


def between_looks(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Have something happen after the first look at the directory."""
    look, has_happened = disk_use._entries_in, threading.Event()

    def looked(directory: Path) -> dict[int, disk_use._Entry]:
        entries = look(directory)
        if not has_happened.is_set():
            has_happened.set()
            happens()
        return entries

    monkeypatch.setattr(disk_use, "_entries_in", looked)


def test_what_is_within_the_limit_is_none(directory: Path) -> None:
    assert occupied_bytes(directory) >= FILES * FILE_BYTES
    assert occupied_beyond(directory, occupied_bytes(directory)) == 0
    assert occupied_beyond(directory / "nothing", 0) == 0


def test_what_stays_is_beyond(directory: Path) -> None:
    used_bytes = occupied_bytes(directory)
    assert occupied_beyond(directory, used_bytes - 1) == used_bytes


def test_what_is_removed_for_others_is_not_counted_with_them(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = occupied_bytes(directory)
    changed_ns = (directory / "0").stat().st_mtime_ns + 10**9

    def replace() -> None:
        for number in range(FILES // 2):
            (directory / str(number)).unlink()
            new = directory / f"new-{number}"
            write(new)
            os.utime(new, ns=(changed_ns, changed_ns))  # whatever the clock's grain; they may get the inodes, too

    between_looks(monkeypatch, replace)
    assert occupied_beyond(directory, used_bytes - FILE_BYTES) == 0


def test_what_is_renamed_or_written_to_stays(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = occupied_bytes(directory)

    def change() -> None:
        for number in range(FILES // 2):
            (directory / str(number)).rename(directory / f"renamed-{number}")
            write(directory / str(number + FILES // 2))

    between_looks(monkeypatch, change)
    assert occupied_beyond(directory, used_bytes - 1) == used_bytes
