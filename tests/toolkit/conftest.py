"""A blocking and an asyncio tier over a dictionary, with methods that a test controls."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import TierRig
from tiered_kv.tiering.base import JobId, TierSpec
from tiered_kv.toolkit import BlockingTier, Outcome
from tiered_kv.toolkit.aio import AsyncTier

BLOCK_BYTES = 256
PATIENCE_S = 60.0
"""A generous limit, which only a test that fails reaches."""

Before = Callable[[str, Sequence[OffloadKey]], object]
"""Called with the operation and its keys at the start of every author's method; awaited if it returns an awaitable."""


class Author:
    """What both tiers share."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.before: Before = lambda operation, keys: None
        self.returned: object = self  # what loads and lookups return; the tier itself: the right answer
        self.kept: dict[OffloadKey, bytes] = {}
        self.parts: list[tuple[str, int]] = []
        self.closed = threading.Event()

    @property
    def started(self) -> list[str]:
        return [operation for operation, _ in self.parts]

    def enter(self, operation: str, keys: Sequence[OffloadKey]) -> object:
        self.parts.append((operation, len(keys)))
        return self.before(operation, keys)

    def put(self, kept: dict[OffloadKey, bytes], keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        for key, block in zip(keys, blocks, strict=True):
            kept.setdefault(key, bytes(block))
        return Outcome()

    def get(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Any:
        if self.returned is not self:
            return self.returned
        for key, block in zip(keys, blocks, strict=True):
            if key in self.kept:
                block[:] = self.kept[key]
        return Outcome([key for key in keys if key in self.kept], "absent")

    def find(self, keys: Sequence[OffloadKey]) -> Any:
        return [key in self.kept for key in keys] if self.returned is self else self.returned


class DictTier(Author, BlockingTier):
    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        self.enter("store", keys)
        return self.put(self.kept, keys, blocks)

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        self.enter("load", keys)
        return self.get(keys, blocks)  # type: ignore[no-any-return]  # what the test set

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self.enter("lookup", keys)
        return self.find(keys)  # type: ignore[no-any-return]  # what the test set

    def close(self) -> None:
        self.closed.set()


class AsyncDictTier(Author, AsyncTier):
    async def _entered(self, operation: str, keys: Sequence[OffloadKey]) -> None:
        await asyncio.sleep(0)
        result = self.enter(operation, keys)
        if inspect.isawaitable(result):
            await result

    async def open(self) -> None:
        await self._entered("open", ())

    async def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        await self._entered("store", keys)
        kept = self.kept  # a reset on the scheduler's thread puts another into its place
        return self.put(kept if self.part_epoch == self.epoch else {}, keys, blocks)

    async def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        await self._entered("load", keys)
        return self.get(keys, blocks)  # type: ignore[no-any-return]  # what the test set

    async def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await self._entered("lookup", keys)
        return self.find(keys)  # type: ignore[no-any-return]  # what the test set

    async def close(self) -> None:
        self.closed.set()

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self.kept = {}
        return True


class Stage:
    """A tier on a rig, and a gate that its author's methods can wait for."""

    def __init__(self, kind: Callable[..., Any], part_blocks: int = 2, **settings: float) -> None:
        chosen = {"lookup_timeout_s": PATIENCE_S, "shutdown_timeout_s": PATIENCE_S, **settings}

        def open_tier(spec: TierSpec, view: memoryview) -> Any:
            return kind(spec, view, "dict", part_bytes=part_blocks * BLOCK_BYTES, **chosen)

        self.rig = TierRig(open_tier, num_blocks=128, block_bytes=BLOCK_BYTES, wait_s=PATIENCE_S)
        self.tier: Any = self.rig.tier  # of `kind`
        self.gate = threading.Event()

    def hold(self, *operations: str) -> None:
        """Hold the author's methods, all or those named, until the gate opens."""

        def before(operation: str, keys: Sequence[OffloadKey]) -> object:
            return self.wait() if not operations or operation in operations else None

        self.tier.before = before

    def wait(self) -> bool | Awaitable[None]:
        return self._wait_on_loop() if isinstance(self.tier, AsyncTier) else self.gate.wait(PATIENCE_S)

    async def _wait_on_loop(self) -> None:
        while not self.gate.is_set():
            await asyncio.sleep(0.001)

    def submit_load_that_begins(self, keys: Sequence[OffloadKey], has_begun: threading.Event | None = None) -> JobId:
        """Return after the deadline of a load that has begun before it: with longer deadlines on a slow machine."""
        loads = self.tier.started.count("load")
        for deadline_s in (0.05, 0.5, 5.0, PATIENCE_S):
            deadline = time.monotonic() + deadline_s
            job = self.rig.submit_load(keys, deadline=deadline)
            while not (has_begun.wait(0.001) if has_begun else self.tier.started.count("load") > loads):
                if not self.rig.poll():
                    break
            else:
                time.sleep(max(0.0, deadline - time.monotonic()))
                return job
        raise AssertionError("no load begins")

    def close(self) -> None:
        self.gate.set()
        self.rig.close()
        assert not self.tier.parts or self.tier.closed.wait(PATIENCE_S)


MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage() -> Iterator[MakeStage]:
    stages: list[Stage] = []

    def make(kind: Callable[..., Any], **options: float) -> Stage:
        stages.append(Stage(kind, **options))  # type: ignore[arg-type]  # counts and seconds
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()
