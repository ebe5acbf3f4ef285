"""The base classes and helpers for authors of tiers; see docs/how-to/writing-a-tier.md.

`blocking` is a base for tiers made of blocking calls, `aio` one for asyncio clients. `aio` is imported on its
own, so that only its users load `asyncio`. `record` is the form of a block in storage, `codecs` are the transformations
of its bytes, and `lookups` batches the lookups in a remote index.
"""

from __future__ import annotations

from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv.toolkit.lookups import BatchedLookups

__all__ = ["BatchedLookups", "BlockingTier", "Outcome"]
