"""vLLM as a client of a host's cache: `attach` in place of `stack`.

`TieredKVOffloadingSpec` makes a `HostCache` in the scheduler and in each worker, with the same arguments, and calls it
on their own threads. While no server answers, every block is a miss, and nothing is stored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tiered_kv.base import CanonicalKVCaches
from tiered_kv.config.namespace import Namespace
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.server.attach import Attachment
from tiered_kv.server.engine_manager import AttachedEngineManager
from tiered_kv.server.protocol import Hello
from tiered_kv.server.worker import HostWorker
from tiered_kv.worker.handlers import WorkerHandlers, open_handlers
from tiered_kv.worker.plan import device_of


@dataclass(frozen=True, slots=True)
class HostCache:
    """A host's cache, as an engine uses it. Scheduler and workers construct it with the same arguments, to open their
    sides.

    Args:
        address: "unix:" and the path of the server's socket.
        name: A name that belongs to this run of the engine, the same in all its processes.
        namespace: The namespace of the engine's blocks.
        block_bytes, block_tokens: The size of an offloaded block.
        num_workers: Workers of the engine.
        num_parts: Equal parts of each block: one for each worker, or 1, which all workers share.
        block_size_factor: Device blocks in an offloaded block.
    """

    address: str
    name: str
    namespace: Namespace
    block_bytes: int
    block_tokens: int
    num_workers: int
    num_parts: int
    block_size_factor: int

    @property
    def digest(self) -> bytes:
        """The digest of the namespace and the size of a block."""
        return self.namespace.identify(block_bytes=self.block_bytes, block_tokens=self.block_tokens).digest

    def open_manager(self) -> AttachedEngineManager:
        """Open the scheduler's side. If no server listens, every block is a miss until one does.

        Raises:
            ConfigError: The server refuses the engine.
        """
        attachment = Attachment(self.address, self._hello("scheduler"), maps_rows=False)
        attachment.connect()
        return AttachedEngineManager(attachment)

    def open_handlers(self, kv_caches: CanonicalKVCaches, rank: int) -> WorkerHandlers:
        """Open a worker's side; the handlers close it.

        Raises:
            ConfigError: The server refuses the worker, or its rows cannot be mapped or pinned.
            ValueError: The caches do not fit into the worker's part of a block.
        """
        opened = functools.partial(self._handlers_over, kv_caches, rank)
        is_pinned = device_of(kv_caches).type == "cuda"
        return HostWorker(Attachment(self.address, self._hello("worker"), pins_rows=is_pinned), opened).handlers

    def _handlers_over(self, kv_caches: CanonicalKVCaches, rank: int, region: PrimaryRegion) -> WorkerHandlers:
        if region.block_bytes != self.block_bytes:
            raise ConfigError(f"expected rows of {self.block_bytes} bytes, found {region.block_bytes}")
        part_bytes = self.block_bytes // self.num_parts
        return open_handlers(
            kv_caches,
            region,
            block_size_factor=self.block_size_factor,
            part_offset=rank % self.num_parts * part_bytes,
            part_bytes=part_bytes,
        )

    def _hello(self, role: str) -> Hello:
        block = {"bytes": self.block_bytes, "tokens": self.block_tokens}
        settings = {"namespace": self.namespace.model_dump(mode="json"), "block": block}
        return Hello(self.name, role, workers=self.num_workers, settings=settings)
