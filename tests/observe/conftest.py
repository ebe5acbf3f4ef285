"""The tier that does as it is told, for every test here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.rig import ObedientPlugin
from tiered_kv.hooks import tier_plugins


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    tier_plugins().register(ObedientPlugin(), "history test")
    yield
    tier_plugins().unregister("history test")
