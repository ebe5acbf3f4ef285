"""A stack belongs to the process that opened it; a forked child disturbs nobody, and keeps no lock.

A descriptor that is duplicated stands for the one that a forked child has: both refer to one open file, whose lock is
not gone before both are closed (flock(2)). `tests/trust/test_races_of_processes.py` forks in earnest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.errors import ShutdownError
from tiered_kv.stack import open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.claimed import Identity
from tiered_kv_fs.files import locked
from tiered_kv_nvme.directory import Directory

BLOCK_BYTES = 4096


@contextmanager
def inherited(fd: int) -> Iterator[None]:
    """Have the open file referred to as by a child, too."""
    copy = os.dup(fd)
    try:
        yield
    finally:
        os.close(copy)


def test_in_another_process_a_stack_refuses_and_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"namespace": {"model": "m"}, "block": {"bytes": BLOCK_BYTES}, "primary": {"capacity": 8 * BLOCK_BYTES}}
    keys, blocks = make_keys(2), np.ones((2, BLOCK_BYTES), dtype=np.uint8)
    with open_stack(config) as stack:
        stack.put(keys, blocks)
        parent = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(ShutdownError, match=f"belongs to process {parent}; open another"):
                stack.get(keys, blocks)
            with pytest.raises(ShutdownError):
                stack.put(keys, blocks)
            with pytest.raises(ShutdownError):
                stack.flush()
            with pytest.raises(ShutdownError):
                stack.counters()
            stack.close()
        assert stack.get(keys, blocks) == 2


def test_an_nvme_directory_is_free_once_it_is_closed_though_a_child_lives(tmp_path: Path) -> None:
    identity = Identity(bytes(16), {}, BLOCK_BYTES)
    directory = Directory(str(tmp_path / "kv"), identity)
    with inherited(directory._lock_fd):
        directory.close()
        with closing(Directory(str(tmp_path / "kv"), identity)):
            pass


def test_a_lock_of_fs_is_given_back_though_a_child_was_forked_while_it_was_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with ExitStack() as child:
        with locked(str(path), 1.0):
            held = next(fd for fd in os.listdir("/proc/self/fd") if _names(fd, path))
            child.enter_context(inherited(int(held)))
        with locked(str(path), 0.0):
            pass


def _names(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except FileNotFoundError:
        return False
