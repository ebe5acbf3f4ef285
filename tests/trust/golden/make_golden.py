"""Write what this release's tiers keep, for releases to come: one file a tier and form, `TIER[-FORM]-vVERSION.json`.

    python -m tests.trust.golden.make_golden nvme fs redis s3
    python -m tests.trust.golden.make_golden nvme-encrypted fs-encrypted redis-encrypted s3-encrypted

A file maps each name in the storage (a path in the directory; a key in hex; an object's name) to its bytes, compressed
with zlib and in base64. It has four blocks of 512 bytes for each codec of its form: `raw` and `zstd`; or the
same encrypted with `ENCRYPTION`. It needs redis-server for `redis`, and moto's server for `s3`. Run it when a format
version is raised, never to make a failing test pass: the files of earlier versions stay, and so does what reads them.
Owners' files, locks and grants are of processes, not of the format, and are left out.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.support.places import Place
from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import S3Server, start_moto
from tiered_kv.testing.rig import Content, block_content, compressible_content, make_keys
from tiered_kv.tiering.base import TierSpec

VERSION = 1
SPEC = TierSpec("golden", 512, bytes(range(16)), {"model": "golden", "tenant": "ä"})
ENCRYPTION = {"keys": {7: "a7" * 32}, "write_key": 7}
SMALL: Mapping[str, Mapping[str, object]] = {"nvme": {"capacity": "1MiB", "segment": "32KiB"}}
"""Settings by the tier's type, so that little is stored."""


class Form(NamedTuple):
    """How blocks are stored: the content for each codec, and further settings of the tier."""

    codecs: Mapping[str, Content]
    settings: Mapping[str, object]


FORMS = {
    "": Form({"raw": block_content, "zstd": compressible_content}, {}),
    "encrypted": Form(
        {"aes-256-gcm": block_content, "zstd+aes-256-gcm": compressible_content}, {"encryption": ENCRYPTION}
    ),
}


def main(names: list[str]) -> int:
    for name in names:
        tier, _, form = name.partition("-")
        stored = made(tier, FORMS[form])
        texts = {each: base64.b64encode(zlib.compress(data, 9)).decode() for each, data in sorted(stored.items())}
        path = Path(__file__).parent / f"{name}-v{VERSION}.json"
        path.write_text(json.dumps(texts, indent=1) + "\n")
        print(f"{path}: {len(stored)} names")
    return 0


def made(tier: str, form: Form) -> dict[str, bytes]:
    """Store four blocks with each codec, in a bucket after a reset; return what the storage holds then."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:

        def started(fixture: str) -> RedisServer | S3Server:
            if fixture == "moto_server":
                moto = start_moto()
                closing.callback(moto.stop)
                return moto
            redis = RedisServer(Path(folder))
            redis.start()
            closing.callback(redis.kill)
            return redis

        place = Place(tier, Path(folder), started, closing)
        for number, (codec, content) in enumerate(form.codecs.items()):
            settings = {**SMALL.get(tier, {}), "codec": codec, **form.settings}
            rig = place.open(SPEC, content, num_blocks=16, **settings)
            if tier == "s3" and not number:
                assert rig.tier.reset_cache()
            assert rig.store(make_keys(4, f"golden {codec}")).success
            rig.tier.shutdown()
        stored = place.stored()
    return {name: data for name, data in stored.items() if not name.startswith("segment-") or b"TKVNBAT1" in data}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
