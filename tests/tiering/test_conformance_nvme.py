"""The nvme tier keeps the contract of a secondary tier."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.patient_nvme import PATIENCE_S, opening_nvme, patient_nvme
from tests.support.segment_map import SegmentMap
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import SecondaryTierManager

__all__ = ["patient_nvme"]

pytestmark = pytest.mark.usefixtures("patient_nvme")

PAGE_BYTES = 4096
STRIDE_BYTES = 128  # less than any payload of these tests, compressed ones included


class TestNvmeTier(TierConformance):
    survives_reopen = True
    wait_s = 2 * PATIENCE_S
    settings: ClassVar[dict[str, object]] = {}
    directory: Path

    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> OpenTier:
        self.directory = tmp_path / "kv"
        return opening_nvme({"path": str(self.directory), "capacity": "64MiB", "segment": "1MiB", **self.settings})

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        """Flip a byte in every stretch that holds anything, but for the headers of segments."""
        for segment in self.directory.glob("segment-*.kv"):
            damaged = bytearray(segment.read_bytes())
            for at in range(PAGE_BYTES, len(damaged), STRIDE_BYTES):
                if any(damaged[at : at + STRIDE_BYTES]):
                    damaged[at] ^= 0x01
            with segment.open("r+b") as file:
                file.write(damaged)
        return True


class TestNvmeTierThroughThePageCache(TestNvmeTier):
    settings: ClassVar[dict[str, object]] = {"direct": "off"}
    block_bytes = 1000


class TestNvmeTierWithCompression(TestNvmeTier):
    settings: ClassVar[dict[str, object]] = {"codec": "zstd"}
    compressible = True

    def test_payloads_are_shorter_than_their_blocks(self, rig: TierRig) -> None:
        keys = make_keys(8)
        assert rig.store(keys).success
        assert rig.load(keys) == set(keys)
        rig.tier.shutdown()  # which writes what is missing
        maps = [SegmentMap(path.read_bytes()) for path in self.directory.glob("segment-*.kv")]
        stored = {key: size for each in maps for batch in each.batches for key, _, size in batch.entries}
        assert stored.keys() == set(keys)
        assert max(stored.values()) < rig.block_bytes * 3 // 4


class TestNvmeTierWithEncryption(TestNvmeTier):
    settings: ClassVar[dict[str, object]] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}


class TestNvmeTierWithCompressionAndEncryption(TestNvmeTierWithCompression):
    settings: ClassVar[dict[str, object]] = {"codec": "zstd+aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
    block_bytes = 1000
