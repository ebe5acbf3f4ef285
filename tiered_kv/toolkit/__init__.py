"""What the author of a tier builds on; see docs/how-to/writing-a-tier.md.

`blocking` is a base for tiers made of blocking calls, `aio` one for asyncio clients (it is imported on its
own, so that `asyncio` is loaded by who needs it), `record` is how a block lies in storage, `codecs` what
may be done to its bytes, and `lookups` gathers questions for a remote index.
"""

from __future__ import annotations

from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv.toolkit.lookups import BatchedLookups

__all__ = ["BatchedLookups", "BlockingTier", "Outcome"]
