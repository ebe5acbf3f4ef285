"""Real vLLMs, each in an environment of its own, with our tiers and our stack."""

from __future__ import annotations

import functools
import random
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.performance.first_token import Engine, choice
from tests.support.disk_use import damage_files
from tests.support.engines import (
    DYNAMO,
    ENGINE,
    VERSIONS,
    Message,
    Program,
    connector,
    interpreter,
    our_spec,
    passed_checks,
    play_chats,
    run_example,
    running,
)
from tests.support.entries import s3_entry
from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import S3Server
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.proxy import Faults

pytestmark = pytest.mark.slow

_LACKS_FP8 = "avx512f" not in Path("/proc/cpuinfo").read_text("utf-8", "replace")
FP8 = pytest.param(
    "fp8", marks=pytest.mark.skipif(_LACKS_FP8, reason="vLLM has no fp8 KV cache on a processor without AVX-512")
)

MIB = 1 << 20
CONVERSATIONS, TURNS = 40, 3
WHOLE = 192
"""Tokens of the whole blocks of a prompt."""


def prompt_of(seed: int, tokens: int = 200) -> list[int]:
    return random.Random(seed).choices(range(512), k=tokens)


# Parts of vLLM, as programs.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.full
def test_vllm_s_own_manager_is_served_by_our_tiers(version: str, tmp_path: Path) -> None:
    assert len(passed_checks(version, "vllm_manager_program.py", tmp_path / "manager")) >= 12


@pytest.mark.parametrize(("name", "checks"), [("spec", 11), ("queue", 11), ("events", 5), ("models", 18)])
@pytest.mark.parametrize("version", VERSIONS)
def test_our_connector_serves_vllm(version: str, name: str, checks: int, tmp_path: Path) -> None:
    """Scheduler and workers, requests that wait, readers of events by vLLM's own classes, and kinds of models."""
    assert len(passed_checks(version, f"vllm_{name}_program.py", tmp_path / name)) >= checks


@pytest.mark.parametrize("version", VERSIONS)
def test_dynamo_s_indexer_credits_a_worker_with_our_tiers(version: str, tmp_path: Path) -> None:
    interpreter(DYNAMO)
    check = "_dynamo_s_indexer_credits_a_worker_with_our_tiers"
    assert passed_checks(version, "vllm_events_program.py", tmp_path / "dynamo", check) == [check]


# The whole engine.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    interpreter("0.32.0")
    return tmp_path_factory.mktemp("vllm") / "models"


def opened(models: Path, config: Message | None, **options: object) -> Program:
    """Start a program with an engine."""
    program = running("0.32.0", ENGINE, str(models))
    program.tell("open", kv_transfer_config=config, **options)
    return program


def nvme(directory: Path, **settings: object) -> dict[str, object]:
    return {"type": "nvme", "path": str(directory / "kv"), "capacity": "1GiB", **settings}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", FP8, "windows", "windows alone", "sinks", "gdn", "mtp", "eagle"])
def test_a_whole_engine_of_each_kind_of_model_finds_its_blocks_after_a_restart(
    kind: str, models: Path, tmp_path: Path
) -> None:
    fs: dict[str, object] = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": "256MiB"}
    prompts = [prompt_of(1, 300), prompt_of(2, 700)]
    tokens, found = [], []
    with running("0.32.0", ENGINE, str(models)) as engine:
        for config in (None, our_spec(16 * MIB, [fs]), our_spec(16 * MIB, [fs])):
            engine.tell("open", kind=kind, kv_transfer_config=config)
            served = [engine.tell("serve", prompts=prompts, tokens=8) for _ in range(2)]
            tokens.append([each["tokens"] for each in served])
            found.append([each["found"] for each in served])
        counters = engine.tell("counters")
    assert tokens == [tokens[0]] * 3
    whole = [288, 672]  # of 300 and 700 tokens, in blocks of 32
    assert found[1:] == [[[0, 0], whole], [whole, whole]]
    assert counters["fs"]["loaded_blocks_total"] > 0


@functools.cache
def tokens_of_the_engine_alone(models: Path) -> list[list[list[int]]]:
    with opened(models, None) as engine:
        return play_chats(engine, CONVERSATIONS, TURNS).tokens


def vllm_tiering(primary_bytes: int, tiers: list[Mapping[str, object]]) -> Message:
    """vLLM's own tiering over our tiers, on the CPU."""
    ours = {"type": "TieredKVTier", "module_path": "tiered_kv_vllm"}
    secondary = [{**ours, "tier": tier} for tier in tiers]
    return connector("TieredKVTieringSpec", cpu_bytes_to_use=primary_bytes, secondary_tiers=secondary)


@pytest.mark.parametrize("configure", [our_spec, pytest.param(vllm_tiering, marks=pytest.mark.full)])
def test_no_token_changes_whatever_happens_to_the_tiers(
    configure: Any, models: Path, tmp_path: Path, redis_server: RedisServer, moto_server: S3Server, moto_bucket: str
) -> None:
    expected = tokens_of_the_engine_alone(models)
    tiers: list[Mapping[str, object]] = [
        # Budgets so small that some blocks are found in redis only.
        nvme(tmp_path, store_budget="128KiB"),
        {"type": "redis", "url": redis_server.url, "store_budget": "256KiB", "job_timeout": "2s"},
        {**s3_entry(moto_server, moto_bucket), "store_budget": "768KiB"},
    ]
    config = configure(MIB, tiers)  # 32 blocks; six requests at a time need more than twice as many
    before: Message = {}

    def break_tiers(turn: int) -> None:
        if turn == 1:
            before.update(engine.tell("counters"))
            redis_server.kill()
            damage_files(tmp_path / "kv")

    with opened(models, config) as engine:
        chats, counters = play_chats(engine, CONVERSATIONS, TURNS, break_tiers), engine.tell("counters")
    assert chats.tokens == expected
    assert min(before[tier]["loaded_blocks_total"] for tier in ("nvme", "redis")) > 0
    # Before the others break, s3 serves only the few blocks that neither of them has.
    assert counters["s3"]["loaded_blocks_total"] > 0
    assert count_of(counters, "nvme", "tier", "corrupt_blocks_total") > 0
    redis_server.restart()
    with opened(models, config) as engine:
        chats, counters = play_chats(engine, CONVERSATIONS, 1), engine.tell("counters")
    assert chats.tokens == [answers[:1] for answers in expected]
    assert counters["nvme"]["loaded_blocks_total"] + counters["s3"]["loaded_blocks_total"] > 0


def test_a_request_s_hints_reach_the_stack_through_the_engine(models: Path, tmp_path: Path) -> None:
    requests: list[dict[str, object]] = [
        {"skip": "store", "priority": 1},
        {"skip": "everything"},  # refused: it is served as if it said nothing
        {"skip": ["load"]},
        {"ttl": 600, "expect_return": 5},
    ]
    with opened(models, our_spec(MIB, [nvme(tmp_path)])) as engine:
        found = [engine.tell("serve", prompts=[prompt_of(0)], said=said)["found"] for said in requests]
        counted = engine.tell("counters")
    assert found == [[0], [0], [0], [WHOLE]]
    assert count_of(counted, "cpu", "skipped_blocks_total", "by_request") == 6
    assert count_of(counted, "nvme", "misses_total", "by_request") == 1, "vLLM asks for no more after a miss"
    assert (counted["cpu"]["hinted_requests_total"], counted["cpu"]["refused_hints_total"]) == (3, 1)


@pytest.mark.parametrize(
    ("resets_running", "found"),
    [(True, [WHOLE, WHOLE, 0, WHOLE, WHOLE]), (False, [0, 0, 0, WHOLE, WHOLE])],
    ids=["anew", "kept"],
)
def test_blocks_of_a_request_that_runs_at_a_reset_are_never_found(
    models: Path, tmp_path: Path, resets_running: bool, found: list[int]
) -> None:
    answers = []
    with opened(models, our_spec(MIB, [nvme(tmp_path)])) as engine:
        told = engine.tell("reset", prompt=prompt_of(0), resets_running=resets_running)
        for resets_connector in (False, False, True, False, False):
            engine.tell("drop", resets_connector=resets_connector)
            answers.append(engine.tell("serve", prompts=[prompt_of(0)]))
    assert told["stored"]
    assert told["is_reset"] is resets_running
    assert [each["found"] for each in answers] == [[tokens] for tokens in found]
    assert all(each["tokens"] == answers[0]["tokens"] for each in answers)


@pytest.mark.full
def test_the_audit_is_quiet_about_an_engine_and_catches_another_in_its_namespace(models: Path, tmp_path: Path) -> None:
    config = our_spec(8 * MIB, [nvme(tmp_path)], audit=1.0, audit_action="stop")
    keys: list[list[str]] = []
    with opened(models, config) as engine:
        for number in (0, 1, 2, 0, 1, 2):
            engine.tell("serve", prompts=[prompt_of(number)])
            known = {key for each in keys for key in each}
            keys.append([key for key in engine.tell("blocks")["keys"] if key not in known])
        counted = engine.tell("counters")
        assert "audit:" not in engine.log()
    assert [len(each) for each in keys] == [6, 6, 6, 0, 0, 0]
    assert counted["cpu"]["audited_blocks_total"]["identical"] == 18
    # After the first prompt, which is served as before the restart, the model computes something else.
    with opened(models, config) as engine:
        begun = len(engine.log())
        before = engine.tell("look_up", keys=keys[2])
        engine.tell("serve", prompts=[prompt_of(0)])
        engine.tell("change_weights")
        engine.tell("serve", prompts=[prompt_of(1)])
        after, counted = engine.tell("look_up", keys=keys[2]), engine.tell("counters")
        assert engine.log()[begun:].count("audit:") == 1
    assert counted["nvme"]["audited_blocks_total"]["identical"] == 6
    assert counted["nvme"]["audited_blocks_total"]["different"] > 0
    assert counted["nvme"]["audit_stopped"] == 1
    assert before["found"] == [None] * 6, "found, and on their way"
    assert (after["in_tier"], after["found"]) == ([True] * 6, [False] * 6)


@pytest.mark.full
@pytest.mark.parametrize("configure", [our_spec, vllm_tiering])
def test_restored_prompts_reach_the_first_token_in_a_fifth_of_the_time(
    configure: Any, models: Path, tmp_path: Path
) -> None:
    config = configure(72 * MIB, [nvme(tmp_path, store_budget="64MiB", load_budget="64MiB")])
    with ExitStack() as undo:
        engine = Engine(undo, models, "large", config, threads=2)
        computed, restored = ([engine.first_token((seed, 2048)) for seed in range(3)] for _ in range(2))
    assert [each["tokens"] for each in restored] == [each["tokens"] for each in computed]
    assert [each["found"] for each in restored] == [[2048]] * 3
    compute_s = statistics.median(each["seconds"] for each in computed)
    assert min(each["seconds"] for each in restored) <= compute_s / 5, "what disturbs the others is the machine's"


@pytest.mark.full
def test_a_prompt_takes_no_longer_than_the_better_of_computing_and_loading(models: Path, tmp_path: Path) -> None:
    rows = choice(models, "large", tmp_path, Faults(latency_s=0.05, bytes_per_s=10e6), sizes=(64, 2048), rounds=2)
    print(rows, file=sys.stderr)
    short, long = rows
    assert (short["chosen_found"], long["chosen_found"] >= 2048 - 32) == (0, True)
    assert max(row["ratio"]["median"] for row in rows) <= 1.5, "1.1 where nothing else runs"


@pytest.mark.full
def test_scheduler_and_worker_are_of_one_namespace(models: Path, tmp_path: Path) -> None:
    config = our_spec(MIB, [nvme(tmp_path)])
    with opened(models, config, distributed_executor_backend="mp") as engine:  # a worker in a process of its own
        told = engine.tell("namespaces")
    assert told["workers"] == [told["scheduler"]]


@pytest.mark.full
@pytest.mark.parametrize("config", ["our_stack.json", "our_tiers.json"])
def test_the_example_s_second_engine_finds_the_blocks_of_the_first(config: str, tmp_path: Path) -> None:
    told = run_example("0.32.0", tmp_path, config)
    assert "second engine: 4608 of 4680 prompt tokens found" in told
    assert "the answers are the same" in told
