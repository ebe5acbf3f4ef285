"""A tier that keeps blocks in an SQLite database, as a distribution of its own."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from tiered_kv.toolkit import Bytes, SecondaryTierManager, TierSettings, TierType, hookimpl


class SqliteSettings(TierSettings):
    """The YAML entry of a sqlite tier."""

    path: str = Field(min_length=1, description="The database's file.")
    capacity: Bytes = Field(ge=1 << 16, description="Bytes that the database's file may have.")


def _load() -> type[SecondaryTierManager]:
    from tiered_kv_sqlite.tier import SqliteTier

    return SqliteTier


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `sqlite`."""
    return [TierType("sqlite", SqliteSettings, _load, "Blocks in an SQLite database.")]
