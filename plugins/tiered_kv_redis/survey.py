"""A survey of a namespace's blocks: how much they are, and which were used longest ago; and evicting those.

Names are found by SCAN on every master, a bounded number in one step. What a block takes is asked with MEMORY USAGE and
when it was used with OBJECT IDLETIME, neither of which counts as a use, as STRLEN would. A server that evicts by
frequency (LFU) knows no times; then blocks go in the order in which SCAN tells them.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tiered_kv_redis.exchange import converse
from tiered_kv_redis.keyspace import KEY_PREFIX
from tiered_kv_redis.listing import Listing, Value, scan
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import MOVED, PERMISSION
from tiered_kv_redis.replies import command

NAMES_AT_ONCE: Final = 256
"""Asked of one SCAN; the server may answer with some more."""
CANDIDATES_MIN: Final = 65_536
CANDIDATES_SHARE: Final = 1 / 8
CANDIDATES_MAX: Final = 262_144
"""Blocks that one survey remembers as the next to go: this share of all, the least number at least, the largest at
most. What is remembered has to last until the next survey, which takes the longer the more blocks there are. One takes
some 280 bytes where names have 90 (by tracemalloc): 18 MB to 73 MB, and up to 73 MB more during the next survey."""
_CANDIDATE_BYTES: Final = 190
"""What one takes besides its name."""
CANDIDATES_BYTES_MAX: Final = CANDIDATES_MAX * (_CANDIDATE_BYTES + 90)
"""What they take together, at most: with longer names there are fewer. A name may have up to a megabyte, and anybody
who can write to the server can have put it there."""
EVICTED_AT_ONCE: Final = 64
_IDLE_RESOLUTION_S: Final = 1.0
"""Of OBJECT IDLETIME: two answers about one use may differ by so much."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A block that may be removed to make room; the largest one goes first.

    Args:
        idle_s: How long it had not been used at second 0 of the clock, so that all are told by one time; mostly
            negative. The server tells whole seconds.
        name: What it is called.
        size_bytes: What it takes.
        node: The server that has it.
    """

    idle_s: float
    name: bytes
    size_bytes: int
    node: Node = field(compare=False)


@dataclass(slots=True)
class Found:
    """What there is.

    Args:
        used_bytes: Of all blocks of the namespace, at least.
        blocks: How many they are.
        candidates: Those that were used longest ago, the first to go first.
    """

    used_bytes: int = 0
    blocks: int = 0
    candidates: deque[Candidate] = field(default_factory=deque)


def survey(
    nodes: Sequence[Node],
    namespace_digest: bytes,
    record_bytes_max: int,
    step_deadline: Callable[[], float],
    may_go_on: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> Found | None:
    """Count the blocks of a namespace, of all epochs.

    A block that is stored or removed meanwhile may be counted or not; one that was there all the time is counted,
    perhaps twice.

    Args:
        nodes: All masters.
        namespace_digest: 16 bytes.
        record_bytes_max: How long a record can be.
        step_deadline: Returns until when the next step may take, in seconds of `time.monotonic()`.
        may_go_on: Asked before each step.
        clock: Returns seconds that only grow.

    Returns:
        What was found; None if it was not to go on.

    Raises:
        NodeDownError: A server is not reached, or refuses.
    """
    found = Found()
    kept: list[Candidate] = []  # a heap of the longest unused, the least idle first
    kept_bytes = 0
    pattern = KEY_PREFIX + namespace_digest.hex().encode() + b":" + b"[0-9a-f]" * 16 + b":*"
    for node in nodes:
        for names in _pages(node, pattern, step_deadline, may_go_on):
            if names is None:
                return None
            for candidate in _looked_at(node, names, record_bytes_max, step_deadline(), clock):
                found.used_bytes += candidate.size_bytes
                found.blocks += 1
                heapq.heappush(kept, candidate)
                kept_bytes += _memory_bytes(candidate)
                while len(kept) > CANDIDATES_MAX or kept_bytes > CANDIDATES_BYTES_MAX:
                    kept_bytes -= _memory_bytes(heapq.heappop(kept))
    kept.sort(reverse=True)
    del kept[max(CANDIDATES_MIN, int(found.blocks * CANDIDATES_SHARE)) :]
    found.candidates = deque(kept)
    return found


def evict(
    candidates: deque[Candidate], wanted_bytes: int, deadline: float, clock: Callable[[], float] = time.monotonic
) -> tuple[int, int]:
    """Remove some of the first candidates that were not used since they were found, to a second or two.

    Another process may have removed a candidate, whose name was stored again since. So a block is taken for no more
    than the length of what is removed: that is what its store was charged.

    Args:
        candidates: The first to go first; those that were looked at are taken out.
        wanted_bytes: How much to remove, roughly.
        deadline: Seconds of `time.monotonic()`.
        clock: As `survey` had it.

    Returns:
        How many were removed, and what the account has for them at least.

    Raises:
        NodeDownError: A server is not reached, or refuses.
    """
    chosen: dict[Node, list[Candidate]] = {}
    size_bytes = 0
    for _ in range(min(EVICTED_AT_ONCE, len(candidates))):
        if size_bytes >= wanted_bytes:
            break
        candidate = candidates.popleft()
        size_bytes += candidate.size_bytes
        chosen.setdefault(candidate.node, []).append(candidate)
    removed = removed_bytes = 0
    for node, those in chosen.items():
        now_s = clock()  # before asking: an answer that takes long must not make all of them look used
        idle = _ask(node, [command(b"OBJECT", b"IDLETIME", each.name) for each in those], deadline)
        unused = [each for each, idle_s in zip(those, idle, strict=True) if not _was_used(each, idle_s, now_s)]
        if not unused:
            continue
        calls = [command(name, each.name) for each in unused for name in (b"STRLEN", b"UNLINK")]
        replies = _ask(node, calls, deadline)
        for each, length, count in zip(unused, replies[::2], replies[1::2], strict=True):
            if count == 1:
                removed += 1
                removed_bytes += min(each.size_bytes, length) if isinstance(length, int) else 0
    return removed, removed_bytes


def _memory_bytes(candidate: Candidate) -> int:
    return _CANDIDATE_BYTES + len(candidate.name)


def _was_used(candidate: Candidate, idle_s: Value, now_s: float) -> bool:
    return isinstance(idle_s, int) and idle_s - now_s < candidate.idle_s - _IDLE_RESOLUTION_S


def _pages(
    node: Node, pattern: bytes, step_deadline: Callable[[], float], may_go_on: Callable[[], bool]
) -> Iterator[list[bytes] | None]:
    """Yield the names on one server, some at a time; None, and no more, if it is not to go on."""
    cursor = b"0"
    while True:
        if not may_go_on():
            yield None
            return
        page = scan(node, cursor, pattern, NAMES_AT_ONCE, step_deadline())
        yield page.names
        cursor = page.cursor
        if cursor == b"0":
            return


def _looked_at(
    node: Node, names: Sequence[bytes], record_bytes_max: int, deadline: float, clock: Callable[[], float]
) -> list[Candidate]:
    """Return what is known of some blocks; those that are gone are left out."""
    if not names:
        return []
    sizes = [command(b"MEMORY", b"USAGE", name, b"SAMPLES", b"0") for name in names]
    replies = _ask(node, [*sizes, *(command(b"OBJECT", b"IDLETIME", name) for name in names)], deadline)
    now_s = clock()
    candidates = []
    for name, memory_bytes, idle in zip(names, replies[: len(names)], replies[len(names) :], strict=True):
        if memory_bytes is None:
            continue
        # The server rounds its memory up, by a quarter at most: a record never takes more than it can be long.
        size_bytes = record_bytes_max
        if isinstance(memory_bytes, int) and not record_bytes_max < memory_bytes <= 2 * record_bytes_max:
            size_bytes = memory_bytes
        candidates.append(Candidate((idle if isinstance(idle, int) else 0) - now_s, name, size_bytes, node))
    return candidates


def _ask(node: Node, commands: Sequence[bytes], deadline: float) -> list[Value]:
    """Return the replies to some commands; a refusal of all that this user may do is an error."""
    listing = Listing(node, commands)
    converse([listing], deadline)
    if listing.trouble:
        raise NodeDownError(listing.trouble)
    if PERMISSION in listing.failures.values():
        raise NodeDownError(PERMISSION)
    if MOVED in listing.failures.values() and len(commands) == len(listing.failures):
        raise NodeDownError(MOVED)
    return listing.replies
