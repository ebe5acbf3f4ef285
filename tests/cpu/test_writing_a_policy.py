"""The code in docs/how-to/writing-a-policy.md works."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import write_shown
from tiered_kv.cpu.policies.guarded import GuardedPolicy
from tiered_kv.stack import open_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.request import ChatWorkload


@pytest.fixture
def stack_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files that the page shows, each with the name above it."""
    names = write_shown("how-to/writing-a-policy.md", tmp_path)
    assert names == ["deepest_first.py", "stack.yaml", "test_deepest_first.py"]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "stack.yaml"
    for name in ("deepest_first", "test_deepest_first"):
        sys.modules.pop(name, None)


def test_the_policy_on_the_page_evicts_tails_and_loses_no_block(stack_file: Path) -> None:
    stack_file.write_text(stack_file.read_text().replace("64KiB", "4KiB").replace("64MiB", "256KiB"))
    chats = ChatWorkload(chats=20, turns=4, active_chats=10, turn_blocks=3)
    with open_stack(stack_file) as stack:
        report = replay(stack.manager, stack.kv_view, chats.requests())
        assert isinstance(stack.primary.policy, GuardedPolicy)
        assert type(stack.primary.policy.inner).__name__ == "DeepestFirst"
        assert stack.primary.evicted_blocks > 0
    assert report.hits["cpu"] > 0
    assert report.corrupt_blocks == 0


@pytest.mark.usefixtures("stack_file")
@pytest.mark.slow
def test_the_test_on_the_page_finds_that_the_policy_keeps_the_rules() -> None:
    importlib.import_module("test_deepest_first").test_the_policy_keeps_the_rules()
