"""Base classes and helpers for authors of tiers; see docs/how-to/writing-a-tier.md.

`aio` is imported on its own, so that only its users load asyncio.
"""

from __future__ import annotations

from tiered_kv.tiering.lookups import BatchedLookups
from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.jobs import Outcome

__all__ = ["BatchedLookups", "BlockingTier", "Outcome"]
