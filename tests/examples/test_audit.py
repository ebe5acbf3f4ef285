"""The example of the audit: weights are swapped under a path, and the second process finds out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "audit" / "audit.py"


@pytest.mark.slow
def test_the_example_catches_the_swapped_weights_and_stops_the_tier() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=True)
    first, second = done.stdout.split("a process with weights 2\n")
    assert "different" not in first
    assert "stopped 0" in first
    found = [int(line.split(":")[1].split()[0]) for line in second.splitlines() if "prompt" in line]
    assert found == [8, 8, 8, *[0] * 9], "wrong blocks are found until the audit stops their tier"
    assert "stopped 1" in second
    assert done.stderr.count("log: audit:") == 1
