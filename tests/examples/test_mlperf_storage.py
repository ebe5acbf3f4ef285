"""The example for MLPerf Storage's KV-cache benchmark, below a small stand-in and, if it is installed, the real one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlperf_storage.py"
STAND_IN = {
    "backends.py": """
from dataclasses import dataclass

class StorageBackend:
    @dataclass
    class IOTiming:
        total: float
        device: float
        host: float

class NVMeBackend(StorageBackend):
    def __init__(self, base_path=None):
        raise SystemExit("the benchmark uses its own files")
""",
    "cache.py": """
from kv_cache.backends import NVMeBackend

class MultiTierCache:
    def __init__(self, cache_dir):
        self.backends = {"nvme": NVMeBackend(base_path=cache_dir)}
""",
    "cli.py": """
import argparse
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from kv_cache.cache import MultiTierCache

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache-dir")
    backend = MultiTierCache(parser.parse_args().cache_dir).backends["nvme"]
    def user(number):
        values = {}
        for turn in range(6):  # the last turns write the first keys again, with other bytes and sizes
            key = f"user_{number}_{turn % 4}"
            backend.delete(key)
            values[key] = np.random.default_rng(turn).random((2, 1 + turn, 50_000 + number)).astype(np.float16)
            timing = backend.write(key, values[key])
            assert 0 < timing.device < timing.total and 0 < timing.host < timing.total
        read = {key: backend.read(key)[0] for key in values}
        assert all(np.array_equal(read[key], values[key]) for key in values)
        backend.delete(key)
        try:
            backend.read(key)
        except KeyError:
            return len(read)
    with ThreadPoolExecutor(8) as threads:
        print("read", sum(threads.map(user, range(8))), "values")
""",
}


def run(folder: Path, *options: str, directory: Path) -> str:
    command = [sys.executable, str(EXAMPLE), str(folder), "--cache-dir", str(directory / "kv"), *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_s_values_are_read_back_from_the_tier(tmp_path: Path) -> None:
    package = tmp_path / "benchmark" / "kv_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in STAND_IN.items():
        (package / name).write_text(text)
    (tmp_path / "kv").mkdir()
    printed = run(package.parent, directory=tmp_path)
    assert printed.splitlines() == ["read 32 values", "tiered-kv: 48 values written, 0 lost []"]


@pytest.mark.slow
def test_the_real_benchmark_runs_over_the_tier(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("kv_cache")
    if spec is None or spec.origin is None:
        pytest.skip("the benchmark is not installed: pip install path/to/kv_cache_benchmark")
    (tmp_path / "kv").mkdir()
    small = "user_templates:\n" + "".join(
        f"  {user}: {{context_range: [64, 256], generation_range: [50, 150], think_time_range: [0.1, 0.5]}}\n"
        for user in ("chatbot", "coding", "document")
    )
    (tmp_path / "small.yaml").write_text(small)
    options = "--num-users 2 --duration 6 --gpu-mem-gb 0 --cpu-mem-gb 0 --generation-mode none --config small.yaml"
    sizes = "--storage-capacity-gb 8 --output figures.json"
    printed = run(Path(spec.origin).parents[1], *options.split(), *sizes.split(), directory=tmp_path)
    assert ", 0 lost" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())["summary"]["cache_stats"]
    assert figures["tier_storage_kv_bytes_read_gb"] > 0
    assert figures["storage_read_device_p95_ms"] > 0


@pytest.fixture
def example() -> Any:  # Any: the module, and a type checker knows none that has no package
    spec = importlib.util.spec_from_file_location("mlperf_storage_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_value_whose_blocks_were_evicted_is_an_error_and_named_at_the_end(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example.TIER = {"type": "nvme", "capacity": "64MiB"}
    example.POOL_BYTES = 16 << 20
    timing: Any = make_dataclass("Timing", ["total", "device", "host"])
    backend = example.TieredBackend(timing, str(tmp_path))
    value = np.arange(2 << 20, dtype=np.uint16)  # 4 MiB: the pool has room for four at a time
    for number in range(40):
        backend.write(f"value {number}", value + number)
    assert np.array_equal(backend.read("value 39")[0], value + 39)
    with pytest.raises(OSError, match="load of 'value 0' failed"):
        backend.read("value 0")
    backend.close()
    assert capsys.readouterr().out == "tiered-kv: 40 values written, 1 lost ['load value 0']\n"
