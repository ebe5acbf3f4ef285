"""The fs tier keeps the contract of a secondary tier."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_fs.layout import BLOCK
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier


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
        """Flip the last byte of every block."""
        for path in self.directory.rglob("*"):
            if BLOCK.fullmatch(path.name) and path.is_file():
                damaged = bytearray(path.read_bytes())
                damaged[-1] ^= 0x01
                with path.open("r+b") as file:
                    file.write(damaged)
        return True


class TestFsTierWithOddBlocks(TestFsTier):
    block_bytes = 1000


class TestFsTierWithCompression(TestFsTier):
    settings: ClassVar[dict[str, object]] = {"codec": "zstd"}
    compressible = True


class TestFsTierWithEncryption(TestFsTier):
    settings: ClassVar[dict[str, object]] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
