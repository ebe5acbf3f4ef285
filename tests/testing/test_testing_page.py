"""The code in docs/how-to/testing.md works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import write_shown


@pytest.mark.slow
@pytest.mark.full
def test_the_tests_on_the_page_pass(tmp_path: Path) -> None:
    names = write_shown("how-to/testing.md", tmp_path)
    assert names == ["test_my_tier.py", "test_my_network_tier.py", "test_my_stack.py"]
    # Without configurations of parent directories, and without a cache.
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "--basetemp", "temporary"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed", run.stdout), run.stdout
