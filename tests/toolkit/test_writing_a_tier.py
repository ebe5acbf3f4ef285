"""The code in docs/how-to/writing-a-tier.md works as it stands there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support.pages import write_shown
from tiered_kv.hooks import tier_plugins
from tiered_kv.stack import open_stack

ROOT = Path(__file__).parents[2]
PATIENCE = """
from tiered_kv.config.settings import TierSettings
from tiered_kv.testing.conformance import TierConformance

TierSettings.model_fields["lookup_timeout"].default = 60.0
TierSettings.model_rebuild(force=True)
TierConformance.wait_s = 120.0
"""
"""A conftest.py: on a machine that is slow for a second a lookup of the page's tier would be a miss."""


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files that the page shows, each under the name that stands above it, and make them importable."""
    names = write_shown("how-to/writing-a-tier.md", tmp_path)
    assert names == ["tiered_kv_folder.py", "stack.yaml", "test_folder.py"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("tiered_kv_folder", None)


@pytest.mark.slow
def test_the_tier_on_the_page_passes_the_conformance_suite(page_files: Path) -> None:
    (page_files / "conftest.py").write_text(PATIENCE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_folder.py"]
    environment = {"PYTHONPATH": f"{ROOT}:{page_files}", "PATH": "/usr/bin:/bin", "TMPDIR": str(page_files)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed", run.stdout), run.stdout


def test_the_stack_on_the_page_opens_and_its_blocks_outlive_it(page_files: Path) -> None:
    plugins = tier_plugins()
    plugins.register(importlib.import_module("tiered_kv_folder"), "folder-of-the-page")
    try:
        keys = [bytes([number]) * 16 for number in range(8)]
        blocks = np.random.default_rng(0).integers(0, 256, (8, 65536), dtype=np.uint8)
        with open_stack(page_files / "stack.yaml") as stack:
            assert stack.put(keys, blocks, timeout=60.0) == 8
            assert stack.flush(timeout=60.0)
        out = np.zeros_like(blocks)
        entries = yaml.safe_load((page_files / "stack.yaml").read_text())
        entries["secondary"][0]["lookup_timeout"] = "60s"  # so that no block is a miss because the machine is busy
        with open_stack(entries) as stack:
            assert stack.get(keys, out, timeout=60.0) == 8
        assert (out == blocks).all()
    finally:
        plugins.unregister("folder-of-the-page")
