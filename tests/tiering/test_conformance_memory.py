"""The memory tier keeps the contract of a secondary tier."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.support.doors import MemoryDoor, codec_id_of
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.codecs import ZSTD_ID
from tiered_kv.toolkit.record import HEADER_BYTES
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

    def test_records_are_shorter_than_their_blocks(self, rig: TierRig) -> None:
        keys = make_keys(8)
        assert rig.store(keys).success
        assert rig.load(keys) == set(keys)
        records = [MemoryDoor(rig).read(key) or b"" for key in keys]
        assert [codec_id_of(record) for record in records] == [ZSTD_ID] * 8
        assert rig.tier.stats()["used_bytes"] == sum(map(len, records)) < 8 * (HEADER_BYTES + rig.block_bytes // 2)


class TestMemoryTierWithEncryption(TestMemoryTier):
    codec: ClassVar[dict[str, object]] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
