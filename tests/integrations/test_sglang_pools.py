"""Our backend over SGLang's host pools of every kind and layout, as its threads call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sglang_programs import run_program

pytestmark = pytest.mark.slow


def test_pages_of_every_host_pool_come_back(tmp_path: Path) -> None:
    results = run_program(Path(__file__).with_name("sglang_pools_program.py"), tmp_path, str(tmp_path))
    assert {result["check"]: result["error"] for result in results if result["error"]} == {}
    assert len(results) >= 19
