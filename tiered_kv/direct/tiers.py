"""Secondary tiers over a caller's memory: contains, store, load and touch.

A program or an engine's plugin calls them, from any thread; no call waits but `close`. A callback gets the answers, on
the tiers' thread. Blocks with wrong bytes are never reported as loaded.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.entries import tier_settings, tier_type_of
from tiered_kv.config.limits import given_limits
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.settings import TierSettings
from tiered_kv.direct.tasks import Done, Kind, PlacedBlock, Task
from tiered_kv.direct.thread import TierThread
from tiered_kv.errors import ConfigError, needing_resources
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import CounterView
from tiered_kv.stack.buffers import bytes_in
from tiered_kv.system.interrupts import CallThread
from tiered_kv.system.limits import compare, require
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.gauges import report_tier
from tiered_kv.tiering.guarded import GuardedTier

BUDGET_BYTES_MAX: Final = 256 << 20
"""Limit of the default budgets. `job_timeout` runs from the submission, so no job should wait long in a tier."""
_KEY_BYTES_MIN = 4


class DirectTiers:
    """Secondary tiers without a primary tier: they read and write the caller's memory.

    Any thread may call `contains`, `store` and `load`, which return at once. Each calls its `on_done` once, on the
    tiers' thread, with an answer for each key. A callback must return soon, because it blocks that thread. If it
    raises, that is counted and logged. Calls raise `ShutdownError` if the tiers are closed, or another process opened
    them before a fork, and `ValueError` for an invalid key.

    `on_done` is called when no tier touches the blocks any more. Until then the caller must not change the blocks of a
    store, nor use the blocks of a load, not even after a deadline: a transfer that hangs keeps its task open.

    Blocks over a tier's budget wait. They fail in that tier after `wait_s_max`. They fail at once if the tier is
    disabled, or expired jobs hold the whole budget, or the breaker is open, or half-open with a job in flight. The
    default budget is the size of the memory, and at most 256 MiB.

    Args:
        memory: A writable, contiguous buffer, or a tensor of torch, or (address, bytes). It must stay mapped until
            `close` has returned True.
        block_bytes: Bytes of a block.
        tiers: Entries as in a stack's `secondary`, in the order of the search.
        namespace: The facts that must agree, besides the sizes, for blocks to be interchangeable.
        block_tokens: Tokens of a block; a part of the namespace's identity.
        wait_s_max: How long blocks may wait for a budget, in seconds.
        on_removed: Called on the tiers' thread with a tier's name and blocks that are not in that tier any more:
            evicted, damaged, or missing in a load. Not called for a `reset`.

    Raises:
        TypeError, ValueError: The memory cannot be used, or there is no tier.
        ConfigError, TierError: A tier cannot be opened, or cannot be used over a caller's memory.
        ResourceError: The system refuses a thread, a descriptor or memory.
    """

    def __init__(
        self,
        memory: Any,  # Any: an object with the buffer protocol, or a pair
        *,
        block_bytes: int,
        tiers: Sequence[Mapping[str, object] | TierSettings],
        namespace: Namespace,
        block_tokens: int = 1,
        wait_s_max: float = math.inf,
        on_removed: Callable[[str, Sequence[OffloadKey]], None] | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self._wait_s_max = wait_s_max
        self._memory = _bytes_of(memory, block_bytes)
        self._size_bytes = len(self._memory)
        rows = self._size_bytes // block_bytes
        self._rows = self._memory[: rows * block_bytes].cast("B", (rows, block_bytes))
        self._numbers = count()
        self._thread = TierThread(on_removed)
        self._registry = Registry()
        self._call_thread = CallThread("tiered-kv-direct-calls")
        entries = [tier_settings(tier) for tier in tiers]
        if len({entry.name for entry in entries}) != len(entries) or not entries:
            raise ValueError(
                f"give at least one tier, and each its own name; found {[entry.name for entry in entries]}"
            )
        for number, entry in enumerate(entries):
            if given_limits(entry) is not None:
                raise ConfigError(
                    "a call over a caller's memory names no tenant: only the tiers of a stack have shares",
                    location=f"tiers.{number}.limits",
                )
        takes = [
            replace(take, setting=f"tiers.{number}.{take.setting}")
            for number, entry in enumerate(entries)
            for take in entry.takes(block_bytes)
        ]
        require(compare(takes))
        identity = namespace.identify(block_bytes=block_bytes, block_tokens=block_tokens)
        spec_of = partial(
            TierSpec,
            block_bytes=block_bytes,
            namespace_digest=identity.digest,
            namespace=identity.described,
            wants_events=on_removed is not None,
            memory=self._memory,
            on_finished=self._thread.wake,
        )

        def open_all() -> None:
            with needing_resources("the tiers cannot be opened"), ExitStack() as undo:
                undo.callback(self._release_views)
                for entry in entries:
                    guarded = self._open(entry, spec_of(entry.name))
                    undo.callback(guarded.call, "shutdown")
                    self._thread.add(guarded)
                    report_tier(guarded, self._registry)
                self._thread.start()
                undo.pop_all()

        CallThread("tiered-kv-open").run(open_all, undo=lambda _: self.close())

    def _open(self, settings: TierSettings, spec: TierSpec) -> GuardedTier:
        tier = SecondaryTierFactory.create(spec, self._rows, settings)
        if not tier.takes_offsets:
            tier.shutdown()
            raise ConfigError(
                f"tier '{settings.name}' cannot be used over a caller's memory: its class knows no byte offsets; "
                "use it in a stack, or build it on tiered_kv.toolkit"
            )
        budget_bytes = min(self._size_bytes, BUDGET_BYTES_MAX)
        clock, wants = time.monotonic, spec.wants_events
        return GuardedTier(tier, settings, self.block_bytes, budget_bytes, clock, reports_events=wants)

    def contains(self, keys: Sequence[OffloadKey], on_done: Done) -> None:
        """Ask which blocks the tiers have. A tier that does not answer within its `lookup_timeout` has none."""
        self._thread.post(self._task("contains", keys, on_done))

    def store(self, keys: Sequence[OffloadKey], offsets: Sequence[int], on_done: Done) -> None:
        """Offer blocks to every tier. A key that appears twice is stored once, from its first offset.

        Args:
            offsets: Where each block begins in the memory, in bytes, at any alignment.
            on_done: Called with True for a block that a tier has now or does not admit (`admit_after`, `write_budget`).

        Raises:
            ValueError: The arguments do not fit each other, or the memory.
        """
        self._thread.post(self._task("store", keys, on_done, offsets))

    def load(self, keys: Sequence[OffloadKey], offsets: Sequence[int], on_done: Done) -> None:
        """Load blocks from the first tier that has them. If it fails, the next tier is tried.

        Args:
            offsets: As in `store`. The blocks must not overlap. A key may appear twice.
            on_done: Called with True for a block that was loaded and verified. The bytes of other blocks are undefined.
        """
        task = self._task("load", keys, on_done, offsets)
        starts = np.sort([block.offset for block in task.blocks])
        if (np.diff(starts) < self.block_bytes).any():
            raise ValueError(f"blocks to load must not overlap; two begin less than {self.block_bytes} bytes apart")
        self._thread.post(task)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that blocks were used in the caller's own memory: tiers that evict by use, or by age, keep them longer.

        Name the last used blocks first, and the blocks of a request head first. A call a second is enough.

        Raises:
            ValueError: A key is invalid.
        """
        self._thread.post(partial(self._thread.touch, _checked_keys(keys)))

    def wait(self, method: Kind, *args: Any, timeout_s: float | None = None) -> list[bool]:
        """Call a method with `args`, which omit the callback, and return the answers.

        Raises:
            TimeoutError: The task has not ended in time. It continues, and uses its memory, as after an interrupt.
            RuntimeError: A callback calls it.
        """
        if self._thread.is_current:
            raise RuntimeError("a callback cannot wait: it runs on the thread that it would wait for")
        # Before the task begins: after a ValueError of the queue the caller would use the memory too early.
        limit_s = None if timeout_s is None else max(0.0, min(timeout_s, threading.TIMEOUT_MAX / 2))
        answers: SimpleQueue[list[bool]] = SimpleQueue()  # unlike a Future, whole after an interrupt
        getattr(self, method)(*args, answers.put)
        try:
            return answers.get(timeout=limit_s)
        except Empty:
            raise TimeoutError(f"{method} of {len(args[0])} blocks has not ended after {timeout_s} s") from None

    def reset(self) -> None:
        """Forget every block that was stored before this call. Returns at once.

        Earlier calls end: `store` and `contains` answer False, and `load` loads no further block. A tier that cannot
        reset is not used any more.
        """
        self._thread.post(self._thread.reset)

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return the counters and the state of each tier by its name, and under "" the counters of no tier."""
        return self._call_thread.run(self._counters)  # the tiers take locks for it

    def _counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        own = {**self._thread.counters.snapshot(), "open_tasks": self._thread.open_tasks}
        of_tiers = CounterView(self._registry.snapshot())
        for queue in self._thread.queues:
            of_tiers[queue.guarded.name] |= queue.state()
        return {"": own, **of_tiers}

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse further calls, wait up to `timeout_s` for transfers, and close the tiers, each in bounded time.

        Blocks that wait for a budget fail. A later call returns whether transfers have ended since.

        Returns:
            Whether no tier touches the memory any more. If not, the memory must stay mapped.
        """
        is_over = self._thread.close(timeout_s)
        self._call_thread.stop()
        if is_over:  # the caller may unmap it, which Python refuses while there are views
            self._release_views()
        return is_over

    def _release_views(self) -> None:
        for view in (self._rows, self._memory):
            with suppress(BufferError):  # a third-party tier keeps a view
                view.release()

    def __enter__(self) -> DirectTiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _task(
        self, kind: Kind, keys: Sequence[OffloadKey], on_done: Done, offsets: Sequence[int] | None = None
    ) -> Task:
        keys = _checked_keys(keys)
        context = ReqContext(req_id=f"direct-{next(self._numbers)}")
        task = Task(kind, keys, on_done, context, begin_by_s=time.monotonic() + self._wait_s_max)
        if offsets is not None:
            first_of: dict[object, int] = {}
            for position, (key, offset) in enumerate(zip(keys, self._checked(offsets, len(keys)), strict=True)):
                first = first_of.setdefault(key if kind == "store" else (key, offset), position)
                if first < position:
                    task.repeats.append((position, first))
                    continue
                task.blocks.append(PlacedBlock(key, offset, position))
        return task

    def _checked(self, offsets: Sequence[int], wanted: int) -> list[int]:
        starts = np.asarray(offsets) if len(offsets) else np.zeros(0, dtype=np.int64)
        if starts.shape != (wanted,) or starts.dtype.kind not in "iu":
            raise ValueError(
                f"{wanted} keys need as many integer offsets; found {starts.dtype} of shape {starts.shape}"
            )
        last = self._size_bytes - self.block_bytes
        if wanted and not 0 <= starts.min() <= starts.max() <= last:
            raise ValueError(f"blocks begin at 0 to {last} here; found {starts.min()} to {starts.max()}")
        checked: list[int] = starts.tolist()
        return checked


def _checked_keys(keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    for key in keys:
        if not isinstance(key, bytes) or len(key) < _KEY_BYTES_MIN:
            raise ValueError(f"a key is a block hash and a 4-byte group index, by make_offload_key; found {key!r}")
    return list(keys)


def _bytes_of(memory: Any, block_bytes: int) -> memoryview:  # Any: as in `DirectTiers`
    if isinstance(memory, tuple):
        address, size_bytes = memory
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    flat = bytes_in(memory, "the memory").data
    if flat.readonly:
        raise ValueError("the memory must be writable")
    if not 0 < block_bytes <= len(flat):
        raise ValueError(f"a block of {block_bytes} bytes does not fit into memory of {len(flat)} bytes")
    return flat


def part_of(tier: TierSettings, directory: str, share: Fraction) -> TierSettings:
    """Return a tier's settings for one of several kinds of blocks: a part of its storage, unless tiers share it.

    See `TierSettings.part_of_storage` for the arguments.

    Raises:
        ConfigError: The storage cannot be divided.
    """
    return tier if tier_type_of(tier).is_shared else tier.part_of_storage(directory, share)
