"""Write what this release's tiers keep, for the releases to come: one file a tier, `TIER-vVERSION.json`.

    python tests/trust/golden/make_golden.py nvme fs redis s3

A file maps each name in the storage (a path in the directory; a key in hex; an object's name) to its bytes, compressed
with zlib and in base64: four blocks of 512 bytes as `raw` and four as `zstd`. It needs redis-server for `redis`, and
moto's server for `s3`. Run it when a format version is raised, never to make a failing test pass: the files of earlier
versions stay, and so does what reads them. Owners' files, locks and grants are of processes, not of the format, and are
left out.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from tiered_kv.testing.doors import RedisDoor, S3Door
from tiered_kv.testing.redis_servers import RedisServer
from tiered_kv.testing.rig import OpenTier, TierRig, block_content, compressible_content, make_keys
from tiered_kv.testing.s3_servers import start_moto
from tiered_kv.tiering.base import TierSpec

VERSION = 1
BLOCK_BYTES = 512
SPEC = TierSpec("golden", BLOCK_BYTES, bytes(range(16)), {"model": "golden", "tenant": "ä"})
_CODECS = {"raw": block_content, "zstd": compressible_content}
_OF_PROCESSES = ("/lock", "/sweep", "/owners/", "/grants/")


def main(tiers: list[str]) -> int:
    makers: dict[str, Callable[[Path, ExitStack], Mapping[str, bytes]]] = {
        "nvme": of_nvme,
        "fs": of_fs,
        "redis": of_redis,
        "s3": of_s3,
    }
    for tier in tiers or list(makers):
        with tempfile.TemporaryDirectory() as name, ExitStack() as closing:
            stored = makers[tier](Path(name), closing)
            texts = {each: base64.b64encode(zlib.compress(data, 9)).decode() for each, data in sorted(stored.items())}
        path = Path(__file__).parent / f"{tier}-v{VERSION}.json"
        path.write_text(json.dumps(texts, indent=1) + "\n")
        print(f"{path}: {len(stored)} names")
    return 0


def of_nvme(path: Path, closing: ExitStack) -> Mapping[str, bytes]:
    from tiered_kv_nvme.settings import NvmeSettings
    from tiered_kv_nvme.tier import NvmeTier

    def opener(codec: str) -> OpenTier:
        entry = {"path": str(path / "kv"), "capacity": "1MiB", "segment": "32KiB", "codec": codec}
        return lambda spec, view: NvmeTier(spec, view, "nvme", NvmeSettings.model_validate(entry))

    _store(opener)
    return {name: data for name, data in _files(path / "kv").items() if not _is_empty_segment(name, data)}


def of_fs(path: Path, closing: ExitStack) -> Mapping[str, bytes]:
    from tiered_kv_fs.settings import FsSettings
    from tiered_kv_fs.tier import FsTier

    def opener(codec: str) -> OpenTier:
        entry = {"path": str(path / "kv"), "capacity": "8MiB", "codec": codec}
        return lambda spec, view: FsTier(spec, view, "fs", FsSettings.model_validate(entry))

    _store(opener)
    return _files(path / "kv")


def of_redis(path: Path, closing: ExitStack) -> Mapping[str, bytes]:
    from tiered_kv_redis.settings import RedisSettings
    from tiered_kv_redis.tier import RedisTier

    server = RedisServer(path)
    server.start()
    closing.callback(server.kill)

    def opener(codec: str) -> OpenTier:
        entry = {"url": server.url, "codec": codec}
        return lambda spec, view: RedisTier(spec, view, "redis", RedisSettings.model_validate(entry))

    _store(opener)
    return RedisDoor(server, SPEC.namespace_digest).snapshot()


def of_s3(path: Path, closing: ExitStack) -> Mapping[str, bytes]:
    from tiered_kv_s3.settings import S3Settings
    from tiered_kv_s3.tier import S3Tier

    server = start_moto()
    closing.callback(server.stop)
    bucket = server.make_bucket()

    def opener(codec: str) -> OpenTier:
        entry = server.settings(bucket, codec=codec, prefix="kv")
        return lambda spec, view: S3Tier(spec, view, "s3", S3Settings.model_validate(entry))

    _store(opener, resets=True)
    door = S3Door(server, bucket, "kv", SPEC.namespace_digest)
    closing.callback(door.close)
    return {name: data for name, data in door.snapshot().items() if not any(each in name for each in _OF_PROCESSES)}


def _store(opener: Callable[[str], OpenTier], *, resets: bool = False) -> None:
    """Store four blocks with each codec, after a reset where that leaves something to be seen."""
    for codec, content in _CODECS.items():
        rig = TierRig(opener(codec), num_blocks=16, block_bytes=BLOCK_BYTES, wait_s=60.0, spec=SPEC, content=content)
        try:
            if resets and codec == "raw":
                assert rig.tier.reset_cache()
            assert rig.store(make_keys(4, f"golden {codec}")).success
        finally:
            rig.close()


def _files(directory: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes() for name, path in files.items() if not any(each in f"/{name}" for each in _OF_PROCESSES)
    }


def _is_empty_segment(name: str, data: bytes) -> bool:
    return name.startswith("segment-") and b"TKVNBAT1" not in data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
