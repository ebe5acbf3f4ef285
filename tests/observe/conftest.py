"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.observe.rig import OBEDIENT_TYPE
from tests.support.plugged import plugged
from tiered_kv.observe.report.figures import draw


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    """The tier that does as it is told, for every test here."""
    with plugged(OBEDIENT_TYPE):
        yield


@pytest.fixture(scope="session")
def drawing_library() -> None:
    """The library that draws, and the files of letters that it keeps open for the whole process."""

    def plot(axes: Any) -> None:  # Any: the library's axes
        axes.set_xlabel("letters")

    draw("letters", "letters", plot)
