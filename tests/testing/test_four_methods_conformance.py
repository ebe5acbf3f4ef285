"""The smallest tier keeps the contract."""

from __future__ import annotations

import pytest

from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.rig import OpenTier


class TestFourMethodTier(TierConformance):
    @pytest.fixture
    def open_tier(self) -> OpenTier:
        return lambda spec, view: FourMethodTier(spec, view, "four-methods")
