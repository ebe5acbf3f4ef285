"""Tiers over memory that another program owns: for hosts with a pool of blocks of their own."""

from tiered_kv.direct.tiers import DirectTiers

__all__ = ["DirectTiers"]
