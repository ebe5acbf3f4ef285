"""Pipeline stages of unequal layers, as real processes over stand-ins for vLLM; test_vllm_engines.py has real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("vllm_stages_program.py")
PAGE_BYTES = 4096


def run(*layers: int) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), *map(str, layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(4, 2), (2, 4), (1, 3, 2)])
def test_each_stage_reads_back_its_own_bytes(layers: tuple[int, ...]) -> None:
    report = run(*layers)
    assert report["found"] == [[[rank]] * count for rank, count in enumerate(layers)]
    rows = {row_bytes for row_bytes, _ in report["known"]}
    assert rows == {len(layers) * max(layers) * PAGE_BYTES}, "room for the largest stage, in every process"


@pytest.mark.slow
def test_all_processes_agree_on_a_namespace_that_no_other_cut_of_the_model_has() -> None:
    digests: list[str] = []
    for layers in [(4, 1, 3), (4, 3, 1)]:  # what the scheduler sees of them is the same
        known = {digest for _, digest in run(*layers)["known"]}
        assert len(known) == 1
        digests += known
    assert len(set(digests)) == 2
