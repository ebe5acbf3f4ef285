"""A whole SGLang engine on the CPU, with our tiers as the storage of its HiCache.

`.ci/engines DIRECTORY` builds the environment; TIERED_KV_SGLANG_PYTHON names its interpreter. All prompts end alike, so
that an answer depends on what is in the cache.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.sglang_programs import Message, SGLangEngine, extra_config, hicache, interpreter
from tiered_kv.counters import count_of
from tiered_kv.testing.waiting import wait_until

pytestmark = pytest.mark.slow

PAGE = 64
PROMPTS = [[*((each * 37 + number * 7) % 500 for number in range(640)), *range(100, 140)] for each in range(4)]
WHOLE = 640
"""Tokens of a prompt in whole pages, all of which can be found."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    interpreter()
    return tmp_path_factory.mktemp("sglang") / "model"


def nvme(directory: Path, **more: object) -> Message:
    return {"type": "nvme", "path": str(directory / "kv"), "capacity": "256MiB", **more}


def stored_blocks(engine: SGLangEngine, tier: str) -> int:
    return count_of(engine.counters()["kv"], tier, "stored_blocks_total")


def computed(engine: SGLangEngine, prompts: list[list[int]], tier: str = "nvme") -> list[list[int]]:
    """Return the answers to prompts that no cache has, once all of their pages are stored."""
    before = stored_blocks(engine, tier) if engine.has_counted() else 0
    result = engine.tell("generate", prompts=prompts)
    assert result["storage"] == [0] * len(prompts)
    wait_until(lambda: stored_blocks(engine, tier) >= before + 2 * len(prompts) * WHOLE // PAGE)
    tokens: list[list[int]] = result["tokens"]
    return tokens


def damage_segments(directory: Path) -> None:
    """Flip bytes of every block."""
    segments = sorted(directory.glob("**/*.kv"))
    assert segments
    for path in segments:
        with path.open("r+b") as file:
            for offset in range(16 << 10, path.stat().st_size, 32 << 10):
                file.seek(offset)
                (byte,) = file.read(1) or b"\0"
                file.seek(offset)
                file.write(bytes([byte ^ 0xFF]))


def test_a_killed_engine_s_successor_finds_its_pages_and_damaged_ones_are_computed(model: Path, tmp_path: Path) -> None:
    extra = extra_config([nvme(tmp_path)])
    with SGLangEngine(model, tmp_path, hicache(extra)).wait_ready() as engine:
        expected = computed(engine, PROMPTS)
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
        damage_segments(tmp_path)
        result = engine.tell("generate", prompts=PROMPTS)
        assert (result["tokens"], result["storage"]) == (expected, [0] * len(PROMPTS))
        assert count_of(engine.counters()["kv"], "nvme", "tier", "corrupt_blocks_total") > 0
        # Cleared.
        wait_until(lambda: stored_blocks(engine, "nvme") >= 2 * len(PROMPTS) * WHOLE // PAGE)
        assert engine.tell("clear")["success"]
        assert engine.tell("flush")["success"]
        result = engine.tell("generate", prompts=PROMPTS)
        assert (result["tokens"], result["storage"]) == (expected, [0] * len(PROMPTS))


def attach(engine: SGLangEngine, extra: Message) -> Message:
    return engine.tell(
        "attach",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config_json=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_write_policy="write_through",
    )
