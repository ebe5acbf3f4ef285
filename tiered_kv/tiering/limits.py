"""What all secondary tiers together may take; what one of them may is in its `TierSettings`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """What all secondary tiers together may take.

    Args:
        promotion_blocks_max: Primary blocks that may be promoted, or kept for a request that waits for them, at one
            time; None for half of the primary tier.
        hold_s: How long a promoted block is kept for a request that does not come to load it.
        wait_max_s: How long a request may be answered None, whatever it waits for, until it loads a block that it
            waited for. At the bound, what is not ready is a miss for it until it ends.
        requests_max: Requests whose state is kept; the oldest is forgotten first.
    """

    promotion_blocks_max: int | None = None
    hold_s: float = 10.0
    wait_max_s: float = 30.0
    requests_max: int = 100_000
