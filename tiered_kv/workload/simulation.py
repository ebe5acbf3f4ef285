"""Simulates a stack without moving a byte: what each tier would hit, write and evict, and what that would cost.

The manager, the policy and the replay are those of a real stack. A tier that keeps only keys replaces each secondary
tier, and ends each job after a fixed number of steps. So storage is always fast enough. The command `simulate` calls
it, on one thread. What must stay true: all deadlines are by simulated clocks.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Annotated

from pydantic import Field

from tiered_kv.config.entries import tier_type_of
from tiered_kv.config.reading import from_source
from tiered_kv.config.settings import PRIMARY_NAME, StrictModel, TierSettings
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.validation import suggestion, validate
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.shared_rows import primary_rows
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import limits_of, located
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.toolkit.keys_only import KeysOnlyTier, KeyStore
from tiered_kv.workload.replay import Replay, ReplaySettings
from tiered_kv.workload.request import Request, block_key, numbered, session_names

SERVERS_MAX = 1000
ROUTERS = ("random", "round-robin", "sticky", "prefix")
_PREFIX_SHARE_MIN = 0.5
"""Router "prefix" chooses a server by its prefix if at least this share of the prompt was seen before."""
_MS_PER_S = 1000
_COUNTS = ("written_blocks", "moved_blocks", "read_blocks", "evicted_blocks", "lookup_requests", "used_bytes")
"""The counters of a `KeyStore`."""

MONTH_S = 365.25 / 12 * 86_400
_GIB = 1 << 30
_Price = Annotated[float, Field(strict=True, ge=0, le=1e12)]

Costs = dict[str, dict[str, float]]
"""The costs of a month by tier: `storage`, `traffic`, `requests` and `total`, in the currency of the prices."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Servers with a stack each, which share the storage of shared tiers. `concurrency` is requests at once on all."""

    servers: int = 1
    router: str = "round-robin"
    concurrency: int = 8

    def __post_init__(self) -> None:
        if self.servers > SERVERS_MAX:
            raise ConfigError(f"expected at most {SERVERS_MAX}, found {self.servers}", location="servers")


@dataclass(frozen=True, slots=True)
class TierUse:
    """The result for one tier, on all servers; `docs/reference/command.md` describes each field."""

    hits: int
    hit_rate: float
    written_blocks: int
    moved_blocks: int
    read_blocks: int
    evicted_blocks: int
    skipped_blocks: int
    lookup_requests: int
    written_bytes: int
    read_bytes: int
    used_bytes: int
    capacity_bytes: int | None
    storages: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation; `docs/reference/command.md` describes each field."""

    policy: str
    capacity_blocks: int
    requests: int
    blocks: int
    misses: int
    hit_rate: float
    busiest_share: float
    seconds: float
    tiers: dict[str, TierUse]
    policy_error: str = ""
    """Why lru replaced the policy, if it did: then the figures are not the policy's."""


def simulate(
    config: StackConfig,
    requests: Sequence[Request],
    fleet: Fleet | None = None,
    *,
    on_progress: Callable[[int], None] = lambda requests: None,
) -> Simulated:
    """Run `requests`, of which there is at least one, through simulated stacks of this configuration.

    `on_progress` gets the number of requests so far.
    """
    fleet = fleet or Fleet()
    clock = _Clock(requests[0].timestamp_ms / _MS_PER_S)
    shared = {tier.name: _key_store(config, tier, clock) for tier in config.secondary if tier_type_of(tier).is_shared}
    servers = [Server(config, shared, clock) for _ in range(fleet.servers)]
    running: dict[Server, None] = {}
    chosen = routes(fleet.router, requests, len(servers))
    for count, (request, number) in enumerate(zip(requests, chosen, strict=False), 1):
        clock.now_s = max(clock.now_s, request.timestamp_ms / _MS_PER_S)
        while any(server.replay.serves(request.session) for server in running):
            _step_once(running)
        servers[number].replay.admit(request)
        running[servers[number]] = None
        _step(running, fleet.concurrency)
        on_progress(count)
    _step(running, 1)
    return _simulated(config, requests, servers)


def span_s(requests: Sequence[Request]) -> float:
    """Return the time between the first request and the last, in seconds."""
    times_ms = [request.timestamp_ms for request in requests]
    return (max(times_ms) - min(times_ms)) / _MS_PER_S


def with_tier(config: StackConfig, name: str, **changes: object) -> StackConfig:
    """Return the stack with some settings of one tier changed. The new values are not validated."""
    tiers = {PRIMARY_NAME: config.primary, **{tier.name: tier for tier in config.secondary}}
    if name not in tiers:
        raise ConfigError(
            f"there is no tier '{name}'{suggestion(name, [*tiers])}; there are: {', '.join(tiers)}", location="--limit"
        )
    tiers[name] = tiers[name].model_copy(update=changes)
    return config.model_copy(update={"primary": tiers.pop(PRIMARY_NAME), "secondary": tuple(tiers.values())})


def routes(router: str, requests: Sequence[Request], servers: int) -> Iterator[int]:
    """Return an iterator over the servers' numbers, from 0, one for each request.

    Router "sticky" keeps a session on one server. "prefix" looks for the longest prefix of the prompt that any
    server had before. If it is half of the prompt, its last server is chosen, else the server with the fewest blocks.
    """
    if router == "random":
        chance = random.Random(0)
        return (chance.randrange(servers) for _ in requests)
    if router == "round-robin":
        return cycle(range(servers))
    if router == "sticky":
        return (
            int.from_bytes(block_key(session)[:8], "little") % servers
            for session in map(numbered, session_names(requests))
        )
    if router == "prefix":
        return _by_prefix(requests, servers)
    raise ConfigError(f"expected one of {', '.join(ROUTERS)}, found {router!r}", location="--router")


def _by_prefix(requests: Sequence[Request], servers: int) -> Iterator[int]:
    had_last: dict[int, int] = {}  # the server that got a block last, by block
    loads = [0] * servers
    for request in requests:
        ids = request.hash_ids
        known = next((at for at, each in enumerate(ids) if each not in had_last), len(ids))
        is_known = known and known >= _PREFIX_SHARE_MIN * len(ids)
        server = had_last[ids[known - 1]] if is_known else min(range(servers), key=loads.__getitem__)
        had_last.update(dict.fromkeys(ids, server))
        loads[server] += len(ids)
        yield server


class _Clock:
    """Simulated seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _NoMemory(PrimaryRegion):
    """A region of this size without memory, for a simulation."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes


class Server:
    """A simulated stack, and the replay that drives it. Blocks expire by `clock`, the time of the requests."""

    def __init__(self, config: StackConfig, shared: Mapping[str, KeyStore], clock: Callable[[], float]) -> None:
        blocks, waiting_clock = config.primary_blocks, _Clock()
        backend = CPUBackend(_NoMemory(blocks, config.block.bytes))
        self.primary = primary_rows(backend, config.primary.policy, config.limits)
        self.stores = [shared.get(tier.name) or _key_store(config, tier, clock) for tier in config.secondary]
        self.manager = TieringOffloadingManager(
            self.primary,
            [KeysOnlyTier(keys, tier.name) for keys, tier in zip(self.stores, config.secondary, strict=True)],
            settings=config.secondary,
            limits=limits_of(config),
            hints=config.hints,
            clock=waiting_clock,
            wear_clock=clock,
        )
        settings = ReplaySettings(store_blocks=min(ReplaySettings().store_blocks, blocks), store_timeout_s=0.0)
        self.replay = Replay(self.manager, None, settings, clock=waiting_clock, sleep=waiting_clock.sleep)


def _key_store(config: StackConfig, settings: TierSettings, clock: Callable[[], float]) -> KeyStore:
    load = tier_type_of(settings).key_store
    with located(config, settings):
        return (load() if load else KeyStore)(settings, config.block.bytes, clock)


def _step(running: dict[Server, None], concurrency: int) -> None:
    """Step the `running` servers until fewer than `concurrency` requests run."""
    while sum(server.replay.running for server in running) >= concurrency:
        _step_once(running)


def _step_once(running: dict[Server, None]) -> None:
    for server in list(running):
        server.replay.step()
        if not server.replay.running:
            del running[server]


def _simulated(config: StackConfig, requests: Sequence[Request], servers: Sequence[Server]) -> Simulated:
    tallies = [server.replay.tally for server in servers]
    snapshots = [server.manager.registry.snapshot() for server in servers]
    blocks, block_bytes = sum(tally.blocks for tally in tallies), config.block.bytes

    def total(tier: str, name: str) -> int:
        return sum(int(each.tiers[tier].total(name)) for each in snapshots)

    def use(name: str, counts: Mapping[str, int], capacity_bytes: int | None, storages: int) -> TierUse:
        hits = sum(tally.hits[name] for tally in tallies)
        return TierUse(
            hits=hits,
            hit_rate=round(hits / max(blocks, 1), 6),
            skipped_blocks=total(name, "skipped_blocks_total"),
            written_bytes=counts["written_blocks"] * block_bytes,
            read_bytes=counts["read_blocks"] * block_bytes,
            capacity_bytes=capacity_bytes,
            storages=storages,
            **counts,
        )

    of_primary = dict.fromkeys(_COUNTS, 0) | {
        "written_blocks": total(PRIMARY_NAME, "stored_blocks_total"),
        "read_blocks": total(PRIMARY_NAME, "loaded_blocks_total"),
        "evicted_blocks": sum(server.primary.evicted_blocks for server in servers),
        "used_bytes": sum(len(server.primary) for server in servers) * block_bytes,
    }
    primary_bytes = config.primary_blocks * block_bytes
    tiers = {PRIMARY_NAME: use(PRIMARY_NAME, of_primary, primary_bytes, len(servers))}
    for index, tier in enumerate(config.secondary):
        stores = {id(server.stores[index]): server.stores[index] for server in servers}.values()
        counts = {name: sum(getattr(keys, name) for keys in stores) for name in _COUNTS}
        tiers[tier.name] = use(tier.name, counts, servers[0].stores[index].capacity_bytes, len(stores))
    hits = sum(tier.hits for tier in tiers.values())
    return Simulated(
        policy=config.primary.policy,
        capacity_blocks=config.primary_blocks,
        requests=sum(tally.requests for tally in tallies),
        blocks=blocks,
        misses=blocks - hits,
        hit_rate=round(hits / max(blocks, 1), 6),
        busiest_share=round(max(tally.blocks for tally in tallies) / max(blocks, 1), 6),
        seconds=span_s(requests),
        tiers=tiers,
        policy_error=next(filter(None, (getattr(server.primary.policy, "failure", "") for server in servers)), ""),
    )


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

    Storage is charged for the capacity of all storages; without a capacity, for the bytes stored at the end.
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
