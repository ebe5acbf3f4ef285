"""Stores blocks in a Redis: `redis_quota_program.py URL NAMESPACE QUOTA LABEL BATCHES`.

Prints after each batch how many blocks it has stored in all.
"""

from __future__ import annotations

import sys

from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

BLOCK_BYTES = 65_536
BATCH = 8


def main() -> None:
    url, namespace, quota, label, batches = sys.argv[1:]
    settings = RedisSettings(url=url, quota=int(quota), timeout=30.0, connect_timeout=30.0)
    spec = TierSpec("redis", BLOCK_BYTES, bytes.fromhex(namespace), {"model": "shared"})
    rig = TierRig(
        lambda spec, view: RedisTier(spec, view, "redis", settings),
        num_blocks=256,
        block_bytes=BLOCK_BYTES,
        wait_s=60,
        spec=spec,
    )
    stored = 0
    for number in range(int(batches)):
        stored += len(rig.succeeded(rig.store(make_keys(BATCH, f"{label}-{number}"))))
        print(stored, flush=True)
    rig.close()


if __name__ == "__main__":
    main()
