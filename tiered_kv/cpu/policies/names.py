"""The built-in eviction policies of the primary tier."""

from __future__ import annotations

from typing import Final

BUILT_IN_POLICIES: Final = {
    "lru": "tiered_kv.cpu.policies.lru:LRUPolicy",
    "arc": "tiered_kv.cpu.policies.arc:ARCPolicy",
    "density": "tiered_kv.cpu.policies.density:DensityPolicy",
}
"""The class of each name that a stack's file may give; it is imported when a primary tier is made."""
