"""Names in the tables of a page, which a program's engines are compared with."""

from __future__ import annotations

import re
from pathlib import Path


def names_in(page: Path, section: str) -> list[str]:
    """Return the names in the last column of a section's table."""
    (text,) = re.findall(rf"^### {section}\n(.*?)(?=^##|\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| ")][2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[-2])]
