"""The memory tier keeps the contract of a secondary tier."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier


class TestMemoryTier(TierConformance):
    codec: ClassVar[dict[str, object]] = {}

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        settings = MemorySettings.model_validate({"capacity": "64MiB", **self.codec})
        return lambda spec, view: MemoryTier(spec, view, "memory", settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        assert isinstance(tier, MemoryTier)
        for record in tier._records.values():
            record.data[-1] ^= 0x01
        return True


class TestMemoryTierWithCompression(TestMemoryTier):
    codec: ClassVar[dict[str, object]] = {"codec": "zstd"}
    compressible = True


class TestMemoryTierWithEncryption(TestMemoryTier):
    codec: ClassVar[dict[str, object]] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
