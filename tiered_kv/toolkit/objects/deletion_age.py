"""The deletion age: the age from which sweeps delete blocks, as far as a process knows it.

The sweeper's thread changes it after each of its sweeps, or after another process's. Worker threads and the thread of
renewals read it, to decide which used blocks are renewed. What must stay true: a used block is renewed from half of the
deletion age on.
"""

from __future__ import annotations

import math


class DeletionAge:
    """The age at which a sweep deletes a block: by `ttl`, and by an estimate for `capacity`.

    `by_capacity_s` follows the sweeps. Only the sweeper's thread changes it, by one assignment of a float for each
    change. So readers on other threads need no lock: they see the age from before or from after a sweep. After a sweep
    it becomes, by the first rule that holds:

    1. The sweep deleted blocks to keep the capacity: the age of the youngest of them.
    2. The blocks take more than half of the capacity: the age of the oldest block in a full capacity. The estimate
       takes the blocks to be stored at a steady rate, so the age grows as the bytes do. The age at most doubles with
       each sweep: one sweep that finds room must not stop the renewals.
    3. Otherwise twice the age from before: no sweep deletes for the capacity soon.

    Args:
        ttl_s: The age beyond which a sweep deletes any block; infinite without such a limit.
        capacity_bytes: Limit of the bytes of all blocks; infinite without such a limit.
    """

    def __init__(self, ttl_s: float, capacity_bytes: float) -> None:
        self._ttl_s = ttl_s
        self._capacity_bytes = capacity_bytes
        self.by_capacity_s = math.inf
        """The age from which sweeps delete blocks to keep the capacity; infinite before the first sweep needs room."""

    @property
    def renewed_s(self) -> float:
        """The age from which on a used block is renewed: half of the age at which a sweep would delete it."""
        return min(self._ttl_s, self.by_capacity_s) / 2

    def note_sweep(self, listed_bytes: int, oldest_s: float, youngest_deleted_s: float | None) -> None:
        """Follow a sweep of this process.

        Args:
            listed_bytes: Size of all blocks before the sweep.
            oldest_s: Age of the oldest block before the sweep.
            youngest_deleted_s: Age of the youngest block that the sweep deletes; None if it deletes no block.
        """
        if youngest_deleted_s is not None and youngest_deleted_s <= self._ttl_s:
            self.by_capacity_s = youngest_deleted_s
        elif listed_bytes > self._capacity_bytes / 2:
            at_full_s = oldest_s * self._capacity_bytes / listed_bytes
            self.by_capacity_s = min(2 * self.by_capacity_s, at_full_s)
        else:
            self.by_capacity_s *= 2

    def follow(self, by_capacity_s: float) -> None:
        """Take the age that another process has found in its sweep."""
        self.by_capacity_s = by_capacity_s
