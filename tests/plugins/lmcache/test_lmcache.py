"""LMCache's own server, benchmarks and connector over our tiers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.disk_use import damage_files
from tests.support.engines import (
    ENGINE,
    LMCACHE,
    TIMEOUT_S,
    Chats,
    passed_checks,
    play_chats,
    run_example,
    running,
)
from tests.support.host_server import serving
from tests.support.lmcache_programs import (
    CHUNKS,
    Entry,
    LMCacheServer,
    adapter,
    bench,
    run,
)
from tests.support.redis_servers import RedisServer
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until

pytestmark = pytest.mark.slow


def nvme(tmp_path: Path, capacity: str = "512MiB", **settings: object) -> Entry:
    return {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": capacity, **settings}


# The adapter alone.


def test_the_adapter_keeps_lmcache_s_interface(tmp_path: Path) -> None:
    assert len(passed_checks(LMCACHE, "lmcache_adapter_program.py", tmp_path / "adapter")) >= 20


# LMCache's own benchmarks.


@pytest.mark.parametrize(
    ("size_kb", "align_bytes"), [(64, 4096), pytest.param(3, 1, marks=pytest.mark.full)], ids=["64KiB", "odd"]
)
@pytest.mark.parametrize(
    "tier_type", ["nvme", *(pytest.param(each, marks=pytest.mark.full) for each in ("fs", "redis"))]
)
def test_lmcache_s_adapter_benchmark_finds_what_it_stored(
    tier_type: str, size_kb: int, align_bytes: int, tmp_path: Path, redis_server: RedisServer
) -> None:
    tier = {"type": "redis", "url": redis_server.url} if tier_type == "redis" else {**nvme(tmp_path), "type": tier_type}
    sizes = ("--num-keys", "32", "--in-flight", "4", "--rounds", "3", "--data-size-kb", str(size_kb))
    layout = ("--l1-align-bytes", str(align_bytes), "--lookup-max-hit-rate", "0.5", "--no-skip-verify")
    told = run(tmp_path, "bench", "l2", "--l2-adapter", adapter([tier]), *sizes, *layout)
    assert "All 128 keys data verified OK" in told
    assert re.findall(r"success_keys=(\d+)/128", told) == ["128"] * 4
    assert re.findall(r"found=(\d+)/128", told) == ["64"] * 4
    assert re.findall(r"loaded=(\d+)/128", told) == ["128"] * 4


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_server_that_was_killed_finds_and_verifies_everything(ranks: int, tmp_path: Path) -> None:
    server = LMCacheServer(tmp_path, [nvme(tmp_path)])
    with server:
        first = bench(server, tmp_path, 0, 4, ranks)
        settle(server, 4 * CHUNKS * ranks)
        server.kill()
        server.start()
        again = bench(server, tmp_path, 0, 5, ranks)
        assert server.counters("nvme")["tier"]["recovered_blocks_total"] == 4 * CHUNKS * ranks
        server.clear_l1()
        damage_files(tmp_path / "kv")
        damaged = bench(server, tmp_path, 0, 5, ranks)
        assert count_of(server.counters("nvme"), "tier", "corrupt_blocks_total") > 0
    assert first.found == dict.fromkeys(range(4), 0)
    assert again.found == {**dict.fromkeys(range(4), CHUNKS), 4: 0}
    assert damaged.found == dict.fromkeys(range(5), 0)
    assert first.digests.items() <= again.digests.items()
    assert again.digests == damaged.digests
    assert first.mismatches + again.mismatches + damaged.mismatches == 0


def settle(server: LMCacheServer, blocks: int, tier: str = "nvme") -> None:
    """Wait until the tier has stored `blocks`: LMCache stores in the background."""
    wait_until(lambda: server.counters(tier)["stored_blocks_total"] >= blocks, TIMEOUT_S, pause_s=0.05)


@pytest.mark.full
def test_a_server_finds_in_the_cache_of_a_host_what_a_killed_one_has_stored(tmp_path: Path) -> None:
    with serving(tmp_path, {"primary": {"capacity": "512MiB"}}) as served:
        tiers = [{"type": "host", "socket": served.address}]
        with LMCacheServer(tmp_path, tiers) as server:
            first = bench(server, tmp_path, 0, 4)
            settle(server, 4 * CHUNKS, "host")
            server.kill()
        with LMCacheServer(tmp_path, tiers) as server:
            again = bench(server, tmp_path, 0, 5)
    assert again.found == {**dict.fromkeys(range(4), CHUNKS), 4: 0}
    assert first.digests.items() <= again.digests.items()
    assert first.mismatches + again.mismatches == 0


# A whole engine.


def chat(models: Path, server: LMCacheServer | None, turns: int = 2) -> Chats:
    """Let an engine play conversations, over LMCache's server or alone.

    LMCache keeps a request's blocks from vLLM's prefix cache for steps after its end, so the cache cannot be dropped.
    """
    config = (
        None
        if server is None
        else {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
        }
    )
    with running(LMCACHE, ENGINE, str(models)) as engine:
        engine.tell("open", kv_transfer_config=config, enable_prefix_caching=False)
        return play_chats(engine, 12, turns)


@pytest.mark.full
def test_no_token_changes_whatever_happens_to_server_and_blocks(tmp_path: Path) -> None:
    models = tmp_path / "models"
    expected = chat(models, None)
    server = LMCacheServer(tmp_path, [nvme(tmp_path)], chunk_tokens=32)
    with server:
        first = chat(models, server)
        server.kill()
        server.start()
        again = chat(models, server)
        server.clear_l1()
        damage_files(tmp_path / "kv")
        damaged = chat(models, server, turns=1)
        assert count_of(server.counters("nvme"), "tier", "corrupt_blocks_total") > 0
    assert first.tokens == again.tokens == expected.tokens
    assert damaged.tokens == [answers[:1] for answers in expected.tokens]
    assert again.found > first.found > expected.found


@pytest.mark.full
def test_the_example_s_second_server_finds_what_the_first_stored(tmp_path: Path) -> None:
    told = run_example(LMCACHE, tmp_path)
    assert "first server: 0 of 12 chunks found, 0 mismatches" in told
    assert "second server: 12 of 12 chunks found, 0 mismatches" in told
