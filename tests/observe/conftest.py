"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.observe.rig import ObedientPlugin
from tiered_kv.hooks import tier_plugins
from tiered_kv.observe.report.figures import draw


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    """The tier that does as it is told, for every test here."""
    tier_plugins().register(ObedientPlugin(), "history test")
    yield
    tier_plugins().unregister("history test")


@pytest.fixture(scope="session")
def drawing_library() -> None:
    """The library that draws, and the files of letters that it keeps open for the whole process."""

    def plot(axes: Any) -> None:  # Any: the library's axes
        axes.set_xlabel("letters")

    draw("letters", "letters", plot)
