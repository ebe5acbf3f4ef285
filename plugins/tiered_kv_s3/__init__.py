"""The s3 tier: blocks as objects in a bucket of S3, or of any server that speaks its protocol.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below. The scheduler's thread
calls `tier.S3Tier`, which only queues jobs and lookups, and notes uses. The toolkit's worker threads
(`tiered_kv/toolkit/blocking.py`) make the requests, each for one block at a time. Background threads sweep and renew
blocks (`sweeper`), probe a bucket that does not answer (`probe`), and save resets.

What must stay true.

- Every request for a block ends by its deadline, with all its attempts (`bucket.Bucket`).
- A load verifies the whole record. A damaged object is deleted. An object that this process cannot read stays, and is a
  miss.
- A sweep deletes only objects that have the name of a block of this namespace (`epoch.Naming.is_block`).
- While the bucket does not answer, no lookup waits for it (`probe.BucketProbe`).

What is kept where. The bucket has the blocks; `epoch` shows the names of its objects. This process keeps answers to
lookups for `presence_ttl` (`presence.Presence`), and the ages and uses of some blocks (`uses.BlockUses`).

A store (`S3Tier._store`) is one PUT from the block's row. A block that is known to exist is not sent. A load
(`S3Tier._load`) is one GET into the row, and a second one if the record was damaged. `bucket` repeats requests, over
the connections of `pool`; `connection` signs them, and copies no block. A lookup (`Presence.ask`) finds the end of each
prefix with a few HEADs. Listings, deletes and copies run through boto3 (`control.Control`), which also has the
credentials (`access.BucketAccess`).

How room is made. With `ttl` or `capacity`, one process of the namespace at a time lists all blocks (`sweeper.Sweeper`;
`sweep_right.SweepRight` decides which process). It deletes blocks that are too old, and then the oldest beyond the
capacity. A used block that is half as old as the deleted ones is renewed: the server copies it onto itself. Without
either setting no sweep runs.

What a restart does. The process reads the epoch's mark (`epoch.EpochObject`). Lookups find all blocks of that epoch. A
reset draws another epoch (`S3Tier.reset_cache`). Nobody uses the older blocks, so sweeps delete them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv_s3.metrics import METRICS
from tiered_kv_s3.settings import S3Settings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "s3",
            S3Settings,
            imported("tiered_kv_s3.tier:S3Tier", library="boto3", extra="s3"),
            "Objects in a bucket of S3 or of a server like it.",
            imported("tiered_kv_s3.administration:S3Administration", library="boto3", extra="s3"),
            is_shared=True,
            key_store=imported("tiered_kv_s3.simulation:S3Keys"),
            metrics=METRICS,
        )
    ]
