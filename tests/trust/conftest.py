"""Fixtures of the proofs: servers and storage, each made on demand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import CrashCases
from tests.support.entries import EntryOf
from tests.support.places import PlaceOf
from tests.support.race_cases import SIZES


@pytest.fixture
def entry_of(place_of: PlaceOf) -> EntryOf:
    """Return the entry of a raced tier over new storage."""
    return lambda kind: {**place_of(kind).entry, **SIZES[kind]}


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    """Servers for crashes and failing calls."""
    with CrashCases(tmp_path / "cases") as cases:
        yield cases
