"""The tier bench and the contents of its blocks: what is measured, and that no wrong byte is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier, Lie, LyingTier
from tiered_kv.base import OffloadKey
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.faults import FailingTier
from tiered_kv.tiering.base import JobResult
from tiered_kv.workload import content
from tiered_kv.workload.bench import BenchSettings, bench_tier
from tiered_kv.workload.content import BlockContent, Rows

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
    assert result.failed_stores == 70, "the other rounds would fail alike"
    assert result.store_gb_per_s == result.load_gb_per_s == 0.0
    assert sum(result.reasons.values()) == 3  # jobs


def test_the_part_of_a_job_that_succeeds_counts(region: PrimaryRegion, tier: FourMethodTier) -> None:
    failing = FailingTier(tier, failing=True, fails=lambda key: key[0] % 2 == 1)
    result = bench_tier(failing, "below", region.kv_view, SETTINGS)
    assert 0 < result.verified_blocks < 3 * 70
    assert result.verified_blocks + result.failed_stores == 3 * 70
    assert result.corrupt_blocks == 0


def test_a_tier_that_does_not_answer_ends_the_bench(region: PrimaryRegion, tier: FourMethodTier) -> None:
    gate = Gate(is_open=False)
    held = HeldJobsTier(tier, gate)
    settings = BenchSettings(blocks=70, timeout_s=0.05)
    with pytest.raises(TierUnavailableError, match=r"tier 'below': 3 store jobs did not end in 0\.05 s"):
        bench_tier(held, "below", region.kv_view, settings)


def test_a_bench_that_ends_early_says_why_jobs_had_failed(
    region: PrimaryRegion, tier: FourMethodTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldJobsTier(tier, Gate(is_open=False))
    answers = iter([[JobResult(job, False, reason="unavailable") for job in (1, 2)]])
    monkeypatch.setattr(held, "get_finished", lambda: next(answers, []))
    said = r"1 store job did not end in 0\.05 s; jobs failed before: 2 unavailable"
    with pytest.raises(TierUnavailableError, match=said):
        bench_tier(held, "below", region.kv_view, BenchSettings(blocks=70, timeout_s=0.05))


def test_a_bench_gives_up_a_tier_of_which_the_first_jobs_fail(
    region: PrimaryRegion, tier: FourMethodTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldJobsTier(tier, Gate(is_open=False))
    answers = iter([[JobResult(1, False, reason="unavailable")]])
    monkeypatch.setattr(held, "get_finished", lambda: next(answers, []))
    monkeypatch.setattr("tiered_kv.workload.bench._GIVE_UP_S", 0.0)
    with pytest.raises(TierUnavailableError, match="no store job succeeded; jobs failed before: 1 unavailable"):
        bench_tier(held, "below", region.kv_view, BenchSettings(blocks=70))


# Block contents: what is written is recognised, and nothing else is.


SIZES = [1, 7, 8, 4096, 65536, 65544, 131072, 100_001]


def filled(block_bytes: int, ids: list[int]) -> tuple[BlockContent, Rows]:
    content = BlockContent(block_bytes)
    rows = np.zeros((len(ids), block_bytes), dtype=np.uint8)
    content.fill(rows, range(len(ids)), ids)
    return content, rows


@pytest.mark.parametrize("block_bytes", SIZES)
def test_what_was_written_is_right(block_bytes: int) -> None:
    ids = [0, 1, 2**64 - 1, 12345]
    content, rows = filled(block_bytes, ids)
    assert content.check(rows, range(4), ids) == []


def test_rows_are_matched_with_ids_in_the_order_given() -> None:
    content = BlockContent(4096)
    rows = np.zeros((8, 4096), dtype=np.uint8)
    content.fill(rows, [5, 2], [50, 20])
    assert content.check(rows, [2, 5], [20, 50]) == []
    assert [position for position, _ in content.check(rows, [5, 2], [20, 50])] == [0, 1]
    assert not rows[[0, 1, 3, 4, 6, 7]].any()


@given(st.data())
def test_any_flipped_bit_is_found_at_its_offset(data: st.DataObject) -> None:
    block_bytes = data.draw(st.sampled_from(SIZES))
    offset = data.draw(st.integers(0, block_bytes - 1))
    content, rows = filled(block_bytes, [3, 4])
    rows[1, offset] ^= 1 << data.draw(st.integers(0, 7))
    assert content.check(rows, [0, 1], [3, 4]) == [(1, offset)]


def test_a_sector_or_a_block_of_another_zeros_and_chunks_that_changed_places_are_found() -> None:
    content, rows = filled(131072, [3, 4])
    rows[0, 4096:4608] = rows[1, 4096:4608]
    assert content.check(rows, [0, 1], [3, 5]) == [(0, 4096), (1, 0)]
    rows[0], rows[1] = 0, np.roll(rows[1], 65536)
    assert content.check(rows, [0, 1], [3, 4]) == [(0, 0), (1, 0)]


def test_contents_are_the_same_where_numbers_have_their_high_byte_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = filled(4097, [7, 2**64 - 1])
    mix = content._mix
    monkeypatch.setattr(content, "_mix", lambda values: mix(values).astype(">u8"))
    _, others = filled(4097, [7, 2**64 - 1])
    assert rows.tobytes() == others.tobytes()


def test_contents_stay_the_same_from_version_to_version() -> None:
    _, rows = filled(100_001, [7])
    assert hashlib.sha256(rows.tobytes()).hexdigest() == (
        "0c3c17c792882e5f53039d7499b7ced19d79de03265d0b84696c28fae7d326ae"
    )
