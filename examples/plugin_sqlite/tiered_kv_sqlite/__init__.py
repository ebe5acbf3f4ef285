"""A tier that keeps blocks in an SQLite database, as a distribution of its own."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Self

from pydantic import Field

from tiered_kv.toolkit import Bytes, SecondaryTierManager, TierSettings, TierType, hookimpl

if TYPE_CHECKING:
    from tiered_kv.toolkit.administration import TierAdministration


class SqliteSettings(TierSettings):
    """The YAML entry of a sqlite tier."""

    path: str = Field(min_length=1, description="The database's file.")
    capacity: Bytes = Field(ge=1 << 16, description="Bytes that the database's file may have.")

    def part_of_storage(self, directory: str, share: Fraction) -> Self:
        """Return these settings for a part of the storage: a database beside this one, since it is no directory."""
        return super().part_of_storage(directory, share).model_copy(update={"path": f"{self.path}-{directory}"})


def _load() -> type[SecondaryTierManager]:
    from tiered_kv_sqlite.tier import SqliteTier

    return SqliteTier


def _load_administration() -> type[TierAdministration]:
    from tiered_kv_sqlite.administration import SqliteAdministration

    return SqliteAdministration


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `sqlite`."""
    description = "Blocks in an SQLite database."
    return [TierType("sqlite", SqliteSettings, _load, description, administration=_load_administration)]
