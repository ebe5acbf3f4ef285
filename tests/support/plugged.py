"""Tier types that are registered for the time of a test, as if their plugin were installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiered_kv.hooks import TierType, hookimpl, tier_plugins

_NAME = "plugged"


@contextmanager
def plugged(*tier_types: TierType) -> Iterator[None]:
    """Register a plugin with these tier types during the `with` block."""

    class Plugin:
        @hookimpl
        def tiered_kv_register_tiers(self) -> list[TierType]:
            return list(tier_types)

    tier_plugins().register(Plugin(), _NAME)
    try:
        yield
    finally:
        tier_plugins().unregister(_NAME)
