"""Secondary tiers over a caller's own memory, without a primary tier; see docs/how-to/direct.md.

A program, and the plugins of LMCache and SGLang, call `tiers.DirectTiers` from any thread; no call waits. One
thread (`thread.TierThread`) owns the guarded tiers, and calls the program's callbacks. What must stay true: a callback
comes once, when no tier touches the caller's blocks any more. `tasks` has the calls as tasks, and each tier's queue.
"""

from tiered_kv.direct.tiers import DirectTiers

__all__ = ["DirectTiers"]
