"""What changes the namespace of each engine, from `namespaces.toml`, and the tables of the page about it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

ENGINES = ("vllm", "sglang", "lmcache", "transformers")
"""In the order of the tables' columns."""
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "namespaces.md"
TITLES = {"counts": "What shapes the bytes", "same": "What changes nothing"}
"""Of each section of the data, the heading above its table."""
FIRST = "first"


class Case(TypedDict, total=False):
    """How an engine differs from another, in the engine's words."""

    beside: str
    """The engine that it is compared with; `FIRST` if it is left out."""
    refused: str
    """Part of the message with which it is refused."""
    options: Mapping[str, object]
    """What it is started with."""
    settings: Mapping[str, Mapping[str, object]]
    """What is in effect, by section."""
    variables: Mapping[str, str]
    """Of the environment."""
    namespace: Mapping[str, object]
    """The user's part of the namespace."""
    hf: Mapping[str, object]
    """Entries of the model's configuration."""
    files: Mapping[str, str]
    """Contents of files beside the weights."""
    place: Mapping[str, object]
    """What the host says of a rank, or of a key."""


Cases = Mapping[str, Case]

_DATA = tomllib.loads((Path(__file__).parents[1] / "engines" / "namespaces.toml").read_text())


def rows(section: str) -> Mapping[str, Mapping[str, Cases]]:
    """Return the cases of each row of a section, by engine."""
    return cast("Mapping[str, Mapping[str, Cases]]", _DATA[section])


def cases(engine: str, section: str) -> dict[str, Case]:
    """Return an engine's cases in a section, by name."""
    found: dict[str, Case] = {}
    for row in rows(section).values():
        for name, case in row.get(engine, {}).items():
            assert found.setdefault(name, case) == case, f"there are two cases {name!r} of {engine}"
    return found


def all_cases(engine: str, by_hand: Mapping[str, object]) -> dict[str, Case]:
    """Return an engine's cases: first those that others are compared with.

    Args:
        engine: Which.
        by_hand: What the engine's program has for the cases that need more than data.
    """
    first: Mapping[str, Case] = _DATA[FIRST][engine]
    found = {**first, **cases(engine, "counts"), **cases(engine, "same")}
    empty = {name for name, case in found.items() if not case.keys() - {"beside", "refused"}} - {FIRST}
    assert empty <= by_hand.keys() <= found.keys(), (empty - by_hand.keys(), by_hand.keys() - found.keys())
    return found


class Cell(NamedTuple):
    """What the page says of a thing in one engine."""

    section: str
    row: str
    engine: str
    words: str


def cells_of_the_page() -> Iterator[Cell]:
    for section, title in TITLES.items():
        text = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        for line in lines[2:]:
            what, *words = (cell.strip() for cell in line.split("|")[1:-1])
            row = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", what)
            for engine, each in zip(ENGINES, words, strict=True):
                yield Cell(section, row, engine, each)
