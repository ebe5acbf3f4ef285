"""File systems that hang: calls of `os` below a directory wait at a gate, in all threads or in some."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

CALLS: Final = (
    *("open", "stat", "lstat", "fstat", "scandir", "listdir", "mkdir", "statvfs", "rename", "replace", "unlink"),
    *("pread", "pwrite", "preadv", "pwritev", "fsync", "fdatasync", "ftruncate", "utime", "fchmod"),
)
PROGRAM: Final = """
import os, sys
sys.path.insert(0, {tests!r})
from tests.support.hanging import hang_for_ever
hang_for_ever({path!r})
"""
"""A `sitecustomize.py`, with which every call below `path` hangs in a program."""


class HangingMount:
    """Calls below `path` wait, once `calls_before` further ones were made by threads whose names have `thread`."""

    def __init__(self, path: Path, thread: str = "") -> None:
        self.path = str(path)
        self.thread = thread
        self.calls_before = 1 << 62
        self.calls = 0
        self.hangs = 0
        self._gate = threading.Event()
        self._gate.set()

    def hang(self, calls_before: int = 0) -> None:
        """Hang from now on."""
        self._gate.clear()
        self.calls, self.calls_before = 0, calls_before

    def answer(self) -> None:
        """Let the calls that hang, and all later ones, return."""
        self.calls_before = 1 << 62
        self._gate.set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name in (*((os, name) for name in CALLS), (fcntl, "flock")):
            monkeypatch.setattr(module, name, self._waiting(module, name))

    def _waiting(self, module: ModuleType, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(module, name)

        def call(where: Any = ".", *arguments: Any, **named: Any) -> Any:  # Any: as the real one
            if self.thread in threading.current_thread().name and is_below(self.path, where, named.get("dir_fd")):
                self.calls += 1
                if self.calls > self.calls_before:
                    self.hangs += 1
                    self._gate.wait()
            return real(where, *arguments, **named)

        return call


@contextmanager
def impatient_mount(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingMount]:
    """Make a directory whose calls can hang, while tiers that are not required wait for it for moments only."""
    monkeypatch.setattr("tiered_kv_nvme.sizing._ROOM_S", 0.05)
    monkeypatch.setattr("tiered_kv.tiering.late.RETRY_S", 0.05)
    monkeypatch.setattr("tiered_kv.tiering.factory._OPTIONAL_S", 0.05)
    path.mkdir()
    mount = HangingMount(path)
    mount.install(monkeypatch)
    try:
        yield mount
    finally:
        mount.answer()


def is_below(path: str, where: Any, directory_fd: int | None) -> bool:  # Any: a path or a descriptor
    if isinstance(where, int) or (directory_fd is not None and not os.path.isabs(where)):
        try:
            where = os.readlink(f"/proc/self/fd/{where if isinstance(where, int) else directory_fd}")
        except OSError:
            return False
    return os.fsdecode(where).startswith(path)


def hang_for_ever(path: str) -> None:
    """Let every call below `path` hang, in this program."""
    mount = HangingMount(Path(path))
    mount.install(pytest.MonkeyPatch())
    mount.hang()
