"""The plugin of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.rig import OBEDIENT_TYPE
from tests.support.stacks import plugged


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    """Register the obedient tier for every test here."""
    with plugged(OBEDIENT_TYPE):
        yield
