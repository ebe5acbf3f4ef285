"""The costs of a simulated stack, by the user's file of prices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from tiered_kv.config.reading import from_source
from tiered_kv.config.settings import StrictModel
from tiered_kv.config.validation import suggestion, validate
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Simulated, span_s

MONTH_S = 365.25 / 12 * 86_400
_GIB = 1 << 30
_Price = Annotated[float, Field(strict=True, ge=0, le=1e12)]

Costs = dict[str, dict[str, float]]
"""By tier: `storage`, `traffic`, `requests` and `total` of a month, in the currency of the prices."""


class TierPrices(StrictModel):
    """The prices of one tier."""

    gib_month: _Price = Field(default=0.0, description="A GiB of storage for a month.")
    gib_written: _Price = Field(default=0.0, description="A GiB that is written.")
    gib_read: _Price = Field(default=0.0, description="A GiB that is read.")
    thousand_writes: _Price = Field(default=0.0, description="A thousand requests that write a block.")
    thousand_reads: _Price = Field(default=0.0, description="A thousand requests that read or look up a block.")


class Prices(StrictModel):
    """A file of prices."""

    currency: str = Field(default="USD", max_length=16, description="What the prices are in.")
    tiers: dict[str, TierPrices] = Field(description="Prices by the tier's name; the primary tier is cpu.")


def load_prices(path: str | os.PathLike[str], tiers: Sequence[str]) -> Prices:
    """Return the prices in a YAML file for the `tiers` with these names."""
    return from_source(path, lambda raw: _checked(raw, tiers), what="the file of prices", keys="currency and tiers")


def _checked(raw: Mapping[str, object], tiers: Sequence[str]) -> Prices:
    prices = validate(Prices, raw)
    for name in prices.tiers:
        if name not in tiers:
            message = f"the stack has no tier of this name{suggestion(name, tiers)}; it has: {', '.join(tiers)}"
            raise ConfigError(message, location=f"tiers.{name}")
    return prices


def times_a_month(requests: Sequence[Request]) -> float:
    """Return how often these requests, repeated without a pause, come in a month."""
    seconds = span_s(requests)
    if not seconds:
        raise ConfigError("what a month costs cannot be told: the requests came at one time", location="--prices")
    return MONTH_S / seconds


def costs(simulated: Simulated, prices: Prices, times: float) -> Costs:
    """Return the monthly costs of each tier with a price, if the simulated requests come this many `times` a month.

    Storage is charged for the capacity on all servers, or without a capacity for what was stored at the end.
    """
    found = {}
    for name, price in prices.tiers.items():
        tier = simulated.tiers[name]
        stored_bytes = tier.used_bytes if tier.capacity_bytes is None else tier.capacity_bytes * tier.storages
        storage = price.gib_month * stored_bytes / _GIB
        traffic = (price.gib_written * tier.written_bytes + price.gib_read * tier.read_bytes) / _GIB * times
        reads = tier.read_blocks + tier.lookup_requests
        requests = (price.thousand_writes * tier.written_blocks + price.thousand_reads * reads) / 1000 * times
        total = storage + traffic + requests
        found[name] = {"storage": storage, "traffic": traffic, "requests": requests, "total": total}
    return found
