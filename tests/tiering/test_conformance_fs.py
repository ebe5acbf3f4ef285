"""The fs tier keeps the contract of a secondary tier."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.doors import FsDoor, codec_id_of
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.codecs import ZSTD_ID
from tiered_kv.toolkit.record import HEADER_BYTES
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

    def test_files_are_shorter_than_their_blocks(self, rig: TierRig) -> None:
        keys = make_keys(8)
        assert rig.store(keys).success
        assert rig.load(keys) == set(keys)
        records = [FsDoor(self.directory, rig.spec.namespace_digest).read(key) or b"" for key in keys]
        assert [codec_id_of(record) for record in records] == [ZSTD_ID] * 8
        assert max(map(len, records)) < HEADER_BYTES + rig.block_bytes // 2


class TestFsTierWithEncryption(TestFsTier):
    settings: ClassVar[dict[str, object]] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
