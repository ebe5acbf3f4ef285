"""The settings of tiers over a host's memory."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.errors import ConfigError
from tiered_kv.hooks import tier_settings

OWN_STORAGE = ("nvme", "memory")
"""Tier types whose storage belongs to one process and one namespace. Storage of other types is shared."""


class HostSettings(StrictModel):
    """The base of a host's settings."""

    location: ClassVar[str]  # where they are in the host's configuration, for messages

    tiers: tuple[SerializeAsAny[TierSettings], ...] = Field(
        min_length=1, max_length=64, description="The tiers, as in a stack's `secondary`, in the order of the search."
    )

    @field_validator("tiers", mode="before")
    @classmethod
    def _entries_by_their_types(cls, entries: object) -> object:
        if not isinstance(entries, (list, tuple)):
            raise ValueError("expected a list of tiers, each a mapping with the key 'type'")
        checked = []
        for number, entry in enumerate(entries):
            where = f"{cls.location}.tiers.{number}"
            try:
                checked.append(tier_settings(entry))
            except ConfigError as error:
                raise ConfigError(error.message, location=".".join(filter(None, (where, error.location)))) from None
        return tuple(checked)

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        names = [tier.name for tier in tiers]
        for number, name in enumerate(names):
            if name in names[:number]:
                message = f"another tier is called '{name}'; give each a name of its own"
                raise ConfigError(message, location=f"{cls.location}.tiers.{number}.name")
        return tiers


def part_of(tier: TierSettings, directory: str, share: Fraction) -> TierSettings:
    """Return a tier's settings for one of several kinds of blocks: in `OWN_STORAGE`, a directory below its path.

    Args:
        share: The part of the capacity that this kind gets; more than 0 and at most 1.
    """
    if tier.type not in OWN_STORAGE:
        return tier
    own: Any = tier  # Any: only the plugin knows the type
    update: dict[str, object] = {"capacity": int(own.capacity * share)}
    if hasattr(own, "path"):
        update["path"] = f"{own.path}/{directory}"
    return tier.model_copy(update=update)
