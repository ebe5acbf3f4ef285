"""Example programs print what their comments and the pages about them say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED: dict[str, list[str]] = {
    "events.py": [
        "10 blocks stored: {'CPU': 10, 'NVME': 10}",
        "40 blocks stored: {'CPU': 16, 'NVME': 40}",
        "after a reset: {}",
    ],
    "async_stack.py": [
        "summary: 0 of 3 blocks found",
        "who: 2 of 3 blocks found",
        "when: 2 of 3 blocks found",
        "where: 2 of 3 blocks found",
        "stored: 3",
    ],
    "why_a_miss.py": [
        "a prompt that nobody has asked before: 0 of 4 blocks; the first: cpu unknown, small unknown, picky unknown",
        "an old prompt: 0 of 4 blocks; the first: cpu evicted, small evicted, picky admission",
        "a recent prompt: 4 of 4 blocks; the first: cpu present, small stored, picky stored",
        "a recent prompt: 0 of 4 blocks; the first: cpu reset, small reset, picky reset",
        "cpu: {'hit': 4, 'miss': 12}, misses {'absent': 4, 'evicted': 4, 'reset': 4}",
        "small: {'miss': 12}, misses {'absent': 4, 'evicted': 4, 'reset': 4}",
        "picky: {'miss': 12}, misses {'absent': 4, 'reset': 4, 'admission': 4}",
    ],
    "keyed_names.py": [
        "found 0 of 4 blocks, stored 4",
        "found 4 of 4 blocks, stored 4",
        "found 0 of 4 blocks, stored 4",
        "the files contain 0 keys",
    ],
    "hints.py": [
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
    ],
}


def run(example: str, directory: Path) -> tuple[str, str]:
    """Run an example in a directory; return what it printed, and its log."""
    command = [sys.executable, str(EXAMPLES / example)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_its_lines(example: str, tmp_path: Path) -> None:
    assert run(example, tmp_path)[0].splitlines() == PRINTED[example]


def test_the_example_of_metrics_shows_metrics_and_status(tmp_path: Path) -> None:
    output, log = run("metrics.py", tmp_path)
    assert f'tiered_kv_restored_tokens_total{{tier="cpu"}} {64 * 16:.1f}' in output
    assert 'tiered_kv_tier_used_bytes{tier="nvme"}' in output
    assert "cpu: 1048576 of 1048576 bytes" in output
    assert log == ""


@pytest.mark.slow
def test_the_example_of_the_audit_catches_swapped_weights_and_stops_the_tier(tmp_path: Path) -> None:
    output, log = run("audit/audit.py", tmp_path)
    first, second = output.split("a process with weights 2\n")
    assert "different" not in first
    assert "stopped 0" in first
    found = [int(line.split(":")[1].split()[0]) for line in second.splitlines() if "prompt" in line]
    assert found == [8, 8, 8, *[0] * 9], "wrong blocks are found until the audit stops their tier"
    assert "stopped 1" in second
    assert log.count("log: audit:") == 1
