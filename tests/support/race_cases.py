"""Races with late workers, damage amid loads, loads amid stores, and several processes.

Each returns problems as sentences, and how often its event has happened.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from tests.support import stacks
from tests.support.faulty import Gate
from tests.support.figures import Figures
from tests.support.races import Prompts, Race, open_guarded, phantoms, problems_at_rest, race_facade
from tests.support.racing_scheduler import RacingScheduler
from tests.support.stacks import manager_of
from tests.support.threads import meanwhile
from tiered_kv.errors import TierBusyError
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys

BLOCK_BYTES = 4096
SIZES: dict[str, dict[str, object]] = {
    "memory": {"capacity": 1 << 20},
    "nvme": {"capacity": 1 << 20, "segment": 128 << 10},
    "fs": {"capacity": 2 << 20},
    "redis": {},
    "s3": {"presence_ttl": 0.2},
}
"""Settings of each tier that is raced on, so that it has hardly any room."""
TIERS = tuple(SIZES)
ROUNDS_MAX = 20
"""How often a race is continued until its event happens: on a slow machine that takes longer."""
_PRIMARY_BLOCKS = 32
_DAMAGE_PAUSE_S = 0.002
_DAMAGE_ROUNDS = 10
_WEDGES = 3
_WEDGES_MAX = 30
_RESETS_EVERY = 50
_LATE_LIMIT_S = 60.0
_STORES_MAX = 1000


def stack_of(*entries: Mapping[str, object], block_bytes: int = BLOCK_BYTES) -> dict[str, object]:
    return stacks.stack_of(*entries, blocks=_PRIMARY_BLOCKS, block_bytes=block_bytes)


def unless(happened: bool, what: str) -> list[str]:
    """Return a problem if the event that a case is about has not happened."""
    return [] if happened else [f"the case proves nothing: {what}"]


Note = Callable[[list[str]], None]
"""Takes problems of a case."""


def seeds_of(case: str, count: int, figures: Figures) -> Iterator[tuple[int, Note]]:
    """Yield each seed of a case with a function that takes its problems; then count seeds and fail with problems."""
    found: dict[str, list[str]] = {f"{case}, seed {seed}": [] for seed in range(count)}
    for seed, problems in enumerate(found.values()):
        yield seed, problems.extend
    bad = {name: problems for name, problems in found.items() if problems}
    figures.add("races", len(found), len(found) - len(bad))
    assert not bad, "\n".join(f"{name}: {problem}" for name, problems in bad.items() for problem in problems)


class Hindrance:
    """Delays the workers of tiers: each call for a random time, and all calls while `gate` is closed."""

    def __init__(self, seed: int, delay_max_s: float) -> None:
        self.gate = Gate()
        self.under_way = 0
        self._lock = threading.Lock()  # guards that number
        self._chance = random.Random(seed)
        self._delay_max_s = delay_max_s

    @contextmanager
    def before(self, *places: tuple[object, str]) -> Iterator[None]:
        """Delay every call of functions, named by module or class, until the end of the block."""
        with ExitStack() as patched:
            for owner, name in places:
                patched.enter_context(mock.patch.object(owner, name, self._late(getattr(owner, name))))
            patched.callback(self.gate.open)
            yield

    def _late(self, function: Callable[..., object]) -> Callable[..., object]:
        def late(*arguments: object, **named: object) -> object:
            self._count(1)
            try:
                time.sleep(self._chance.random() * self._delay_max_s)
                self.gate.pass_through()
                return function(*arguments, **named)
            finally:
                self._count(-1)

        return late

    def _count(self, number: int) -> None:
        with self._lock:
            self.under_way += number


def race_late_workers(
    config: Mapping[str, object], places: list[tuple[object, str]], *, seed: int, seconds: float
) -> tuple[list[str], int]:
    """Race a scheduler over tiers whose workers end after the deadlines of their jobs, and after resets."""
    stack, guard = open_guarded(config)
    hindrance = Hindrance(seed, delay_max_s=0.06)
    with stack:
        prompts = Prompts(stack.config.block.bytes, label=f"late-{seed}")
        scheduler = RacingScheduler(manager_of(stack), stack.region, prompts, seed=seed)
        with hindrance.before(*places):
            for number in range(1, _WEDGES_MAX + 1):
                scheduler.run(seconds / (3 * _WEDGES))
                hindrance.gate.close()  # what is submitted now expires, and its workers are still to come
                scheduler.run(seconds / (3 * _WEDGES), reset_every=_RESETS_EVERY * (number % 2))
                hindrance.gate.open()
                if number >= _WEDGES and _expired_jobs(stack):
                    break
        scheduler.finish()
        problems = problems_at_rest(manager_of(stack), guard)
        scheduler.run(seconds / 3)  # now the tier has what late stores have read
        problems += [
            *scheduler.finish().problems,
            *problems_at_rest(manager_of(stack), guard),
            *phantoms(manager_of(stack)),
        ]
        expired = _expired_jobs(stack)
    return list(dict.fromkeys(problems)), expired


def race_late_shutdown(
    config: Mapping[str, object], places: list[tuple[object, str]], *, seed: int, seconds: float
) -> tuple[list[str], int]:
    """Close a stack while workers of its tiers are held up, release them, and check the memory.

    Once they have ended, the next stack must be able to open the tiers' storage.
    """
    try:
        stack, guard = open_guarded(config)
    except TierBusyError as error:  # the stack of an earlier seed has not released it
        return [str(error)], 1
    hindrance = Hindrance(seed, delay_max_s=0.001)
    scheduler = RacingScheduler(manager_of(stack), stack.region, Prompts(stack.config.block.bytes), seed=seed)
    with hindrance.before(*places):
        try:
            scheduler.run(seconds)
            hindrance.gate.close()
            scheduler.run(_LATE_LIMIT_S, until=lambda: hindrance.gate.waiting > 0)
        finally:
            stack.close(0.0)
            late = hindrance.gate.waiting
            hindrance.gate.open()
        problems = list(scheduler.race.problems)
        for what, has_come in {
            "the release of the storage": lambda: _can_be_opened(config),
            "the end of the workers": lambda: not hindrance.under_way,
        }.items():
            try:
                wait_until(has_come, _LATE_LIMIT_S, what=what)
            except AssertionError as error:  # with its seed, and counted
                problems.append(str(error))
        guard.check()
    return [*problems, *guard.violations], late


def _can_be_opened(config: Mapping[str, object]) -> bool:
    try:
        open_stack(config).close()
    except TierBusyError:
        return False
    return True


def _expired_jobs(stack: Stack) -> int:
    return sum(counters.get("expired_jobs_total", 0) for counters in stack.counters().values())


def race_damage(config: Mapping[str, object], directory: Path, *, seed: int, seconds: float) -> tuple[list[str], int]:
    """Race threads on the facade while files of a tier are damaged, until a load has met damage."""
    stack, guard = open_guarded(config)
    chance = random.Random(seed)

    def damage() -> None:
        flip_a_bit(directory, chance, stack.config.block.bytes)
        time.sleep(_DAMAGE_PAUSE_S)

    with stack, meanwhile(damage):
        prompts = Prompts(stack.config.block.bytes, label=f"damage-{seed}")
        total, corrupt = Race(), 0
        for number in range(_DAMAGE_ROUNDS):
            total.add(race_facade(stack, prompts, seed=seed + 1000 * number, threads=2, seconds=seconds))
            corrupt = sum(count_of(counters, "tier", "corrupt_blocks_total") for counters in stack.counters().values())
            if total.problems or corrupt:
                break
        return [*total.problems, *problems_at_rest(manager_of(stack), guard)], corrupt


def flip_a_bit(directory: Path, chance: random.Random, at_least_bytes: int) -> bool:
    """Flip a bit of a byte that is not zero in some file; return whether one was flipped."""
    files = sorted(path for path in directory.rglob("*") if not path.is_symlink())
    chance.shuffle(files)
    for path in files:
        try:
            if not path.is_file() or (size := path.stat().st_size) < at_least_bytes:
                continue
            with open(path, "r+b", buffering=0) as file:
                for _ in range(16):
                    at = chance.randrange(size)
                    found = os.pread(file.fileno(), 1, at)
                    if found and found != b"\0":  # a segment's unused space is zeros
                        os.pwrite(file.fileno(), bytes([found[0] ^ 1 << chance.randrange(8)]), at)
                        return True
        except OSError:  # it was removed meanwhile
            continue
    return False


def race_loads_with_stores(
    open_tier: OpenTier, *, seed: int, seconds: float, block_bytes: int
) -> tuple[list[str], int]:
    """Store blocks in a tier, look them up all the while, and load each as soon as the tier reports it.

    A whole stack hides that moment: it finds a block that is being stored in the primary tier.
    """
    chance = random.Random(seed)
    rig = TierRig(open_tier, num_blocks=256, block_bytes=block_bytes, wait_s=_LATE_LIMIT_S)
    problems: list[str] = []
    answers = number = 0
    end_s = time.monotonic() + seconds
    try:
        while (time.monotonic() < end_s or (not answers and number < _STORES_MAX)) and not problems:
            number += 1
            keys = make_keys(chance.randint(1, 32), f"{seed}-{number}")
            store = rig.submit_store(keys)
            request = rig.new_request()
            late_s = time.monotonic() + _LATE_LIMIT_S
            while not any(found := rig.tier.lookup_many(keys, request)):
                assert time.monotonic() < late_s, "nothing of what is being stored is ever found"
                answers += 1
                rig.poll()
            there = [key for key, answer in zip(keys, found, strict=True) if answer]
            if lost := set(there) - rig.load(there):
                problems.append(f"{len(lost)} of {len(there)} blocks that were found could not be loaded")
            rig.wait([store])
            rig.tier.on_request_finished(request)
    except AssertionError as error:  # the rig compares every byte
        problems.append(str(error))
    finally:
        rig.close()
    return problems, answers


def race_from_arguments() -> None:
    """Race on a stack as CONFIG SEED SECONDS RESET_EVERY of `sys.argv` say, and print a report as JSON.

    The race goes on until it has loaded something, and has reset if it shall.
    """
    config, seed, seconds, reset_every = sys.argv[1:]
    with open_stack(json.loads(config)) as stack:
        prompts = Prompts(stack.config.block.bytes)
        scheduler = RacingScheduler(manager_of(stack), stack.region, prompts, seed=int(seed), has_epochs=False)
        print("running", flush=True)
        for _ in range(ROUNDS_MAX):
            scheduler.run(float(seconds), reset_every=int(reset_every))
            has_reset = scheduler.race.resets > 0 or reset_every == "0"
            if scheduler.race.problems or (scheduler.race.verified_blocks and has_reset):
                break
        race = scheduler.finish()
        race.note([*problems_at_rest(manager_of(stack)), *phantoms(manager_of(stack))])
    print(json.dumps(asdict(race)), flush=True)
