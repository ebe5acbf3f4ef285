"""The code in docs/how-to/testing.md works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "testing.md"


@pytest.mark.slow
def test_the_tests_on_the_page_pass(tmp_path: Path) -> None:
    shown = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [name for name, _ in shown] == ["test_my_tier.py", "test_my_network_tier.py", "test_my_stack.py"]
    for name, text in shown:
        (tmp_path / name).write_text(text)
    # Neither a configuration above the directory counts, nor is anything left behind.
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
