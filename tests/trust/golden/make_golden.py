"""Write what this release's tiers keep, for releases to come: one file a tier and form, `TIER[-FORM]-vVERSION.json`.

    python -m tests.trust.golden.make_golden nvme fs redis s3
    python -m tests.trust.golden.make_golden nvme-encrypted fs-encrypted redis-encrypted s3-encrypted
    python -m tests.trust.golden.make_golden nvme-keyed fs-keyed

A file maps each name in the storage (a path in the directory; a key in hex; an object's name) to its bytes, compressed
with zlib and in base64. It has four blocks of 512 bytes for each codec of its form: `raw` and `zstd`; the same
encrypted with `ENCRYPTION`; or `raw` under names by `NAME_KEY`. It needs redis-server for `redis`, and moto's server
for `s3`. Run it when a format version is raised, never to make a failing test pass: the files of earlier versions stay,
and so does what reads them. Owners' files, locks and grants are of processes, not of the format, and are left out.
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
from typing import NamedTuple

from tests.support.doors import RedisDoor, S3Door
from tiered_kv.testing.redis_servers import RedisServer
from tiered_kv.testing.rig import Content, OpenTier, TierRig, block_content, compressible_content, make_keys
from tiered_kv.testing.s3_servers import start_moto
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.keyed_names import KeyedNames

VERSION = 1
BLOCK_BYTES = 512
SPEC = TierSpec("golden", BLOCK_BYTES, bytes(range(16)), {"model": "golden", "tenant": "ä"})
ENCRYPTION = {"keys": {7: "a7" * 32}, "write_key": 7}
NAME_KEY = bytes(range(32))


class Form(NamedTuple):
    """How blocks are stored.

    Args:
        codecs: The content of the blocks of each codec.
        settings: Of the tier, besides its codec.
        has_names: Whether blocks are stored under names by `NAME_KEY`.
    """

    codecs: Mapping[str, Content]
    settings: Mapping[str, object]
    has_names: bool = False


FORMS = {
    "": Form({"raw": block_content, "zstd": compressible_content}, {}),
    "encrypted": Form(
        {"aes-256-gcm": block_content, "zstd+aes-256-gcm": compressible_content}, {"encryption": ENCRYPTION}
    ),
    "keyed": Form({"raw": block_content}, {}, has_names=True),
}
_OF_PROCESSES = ("/lock", "/sweep", "/owners/", "/grants/")


def main(names: list[str]) -> int:
    makers: dict[str, Callable[[Path, ExitStack, Form], Mapping[str, bytes]]] = {
        "nvme": of_nvme,
        "fs": of_fs,
        "redis": of_redis,
        "s3": of_s3,
    }
    for name in names:
        tier, _, form = name.partition("-")
        with tempfile.TemporaryDirectory() as directory, ExitStack() as closing:
            stored = makers[tier](Path(directory), closing, FORMS[form])
            texts = {each: base64.b64encode(zlib.compress(data, 9)).decode() for each, data in sorted(stored.items())}
        path = Path(__file__).parent / f"{name}-v{VERSION}.json"
        path.write_text(json.dumps(texts, indent=1) + "\n")
        print(f"{path}: {len(stored)} names")
    return 0


def of_nvme(path: Path, closing: ExitStack, form: Form) -> Mapping[str, bytes]:
    from tiered_kv_nvme.settings import NvmeSettings
    from tiered_kv_nvme.tier import NvmeTier

    def opener(codec: str) -> OpenTier:
        entry = {"path": str(path / "kv"), "capacity": "1MiB", "segment": "32KiB", "codec": codec, **form.settings}
        return lambda spec, view: NvmeTier(spec, view, "nvme", NvmeSettings.model_validate(entry))

    _store(opener, form)
    return {name: data for name, data in _files(path / "kv").items() if not _is_empty_segment(name, data)}


def of_fs(path: Path, closing: ExitStack, form: Form) -> Mapping[str, bytes]:
    from tiered_kv_fs.settings import FsSettings
    from tiered_kv_fs.tier import FsTier

    def opener(codec: str) -> OpenTier:
        entry = {"path": str(path / "kv"), "capacity": "8MiB", "codec": codec, **form.settings}
        return lambda spec, view: FsTier(spec, view, "fs", FsSettings.model_validate(entry))

    _store(opener, form)
    return _files(path / "kv")


def of_redis(path: Path, closing: ExitStack, form: Form) -> Mapping[str, bytes]:
    from tiered_kv_redis.settings import RedisSettings
    from tiered_kv_redis.tier import RedisTier

    server = RedisServer(path)
    server.start()
    closing.callback(server.kill)

    def opener(codec: str) -> OpenTier:
        entry = {"url": server.url, "codec": codec, **form.settings}
        return lambda spec, view: RedisTier(spec, view, "redis", RedisSettings.model_validate(entry))

    _store(opener, form)
    return RedisDoor(server, SPEC.namespace_digest).snapshot()


def of_s3(path: Path, closing: ExitStack, form: Form) -> Mapping[str, bytes]:
    from tiered_kv_s3.settings import S3Settings
    from tiered_kv_s3.tier import S3Tier

    server = start_moto()
    closing.callback(server.stop)
    bucket = server.make_bucket()

    def opener(codec: str) -> OpenTier:
        entry = server.settings(bucket, codec=codec, prefix="kv", **form.settings)
        return lambda spec, view: S3Tier(spec, view, "s3", S3Settings.model_validate(entry))

    _store(opener, form, resets=True)
    door = S3Door(server, bucket, "kv", SPEC.namespace_digest)
    closing.callback(door.close)
    return {name: data for name, data in door.snapshot().items() if not any(each in name for each in _OF_PROCESSES)}


def _store(opener: Callable[[str], OpenTier], form: Form, *, resets: bool = False) -> None:
    """Store four blocks with each codec, after a reset where that leaves something to be seen."""
    for number, (codec, content) in enumerate(form.codecs.items()):
        open_tier = with_names(opener(codec)) if form.has_names else opener(codec)
        rig = TierRig(open_tier, num_blocks=16, block_bytes=BLOCK_BYTES, wait_s=60.0, spec=SPEC, content=content)
        try:
            if resets and not number:
                assert rig.tier.reset_cache()
            assert rig.store(make_keys(4, f"golden {codec}")).success
        finally:
            rig.close()


def with_names(open_tier: OpenTier) -> OpenTier:
    """Return what opens the same tier, which is told names in place of keys."""
    return lambda spec, view: KeyedNames(open_tier(spec, view), NAME_KEY)


def _files(directory: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes() for name, path in files.items() if not any(each in f"/{name}" for each in _OF_PROCESSES)
    }


def _is_empty_segment(name: str, data: bytes) -> bool:
    return name.startswith("segment-") and b"TKVNBAT1" not in data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
