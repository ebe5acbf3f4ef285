"""A file system that is full before the capacity is reached costs stores, which are counted; space is used again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.figures import Figures
from tests.support.mounts import command_in_namespace, missing_for_tmpfs

pytestmark = [pytest.mark.trust, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("full_disk_program.py")
FILE_SYSTEM_BYTES = 4 << 20


@pytest.mark.parametrize("tier_type", ["nvme", "fs"])
@pytest.mark.parametrize("free_bytes", [384 << 10, 512 << 10, 900 << 10])
def test_a_full_file_system_costs_stores_only(
    tmp_path: Path, tier_type: str, free_bytes: int, figures: Figures
) -> None:
    """With room for one segment of nvme, for not quite two, and for three."""
    if missing := missing_for_tmpfs():
        pytest.skip(missing)
    filled = str(FILE_SYSTEM_BYTES - free_bytes)
    command = [sys.executable, str(PROGRAM), str(tmp_path), tier_type, str(FILE_SYSTEM_BYTES), filled]
    done = subprocess.run(command_in_namespace(command), capture_output=True, text=True, check=False, timeout=300)
    told = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    passed = told and not told["wrong"] and told["refused"] and told["recovered"] and told["found_later"] >= 4
    figures.add("full-disk", tried=1, passed=int(bool(passed)))
    assert passed, f"{' '.join(command)}: {told or done.stderr}"
