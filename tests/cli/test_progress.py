"""Every verb that may take long shows on a terminal what it is doing, and on standard error only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.stacks import stack_file
from tiered_kv.cli import output
from tiered_kv.cli.main import main
from tiered_kv.testing.control import ManualClock


def nvme_stack(directory: Path) -> str:
    return stack_file(directory, f"type: nvme, path: {directory / 'cache'}, capacity: 64MiB")


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run the command with a terminal as its standard error; return what the terminal got."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # as Linux reports that the terminal's other end is closed
            while got := os.read(ours, 1 << 16):
                shown.extend(got)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stderr", terminal)
        status = main(list(arguments))
    reader.join()
    os.close(ours)
    assert status == 0, shown
    return shown.decode()


@pytest.mark.one_quick(5)
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
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    options: list[str],
    doing: list[str],
) -> None:
    stack = nvme_stack(tmp_path)
    shown = on_a_terminal(monkeypatch, verb, stack, *options)
    for each in doing:
        assert each in shown
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(output, "LINE_EVERY_S", math.inf)  # a busy machine may take as long as that
    assert main([verb, stack, *options]) == 0
    assert capsys.readouterr().err == ""


def test_without_a_terminal_a_long_run_prints_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.0)
    assert main(["replay", nvme_stack(tmp_path), "--requests", "40", "--json"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert "requests: 40 of 40" in lines
    assert all(re.fullmatch(r"requests: \d+ of 40", line) for line in lines)
    assert json.loads(shown.out)["requests"] == 40


def test_lines_of_progress_come_at_most_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=clock))
    with output.progress("verifying", 4 << 20, in_bytes=True) as advance:
        for done in range(30):
            clock.advance(1.0)
            advance(done << 10, "verifying nvme")
    lines = ["verifying nvme: 9KiB of 4MiB", "verifying nvme: 19KiB of 4MiB", "verifying nvme: 29KiB of 4MiB"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.slow
@pytest.mark.usefixtures("drawing_library")
def test_drawing_a_page_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ["--report", str(tmp_path / "page.html")]
    shown = on_a_terminal(monkeypatch, "replay", nvme_stack(tmp_path), "--chats", "2", *report)
    assert "drawing the page" in shown
