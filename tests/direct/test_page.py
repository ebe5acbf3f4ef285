"""The program in docs/how-to/direct.md works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "direct.md"


def test_the_host_on_the_page_stores_and_loads(tmp_path: Path) -> None:
    ((name, text),) = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / name).write_text(text)
    command = [sys.executable, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["stored [True, True, True, True]", "loaded [True, True, True, True]"]
    assert done.stderr == ""
