"""Every verb that may take long shows on a terminal what it is doing, and on standard error only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stacks import stack_file
from tiered_kv.cli import main

COMMAND = [sys.executable, "-c", "from tiered_kv.cli import main; raise SystemExit(main())"]


def nvme_stack(directory: Path) -> str:
    return stack_file(directory, f"type: nvme, path: {directory / 'cache'}, capacity: 64MiB")


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """Run the command with a terminal as its standard error; return what it printed, and what the terminal got."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        try:
            while read := os.read(ours, 1 << 16):
                shown += read
        except OSError:  # the terminal's other end is closed, which Linux tells so
            pass
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0, shown
    return printed.decode(), shown.decode()


@pytest.mark.parametrize(
    ("verb", "options", "doing"),
    [
        ("check", [], ["opening cpu"]),
        ("replay", ["--requests", "40"], ["opening the tiers", "40/40"]),
        ("simulate", ["--requests", "40"], ["reading the requests", "40/40"]),
        ("bench", ["--blocks", "16"], ["measuring nvme", "3/3"]),
        ("purge", ["--yes"], ["looking into nvme"]),
    ],
)
def test_progress_is_shown_on_a_terminal_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, options: list[str], doing: list[str]
) -> None:
    stack = nvme_stack(tmp_path)
    printed, shown = on_a_terminal(verb, stack, *options)
    for each in doing:
        assert each in shown
    assert "\x1b" not in printed
    assert main([verb, stack, *options]) == 0
    assert capsys.readouterr().err == ""


def test_drawing_a_page_is_shown(tmp_path: Path) -> None:
    _, shown = on_a_terminal("bench", nvme_stack(tmp_path), "--blocks", "16", "--report", str(tmp_path / "page.html"))
    assert "drawing the page" in shown
