"""What a stack does until it is killed or its disk fails, and the check of the tier afterwards.

`CrashScenario.write` opens a stack with one tier, stores blocks, resets the cache, stores the same keys with other
contents and more than the tier holds, loads some, and opens the tier again. `Progress` notes the steps in memory that
outlives the process. `CrashScenario.verify` opens the same tier and compares every block with that note.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np

import tiered_kv_fs.tier
from tests.support.disk_use import flush_file_system
from tests.support.stacks import block_hashes, forget_memory, manager_of, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import TierError
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv_fs.blocks import TOUCH_INTERVAL_S

BLOCK_BYTES: Final = 4096
JOB_BLOCKS: Final = 4
_JOBS_BEFORE_RESET: Final = 3
_WAIT_S: Final = 30.0
_POLL_S: Final = 0.0005
_COUNTED_S: Final = 15.0
"""A block is gone a moment before it is counted, by a thread that a busy machine may hold up in between."""
_VERSION_OF_NEW = 9


class Progress:
    """How far a writer has come, in memory that forked processes share."""

    _NAMES = ("reset_asked", "reset_held", "newest_stored")

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.clear()

    def clear(self) -> None:
        for name in self._NAMES:
            self.note(name, -1 if name == "newest_stored" else 0)

    def note(self, name: str, value: int = 1) -> None:
        self._numbers[self._NAMES.index(name)] = value

    def as_dict(self) -> dict[str, int]:
        return {name: self._numbers[index] for index, name in enumerate(self._NAMES)}


@dataclass(frozen=True, slots=True)
class Excuses:
    """Failures that the fault of a run explains."""

    damaged: bool = False
    """Blocks that are found may be damaged."""
    one_call: bool = False
    """One call may fail, and cost its block. The writer does not check stored blocks: the check may fail."""
    for_good: bool = False
    """Calls continue to fail. Unreadable blocks may be found again; jobs time out soon, as nothing makes room."""


NOTHING: Final = Excuses()


@dataclass(slots=True)
class Found:
    loaded: int = 0
    answered: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CrashScenario:
    entry: Mapping[str, object]
    tenant: str  # the namespace's; another one for each case that shares a server
    jobs: int  # of `JOB_BLOCKS` blocks, that are stored after the reset
    device: bool = False  # the file system is flushed once amid the run, as kernels do
    occupied_bytes_max: int = 0  # of the tier's directory, at any moment; 0: unlimited

    @property
    def tier(self) -> str:
        return str(self.entry["type"])

    @property
    def path(self) -> Path | None:
        path = self.entry.get("path")
        return Path(str(path)) if path is not None else None

    @property
    def keys(self) -> list[OffloadKey]:
        """Every key that `write` stores."""
        return make_keys((self.jobs + 2) * JOB_BLOCKS, "crash")

    def write(self, progress: Progress, excuses: Excuses = NOTHING) -> None:
        """Run the writer and note its progress; raise if the tier breaks a promise."""
        job_timeout_s = 1.0 if excuses.for_good else 30.0
        try:
            with self.opened(job_timeout_s) as stack:
                writer = _Writer(self, stack, progress, excuses)
                writer.store_and_reset()
                writer.store_anew()
            with self.opened(job_timeout_s) as stack:
                _Writer(self, stack, progress, excuses).go_on()
        except TierError:  # this fault may prevent opening
            pass

    def verify(
        self, progress: Mapping[str, int], excuses: Excuses = NOTHING, *, keeps: bool, accepts_old: bool = False
    ) -> Found:
        """Open the tier that a writer left, and return what is wrong with it.

        With `keeps`, the newest stored job must be found. With `accepts_old`, the reset may be lost.

        Raises:
            TierError: The tier cannot be opened.
        """
        found = Found()
        if not progress["reset_asked"]:
            versions = {0}
        elif progress["reset_held"] and not accepts_old:
            versions = {1}
        else:
            versions = {0, 1}
        with self.opened() as stack:
            loaded = look(stack, self.keys, versions, found, excuses)
            newest = progress["newest_stored"]
            if keeps and newest >= 0:
                missing = set(self.keys[newest * JOB_BLOCKS : (newest + 1) * JOB_BLOCKS]) - loaded.keys()
                if missing:
                    found.problems.append(f"{len(missing)} blocks of the newest job that was stored are lost")
            if len(set(loaded.values())) > 1:
                found.problems.append("blocks of before and after the reset are there together")
            _store_more(stack, found)
        return found

    @contextmanager
    def opened(self, job_timeout_s: float = 30.0) -> Iterator[Stack]:
        # A breaker that opens would hide what the tier does, and so would a lookup that a busy machine makes late.
        patient = {"breaker_failures": 1_000_000, "job_timeout": job_timeout_s, "lookup_timeout": job_timeout_s}
        config = stack_of(
            {**patient, **self.entry},
            block_bytes=BLOCK_BYTES,
            block={"tokens": 16},
            namespace={"model": "crash", "tenant": self.tenant},
        )
        # So small a directory turns over in a second, and blocks that are used meanwhile would outlive the newest job.
        with (
            mock.patch.object(tiered_kv_fs.tier, "_TOUCH_INTERVAL_MIN_S", TOUCH_INTERVAL_S),
            open_stack(config) as stack,
        ):
            yield stack


@dataclass(frozen=True, slots=True)
class _Writer:
    scenario: CrashScenario
    stack: Stack
    progress: Progress
    excuses: Excuses

    def store_and_reset(self) -> None:
        for job in range(_JOBS_BEFORE_RESET):
            self._store(job, version=0)
        self._check(version=0)
        self.progress.note("newest_stored", -1)
        self.progress.note("reset_asked")
        manager_of(self.stack).reset_cache()
        if self.scenario.path is not None:
            for thread in threading.enumerate():
                if thread.name.endswith("-reset"):  # it lives until the reset is on the device
                    thread.join(_WAIT_S)
            self.progress.note("reset_held")
        # The others write a reset down before they store anything.

    def store_anew(self) -> None:
        """Store the same keys with other contents, more than the tier holds, and use some of the older ones."""
        for job in range(self.scenario.jobs):
            self._store(job, version=1)
            self.progress.note("reset_held")
            if self.scenario.device and job == self.scenario.jobs // 3:
                assert self.scenario.path is not None
                flush_file_system(self.scenario.path)
            if job % 4 == 3:
                for key in self.scenario.keys[(job - 3) * JOB_BLOCKS : (job - 1) * JOB_BLOCKS : 2]:
                    content = load(self.stack, key)
                    assert content in (None, block_content(key, BLOCK_BYTES, 1)), f"wrong bytes under {key.hex()}"
        self._check(version=1)

    def go_on(self) -> None:
        self._check(version=1)
        for job in range(self.scenario.jobs, self.scenario.jobs + 2):
            self._store(job, version=1)

    def _store(self, job: int, version: int) -> None:
        keys = self.scenario.keys[job * JOB_BLOCKS : (job + 1) * JOB_BLOCKS]
        put(self.stack, keys, version)
        assert self.stack.flush(_WAIT_S), "a job was not reported"
        if not self.excuses.one_call and all(ask(self.stack, keys)):
            self.progress.note("newest_stored", job)

    def _check(self, version: int) -> None:
        found = Found()
        forget_memory(manager_of(self.stack))
        look(self.stack, self.scenario.keys, {version}, found, self.excuses)
        assert not found.problems, "; ".join(found.problems)


def look(
    stack: Stack, keys: Sequence[OffloadKey], versions: set[int], found: Found, excuses: Excuses
) -> dict[OffloadKey, int]:
    """Load every block that the tier reports; return their versions, and add broken promises to `found`."""
    loaded: dict[OffloadKey, int] = {}
    missing = -int(excuses.one_call)  # a call that fails costs one block: lookups and loads are of one each here
    lost_before = _losses(stack, excuses)
    for key, answer in zip(keys, ask(stack, keys), strict=True):
        if not answer:
            continue
        found.answered += 1
        content = load(stack, key)
        if content is None:
            # It may have been evicted since, or been found damaged: then it is not answered any more, and counted.
            missing += 1
            if not excuses.for_good and _is_phantom(stack, key):
                found.problems.append(f"a phantom: block {key.hex()} is answered and cannot be loaded")
            continue
        version = next((each for each in (0, 1) if content == block_content(key, BLOCK_BYTES, each)), None)
        if version is None:
            found.problems.append(f"WRONG BYTES under {key.hex()}")
        elif version not in versions:
            found.problems.append(f"block {key.hex()} of version {version} where only {versions} may be")
        else:
            loaded[key] = version
            found.loaded += 1
    if not excuses.for_good:
        with suppress(AssertionError):
            wait_until(lambda: _losses(stack, excuses) - lost_before >= missing, _COUNTED_S, pause_s=_POLL_S)
        lost = _losses(stack, excuses) - lost_before
        if lost < missing:
            found.problems.append(f"phantoms: {missing} blocks were answered and did not load, {lost} were removed")
    damaged = count_of(stack.secondary_tiers[0].stats(), "corrupt_blocks_total")
    if damaged and not excuses.damaged:
        found.problems.append(f"phantoms: {damaged} blocks were answered and are damaged")
    return loaded


def _store_more(stack: Stack, found: Found) -> None:
    for attempt in range(3):  # a store waits for room for a limited time: a machine under load may lose some blocks
        keys = make_keys(JOB_BLOCKS, f"after the crash {attempt}")
        if put(stack, keys, _VERSION_OF_NEW) != JOB_BLOCKS or not stack.flush(_WAIT_S):
            found.problems.append("new blocks are not taken in time")
            return
        missing = ask(stack, keys).count(False)
        if not missing:
            break
    if missing:
        found.problems.append(f"{missing} of {JOB_BLOCKS} new blocks are not stored: {stack.counters()}")
    forget_memory(manager_of(stack))
    for key, answer in zip(keys, ask(stack, keys), strict=True):
        content = load(stack, key) if answer else None
        if content not in (None, block_content(key, BLOCK_BYTES, _VERSION_OF_NEW)):
            found.problems.append("WRONG BYTES in a block that was stored afterwards")
        elif answer and content is None and _is_phantom(stack, key):
            found.problems.append("a block that was stored afterwards is answered and does not load")


def _losses(stack: Stack, excuses: Excuses) -> int:
    """Return how many blocks the tier has counted as removed; damaged blocks too if they are excused."""
    tier = stack.secondary_tiers[0]
    stats = tier.stats()
    corrupt = count_of(stats, "corrupt_blocks_total") if excuses.damaged else 0
    return count_of(stats, "deleted_blocks_total" if tier.tier_type == "s3" else "evicted_blocks_total") + corrupt


def _is_phantom(stack: Stack, key: OffloadKey) -> bool:
    """Return whether a block is found, fails to load, and is found again. An evicted block is not found again."""
    return ask(stack, [key]) == [True] and load(stack, key) is None and ask(stack, [key]) == [True]


def put(stack: Stack, keys: Sequence[OffloadKey], version: int) -> int:
    """Store `keys` with the contents of a version; return how many the stack took."""
    rows = np.frombuffer(b"".join(block_content(key, BLOCK_BYTES, version) for key in keys), np.uint8)
    return stack.put(block_hashes(keys), rows.reshape(-1, BLOCK_BYTES), timeout=_WAIT_S)


def load(stack: Stack, key: OffloadKey) -> bytes | None:
    out = np.zeros((1, BLOCK_BYTES), np.uint8)
    return out.tobytes() if stack.get(block_hashes([key]), out, timeout=_WAIT_S) else None


def ask(stack: Stack, keys: Sequence[OffloadKey]) -> list[bool]:
    """Return the lookup results of the stack's one tier; the manager must be idle."""
    tier = stack.secondary_tiers[0]
    context = ReqContext(f"ask-{time.monotonic_ns()}")
    tier.on_new_request(context)
    answers: Sequence[bool | None] = [None]

    def are_known() -> bool:
        nonlocal answers
        answers = tier.lookup_many(keys, context)
        tier.on_schedule_end()
        return None not in answers

    wait_until(are_known, _WAIT_S, pause_s=_POLL_S, what="the answer to a lookup")
    tier.on_request_finished(context)
    return [bool(answer) for answer in answers]
