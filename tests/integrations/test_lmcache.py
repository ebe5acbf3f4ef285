"""LMCache's own server, benchmarks and connector over our tiers.

`test_lmcache.py FOLDER` is the program that has a mount namespace of its own, for the full file system.
"""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import (
    LMCACHE,
    TIMEOUT_S,
    Message,
    damage_segments,
    interpreter,
    passed_checks,
    run_example,
    running,
)
from tests.support.lmcache_programs import (
    CHUNKS,
    Entry,
    LMCacheServer,
    Sequences,
    adapter,
    bench,
    bench_command,
    run,
)
from tests.support.mounts import command_in_namespace, missing_for_tmpfs, small_tmpfs
from tests.support.redis_servers import RedisServer, redis_server
from tiered_kv.metrics.instruments import count_of
from tiered_kv.testing.control import wait_until

__all__ = ["redis_server"]  # a fixture

pytestmark = pytest.mark.slow

FILE_SYSTEM_BYTES = 28 << 20
CHAT: Mapping[str, Any] = {"mode": "chat", "threads": 1, "conversations": 12, "turns": 2, "prefix_caching": False}
"""LMCache keeps a request's blocks from vLLM's prefix cache for steps after its end, so the cache cannot be dropped."""


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


@functools.cache
def sequences_of_a_server_alone(directory: Path, ranks: int) -> Sequences:
    """Return the digests of the benchmark's bytes, which are the same in each run."""
    with LMCacheServer(directory, [{"type": "memory", "capacity": "256MiB"}]) as server:
        return bench(server, directory, 0, 3, ranks)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lmcache")


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
        damage_segments(tmp_path / "kv")
        damaged = bench(server, tmp_path, 0, 5, ranks)
        assert count_of(server.counters("nvme"), "tier", "corrupt_blocks_total") > 0
    assert first.found == dict.fromkeys(range(4), 0)
    assert again.found == {**dict.fromkeys(range(4), CHUNKS), 4: 0}
    assert damaged.found == dict.fromkeys(range(5), 0)
    assert first.digests.items() <= again.digests.items()
    assert again.digests == damaged.digests
    assert first.mismatches + again.mismatches + damaged.mismatches == 0


def settle(server: LMCacheServer, blocks: int) -> None:
    """Wait until the nvme tier has stored `blocks`: LMCache stores in the background."""
    wait_until(lambda: server.counters("nvme")["stored_blocks_total"] >= blocks, TIMEOUT_S, pause_s=0.05)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_killed_at_any_moment_serves_no_wrong_byte(ranks: int, alone: Path, tmp_path: Path) -> None:
    expected = sequences_of_a_server_alone(alone, ranks)
    moments, found = random.Random(ranks), 0
    with LMCacheServer(tmp_path, [nvme(tmp_path, "48MiB", segment="6MiB")]) as server:
        for _ in range(3):
            command = bench_command(server, tmp_path, 0, 3, ranks)
            with (tmp_path / "bench").open("wb") as log:
                client = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                try:
                    time.sleep(moments.uniform(2.0, 12.0))
                    server.kill()
                finally:
                    client.kill()
                    client.wait()
            server.start()
            told = bench(server, tmp_path, 0, 3, ranks)
            assert told.digests == expected.digests
            assert told.mismatches == 0
            found += sum(told.found.values())
    assert found > 0


@pytest.mark.full
def test_a_full_file_system_costs_stores_only(tmp_path: Path) -> None:
    interpreter(LMCACHE)
    if missing := missing_for_tmpfs():
        pytest.skip(missing)
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command_in_namespace(command), capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["mismatches"] == 0
    assert told["same_digests"]
    assert told["refused"] > 0
    assert told["found_after_restart"] > 0


def fill_a_file_system(folder: Path) -> None:
    """Run the benchmark over a tier whose file system is smaller than its capacity; print what happened."""
    with small_tmpfs(folder / "full", FILE_SYSTEM_BYTES) as point:
        server = LMCacheServer(folder, [nvme(point, "512MiB", segment="6MiB", job_timeout="4s")])
        with server:
            first = bench(server, folder, 0, 6)
            stats = server.counters("nvme")["tier"]
            server.kill()
            server.start()
            again = bench(server, folder, 4, 6)  # the newest, for which the tier gave up others
    refusals = ("no_space_errors_total", "refused_stores_total", "room_timeouts_total")
    told = {
        "mismatches": first.mismatches + again.mismatches,
        "same_digests": again.digests.items() <= first.digests.items(),
        "refused": sum(count_of(stats, name) for name in refusals),
        "found_after_restart": sum(again.found.values()),
    }
    print(json.dumps(told))


@pytest.mark.full
def test_a_redis_server_that_freezes_costs_hits_only(tmp_path: Path, redis_server: RedisServer) -> None:
    tier = {"type": "redis", "url": redis_server.url, "timeout": "1s", "job_timeout": "2s", "breaker_cooldown": "1s"}
    server = LMCacheServer(tmp_path, [tier])
    with server:
        first = bench(server, tmp_path, 0, 3)
        redis_server.freeze()
        frozen = bench(server, tmp_path, 0, 6)
        assert server.counters("redis")["breaker_opened_total"] > 0
        redis_server.thaw()
        server.stop()
    with server:
        again = bench(server, tmp_path, 0, 6)
    assert first.found == dict.fromkeys(range(3), 0)
    assert again.found == dict.fromkeys(range(3), CHUNKS) | {number: again.found[number] for number in range(3, 6)}
    assert first.digests.items() <= frozen.digests.items()
    assert frozen.digests == again.digests
    assert first.mismatches + frozen.mismatches + again.mismatches == 0


# A whole engine.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    interpreter(LMCACHE)
    return tmp_path_factory.mktemp("vllm") / "model"


def chat(model: Path, server: LMCacheServer | None, **options: object) -> Message:
    """Let an engine play conversations, over LMCache's server or alone."""
    told: dict[str, object] = {**CHAT, **options}
    if server is not None:
        told["kv_transfer_config"] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
        }
    with running(LMCACHE, "vllm_engine_program.py", str(model), json.dumps(told)) as program:
        *_, result = program.messages()
    return result


@pytest.mark.full
def test_an_engine_and_a_server_that_were_restarted_compute_less_and_answer_the_same(
    model: Path, tmp_path: Path
) -> None:
    server = LMCacheServer(tmp_path, [nvme(tmp_path)], chunk_tokens=32)
    with server:
        first = chat(model, server, turns=1)
        server.stop()
    with server:
        again = chat(model, server, turns=1)
        assert server.counters("nvme")["loaded_blocks_total"] > 0
    assert again["tokens"] == first["tokens"]
    assert again["cached_tokens"] > first["cached_tokens"]


@pytest.mark.full
def test_no_token_changes_whatever_happens_to_server_and_blocks(model: Path, tmp_path: Path) -> None:
    expected = chat(model, None)
    server = LMCacheServer(tmp_path, [nvme(tmp_path)], chunk_tokens=32)
    with server:
        first = chat(model, server)
        server.kill()
        server.start()
        again = chat(model, server)
        server.clear_l1()
        damage_segments(tmp_path / "kv")
        damaged = chat(model, server, turns=1)
        assert count_of(server.counters("nvme"), "tier", "corrupt_blocks_total") > 0
    assert first["tokens"] == again["tokens"] == expected["tokens"]
    assert damaged["tokens"] == [answers[:1] for answers in expected["tokens"]]
    assert again["cached_tokens"] > first["cached_tokens"] > expected["cached_tokens"]


@pytest.mark.full
def test_the_example_s_second_server_finds_what_the_first_stored(tmp_path: Path) -> None:
    told = run_example(LMCACHE, tmp_path)
    assert "first server: 0 of 12 chunks found, 0 mismatches" in told
    assert "second server: 12 of 12 chunks found, 0 mismatches" in told


if __name__ == "__main__":
    fill_a_file_system(Path(sys.argv[1]))
