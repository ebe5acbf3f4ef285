"""The scripts behind docs/explanation/performance.md still run, and print what their readers expect."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.performance.policy_hits import WORKLOADS

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    answer = json.loads(output if script not in LINES else output.splitlines()[0])
    assert isinstance(answer, dict)
    return answer


DIRECTORY = "DIRECTORY"
LINES = {"write_budgets.py"}
"""Scripts that print several objects."""
DIRECTIONS = ("store_gb_per_s", "load_gb_per_s")
SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "manager_rates.py --blocks 4096 --policy arc": (
        [f"{name}_keys_per_s" for name in ("store", "lookup_hit", "lookup_miss", "load")],
        [],
    ),
    "policy_hits.py --workloads chats --sizes 500 --policies density": (["blocks", "density"], []),
    "hint_gains.py --workloads agents --sizes 500 --ways nothing returns": (["blocks", "nothing", "returns"], []),
    "nvme_hits.py --workloads chats --sizes 200 800": (["nvme_hits", "hit_rate"], []),
    "write_budgets.py --workloads chats --sizes 2000": (["nvme_hits", "hit_rate"], []),
    "observing_cost.py --rounds 8": ([], ["store", "lookup_hit", "load", "lookup_miss"]),
    f"nvme_rates.py {DIRECTORY} --blocks 512": ([*DIRECTIONS], []),
    f"nvme_rates.py {DIRECTORY} --blocks 2048 --capacity-blocks 1024": (["full_over_empty"], []),
    f"encryption_rates.py {DIRECTORY} --blocks 64 --rounds 1": (
        [name for each in DIRECTIONS for name in (f"raw_{each}", f"codec_{each}_over_raw")],
        [],
    ),
    f"open_directory.py {DIRECTORY} --blocks 2000 --rounds 1": (["open_seconds"], []),
    "s3_rates.py --blocks 32 --rounds 1": (["ours_store_gb_per_s", "boto3_load_cpu_s_per_gb"], []),
    "redis_rates.py --blocks 64 --rounds 1": (
        [f"{side}_{each}" for side in ("one_connection", "spread", "default") for each in DIRECTIONS]
        + ["one_connection_load_gb_per_s_over_spread"],
        [],
    ),
}
"""Of each command the figures that are more than 0, and others that it prints."""
SERVERS = {"s3": "nginx", "redis": "redis-server"}


def needs_server_of(tier: str) -> None:
    if tier in SERVERS and shutil.which(SERVERS[tier]) is None:
        pytest.skip(f"{SERVERS[tier]} is not installed")


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_prints_its_figures(command: str, tmp_path: Path) -> None:
    script, *arguments = command.replace(DIRECTORY, str(tmp_path)).split()
    needs_server_of(script.partition("_")[0])
    printed = run(script, *arguments)
    above_zero, others = SCRIPTS[command]
    assert printed.keys() >= {*above_zero, *others}
    for name in above_zero:
        figure = printed[name]
        (least,) = [figure["median"]] if isinstance(figure, dict) else figure if isinstance(figure, list) else [figure]
        assert least > 0, name


@pytest.mark.parametrize("tier", ["memory", "nvme", "fs", "redis", "s3"])
def test_step_latency(tmp_path: Path, tier: str) -> None:
    needs_server_of(tier)
    steps = run("step_latency.py", str(tmp_path), "--tiers", tier, "--steps", "20", "--rounds", "1")[tier]
    assert steps["jobs_in_flight_median"] > 0, "the tier was not busy"
    assert steps["idle_step_us"]["p50"] > 0
    assert steps["busy_step_us"]["p50"] < 500_000, "a step waited for transfers"


def test_gpu_copies() -> None:
    pytest.importorskip("torch")
    copies = run("gpu_copies.py", "--device", "cpu", "--mib", "1", "--rounds", "1")["page_bytes"]
    assert len(copies) == 6
    assert all(rate > 0 for ways in copies.values() for rate in ways["chosen"].values())


@pytest.mark.full
def test_the_cost_of_observing_whole_steps() -> None:
    sides = run("observing_cost.py", "--rounds", "2", "--steps", "8")["step"]
    assert sides.keys() == {"plain", "history", "events", "both", "unmeasured", "scraped"}
    for figures in sides.values():
        assert min(figures["p99_us"], figures["keys_per_s"], *figures["keys_per_s_ratio_quartiles"]) > 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_block_of_a_workload_follows_one_other(workload: str) -> None:
    make, _ = WORKLOADS[workload]
    predecessors: dict[int, int | None] = {}
    for ids in make():
        before: int | None = None
        for block_id in ids:
            assert predecessors.setdefault(block_id, before) == before
            before = block_id
