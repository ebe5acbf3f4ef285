"""The s3 tier: blocks as objects in a bucket of S3, or of any server that speaks its protocol.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below. `tier.S3Tier` is an
object tier (`tiered_kv.toolkit.objects` tells its way): the toolkit's worker threads make the requests of `bucket`,
each for one block at a time, and background threads those of `control`.

What must stay true.

- Every request for a block ends by its deadline, with all its attempts (`bucket.Bucket`).
- No message has a secret (`access.BucketAccess`).

What is kept where. The bucket has the blocks; `tiered_kv.toolkit.objects.naming` shows the names of its objects.

A store is one PUT from the block's row, a load one GET into the row. `bucket` repeats requests, over the connections of
`pool`; `connection` signs them, and copies no block. Listings, deletes and copies run through boto3
(`control.Control`), which also has the credentials (`access.BucketAccess`).
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
            key_store=imported("tiered_kv.toolkit.objects.simulation:ObjectKeys"),
            metrics=METRICS,
        )
    ]
