"""Races of threads: on the facade, a scheduler with its tiers, late workers; in little memory, every byte compared.

`tests.support.races` says what must hold. A case that fails names its tier and seed. To repeat it, run its test alone
(`pytest -k`): the calls are the same, and their timing is the machine's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import tiered_kv_fs.blocks
import tiered_kv_memory.tier
from tests.support.entries import EntryOf
from tests.support.figures import Figures, Profile
from tests.support.race_cases import (
    BLOCK_BYTES,
    ROUNDS_MAX,
    TIERS,
    Hindrance,
    race_damage,
    race_late_shutdown,
    race_late_workers,
    race_loads_with_stores,
    seeds_of,
    stack_of,
    unless,
)
from tests.support.races import Prompts, Race, open_guarded, phantoms, problems_at_rest, race_facade
from tests.support.racing_scheduler import RacingScheduler
from tests.support.stacks import manager_of
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.tier import NvmeTier

pytestmark = [pytest.mark.trust, pytest.mark.slow]

# Threads on the facade.


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("tier", TIERS)
def test_threads_on_the_facade_get_what_was_put(
    tier: str, threads: int, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    entry = entry_of(tier)
    for seed, note in seeds_of(f"{tier}, {threads} threads", profile.pick(1, 3), figures):
        stack, guard = open_guarded(stack_of(entry))
        with stack:
            prompts = Prompts(BLOCK_BYTES, label=f"{threads}-{seed}")
            race = Race()
            for number in range(ROUNDS_MAX):
                seconds = profile.pick(1.0, 3.0)
                race.add(race_facade(stack, prompts, seed=seed + 100 * number, threads=threads, seconds=seconds))
                counters = stack.counters()
                went_round = counters["cpu"]["evicted_blocks_total"] and counters[tier].get("loaded_blocks_total")
                if race.problems or (went_round and race.verified_blocks):
                    break
            note([*race.problems, *problems_at_rest(manager_of(stack), guard), *phantoms(manager_of(stack))])
        note(unless(counters["cpu"]["evicted_blocks_total"] > 0, "nothing was evicted"))
        note(unless(counters[tier].get("loaded_blocks_total", 0) > 0, "nothing was promoted"))
        note(unless(race.verified_blocks > 0, "nothing was loaded"))


# A scheduler that resets.


@pytest.mark.parametrize("tier", TIERS)
def test_a_scheduler_that_resets_amid_transfers_never_loads_what_was_before(
    tier: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    entry = entry_of(tier)
    for seed, note in seeds_of(f"{tier}, resets", profile.pick(1, 3), figures):
        stack, guard = open_guarded(stack_of(entry))
        with stack:
            scheduler = RacingScheduler(
                manager_of(stack), stack.region, Prompts(BLOCK_BYTES, label=f"reset-{seed}"), seed=seed
            )
            race = scheduler.race
            for _ in range(ROUNDS_MAX):
                scheduler.run(profile.pick(1.0, 3.0), reset_every=100)
                scheduler.run(profile.pick(1.0, 3.0), reset_every=2000)  # long enough that the tier has hits, too
                counters = stack.counters()
                has_stored = counters[tier].get("stored_blocks_total", 0) > 0
                if race.problems or (race.resets > 1 and race.verified_blocks and has_stored):
                    break
            scheduler.finish()
            note([*race.problems, *problems_at_rest(manager_of(stack), guard), *phantoms(manager_of(stack))])
        note(unless(race.resets > 1, "hardly any reset"))
        note(unless(race.verified_blocks > 0, "nothing was loaded"))
        note(unless(has_stored, "nothing was stored"))


# Late workers.


def places_of(tier: str) -> list[tuple[object, str]]:
    """Return where a tier's workers touch blocks of the primary tier."""
    if tier == "nvme":
        return [(Disk, "preadv"), (Disk, "pwritev")]
    if tier == "fs":
        return [(tiered_kv_fs.blocks, "read_all"), (tiered_kv_fs.blocks, "write_all")]
    return [(tiered_kv_memory.tier, "decode_record"), (tiered_kv_memory.tier, "encode_record")]


@pytest.mark.parametrize("tier", ["memory", "nvme", "fs"])
def test_no_block_is_used_again_while_a_late_worker_may_touch_it(
    tier: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    config = stack_of({**entry_of(tier), "job_timeout": 0.03, "breaker_failures": 1_000_000})
    for seed, note in seeds_of(f"{tier}, late workers", profile.pick(1, 3), figures):
        found, expired = race_late_workers(config, places_of(tier), seed=seed, seconds=3.0)
        note(found + unless(expired > 0, "no job has expired"))


@pytest.mark.parametrize("tier", ["memory", "nvme", "fs"])
def test_a_stack_that_is_closed_before_its_late_workers_come_leaves_them_their_blocks(
    tier: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    config = stack_of(entry_of(tier))
    for seed, note in seeds_of(f"{tier}, closed before late workers", profile.pick(2, 6), figures):
        found, late = race_late_shutdown(config, places_of(tier), seed=seed, seconds=0.1 + 0.05 * seed)
        note(found + unless(late > 0, "no worker was late"))


@pytest.mark.parametrize("direction", ["to_client", "to_server"])
@pytest.mark.parametrize("tier", ["redis", "s3"])
def test_no_block_is_used_again_while_a_stalled_connection_may_touch_it(
    tier: str, direction: str, entry_of: EntryOf, profile: Profile, figures: Figures, request: pytest.FixtureRequest
) -> None:
    entry = entry_of(tier)
    if tier == "redis":
        address = ("127.0.0.1", request.getfixturevalue("redis_server").port)
    else:
        address = request.getfixturevalue("moto_server").address
    with FaultProxy(address) as proxy:
        where = f"{'redis' if tier == 'redis' else 'http'}://{proxy.host}:{proxy.port}"
        entry |= {"url" if tier == "redis" else "endpoint_url": where, "job_timeout": 0.3, "lookup_timeout": 0.5}
        entry |= {"breaker_failures": 1_000_000}
        # A block must not fit the sockets' buffers, or no worker reads it any more when its deadline passes.
        block_bytes = 4 << 20 if direction == "to_server" else BLOCK_BYTES
        few = {"families": 1, "shared_blocks": 2} if direction == "to_server" else {}
        for seed, note in seeds_of(f"{tier}, connections stalled {direction}", profile.pick(1, 3), figures):
            stack, guard = open_guarded(stack_of(entry, block_bytes=block_bytes))
            with stack:
                prompts = Prompts(block_bytes, label=f"stalled-{seed}", **few)
                scheduler = RacingScheduler(manager_of(stack), stack.region, prompts, seed=seed)
                for number in range(ROUNDS_MAX):
                    scheduler.run(0.6)
                    proxy.set_faults(Faults(stalls=True), Direction(direction))
                    scheduler.run(0.8)
                    proxy.set_faults(NO_FAULTS)
                    scheduler.run(0.2)
                    counters = stack.counters()[tier]
                    late = counters["expired_jobs_total"] + count_of(counters, "failed_blocks_total")
                    if scheduler.race.problems or (number >= 2 and late and scheduler.race.verified_blocks):
                        break
                race = scheduler.finish()
                note([*race.problems, *problems_at_rest(manager_of(stack), guard), *phantoms(manager_of(stack))])
            note(unless(late > 0, "no job was late"))
            note(unless(race.verified_blocks > 0, "nothing was loaded"))


# A tier's own threads, and damage.


def test_what_nvme_says_it_has_can_be_loaded_at_any_moment_of_its_store(
    tmp_path: Path, profile: Profile, figures: Figures
) -> None:
    settings = NvmeSettings(path=str(tmp_path / "nvme"), capacity=4 << 20, segment=256 << 10)
    for seed, note in seeds_of("nvme, loads amid stores", profile.pick(1, 3), figures):
        with Hindrance(seed, delay_max_s=0.005).before((Disk, "pwritev")):
            found, answers = race_loads_with_stores(
                lambda spec, view: NvmeTier(spec, view, "nvme", settings),
                seed=seed,
                seconds=profile.pick(1.0, 3.0),
                block_bytes=BLOCK_BYTES,
            )
        note(found + unless(answers > 0, "no lookup was made amid a store"))


@pytest.mark.parametrize("tier", ["nvme", "fs"])
def test_blocks_that_are_damaged_while_they_are_read_are_misses(
    tier: str, entry_of: EntryOf, profile: Profile, figures: Figures, tmp_path: Path
) -> None:
    config = stack_of(entry_of(tier))
    for seed, note in seeds_of(f"{tier}, damaged amid loads", profile.pick(1, 3), figures):
        found, corrupt = race_damage(config, tmp_path / "kv", seed=seed, seconds=profile.pick(1.0, 3.0))
        note(found + unless(corrupt > 0, "no load has met the damage"))
