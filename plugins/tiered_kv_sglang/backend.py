"""The storage backend of SGLang's HiCache, which copies pages between its host pools and our tiers.

SGLang has a thread for lookups, one for loads and one for stores. Our methods wait until no tier uses the pages
any more, since SGLang reuses them then. The scheduler's thread registers pools, clears and closes.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from fractions import Fraction
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from tiered_kv.direct import DirectTiers
from tiered_kv.direct.tiers import part_of
from tiered_kv.engines.keywords import known_to_base
from tiered_kv.errors import ConfigError, ShutdownError
from tiered_kv_sglang.engine import (
    check_sharing,
    engine_facts,
    namespace_of,
    process_variables,
    read_settings,
)
from tiered_kv_sglang.pools import PagePool, Parts

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

_kept: list[PagePool] = []
"""Pools with memory that a hanging transfer may still use. They stay mapped until the process ends."""


class TieredKVHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Configured as `--hicache-storage-backend dynamic`; docs/how-to/sglang.md has the extra config.

    Args:
        storage_config: SGLang's; its `extra_config` has our settings.
        kwargs: Not used.
        unknown: Keywords of a newer SGLang.

    Raises:
        ConfigError: A setting cannot be used, or does not fit the engine.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None, **unknown: object) -> None:
        super().__init__(**known_to_base(TieredKVHiCache, unknown))
        values, processes = process_variables()
        self._config = storage_config
        self._settings = read_settings(storage_config.extra_config or {}, {**os.environ, **values}, processes)
        check_sharing(storage_config, self._settings)
        self._facts = engine_facts(self._settings.namespace)
        self._pools: dict[str, PagePool] = {}
        self._tiers: dict[str, list[tuple[Parts, DirectTiers]]] = {}
        """The parts of each size with their tiers, by the pool's name."""
        self._is_used = False  # whether a thread of SGLang has called the tiers
        self._clear_lock = threading.Lock()
        """Guards `_callers` and `_outdated`. A call reaches the tiers of all parts before a clear or after it."""
        self._callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._outdated: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Threads that may hold pages from before a clear. They store and load nothing."""
        self._load_s_max = sum(tier.job_timeout for tier in self._settings.tiers)
        """The most seconds that a load through all tiers takes."""
        self._load_until_s = math.inf
        """Time of `time.monotonic()` by which the running load should have ended. SGLang has one thread for loads."""
        self._metrics = StorageMetrics()
        self._metrics_lock = threading.Lock()

    # Pools. SGLang registers all of them before it stores or loads a page.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # Any: a host pool
        super().register_mem_pool_host(mem_pool_host)
        self._add(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        is_late = bool(self._tiers) and str(host_pool_name) not in self._pools
        self._add(host_pool_name, host_pool)
        if is_late:  # a draft model's pool
            if self._is_used:
                raise ConfigError(
                    f"SGLang's host pool '{host_pool_name}' comes too late: pages have been stored before"
                )
            self._close_tiers()
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """Open the tiers of all pools."""
        all_bytes = sum(parts.pool_bytes for pool in self._pools.values() for parts in pool.parts)
        with ExitStack() as undo:
            undo.callback(self._close_tiers)
            for name, pool in self._pools.items():
                namespace = namespace_of(pool, self._config, self._settings, self._facts)
                self._tiers[name] = []
                for parts in pool.parts:
                    share = Fraction(parts.pool_bytes, all_bytes)
                    tiers = DirectTiers(
                        (parts.address, parts.memory_bytes),
                        block_bytes=parts.part_bytes,
                        tiers=[part_of(tier, parts.name, share) for tier in self._settings.tiers],
                        namespace=namespace,
                        block_tokens=int(pool.pool.page_size),
                    )
                    self._tiers[name].append((parts, tiers))
            undo.pop_all()

    def _add(self, name: object, host_pool: Any) -> None:
        known = self._pools.get(str(name))
        if known is None or known.pool is not host_pool:
            self._pools[str(name)] = PagePool(str(name), host_pool)

    # Plain models.

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        if time.monotonic() > self._load_until_s:
            return 0  # a load hangs, and the load of a request that finds pages would wait behind it
        return _prefix(self._run("contains", PoolName.KV, keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        return self._move("load", PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        return self._move("store", PoolName.KV, keys, host_indices)

    # Models with several pools.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: object = None
    ) -> PoolTransferResult:
        pages = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the same pages, which is not stored here
            found = self._run("contains", transfer.name, keys[:pages])
            if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                ends = {end for end in range(1, pages + 1) if all(found[max(0, end - window) : end])}
            else:
                ends = set(range(1, _prefix(found) + 1))
            if ends:
                hits[transfer.name] = max(ends)
            restorable = [end for end in restorable if end in ends]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: object = None) -> dict[str, list[bool]]:
        return self._move_all("load", transfers)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: object = None) -> dict[str, list[bool]]:
        return self._move_all("store", transfers)

    def _move_all(self, method: Literal["load", "store"], transfers: Iterable[PoolTransfer]) -> dict[str, list[bool]]:
        return {
            transfer.name: self._move(method, transfer.name, transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def _unused(self, *_: object, **__: object) -> bool:
        """Replace the abstract methods that SGLang calls only without `interface_v1`, which our settings require."""
        return False

    exists = get = batch_get = set = batch_set = _unused

    # Administration.

    def clear(self) -> None:
        """Forget every page in every tier, for all engines that share the tier.

        SGLang's threads go on with the pages that it has in memory. They store and load nothing until a flush of its
        cache, which drops these pages and starts other threads.
        """
        own = threading.current_thread()
        with self._clear_lock:
            if any(thread.is_alive() for thread in self._callers if thread is not own):
                self._outdated = weakref.WeakSet(thread for thread in threading.enumerate() if thread is not own)
                _log.warning("cleared; flush SGLang's cache (/flush_cache), or nothing is stored or loaded any more")
            for opened in self._tiers.values():
                for _, tiers in opened:
                    with suppress(ShutdownError):
                        tiers.reset()

    def get_stats(self) -> StorageMetrics:
        """Return the pages of each load and store since the last call, and their rates in GB/s, if metrics are on."""
        with self._metrics_lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def counters(self) -> dict[str, dict[str, dict[str, Any]]]:  # Any: as `Counters.snapshot`
        """Return the counters of each tier by the name of its parts: "kv", or "mamba-0" and so on."""
        return {parts.name: tiers.counters() for pool in self._tiers.values() for parts, tiers in pool}

    def close(self) -> None:
        """Wait a limited time for transfers, and close the tiers. SGLang has ended its threads before."""
        _log.info("the tiers of HiCache close; their counters: %s", self.counters())
        self._close_tiers()

    def _close_tiers(self) -> None:
        for name, opened in self._tiers.items():
            are_unused = [tiers.close(CLOSE_TIMEOUT_S) for _, tiers in opened]
            if not all(are_unused):
                _kept.append(self._pools[name])
        self._tiers = {}

    # SGLang's threads.

    def _move(
        self, method: Literal["load", "store"], name: str, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        """Load or store pages; return for each page whether all of its parts were moved."""
        pool = self._pools.get(str(name))
        if pool is None or host_indices is None or host_indices.numel() != len(keys) * pool.page_slots:
            _log.error("cannot %s %d pages of the pool '%s': SGLang gave no place for each", method, len(keys), name)
            return [False] * len(keys)
        began_s = time.perf_counter()
        moved = self._run(method, name, keys, host_indices)
        if not self._config.enable_storage_metrics:
            return moved
        gigabytes = sum(moved) * sum(pool.sizes) / 1e9
        with self._metrics_lock:
            metrics = self._metrics
            pages, rates = (
                (metrics.prefetch_pgs, metrics.prefetch_bandwidth)
                if method == "load"
                else (metrics.backup_pgs, metrics.backup_bandwidth)
            )
            pages.append(sum(moved))
            rates.append(gigabytes / max(time.perf_counter() - began_s, 1e-9))
        return moved

    def _run(self, method: str, name: str, keys: Sequence[str], host_indices: torch.Tensor | None = None) -> list[bool]:
        """Call a method of the tiers of each part size, wait for all, and return for each page if all succeeded."""
        self._is_used = True
        opened = self._tiers.get(str(name))
        if opened is None:
            return [False] * len(keys)
        pool, whole = self._pools[str(name)], [True] * len(keys)
        waiting: list[tuple[int, Future[list[bool]]]] = []
        if method == "load":
            self._load_until_s = time.monotonic() + self._load_s_max
        try:
            with self._clear_lock:
                self._callers.add(threading.current_thread())
                if threading.current_thread() in self._outdated:
                    return [False] * len(keys)
                for parts, tiers in opened:
                    arguments: list[Any] = [pool.keys(parts, keys)]
                    if host_indices is not None:
                        arguments.append(pool.offsets(parts, host_indices))
                    answers: Future[list[bool]] = Future()
                    getattr(tiers, method)(*arguments, answers.set_result)
                    waiting.append((len(parts.numbers), answers))
        except Exception as error:  # SGLang's thread goes on, whatever is raised
            _log.error("cannot %s pages of the pool '%s': %s: %s", method, name, type(error).__name__, error)
            whole = [False] * len(keys)
        finally:  # no tier may use the pages any more, also after an error
            for count, answers in waiting:
                for place, answer in enumerate(answers.result()):
                    whole[place // count] &= answer
            if method == "load":
                self._load_until_s = math.inf
        return whole


def _prefix(answers: Sequence[bool]) -> int:
    return answers.index(False) if False in answers else len(answers)
