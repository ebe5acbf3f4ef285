"""Tenants' shares of an nvme tier: who loses blocks, exact counts, restarts, and what summaries say."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.support import shares
from tests.support.segment_entries import entries_of
from tests.support.stacks import manager_of, stack_of
from tiered_kv.base import make_offload_key
from tiered_kv.config.limits import TenantLimits
from tiered_kv.hints import TENANT_PATTERN
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.layout import PAGE_BYTES, TENANT_NAMES_BYTES_MAX, EntryTable, Summary, decode_names, local_tenants
from tiered_kv_nvme.segment import Segment
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.simulation import NvmeKeys
from tiered_kv_nvme.tenants import MOVED_SHARE_MAX, SegmentShares

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tiered_kv_nvme.store import SegmentStore

SHARES = {"quiet": "25%", "default": "75%"}


def used(store: SegmentStore) -> dict[str, int]:
    """Return the blocks that each tenant holds."""
    found: dict[str, int] = store.stats()["tenant_used_bytes"]
    return {name: held_bytes // 4096 for name, held_bytes in found.items() if held_bytes}


def recounted(store: SegmentStore) -> dict[str, int]:
    """Return the same, counted from the tables of segments."""
    assert store.pool.shares is not None
    counts = Counter[str]()
    for segment in store.pool.segments.values():
        if segment.epoch == store.pool.epoch:
            assert len(segment.table.tenants) == len(segment.table)
            counts.update(store.pool.shares.names[number] for number in segment.table.tenants)
    del counts[""]
    return dict(counts)


def opened(bench: StoreBench, limits: dict[str, str] | None = None) -> SegmentStore:
    return bench.open_ready(limits=TenantLimits(SHARES if limits is None else limits))


def flood(bench: StoreBench, store: SegmentStore, name: str, batches: int = 30) -> None:
    """Store more than the directory holds."""
    for number in range(batches):
        bench.put(store, make_keys(40, f"{name} {number}"), tenant="flooding")
    bench.wait_until_ready(store)


QUIET = make_keys(120, "quiet")


def put_quiet(bench: StoreBench, store: SegmentStore) -> None:
    for at in range(0, len(QUIET), 10):
        bench.put(store, QUIET[at : at + 10], tenant="quiet")


@pytest.mark.parametrize("limits", [None, SHARES])
def test_a_tenant_that_floods_the_tier_leaves_another_its_share(
    bench: StoreBench, limits: dict[str, str] | None
) -> None:
    store = bench.open_ready(limits=limits and TenantLimits(limits))
    for at in range(0, len(QUIET), 10):  # between the other's, so that they are in many segments
        bench.put(store, make_keys(90, f"before {at}"), tenant="flooding")
        bench.put(store, QUIET[at : at + 10], tenant="quiet")
    flood(bench, store, "flood")
    assert sum(store.contains(QUIET)) == (0 if limits is None else len(QUIET))
    if limits is not None:
        assert bench.get(store, QUIET) == set(QUIET)
        assert used(store) == recounted(store)
        stats = store.stats()
        evicted = stats["tenant_evicted_blocks_total"]
        assert evicted["quiet"] == 0
        assert evicted["flooding"] == stats["evicted_blocks_total"] > 0
        moved_bytes = stats["relocated_blocks_total"] * bench.block_bytes
        assert 0 < moved_bytes <= MOVED_SHARE_MAX * stats["reclaimed_segments_total"] * (256 << 10)
    assert bench.occupied_bytes() <= bench.capacity_bytes


def keys_only(limits: dict[str, str] | None) -> NvmeKeys:
    """Return a tier without files and threads that chooses as the tier does: 32 segments of about 30 blocks."""
    entry = {"path": "unused", "capacity": 4300 << 10, "segment": 128 << 10, "limits": limits}
    return NvmeKeys(NvmeSettings.model_validate(entry), 4096, lambda: 0.0)


def store_in(keys: NvmeKeys, tenant: str, numbers: range) -> None:
    keys.tenant = tenant
    for number in numbers:
        assert len(keys.store(make_keys(10, f"{tenant} {number}"))) == 10


def here(keys: NvmeKeys, tenant: str, numbers: range) -> list[int]:
    return [sum(map(keys.has, make_keys(10, f"{tenant} {number}"))) for number in numbers]


def test_what_others_leave_free_may_be_used_and_goes_first() -> None:
    keys = keys_only({"quiet": "75%", "default": "25%"})
    store_in(keys, "flooding", range(200))
    assert sum(here(keys, "flooding", range(200))) > 700, "nothing else needs the room"
    for number in range(52):
        store_in(keys, "quiet", range(number, number + 1))
        store_in(keys, "flooding", range(200 + 5 * number, 205 + 5 * number))
    assert here(keys, "quiet", range(52)) == [10] * 52
    assert sum(here(keys, "flooding", range(460))) > 150


def test_a_tenant_at_its_share_loses_its_oldest_blocks_and_keeps_its_new_ones() -> None:
    keys = keys_only(SHARES)
    for number in range(60):
        store_in(keys, "quiet", range(number, number + 1))
        store_in(keys, "flooding", range(10 * number, 10 * number + 10))
    found = here(keys, "quiet", range(60))
    assert sum(found[:30]) < 40
    assert sum(found[-14:]) > 100
    others = sum(here(keys, "flooding", range(600)))
    assert abs(sum(found) - (others + sum(found)) // 4) < 30, "to within a segment"


def hit_rate(keys: NvmeKeys, asked: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    """Return which part of its blocks the quiet tenant finds in the tier."""
    blocks = hits = 0
    for tenant, ids in asked:
        prompt = [make_offload_key(each.to_bytes(8, "big"), 0) for each in ids]
        found = next((at for at, key in enumerate(prompt) if not keys.has(key)), len(prompt))
        keys.load(prompt[:found])
        keys.tenant = tenant
        keys.store(prompt[found:])
        if tenant == shares.QUIET:
            blocks, hits = blocks + len(prompt), hits + found
    return hits / blocks


@pytest.mark.parametrize(
    ("blocks", "chats", "is_chatting"), [(640, 6, True), pytest.param(1280, 8, False, marks=pytest.mark.slow)]
)
def test_beside_a_flood_a_tenant_keeps_the_hits_of_its_share_alone(blocks: int, chats: int, is_chatting: bool) -> None:
    quiet = shares.quiet_requests(chats, active_chats=chats * 2 // 3)

    def rate(blocks: int, asked: Iterable[tuple[str, tuple[int, ...]]], **limits: object) -> float:
        settings = NvmeSettings.model_validate({**shares.nvme_of(blocks), **limits})
        return hit_rate(NvmeKeys(settings, shares.BLOCK_BYTES, lambda: 0.0), asked)

    def beside() -> Iterable[tuple[str, tuple[int, ...]]]:
        return shares.flooded(quiet, shares.flood(10 * len(quiet), is_chatting=is_chatting), 10)

    alone = rate(blocks // 4, ((shares.QUIET, ids) for ids in quiet))
    assert rate(blocks, beside(), limits=SHARES) >= 0.95 * alone
    assert rate(blocks, beside()) < 0.95 * alone


def test_tenants_that_store_alike_have_alike_and_move_little() -> None:
    keys = keys_only({"default": "25%"})
    for number in range(100):
        for tenant in "abcd":
            store_in(keys, tenant, range(number, number + 1))
    assert all(170 < sum(here(keys, tenant, range(100))) < 260 for tenant in "abcd")
    assert keys.moved_blocks < MOVED_SHARE_MAX * keys.written_blocks


def test_among_many_tenants_at_their_shares_one_that_is_below_keeps_its_blocks() -> None:
    others, blocks = 80, 64 * 60
    entry = {"path": "unused", "capacity": 64 * (284 << 10), "segment": 280 << 10}
    settings = NvmeSettings.model_validate({**entry, "limits": {"default": f"{4 * blocks // (others + 1)}KiB"}})
    keys, chance = NvmeKeys(settings, 4096, lambda: 0.0), random.Random(1)
    quiet = {blocks // 20: range(1), blocks // 10: range(1, 2)}  # in all 20 blocks: less than half of its share
    for number in range(3 * blocks // 10):
        store_in(keys, "quiet", quiet.get(number, range(0)))
        store_in(keys, f"other-{chance.randrange(others)}", range(number, number + 1))
    assert here(keys, "quiet", range(2)) == [10, 10]


def test_segments_of_two_blocks_gain_room(bench: StoreBench) -> None:
    """Two batches of one block do not fit into such a segment: a block that moves would take all of another."""
    bench.block_bytes, bench.segment_bytes, bench.capacity_bytes = 64 << 10, 144 << 10, 1250 << 10
    store = opened(bench, {"default": "25%"})
    for number in range(40):
        keys = make_keys(1 + number % 5, f"{number}")
        assert bench.put(store, keys, tenant=f"tenant-{number % 5}").successful_keys in (None, keys)
    bench.wait_until_ready(store)


def test_after_a_reset_the_shares_count_from_nothing(bench: StoreBench) -> None:
    store = opened(bench)
    flood(bench, store, "old")
    store.reset()
    assert used(store) == {}
    put_quiet(bench, store)
    flood(bench, store, "new")
    assert all(store.contains(QUIET))
    assert used(store) == recounted(store)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restart_keeps_the_shares_and_after_a_kill_those_of_full_segments(bench: StoreBench, is_killed: bool) -> None:
    store = opened(bench)
    put_quiet(bench, store)
    flood(bench, store, "before")
    before = used(store)
    if is_killed:
        bench.wait_until(lambda: store.pool.next_to_seal() is None)
        bench.crash()
    else:
        store.close()
    store = opened(bench)
    after = used(store)
    assert after == recounted(store)
    if is_killed:
        missing = [before[name] - after[name] for name in ("quiet", "flooding")]
        assert 0 <= min(missing) <= sum(missing) < 2 * 64, "blocks of two segments that were being filled"
    else:
        assert after == before
    flood(bench, store, "after")
    assert sum(store.contains(QUIET)) >= after["quiet"]


def test_blocks_of_a_process_without_limits_count_for_nobody_and_go_first(bench: StoreBench) -> None:
    store = bench.open_ready()
    bench.fill(store, range(20))
    assert not any(name.startswith("tenant") for name in store.stats())
    assert not any(segment.table.tenants or segment.held for segment in store.pool.segments.values())
    store.close()
    store = opened(bench)
    assert used(store) == {}
    put_quiet(bench, store)
    for number in range(12):
        bench.put(store, make_keys(40, f"new {number}"), tenant="other")
    assert all(store.contains(QUIET))
    assert store.stats()["evicted_blocks_total"] > 0
    assert sum(store.stats()["tenant_evicted_blocks_total"].values()) == 0
    store.close()
    store = bench.open_ready()
    assert bench.get(store, QUIET) == set(QUIET)
    assert not any(segment.table.tenants or segment.held for segment in store.pool.segments.values())


def test_a_segment_that_was_filled_without_limits_gets_a_summary_without_tenants(bench: StoreBench) -> None:
    """It has no room for their numbers: 78 entries and keys take a page of the table, with numbers two."""
    bench.segment_bytes, bench.capacity_bytes = 512 << 10, 8 << 20
    store, keys = opened(bench), make_keys(78)
    bench.put(store, keys, tenant="quiet")
    (segment,) = (each for each in store.pool.segments.values() if len(each.table))
    segment.end_offset = segment.segment_bytes - 2 * PAGE_BYTES
    assert store._files.seal(segment, store.pool.tenant_names)
    assert footer_names(bench, segment) == []
    segment.end_offset -= PAGE_BYTES
    assert store._files.seal(segment, store.pool.tenant_names)
    assert footer_names(bench, segment) == ["quiet"]


def footer_names(bench: StoreBench, segment: Segment) -> list[str]:
    with bench.segments[segment.slot].open("rb") as file:
        file.seek(segment.segment_bytes - PAGE_BYTES)
        return decode_names(memoryview(file.read(PAGE_BYTES)))


def test_a_summary_names_the_tenants_with_most_blocks_as_far_as_its_footer_has_room() -> None:
    names = ["", *(f"{number:064d}" for number in range(100))]
    table, keys = EntryTable(), make_keys(5050)
    numbers = [number for number in range(1, 101) for _ in range(number)]
    table.append(keys, entries_of(keys), [0] * len(keys), numbers)
    column, encoded = local_tenants(table, names)
    assert len(encoded) <= TENANT_NAMES_BYTES_MAX < len(encoded) + 65
    page = memoryview(bytearray(PAGE_BYTES))
    Summary(4096, len(keys), bytes(16), 1, 1, 1, 4096, 1 << 20, bytes(16)).encode(page, encoded)
    assert Summary.decode(page) is not None
    kept = decode_names(page)
    assert kept == names[: -len(kept) - 1 : -1]
    found = [kept[number - 1] if number else "" for number in np.frombuffer(column, "<u2")]
    assert found == [names[number] if names[number] in kept else "" for number in numbers]


@pytest.mark.hypothesis
@hypothesis.given(st.binary(max_size=TENANT_NAMES_BYTES_MAX), st.none() | st.integers(0, (1 << 32) - 1))
@hypothesis.example(b"\xff" + b"a" * 20, None)
@hypothesis.example(b"\x03a b\x02\xff\xff\x00\x01x\x41" + b"a" * 65 + b"\x02\n\n\x01\xc3", 1 << 31)
def test_a_footer_with_any_names_costs_shares_and_nothing_else(names: bytes, size_bytes: int | None) -> None:
    """Who can write to the directory can write any footer."""
    page = memoryview(bytearray(PAGE_BYTES))
    Summary(4096, 1, bytes(16), 1, 1, 1, 4096, 1 << 20, bytes(16)).encode(page, names)
    if size_bytes is not None:
        page[104:108] = size_bytes.to_bytes(4, "little")
    found = decode_names(page)
    assert len(found) <= TENANT_NAMES_BYTES_MAX
    assert all(re.fullmatch(TENANT_PATTERN, name) for name in found if name)
    segment = Segment(0, -1, 1 << 20, 1)
    keys = make_keys(3)
    segment.table.append(keys, entries_of(keys), [0] * 3, [0, 1, 65535])
    segment.tenant_names = found
    tenants = SegmentShares(TenantLimits({}), 1 << 20)
    tenants.adopt(segment)
    assert sum(segment.held.values()) == 3 * 4096
    assert {tenants.names[number] for number in segment.table.tenants} <= {"", *found[:1]}


# In a stack.


def stack_on(path: Path, limits: dict[str, str] | None = None) -> Stack:
    entry = {"type": "nvme", "path": str(path), "capacity": "4MiB", "segment": "256KiB", "store_budget": "1MiB"}
    return open_stack(stack_of({**entry, "limits": SHARES if limits is None else limits}, blocks=100))


def put(stack: Stack, tenant: str, batches: range) -> None:
    for number in batches:
        keys = [f"{tenant}-{number}-{at}".encode() for at in range(20)]
        assert stack.put(keys, bytes(20 * 4096), hints={"tenant": tenant}) == 20
        assert stack.flush(60.0)


def counted(stack: Stack, name: str) -> dict[str, Any]:
    found: dict[str, Any] = stack.counters()["nvme"]["tier"][f"tenant_{name}"]
    return found


def test_in_a_stack_shares_hold_over_a_restart_and_a_removal(tmp_path: Path) -> None:
    with stack_on(tmp_path / "kv") as stack:
        put(stack, "quiet", range(6))
        put(stack, "flooding", range(20))
        before = counted(stack, "used_bytes")
        assert counted(stack, "share_bytes")["quiet"] == 1 << 20
    with stack_on(tmp_path / "kv") as stack:
        assert counted(stack, "used_bytes") == before
        manager = manager_of(stack)
        manager.tenant_limits()["nvme"].change({"quiet": "20%"})
        manager.removals.ask("drain", "nvme")
        wait_until(lambda: manager.removed_tiers().get("nvme") == "drained", 60.0)
        manager.removals.ask("attach", "nvme")
        wait_until(lambda: not manager.removed_tiers(), 60.0)
        assert counted(stack, "share_bytes")["quiet"] == (4 << 20) // 5
        assert counted(stack, "used_bytes") == before
        put(stack, "flooding", range(20, 60))
        assert counted(stack, "evicted_blocks_total")["quiet"] == 0
        keys = [f"quiet-{number}-{at}".encode() for number in range(6) for at in range(20)]
        assert all(stack.contains([key]) for key in keys)
