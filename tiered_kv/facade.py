"""`put` and `get` over a tiering manager, for programs other than engines.

An engine drives the manager from its scheduler's thread. The facade does that for programs with several threads. One
lock serializes their calls of the manager. It is never held while blocks are copied or waited for.

The main thread's calls run on a thread of their own, so that a signal handler that raises leaves the manager whole.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from tiered_kv.base import BlockIDsLoadStoreSpec, OffloadKey, ReqContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ShutdownError
from tiered_kv.hints import HINTS_KEY, Hints
from tiered_kv.interrupts import CallThread
from tiered_kv.tiering.manager import TieringOffloadingManager

Blocks = np.ndarray[Any, np.dtype[np.uint8]]
HintsAsGiven = Mapping[str, object] | None
T = TypeVar("T")

_KEY_BYTES_MIN = 4
_PAUSE_MIN_S = 50e-6
_PAUSE_MAX_S = 2e-3


class BlockFacade:
    """The part of a `Stack` that stores and loads blocks by key. Any thread of its process may call its methods.

    Args:
        manager: The manager; no other code may call it while the facade is in use.
        region: The primary tier's memory.
        batch_blocks: Blocks that one call moves at a time; at most the smallest tier's budget in flight.
    """

    def __init__(self, manager: TieringOffloadingManager, region: PrimaryRegion, batch_blocks: int) -> None:
        self.manager = manager
        # Not its array: an array that is kept would keep the memory mapped after the region was closed.
        self.region = region
        self._batch_blocks = batch_blocks
        self._has_secondary = bool(manager.secondary_tiers)
        self._lock = threading.Lock()
        """Guards the manager, and the three fields below."""
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._is_closed = False  # no call begins, and those that run end at their next step
        self._is_shut_down = False  # the manager is gone
        self._pid = os.getpid()
        self._request_numbers = itertools.count()
        self._call_thread = CallThread("tiered-kv-calls")

    def put(
        self,
        keys: Sequence[OffloadKey],
        blocks: Blocks,
        *,
        timeout: float = 10.0,
        hints: HintsAsGiven = None,
        epoch: int | None = None,
    ) -> int:
        """Store the blocks that are not stored yet.

        Blocks are stored in the primary tier, and go to the secondary tiers in the background. `put` waits while their
        store budgets are used up. Without secondary tiers, no more blocks are stored than the primary tier holds: each
        further block would evict one before it.

        Args:
            keys: In the order of their prefix. A key that appears twice is stored once, with its first block.
            blocks: uint8 of shape (len(keys), block_bytes), rows contiguous.
            timeout: Seconds to wait, in all, for room.
            hints: Hints about the blocks; see docs/how-to/hints.md.
            epoch: The `epoch` in which the blocks were computed, by default that of the call.

        Returns:
            The length of the prefix of `keys` that is stored now. It is less than `len(keys)` if no room could be made
            in time, and 0 if `hints` skip the store, or after a reset in or since `epoch`.

        Raises:
            TypeError, ValueError: The arguments do not fit each other, or hints are invalid.
            ShutdownError: The stack is closed, or another process opened it before a fork.
        """
        began = self.epoch if epoch is None else epoch  # not when the call gets the lock, which a reset may hold
        self._check(keys, blocks, "blocks")
        return self._run(lambda: self._put(keys, blocks, time.monotonic() + timeout, hints, began))

    def get(self, keys: Sequence[OffloadKey], out: Blocks, timeout: float = 1.0, *, hints: HintsAsGiven = None) -> int:
        """Load the longest available prefix of `keys`.

        Args:
            keys: In the order of their prefix.
            out: uint8 of shape (len(keys), block_bytes), rows contiguous, writable; row i gets block i.
            timeout: Seconds to wait, in all, for secondary tiers.
            hints: As of `put`.

        Returns:
            The number of blocks that were loaded; later rows of `out` are unchanged. After a reset no more are loaded.

        Raises:
            TypeError, ValueError: The arguments do not fit each other, or hints cannot be used.
            ShutdownError: The stack is closed, or was opened before a fork by another process.
        """
        self._check(keys, out, "out")
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        return self._run(
            lambda: self._prefix(
                "get", keys, timeout, hints, lambda wanted, first, context: self._load(wanted, out[first:], context)
            )
        )

    def prefetch(self, keys: Sequence[OffloadKey], timeout: float = 1.0, *, hints: HintsAsGiven = None) -> int:
        """Load the longest available prefix of `keys` into the primary tier, before a `get` needs it.

        A server calls it while a request waits for its turn, so that its `get` needs no secondary tier. The blocks are
        not pinned. At most half of the primary tier is filled, since other blocks are evicted for them. The call counts
        as a request, also in hits and misses.

        Args:
            keys: In the order of their prefix.
            timeout: Seconds to wait, in all, for secondary tiers.
            hints: As of `put`.

        Returns:
            The length of the prefix that is in the primary tier now.

        Raises:
            TypeError, ValueError: A key is none, or hints cannot be used.
            ShutdownError: The stack is closed, or was opened before a fork by another process.
        """
        self._check_keys(keys)
        ahead = keys[: max(self.region.num_blocks // 2, 1)]
        return self._run(lambda: self._prefetch(ahead, timeout, hints))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until no transfer to or from a secondary tier is in flight, `timeout` seconds at most.

        Returns:
            Whether all have ended. A tier that hangs keeps its transfers in flight beyond their deadline.

        Raises:
            ShutdownError: The stack is closed, or another process opened it before a fork.
        """
        return self._run(lambda: self._flush(time.monotonic() + timeout))

    @property
    def epoch(self) -> int:
        """The number of resets since the stack was opened."""
        return self.manager.primary.epoch

    def reset_cache(self) -> None:
        """Remove every block from every tier, as after new weights.

        Blocks of calls that have begun are not stored any more, and these calls load no further blocks.

        Raises:
            ShutdownError: The stack is closed, or another process opened it before a fork.
        """
        self._run(self._reset_cache)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for calls and for transfers, `timeout` seconds each at most, and close every tier.

        A call that takes several steps ends with `ShutdownError` at its next step. If a call still copies blocks after
        `timeout`, the memory stays mapped while the stack is referenced. A second call does nothing, and so does a call
        in a forked child.
        """
        if os.getpid() != self._pid:  # files, sockets and the ends of transfers are the parent's
            return
        self._is_closed = True
        self._call_thread.run(lambda: self._close(timeout))
        self._call_thread.stop()

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return the counters by tier; the primary tier is "cpu". See docs/reference/counters.md.

        A counter is a number, or a dictionary by label. `tiered_kv.metrics.instruments.count_of` reads them.
        """
        return self._run(self._counters)

    # The calls, on the call thread or a thread of the program.

    def _put(self, keys: Sequence[OffloadKey], blocks: Blocks, end_s: float, hints: HintsAsGiven, epoch: int) -> int:
        count = len(keys) if self._has_secondary else _fitting(keys, self.region.num_blocks)
        done, batch = 0, self._batch_blocks
        with self._request("put", hints, epoch) as context:
            pause_s = _PAUSE_MIN_S
            while done < count:
                if self.manager.primary.skips_store(context):
                    return 0
                # Without secondary tiers an evicted block is lost. So the blocks that this call has stored are named
                # again: the manager does not evict them for blocks that come after them.
                first, stop = (done if self._has_secondary else 0), min(done + batch, count)
                reserved = stop - done if self._has_secondary and self._reserve(stop - done, end_s) else 0
                if self._store(keys[first:stop], blocks[first:stop], context, reserved):
                    done = stop
                    batch, pause_s = self._batch_blocks, _PAUSE_MIN_S
                elif stop - done > 1:
                    batch = (stop - done) // 2
                elif time.monotonic() >= end_s or not (self._step() or self._calls > 1):
                    break  # neither a transfer nor another call will make room
                else:
                    pause_s = _pause(pause_s)
            return 0 if self.manager.primary.is_outdated(context) else done

    def _prefetch(self, keys: Sequence[OffloadKey], timeout: float, hints: HintsAsGiven) -> int:
        epoch = self.epoch
        found = self._prefix("prefetch", keys, timeout, hints, lambda wanted, _, context: self._find(wanted, context))
        return found if self.epoch == epoch else 0

    def _flush(self, end_s: float) -> bool:
        with self._call():
            self._step()  # an idle stack publishes what its tiers have removed meanwhile
            return self._wait(lambda: not self.manager.jobs_in_flight, end_s)

    def _close(self, timeout: float) -> None:
        with self._lock:
            self._idle.wait_for(lambda: self._calls == 0, timeout)
            if not self._is_shut_down:
                self._is_shut_down = True
                self.manager.shutdown(timeout)

    def _reset_cache(self) -> None:
        with self._call(), self._lock:
            self.manager.reset_cache()

    def _counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        with self._call(), self._lock:
            return self.manager.counters()

    def _prefix(
        self,
        verb: str,
        keys: Sequence[OffloadKey],
        timeout: float,
        hints: HintsAsGiven,
        take: Callable[[Sequence[OffloadKey], int, ReqContext], tuple[int, int]],
    ) -> int:
        """Take the longest prefix of `keys` that is available in time; return its length.

        `take(keys, first, context)` tries the next keys, which follow `first` others. It returns how many it took, and
        how many precede the first miss.
        """
        end_s = time.monotonic() + timeout
        taken, count = 0, len(keys)
        with self._request(verb, hints) as context:
            pause_s = _PAUSE_MIN_S
            while taken < count:
                wanted = keys[taken : min(taken + self._batch_blocks, count)]
                ready, known = take(wanted, taken, context)
                taken += ready
                if known < len(wanted):  # a miss: the blocks after it are useless
                    count = taken - ready + known
                if ready < len(wanted) and time.monotonic() >= end_s:
                    break  # also if a slow tier loads one block after another
                if ready:
                    pause_s = _PAUSE_MIN_S
                elif taken < count:
                    pause_s = _pause(pause_s)
        return taken

    # One step each, under the lock but for the copies.

    def _store(self, keys: Sequence[OffloadKey], blocks: Blocks, context: ReqContext, reserved: int) -> bool:
        """Store all of `keys`, or return False if there is no room for all of them.

        Releases the tiers' reservation of `reserved` blocks.
        """
        output = None
        copied = False
        try:
            with self._lock:
                self._raise_if_closed()
                output = self.manager.prepare_store(keys, context)
            if output is None:
                return False
            source = {key: index for index, key in reversed(list(enumerate(keys)))}
            for key, row in zip(output.keys_to_store, rows_of(output.store_spec), strict=True):
                self._call_thread.check()
                self.region.array[row] = blocks[source[key]]
            self._call_thread.check()
            copied = True
        finally:
            with self._lock:
                self._raise_if_shut_down()
                self.manager.release_stores(reserved)
                if output is not None:
                    self.manager.complete_store(output.keys_to_store, context, copied)
                    self.manager.on_schedule_end()
        return True

    def _load(self, keys: Sequence[OffloadKey], out: Blocks, context: ReqContext) -> tuple[int, int]:
        """Load the ready blocks at the head of `keys`; return their number, and how many precede the first miss."""
        with self._lock:
            ready, known = self._look_up(keys, context)
            # In the step of the lookup: an answer is valid until the step ends.
            spec = self.manager.prepare_load(keys[:ready], context) if ready else None
            if spec is None:
                self.manager.on_schedule_end()
                return 0, known
        try:
            for index, row in enumerate(rows_of(spec)):
                self._call_thread.check()
                out[index] = self.region.array[row]
        finally:
            with self._lock:
                self._raise_if_shut_down()
                self.manager.complete_load(keys[:ready], context)
                self.manager.on_schedule_end()
        return ready, known

    def _find(self, keys: Sequence[OffloadKey], context: ReqContext) -> tuple[int, int]:
        """Promote `keys`; return as `_look_up`."""
        with self._lock:
            found = self._look_up(keys, context)
            self.manager.on_schedule_end()
        return found

    def _look_up(self, keys: Sequence[OffloadKey], context: ReqContext) -> tuple[int, int]:
        """Return how many at the head of `keys` are in the primary tier, and how many precede the first miss."""
        self._raise_if_closed()
        answers = self.manager.lookup_many(keys, context)
        known = answers.index(False) if False in answers else len(answers)
        return next((index for index in range(known) if not answers[index]), known), known

    def _step(self) -> int:
        """Let the manager collect finished jobs; return how many are still in flight."""
        with self._lock:
            self._raise_if_closed()
            self.manager.on_schedule_end()
            return self.manager.jobs_in_flight

    def _reserve(self, num_blocks: int, end_s: float) -> bool:
        """Wait until every tier has reserved room for `num_blocks`; a tier without room skips them."""
        return self._wait(lambda: self.manager.reserve_stores(num_blocks), end_s)

    def _wait(self, is_over: Callable[[], bool], end_s: float) -> bool:
        """Step until `is_over()`, called under the lock; return whether that happened in time."""
        pause_s = _PAUSE_MIN_S
        while True:
            with self._lock:
                self._raise_if_closed()
                if is_over():
                    return True
                self.manager.on_schedule_end()
            if time.monotonic() >= end_s:
                return False
            pause_s = _pause(pause_s)

    # Calls and their arguments.

    def _run(self, call: Callable[[], T]) -> T:
        self._raise_if_closed()  # before the lock: `close` holds it until the manager is shut down
        return self._call_thread.run(call)  # not in a forked child: there a lock may be held for ever

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a running call, so that `close` can wait for it."""
        with self._lock:
            self._raise_if_closed()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._idle.notify_all()

    @contextmanager
    def _request(self, verb: str, hints: HintsAsGiven, epoch: int | None = None) -> Iterator[ReqContext]:
        """Make one request of the manager for a call; `epoch` is its epoch, by default the current one."""
        if hints is not None:
            Hints.parse(hints)  # a mistake in a program is an error, unlike one of a server's client
        context = ReqContext(f"{verb}-{next(self._request_numbers)}", None if hints is None else {HINTS_KEY: hints})
        with self._call():
            with self._lock:
                self.manager.on_new_request(context)
                if epoch not in (None, self.epoch):
                    self.manager.outdate(context)
            try:
                yield context
            finally:
                with self._lock:
                    if not self._is_shut_down:
                        self.manager.on_request_finished(context)
                        self.manager.on_schedule_end()

    def _raise_if_closed(self) -> None:
        self._call_thread.check()
        if self._is_closed:
            raise ShutdownError("the stack is closed")

    def _raise_if_shut_down(self) -> None:
        if self._is_shut_down:
            raise ShutdownError("the stack was closed before this call had ended")

    def _check_keys(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if not isinstance(key, bytes) or len(key) < _KEY_BYTES_MIN:
                raise TypeError(
                    f"a key is a block hash and a 4-byte group index, made by make_offload_key; found {key!r}"
                )

    def _check(self, keys: Sequence[OffloadKey], blocks: Blocks, name: str) -> None:
        self._check_keys(keys)
        if not isinstance(blocks, np.ndarray) or blocks.dtype != np.uint8:
            found = blocks.dtype if isinstance(blocks, np.ndarray) else type(blocks).__name__
            raise TypeError(f"{name} must be a numpy array of uint8, found {found}")
        wanted = (len(keys), self.region.block_bytes)
        if blocks.shape != wanted:
            raise ValueError(f"{name} must be of shape (keys, block_bytes) = {wanted}, found {blocks.shape}")
        if blocks.size and blocks.strides[1] != 1:
            raise ValueError(f"{name} must have contiguous rows; pass numpy.ascontiguousarray({name})")


def rows_of(spec: object) -> list[int]:
    """Return the rows of a transfer spec."""
    assert isinstance(spec, BlockIDsLoadStoreSpec), "the primary tier gives block ids"
    rows: list[int] = np.asarray(spec.block_ids).tolist()
    return rows


def _fitting(keys: Sequence[OffloadKey], rows: int) -> int:
    """Return the length of the prefix that has at most `rows` different keys."""
    count = min(len(keys), rows)
    known = set(keys[:count])
    while count < len(keys) and (len(known) < rows or keys[count] in known):
        known.add(keys[count])
        count += 1
    return count


def _pause(pause_s: float) -> float:
    """Sleep, and return how long to sleep the next time."""
    time.sleep(pause_s)
    return min(2 * pause_s, _PAUSE_MAX_S)
