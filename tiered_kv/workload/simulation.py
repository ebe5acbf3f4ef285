"""Simulates a stack without moving a byte: what each tier would hit, write and evict.

The manager, the policy and the replay are those of a real stack. A tier that keeps only keys replaces each secondary
tier, and ends each job after a fixed number of steps. So storage is always fast enough.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext
from tiered_kv.config.settings import PRIMARY_NAME, TierSettings
from tiered_kv.config.validation import suggestion
from tiered_kv.cpu.backend import CPUBackend, CPUBlock
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.hooks import tier_type_of
from tiered_kv.metrics.instruments import count_of
from tiered_kv.server.host import GRANT_ROWS_MIN, GRANT_SHARE
from tiered_kv.stack import limits_of, located
from tiered_kv.stack_config import StackConfig
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.toolkit.keys_only import KeysOnlyTier, KeyStore
from tiered_kv.workload.replay import Replay, ReplaySettings
from tiered_kv.workload.request import Request, require_at_least
from tiered_kv.workload.sampling import hash_share, sessions

SERVERS_MAX = 1000
ROUTERS = ("random", "round-robin", "sticky", "prefix")
_PREFIX_SHARE_MIN = 0.5
"""A server gets a request for its prefix if it had at least this share of the prompt before."""
_MS_PER_S = 1000
_COUNTS = ("written_blocks", "moved_blocks", "read_blocks", "evicted_blocks", "lookup_requests", "used_bytes")
"""The counters of a `KeyStore`."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Servers with a stack each, which share the storage of shared tiers. `concurrency` is that of all together.

    `seed` is that of the router "random". With `shares_host` the servers are the engines of a host with one primary
    tier for all, and no secondary tiers. Each has free rows that were granted in advance: one row of the tier in
    `grant_share`, and `GRANT_ROWS_MIN` at least.
    """

    servers: int = 1
    router: str = "round-robin"
    concurrency: int = 8
    seed: int = 0
    shares_host: bool = False
    grant_share: int = GRANT_SHARE

    def __post_init__(self) -> None:
        require_at_least(1, self, "servers", "concurrency", "grant_share")
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
    return _simulated(config, requests, run_servers(config, requests, fleet or Fleet(), on_progress))


def run_servers(
    config: StackConfig, requests: Sequence[Request], fleet: Fleet, on_progress: Callable[[int], None]
) -> list[Server]:
    """Return the servers after all `requests` have run; see `simulate`."""
    clock = _Clock(requests[0].timestamp_ms / _MS_PER_S)
    shared = {tier.name: _key_store(config, tier, clock) for tier in config.secondary if tier_type_of(tier).is_shared}
    if fleet.shares_host:
        assert not config.secondary
        host = _host_cache(config, fleet, clock)
        servers = [Server(config, shared, clock, _HostEngine(host, number)) for number in range(fleet.servers)]
    else:
        servers = [Server(config, shared, clock) for _ in range(fleet.servers)]
    running: dict[Server, None] = {}
    chosen = routes(fleet.router, requests, len(servers), fleet.seed)
    for count, (request, number) in enumerate(zip(requests, chosen, strict=False), 1):
        clock.now_s = max(clock.now_s, request.timestamp_ms / _MS_PER_S)
        while any(server.replay.serves(request.session) for server in running):
            _step_once(running)
        servers[number].replay.admit(request)
        running[servers[number]] = None
        _step(running, fleet.concurrency)
        on_progress(count)
    _step(running, 1)
    return servers


def span_s(requests: Sequence[Request]) -> float:
    """Return the time between the first request and the last, in seconds."""
    times_ms = [request.timestamp_ms for request in requests]
    return (max(times_ms) - min(times_ms)) / _MS_PER_S


def with_tier(config: StackConfig, name: str, **changes: object) -> StackConfig:
    """Return a stack with other settings of one tier, which are not validated."""
    tiers = {PRIMARY_NAME: config.primary, **{tier.name: tier for tier in config.secondary}}
    if name not in tiers:
        raise ConfigError(
            f"there is no tier '{name}'{suggestion(name, [*tiers])}; there are: {', '.join(tiers)}", location="--limit"
        )
    tiers[name] = tiers[name].model_copy(update=changes)
    return config.model_copy(update={"primary": tiers.pop(PRIMARY_NAME), "secondary": tuple(tiers.values())})


def routes(router: str, requests: Sequence[Request], servers: int, seed: int = 0) -> Iterator[int]:
    """Return an iterator over the number of the server of each request, from 0.

    Router "sticky" keeps a session on one server. "prefix" chooses the server that had the longest part of the prompt
    before, if that is half of it, and else the server with the fewest blocks.
    """
    if router == "random":
        chance = random.Random(seed)
        return (chance.randrange(servers) for _ in requests)
    if router == "round-robin":
        return cycle(range(servers))
    if router == "sticky":
        return (int(hash_share(session) * servers) for session in sessions(requests)[0])
    if router == "prefix":
        return _by_prefix(requests, servers)
    raise ConfigError(f"expected one of {', '.join(ROUTERS)}, found {router!r}", location="--router")


def _by_prefix(requests: Sequence[Request], servers: int) -> Iterator[int]:
    had_last: dict[int, int] = {}  # by block, the server that got it last
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
    """A simulated stack, and the replay that drives it. By `clock`, the time of the requests, blocks expire."""

    def __init__(
        self, config: StackConfig, shared: Mapping[str, KeyStore], clock: _Clock, engine: _HostEngine | None = None
    ) -> None:
        blocks, waiting_clock = config.primary_blocks, _Clock()
        self.primary = _primary(config, blocks, clock) if engine is None else engine.primary
        self.stores = [shared.get(tier.name) or _key_store(config, tier, clock) for tier in config.secondary]
        self.manager = engine or TieringOffloadingManager(
            self.primary,
            [KeysOnlyTier(keys, tier.name) for keys, tier in zip(self.stores, config.secondary, strict=True)],
            settings=config.secondary,
            limits=limits_of(config),
            clock=waiting_clock,
            wear_clock=clock,
        )
        settings = ReplaySettings(store_blocks=min(ReplaySettings().store_blocks, blocks))
        name = "replay" if engine is None else engine.name
        self.replay = Replay(self.manager, None, settings, name, clock=waiting_clock, sleep=waiting_clock.sleep)


class _HostEngine(TieringOffloadingManager):
    """One engine of a host whose engines share the cache `host`.

    It does not see a block before the engine that writes it has committed it, so two engines may compute the same. Both
    then hold a row for it, and the second is handed back. Rows of a load are leased: pinned until it ends.
    """

    def __init__(self, host: CPUOffloadingManager, number: int) -> None:
        super().__init__(host)
        self.name = f"engine-{number}"
        self._twins: dict[str, list[CPUBlock]] = {}  # by request, rows of blocks that others write too

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        answers = super().lookup_many(keys, req_context)
        return [
            False if answer is None and self._is_others(key) else answer
            for key, answer in zip(keys, answers, strict=True)
        ]

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        others = [key for key in keys if self._is_others(key)]
        output = super().prepare_store(keys, req_context)
        if output is None or not others:
            return output
        names = [OffloadKey(self.name.encode() + key) for key in others]
        twins = self.primary.allocate(names, req_context.req_id, self.primary.chain_of(req_context), [])
        if twins is None:
            return output
        self._twins[req_context.req_id] = twins
        return PrepareStoreOutput([*output.keys_to_store, *others], output.store_spec, output.evicted_keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        super().complete_store(keys, req_context, success)
        self.primary.abandon(self._twins.pop(req_context.req_id, ()))

    def _is_others(self, key: OffloadKey) -> bool:
        block = self.primary.blocks.get(key)
        return block is not None and block.ref_cnt < 0 and not block.writer.startswith(f"{self.name}-")


def _host_cache(config: StackConfig, fleet: Fleet, clock: _Clock) -> CPUOffloadingManager:
    """Return the cache of a host. Rows that are granted hold no block: each that is used is replaced at once."""
    granted = fleet.servers * max(config.primary_blocks // fleet.grant_share, GRANT_ROWS_MIN)
    if granted >= config.primary_blocks:
        raise ConfigError(f"{granted} granted rows leave no room in {config.primary_blocks}", location="--capacity")
    return _primary(config, config.primary_blocks - granted, clock)


def _primary(config: StackConfig, blocks: int, clock: _Clock) -> CPUOffloadingManager:
    backend = CPUBackend(_NoMemory(blocks, config.block.bytes))
    return CPUOffloadingManager(backend, config.primary.policy, hints=config.hints, clock=clock)


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
    counters = [server.manager.counters() for server in servers]
    blocks, block_bytes = sum(tally.blocks for tally in tallies), config.block.bytes

    def use(name: str, counts: Mapping[str, int], capacity_bytes: int | None, storages: int) -> TierUse:
        hits = sum(tally.hits[name] for tally in tallies)
        return TierUse(
            hits=hits,
            hit_rate=round(hits / max(blocks, 1), 6),
            skipped_blocks=sum(count_of(each, name, "skipped_blocks_total") for each in counters),
            written_bytes=counts["written_blocks"] * block_bytes,
            read_bytes=counts["read_blocks"] * block_bytes,
            capacity_bytes=capacity_bytes,
            storages=storages,
            **counts,
        )

    of_primary = dict.fromkeys(_COUNTS, 0) | {
        "written_blocks": sum(count_of(each, PRIMARY_NAME, "stored_blocks_total") for each in counters),
        "read_blocks": sum(count_of(each, PRIMARY_NAME, "loaded_blocks_total") for each in counters),
        "evicted_blocks": sum(server.primary.evicted_blocks for server in servers),
        "used_bytes": sum(len(server.primary.blocks) for server in servers) * block_bytes,
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
    )
