"""Runs in an environment with SGLang: our backend over its host pools, as its threads call it, without an engine.

    python sglang_pools_program.py DIRECTORY [CHECK...]

Runs the checks that are named, or all. Prints a line of JSON for each: its name, and what went wrong, or nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# The parts have set the variables that SGLang reads.
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.runtime_context import get_parallel

from tests.engines.program_checks import damage, run_checks
from tests.plugins.sglang.sglang_engine_program import save_model
from tests.plugins.sglang.sglang_program_parts import (
    PAGES,
    erase,
    extra_config,
    fill,
    hashes,
    mamba_pool,
    mha_pool,
    mla_pool,
    open_backend,
    overwrite,
    pages_of,
    publish_engine,
    slots,
    storage_config,
)
from tests.support.host_server import serving
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv_sglang.backend import TieredKVHiCache

DIRECTORY = Path(sys.argv[1])
WAIT_S = 60.0
COUNT = 6
"""Pages that a check moves."""
CLOSING = ExitStack()

POOLS: dict[str, Callable[[], Any]] = {
    "MHA, layer_first": lambda: mha_pool("layer_first"),
    "MHA, page_first": lambda: mha_pool("page_first"),
    "MHA, page_first_direct": lambda: mha_pool("page_first_direct"),
    "MHA, page_head": lambda: mha_pool("page_head"),
    "MHA, rows that are no pages of the disk": lambda: mha_pool("layer_first", heads=1, width=24),
    "MHA, keys wider than values, page_first": lambda: mha_pool("page_first", value_width=32),
    "MHA, keys wider than values, page_first_direct": lambda: mha_pool("page_first_direct", value_width=32),
    "MLA, layer_first": lambda: mla_pool("layer_first"),
    "MLA, page_first": lambda: mla_pool("page_first"),
    "MLA, page_first_direct": lambda: mla_pool("page_first_direct"),
}


def nvme(name: str, **more: object) -> dict[str, object]:
    return {"type": "nvme", "path": str(DIRECTORY / name), "capacity": "64MiB", **more}


def shared(name: str) -> dict[str, object]:
    return {"type": "fs", "path": str(DIRECTORY / name), "capacity": "64MiB"}


def opened(
    tier: dict[str, object], pool: Any, sidecars: dict[str, Any] | None = None, **fields: Any
) -> TieredKVHiCache:
    """Open a backend that is closed when the check has ended."""
    backend = open_backend(storage_config(extra_config([tier]), **fields), pool, sidecars)
    CLOSING.callback(backend.close)
    return backend


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def check_round_trip(name: str) -> None:
    """Pages come back to other places, in this process and in the next one."""
    pool = POOLS[name]()
    fill(pool)
    first, second = list(range(1, 1 + COUNT)), list(range(10, 10 + COUNT))
    stored = pages_of(pool, first)
    backend = opened(nvme(name), pool)
    assert backend.batch_exists(hashes(COUNT)) == 0
    assert backend.batch_set_v1(hashes(COUNT), slots(pool, first)) == [True] * COUNT
    assert backend.batch_exists(hashes(COUNT + 2)) == COUNT
    backend.close()
    erase(pool)
    backend = opened(nvme(name), pool)
    assert backend.batch_exists(hashes(COUNT)) == COUNT
    assert backend.batch_get_v1(hashes(COUNT), slots(pool, second)) == [True] * COUNT
    assert pages_of(pool, second) == stored
    untouched = [page for page in range(PAGES) if page not in second]
    assert all(not any(run) for page in pages_of(pool, untouched) for run in page)
    assert backend.batch_get_v1(hashes(2, start=COUNT - 1), slots(pool, [20, 21])) == [True, False]
    backend.clear()
    assert backend.batch_exists(hashes(COUNT)) == 0


def check_states_of_a_hybrid_model() -> None:
    kv, mamba = mha_pool("page_first"), mamba_pool("page_first")
    fill(kv)
    fill(mamba, seed=1)
    tier = nvme("hybrid", capacity="256MiB")
    backend = opened(tier, kv, {"mamba": mamba})
    names = sorted(backend.counters())
    assert names == ["kv", "mamba-0", "mamba-1", "mamba-2"], names
    assert sorted(path.name for path in (DIRECTORY / "hybrid").iterdir()) == names
    capacities = [counted["nvme"]["tier"]["capacity_bytes"] for counted in backend.counters().values()]
    assert sum(capacities) <= 256 << 20, capacities
    assert backend.batch_set_v1(hashes(COUNT), slots(kv, range(COUNT))) == [True] * COUNT
    states, keys = pages_of(mamba, [3, 5]), [hashes(COUNT)[3], hashes(COUNT)[5]]
    stored = backend.batch_set_v2([PoolTransfer(PoolName.MAMBA, host_indices=slots(mamba, [3, 5]), keys=keys)])
    assert stored == {"mamba": [True, True]}
    asked = [PoolTransfer(PoolName.MAMBA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    found = backend.batch_exists_v2(hashes(COUNT + 1), asked)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (COUNT, {"kv": COUNT, "mamba": COUNT}), found
    assert found.restorable_prefix_pages == [4, 6], found
    erase(mamba)
    loaded = backend.batch_get_v2([PoolTransfer(PoolName.MAMBA, host_indices=slots(mamba, [7, 9]), keys=keys)])
    assert loaded == {"mamba": [True, True]}
    assert pages_of(mamba, [7, 9]) == states


def check_hits_are_those_of_sglang_s_own_backend() -> None:
    """Of every kind of policy, whatever pages are there."""
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(DIRECTORY / "own")
    kv, draft = mha_pool("page_first"), mha_pool("page_first", layers=1)
    config = storage_config(extra_config([nvme("hits")]))
    own = HiCacheFile(config)
    own.register_mem_host_pool_v2(kv, "kv")
    own.register_mem_host_pool_v2(draft, "draft")
    ours = opened(nvme("hits"), kv, {"draft": draft})
    pages = hashes(5)
    for there, side in ((0, ""), (3, "012"), (5, "0134"), (5, "4"), (4, "23"), (5, "01234")):
        ours.clear()
        own.clear()
        keys = [pages[int(page)] for page in side]
        for backend in (own, ours):
            if there:
                places = slots(kv, range(1, there + 1))
                backend.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=places, keys=pages[:there])])
            if keys:
                places = slots(draft, range(1, len(keys) + 1))
                backend.batch_set_v2([PoolTransfer(PoolName.DRAFT, host_indices=places, keys=keys)])
        for policy, window in (
            (PoolHitPolicy.ALL_PAGES, 0),
            (PoolHitPolicy.TRAILING_PAGES, 1),
            (PoolHitPolicy.TRAILING_PAGES, 2),
        ):
            asked = [PoolTransfer(PoolName.DRAFT, keys=pages[:window], hit_policy=policy)]
            assert ours.batch_exists_v2(pages, asked) == own.batch_exists_v2(pages, asked), (there, side, policy)
    block_groups = [PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS)]
    assert ours.batch_exists_v2(pages, block_groups).kv_hit_pages == 5
    ours.close()


def check_a_pool_that_is_registered_later() -> None:
    """That of a draft model: SGLang registers it when the tiers are open."""
    kv, draft = mha_pool("page_first"), mha_pool("page_first", layers=1)
    backend = opened(nvme("late"), kv)
    backend.register_mem_host_pool_v2(draft, "draft")
    assert sorted(backend.counters()) == ["draft", "kv"]
    assert backend.batch_set_v1(hashes(1), slots(kv, [1])) == [True]
    message = refusal(lambda: backend.register_mem_host_pool_v2(mha_pool("page_first"), "draft_swa"))
    assert "comes too late" in message, message


def check_damaged_bytes_are_misses() -> None:
    pool = mha_pool("page_first")
    fill(pool)
    backend = opened(nvme("damage"), pool)
    backend.batch_set_v1(hashes(COUNT), slots(pool, range(COUNT)))
    backend.close()
    for page, part in ((2, 1), (4, 0)):
        damage(DIRECTORY / "damage", pages_of(pool, [page])[0][part])
    backend = opened(nvme("damage"), pool)
    loaded = backend.batch_get_v1(hashes(COUNT), slots(pool, range(10, 10 + COUNT)))
    assert loaded == [page not in (2, 4) for page in range(COUNT)], loaded
    assert backend.batch_exists(hashes(COUNT)) == 2, "its other part is there"
    assert count_of(backend.counters(), "kv", "nvme", "tier", "corrupt_blocks_total") == 2, backend.counters()


def check_ranks_of_latent_attention_share() -> None:
    pools = [mla_pool("page_first"), mla_pool("page_first")]
    fill(pools[0])
    mla: dict[str, Any] = {"is_mla_model": True, "tp_size": 2}
    message = refusal(lambda: opened(nvme("mla"), pools[0], **mla))
    assert "'nvme', whose storage belongs to one process" in message, message
    assert "tiers.0" in message
    first, second = (opened(shared("mla"), pool, tp_rank=rank, **mla) for rank, pool in enumerate(pools))
    assert first.batch_set_v1(hashes(COUNT), slots(pools[0], range(COUNT))) == [True] * COUNT
    assert second.batch_get_v1(hashes(COUNT), slots(pools[1], range(COUNT))) == [True] * COUNT
    assert pages_of(pools[0], range(COUNT)) == pages_of(pools[1], range(COUNT))
    # Without tensor parallelism the pages are the same.
    alone = opened(shared("mla"), pools[1], is_mla_model=True)
    assert alone.batch_exists(hashes(COUNT)) == COUNT


def check_ranks_share_the_cache_of_a_host() -> None:
    """One nvme directory, in the server. With heads each rank has a part of it, with latent attention all have one."""
    for kind, is_mla, namespaces in (("MHA", False, 2), ("MLA", True, 1)):
        pools = [POOLS[f"{kind}, page_first"]() for _ in range(2)]
        stack: dict[str, object] = {"primary": {"capacity": "16MiB"}, "secondary": [nvme(f"served-{kind}")]}
        with serving(DIRECTORY, stack, namespaces) as served:
            tier: dict[str, object] = {"type": "host", "socket": served.address}
            ranks = [opened(tier, pool, is_mla_model=is_mla, tp_size=2, tp_rank=at) for at, pool in enumerate(pools)]
            for pool, rank in zip(pools[: 1 if is_mla else 2], ranks, strict=False):
                fill(pool, seed=ranks.index(rank))
                assert rank.batch_set_v1(hashes(COUNT), slots(pool, range(COUNT))) == [True] * COUNT
            for pool, rank in zip(pools, ranks, strict=True):
                stored = pages_of(pools[0] if is_mla else pool, range(COUNT))
                assert rank.batch_exists(hashes(COUNT + 1)) == COUNT
                assert rank.batch_get_v1(hashes(COUNT), slots(pool, range(10, 10 + COUNT))) == [True] * COUNT
                assert pages_of(pool, range(10, 10 + COUNT)) == stored
            assert len(served.namespaces.stacks) == namespaces
            message = refusal(partial(opened, tier, mha_pool("page_first"), tp_size=3))
            assert "start it with a larger --namespaces" in message, message
            for rank in ranks:
                rank.close()


def check_a_draft_model_that_only_one_rank_would_store_is_refused() -> None:
    """SGLang stores it on the first rank, where it has the first rank's heads; without it nothing would be found."""
    draft = {"draft": mha_pool("page_first", layers=1)}
    message = refusal(lambda: opened(shared("draft"), mla_pool("page_first"), draft, is_mla_model=True, tp_size=2))
    assert "'draft'" in message, message
    assert "on the first of 2 tensor parallel ranks" in message, message
    opened(shared("draft"), mla_pool("page_first"), draft, is_mla_model=True).close()
    replicated = {"draft": mla_pool("page_first")}
    opened(shared("draft"), mla_pool("page_first"), replicated, is_mla_model=True, tp_size=2).close()


def check_what_is_measured_is_what_sglang_asks_for() -> None:
    """SGLang takes measurements with its metrics alone; without them none may pile up."""
    pool = mha_pool("page_first")
    for is_asked, expected in ((False, []), (True, [COUNT])):
        backend = opened(nvme("measured"), pool, enable_storage_metrics=is_asked)
        backend.batch_set_v1(hashes(COUNT), slots(pool, range(COUNT)))
        stats = backend.get_stats()
        assert (stats.backup_pgs, len(stats.backup_bandwidth)) == (expected, len(expected))
        assert backend.get_stats().backup_pgs == []
        backend.close()


def check_ranks_that_have_parts_share_nothing() -> None:
    pool = mha_pool("page_first")
    fill(pool)
    places: list[dict[str, Any]] = [
        {"tp_size": 2, "tp_rank": 0},
        {"tp_size": 2, "tp_rank": 1},
        {"tp_size": 4, "tp_rank": 0},
        {"pp_size": 2, "pp_rank": 0},
        {"pp_size": 2, "pp_rank": 1},
        {"attn_cp_size": 2, "attn_cp_rank": 1},
    ]
    for place, fields in enumerate(places):
        backend = opened(shared("ranks"), pool, **fields)
        assert backend.batch_exists(hashes(1)) == 0, fields
        assert backend.batch_set_v1(hashes(1), slots(pool, [place])) == [True]
        backend.close()
    # The replicas of data parallelism do.
    backend = opened(shared("ranks"), pool, tp_size=2, tp_rank=1, dp_rank=3)
    assert backend.batch_get_v1(hashes(1), slots(pool, [20])) == [True]
    assert pages_of(pool, [20]) == pages_of(pool, [1])


def check_each_rank_has_a_directory() -> None:
    pool = mha_pool("page_first")
    with get_parallel().override(launch_world_size=2, launch_world_rank=1):
        message = refusal(lambda: opened(nvme("world"), pool, tp_size=2))
        assert "2 processes would have one directory" in message, message
        assert "write ${TIERED_KV_RANK} into it" in message, message
        backend = opened(nvme("world-${TIERED_KV_RANK}"), pool, tp_size=2, tp_rank=1)
        assert (DIRECTORY / "world-1" / "kv").is_dir()
        backend.close()
    with get_parallel().override(dp_size=2, dp_rank=1):
        assert "write ${TIERED_KV_REPLICA} into it" in refusal(lambda: opened(nvme("world"), pool))
        opened(nvme("replica-${TIERED_KV_REPLICA}"), pool).close()
        assert (DIRECTORY / "replica-1" / "kv").is_dir()


def check_pools_without_fixed_places_are_refused() -> None:
    kv = mha_pool("page_first")
    for name, pool in (
        ("mamba", mamba_pool("page_first", extra=True)),
        ("deepseek_v4_c4", LogicalHostPool(PAGES * 64, 64)),
    ):
        message = refusal(partial(opened, nvme("places"), kv, {name: pool}))
        assert f"SGLang's host pool '{name}' ({type(pool).__name__}" in message, message
        assert "has no fixed places for its pages" in message, message


def check_settings_are_checked() -> None:
    pool, good = mha_pool("page_first"), extra_config([nvme("settings")])
    cases: list[tuple[dict[str, object], str]] = [
        ({**good, "interface_v1": 0}, "interface_v1: "),
        ({name: value for name, value in good.items() if name != "interface_v1"}, "interface_v1: this key is required"),
        ({**good, "tiers": [nvme("settings", capacity="much")]}, "tiers.0.capacity"),
        ({**good, "tier": []}, "tier: unknown key"),
        ({**good, "namespace": {"dtype": "float16"}}, "SGLang sets it"),
    ]
    for extra, says in cases:
        message = refusal(partial(open_backend, storage_config(extra), pool))
        assert says in message, (says, message)
    os.environ["A_CAPACITY"] = "64MiB"
    opened(nvme("variables", capacity="${A_CAPACITY}"), pool).close()


def check_a_load_that_hangs_costs_hits_only() -> None:
    """Requests wait for what is found. So nothing is, until the load has returned; its pages are SGLang's then."""
    pool = mha_pool("page_first")
    # On a slow disk a store takes longer than the load may.
    before = opened(nvme("hanging"), pool)
    assert before.batch_set_v1(hashes(COUNT), slots(pool, range(COUNT))) == [True] * COUNT
    before.close()
    backend = opened(nvme("hanging", job_timeout="0.1s"), pool)
    held: list[Callable[[list[bool]], None]] = []
    answers: list[list[bool]] = []
    load = partial(backend.batch_get_v1, hashes(1), slots(pool, [10]))
    thread = threading.Thread(target=lambda: answers.append(load()), daemon=True)
    with mock.patch.object(DirectTiers, "load", lambda tiers, keys, offsets, on_done: held.append(on_done)):
        thread.start()
        wait_until(lambda: bool(held) and backend.batch_exists(hashes(COUNT)) == 0)
    assert answers == []
    held[0]([True, True])
    thread.join()
    assert answers == [[True]]
    assert backend.batch_exists(hashes(COUNT)) == COUNT


def check_three_threads() -> None:
    """One stores, one loads and one asks at the same time; every page comes, and none has another's bytes."""
    pool = mha_pool("page_first")
    fill(pool)
    backend = opened(nvme("threads"), pool)
    expected = dict(zip(hashes(8), pages_of(pool, range(8)), strict=True))
    loaded: set[int] = set()
    errors: list[str] = []

    def store() -> None:
        for at in range(8):
            backend.batch_set_v1(hashes(1, start=at), slots(pool, [at]))

    def load() -> None:
        end_s = time.monotonic() + WAIT_S
        while len(loaded) < 8 and time.monotonic() < end_s:
            for at in range(8):
                overwrite(pool, [12 + at])
                if backend.batch_get_v1(hashes(1, start=at), slots(pool, [12 + at])) == [True]:
                    loaded.add(at)
                    if pages_of(pool, [12 + at])[0] != expected[hashes(1, start=at)[0]]:
                        errors.append(f"page {at} has other bytes")

    def ask() -> None:
        for _ in range(32):
            backend.batch_exists(hashes(8))

    threads = [threading.Thread(target=target) for target in (store, load, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert loaded == set(range(8))
    assert backend.batch_exists(hashes(8)) == 8
    backend.close()
    assert backend.batch_exists(hashes(8)) == 0, "what is closed has nothing"


def check_threads_that_ran_before_a_clear_store_and_load_nothing() -> None:
    """A backup goes on, batch by batch, with pages from before the clear. A flush of SGLang's cache ends it."""
    kv, mamba = mha_pool("layer_first"), mamba_pool("page_first")
    fill(kv)
    backend = opened(nvme("cleared"), kv, {"mamba": mamba})
    with ThreadPoolExecutor(1) as before:
        store = partial(backend.batch_set_v1, hashes(COUNT), slots(kv, range(COUNT)))
        assert before.submit(store).result() == [True] * COUNT
        backend.clear()
        assert before.submit(store).result() == [False] * COUNT
        states = [PoolTransfer(PoolName.MAMBA, host_indices=slots(mamba, [3]), keys=hashes(1))]
        assert before.submit(backend.batch_set_v2, states).result() == {"mamba": [False]}
        assert backend.batch_exists(hashes(COUNT)) == 0
        with ThreadPoolExecutor(1) as after:
            assert after.submit(store).result() == [True] * COUNT
            assert after.submit(backend.batch_exists, hashes(COUNT)).result() == COUNT
        assert before.submit(backend.batch_exists, hashes(COUNT)).result() == 0
        load = partial(backend.batch_get_v1, hashes(COUNT), slots(kv, range(10, 10 + COUNT)))
        assert before.submit(load).result() == [False] * COUNT
    backend.clear()
    with ThreadPoolExecutor(1) as flushed:
        assert flushed.submit(store).result() == [True] * COUNT, "no thread from before the clear is alive"


def check_places_outside_of_the_pool_are_refused() -> None:
    """An exception would end SGLang's thread, and so all of its backups."""
    pool = mha_pool("page_first")
    fill(pool)
    backend = opened(nvme("places"), pool)
    assert backend.batch_set_v1(hashes(2), slots(pool, [1, 2])) == [True, True]
    before = pages_of(pool, range(PAGES))
    for pages in ([3, PAGES + 1], [-1, 3], [4, 4]):
        assert backend.batch_get_v1(hashes(2), slots(pool, pages)) == [False, False], pages
    assert backend.batch_set_v1(hashes(2, start=2), slots(pool, [3, PAGES + 1])) == [False, False]
    assert pages_of(pool, range(PAGES)) == before
    assert backend.batch_exists(hashes(4)) == 2
    assert backend.batch_get_v1(hashes(2), slots(pool, [5, 6])) == [True, True]


def closed_after(check: Callable[[], None]) -> Callable[[], None]:
    """Return a check that closes its backends at its end."""

    def run() -> None:
        with CLOSING:
            check()

    return run


def main() -> None:
    save_model(DIRECTORY / "model")
    publish_engine(DIRECTORY / "model")
    checks: dict[str, Callable[[], None]] = {f"round trip: {name}": partial(check_round_trip, name) for name in POOLS}
    own = {name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")}
    del own["round_trip"]
    every = {name: closed_after(check) for name, check in {**checks, **own}.items()}
    run_checks(SimpleNamespace(**every), sys.argv[2:] or list(every))


if __name__ == "__main__":
    main()
