"""What the storage of a simulated stack costs, by prices of the user's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tiered_kv.config.reading import from_source
from tiered_kv.config.settings import StrictModel
from tiered_kv.config.validation import suggestion, validate
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Outcome

MONTH_S = 365.25 / 12 * 86_400
_GIB = 1 << 30
_Price = Annotated[float, Field(strict=True, ge=0)]


class TierPrices(StrictModel):
    """What one tier costs, each price 0 unless it is given."""

    gib_month: _Price = Field(default=0.0, description="A GiB of storage for a month.")
    gib_written: _Price = Field(default=0.0, description="A GiB that is written.")
    gib_read: _Price = Field(default=0.0, description="A GiB that is read.")
    thousand_writes: _Price = Field(default=0.0, description="A thousand requests that write a block.")
    thousand_reads: _Price = Field(default=0.0, description="A thousand requests that read or look up a block.")


class Prices(StrictModel):
    """The user's file of prices."""

    currency: str = Field(default="USD", max_length=16, description="What the prices are in.")
    tiers: dict[str, TierPrices] = Field(description="Prices by the tier's name; the primary tier is cpu.")


@dataclass(frozen=True, slots=True)
class TierCost:
    """What one tier costs in a month, in the currency of the prices.

    Args:
        storage: Of its capacity, or without one of what it held at the end; of all servers.
        traffic: Of the bytes that were written and read, if a whole month is like the trace.
        requests: Of the requests, likewise.
    """

    storage: float
    traffic: float
    requests: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.storage + self.traffic + self.requests


def load_prices(path: str | os.PathLike[str], tiers: Sequence[str]) -> Prices:
    """Return the prices in a YAML file; `tiers` are the names of those that may have any.

    Raises:
        ConfigError: It cannot be read or used; with a line for each setting at fault.
    """
    return from_source(path, lambda raw: _checked(raw, tiers), what="the file of prices", keys="currency and tiers")


def _checked(raw: Mapping[str, object], tiers: Sequence[str]) -> Prices:
    prices = validate(Prices, raw)
    for name in prices.tiers:
        if name not in tiers:
            message = f"the stack has no tier of this name{suggestion(name, tiers)}; it has: {', '.join(tiers)}"
            raise ConfigError(message, location=f"tiers.{name}")
    return prices


def times_a_month(requests: Sequence[Request]) -> float:
    """Return how often what happens with these requests happens in a month, if they come again and again.

    Raises:
        ConfigError: They came all at one time.
    """
    span_ms = requests[-1].timestamp_ms - requests[0].timestamp_ms
    if span_ms <= 0:
        raise ConfigError("what a month costs cannot be told: the requests came at one time", location="--prices")
    return MONTH_S * 1000 / span_ms


def costs(outcome: Outcome, prices: Prices, times: float) -> dict[str, TierCost]:
    """Return what each tier with a price costs in a month in which the simulated requests come so many times."""
    found = {}
    for name, price in prices.tiers.items():
        tier = outcome.tiers[name]
        stored_bytes = tier.used_bytes if tier.capacity_bytes is None else tier.capacity_bytes * tier.storages
        traffic = price.gib_written * tier.written_bytes + price.gib_read * tier.read_bytes
        reads = tier.read_blocks + tier.lookup_requests
        requests = price.thousand_writes * tier.written_blocks + price.thousand_reads * reads
        found[name] = TierCost(price.gib_month * stored_bytes / _GIB, traffic / _GIB * times, requests / 1000 * times)
    return found
