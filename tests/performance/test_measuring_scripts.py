"""The scripts behind docs/explanation/performance.md still run, and print what their readers expect."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.performance.policy_hits import WORKLOADS
from tests.performance.served_rows import UNITS
from tiered_kv.workload.request import ChatWorkload

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    answer = json.loads(output)
    assert isinstance(answer, dict)
    return answer


DIRECTORY = "DIRECTORY"
POLICIES = ("bound", "s3fifo", "arc", "lru", "density")
DIRECTIONS = ("store_gb_per_s", "load_gb_per_s")
SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "manager_rates.py --blocks 4096 --policy arc": (
        [f"{name}_keys_per_s" for name in ("store", "lookup_hit", "lookup_miss", "load")],
        [],
    ),
    f"record_cost.py {DIRECTORY} --rounds 4": (["thread_us_per_key", "load_on_over_off"], ["unrecorded_requests"]),
    "host_cache.py --requests 20": (["acquire_us", "acquire_alone_us", "scheduler_us", "lookups_us"], []),
    "policy_hits.py --workloads chats --sizes 500 --policies density": (["blocks", "density"], []),
    "fair_shares.py --policies lru --floods chats --blocks 400 --chats 4 --times 2": (
        ["alone", "with_limits", "without", "kept", "flooding_with_limits", "flooding_without"],
        [],
    ),
    f"nvme_rates.py {DIRECTORY} --blocks 512 --codec aes-256-gcm": ([*DIRECTIONS, "open_s"], []),
    f"nvme_rates.py {DIRECTORY} --blocks 2048 --capacity-blocks 1024": (["full_over_empty"], []),
    f"shared_memory.py {DIRECTORY} --mib 32 --rounds 1 --kinds server workers": (
        [
            f"{kind}_{side}_{each}"
            for kind in ("server", "workers")
            for side in ("head", "private")
            for each in DIRECTIONS
        ],
        ["server_head_load_gb_per_s_over_private"],
    ),
    f"copy_rates.py {DIRECTORY} {DIRECTORY} --blocks 32 --rounds 1": (
        [f"{pair}_gb_per_s" for pair in ("nvme_to_nvme", "nvme_to_fs", "fs_to_redis")],
        [],
    ),
    "prefetched.py --prompts 4": (["without_ms", "ahead_ms", "useless_over_without", "computing_ahead_ms"], []),
    "s3_rates.py --blocks 32 --rounds 1": (["ours_store_gb_per_s", "boto3_load_cpu_s_per_gb"], []),
    "object_rates.py --blocks 32 --rounds 1": (
        [f"{side}_{each}" for side in ("gcs", "azure", "identity", "s3") for each in DIRECTIONS],
        [],
    ),
    "cloud_client_rates.py --blocks 32 --rounds 1": (
        [f"{side}_{each}" for side in ("gcs", "azure") for each in DIRECTIONS],
        [],
    ),
    "redis_rates.py --blocks 64 --rounds 1": (
        [f"{side}_{each}" for side in ("one_connection", "default") for each in DIRECTIONS],
        [],
    ),
}
"""Of each command the figures that are more than 0, and others that it prints."""
SERVERS = {"s3": "nginx", "object": "nginx", "redis": "redis-server", "copy": "redis-server"}


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


def test_engines_of_a_host_hit_what_one_cache_of_their_size_does(tmp_path: Path) -> None:
    chats, trace = ChatWorkload(chats=120, turns=5, active_chats=20, turn_blocks=8), tmp_path / "trace.jsonl"
    lines = [{"timestamp": each.timestamp_ms, **dataclasses.asdict(each)} for each in chats.requests()]
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "tests.performance.host_replay", str(trace), "--capacity", "1024"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=HERE.parents[1])
    figures = json.loads(done.stdout)
    # Not of all: a prompt may come before the one before it is stored.
    assert figures["of_one"] >= 0.97 > figures["private"] / figures["one"]


@pytest.mark.parametrize("tier", ["memory", "nvme", "fs", "redis", "s3"])
def test_step_latency(tmp_path: Path, tier: str) -> None:
    needs_server_of(tier)
    steps = run("step_latency.py", str(tmp_path), "--tiers", tier, "--steps", "20", "--rounds", "1")[tier]
    assert steps["jobs_in_flight_median"] > 0, "the tier was not busy"
    assert steps["idle_step_us"]["p50"] > 0
    assert steps["busy_step_us"]["p50"] < 500_000, "a step waited for transfers"


def test_plots(tmp_path: Path) -> None:
    """Of the results of one workload, and of the page's own table."""
    pytest.importorskip("matplotlib")
    (tmp_path / "results").write_text(json.dumps({"workload": "chats", "blocks": 500, **dict.fromkeys(POLICIES, 0.5)}))
    page = HERE.parents[1] / "docs" / "explanation" / "performance.md"
    for plot, data in (("gains", page), ("growth", page), ("hits", tmp_path / "results")):
        svg = tmp_path / f"{plot}.svg"
        subprocess.run([sys.executable, str(HERE / "plots.py"), plot, str(data), str(svg)], check=True, timeout=120)
        assert "<svg" in svg.read_text()


def test_gpu_copies() -> None:
    pytest.importorskip("torch")
    copies = run("gpu_copies.py", "--device", "cpu", "--mib", "1", "--rounds", "1")["page_bytes"]
    assert len(copies) == 6
    assert all(rate > 0 for ways in copies.values() for rate in ways["chosen"].values())


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_block_of_a_workload_follows_one_other(workload: str) -> None:
    make, _ = WORKLOADS[workload]
    predecessors: dict[int, int | None] = {}
    for ids in make():
        before: int | None = None
        for block_id in ids:
            assert predecessors.setdefault(block_id, before) == before
            before = block_id


def test_a_host_s_cache_beside_a_stack(tmp_path: Path) -> None:
    arguments = ("--tiers", "nvme", "--rounds", "1", "--steps", "20", "--blocks", "512")
    printed = run("host_rates.py", str(tmp_path), *arguments)["nvme"]
    for name in ("host_store_gb_per_s", "own_load_gb_per_s"):
        assert printed[name] > 0
    assert printed["busy_over_idle_p99"]["median"] > 0


def test_what_a_server_takes_for_many_blocks() -> None:
    command = [sys.executable, str(HERE / "served_rows.py"), "--rows", "2048", "--rounds", "1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    figures = {
        name: float(line.partition(name)[2].split()[0])
        for name in UNITS.values()
        for line in printed.splitlines()
        if name in line
    }
    assert figures.keys() == set(UNITS.values())
    assert min(figures.values()) > 0
