"""Secondary tiers for a host program with its own pool of blocks; see docs/how-to/direct.md."""

from tiered_kv.direct.tiers import DirectTiers

__all__ = ["DirectTiers"]
