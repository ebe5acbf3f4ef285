"""The example of a prefix cache: two processes, one prompt."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason="the extra 'transformers'")

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_prefix_cache" / "prefix_cache.py"
ATTEMPTS = 5


def run(directory: Path) -> subprocess.CompletedProcess[str]:
    # torch leaves a directory for compiled code where temporary files go.
    places = {"PREFIX_CACHE": str(directory), "TMPDIR": str(directory.parent)}
    environment = {**os.environ, **places, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.mark.slow
@pytest.mark.full
def test_the_second_process_restores_the_prompt_with_equal_logits_in_a_fifth_of_the_time(tmp_path: Path) -> None:
    first = run(tmp_path / "cache")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "saved 256 blocks: True" in first.stdout
    outputs = []
    for _ in range(ATTEMPTS):  # on a busy machine the time changes
        second = run(tmp_path / "cache")
        output = second.stdout + second.stderr
        assert "restored 4096 of 4096 tokens" in second.stdout, output
        assert "256 blocks from nvme" in second.stdout, output
        assert "bit for bit: True" in second.stdout, output
        if second.returncode == 0:
            return
        assert second.returncode == 1, output  # it took longer than the example promises
        assert "Traceback" not in second.stderr, output
        outputs.append(second.stdout)
    pytest.fail("\n".join(outputs))
