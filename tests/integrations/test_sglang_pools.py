"""Our backend over SGLang's host pools of every kind and layout, as its threads call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.sglang_programs import run_program

pytestmark = pytest.mark.slow


def test_pages_of_every_host_pool_come_back(tmp_path: Path) -> None:
    results = run_program(Path(__file__).with_name("sglang_pools_program.py"), tmp_path, str(tmp_path))
    assert {result["check"]: result["error"] for result in results if result["error"]} == {}
    assert len(results) >= 23


@pytest.mark.full
@pytest.mark.parametrize(("layout", "capacity", "kills"), [("page_first", "256MiB", 40), ("layer_first", "8MiB", 30)])
def test_hosts_that_are_killed_at_any_moment_lose_nothing_and_load_no_wrong_byte(
    layout: str, capacity: str, kills: int, tmp_path: Path
) -> None:
    """A directory that is full gives up its oldest pages, so there the stores of hosts before the last may be gone."""
    options = {"layout": layout, "capacity": capacity, "kills": kills, "seed": 0}
    program = Path(__file__).with_name("sglang_kills_program.py")
    (told,) = run_program(program, tmp_path, str(tmp_path), json.dumps(options))
    assert "failed" not in told["phases"]
    assert told["wrong"] == []
    assert len(told["found"]) > 50
    if capacity == "256MiB":
        assert (told["lost"], told["missing"]) == ([], [])
    else:
        assert len(told["lost"]) > 0, "the directory was never full"
