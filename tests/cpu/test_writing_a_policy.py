"""The code in docs/how-to/writing-a-policy.md works."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import write_shown
from tiered_kv.stack import open_stack
from tiered_kv.workload.generator import ChatWorkload
from tiered_kv.workload.replay import replay


@pytest.fixture
def stack_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files that the page shows, each with the name above it."""
    assert write_shown("how-to/writing-a-policy.md", tmp_path) == ["deepest_first.py", "stack.yaml"]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "stack.yaml"
    sys.modules.pop("deepest_first", None)


def test_the_policy_on_the_page_evicts_tails_and_loses_no_block(stack_file: Path) -> None:
    stack_file.write_text(stack_file.read_text().replace("64KiB", "4KiB").replace("64MiB", "256KiB"))
    chats = ChatWorkload(chats=20, turns=4, active_chats=10, turn_blocks=3)
    with open_stack(stack_file) as stack:
        report = replay(stack.manager, stack.kv_view, chats.requests())
        assert type(stack.primary.policy).__name__ == "DeepestFirst"
        assert stack.primary.evicted_blocks > 0
    assert report.hits["cpu"] > 0
    assert report.corrupt_blocks == 0
