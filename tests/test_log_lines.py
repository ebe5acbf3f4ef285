"""The page that says what a log line means has lines that the code logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "something-is-wrong.md").read_text()
SOURCE = "".join(path.read_text() for top in ("tiered_kv", "plugins") for path in sorted((ROOT / top).rglob("*.py")))
OF_THE_SYSTEM = {"No space left on device"}
FILLED_IN = re.compile(r"'x'|…|PATH|SIGTERM|stack\.yaml|cpu 32GiB|[\d.]+")
"""What a line on the page has in place of the code's placeholders."""
LINES = [
    line
    for row in PAGE.partition("## What a log line means")[2].partition("\n## ")[0].splitlines()
    for line in re.findall(r"`([^`]+)`", row.split("|")[1] if row.startswith("| `") else "")
]


def test_the_page_has_lines() -> None:
    assert len(LINES) > 15


@pytest.mark.parametrize("line", [line for line in LINES if line not in OF_THE_SYSTEM])
def test_a_line_of_the_page_is_logged(line: str) -> None:
    pieces = [piece.strip(" ,:") for piece in FILLED_IN.split(line)]
    assert [piece for piece in pieces if len(piece) > 3 and piece not in SOURCE] == []
