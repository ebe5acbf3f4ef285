"""Room on a full disk: deletes old blocks, without the ledger and without a survey.

Writers of small files call `with_room`. A store's worker calls `free` (`DirectorySweeper.give_way`). Any thread
that may wait may call. `free` deletes only blocks.

A disk is full if it has no free byte or inode, or if a quota is used up. A sweep finds the oldest blocks of all, but
needs the ledger, and may list the directory for minutes. So this lists a sample, and deletes its oldest blocks.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, TypeVar

from tiered_kv_fs.allocation import occupied_bytes
from tiered_kv_fs.names import BLOCK, EPOCH, NAMESPACE, SHARD

T = TypeVar("T")
_log = logging.getLogger("tiered_kv.fs")

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
YIELDS_MAX: Final = 3  # how often blocks give way to one write
_SMALL_FILE_BYTES: Final = 64 << 10
_SMALL_FILE_INODES: Final = 4  # blocks to delete for a small file, which is written under a new name and then renamed
_SAMPLE: Final = 64
"""About how many files are listed; four times the number of files to delete, if that is more."""
_VAIN_PAUSE_S: Final = 10.0  # the pause after deletions did not help: others take the space


class Freed(NamedTuple):
    """The number of deleted blocks, and their space on the disk."""

    files: int
    size_bytes: int

    def __bool__(self) -> bool:
        return self.files > 0


def with_room(root: str, write: Callable[[], T]) -> T:
    """Run an action that writes a small file in the directory `root`. Where the disk is full, delete old blocks first.

    Raises `OSError`: the action failed for another reason, or the disk is still full, or no block could be deleted.
    """
    for attempt in range(YIELDS_MAX + 1):
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL or not free(root, _SMALL_FILE_BYTES, _SMALL_FILE_INODES << attempt, attempt):
                raise
    raise AssertionError("the last attempt returns, or raises")


@contextmanager
def without_room() -> Iterator[None]:
    """Suppress the error of a full disk: the `with` block ends where it occurs."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


_vain_until_s: Final[dict[str, float]] = {}
"""Until when no attempt to make room is worth it, by shared directory. Any thread assigns."""


def free(root: str, wanted_bytes: int, wanted_files: int, attempt: int) -> Freed:
    """Delete old blocks until their bytes and their number reach the wanted ones; return the deleted bytes and number.

    `attempt` is the number of earlier calls for the same write. From `YIELDS_MAX` on, nothing is deleted, and a pause
    begins.
    """
    now_s = time.monotonic()
    if attempt >= YIELDS_MAX:
        _vain_until_s[root] = now_s + _VAIN_PAUSE_S
    if now_s < _vain_until_s.get(root, 0.0):
        return Freed(0, 0)
    files = size_bytes = 0
    for path, status in sorted(_sample(root, max(_SAMPLE, 4 * wanted_files)), key=lambda found: found[1].st_mtime_ns):
        if files >= wanted_files and size_bytes >= wanted_bytes:
            break
        if removed(path, root):
            files += 1
            size_bytes += occupied_bytes(status)
            with suppress(OSError):  # the directory is not empty; an empty directory takes an inode
                os.rmdir(os.path.dirname(path))
    return Freed(files, size_bytes)


_warned: Final[set[tuple[str, int | None]]] = set()  # logged: directory, error number; any thread adds


def removed(path: str, root: str) -> bool:
    """Delete a file of the shared directory `root`; return whether this call did.

    A file that cannot be deleted is passed over, with one warning: it may be immutable, or in another user's directory.
    """
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if (root, error.errno) not in _warned:
            _warned.add((root, error.errno))
            text = "%s cannot be deleted: %s; it stays, and counts in the capacity; further such files are not logged"
            _log.warning(text, path, error.strerror or error)
        return False
    return True


def _sample(root: str, count: int) -> list[tuple[str, os.stat_result]]:
    """Return about `count` blocks of random shards, of all epochs in turn; all if there are fewer."""
    epochs = [epoch.path for each in _entries(root, NAMESPACE) for epoch in _entries(each.path, EPOCH)]
    random.shuffle(epochs)
    waiting: deque[str | list[str]] = deque(epochs)  # epochs, and shards that were not listed yet
    found: list[tuple[str, os.stat_result]] = []
    while waiting and len(found) < count:
        shards = waiting.popleft()
        if isinstance(shards, str):
            shards = [shard.path for shard in _entries(shards, SHARD)]
            random.shuffle(shards)
        if shards:
            for entry in _entries(shards.pop(), BLOCK, are_files=True)[: max(16, count // 4)]:
                with suppress(OSError):
                    found.append((entry.path, entry.stat(follow_symlinks=False)))
            waiting.append(shards)
    return found


def _entries(path: str, pattern: re.Pattern[str], *, are_files: bool = False) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            named = (entry for entry in entries if pattern.fullmatch(entry.name))
            if are_files:
                return [entry for entry in named if entry.is_file(follow_symlinks=False)]
            return [entry for entry in named if entry.is_dir(follow_symlinks=False)]
    except OSError:  # deleted, or another user's
        return []
