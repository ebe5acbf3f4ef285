"""What pages of the documentation show, so that tests run it as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def shown(page: str) -> dict[str, str]:
    """Return the code blocks of a page below `docs/` that have a comment above them, by that comment."""
    text = (_DOCS / page).read_text()
    return dict(re.findall(r"<!-- ([^\n]+) -->\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def write_shown(page: str, directory: Path) -> list[str]:
    """Write the files that a page shows, each under the name that stands above it; return the names in their order."""
    files = shown(page)
    for name, text in files.items():
        (directory / name).write_text(text)
    return [*files]
