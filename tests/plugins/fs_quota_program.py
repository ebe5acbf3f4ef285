"""Stores blocks in a shared directory: `fs_quota_program.py PATH NAMESPACE CAPACITY QUOTA LABEL BATCHES`.

Prints after each batch how many blocks it has stored in all.
"""

from __future__ import annotations

import sys

from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier

BLOCK_BYTES = 65_536
BATCH = 8


def main() -> None:
    path, namespace, capacity, quota, label, batches = sys.argv[1:]
    settings = FsSettings(path=path, capacity=int(capacity), quota=int(quota), threads=4)
    spec = TierSpec("fs", BLOCK_BYTES, bytes.fromhex(namespace), {"model": "shared"})
    rig = TierRig(
        lambda spec, view: FsTier(spec, view, "fs", settings),
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
