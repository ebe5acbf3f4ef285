"""A look at all that lies in a shared directory: how much it is, what may go first, and what crashes left."""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from tiered_kv_fs.layout import BLOCK, EPOCH, NAMESPACE, SHARD, TEMPORARY, TEMPORARY_BLOCK
from tiered_kv_fs.posix import occupied_bytes, reason_of

CANDIDATES_MAX: Final = 65_536
"""Files that one survey remembers as the next to go; at most about 20 MB."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A block's file that may be removed to make room; the smallest one goes first.

    Args:
        used_ns: When it was last used, by the file server's clock; 0 if nobody can ask for it any more.
        path: Where it is.
        size_bytes: What it occupies.
        mtime_ns: By which it is seen whether it was used since.
    """

    used_ns: int
    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that is being written, or was when its writer ended.

    Args:
        path: Where it is.
        owner: Who writes it; "" for the small files, which are written while the ledger is locked.
        size_bytes: What it occupies.
        mtime_ns: When it was last written to, by the file server's clock.
    """

    path: str
    owner: str
    size_bytes: int
    mtime_ns: int


@dataclass(slots=True)
class Survey:
    """What was found.

    Args:
        used_bytes: What all of it occupies, directories and foreign files included.
        block_files: How many blocks there are, of all namespaces and epochs.
        foreign_files: How many entries are not this tier's.
        candidates: The files that were used longest ago, oldest first.
        temporaries: The files that are being written, or were left by who wrote them.
        used_by: What of `used_bytes` lies in each namespace's directory, that one included.
        own_candidates: As `candidates`, of the one namespace that was asked for.
    """

    used_bytes: int = 0
    block_files: int = 0
    foreign_files: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    temporaries: list[Leftover] = field(default_factory=list)
    used_by: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    own_candidates: list[Candidate] = field(default_factory=list)


class _Oldest:
    """The files that were used longest ago, of those that are shown to it."""

    def __init__(self, files_max: int) -> None:
        self._files_max = files_max
        self._newest_first: list[tuple[int, str, int, int]] = []  # a heap, with times negated

    def show(self, used_ns: int, path: str, size_bytes: int, mtime_ns: int) -> None:
        entry = (-used_ns, path, size_bytes, mtime_ns)
        if len(self._newest_first) < self._files_max:
            heapq.heappush(self._newest_first, entry)
        elif entry > self._newest_first[0]:
            heapq.heapreplace(self._newest_first, entry)

    def candidates(self) -> list[Candidate]:
        """Return them, oldest first."""
        return sorted(
            Candidate(-negated, path, size_bytes, mtime_ns)
            for negated, path, size_bytes, mtime_ns in self._newest_first
        )


def survey(
    root: str,
    live_epochs: Collection[tuple[str, str]],
    candidates_max: int = CANDIDATES_MAX,
    *,
    own_namespace: str = "",
) -> Survey:
    """Count a directory. What others write or remove meanwhile may be counted or not.

    Args:
        root: The directory.
        live_epochs: Namespace and epoch of each that may still be asked for.
        candidates_max: How many of the oldest files to remember.
        own_namespace: Remember the oldest files of this namespace besides.
    """
    found = Survey()
    oldest, own_oldest = _Oldest(candidates_max), _Oldest(candidates_max)
    for path, status, kind, detail in _walk(root):
        size_bytes = occupied_bytes(status)
        found.used_bytes += size_bytes
        found.used_by[namespace_of(path, root)] += size_bytes
        if kind == "foreign":
            found.foreign_files += 1
        elif kind == "temporary":
            found.temporaries.append(Leftover(path, detail, size_bytes, status.st_mtime_ns))
        elif kind == "block":
            found.block_files += 1
            namespace, _, epoch = detail.partition("/")
            used_ns = status.st_mtime_ns if (namespace, epoch) in live_epochs else 0
            oldest.show(used_ns, path, size_bytes, status.st_mtime_ns)
            if namespace == own_namespace:
                own_oldest.show(used_ns, path, size_bytes, status.st_mtime_ns)
    found.candidates, found.own_candidates = oldest.candidates(), own_oldest.candidates()
    return found


def namespace_of(path: str, root: str) -> str:
    """Return the namespace in whose directory `path` lies, within `root`; the empty text for none."""
    top = path[len(root) + 1 :].partition("/")[0]
    return top if NAMESPACE.fullmatch(top) else ""


_Entry = tuple[str, os.stat_result, str, str]
"""Path, status, kind ("ours", "foreign", "temporary" or "block"), and the owner or the namespace and epoch."""


def _walk(root: str) -> Iterator[_Entry]:
    """Yield the directory and everything in it; symbolic links are not followed, what vanishes is left out."""
    yield root, os.stat(root), "ours", ""
    for name, path, status, is_directory in _entries(root):
        if is_directory and NAMESPACE.fullmatch(name):
            yield path, status, "ours", ""
            yield from _walk_namespace(path, name, status)
        elif is_directory and name == "owners":
            yield path, status, "ours", ""
            for _, inner, inner_status, _ in _entries(path):
                yield inner, inner_status, "ours", ""
        else:
            yield from _small_or_foreign(name, path, status, is_directory, _ROOT_FILES)


def _walk_namespace(namespace_path: str, namespace: str, namespace_status: os.stat_result) -> Iterator[_Entry]:
    for name, path, status, is_directory in _entries(namespace_path, namespace_status):
        if not (is_directory and EPOCH.fullmatch(name)):
            yield from _small_or_foreign(name, path, status, is_directory, _NAMESPACE_FILES)
            continue
        yield path, status, "ours", ""
        for shard, shard_path, shard_status, shard_is_directory in _entries(path, status):
            if not (shard_is_directory and SHARD.fullmatch(shard)):
                yield from _foreign(shard_path, shard_status, shard_is_directory)
                continue
            yield shard_path, shard_status, "ours", ""
            yield from _walk_shard(shard_path, f"{namespace}/{name}", shard_status)


def _walk_shard(shard_path: str, epoch: str, shard_status: os.stat_result) -> Iterator[_Entry]:
    for name, path, status, is_directory in _entries(shard_path, shard_status):
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and BLOCK.fullmatch(name):
            yield path, status, "block", epoch
        elif is_file and (match := TEMPORARY_BLOCK.fullmatch(name)):
            yield path, status, "temporary", match["owner"]
        else:
            yield from _foreign(path, status, is_directory)


_NOT_FOR_US: Final = frozenset({"permission", "not_a_file"})
_ROOT_FILES: Final = re.compile(r"tiered-kv-fs\.json|ledger|sweep")
_NAMESPACE_FILES: Final = re.compile(r"namespace\.json|epoch")


def _small_or_foreign(
    name: str, path: str, status: os.stat_result, is_directory: bool, ours: re.Pattern[str]
) -> Iterator[_Entry]:
    if ours.fullmatch(name):
        yield path, status, "ours", ""
    elif not is_directory and TEMPORARY.fullmatch(name):
        yield path, status, "temporary", ""
    else:
        yield from _foreign(path, status, is_directory)


def _foreign(path: str, status: os.stat_result, is_directory: bool) -> Iterator[_Entry]:
    """Yield an entry that is not ours, and what can be seen in it: `lost+found`, for one, is root's alone."""
    yield path, status, "foreign", ""
    waiting = [path] if is_directory else []
    while waiting:
        try:
            for _, inner, inner_status, inner_is_directory in _entries(waiting.pop()):
                yield inner, inner_status, "foreign", ""
                if inner_is_directory:
                    waiting.append(inner)
        except OSError as error:
            if reason_of(error) not in _NOT_FOR_US:
                raise


def _entries(path: str, status: os.stat_result | None = None) -> Iterator[tuple[str, str, os.stat_result, bool]]:
    """Yield what is in a directory; nothing where somebody else does not let us, as its `status` tells."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    yield entry.name, entry.path, entry.stat(follow_symlinks=False), entry.is_dir(follow_symlinks=False)
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return
    except PermissionError:
        if status is None or status.st_uid == os.geteuid():  # it may hold blocks of ours, which count
            raise
