"""What a tier stores of blocks that compress is shorter than they are."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.doors import codec_id_of
from tests.support.places import Place
from tests.support.redis_servers import redis_server
from tests.support.segment_map import SegmentMap
from tiered_kv.testing.rig import compressible_content, make_keys
from tiered_kv.testing.s3_servers import moto_server
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.codecs import ZSTD_ID
from tiered_kv.toolkit.record import HEADER_BYTES

__all__ = ["moto_server", "redis_server"]

SPEC = TierSpec("compressed", 4096, bytes(range(16)))
KEYS = make_keys(8)


@pytest.mark.parametrize("kind", ["memory", "fs", pytest.param("redis", marks=pytest.mark.slow)])
def test_records_are_shorter_than_their_blocks(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with ExitStack() as closing:
        place = Place(kind, tmp_path, request.getfixturevalue, closing)
        rig = place.open(SPEC, compressible_content, codec="zstd")
        assert rig.store(KEYS).success
        assert rig.load(KEYS) == set(KEYS)
        door = place.door(rig)
        records = [door.read(key) or b"" for key in KEYS]
        assert [codec_id_of(record) for record in records] == [ZSTD_ID] * 8
        assert max(map(len, records)) < HEADER_BYTES + rig.block_bytes // 2


@pytest.mark.slow
@pytest.mark.usefixtures("moto_server")
def test_objects_are_shorter_than_their_blocks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    test_records_are_shorter_than_their_blocks("s3", tmp_path, request)


def test_payloads_in_segments_are_shorter_than_their_blocks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with ExitStack() as closing:
        place = Place("nvme", tmp_path, request.getfixturevalue, closing)
        rig = place.open(SPEC, compressible_content, codec="zstd")
        assert rig.store(KEYS).success
        rig.tier.shutdown()  # which writes what is missing
        maps = [SegmentMap(path.read_bytes()) for path in place.path.glob("segment-*.kv")]
        stored = {key: size for each in maps for batch in each.batches for key, _, size in batch.entries}
        assert stored.keys() == set(KEYS)
        assert max(stored.values()) < rig.block_bytes * 3 // 4
