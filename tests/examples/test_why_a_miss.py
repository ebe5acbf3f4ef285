"""The example that explains misses: each prompt has the reason that its comment says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "why_a_miss.py"


def test_every_prompt_has_its_reason() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        "a prompt that nobody has asked before: 0 of 4 blocks; the first: cpu unknown, small unknown, picky unknown",
        "an old prompt: 0 of 4 blocks; the first: cpu evicted, small evicted, picky admission",
        "a recent prompt: 4 of 4 blocks; the first: cpu present, small stored, picky stored",
        "a recent prompt: 0 of 4 blocks; the first: cpu reset, small reset, picky reset",
        "cpu: {'hit': 4, 'miss': 12}, misses {'absent': 4, 'evicted': 4, 'reset': 4}",
        "small: {'miss': 12}, misses {'absent': 4, 'evicted': 4, 'reset': 4}",
        "picky: {'miss': 12}, misses {'absent': 4, 'reset': 4, 'admission': 4}",
    ]
