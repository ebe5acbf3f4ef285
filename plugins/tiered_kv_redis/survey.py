"""A survey of a namespace's blocks: how much they are, and which were used longest ago; and evicting those.

Names are found by SCAN on every master, a bounded number in one step. What a block takes is asked with MEMORY USAGE and
when it was used with OBJECT IDLETIME, neither of which counts as a use, as STRLEN would. A server that evicts by
frequency (LFU) knows no times; then blocks go in the order in which SCAN tells them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tiered_kv_redis.exchange import converse
from tiered_kv_redis.keyspace import KEY_PREFIX
from tiered_kv_redis.listing import Listing, Value
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import MOVED, PERMISSION
from tiered_kv_redis.replies import Refusal, command

NAMES_AT_ONCE: Final = 256
"""Asked of one SCAN; the server may answer with some more."""
CANDIDATES_MAX: Final = 65_536
"""Blocks that one survey remembers as the next to go; at most about 20 MB."""
EVICTED_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A block that may be removed to make room; the largest one goes first.

    Args:
        idle_s: How long it had not been used when it was found.
        name: What it is called.
        size_bytes: What it takes.
        node: The server that has it.
    """

    idle_s: int
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
) -> Found | None:
    """Count the blocks of a namespace, of all generations.

    A block that is stored or removed meanwhile may be counted or not; one that was there all the time is counted,
    perhaps twice.

    Args:
        nodes: All masters.
        namespace_digest: 16 bytes.
        record_bytes_max: How long a record can be.
        step_deadline: Returns until when the next step may take, in seconds of `time.monotonic()`.
        may_go_on: Asked before each step.

    Returns:
        What was found; None if it was not to go on.

    Raises:
        NodeDownError: A server is not reached, or refuses.
    """
    found = Found()
    kept: list[Candidate] = []  # a heap of the longest unused, the least idle first
    pattern = KEY_PREFIX + namespace_digest.hex().encode() + b":" + b"[0-9a-f]" * 16 + b":*"
    for node in nodes:
        for names in _pages(node, pattern, step_deadline, may_go_on):
            if names is None:
                return None
            for candidate in _looked_at(node, names, record_bytes_max, step_deadline()):
                found.used_bytes += candidate.size_bytes
                found.blocks += 1
                if len(kept) < CANDIDATES_MAX:
                    heapq.heappush(kept, candidate)
                else:
                    heapq.heappushpop(kept, candidate)
    found.candidates = deque(sorted(kept, reverse=True))
    return found


def evict(candidates: deque[Candidate], wanted_bytes: int, deadline: float) -> tuple[int, int]:
    """Remove some of the first candidates that were not used since they were found.

    Returns:
        How many were removed, and what they took.

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
        idle = _ask(node, [command(b"OBJECT", b"IDLETIME", each.name) for each in those], deadline)
        unused = [each for each, idle_s in zip(those, idle, strict=True) if not _was_used(each, idle_s)]
        gone = _ask(node, [command(b"UNLINK", each.name) for each in unused], deadline) if unused else []
        for each, count in zip(unused, gone, strict=True):
            if count == 1:
                removed += 1
                removed_bytes += each.size_bytes
    return removed, removed_bytes


def _was_used(candidate: Candidate, idle_s: Value) -> bool:
    return isinstance(idle_s, int) and idle_s < candidate.idle_s


def _pages(
    node: Node, pattern: bytes, step_deadline: Callable[[], float], may_go_on: Callable[[], bool]
) -> Iterator[list[bytes] | None]:
    """Yield the names on one server, some at a time; None, and no more, if it is not to go on."""
    cursor = b"0"
    while True:
        if not may_go_on():
            yield None
            return
        page = [b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % NAMES_AT_ONCE]
        (reply,) = _ask(node, [command(*page)], step_deadline())
        if isinstance(reply, Refusal):
            raise NodeDownError(reply.reason)
        if not (isinstance(reply, list) and len(reply) == 2 and isinstance(reply[0], bytes)):
            raise NodeDownError("protocol")
        cursor, names = reply[0], reply[1]
        yield [name for name in names if isinstance(name, bytes)] if isinstance(names, list) else []
        if cursor == b"0":
            return


def _looked_at(node: Node, names: Sequence[bytes], record_bytes_max: int, deadline: float) -> list[Candidate]:
    """Return what is known of some blocks; those that are gone are left out."""
    if not names:
        return []
    sizes = [command(b"MEMORY", b"USAGE", name, b"SAMPLES", b"0") for name in names]
    replies = _ask(node, [*sizes, *(command(b"OBJECT", b"IDLETIME", name) for name in names)], deadline)
    candidates = []
    for name, memory_bytes, idle in zip(names, replies[: len(names)], replies[len(names) :], strict=True):
        if memory_bytes is None:
            continue
        # The server rounds its memory up, by a quarter at most: a record never takes more than it can be long.
        size_bytes = record_bytes_max
        if isinstance(memory_bytes, int) and not record_bytes_max < memory_bytes <= 2 * record_bytes_max:
            size_bytes = memory_bytes
        candidates.append(Candidate(idle if isinstance(idle, int) else 0, name, size_bytes, node))
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
