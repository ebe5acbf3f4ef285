"""Files, commands and tables on pages of the documentation, which tests run or compare."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def shown(page: str) -> dict[str, str]:
    """Return the code blocks of a page below `docs/` that have a comment above them, by that comment."""
    text = (_DOCS / page).read_text()
    return dict(re.findall(r"<!-- ([^\n]+) -->\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def write_shown(page: str, directory: Path) -> list[str]:
    """Write the files that a page shows; return their names in order."""
    files = shown(page)
    for name, text in files.items():
        (directory / name).write_text(text)
    return [*files]


def commands(page: str) -> list[str]:
    """Return the lines of shell blocks that run `tiered-kv`."""
    blocks = re.findall(r"^```(?:ba)?sh\n(.*?)^```$", (_DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith("tiered-kv ")]


def counters_of(section: str) -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """Return the labels and units of each counter in a section of `counters.md`."""
    text = (_DOCS / "reference/counters.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table = re.split(r"^(?=\| (?:counter|histogram) \|)", text, flags=re.MULTILINE)[1].partition("\n\n")[0]
    heads, _, *rows = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines())
    found = {}
    for cells in rows:
        row = dict(zip(heads, cells, strict=True))
        for name in re.findall(r"`(\w+)`", cells[0]):
            found[name] = (tuple(re.findall(r"`(\w+)`", row["labels"])), row.get("unit", "").split(", "))
    return found


def undescribed(names: Iterable[str], page: str, section: str = "") -> set[str]:
    """Return the names that a page, or its section, does not mention as code."""
    text = (_DOCS / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for name in names if f"`{name}`" not in text}
