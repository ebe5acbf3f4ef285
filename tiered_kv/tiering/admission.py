"""Which blocks are worth writing to a tier."""

from __future__ import annotations

from tiered_kv.base import OffloadKey

TRACKED_KEYS_MAX = 1 << 20
"""Keys counted in one generation, of two (about 200 MiB of keys at the very worst)."""


class Admission:
    """Admits a block when it is offered for the n-th time, so that blocks which are used once wear no disk.

    Counts are kept in two generations, so that memory is bounded without work for each key: when the younger is full
    it becomes the older, whose counts still carry over. Owned by the manager's thread.
    """

    def __init__(self, admit_after: int, tracked_keys_max: int = TRACKED_KEYS_MAX) -> None:
        self._admit_after = admit_after
        self._tracked_keys_max = tracked_keys_max
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}

    def is_open(self) -> bool:
        """Return whether everything is admitted."""
        return self._admit_after <= 1

    def admit(self, key: OffloadKey) -> bool:
        """Count one offer of `key`, and return whether to store it."""
        offers = self._young.get(key) or self._old.get(key, 0)
        offers += 1
        if offers >= self._admit_after:
            self._young.pop(key, None)
            self._old.pop(key, None)
            return True
        if len(self._young) >= self._tracked_keys_max:
            self._old, self._young = self._young, {}
        self._young[key] = offers
        return False
