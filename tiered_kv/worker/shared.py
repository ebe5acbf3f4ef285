"""A shared stack: one stack, and one region of memory, for an engine of several processes, a scheduler and its workers.

The scheduler's process opens the stack; each worker maps the region, and copies between it and its device. Each process
calls its side on its own thread. The processes find each other by one file (`shared_file`), and refuse a region that
another engine divides differently. A killed process leaves no memory behind.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from tiered_kv.base import CanonicalKVCaches, LoadStoreSpec, OffloadingHandler, OffloadingManager, OffloadingSpec
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.config.units import format_bytes
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import (
    ROWS_OFFSET,
    Geometry,
    PrimaryRegion,
    check_header,
    check_shared_room,
    has_header,
    size_shared,
    write_header,
)
from tiered_kv.errors import ConfigError, ResourceError, TieredKVError, needing_resources
from tiered_kv.stack.open import EngineStack, needs_of
from tiered_kv.system.collapse import Collapse, CollapseThread, describe
from tiered_kv.system.limits import Limits, refuse
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.worker.handlers import WorkerHandlers, open_handlers
from tiered_kv.worker.shared_file import SharedFile

_log = logging.getLogger(__name__)

SCHEDULER = "scheduler"
COLLAPSE_S_MAX = 60.0
"""How long a worker with a GPU may collapse the rows before it pins them. Other processes wait for it."""


def worker_party(rank: int) -> str:
    """Return the name of a rank's worker among the processes that share a region."""
    return f"worker {rank}"


def parties_of(num_workers: int) -> list[str]:
    """Return the names of all processes that share a region."""
    return [SCHEDULER, *map(worker_party, range(num_workers))]


class SharedStack:
    """The stack that every process of an engine constructs with the same arguments, to open its own side.

    No process waits for the others. Until all have opened, the manager stores and promotes nothing, and a transfer is
    refused: its bytes would go to a region that the others do not map.

    Args:
        source: The stack: the path of a YAML file, a mapping, or a configuration. Its secondary tiers are opened by
            the scheduler alone.
        name: A file name that belongs to this run of the engine; by default the stack's `primary.shared`.
        bytes_per_worker: Bytes of an offloaded block that this worker stores, for all layers. In the scheduler: the
            largest number of all workers. Each part of a block has room for this number.
        num_workers: Workers that hold parts of each block, as with tensor parallelism.
        num_parts: Parts of a block: one for each worker by default, or 1, which all workers share. Then the engine
            lets one worker store each byte of the part, and all workers load it.
        block_size_factor: GPU blocks in an offloaded block.

    Raises:
        ConfigError: The stack cannot be used, or its blocks do not hold the parts of all workers.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, object] | StackConfig,
        *,
        name: str | None = None,
        bytes_per_worker: int,
        num_workers: int = 1,
        num_parts: int | None = None,
        block_size_factor: int = 1,
    ) -> None:
        self.config = load_config(source)
        self.bytes_per_worker = bytes_per_worker
        given = name or self.config.primary.shared
        if given is None:
            raise ConfigError("a stack of several processes needs a name for its memory", location="primary.shared")
        self.name = given
        if bytes_per_worker < 1 or num_workers < 1:
            raise ConfigError(f"expected at least one worker and one byte, found {num_workers} x {bytes_per_worker}")
        self.num_workers = num_workers
        num_parts = num_workers if num_parts is None else num_parts
        if num_parts not in (1, num_workers):
            raise ConfigError(f"expected 1 or {num_workers} parts of a block, found {num_parts}")
        if bytes_per_worker * num_parts > self.config.block.bytes:
            raise ConfigError(
                f"an offloaded block has {num_parts} parts of {format_bytes(bytes_per_worker)}: expected at least "
                f"{format_bytes(bytes_per_worker * num_parts)}, found {format_bytes(self.config.block.bytes)}",
                location="block.bytes",
            )
        refuse(needs_of(self.config))  # the scheduler's stack warns
        self.geometry = Geometry(self.config.primary_blocks, self.config.block.bytes, num_parts, block_size_factor)

    def open_engine_stack(self, *, enable_events: bool = False, file: SharedFile | None = None) -> EngineStack:
        """Open the scheduler's side: the manager, and the secondary tiers. Close it with `EngineStack.close`.

        If the process has joined the shared `file` already, it passes the file, which the stack then owns.

        Raises:
            ConfigError, TierError: See `open_engine_stack`; or the memory is in use by another run.
        """
        region = self._join(SCHEDULER, file)
        region.collapse_behind()  # here, and not in each worker
        backend = _SharedBackend(region)
        return EngineStack(self.config, backend=backend, enable_events=enable_events)

    def open_handlers(
        self, kv_caches: CanonicalKVCaches, rank: int = 0, *, file: SharedFile | None = None
    ) -> WorkerHandlers:
        """Open a worker's side. Its mapping ends when both handlers have been shut down.

        Args:
            kv_caches: The worker's caches; see `open_handlers` of this package.
            rank: Which worker, 0 to `num_workers` - 1.
            file: As for `open_engine_stack`.

        Raises:
            ValueError: The caches contradict themselves, or do not fit into the worker's part of a block.
            ConfigError: The memory cannot be mapped or pinned, or another process has this rank.
        """
        if not 0 <= rank < self.num_workers:
            raise ValueError(f"there is no worker {rank} among {self.num_workers}")
        region = self._join(worker_party(rank), file, for_gpu=_has_gpu(kv_caches))
        # Equal shares, not by `bytes_per_worker`: it differs between workers that have different layers.
        part_bytes = self.geometry.part_bytes
        try:
            return open_handlers(
                kv_caches,
                region,
                block_size_factor=self.geometry.block_size_factor,
                part_offset=rank % self.geometry.parts * part_bytes,
                part_bytes=part_bytes,
                check=functools.partial(_check_complete, region),
                on_shutdown=region.close,
            )
        except BaseException:
            region.close()
            raise

    def _join(self, party: str, file: SharedFile | None, *, for_gpu: bool = False) -> SharedRegion:
        settings = self.config.primary
        settings.refuse_without_server()
        with needing_resources("the engine's memory cannot be mapped"):
            return SharedRegion.join(
                file or SharedFile(self.name, party, parties_of(self.num_workers)),
                self.geometry,
                huge_pages=settings.wants_huge_pages,
                numa_node=settings.numa_node,
                for_gpu=for_gpu,
            )


class _SharedBackend(CPUBackend):
    """A primary tier that has no room until all processes have mapped the region."""

    region: SharedRegion

    def __init__(self, region: SharedRegion) -> None:
        super().__init__(region)
        self._log_limit = LogLimit()

    def get_num_free_blocks(self) -> int:
        if self.region.is_complete():
            return super().get_num_free_blocks()
        if self._log_limit.take() is not None:
            missing = ", ".join(self.region.missing_parties())
            _log.warning("nothing is stored or promoted until %s has mapped the engine's memory", missing)
        return 0


def _has_gpu(kv_caches: CanonicalKVCaches) -> bool:
    return any(cache.tensor.device.type == "cuda" for cache in kv_caches.tensors)


def _check_complete(region: SharedRegion) -> None:
    if not region.is_complete():
        missing = ", ".join(region.missing_parties())
        raise TieredKVError(
            f"a transfer was begun before every process had mapped the region; {missing} did not. "
            "An engine starts its scheduler and all its workers anew under a new name"
        )


class SharedRegion(PrimaryRegion):
    """A region that several processes map. Made by `join`; one thread calls.

    The first process to map it sizes the file and writes its header. The others compare the header and map it. The last
    one removes the file's name. From then on the kernel frees the memory with the last mapping, even after a kill.
    """

    _file: SharedFile | None = None
    """None until it is mapped."""
    _collapse: Collapse | None = None
    _collapsing: CollapseThread | None = None

    @classmethod
    def join(
        cls,
        file: SharedFile,
        geometry: Geometry,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        for_gpu: bool = False,
    ) -> Self:
        """Map the rows of `file`, in which this process has a place; all parties give the same `geometry`.

        The region owns the file from now on, even if this raises. With `for_gpu`, the process will pin the rows, and
        they get their huge pages now. The rest is as for `PrimaryRegion`.

        Raises:
            ConfigError: The memory cannot be allocated, or another party expects another geometry.
        """
        region: Self | None = None
        try:
            with file.exclusive():
                is_first = not has_header(file.fd)
                if is_first:
                    os.ftruncate(file.fd, ROWS_OFFSET + geometry.size_bytes)
                else:
                    check_header(file.fd, file.path, geometry)
                region = cls.map_file(
                    file.fd,
                    file.path,
                    geometry.rows,
                    geometry.row_bytes,
                    offset=ROWS_OFFSET,
                    huge_pages=huge_pages,
                    numa_node=numa_node,
                )
                region._file = file
                page_bytes = Limits().collapsed_size() if huge_pages else 0
                if page_bytes:
                    region._collapse = Collapse(region.array.ctypes.data, geometry.size_bytes, page_bytes)
                if is_first:
                    check_shared_room(file.fd, file.path, geometry.size_bytes)
                if region._collapse is not None and for_gpu:
                    region._collapse.within(COLLAPSE_S_MAX)  # pinned pages do not move any more
                if is_first:
                    size_shared(file.fd, file.path, geometry.size_bytes)  # its pages are where the mapping was bound
                    write_header(file.fd, geometry)
                file.complete()
        except BaseException:
            file.leave()
            if region is not None:
                region.close()
            raise
        return region

    def collapse_behind(self) -> None:
        """Put the rows on huge pages, by a thread that gives way; without a thread they stay on small ones."""
        if self._collapse is not None and not self._collapse.is_over:
            with suppress(ResourceError):
                self._collapsing = CollapseThread(self._collapse, self._count_huge_pages)

    @property
    def is_collapsing(self) -> bool:
        """Whether that thread runs."""
        return self._collapsing is not None and not self._collapsing.wait(0.0)

    def _count_huge_pages(self) -> None:
        assert self._collapse is not None
        self.huge_bytes = self._collapse.count()
        advice = self._collapse.advice() if self.huge_bytes < self._collapse.whole_bytes else ""
        _log.info("%s%s", describe(self.huge_bytes, self.array.nbytes), advice and f"; {advice}")

    def close(self) -> bool:
        """Stop the thread of `collapse_behind`, and unmap the region; see `PrimaryRegion`."""
        if self._collapsing is not None:
            self._collapsing.close()
        return super().close()

    def is_complete(self) -> bool:
        """Return whether all parties have joined; they may have left since."""
        return self._file is None or self._file.is_complete()

    def missing_parties(self) -> list[str]:
        """Return the parties that have not joined yet."""
        return [] if self._file is None else self._file.missing_parties()

    def unlink(self) -> None:
        """Leave the parties, if not all have joined yet; else do nothing. The last party to leave removes the name."""
        if self._file is not None:
            self._file.leave()


class TieredOffloadingSpec(OffloadingSpec):
    """Builds the manager in the scheduler's process, and the handlers in each worker's, from one stack.

    Every process makes a spec from the same configuration. The method that it calls decides which side it opens.

    Args:
        vllm_config: As for `OffloadingSpec`. `kv_transfer_config.kv_connector_extra_config["stack"]` is the stack: a
            path, a mapping or a `StackConfig`. `kv_transfer_config.engine_id` names this run of the engine; without
            it, the stack's `primary.shared` does. `parallel_config.world_size` is the number of workers, and
            `parallel_config.rank` which of them this process is.
        kv_cache_config: As for `OffloadingSpec`, with `num_blocks`, and `kv_cache_tensors` with a `size` in bytes each.

    Attributes:
        shared: The stack, for an engine that needs more than the interface offers.

    Raises:
        ConfigError: The stack cannot be used, or its blocks are smaller than the parts of all workers.
        ValueError: The block sizes do not fit each other.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:  # Any: the engine's own classes
        super().__init__(vllm_config, kv_cache_config)
        source = self.extra_config.get("stack")
        if source is None:
            raise ConfigError("expected the path of a stack's YAML file, or the same as a mapping", location="stack")
        engine_id = getattr(vllm_config.kv_transfer_config, "engine_id", None)
        gpu_block_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors) // kv_cache_config.num_blocks
        self.shared = SharedStack(
            source,
            name=f"tiered-kv-{engine_id}" if engine_id else None,
            bytes_per_worker=gpu_block_bytes * self.block_size_factor,
            num_workers=vllm_config.parallel_config.world_size,
            block_size_factor=self.block_size_factor,
        )
        self._stack: EngineStack | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the stack's manager. The first call opens it; its `shutdown` closes the stack.

        Raises:
            ConfigError, TierError: The stack cannot be opened.
        """
        if self._stack is None:
            self._stack = self.shared.open_engine_stack()
        return self._stack.manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Open and return this worker's handlers.

        Raises:
            ConfigError, ValueError: See `SharedStack.open_handlers`.
        """
        return self.shared.open_handlers(kv_caches, self.vllm_config.parallel_config.rank).triples()
