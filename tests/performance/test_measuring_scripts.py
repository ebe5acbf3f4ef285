"""The scripts behind docs/explanation/performance.md still run, and print what their readers expect."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    answer = json.loads(output)
    assert isinstance(answer, dict)
    return answer


def test_manager_rates() -> None:
    rates = run("manager_rates.py", "--blocks", "4096", "--policy", "arc")
    assert all(rates[f"{name}_keys_per_s"] > 0 for name in ("store", "lookup_hit", "lookup_miss", "load"))


def test_event_rates() -> None:
    rates = run("event_rates.py", "--rounds", "1", "--steps", "20")
    assert all(rates[f"{name}_ratio"] > 0 for name in ("keys_per_s", "step_p99_us", "thread_ns_per_key"))


def test_name_rates() -> None:
    rates = run("name_rates.py")
    assert rates["blake2b_ns"] > 0
    assert rates.keys() >= {"lookup_new_ns", "lookup_known_ns", "lookup_many_new_ns", "lookup_many_known_ns"}


def test_nvme_rates(tmp_path: Path) -> None:
    rates = run("nvme_rates.py", str(tmp_path), "--blocks", "512")
    assert rates["store_gb_per_s"] > 0
    assert rates["load_gb_per_s"] > 0
    rates = run("nvme_rates.py", str(tmp_path), "--blocks", "2048", "--capacity-blocks", "1024")
    assert rates["full_over_empty"] > 0


def test_encryption_rates(tmp_path: Path) -> None:
    rates = run("encryption_rates.py", str(tmp_path), "--blocks", "64", "--rounds", "1")
    for direction in ("store", "load"):
        assert rates[f"raw_{direction}_gb_per_s"] > 0
        assert rates[f"codec_{direction}_gb_per_s_over_raw"]["median"] > 0


def test_open_directory(tmp_path: Path) -> None:
    opened = run("open_directory.py", str(tmp_path), "--blocks", "2000", "--rounds", "1")
    assert len(opened["open_seconds"]) == 1


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_s3_rates() -> None:
    rates = run("s3_rates.py", "--blocks", "32", "--rounds", "1")
    assert rates["ours_store_gb_per_s"] > 0
    assert rates["boto3_load_cpu_s_per_gb"] > 0


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_redis_rates() -> None:
    rates = run("redis_rates.py", "--blocks", "64", "--rounds", "1")
    for side in ("one_connection", "spread", "default"):
        assert rates[f"{side}_store_gb_per_s"] > 0
        assert rates[f"{side}_load_gb_per_s"] > 0
    assert rates["one_connection_load_gb_per_s_over_spread"]["median"] > 0


@pytest.mark.parametrize(
    "tier",
    [
        "memory",
        "nvme",
        "fs",
        pytest.param("redis", marks=pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")),
        pytest.param("s3", marks=pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx")),
    ],
)
def test_step_latency(tmp_path: Path, tier: str) -> None:
    steps = run("step_latency.py", str(tmp_path), "--tiers", tier, "--steps", "20", "--rounds", "1")[tier]
    assert steps["jobs_in_flight_median"] > 0, "the tier was not busy"
    assert steps["idle_step_us"]["p50"] > 0
    assert steps["busy_step_us"]["p50"] < 500_000, "a step waited for transfers"


def test_gpu_copies() -> None:
    pytest.importorskip("torch")
    copies = run("gpu_copies.py", "--device", "cpu", "--mib", "1", "--rounds", "1")["page_bytes"]
    assert len(copies) == 3
    assert all(rate > 0 for rates in copies.values() for rate in rates.values())
