"""The example's subscriber knows what the stack has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "events.py"


def test_the_subscriber_follows_the_stack(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "10 blocks stored: {'CPU': 10, 'NVME': 10}",
        "40 blocks stored: {'CPU': 16, 'NVME': 40}",
        "after a reset: {}",
    ]
