"""The example of metrics prints what a stack has done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "metrics.py"


def test_the_example_shows_metrics_and_status() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=True)
    assert f'tiered_kv_restored_tokens_total{{tier="cpu"}} {64 * 16:.1f}' in done.stdout
    assert 'tiered_kv_tier_used_bytes{tier="nvme"}' in done.stdout
    assert "cpu: 1048576 of 1048576 bytes" in done.stdout
    assert done.stderr == ""
