"""Secondary tiers over a host's memory: contains, store and load, from any thread."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import tier_settings
from tiered_kv.counters import Counters
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.direct.tasks import Done, Task, TierQueue
from tiered_kv.errors import ConfigError, ShutdownError
from tiered_kv.observe.notices import Notices
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.guarded import GuardedTier

_log = logging.getLogger(__name__)

IN_FLIGHT_BYTES_MAX: Final = 256 << 20
"""The default of a tier's budgets, if a quarter of the memory is more: what waits for its turn does not expire."""
_KEY_BYTES_MIN = 4
_TICK_S = 0.02
"""How often deadlines are looked at while something is open; whatever ends wakes the thread at once."""
_IDLE_TICK_S = 0.5
_SHUTDOWN_TIMEOUT_S = 6.0


class DirectTiers:
    """Secondary tiers without a primary tier: blocks go from a host's memory to the tiers, and back into it.

    `contains`, `store` and `load` may be called by any thread and return at once. Each calls its `on_done` once, on the
    tiers' own thread, with an answer for each key. A callback returns soon: nothing else goes on meanwhile. One that
    raises is counted and logged.

    A task is reported only when no tier touches its memory any more. Until then the host leaves the blocks of a store
    as they are, and does not use those of a load. That is so after a deadline too: a task with a transfer that hangs
    is not reported before the transfer has ended.

    Nothing is dropped because there is too much of it: blocks over a tier's budgets wait. What bounds the queue is the
    memory, of which each waiting block takes a part. A budget is by default a quarter of it, and at most 256 MiB.

    Args:
        memory: A writable, contiguous buffer, or (address, bytes). It stays mapped until `close` has returned True.
        block_bytes: Bytes of a block.
        tiers: Entries as in a stack's `secondary`, in the order in which they are searched.
        namespace: All that must agree, besides the sizes, for blocks to be interchangeable.
        block_tokens: Tokens of a block, a part of the namespace's identity.
        on_removed: Called on the tiers' thread with a tier's name and blocks that it does not have any more, because
            they were evicted or found damaged; not with those that a `reset` removes. A tier with a `name_key` reports
            none.

    Raises:
        ValueError: The memory cannot be used.
        ConfigError, TierError: A tier cannot be opened, or cannot be used over a host's memory.
    """

    def __init__(
        self,
        memory: Any,  # Any: whatever has the buffer protocol, or a pair
        *,
        block_bytes: int,
        tiers: Sequence[Mapping[str, object] | TierSettings],
        namespace: Namespace,
        block_tokens: int = 1,
        on_removed: Callable[[str, Sequence[OffloadKey]], None] | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self._memory = _bytes_of(memory, block_bytes)
        self._size = len(self._memory)
        self._on_removed = on_removed
        self._counters = Counters(("callback_errors_total",), ("tasks_total",))
        self.notices = Notices()
        self._wake = threading.Event()
        self._messages: deque[Callable[[], None]] = deque()
        self._numbers = count()
        self._pid = os.getpid()
        self._post_lock = threading.Lock()  # held for two assignments; nothing is posted after the close
        self._close_by_s: float | None = None
        self._is_shut_down = threading.Event()
        # The tiers' thread owns the rest.
        self._open_tasks: dict[Task, None] = {}
        self._lookups: dict[Task, None] = {}
        identity = namespace.identify(block_bytes=block_bytes, block_tokens=block_tokens)
        spec = partial(
            TierSpec,
            block_bytes=block_bytes,
            namespace_digest=identity.digest,
            namespace=identity.described,
            wants_events=on_removed is not None,
            memory=self._memory,
            on_finished=self._wake.set,
        )
        self._queues: list[TierQueue] = []
        with ExitStack() as undo:
            for settings in map(tier_settings, tiers):
                self._open(settings, spec(settings.name), undo)
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-direct", daemon=True)
        self._thread.start()

    def _open(self, settings: TierSettings, spec: TierSpec, undo: ExitStack) -> None:
        if any(queue.guarded.name == settings.name for queue in self._queues):
            raise ConfigError(f"two tiers are called '{settings.name}'; give one of them another name")
        rows = self._size // self.block_bytes
        view = self._memory[: rows * self.block_bytes].cast("B", (rows, self.block_bytes))
        tier = SecondaryTierFactory.create(spec, view, settings)
        if not tier.takes_offsets:
            tier.shutdown()
            raise ConfigError(
                f"tier '{settings.name}' cannot be used over a host's memory: its class knows no byte offsets; "
                "use it in a stack, or build it on tiered_kv.toolkit"
            )
        budget_bytes = 4 * min(self._size // 4, IN_FLIGHT_BYTES_MAX)
        guarded = GuardedTier(
            tier,
            settings,
            self.block_bytes,
            budget_bytes,
            time.monotonic,
            self.notices,
            len(self._queues) + 1,
            tells_events=spec.wants_events,
        )
        undo.callback(guarded.call, "shutdown")
        self._queues.append(TierQueue(guarded, partial(self._load_below, len(self._queues) + 1)))

    # Any thread.

    def contains(self, keys: Sequence[OffloadKey], on_done: Done) -> None:
        """Ask which blocks the tiers have; a tier that does not answer within its `lookup_timeout` has none.

        Raises:
            ValueError: A key is none.
            ShutdownError: The tiers are closed, or were opened before a fork by another process.
        """
        self._post(self._begin_lookup, self._task("contains", keys, on_done))

    def store(self, keys: Sequence[OffloadKey], offsets: Sequence[int], on_done: Done) -> None:
        """Offer blocks to every tier.

        The answer for a block is True if a tier has it now, or does not admit it yet (`admit_after`).

        Args:
            keys: The blocks.
            offsets: Where each begins in the memory, in bytes, at any alignment.
            on_done: Called with an answer for each key.

        Raises:
            ValueError: The arguments do not fit each other, or the memory.
            ShutdownError: As `contains`.
        """
        self._post(self._begin_store, self._task("store", keys, on_done, offsets))

    def load(self, keys: Sequence[OffloadKey], offsets: Sequence[int], on_done: Done) -> None:
        """Load blocks from the first tier that has them; where one fails, the next is tried.

        A block whose answer is False has undefined bytes. Arguments and errors are those of `store`. No two blocks
        may overlap.
        """
        task = self._task("load", keys, on_done, offsets)
        places = np.sort(np.asarray([block.block_id for block in task.blocks], dtype=np.int64))
        if (np.diff(places) < self.block_bytes).any():
            raise ValueError(f"two of the {len(keys)} blocks to load overlap: they are {self.block_bytes} bytes each")
        self._post(self._load_below, 0, task, task.blocks)

    def wait(
        self, method: Literal["contains", "store", "load"], *args: Any, timeout_s: float | None = None
    ) -> list[bool]:
        """Call a method with `args` but for its callback, and return the answers; for threads that may block.

        Raises:
            TimeoutError: They did not come in time. The task goes on, and uses its memory.
            RuntimeError: A callback waits for what its own thread has to do.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback cannot wait: it runs on the thread that it would wait for")
        came = threading.Event()
        told: list[list[bool]] = []

        def note(answers: list[bool]) -> None:
            told.append(answers)
            came.set()

        getattr(self, method)(*args, note)
        if not came.wait(timeout_s):
            raise TimeoutError(f"{method} of {len(args[0])} blocks has not ended after {timeout_s} s")
        return told[0]

    def reset(self) -> None:
        """Forget every block: none that was stored, or handed over, before this call is found by a later one.

        A tier that cannot reset is not used any more.
        """
        self._post(self._reset)

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return the counts of each tier, as those of a stack, and what concerns no tier under "direct"."""
        counted = {queue.guarded.name: queue.guarded.counted() for queue in self._queues}
        return {"direct": {**self._counters.snapshot(), "open_tasks": len(self._open_tasks)}, **counted}

    def status(self) -> dict[str, dict[str, object]]:
        """Return for each tier whether it is used: `breaker`, `is_disabled`, `jobs_in_flight`, `waiting_blocks`."""
        return {
            queue.guarded.name: {
                "breaker": queue.guarded.breaker.state.name.lower(),
                "is_disabled": queue.guarded.is_disabled,
                "jobs_in_flight": len(queue.guarded.jobs),
                "waiting_blocks": queue.waiting_blocks,
            }
            for queue in self._queues
        }

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse further calls, wait for transfers up to `timeout_s`, then close the tiers, each bounded in time.

        What waits for a budget is reported with False. May be called again.

        Returns:
            Whether no tier touches the memory any more. If not, it must stay mapped; a later call says more.
        """
        if os.getpid() != self._pid:
            return True
        with self._post_lock:
            if self._close_by_s is None:
                self._close_by_s = time.monotonic() + timeout_s
        self._wake.set()
        self._is_shut_down.wait(timeout_s + _SHUTDOWN_TIMEOUT_S)
        self._thread.join(0.05 if self._is_idle else 0.0)
        return not self._thread.is_alive()

    def __enter__(self) -> DirectTiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _task(self, kind: str, keys: Sequence[OffloadKey], on_done: Done, offsets: Sequence[int] | None = None) -> Task:
        for key in keys:
            if not isinstance(key, bytes) or len(key) < _KEY_BYTES_MIN:
                raise ValueError(f"a key is a block hash and a 4-byte group index, by make_offload_key; found {key!r}")
        context = ReqContext(req_id=f"direct-{next(self._numbers)}")
        task = Task(list(keys), on_done, context)
        if offsets is not None:
            task.blocks = self._blocks(task.keys, offsets)
        self._counters.add("tasks_total", kind)
        return task

    def _blocks(self, keys: Sequence[OffloadKey], offsets: Sequence[int]) -> list[CPUBlock]:
        starts = np.asarray(offsets) if len(offsets) else np.zeros(0, dtype=np.int64)
        if starts.shape != (len(keys),) or starts.dtype.kind not in "iu":
            raise ValueError(
                f"{len(keys)} keys need as many offsets, all integers; found {starts.dtype} of {starts.shape}"
            )
        last = self._size - self.block_bytes
        if len(starts) and (starts.min() < 0 or starts.max() > last):
            raise ValueError(
                f"blocks of {self.block_bytes} bytes in {self._size} bytes begin at 0 to {last}; "
                f"found {starts.min()} to {starts.max()}"
            )
        blocks = []
        for position, (key, start) in enumerate(zip(keys, starts.tolist(), strict=True)):
            block = CPUBlock(start)
            block.key, block.position = key, position
            blocks.append(block)
        return blocks

    def _post(self, message: Callable[..., None], *args: object) -> None:
        if os.getpid() != self._pid:
            raise ShutdownError(f"the tiers belong to process {self._pid}; open others after a fork")
        with self._post_lock:
            if self._close_by_s is not None:
                raise ShutdownError("the tiers are closed")
            self._messages.append(partial(message, *args))
        self._wake.set()

    # The tiers' thread.

    @property
    def _is_idle(self) -> bool:
        return all(queue.is_idle for queue in self._queues)

    def _run(self) -> None:
        while True:
            self._wake.wait(_TICK_S if self._open_tasks else _IDLE_TICK_S)
            self._wake.clear()
            now_s, is_closing = time.monotonic(), self._close_by_s is not None
            self._step(now_s)
            if is_closing:
                self._end(now_s)
                if self._is_shut_down.is_set() and self._is_idle and not self._open_tasks:
                    break
        self._memory.release()

    def _step(self, now_s: float) -> None:
        while self._messages:
            self._messages.popleft()()
        for queue in self._queues:
            queue.collect(now_s)
        for queue in self._queues:
            queue.submit()
        self._ask(now_s)
        for queue in self._queues:
            queue.guarded.call("on_schedule_end")
            queue.guarded.tick(now_s)
        for task in [task for task in self._open_tasks if not task.pieces]:
            del self._open_tasks[task]
            for queue in self._queues:
                queue.guarded.call("on_request_finished", task.context)
            self._tell(task.on_done, task.answers)
        if self._on_removed is not None:
            for queue in self._queues:
                events = queue.guarded.observer.take_events()
                if keys := [key for event in events if event.removed for key in event.keys]:
                    self._tell(self._on_removed, queue.guarded.name, keys)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except BaseException:  # SystemExit too: the thread goes on
            self._counters.add("callback_errors_total")
            if self._counters["callback_errors_total"] == 1:
                _log.exception("a callback raised; further ones are only counted")

    def _begin_store(self, task: Task) -> None:
        self._open_tasks[task] = None
        for queue in self._queues if task.blocks else ():
            queue.add(task, task.blocks, is_load=False)

    def _load_below(self, level: int, task: Task, blocks: list[CPUBlock]) -> None:
        self._open_tasks[task] = None
        if level < len(self._queues) and blocks:
            self._queues[level].add(task, blocks, is_load=True)

    def _begin_lookup(self, task: Task) -> None:
        self._open_tasks[task] = None
        task.pieces = 1
        task.asking = [list(range(len(task.keys))), *([] for _ in self._queues[1:]), []]
        task.until_s = [0.0] * len(self._queues)
        self._lookups[task] = None

    def _ask(self, now_s: float) -> None:
        for task in list(self._lookups):
            for level, queue in enumerate(self._queues):
                if task.asking[level]:
                    self._ask_tier(task, level, queue.guarded, now_s)
            if not any(task.asking[:-1]):
                del self._lookups[task]
                task.pieces = 0

    def _ask_tier(self, task: Task, level: int, guarded: GuardedTier, now_s: float) -> None:
        places, task.asking[level] = task.asking[level], []
        answers = [False] * len(places)
        if guarded.is_searched:
            told = guarded.call("lookup_many", [task.keys[place] for place in places], task.context)
            if isinstance(told, list) and len(told) == len(places):
                answers = told
            else:
                guarded.breaker.fail(now_s)
        timeout_s = guarded.settings.lookup_timeout
        task.until_s[level] = task.until_s[level] or now_s + timeout_s + _TICK_S  # the tier itself gives up before
        for place, answer in zip(places, answers, strict=True):
            if answer:
                task.answers[place] = True
            elif answer is None and now_s < task.until_s[level]:
                task.asking[level].append(place)
            else:
                task.asking[level + 1].append(place)

    def _reset(self) -> None:
        for queue in self._queues:
            queue.drop_waiting()
            queue.guarded.reset_cache()

    def _end(self, now_s: float) -> None:
        """Give up what waits; close the tiers when nothing is in flight any more, or the time is over."""
        for queue in self._queues:
            queue.drop_waiting()
        for task in self._lookups:
            task.pieces = 0
        self._lookups.clear()
        assert self._close_by_s is not None
        if not self._is_shut_down.is_set() and (self._is_idle or now_s >= self._close_by_s):
            for queue in self._queues:
                queue.guarded.call("shutdown")
            self._is_shut_down.set()


def _bytes_of(memory: Any, block_bytes: int) -> memoryview:  # Any: as in `DirectTiers`
    """Return a host's memory as bytes.

    Raises:
        ValueError: It is no writable, contiguous buffer, or does not hold one block.
    """
    if isinstance(memory, tuple):
        address, size = memory
        memory = (ctypes.c_ubyte * size).from_address(address)
    try:
        view = memoryview(memory)
    except TypeError:
        raise ValueError(f"the memory must be a buffer, or (address, bytes); found {type(memory).__name__}") from None
    if view.readonly or not view.c_contiguous:
        raise ValueError("the memory must be writable and contiguous")
    if not 0 < block_bytes <= view.nbytes:
        raise ValueError(f"a block of {block_bytes} bytes does not fit into memory of {view.nbytes} bytes")
    return view.cast("B")
