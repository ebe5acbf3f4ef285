"""The tier bench: what it measures, and that it does not measure wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.testing.control import Gate
from tiered_kv.testing.faults import FailingTier, HeldJobsTier, Lie, LyingTier, PartialTier
from tiered_kv.testing.rig import FourMethodTier
from tiered_kv.workload.bench import BenchSettings, bench_tier

SETTINGS = BenchSettings(blocks=70, batch=32, rounds=3)


@pytest.fixture
def region() -> Iterator[PrimaryRegion]:
    region = PrimaryRegion(80, 4096)
    yield region
    region.close()


@pytest.fixture
def tier(region: PrimaryRegion) -> FourMethodTier:
    return FourMethodTier(None, region.kv_view, "four")


def test_all_blocks_of_all_rounds_are_stored_loaded_and_checked(region: PrimaryRegion, tier: FourMethodTier) -> None:
    other = OffloadKey(b"other")
    tier.blocks[other] = bytes(4096)
    rounds: list[int] = []
    result = bench_tier(tier, "below", region.kv_view, SETTINGS, on_round=rounds.append)
    assert (result.name, result.type, result.block_bytes, result.batch) == ("below", "four", 4096, 32)
    assert result.verified_blocks == 3 * 70
    assert result.corrupt_blocks == result.failed_stores == result.failed_loads == 0
    assert len(result.rounds) == 3
    assert rounds == [1, 2, 3]
    assert tier.blocks.pop(other) == bytes(4096), "other blocks stay as they are"
    assert len(tier.blocks) == 3 * 70
    assert min(each.store_gb_per_s for each in result.rounds) <= result.store_gb_per_s
    assert 0 < result.lookup_us.p50 <= result.lookup_us.p99


@pytest.mark.parametrize("lie", [Lie.FLIPS_BYTES, Lie.LOADS_NOTHING])
def test_wrong_bytes_are_counted(region: PrimaryRegion, tier: FourMethodTier, lie: Lie) -> None:
    result = bench_tier(LyingTier(tier, lie), "below", region.kv_view, SETTINGS)
    assert result.corrupt_blocks == 3 * 70
    assert result.verified_blocks == 0


def test_blocks_that_fail_are_counted_and_do_not_count_as_throughput(
    region: PrimaryRegion, tier: FourMethodTier
) -> None:
    result = bench_tier(FailingTier(tier, failing=True), "below", region.kv_view, SETTINGS)
    assert result.failed_stores == 3 * 70
    assert result.store_gb_per_s == result.load_gb_per_s == 0.0
    assert sum(result.reasons.values()) == 9  # three jobs a round


def test_the_part_of_a_job_that_succeeds_counts(region: PrimaryRegion, tier: FourMethodTier) -> None:
    result = bench_tier(PartialTier(tier, lambda key: key[0] % 2 == 0), "below", region.kv_view, SETTINGS)
    assert 0 < result.verified_blocks < 3 * 70
    assert result.verified_blocks + result.failed_stores == 3 * 70
    assert result.corrupt_blocks == 0


def test_a_tier_that_does_not_answer_ends_the_bench(region: PrimaryRegion, tier: FourMethodTier) -> None:
    gate = Gate(is_open=False)
    held = HeldJobsTier(tier, gate)
    settings = BenchSettings(blocks=70, timeout_s=0.05)
    with pytest.raises(TierUnavailableError, match=r"tier 'below' store: 3 jobs did not end in 0\.05 s"):
        bench_tier(held, "below", region.kv_view, settings)


@pytest.mark.parametrize("name", ["blocks", "batch", "rounds"])
def test_a_setting_out_of_its_range_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected at least 1"):
        BenchSettings(**{"blocks": 1, name: 0})
