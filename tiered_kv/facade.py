"""Blocks in, blocks out: put and get over a tiering manager, for programs that are no engine.

An engine drives the manager itself, one step after the other on its scheduler's thread. The facade plays that part
for programs with threads of their own: one lock makes their calls to the manager one after the other, and it
is held for bookkeeping only, never while blocks are copied or waited for.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tiered_kv.base import BlockIDsLoadStoreSpec, OffloadKey, ReqContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ShutdownError
from tiered_kv.hints import HINTS_KEY, Hints
from tiered_kv.tiering.manager import TieringOffloadingManager

Blocks = np.ndarray[Any, np.dtype[np.uint8]]
HintsAsGiven = Mapping[str, object] | None

_KEY_BYTES_MIN = 4
_PAUSE_MIN_S = 50e-6
_PAUSE_MAX_S = 2e-3


class BlockFacade:
    """The part of a `Stack` that stores and loads blocks by key. Any thread of its process may call its methods.

    Args:
        manager: The manager; nobody else may call it while the facade is in use.
        region: The primary tier's memory.
        batch_blocks: Blocks that one call moves at a time; at most what the smallest tier may have in flight.
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

    def put(
        self, keys: Sequence[OffloadKey], blocks: Blocks, *, timeout: float = 10.0, hints: HintsAsGiven = None
    ) -> int:
        """Store blocks, those that are here already left out.

        Blocks are stored in the primary tier, and go to the secondary tiers in the background. Where there are
        more than the tiers' store budgets take at one time, `put` waits for the tiers in between; without
        secondary tiers, no more are stored than the primary tier holds, since each further block would
        evict one before it.

        Args:
            keys: In the order of their prefix. One that stands twice is stored once, with its first block.
            blocks: uint8 of shape (len(keys), block_bytes), rows contiguous.
            timeout: Seconds to wait, in all, for room.
            hints: What the call says of its blocks; see docs/how-to/hints.md.

        Returns:
            The length of the prefix of `keys` that was stored, or was here already. It is less than `len(keys)`
            where no room could be made in time, and 0 where `hints` skip the store.

        Raises:
            TypeError, ValueError: The arguments do not fit each other, or hints cannot be used.
            ShutdownError: The stack is closed, or was opened before a fork by another process.
        """
        self._check(keys, blocks, "blocks")
        end_s = time.monotonic() + timeout
        count = len(keys) if self._has_secondary else min(len(keys), self.region.num_blocks)
        done, batch = 0, self._batch_blocks
        with self._request("put", hints) as context:
            if self.manager.primary.hints_of(context).skips_store:
                return 0
            pause_s = _PAUSE_MIN_S
            while done < count:
                # Without secondary tiers a block that is evicted is lost. So what this call has stored already is
                # named again: the manager evicts nothing for the sake of what lies behind it.
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
        return done

    def get(self, keys: Sequence[OffloadKey], out: Blocks, timeout: float = 1.0, *, hints: HintsAsGiven = None) -> int:
        """Load the longest prefix of `keys` that can be had.

        Args:
            keys: In the order of their prefix.
            out: uint8 of shape (len(keys), block_bytes), rows contiguous, writable; row i gets block i.
            timeout: Seconds to wait, in all, for secondary tiers.
            hints: As of `put`.

        Returns:
            How many blocks were loaded; rows from there on are as they were.

        Raises:
            TypeError, ValueError: The arguments do not fit each other, or hints cannot be used.
            ShutdownError: The stack is closed, or was opened before a fork by another process.
        """
        self._check(keys, out, "out")
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        return self._prefix(
            "get", keys, timeout, hints, lambda wanted, first, context: self._load(wanted, out[first:], context)
        )

    def prefetch(self, keys: Sequence[OffloadKey], timeout: float = 1.0, *, hints: HintsAsGiven = None) -> int:
        """Bring the longest prefix of `keys` that can be had into the primary tier, before anybody gets it.

        A thread of a server calls it while a request waits for its turn: what `get` then asks for needs no secondary
        tier. The blocks are evicted as others are. It brings at most as many as half of the primary tier holds, since
        they take the places of those that the policy ranks least. It is counted as a request of its own: in hits and
        misses, too.

        Args:
            keys: In the order of their prefix.
            timeout: Seconds to wait, in all, for secondary tiers.
            hints: As of `put`.

        Returns:
            How many blocks of the prefix are in the primary tier now.

        Raises:
            TypeError, ValueError: A key is none, or hints cannot be used.
            ShutdownError: The stack is closed, or was opened before a fork by another process.
        """
        self._check_keys(keys)
        ahead = keys[: max(self.region.num_blocks // 2, 1)]
        return self._prefix("prefetch", ahead, timeout, hints, lambda wanted, _, context: self._find(wanted, context))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until no transfer to or from a secondary tier is in flight, `timeout` seconds at most.

        Returns:
            Whether all have ended. A tier that hangs keeps its transfers in flight beyond their deadline.

        Raises:
            ShutdownError: The stack is closed, or was opened before a fork by another process.
        """
        with self._call():
            self._step()  # an idle stack publishes what its tiers have removed meanwhile
            return self._wait(lambda: not self.manager.jobs_in_flight, time.monotonic() + timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for calls and for transfers, `timeout` seconds each at most, and close every tier.

        A call that takes several steps ends with `ShutdownError` at its next one. Blocks that a call still copies when
        the time is over are in use: the memory then stays mapped for as long as somebody has the stack. A second call
        does nothing, and so does one in a forked child.
        """
        if os.getpid() != self._pid:  # files, sockets and the ends of transfers are the parent's
            return
        with self._lock:
            self._is_closed = True
            self._idle.wait_for(lambda: self._calls == 0, timeout)
            if not self._is_shut_down:
                self._is_shut_down = True
                self.manager.shutdown(timeout)

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return what has been stored, loaded, skipped and failed, by tier; see docs/reference/counters.md.

        A plain counter is a number; one with labels a dictionary by label. The primary tier is "cpu". `count_of` of
        `tiered_kv.counters` reads them.
        """
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
        """Take the longest prefix of `keys` that can be had in time; return its length.

        `take` is given keys, and how many precede them. It returns how many it took, and how many precede a miss.
        """
        end_s = time.monotonic() + timeout
        taken, count = 0, len(keys)
        with self._request(verb, hints) as context:
            pause_s = _PAUSE_MIN_S
            while taken < count:
                wanted = keys[taken : min(taken + self._batch_blocks, count)]
                ready, known = take(wanted, taken, context)
                taken += ready
                if known < len(wanted):  # a miss: what lies behind it is of no use
                    count = taken - ready + known
                if ready < len(wanted) and time.monotonic() >= end_s:
                    break  # also where a slow tier brings one block after another
                if ready:
                    pause_s = _PAUSE_MIN_S
                elif taken < count:
                    pause_s = _pause(pause_s)
        return taken

    # One step each, under the lock but for the copies.

    def _store(self, keys: Sequence[OffloadKey], blocks: Blocks, context: ReqContext, reserved: int) -> bool:
        """Store all of `keys`, or return False where there is no room for all of them.

        The room of `reserved` blocks that the tiers keep for this store is free again afterwards.
        """
        with self._lock:
            self._raise_if_closed()
            output = self.manager.prepare_store(keys, context)
            if output is None:
                self.manager.release_stores(reserved)
                return False
        source = {key: index for index, key in reversed(list(enumerate(keys)))}
        copied = False
        try:
            for key, row in zip(output.keys_to_store, rows_of(output.store_spec), strict=True):
                self.region.array[row] = blocks[source[key]]
            copied = True
        finally:
            with self._lock:
                self._raise_if_shut_down()
                self.manager.release_stores(reserved)
                self.manager.complete_store(output.keys_to_store, context, copied)
                self.manager.on_schedule_end()
        return True

    def _load(self, keys: Sequence[OffloadKey], out: Blocks, context: ReqContext) -> tuple[int, int]:
        """Load what is ready at the head of `keys`; return how many that are, and how many precede the first miss."""
        with self._lock:
            ready, known = self._look_up(keys, context)
            # In the step of the lookup: an answer holds no longer.
            spec = self.manager.prepare_load(keys[:ready], context) if ready else None
            if spec is None:
                self.manager.on_schedule_end()
                return 0, known
        try:
            for index, row in enumerate(rows_of(spec)):
                out[index] = self.region.array[row]
        finally:
            with self._lock:
                self._raise_if_shut_down()
                self.manager.complete_load(keys[:ready], context)
                self.manager.on_schedule_end()
        return ready, known

    def _find(self, keys: Sequence[OffloadKey], context: ReqContext) -> tuple[int, int]:
        """Promote `keys`; return what `_look_up` does."""
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
        """Let the manager collect what has finished; return how many jobs are still in flight."""
        with self._lock:
            self._raise_if_closed()
            self.manager.on_schedule_end()
            return self.manager.jobs_in_flight

    def _reserve(self, num_blocks: int, end_s: float) -> bool:
        """Wait until every tier that takes stores keeps room for `num_blocks`; without that it may skip them."""
        return self._wait(lambda: self.manager.reserve_stores(num_blocks), end_s)

    def _wait(self, is_over: Callable[[], bool], end_s: float) -> bool:
        """Step until `is_over`, which is asked under the lock; return whether that came in time."""
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

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a call that runs, so that `close` can wait for it."""
        self._raise_if_forked()  # before the lock, which nobody will give back if it was held at the fork
        self._raise_if_closed()  # before the lock, which whoever closes keeps until the manager is shut down
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
    def _request(self, verb: str, hints: HintsAsGiven) -> Iterator[ReqContext]:
        """Begin a request of the manager's for one call, and finish it however the call ends."""
        if hints is not None:
            Hints.parse(hints)  # a mistake in a program is an error, unlike one of a server's client
        context = ReqContext(f"{verb}-{next(self._request_numbers)}", None if hints is None else {HINTS_KEY: hints})
        with self._call():
            with self._lock:
                self.manager.on_new_request(context)
            try:
                yield context
            finally:
                with self._lock:
                    if not self._is_shut_down:
                        self.manager.on_request_finished(context)
                        self.manager.on_schedule_end()

    def _raise_if_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ShutdownError(f"the stack belongs to process {self._pid}; open another one after a fork")

    def _raise_if_closed(self) -> None:
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
    """Return the rows of the primary tier's region that a transfer spec names."""
    assert isinstance(spec, BlockIDsLoadStoreSpec), "the primary tier gives block ids"
    rows: list[int] = np.asarray(spec.block_ids).tolist()
    return rows


def _pause(pause_s: float) -> float:
    """Sleep, and return how long to sleep the next time."""
    time.sleep(pause_s)
    return min(2 * pause_s, _PAUSE_MAX_S)
