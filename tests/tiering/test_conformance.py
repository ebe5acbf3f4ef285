"""The memory, fs and nvme tiers keep the contract of a secondary tier, with each kind of stored blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.disk_use import fs_blocks
from tests.support.patient_nvme import PATIENCE_S, opening_nvme, patient_nvme
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier

__all__ = ["patient_nvme"]

ZSTD: dict[str, object] = {"codec": "zstd"}
AES: dict[str, object] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
ZSTD_AES: dict[str, object] = {**AES, "codec": "zstd+aes-256-gcm"}
PAGE_BYTES = 4096
STRIDE_BYTES = 128  # less than any payload of these tests, compressed ones included


def damage(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file in place."""
    data = bytearray(path.read_bytes())
    change(data)
    with path.open("r+b") as file:
        file.write(data)


class TestMemoryTier(TierConformance):
    settings: ClassVar[dict[str, object]] = {}

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        settings = MemorySettings.model_validate({"capacity": "64MiB", **self.settings})
        return lambda spec, view: MemoryTier(spec, view, "memory", settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        assert isinstance(tier, MemoryTier)
        for record in tier._records.values():
            record.data[-1] ^= 0x01
        return True


class TestMemoryTierWithCompression(TestMemoryTier):
    settings = ZSTD
    compressible = True


class TestMemoryTierWithEncryption(TestMemoryTier):
    settings = AES


class TestFsTier(TierConformance):
    survives_reopen = True
    settings: ClassVar[dict[str, object]] = {}
    directory: Path

    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> OpenTier:
        self.directory = tmp_path / "kv"
        settings = FsSettings.model_validate(
            # A disk that a busy machine holds up is no fault, and what it holds no miss.
            {"path": str(self.directory), "capacity": "64MiB", "lookup_timeout": "60s", **self.settings}
        )
        return lambda spec, view: FsTier(spec, view, "fs", settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        """Flip a bit of the last byte of every block."""
        for path in fs_blocks(self.directory):
            damage(path, lambda data: data.append(data.pop() ^ 0x01))
        return True


@pytest.mark.slow
class TestFsTierWithCompressionAndEncryption(TestFsTier):
    settings = ZSTD_AES
    compressible = True
    block_bytes = 1000


@pytest.mark.usefixtures("patient_nvme")
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
        """Flip a bit in every stretch that holds anything, but for the headers of segments."""

        def flip(data: bytearray) -> None:
            for at in range(PAGE_BYTES, len(data), STRIDE_BYTES):
                data[at] ^= any(data[at : at + STRIDE_BYTES])

        for segment in self.directory.glob("segment-*.kv"):
            damage(segment, flip)
        return True


class TestNvmeTierThroughThePageCache(TestNvmeTier):
    settings: ClassVar[dict[str, object]] = {"direct": False}
    block_bytes = 1000


@pytest.mark.slow
class TestNvmeTierWithCompressionAndEncryption(TestNvmeTier):
    settings = ZSTD_AES
    compressible = True
    block_bytes = 1000
