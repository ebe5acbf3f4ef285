"""Races: threads, or a scheduler with its tiers' threads, over few keys and little memory, with every byte compared.

Keys share prefixes and outnumber the primary tier's rows, so that blocks are evicted, promoted and stored all the time.
Each key has other content in each epoch, which a reset begins. That finds a block with bytes of another key, of an
earlier epoch, or half written. A seed decides the calls; the machine decides their timing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.stacks import block_hashes
from tiered_kv.base import OffloadKey
from tiered_kv.config.stack_config import load_config
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ShutdownError
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.open import Stack
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager

GARBAGE = 0xA5
"""The bytes of `out` before a `get`."""
REST_LIMIT_S = 60.0
_CALL_TIMEOUT_S = 0.5

_PROBLEMS_SHOWN = 10
_PATTERN = b"\xfe\xedreleased\xde\xad block"
_CALLS_MIN = 20
_PROMPTS, _OWN_BLOCKS = 4, 8
"""Of each family, and of each of its prompts behind what they share."""


class Prompts:
    """Prompts with shared prefixes, and the content of their blocks. Any thread may read."""

    def __init__(self, block_bytes: int, *, families: int = 4, shared_blocks: int = 6, label: str = "race") -> None:
        self.block_bytes = block_bytes
        self.prompts: list[list[OffloadKey]] = []
        for family in range(families):
            head = make_keys(shared_blocks, f"{label}-{family}")
            for prompt in range(_PROMPTS):
                self.prompts.append(head + make_keys(_OWN_BLOCKS, f"{label}-{family}-{prompt}"))
        self._contents: dict[tuple[OffloadKey, int], Blocks] = {}

    def choose(self, chance: random.Random) -> list[OffloadKey]:
        prompt = chance.choice(self.prompts)
        return prompt[: chance.randint(1, len(prompt))]

    def contents(self, keys: Sequence[OffloadKey], epoch: int = 0) -> Blocks:
        """Return the blocks' bytes in an epoch, uint8 of shape (len(keys), block_bytes)."""
        blocks = np.empty((len(keys), self.block_bytes), dtype=np.uint8)
        for row, key in enumerate(keys):
            content = self._contents.get((key, epoch))
            if content is None:
                content = np.frombuffer(block_content(key, self.block_bytes, epoch), dtype=np.uint8)
                self._contents[key, epoch] = content
            blocks[row] = content
        return blocks

    def differences(self, keys: Sequence[OffloadKey], blocks: Blocks, epoch: int, what: str) -> list[str]:
        """Return a sentence for each block with wrong bytes."""
        wrong = (blocks != self.contents(keys, epoch)).any(axis=1)
        return [
            f"{what}: block {keys[index].hex()} holds other bytes ({blocks[index, :16].tobytes().hex()}…)"
            for index in np.flatnonzero(wrong).tolist()
        ]


@dataclass
class Race:
    calls: int = 0  # of the facade, or steps of the scheduler
    verified_blocks: int = 0  # which were loaded, and compared
    stored_blocks: int = 0  # or found to be there
    resets: int = 0
    problems: list[str] = field(default_factory=list)  # what must not have happened, as sentences

    def note(self, problems: Sequence[str]) -> None:
        self.problems += problems[: max(0, _PROBLEMS_SHOWN - len(self.problems))]

    def add(self, other: Race) -> None:
        self.calls += other.calls
        self.verified_blocks += other.verified_blocks
        self.stored_blocks += other.stored_blocks
        self.resets += other.resets
        self.note(other.problems)


# Threads on the facade.


def race_facade(stack: Stack, prompts: Prompts, *, seed: int, threads: int, seconds: float) -> Race:
    """Let threads put, get and flush until the time is over."""
    races = [Race() for _ in range(threads)]
    end_s = time.monotonic() + seconds

    def run(number: int) -> None:
        chance, race = random.Random(f"{seed}/{number}"), races[number]
        while time.monotonic() < end_s or race.calls < _CALLS_MIN:
            try:
                _call_facade(stack, prompts, chance, race)
            except ShutdownError:
                return
            except Exception as error:  # whatever it is, no call may raise it
                race.note([f"thread {number}: {type(error).__name__}: {error}"])
                return

    workers = [threading.Thread(target=run, args=(number,), name=f"race-{number}") for number in range(threads)]
    for worker in workers:
        worker.start()
    total = Race()
    for worker in workers:
        worker.join(seconds + REST_LIMIT_S)
        if worker.is_alive():
            total.note([f"{worker.name} does not come back"])
    for race in races:
        total.add(race)
    return total


def _call_facade(stack: Stack, prompts: Prompts, chance: random.Random, race: Race) -> None:
    keys = prompts.choose(chance)
    race.calls += 1
    what = chance.random()
    if what < 0.45:
        stored = stack.put(block_hashes(keys), prompts.contents(keys), timeout=_CALL_TIMEOUT_S)
        race.stored_blocks += stored
        if not 0 <= stored <= len(keys):
            race.note([f"put of {len(keys)} blocks says that it stored {stored}"])
    elif what < 0.95:
        out = np.full((len(keys), prompts.block_bytes), GARBAGE, dtype=np.uint8)
        loaded = stack.get(block_hashes(keys), out, timeout=_CALL_TIMEOUT_S)
        race.verified_blocks += loaded
        race.note(prompts.differences(keys[:loaded], out[:loaded], 0, "get"))
        if (out[loaded:] != GARBAGE).any():
            race.note([f"get of {len(keys)} blocks returned {loaded} and wrote into rows behind them"])
    elif what < 0.98:
        stack.flush(timeout=0.05)
    else:
        stack.counters()


# What holds afterwards.


def problems_at_rest(manager: TieringOffloadingManager, guard: GuardedBackend | None = None) -> list[str]:
    """Wait until no job is in flight, and return what is wrong with the primary tier then.

    Every row is either free, with the bytes of a released block, or holds a ready block that nobody pins; nothing is in
    quarantine. Called on the manager's thread, with no open transfer of the engine.
    """
    late_s = time.monotonic() + REST_LIMIT_S
    while True:
        if not manager.drain_jobs(max(0.0, late_s - time.monotonic())):
            return [f"{manager.jobs_in_flight} jobs have not ended after {REST_LIMIT_S} s"]
        manager.on_schedule_end()
        if not manager.jobs_in_flight:  # else used blocks that a tier lacks are stored again: that ends, too
            break
    primary = manager.primary
    problems = []
    pinned = [block.block_id for block in primary.blocks.values() if block.ref_cnt]
    if pinned:
        problems.append(f"blocks {pinned} are still pinned or being written")
    lost = primary.backend.num_blocks - primary.backend.get_num_free_blocks() - len(primary.blocks)
    if lost:
        problems.append(f"{lost} blocks are neither free nor in use")
    for name, counters in manager.counters().items():
        if counters.get("quarantined_bytes"):
            problems.append(f"tier {name} keeps {counters['quarantined_bytes']} bytes in quarantine")
    if guard is not None:
        guard.check()
        problems += guard.violations
    return problems


def phantoms(manager: TieringOffloadingManager) -> list[str]:
    """Return the tiers that returned damaged or truncated blocks; called if no test has damaged them."""
    found = []
    for name, counters in manager.counters().items():
        failed = counters.get("failed_blocks_total", {}).get("load", {})
        corrupt = counters.get("tier", {}).get("corrupt_blocks_total")
        if corrupt or {"checksum", "truncated"} & failed.keys():
            found.append(f"tier {name}: corrupt {corrupt}, failed loads {failed}, and nothing was damaged")
    return found


class GuardedBackend(CPUBackend):
    """Notices writes into a block that has been released. Pass it to `Stack(config, backend=...)`.

    If a block is released too early, a late worker writes into memory that is free or belongs to another block. A
    released block is filled with a pattern and checked when it is allocated again, which finds the first case.
    Comparing contents finds the second, as every key has other bytes, and a store that reads too late.

    Owned by the manager's thread, like its base.
    """

    def __init__(self, region: PrimaryRegion) -> None:
        super().__init__(region)
        self.violations: list[str] = []
        repeats = -(-region.block_bytes // len(_PATTERN))
        self._free_row = np.frombuffer((_PATTERN * repeats)[: region.block_bytes], dtype=np.uint8)
        self._rows = region.array  # also when the region is closed: late workers may still write
        self._rows[:] = self._free_row

    def allocate(self, keys: Sequence[OffloadKey], writer: int = -1, source: int = 0) -> list[int]:
        rows = super().allocate(keys, writer, source)
        self._check(rows)
        return rows

    def free_rows(self, rows: Collection[int]) -> None:
        super().free_rows(rows)
        for row in rows:
            self._rows[row] = self._free_row

    def check(self) -> None:
        """Check every block that is free now, or was when the stack was closed."""
        self._check([*self._free, *range(len(self.table), self.num_blocks)])

    def _check(self, rows: Sequence[int]) -> None:
        if not rows or len(self.violations) >= _PROBLEMS_SHOWN:
            return
        changed = (self._rows[rows] != self._free_row).any(axis=1)
        for position in np.flatnonzero(changed).tolist():
            self.violations.append(f"block {rows[position]} was written to after it had been released")


def open_guarded(config: Mapping[str, object]) -> tuple[Stack, GuardedBackend]:
    loaded = load_config(config)
    guard = GuardedBackend(PrimaryRegion(loaded.primary_blocks, loaded.block.bytes))
    try:
        return Stack(loaded, backend=guard), guard
    except BaseException:
        guard.region.close()
        raise
