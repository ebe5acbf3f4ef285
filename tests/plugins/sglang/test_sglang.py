"""SGLang's host pools of every kind, and a whole engine on the CPU, with our tiers as the storage of its HiCache.

All prompts end alike, so that an answer depends on what is in the cache.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.disk_use import damage_files
from tests.support.engines import SGLANG, Message, interpreter, passed_checks, run_example
from tests.support.host_server import serving
from tests.support.sglang_programs import SGLangEngine, extra_config, hicache
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until

pytestmark = pytest.mark.slow

PAGE = 64
PROMPTS = [[*((each * 37 + number * 7) % 500 for number in range(640)), *range(100, 140)] for each in range(4)]
WHOLE = 640
"""Tokens of a prompt in whole pages, all of which can be found."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    interpreter(SGLANG)
    return tmp_path_factory.mktemp("sglang") / "model"


def nvme(directory: Path, **more: object) -> Message:
    return {"type": "nvme", "path": str(directory / "kv"), "capacity": "256MiB", **more}


def stored_blocks(engine: SGLangEngine, tier: str = "nvme") -> int:
    return count_of(engine.counters()["kv"], tier, "stored_blocks_total")


def computed(engine: SGLangEngine, *, parts: int = 2, tier: str = "nvme") -> list[list[int]]:
    """Return the answers to `PROMPTS`, which no cache has, once all of their pages are stored."""
    before = stored_blocks(engine, tier) if engine.has_counted() else 0
    result = engine.tell("generate", prompts=PROMPTS)
    assert result["storage"] == [0] * len(PROMPTS)
    wait_until(lambda: stored_blocks(engine, tier) >= before + parts * len(PROMPTS) * WHOLE // PAGE)
    tokens: list[list[int]] = result["tokens"]
    return tokens


@pytest.mark.full
def test_a_killed_engine_s_successor_finds_its_pages_and_damaged_ones_are_computed(model: Path, tmp_path: Path) -> None:
    extra = extra_config([nvme(tmp_path)])
    with SGLangEngine(model, tmp_path, hicache(extra)).wait_ready() as engine:
        expected = computed(engine)
        assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "an answer depends on its whole prompt"
        engine.post("generate", prompts=[[each % 400 for each in range(3000)]])
        engine.kill()
    with SGLangEngine(model, tmp_path, hicache(extra)).wait_ready() as engine:
        result = engine.tell("generate", prompts=PROMPTS)
        assert result["tokens"] == expected
        assert result["storage"] == [WHOLE] * len(PROMPTS)
        # Attached and detached while it runs.
        assert engine.tell("detach")["success"]
        assert engine.tell("flush")["success"]
        assert engine.tell("generate", prompts=PROMPTS[:1])["cached"] == [0]
        assert engine.tell("flush")["success"]
        assert attach(engine, extra) == {"success": True, "message": "Attached HiCache storage backend successfully."}
        result = engine.tell("generate", prompts=PROMPTS[:1])
        assert (result["tokens"], result["storage"]) == (expected[:1], [WHOLE])
        # Bytes that are damaged.
        assert engine.tell("flush")["success"]
        damage_files(tmp_path / "kv" / "kv")
        result = engine.tell("generate", prompts=PROMPTS)
        assert (result["tokens"], result["storage"]) == (expected, [0] * len(PROMPTS))
        assert count_of(engine.counters()["kv"], "nvme", "tier", "corrupt_blocks_total") > 0
        # Cleared.
        wait_until(lambda: stored_blocks(engine) >= 2 * len(PROMPTS) * WHOLE // PAGE)
        assert engine.tell("clear")["success"]
        assert engine.tell("flush")["success"]
        result = engine.tell("generate", prompts=PROMPTS)
        assert (result["tokens"], result["storage"]) == (expected, [0] * len(PROMPTS))
        assert found_again(engine, expected) == [WHOLE] * len(PROMPTS), "the flush after the clear ended it"


def attach(engine: SGLangEngine, extra: Message) -> Message:
    return engine.tell(
        "attach",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config_json=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_write_policy="write_through",
    )


def found_again(engine: SGLangEngine, expected: list[list[int]]) -> list[int]:
    """Return how many tokens of each prompt come from the storage, now that the engine has forgotten them."""
    assert engine.tell("flush")["success"]
    result = engine.tell("generate", prompts=PROMPTS)
    assert result["tokens"] == expected
    tokens: list[int] = result["storage"]
    return tokens


@pytest.mark.full
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
def test_an_engine_finds_its_pages_in_every_layout(layout: str, model: Path, tmp_path: Path) -> None:
    backend = "direct" if layout == "page_first_direct" else "kernel"
    options = hicache(extra_config([nvme(tmp_path)]), hicache_mem_layout=layout, hicache_io_backend=backend)
    with SGLangEngine(model, tmp_path, options).wait_ready() as engine:
        per_page = 8 if layout == "layer_first" else 2
        expected = computed(engine, parts=per_page)
        assert found_again(engine, expected) == [WHOLE] * len(PROMPTS)


@pytest.mark.full
def test_sglang_s_own_delays_and_failures_change_no_token(model: Path, tmp_path: Path) -> None:
    injected = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    with SGLangEngine(model, tmp_path, hicache(extra_config([nvme(tmp_path)])), **injected).wait_ready() as engine:
        expected = engine.tell("generate", prompts=PROMPTS)["tokens"]
        found = [sum(found_again(engine, expected)) for _ in range(6)]
        assert max(found) > 0
        assert min(found) < WHOLE * len(PROMPTS)


@pytest.mark.full
def test_two_ranks_have_their_own_tiers(model: Path, tmp_path: Path) -> None:
    options = hicache(extra_config([nvme(tmp_path / "${TIERED_KV_RANK}")]), tp_size=2)
    with SGLangEngine(model, tmp_path, options, SGLANG_CPU_OMP_THREADS_BIND="0|1").wait_ready() as engine:
        expected = computed(engine)
        assert found_again(engine, expected) == [WHOLE] * len(PROMPTS)
    assert [(tmp_path / rank / "kv" / "kv").is_dir() for rank in ("0", "1")] == [True, True]


@pytest.mark.full
def test_ranks_find_their_pages_in_the_cache_of_a_host_after_they_were_killed(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, {"primary": {"capacity": "64MiB"}}, namespaces=2) as served:
        options = hicache(extra_config([{"type": "host", "socket": served.address}]), tp_size=2)
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        with SGLangEngine(model, tmp_path, options, **cores).wait_ready() as engine:
            expected = computed(engine, tier="host")
            engine.kill()
        with SGLangEngine(model, tmp_path, options, **cores).wait_ready() as engine:
            result = engine.tell("generate", prompts=PROMPTS)
            assert (result["tokens"], result["storage"]) == (expected, [WHOLE] * len(PROMPTS))


@pytest.mark.full
def test_the_example_s_second_engine_finds_the_pages_of_the_first(tmp_path: Path) -> None:
    told = run_example(SGLANG, tmp_path)
    assert "second engine: 1664 of 4680 prompt tokens found in the storage" in told
    assert "the answers are the same" in told


# Our backend over SGLang's host pools of every kind and layout, as its threads call it.


def test_pages_of_every_host_pool_come_back(tmp_path: Path) -> None:
    assert len(passed_checks(SGLANG, "sglang_pools_program.py", tmp_path / "pools")) >= 23
