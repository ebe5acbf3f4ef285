"""vLLM's offloading specs: one opens our whole stack, the other adds our worker to vLLM's own tiering.

vLLM makes a spec in the scheduler's process and in each worker's, and calls it on the engine's thread. What must stay
true: all processes of an engine derive the same stack and namespace. `HandlerWorker` gives both specs our transfer
handlers, for KV caches on CUDA devices and in CPU memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiered_kv.config.namespace import Namespace
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.config.validation import suggestion
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.engines.keywords import known_to_base
from tiered_kv.engines.model.layers import row_aligned
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.stack.open import EngineStack
from tiered_kv.tiering.audit.comparison import AuditedGroup
from tiered_kv.worker.handlers import WorkerHandlers, open_handlers
from tiered_kv.worker.shared import SCHEDULER, SharedStack, parties_of, worker_party
from tiered_kv.worker.shared_file import SharedFile
from tiered_kv_vllm.attached import HostCache
from tiered_kv_vllm.engine import (
    ROW_LAYOUT,
    Stage,
    canonical_shards,
    check_stages,
    chunk_tokens,
    environment,
    has_one_part,
    namespace_of,
    run_name,
    stage_of,
)
from tiered_kv_vllm.groups import audit_only, audited_group, check_audited, check_groups, our_caches
from tiered_kv_vllm.manager import INFO_KEYS, TieredKVManager
from tiered_kv_vllm.metrics import metric_definitions, tier_types_of

_VLLM_REPORTS_FLUSHES = hasattr(OffloadingManager, "on_reset_flushed")
"""Whether vLLM calls `on_reset_flushed`: from 0.33 on."""
_STEPS_AHEAD = 4
"""Steps that a scheduler may be ahead of its workers, beyond one for each pipeline stage."""
_EXTRA = "kv_connector_extra_config"

_OPTIONS = (
    *("spec_name", "spec_module_path", "stack", "attach", "namespace"),
    *("blocks_per_chunk", "block_size", "canonical_layout", "offload_prompt_only", "self_describing_kv_events"),
    *(("sync_load_budget_bytes",) if _VLLM_REPORTS_FLUSHES else ()),
)
"""The options of our spec, and the options that vLLM's connector reads for any spec."""

_VLLM_OPTIONS: Mapping[str, str] = {
    "cpu_bytes_to_use": "write 'primary: {capacity: ...}' in the stack, without --kv-offloading-size, which sets this",
    "eviction_policy": "write it as 'primary: {policy: ...}' in the stack",
    "cache_policy_module_path": "write 'primary: {policy: \"module:Class\"}' in the stack",
    "secondary_tiers": "write our tiers as 'secondary' in the stack",
    "store_threshold": "write 'admit_after' at a tier of 'secondary' in the stack; the primary tier takes every block",
    "max_tracker_size": "leave it out; 'admit_after' needs no size",
    "backpressure": "write 'store_budget' at a tier of 'secondary' in the stack",
    "tier_poll_interval_s": "leave it out; our tiers need no polling thread",
}
"""Options that only vLLM's own specs read, each with the remedy under our spec."""


class TieredKVOffloadingSpec(OffloadingSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The spec that `TieredKVConnector` takes for `"stack"` or `"attach"`, and that `"spec_name"` can name.

    All processes of an engine map one region, named by the engine's id.

    Args:
        config: vLLM's `OffloadingConfig`. Its `extra_config["stack"]` is a stack without `block`: a file's path, or a
            mapping. Or its `extra_config["attach"]` is the address of a host's cache, and `namespace` the user's part
            of the namespace.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, config: Any, **unknown: object) -> None:
        super().__init__(config, **known_to_base(TieredKVOffloadingSpec, unknown))
        check_groups(config)
        # If it is set, vLLM's connector lets only rank 0 store, and the other ranks report a store's end at once.
        self.replicated_layout = config.replicated_layout
        # A worker gets its KV caches after `configured` has ended. This copy still has the engine's configuration.
        self._context = copy_context()
        self._file_name = f"tiered-kv-{config.engine_id}"
        # With several pipeline stages, these ranks only serve an early check: `_join` reads the ranks of all workers.
        ranks = [rank_of(config)] * config.parallel.world_size
        self._host = host_cache(config, ranks) if "attach" in config.extra_config else None
        if self._host is None:
            self._shared = self._share(ranks)
        self._manager: TieredKVManager | None = None
        self._worker: HandlerWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions(tier_types_of(extra_config.get("stack")))

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return INFO_KEYS

    def get_manager(self) -> TieredKVManager:
        """Return the scheduler's half, made on the first call; with several stages this waits for all workers."""
        if self._manager is None:
            has_events = self.kv_events_config.enable_kv_cache_events
            file = self._join(SCHEDULER)
            stack: EngineStack | HostCache | None = self._host
            if stack is None:
                stack = self._shared.open_engine_stack(enable_events=has_events, file=file)
                if (group := self._audited_group()) is not None:
                    audit_only(stack.manager, group, self.config)
            elif file is not None:
                with file.exclusive():
                    file.complete()
                file.leave()
            self._manager = TieredKVManager(
                stack,
                has_events=has_events,
                flush_steps=None if _VLLM_REPORTS_FLUSHES else self.config.parallel.pp_size + _STEPS_AHEAD,
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> HandlerWorker:
        """Return the worker's half, made on the first call, for caches on a CUDA device or in CPU memory.

        With several pipeline stages it waits until the other workers have called it, too.
        """
        if self._worker is None:
            rank, caches = self.config.parallel.rank, our_caches(kv_caches, is_canonical=self.config.canonical_layout)
            file = self._join(worker_party(rank))
            if self._host is not None:
                self._worker = HandlerWorker(self._host.open_handlers(caches, rank), file)
            else:
                if (group := self._audited_group()) is not None:
                    check_audited(self.config, group, caches)
                self._worker = HandlerWorker(self._shared.open_handlers(caches, rank, file=file))
        return self._worker

    def _audited_group(self) -> AuditedGroup | None:
        """Return the group that is audited, if there is an audit and several groups."""
        is_audited = self._shared.config.audit > 0
        return self._context.run(audited_group, self.config, self._shared.geometry.parts) if is_audited else None

    def _share(self, ranks: Sequence[Rank]) -> SharedStack:
        return SharedStack(
            stack_config(self.config, ranks),
            name=self._file_name,
            bytes_per_worker=_part_bytes(self.config, ranks),
            num_workers=len(ranks),
            num_parts=_parts_of(self.config, ranks),
            block_size_factor=self.config.cache.blocks_per_chunk,
        )

    def _join(self, party: str) -> SharedFile | None:
        """With several pipeline stages, wait for all workers and read their ranks from the shared file.

        Return the shared file, or None with one stage. The caller must leave it: a worker not before the scheduler has
        joined too.
        """
        if self.config.parallel.pp_size == 1:
            return None
        size, own = self.config.parallel.world_size, rank_of(self.config)
        fields = [own.chunk_bytes, own.stage.layers, own.stage.groups]
        note = b"" if party == SCHEDULER else json.dumps(fields).encode()
        file = SharedFile(self._file_name, party, parties_of(size), note)
        try:
            ranks = [_decode(note) for note in file.notes_of([worker_party(rank) for rank in range(size)])]
            if self._host is None:
                self._shared = self._context.run(self._share, ranks)
            else:
                self._host = self._context.run(host_cache, self.config, ranks)
        except BaseException:
            file.leave()
            raise
        return file


def stack_config(config: Any, ranks: Sequence[Rank] = ()) -> StackConfig:  # Any: vLLM's OffloadingConfig
    """Return the stack of a vLLM engine, the same in its scheduler and its workers.

    `ranks` are all workers in their order; by default all are like `config`'s worker.
    """
    _check_options(config.extra_config)
    source = config.extra_config.get("stack")
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise ConfigError(
            f"expected the path of a stack's file, or a stack, found {source!r}", location=f"{_EXTRA}.stack"
        )
    ranks = ranks or [rank_of(config)] * config.parallel.world_size
    return from_source(source, lambda raw: _completed(raw, config, ranks))


def host_cache(config: Any, ranks: Sequence[Rank]) -> HostCache:  # Any: vLLM's OffloadingConfig
    """Return the host's cache of a vLLM engine, the same in its scheduler and its workers."""
    extra = config.extra_config
    _check_options(extra)
    namespace, block = _identity(extra.get("namespace"), config, ranks)
    return HostCache(
        address=str(extra["attach"]),
        name=run_name(config),
        namespace=namespace,
        block_bytes=block["bytes"],
        block_tokens=block["tokens"],
        num_workers=len(ranks),
        num_parts=_parts_of(config, ranks),
        block_size_factor=config.cache.blocks_per_chunk,
    )


def _check_options(extra: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that would have no effect."""
    if "stack" in extra and "attach" in extra:
        raise ConfigError("give either a stack, or a host's cache to attach to", location=f"{_EXTRA}.attach")
    if "namespace" in extra and "attach" not in extra:
        raise ConfigError("write the namespace in the stack", location=f"{_EXTRA}.namespace")
    for name in extra:
        if name in _VLLM_OPTIONS:
            message = f"this is an option of vLLM's own specs, without effect under ours; {_VLLM_OPTIONS[name]}"
            raise ConfigError(message, location=f"{_EXTRA}.{name}")
        if name not in _OPTIONS:
            known = f"known options: {', '.join(_OPTIONS)}"
            raise ConfigError(f"unknown option{suggestion(name, _OPTIONS)}; {known}", location=f"{_EXTRA}.{name}")


def _completed(raw: Mapping[str, object], config: Any, ranks: Sequence[Rank]) -> StackConfig:
    if "block" in raw:
        raise ConfigError("vLLM sets the size of a block; leave this out", location="block")
    if raw.get("events") is not None:
        message = "vLLM publishes the events of all tiers with its own (--kv-events-config); leave this out"
        raise ConfigError(message, location="events")
    if raw.get("audit"):
        audited_group(config, _parts_of(config, ranks))  # refuses a model that cannot be audited
    namespace, block = _identity(raw.get("namespace"), config, ranks)
    return load_config({**raw, "namespace": namespace, "block": block}, environ=environment(config))


def _identity(said: object, config: Any, ranks: Sequence[Rank]) -> tuple[Namespace, dict[str, int]]:
    """Return the namespace of an engine's blocks, and their size."""
    said = fill_variables({"namespace": said}, environment(config))["namespace"]
    row_bytes = _part_bytes(config, ranks) * _parts_of(config, ranks)
    block = {"bytes": row_aligned(row_bytes), "tokens": chunk_tokens(config)}
    stages = list(dict.fromkeys(rank.stage for rank in ranks))  # vLLM numbers the workers of a stage one by one
    return namespace_of(config, said, row_layout=ROW_LAYOUT, stages=stages), block


def _parts_of(config: Any, ranks: Sequence[Rank]) -> int:
    return 1 if has_one_part(config) else len(ranks)


def _part_bytes(config: Any, ranks: Sequence[Rank]) -> int:
    shards = canonical_shards(config) if config.canonical_layout else 1
    return shards * max(rank.chunk_bytes for rank in ranks)


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker: the bytes that it stores of a chunk, and its pipeline stage.

    vLLM tells a worker only its own layers, and the scheduler only the layers of worker 0. So with more than one stage
    each worker writes its rank into the engine's shared file, and every process reads all ranks.
    """

    chunk_bytes: int
    stage: Stage


def rank_of(config: Any) -> Rank:  # Any: vLLM's OffloadingConfig
    """Return the rank that this process knows: its own in a worker, the rank of worker 0 in the scheduler."""
    size = int(config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk)
    if size < 1:
        raise ConfigError("vLLM reports no size of a KV cache block, so there is nothing to offload")
    return Rank(size, stage_of(config))


def _decode(note: bytes) -> Rank:
    chunk_bytes, layers, groups = json.loads(note)
    return Rank(chunk_bytes, Stage(layers, tuple(groups)))


class TieredKVTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's `TieringOffloadingSpec` with our worker, which takes GPU and CPU memory. vLLM's own takes GPU memory only.

    It is configured like vLLM's, with `"spec_name": "TieredKVTieringSpec", "spec_module_path":
    "tiered_kv_vllm"`.
    """

    _worker: HandlerWorker | None

    row_layout = ROW_LAYOUT
    """The layout of rows as our worker writes them, for our tiers: vLLM's own worker has another layout."""

    def __init__(self, config: Any, **unknown: object) -> None:  # Any: vLLM's OffloadingConfig
        check_stages(config)
        check_groups(config)
        super().__init__(config, **known_to_base(TieredKVTieringSpec, unknown))

    def get_worker(self, kv_caches: Any) -> HandlerWorker:
        if self._worker is not None:
            return self._worker
        if self.config.canonical_layout:
            raise ConfigError(
                "below vLLM's tiering canonical_layout is for vLLM's own worker; use its TieringOffloadingSpec, or our "
                "TieredKVOffloadingSpec"
            )
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        # vLLM's class creates and removes the file that its scheduler maps; `PrimaryRegion` maps it, too.
        shared = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        with ExitStack() as on_error:
            mapped = on_error.enter_context(ExitStack())
            mapped.callback(shared.cleanup)
            region = PrimaryRegion.map_file(shared.fd, shared.mmap_path, self.num_chunks, self.kv_bytes_per_chunk)
            mapped.callback(region.close)
            handlers = open_handlers(
                our_caches(kv_caches),
                region,
                block_size_factor=self.blocks_per_chunk,
                part_offset=rank * self.cpu_page_size_per_worker,
                part_bytes=self.cpu_page_size_per_worker,
                on_shutdown=mapped.close,
            )
            on_error.pop_all()
        self._worker = HandlerWorker(handlers)
        return self._worker


class HandlerWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Stores and loads for vLLM. All methods belong to the worker's thread.

    vLLM knows no failed transfers: it asserts success, and `python -O` leaves that assertion out. So a failed copy
    raises an error, which ends the engine. Otherwise the engine would compute with bytes that did not arrive, or a tier
    would store a block without its bytes. `shutdown` leaves `file`.
    """

    def __init__(self, handlers: WorkerHandlers, file: SharedFile | None = None) -> None:
        self._handlers = handlers
        self._file = file

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._handlers.store.transfer_async(job_id, (src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        # From 0.33 on, vLLM waits for an expedited load in its step. All our loads begin at once, in their order.
        return self._handlers.load.transfer_async(job_id, (src_spec, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        results = [*self._handlers.store.get_finished(), *self._handlers.load.get_finished()]
        if not results:
            return []
        failed = [each for each in results if not each.success]
        if failed:
            source, destination = failed[0].transfer_type or ("?", "?")
            raise TieredKVError(
                f"{len(failed)} of {len(results)} copies between the KV cache and the primary tier failed, the first "
                f"of them job {failed[0].job_id} from {source} to {destination}; the engine must end"
            )
        return [TransferResult(each.job_id, each.success, each.transfer_size, each.transfer_time) for each in results]

    def wait(self, job_ids: set[int]) -> None:
        self._handlers.store.wait(job_ids)
        self._handlers.load.wait(job_ids)

    def shutdown(self) -> None:
        try:
            self._handlers.shutdown()
        finally:
            if self._file is not None:
                self._file.leave()
