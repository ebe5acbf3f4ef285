"""vLLM's own API server over our stack: what its `/metrics` shows of the tiers.

Whole engines are of vLLM 0.32.0, as in `test_vllm_engines.py`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engines import TIMEOUT_S, environment_of, interpreter, our_spec
from tests.support.server_process import ServerProcess
from tests.support.tiny_llama import TINY_LLAMA
from tiered_kv.cli.main import main

BLOCK_TOKENS = 32
BLOCK_BYTES = 32 << 10
BLOCKS = 18
"""Of the engine, and of the primary tier."""
SHARED = [*range(100, 100 + 8 * BLOCK_TOKENS)]
OTHER = [*range(15 * BLOCK_TOKENS)]
LABELS = {"model_name": "tiny", "engine": "0"}
Values = Mapping[tuple[str, ...], float]


class VllmServer(ServerProcess):
    """vLLM's server of a small model of made-up weights; its stack has an nvme tier.

    Args:
        directory: An empty directory for it.
    """

    start_s_max = TIMEOUT_S

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        (directory / "config.json").write_text(json.dumps(TINY_LLAMA))

    def command(self) -> list[str]:
        size = BLOCKS * BLOCK_BYTES
        budgets = {"store_budget": size, "load_budget": size}
        nvme = {"type": "nvme", "path": str(self._directory / "kv"), "capacity": "64MiB", **budgets}
        variables = environment_of("0.32.0", self._directory) | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        options = {
            "host": "127.0.0.1",
            "port": self.port,
            "model": self._directory,
            "served-model-name": LABELS["model_name"],
            "load-format": "dummy",
            "dtype": "float32",
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": BLOCKS,
            "max-model-len": 16 * BLOCK_TOKENS,
            "kv-transfer-config": json.dumps(our_spec(size, [nvme])),
        }
        return [
            *("env", "-u", "PYTHONPATH"),
            *(f"{name}={value}" for name, value in variables.items() if os.environ.get(name) != value),
            *(interpreter("0.32.0"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--skip-tokenizer-init", "--enforce-eager"),
            *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
        ]

    def answers(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False

    def complete(self, prompt: Sequence[int]) -> None:
        """Serve a prompt."""
        body = json.dumps({"model": LABELS["model_name"], "prompt": list(prompt), "max_tokens": 1}).encode()
        request = Request(f"http://127.0.0.1:{self.port}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            assert json.load(answer)["usage"]["prompt_tokens"] == len(prompt)

    def metrics(self) -> Values:
        """Return our metrics by name and labels in order of their names; each has to have vLLM's labels too."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith("tiered_kv_"):
                assert LABELS.items() <= sample.labels.items(), sample
                ours = sorted(sample.labels.items() - LABELS.items())
                found[sample.name, *(value for _, value in ours)] = sample.value
        return found

    def metrics_with(self, least: Values) -> Values:
        """Return our metrics once these have reached their values. vLLM sends changes in steps, so it is given some."""
        end_s = time.monotonic() + TIMEOUT_S
        while any((found := self.metrics()).get(each, 0.0) < value for each, value in least.items()):
            assert time.monotonic() < end_s, found
            self.complete([1, 2, 3])  # of no whole block
            time.sleep(0.1)
        return found


@pytest.mark.slow
@pytest.mark.full
def test_vllm_s_server_shows_what_each_tier_does(
    tmp_path: Path, closing: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    server = VllmServer(tmp_path)
    closing.callback(server.stop)
    server.start()
    stored = 0
    for prompt in ([*SHARED, *[0] * BLOCK_TOKENS], OTHER, OTHER[::-1]):  # the engine has no room for all of them
        server.complete(prompt)
        stored += len(prompt) // BLOCK_TOKENS
        before = server.metrics_with({("tiered_kv_stored_blocks_total", "nvme"): stored})
    assert not before.get(("tiered_kv_blocks_total", "hit", "nvme"))
    server.complete([*SHARED, *[1] * BLOCK_TOKENS])
    expected = {
        ("tiered_kv_loaded_blocks_total", "nvme"): 8,
        ("tiered_kv_blocks_total", "hit", "nvme"): 8,
        ("tiered_kv_restored_tokens_total", "cpu"): len(SHARED),
        ("tiered_kv_loaded_bytes_total", "nvme"): 8 * BLOCK_BYTES,
        ("tiered_kv_capacity_bytes", "cpu"): BLOCKS * BLOCK_BYTES,
        ("tiered_kv_breaker_state", "nvme"): 0,
    }
    found = server.metrics_with({**expected, ("tiered_kv_job_seconds_count", "load", "nvme"): 1})
    assert {each: found[each] for each in expected} == expected
    assert main(["doctor", f"http://127.0.0.1:{server.port}/metrics"]) in (0, 1)
    told = re.search(rf"{len(SHARED)} tokens, (\d+)% of ([\d,]+) tokens of prompts", capsys.readouterr().out)
    assert told is not None, "the doctor reads vLLM's own counters, too"
    assert int(told[1]) == round(100 * len(SHARED) / int(told[2].replace(",", "")))
