"""What the tests of reports share."""

from __future__ import annotations

from typing import Any

import pytest

from tiered_kv.observe.report.figures import draw


@pytest.fixture(scope="session")
def drawing_library() -> None:
    """The library that draws, and the files of letters that it keeps open for the whole process."""

    def plot(axes: Any) -> None:  # Any: the library's axes
        axes.set_xlabel("letters")

    draw("letters", "letters", plot)
