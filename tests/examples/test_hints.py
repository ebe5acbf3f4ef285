"""The example of hints: what nobody asks for again goes first, and what is skipped is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "hints.py"


def test_each_hint_does_what_the_example_says() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        "a document: 4 blocks stored",
        "a secret: 0 blocks stored",
        "a summary that nobody asks for again: 4 blocks stored",
        "an agent that calls a tool: 4 blocks stored",
        "a chat: 4 blocks stored",
        "another chat: 4 blocks stored",
        "a summary that nobody asks for again: 0 blocks found",
        "a document: 4 blocks found",
        "a document: 0 blocks found",
        "4 requests with hints, 0 refused",
    ]
