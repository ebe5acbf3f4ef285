"""Room on a full disk: old blocks give way. That needs neither the ledger nor a survey: to delete takes no room.

Full is a disk without a free byte or inode, and one whose quota is used up. A sweep finds the blocks that are really
the oldest, but it needs the ledger, and may list the directory for minutes. So here a sample of the blocks is listed,
and the oldest of the sample are deleted.
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
_SMALL_FILE_INODES: Final = 4  # blocks that give way to a small file: it is written anew, and then takes its old name
_SAMPLE: Final = 64  # files, or four times as many as must be deleted
_VAIN_PAUSE_S: Final = 10.0  # no block is deleted for so long after that did not help: others take the room


class Freed(NamedTuple):
    files: int
    size_bytes: int

    def __bool__(self) -> bool:
        return self.files > 0


def with_room(root: str, write: Callable[[], T]) -> T:
    """Run an action that writes a small file in the directory `root`. Where the disk is full, delete old blocks first.

    Raises `OSError`: the disk is still full, and there is no block to delete, or another reason.
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
    """End the `with` block where the disk is full, and go on after it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


_vain_until_s: Final[dict[str, float]] = {}  # by shared directory; any thread assigns


def free(root: str, wanted_bytes: int, wanted_files: int, attempt: int) -> Freed:
    """Delete old blocks until they have made room for so many bytes, and for so many files; return what was deleted.

    `attempt` says how often blocks have given way to the same write. After the last time none do for a while.
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
            with suppress(OSError):  # not empty; a directory takes an inode, too
                os.rmdir(os.path.dirname(path))
    return Freed(files, size_bytes)


_warned: Final[set[tuple[str, int | None]]] = set()  # shared directories, error numbers; any thread adds in one step


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
