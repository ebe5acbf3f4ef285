"""`put` and `get` over a tiering manager, for programs other than engines.

A program calls them, on any thread; one lock serializes the calls of the manager. Each call ends by its timeout. A
`get` loads whole blocks or reports fewer; bytes behind the reported blocks are undefined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, overload

import numpy as np

from tiered_kv.base import BlockIDsLoadStoreSpec, OffloadKey, ReqContext, make_offload_key
from tiered_kv.received import Received
from tiered_kv.stack.buffers import Blocks, rows_in
from tiered_kv.stack.calls import PAUSE_MIN_S, HintsAsGiven, M, StackCalls, end_of, pause

if TYPE_CHECKING:
    from tiered_kv.stack.buffers import AnyBuffer

_Ask = Callable[[Sequence[OffloadKey], ReqContext], list[bool | None]]


class _Slices(Protocol):
    """Blocks that are taken in slices."""

    def __getitem__(self, part: slice, /) -> Blocks: ...


_COUNT_STALL_S: Final = 0.5
"""Seconds that a `put` waits for each answer after its timeout, when it counts the stored blocks."""


class BlockFacade(StackCalls[M]):
    """The part of a `Stack` that stores and loads blocks by key. Any thread of its process may call its methods.

    A key is a block hash: bytes of any length, of your own making. An engine's manager has the block under
    `make_offload_key(block_hash, 0)`, since engines have a hash in several KV cache groups. Such a whole key is bytes,
    too, and here it would name another block.

    A `timeout` of 0 or less does not wait, and one of `math.inf` has no limit. None and NaN are errors.

    Each method but `close` raises `ShutdownError` if the stack is closed, or another process opened it before a fork.
    """

    _batch_blocks: int
    """Blocks that one call moves at a time; at most the smallest tier's budget in flight."""

    def _keys_of(self, block_hashes: Sequence[bytes]) -> list[OffloadKey]:
        return keys_of(block_hashes)

    def put(
        self,
        keys: Sequence[bytes],
        blocks: AnyBuffer,
        *,
        timeout: float = 10.0,
        hints: HintsAsGiven = None,
        epoch: int | None = None,
    ) -> int:
        """Store the blocks that are not stored yet.

        Blocks are stored in the primary tier, and go to the secondary tiers in the background. `put` waits while their
        store budgets are used up. Without secondary tiers, or time, it stores no more blocks than the primary tier
        holds: each further block would evict an earlier one. A block that no secondary tier has taken counts while it
        is in memory.

        Args:
            keys: Block hashes, in the order of their prefix. A hash that appears twice is stored once, with its first
                block.
            blocks: len(keys) * block_bytes bytes: any contiguous buffer, numpy array, or tensor of torch on the CPU.
                It must not change before `put` returns.
            timeout: Seconds to wait, in all, for room.
            hints: Hints about the blocks; see docs/how-to/hints.md. Invalid ones are ignored, and counted.
            epoch: The `epoch` in which the blocks were computed, by default the epoch at the call.

        Returns:
            The length of the prefix of `keys` that is stored now. It is less than `len(keys)` if no room could be made
            in time. It is 0 if `hints` skip the store, or if a reset has ended `epoch`.

        Raises:
            TypeError, ValueError: The arguments do not fit each other.
        """
        began = self.epoch if epoch is None else epoch  # the present one: later, a reset may hold the lock
        offload_keys = self._keys_of(keys)
        rows = rows_in(blocks, len(offload_keys), self.region.block_bytes, "blocks")
        end_s = end_of(timeout)
        return self._run(lambda: self._put(offload_keys, rows, end_s, hints, began))

    @overload
    def get(
        self,
        keys: Sequence[bytes],
        out: None = None,
        timeout: float = ...,
        *,
        hints: HintsAsGiven = ...,
        received: Received | None = ...,
    ) -> Blocks: ...

    @overload
    def get(
        self,
        keys: Sequence[bytes],
        out: AnyBuffer,
        timeout: float = ...,
        *,
        hints: HintsAsGiven = ...,
        received: Received | None = ...,
    ) -> int: ...

    def get(
        self,
        keys: Sequence[bytes],
        out: AnyBuffer | None = None,
        timeout: float = 1.0,
        *,
        hints: HintsAsGiven = None,
        received: Received | None = None,
    ) -> Blocks | int:
        """Load the longest available prefix of `keys`. After a reset no more blocks are loaded.

        Args:
            keys: Block hashes, in the order of their prefix.
            out: Receives block i at byte i * block_bytes: a writable buffer, as of `put`. By default a new array.
            timeout: Seconds to wait, in all, for secondary tiers, and for room while other calls take it.
            hints: As of `put`.
            received: Gets what the call got: the blocks and tokens that each tier served, the blocks that did not come,
                and the seconds that it waited for tiers.

        Returns:
            Without `out`, the blocks that were loaded, as uint8 of shape (n, block_bytes). With `out`, their number;
            the bytes after them are unchanged.

        Raises:
            TypeError, ValueError: The arguments do not fit each other.
        """
        offload_keys = self._keys_of(keys)
        shape = len(offload_keys), self.region.block_bytes
        rows = np.empty(shape, np.uint8) if out is None else rows_in(out, *shape, "out", writable=True)
        end_s = end_of(timeout)
        ask = self._manager.lookup_prefix
        loaded = self._run(lambda: self._prefix("get", offload_keys, end_s, hints, ask, rows, received))
        return rows[:loaded] if out is None else loaded

    def contains(self, keys: Sequence[bytes], timeout: float = 1.0) -> int:
        """Return the length of the prefix of `keys` that is stored in any tier: the blocks that `get` would load, if it
        had time.

        No block is loaded, and no use, hit or miss is counted. A block may be evicted after the call.

        Args:
            keys: Block hashes, in the order of their prefix.
            timeout: Seconds to wait, in all, for secondary tiers. A block counts as not stored if a tier
                does not answer in time.

        Raises:
            TypeError: A key is not a block hash.
        """
        offload_keys, ask = self._keys_of(keys), self._manager.contains_many
        end_s = end_of(timeout)
        return self._run(lambda: self._prefix("contains", offload_keys, end_s, None, ask))

    def prefetch(self, keys: Sequence[bytes], timeout: float = 1.0, *, hints: HintsAsGiven = None) -> int:
        """Load the longest available prefix of `keys` into the primary tier, before a `get` needs it.

        A server calls it while a request waits in its queue, so that its `get` needs no secondary tier. The blocks are
        not pinned. At most half of the primary tier is filled, since other blocks are evicted for them. The call counts
        as a request, also in hits and misses.

        Args:
            keys: Block hashes, in the order of their prefix.
            timeout: As of `get`.
            hints: As of `put`.

        Returns:
            The length of the prefix that is in the primary tier now.

        Raises:
            TypeError, ValueError: A key is not a block hash.
        """
        ahead = self._keys_of(keys)[: max(self.region.num_blocks // 2, 1)]
        end_s = end_of(timeout)
        return self._run(lambda: self._prefix("prefetch", ahead, end_s, hints, self._manager.lookup_prefix))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until no transfer to or from a secondary tier is in flight, `timeout` seconds at most.

        Returns:
            Whether all have ended. A tier that hangs keeps its transfers in flight beyond their deadline.
        """
        end_s = end_of(timeout)
        return self._run(lambda: self._flush(end_s))

    @property
    def epoch(self) -> int:
        """The number of resets since the stack was opened."""
        return self._manager.epoch

    def reset_cache(self) -> None:
        """Remove every block from every tier, as after new weights.

        Blocks of calls that have begun are not stored any more, and these calls load no further blocks.
        """
        self._run(self._reset_cache)

    # The calls, on the call thread or a thread of the program.

    def _put(self, keys: Sequence[OffloadKey], blocks: _Slices, end_s: float, hints: HintsAsGiven, epoch: int) -> int:
        has_secondary = self._manager.has_tiers_below
        count = len(keys) if has_secondary else _fitting(keys, self.region.num_blocks)
        done, batches = 0, 0
        with self._request("put", hints, epoch) as context:
            batch, pause_s = self._batch_blocks, PAUSE_MIN_S
            while done < count:
                if self._manager.stores_nothing_of(context):
                    return 0
                stop = min(done + batch, count)
                # Wait until every tier has reserved room; a tier without room skips them.
                is_reserved = has_secondary and self._wait(partial(self._manager.reserve_stores, stop - done), end_s)
                reserved = stop - done if is_reserved else 0
                if done and not is_reserved:  # no tier takes them: none may evict an earlier one
                    with self._lock:
                        self._manager.spare_own(context)
                if self._store(keys[done:stop], blocks[done:stop], context, reserved, end_s):
                    done, batches = stop, batches + 1
                    batch, pause_s = self._batch_blocks, PAUSE_MIN_S
                elif stop - done > 1:
                    batch = (stop - done) // 2
                elif time.monotonic() >= end_s or not (self._step() or self._calls > 1):
                    break  # neither a transfer nor another call will make room
                else:
                    pause_s = pause(pause_s)  # not `_pause`, which ends at a message: each refusal is one
            # Later blocks, also of other calls, may have taken the room of the first ones.
            if batches > 1 and not self._manager.has_kept(context):
                done = self._follow(keys[:done], context, end_s, self._manager.contains_many, stall_s=_COUNT_STALL_S)
            return 0 if self._manager.is_outdated(context) else done

    def _flush(self, end_s: float) -> bool:
        with self._call():
            self._step()  # an idle stack publishes what its tiers have removed meanwhile
            return self._wait(lambda: not self._manager.jobs_in_flight, end_s)

    def _reset_cache(self) -> None:
        with self._call(), self._lock:
            self._manager.reset_cache()

    def _prefix(
        self,
        verb: str,
        keys: Sequence[OffloadKey],
        end_s: float,
        hints: HintsAsGiven,
        ask: _Ask,
        out: Blocks | None = None,
        received: Received | None = None,
    ) -> int:
        """Return the length of the longest prefix that `ask` answers True in time, and load it into `out`, if given.

        Without `out` the length is 0 after a reset during the call.
        """
        epoch = self.epoch
        with self._request(verb, hints) as context:
            taken = self._follow(keys, context, end_s, ask, out)
            if received is not None:
                with self._lock:
                    self._raise_if_shut_down()
                    received.take(self._manager.received(context), len(keys) - taken)
        return taken if out is not None or self.epoch == epoch else 0

    def _follow(
        self,
        keys: Sequence[OffloadKey],
        context: ReqContext,
        end_s: float,
        ask: _Ask,
        out: Blocks | None = None,
        *,
        stall_s: float = 0.0,
    ) -> int:
        """Do as `_prefix` for a request that has begun. After `end_s`, wait up to `stall_s` for each answer."""
        taken, count, pause_s = 0, len(keys), PAUSE_MIN_S
        stalled_s = time.monotonic() + stall_s if stall_s else end_s
        while taken < count:
            wanted = keys[taken : min(taken + self._batch_blocks, count)]
            ready, known = self._take(wanted, None if out is None else out[taken:], context, ask)
            taken += ready
            if known < len(wanted):  # a miss: the blocks after it are useless
                count = taken - ready + known
            if ready < len(wanted) and time.monotonic() >= max(end_s, stalled_s):
                break  # the call ends, also if a slow tier still loads one block after another
            if ready:
                pause_s = PAUSE_MIN_S
                if stall_s:
                    stalled_s = time.monotonic() + stall_s
            elif taken < count:
                pause_s = self._pause(pause_s)
        return taken

    # One step each, under the lock but for the copies.

    def _store(
        self, keys: Sequence[OffloadKey], blocks: Blocks, context: ReqContext, reserved: int, end_s: float
    ) -> bool:
        """Store all of `keys`, or return False if there is no room for all of them, or none was granted by `end_s`.

        Releases the tiers' reservation of `reserved` blocks.
        """
        output = None
        copied = False
        try:
            with self._lock:
                self._raise_if_closed()
                output = self._manager.prepare_store(keys, context)
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
                self._manager.release_stores(reserved)
                if output is not None:
                    self._manager.complete_store(output.keys_to_store, context, copied)
                    self._manager.on_schedule_end()
        return True

    def _take(self, keys: Sequence[OffloadKey], out: Blocks | None, context: ReqContext, ask: _Ask) -> tuple[int, int]:
        """Return how many at the head of `keys` are answered True, and how many precede the first False.

        The blocks that are answered True are loaded into `out`, if it is given.
        """
        with self._lock:
            self._raise_if_closed()
            answers = ask(keys, context)
            known = answers.index(False) if False in answers else len(answers)
            ready = next((index for index in range(known) if not answers[index]), known)
            if out is None or not ready:
                self._manager.let_go(keys[:ready], context)
                self._manager.on_schedule_end()
                return ready, known
            # In the step of the lookup: an answer is valid until the step ends.
            spec = self._manager.prepare_load(keys[:ready], context)
        try:
            for index, row in enumerate(rows_of(spec)):
                self._call_thread.check()
                out[index] = self.region.array[row]
        finally:
            with self._lock:
                self._raise_if_shut_down()
                self._manager.complete_load(keys[:ready], context)
                self._manager.on_schedule_end()
        return ready, known


def keys_of(block_hashes: Sequence[bytes]) -> list[OffloadKey]:
    """Return the manager's keys of blocks that a program names by their hashes.

    Raises:
        TypeError: A hash is not bytes, or is empty.
    """
    hashes = list(block_hashes)  # once: they may come from a generator
    for block_hash in hashes:
        if not isinstance(block_hash, bytes) or not block_hash:
            raise TypeError(f"a key is a block hash, bytes that are not empty; found {block_hash!r}")
    return [make_offload_key(block_hash, 0) for block_hash in hashes]


def rows_of(spec: object) -> list[int]:
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
