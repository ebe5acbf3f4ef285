"""The nvme tier keeps the contract of a secondary tier."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.patient_nvme import PATIENCE_S, opening_nvme, patient_nvme
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
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


class TestNvmeTierWithEncryption(TestNvmeTier):
    settings: ClassVar[dict[str, object]] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}


class TestNvmeTierWithCompressionAndEncryption(TestNvmeTierWithCompression):
    settings: ClassVar[dict[str, object]] = {"codec": "zstd+aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
    block_bytes = 1000
