"""The lies that a manager can see through; the bytes themselves only a tier's own checksums can defend."""

from __future__ import annotations

from tiered_kv.testing.faults import Lie

DETECTABLE = (
    Lie.HAS_EVERYTHING,
    Lie.STORES_NOTHING,
    Lie.REPORTS_TWICE,
    Lie.REPORTS_NOTHING,
    Lie.REPORTS_UNKNOWN_JOBS,
    Lie.NAMES_UNASKED_KEYS,
)
