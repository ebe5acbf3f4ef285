"""What a stack does until it is killed or its disk fails, and the look at what is there afterwards.

`CrashScenario.write` opens a stack with one tier, stores blocks, resets the cache, stores the same keys with other
contents and more than the tier holds, loads some in between, closes, opens again and goes on. How far it came is noted
in memory that outlives it. `CrashScenario.verify` opens the same tier and holds every block that is found there against
that note.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.disk_use import bucket_bytes, flush_file_system, occupied_bytes
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.namespace import Namespace
from tiered_kv.counters import count_of
from tiered_kv.errors import TierError
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.rig import block_content, make_keys

BLOCK_BYTES: Final = 4096
JOB_BLOCKS: Final = 4
JOBS_BEFORE_RESET: Final = 3
_MODEL: Final = "crash"
_PRIMARY_BLOCKS: Final = 16
_WAIT_S: Final = 30.0
_POLL_S: Final = 0.0005
_COUNTED_S: Final = 15.0
"""A block is gone a moment before it is counted, by a thread that a busy machine may hold up in between."""
_VERSION_OF_NEW = 9
_EVICTIONS: Final = {
    "nvme": "evicted_blocks_total",
    "fs": "evicted_blocks_total",
    "redis": "evicted_blocks_total",
    "s3": "deleted_blocks_total",
}
"""Each tier's counter of blocks that it gave up to make room."""


class Progress:
    """How far a writer has come, in memory that it shares with the process that it was forked from."""

    _FIELDS = struct.Struct("<qqqqqq")
    _NAMES = ("reset_asked", "reset_held", "jobs_stored", "newest_stored", "refused", "finished")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._FIELDS.pack_into(self._memory, 0, 0, 0, 0, -1, 0, 0)

    def note(self, name: str, value: int = 1) -> None:
        """Note something."""
        struct.pack_into("<q", self._memory, 8 * self._NAMES.index(name), value)

    def __getitem__(self, name: str) -> int:
        found: int = self._FIELDS.unpack_from(self._memory)[self._NAMES.index(name)]
        return found

    def as_dict(self) -> dict[str, int]:
        """Return all of it."""
        return {name: self[name] for name in self._NAMES}


@dataclass(slots=True)
class Found:
    """What a look at a tier brought."""

    loaded: int = 0
    answered: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CrashScenario:
    """One tier, and what is done with it.

    Args:
        entry: The tier's YAML entry.
        tenant: The namespace's; another one for each case that shares a server.
        jobs: How many jobs of `JOB_BLOCKS` blocks are stored after the reset.
        device: Whether what is on the device counts: the file system is flushed once amid the run, as the kernel does
            from time to time, and a reset has to be there to have been held.
        store_s_max: For how long new blocks may be refused after the crash, because of what the writer still holds.
            None where there is no time to wait for that: `Found.refused` tells whether they were.
    """

    entry: Mapping[str, object]
    tenant: str
    jobs: int
    device: bool = False
    store_s_max: float | None = 0.0

    @property
    def path(self) -> Path | None:
        """The tier's directory, if it has one."""
        path = self.entry.get("path")
        return Path(str(path)) if path is not None else None

    @property
    def occupied_bytes(self) -> int:
        """What is stored of that which a capacity bounds: the tier's directory, or the blocks in its bucket."""
        if self.path is not None:
            return occupied_bytes(self.path)
        if self.entry["type"] != "s3":
            raise TypeError(f"what a {self.entry['type']} tier occupies is not known here")
        digest = Namespace(model=_MODEL, tenant=self.tenant).identify(block_bytes=BLOCK_BYTES, block_tokens=16).digest
        return bucket_bytes(self.entry, f"{self.entry['prefix']}/{digest.hex()}/blocks/")

    @property
    def keys(self) -> list[OffloadKey]:
        """Every key that is ever stored by `write`."""
        return make_keys((self.jobs + 2) * JOB_BLOCKS, "crash")

    def write(self, progress: Progress, *, strict: bool, answers: bool = True, disk_recovers: bool = True) -> None:
        """Do it all.

        Args:
            progress: Where to note how far it came.
            strict: Whether no block that is answered may be damaged.
            answers: Whether blocks that were stored are looked for, to note them as stored.
            disk_recovers: Whether a failure is over at once. Otherwise a block that cannot be read may be answered on
                and on, since the disk may recover, and nothing waits for room that long.

        Raises:
            AssertionError: The tier broke a promise before it was killed.
        """
        how: dict[str, Any] = {"strict": strict, "answers": answers, "disk_recovers": disk_recovers}  # Any: by name
        job_timeout_s = 30.0 if disk_recovers else 1.0
        try:
            with self._opened(job_timeout_s) as stack:
                writer = _Writer(self, stack, progress, **how)
                writer.before_reset()
                writer.reset()
                writer.after_reset()
            with self._opened(job_timeout_s) as stack:
                _Writer(self, stack, progress, **how).after_reopening()
        except TierError:  # it cannot be opened with this fault, and says so
            progress.note("refused")
        progress.note("finished")

    def verify(self, progress: Mapping[str, int], *, strict: bool, keeps: bool, accepts_old: bool = False) -> Found:
        """Open the tier that a writer left, and return what is wrong with it.

        Args:
            progress: What the writer had noted.
            strict: Whether no block that is answered may be damaged.
            keeps: Whether the newest job that was stored must be there.
            accepts_old: Whether the reset may have been lost whatever the writer noted.

        Raises:
            TierError: It cannot be opened.
        """
        found = Found()
        if not progress["reset_asked"]:
            versions = {0}
        elif progress["reset_held"] and not accepts_old:
            versions = {1}
        else:
            versions = {0, 1}
        with self._opened() as stack:
            loaded = self._look(stack, versions, found, strict=strict)
            newest = progress["newest_stored"]
            if keeps and newest >= 0:
                missing = set(self.keys[newest * JOB_BLOCKS : (newest + 1) * JOB_BLOCKS]) - loaded.keys()
                if missing:
                    found.problems.append(f"{len(missing)} blocks of the newest job that was stored are lost")
            if len(set(loaded.values())) > 1:
                found.problems.append("blocks of before and after the reset are there together")
            self._store_more(stack, found)
        return found

    def _look(
        self,
        stack: Stack,
        versions: set[int],
        found: Found,
        *,
        strict: bool,
        recovers: bool = True,
        faults: bool = False,
    ) -> dict[OffloadKey, int]:
        """Load every block that the tier says it has; return their versions.

        Args:
            stack: The tier's.
            versions: Which there may be.
            found: Where to note what was found.
            strict: Whether none may be damaged.
            recovers: Whether a call that failed succeeds the next time. Otherwise nothing is said of what fails.
            faults: Whether one call may fail meanwhile.
        """
        loaded: dict[OffloadKey, int] = {}
        missing = -int(faults)  # a call that fails costs one block: lookups and loads are of one each here
        losses = functools.partial(_losses, stack, damaged=not strict)
        lost_before = losses()
        for key, answer in zip(self.keys, ask(stack, self.keys), strict=True):
            if not answer:
                continue
            found.answered += 1
            content = load(stack, key)
            if content is None:
                # It may have been evicted since, or been found damaged: then it is not answered any more, and counted.
                missing += 1
                if recovers and _is_phantom(stack, key):
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
        if recovers and not _comes_about(lambda: losses() - lost_before >= missing, _COUNTED_S):
            lost = losses() - lost_before
            found.problems.append(
                f"phantoms: {missing} blocks were answered and did not load, of {lost} that were lost"
            )
        damaged = count_of(stack.secondary_tiers[0].stats(), "corrupt_blocks_total")
        if strict and damaged:
            found.problems.append(f"phantoms: {damaged} blocks were answered and are damaged")
        return loaded

    def _store_more(self, stack: Stack, found: Found) -> None:
        """See that the tier takes new blocks."""
        end_s = time.monotonic() + (self.store_s_max or 0.0)
        while True:
            keys = make_keys(JOB_BLOCKS, f"after the crash {time.monotonic_ns()}")
            if put(stack, keys, _VERSION_OF_NEW) != JOB_BLOCKS or not stack.flush(_WAIT_S):
                found.problems.append("new blocks are not taken in time")
                return
            missing = ask(stack, keys).count(False)
            if not missing:
                break
            if self.store_s_max is None:
                found.refused = missing
                break
            if time.monotonic() >= end_s:
                found.problems.append(f"{missing} of {JOB_BLOCKS} new blocks are not stored: {stack.counters()}")
                break
            time.sleep(0.5)
        stack.primary.reset_cache()
        for key, answer in zip(keys, ask(stack, keys), strict=True):
            content = load(stack, key) if answer else None
            if content not in (None, block_content(key, BLOCK_BYTES, _VERSION_OF_NEW)):
                found.problems.append("WRONG BYTES in a block that was stored afterwards")
            elif answer and content is None and _is_phantom(stack, key):
                found.problems.append("a block that was stored afterwards is answered and does not load")

    def _opened(self, job_timeout_s: float = 30.0) -> Stack:
        return open_stack(
            {
                "version": 1,
                "namespace": {"model": _MODEL, "tenant": self.tenant},
                "block": {"bytes": BLOCK_BYTES, "tokens": 16},
                "primary": {"capacity": _PRIMARY_BLOCKS * BLOCK_BYTES},
                "secondary": [
                    {
                        # A breaker that opens would hide what the tier itself does, and so would a lookup that is a
                        # miss because the machine is busy.
                        "breaker_failures": 1_000_000,
                        "job_timeout": job_timeout_s,
                        "lookup_timeout": job_timeout_s,
                        **self.entry,
                    }
                ],
            }
        )


class _Writer:
    """The steps of `CrashScenario.write` on an open stack."""

    def __init__(
        self,
        scenario: CrashScenario,
        stack: Stack,
        progress: Progress,
        *,
        strict: bool,
        answers: bool,
        disk_recovers: bool,
    ) -> None:
        self._scenario = scenario
        self._stack = stack
        self._progress = progress
        self._strict = strict
        self._answers = answers
        self._disk_recovers = disk_recovers

    def before_reset(self) -> None:
        """Store some blocks, and look for them."""
        for job in range(JOBS_BEFORE_RESET):
            self._store(job, version=0)
        self._check(version=0)

    def reset(self) -> None:
        """Reset the cache, and note when that holds."""
        tier = self._stack.secondary_tiers[0]
        self._progress.note("newest_stored", -1)
        self._progress.note("reset_asked")
        self._stack.manager.reset_cache()
        if tier.tier_type in ("nvme", "fs"):
            for thread in threading.enumerate():
                if thread.name.endswith("-reset"):
                    thread.join(_WAIT_S)
            if tier.tier_type == "nvme" and self._scenario.device:
                _wait(lambda: not tier._store._forgotten)  # type: ignore[attr-defined]  # flushed then
            self._progress.note("reset_held")
        # The others write a reset down before they store anything: see `_store`.

    def after_reset(self) -> None:
        """Store the same keys anew and more than there is room for, and use some of the older ones."""
        for job in range(self._scenario.jobs):
            self._store(job, version=1)
            self._progress.note("reset_held")
            if self._scenario.device and job == self._scenario.jobs // 3:
                assert self._scenario.path is not None
                flush_file_system(self._scenario.path)
            if job % 4 == 3:
                for key in self._scenario.keys[(job - 3) * JOB_BLOCKS : (job - 1) * JOB_BLOCKS : 2]:
                    content = load(self._stack, key)
                    assert content in (None, block_content(key, BLOCK_BYTES, 1)), f"wrong bytes under {key.hex()}"
        self._check(version=1)

    def after_reopening(self) -> None:
        """Look for what is there, and go on."""
        self._check(version=1)
        for job in range(self._scenario.jobs, self._scenario.jobs + 2):
            self._store(job, version=1)

    def _store(self, job: int, version: int) -> None:
        keys = self._scenario.keys[job * JOB_BLOCKS : (job + 1) * JOB_BLOCKS]
        put(self._stack, keys, version)
        assert self._stack.flush(_WAIT_S), "a job was not reported"
        self._progress.note("jobs_stored", self._progress["jobs_stored"] + 1)
        if self._answers and all(ask(self._stack, keys)):
            self._progress.note("newest_stored", job)

    def _check(self, version: int) -> None:
        found = Found()
        self._stack.primary.reset_cache()
        how = {"strict": self._strict, "recovers": self._disk_recovers, "faults": not self._answers}
        self._scenario._look(self._stack, {version}, found, **how)
        assert not found.problems, "; ".join(found.problems)


def _losses(stack: Stack, *, damaged: bool) -> int:
    """Return how many blocks the tier gave up since it was opened, and said so; with or without damaged ones."""
    tier = stack.secondary_tiers[0]
    stats = tier.stats()
    losses = count_of(stats, _EVICTIONS[tier.tier_type])
    if damaged:
        losses += count_of(stats, "corrupt_blocks_total")
    return losses


def _is_phantom(stack: Stack, key: OffloadKey) -> bool:
    """Return whether a block is answered, fails to load, and is answered again. One that was evicted is not."""
    return ask(stack, [key]) == [True] and load(stack, key) is None and ask(stack, [key]) == [True]


def put(stack: Stack, keys: Sequence[OffloadKey], version: int) -> int:
    """Store the contents of `keys` in a version; return how many the stack took."""
    rows = np.frombuffer(b"".join(block_content(key, BLOCK_BYTES, version) for key in keys), np.uint8)
    return stack.put(keys, rows.reshape(-1, BLOCK_BYTES), timeout=_WAIT_S)


def load(stack: Stack, key: OffloadKey) -> bytes | None:
    """Return a block's bytes, or None if it cannot be loaded."""
    out = np.zeros((1, BLOCK_BYTES), np.uint8)
    return out.tobytes() if stack.get([key], out, timeout=_WAIT_S) else None


def ask(stack: Stack, keys: Sequence[OffloadKey]) -> list[bool]:
    """Return what the stack's one tier says of each key; the manager must be idle."""
    tier = stack.secondary_tiers[0]
    context = ReqContext(f"ask-{time.monotonic_ns()}")
    tier.on_new_request(context)
    answers: Sequence[bool | None] = [None]

    def are_known() -> bool:
        nonlocal answers
        answers = tier.lookup_many(keys, context)
        tier.on_schedule_end()
        return None not in answers

    _wait(are_known)
    tier.on_request_finished(context)
    return [bool(answer) for answer in answers]


def _wait(condition: Callable[[], bool]) -> None:
    assert _comes_about(condition, _WAIT_S), "it did not come about in time"


def _comes_about(condition: Callable[[], bool], timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def with_entry(scenario: CrashScenario, **changes: object) -> CrashScenario:
    """Return a scenario whose tier has other settings."""
    return dataclasses.replace(scenario, entry={**scenario.entry, **changes})
