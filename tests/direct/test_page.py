"""The program in docs/how-to/direct.md works as it stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.pages import write_shown


def test_the_host_on_the_page_stores_and_loads(tmp_path: Path) -> None:
    (name,) = write_shown("how-to/direct.md", tmp_path)
    command = [sys.executable, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["stored [True, True, True, True]", "loaded [True, True, True, True]"]
    assert done.stderr == ""
