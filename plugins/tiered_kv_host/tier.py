"""The secondary tier over a host's server: it copies blocks to and from the server's rows, which it has mapped.

A `GuardedTier` calls it on the scheduler's thread, and the toolkit's workers copy blocks. While the server is away,
every lookup is a miss, and every job fails. A row is read only while the server leases it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.reasons import Reason
from tiered_kv.server.attach import Attachment, HostLink
from tiered_kv.server.connect import AWAIT_S, START_A_SERVER, ProgramManager, names_of
from tiered_kv.server.idle import IdlePoll
from tiered_kv.server.protocol import Hello
from tiered_kv.stack.calls import PAUSE_MIN_S, pause
from tiered_kv.stack.facade import rows_of
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit import BlockingTier, Outcome
from tiered_kv.toolkit.touches import Touches
from tiered_kv_host.settings import HostTierSettings

_THREADS: Final = 3  # workers, each with one part of a job at a time
_PART_BYTES: Final = 16 << 20  # bytes of a part
_PART_BLOCKS_MAX: Final = 256
"""Limit of the server's rows that one part leases or writes at a time."""
_LEASE_SHARE: Final = 8
"""A part leases at most the rows divided by this. The leases of three parts stay below the limit of a session."""
_VECTORS_MAX: Final = 1024  # IOV_MAX of Linux
_TOUCH_S: Final = 2.0  # how often the server learns that a block is used in this process's memory
_TOUCH_TIMEOUT_S: Final = 0.5
_AWAY: Final = Reason.UNANSWERED
"""The reason while the server is away. The breaker ignores it: the tier attaches again by itself."""

_libc = ctypes.CDLL(None)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _vectors = ctypes.c_void_p, ctypes.c_ulong
    _call.argtypes = [ctypes.c_int, *_vectors, *_vectors, ctypes.c_ulong]
    _call.restype = ctypes.c_ssize_t


class HostTier(BlockingTier):
    """Keeps blocks in the cache of a host's server. While the server is away, every block is a miss.

    Worker threads share the connection. They hold the lock for the messages, and not while they copy.

    Raises:
        ConfigError: The server refuses this process.
    """

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: HostTierSettings
    ) -> None:
        shape = primary_kv_view.shape
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            threads=_THREADS,
            part_bytes=min(_PART_BYTES, _PART_BLOCKS_MAX * (shape[1] if shape else 1)),
            lookup_timeout_s=settings.lookup_timeout,
            lookup_thread=True,
        )
        self._socket = settings.socket
        self._region: PrimaryRegion | None = None  # the server's rows; of the last server, while none answers
        self._lock = threading.Lock()  # guards the manager and the region; no thread holds it while it copies
        self._numbers = itertools.count()
        """Numbers of the requests at the server."""
        name = f"{self.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        attachment = Attachment(settings.socket, Hello(name, "scheduler", settings=_told(self.tier_spec)))
        attachment.connect()
        self._manager = ProgramManager(attachment, on_attached=self._attached)
        self._idle_poll = IdlePoll(self._manager, self._lock)
        self._touches = Touches(self._note_uses, f"tiered-kv-{self.name}-touches", _TOUCH_S)

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        names = names_of(keys)
        sources = dict(zip(names, blocks, strict=True))
        stored, batch, pause_s = 0, len(names), PAUSE_MIN_S
        with self._request(self.part_epoch) as context:
            while stored < len(names):
                with self._lock:
                    self._manager.poll()
                    link = self._manager.link
                    if link is None or self._manager.stores_nothing_of(context):
                        return Outcome(keys[:stored], Reason.RESET if self._manager.is_outdated(context) else _AWAY)
                    end = stored + min(batch, link.welcome.grant_max)
                    output = self._manager.prepare_store(names[stored:end], context)
                if output is not None:
                    self._copy_to(output.keys_to_store, rows_of(output.store_spec), sources, context)
                    stored, batch, pause_s = end, len(names), PAUSE_MIN_S
                elif batch > 1:  # fewer rows have been granted so far
                    batch //= 2
                elif self._may_wait:
                    pause_s = pause(pause_s)
                else:
                    return Outcome(keys[:stored], Reason.NO_SPACE)
        return Outcome()

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        names = names_of(keys)
        loaded: list[OffloadKey] = []
        waiting = list(range(len(keys)))
        with self._request(self.part_epoch) as context:
            while waiting:
                with self._lock:
                    self._manager.poll()
                    link = self._manager.link
                    asked = waiting if link is None else waiting[: max(1, link.welcome.rows // _LEASE_SHARE)]
                    answers = self._manager.lookup_many([names[place] for place in asked], context)
                    ready = [place for place, answer in zip(asked, answers, strict=True) if answer]
                    found = [names[place] for place in ready]
                    rows = rows_of(self._manager.prepare_load(found, context)) if ready else []
                    self._manager.on_schedule_end()
                left = [place for place, answer in zip(asked, answers, strict=True) if answer is None]
                waiting = left + waiting[len(asked) :]
                if ready:
                    self._copy_from(found, rows, [blocks[place] for place in ready], context)
                    loaded += [keys[place] for place in ready]
                elif left and not self._may_wait:
                    return Outcome(loaded, Reason.TIMEOUT)
                elif left:
                    self._manager.await_message(AWAIT_S)
        if not self._manager.is_attached:
            return Outcome(loaded, _AWAY)
        found_keys = set(loaded)
        # The server also answers that a block is missing if it has no room for a lease or for a promotion.
        is_there = any(self.contains_blocks([key for key in keys if key not in found_keys]))
        return Outcome(loaded, Reason.NO_SPACE if is_there else Reason.ABSENT)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        names = names_of(keys)
        with self._request() as context:
            while True:
                with self._lock:
                    self._manager.poll()
                    answers = self._manager.contains_many(names, context)
                    self._manager.on_schedule_end()
                if None not in answers or not self._may_wait:
                    return [bool(answer) for answer in answers]
                self._manager.await_message(AWAIT_S)

    def _note_uses(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Report uses to the server, which counts them in its memory and its tiers; return the blocks that it lacks.

        A restarted server has lost its memory. Its engines would compute blocks that this process still has.
        """
        link = self._manager.link
        if link is None:
            return ()
        with self._request() as context, self._lock:
            self._manager.ask_known(lambda: names_of(keys), context)
        answers = self.contains_blocks(keys)
        is_same = self._manager.link is link  # if not, the server was away, and did not answer
        return [key for key, is_there in zip(keys, answers, strict=True) if not is_there] if is_same else ()

    def close(self) -> None:
        self._idle_poll.stop()
        with self._lock:
            self._manager.shutdown()

    # The scheduler's thread.

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._touches.note(keys)

    def take_absent(self) -> list[OffloadKey]:
        return self._touches.take_absent()

    def shutdown(self) -> None:
        self._touches.stop(_TOUCH_TIMEOUT_S)
        super().shutdown()

    def reset_cache(self) -> bool:
        self._touches.clear()
        with self._lock:
            self.begin_epoch()
            self._manager.reset_cache()
        return True

    def stats(self) -> Mapping[str, Any]:
        return {**super().stats(), "is_attached": int(self._manager.is_attached)}

    def describe(self) -> Mapping[str, object]:
        described = {"medium": "host", "socket": self._socket, "is_attached": self._manager.is_attached}
        if self._manager.link is None:
            described["warning"] = f"no server answers at {self._socket}: {START_A_SERVER}"
        return described

    # Both kinds of threads.

    def _copy_to(
        self,
        names: Sequence[OffloadKey],
        rows: Sequence[int],
        sources: Mapping[OffloadKey, memoryview],
        context: ReqContext,
    ) -> None:
        """Copy blocks into the rows of a prepared store, and end the store."""
        is_copied = False
        try:
            copy_blocks(self._rows, rows, [sources[name] for name in names], to_rows=True)
            is_copied = True
        finally:
            with self._lock:
                self._manager.complete_store(names, context, is_copied)
                self._manager.on_schedule_end()

    def _copy_from(
        self, names: Sequence[OffloadKey], rows: Sequence[int], targets: Sequence[memoryview], context: ReqContext
    ) -> None:
        """Copy blocks from the rows of a prepared load, and end the load."""
        try:
            copy_blocks(self._rows, rows, targets, to_rows=False)
        finally:
            with self._lock:
                self._manager.complete_load(names, context)
                self._manager.on_schedule_end()

    @property
    def _rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The server's rows. They stay mapped from the preparation of a copy to its end."""
        assert self._region is not None, "rows come with a connection"
        return self._region.array

    @contextmanager
    def _request(self, epoch: int | None = None) -> Iterator[ReqContext]:
        """Open a request at the server, and end it with the block. It is of `epoch`, by default the current one."""
        context = ReqContext(f"{self.name}-{next(self._numbers)}")
        with self._lock:
            self._manager.poll()
            self._manager.on_new_request(context)
            if epoch not in (None, self.epoch):
                self._manager.outdate(context)
        try:
            yield context
        finally:
            with self._lock:
                self._manager.on_request_finished(context)
                self._manager.on_schedule_end()

    @property
    def _may_wait(self) -> bool:
        return not self._is_shut_down and time.monotonic() < self.part_deadline

    def _attached(self, link: HostLink) -> None:
        """Locked. Use the rows of a new server. No copy runs now."""
        self._region = link.region


def copy_blocks(
    array: np.ndarray[Any, np.dtype[np.uint8]], rows: Sequence[int], blocks: Sequence[memoryview], *, to_rows: bool
) -> None:
    """Copy blocks to rows of an array, or from them, by process_vm_readv(2) within this process.

    Python would copy one block after another, and wait for the interpreter's lock after each: up to 5 ms beside an
    engine that computes. One call copies up to 1,024 blocks, and other threads run meanwhile. The call's remote side is
    the blocks' memory: it has huge pages, which the kernel finds faster.
    """
    views = [np.frombuffer(block, np.uint8) for block in blocks]
    assert all(len(view) == array.shape[1] for view in views), "the server has rows of another size"
    of_rows, of_blocks = np.full((2, len(rows), 2), array.shape[1], np.uint64)  # addresses and lengths
    of_rows[:, 0] = array.ctypes.data + np.array(rows, np.uint64) * array.shape[1]
    of_blocks[:, 0] = [view.__array_interface__["data"][0] for view in views]
    call = _libc.process_vm_readv if to_rows else _libc.process_vm_writev
    for at in range(0, len(rows), _VECTORS_MAX):
        end = min(at + _VECTORS_MAX, len(rows))
        vector = (of_rows[at:end].ctypes.data, end - at, of_blocks[at:end].ctypes.data, end - at)
        if call(os.getpid(), *vector, 0) == (end - at) * array.shape[1]:
            continue
        for row, view in zip(rows[at:end], views[at:end], strict=True):  # a container may forbid the call
            if to_rows:
                array[row] = view
            else:
                view[:] = array[row]


def _told(spec: TierSpec) -> dict[str, Any]:  # Any: JSON
    """Return a spec's namespace and size of a block, in the form of a stack's configuration file."""
    described = spec.namespace
    namespace = described.get("namespace")
    if isinstance(namespace, Mapping) and "block" in described:
        # These fields leave out how the model is split, where no byte depends on the split.
        return {"namespace": {"parallel": {"same_bytes_on_every_rank": True}, **namespace}, "block": described["block"]}
    extra = {"namespace": spec.namespace_digest.hex()}
    return {"namespace": {"model": "unknown", "extra": extra}, "block": {"bytes": spec.block_bytes}}
