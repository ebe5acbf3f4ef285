"""What all secondary tiers together may take; what one of them may is in its `TierSettings`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """The limits of all secondary tiers together.

    Args:
        promotion_blocks_max: Primary blocks that may be promoted, or kept for a request that waits for them, at one
            time; None for half of the primary tier.
        hold_s: How long a promoted block is kept for a request that does not load it.
        wait_max_s: How long a request may be answered None, whatever it waits for, until it loads a block that it
            waited for. At the bound, blocks that are not ready are misses for it until it ends.
        requests_max: Requests whose state is kept; the oldest is forgotten first.
    """

    promotion_blocks_max: int | None = None
    hold_s: float = 10.0
    wait_max_s: float = 30.0
    requests_max: int = 100_000
