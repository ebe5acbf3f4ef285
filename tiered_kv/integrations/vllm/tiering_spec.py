"""vLLM's own tiering on servers without a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.vllm.identity import ROW_LAYOUT, check_chunks, check_stages
from tiered_kv.integrations.vllm.worker import HandlerWorker, our_caches
from tiered_kv.worker.handlers import open_handlers


class TieredKVTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's `TieringOffloadingSpec` with our worker, which takes GPU and CPU memory. vLLM's own takes GPU memory only.

    It is configured like vLLM's, with `"spec_name": "TieredKVTieringSpec", "spec_module_path":
    "tiered_kv.integrations.vllm"`.
    """

    _worker: HandlerWorker | None

    row_layout = ROW_LAYOUT
    """Read by our tiers, since it differs from that of vLLM's worker."""

    def __init__(self, config: Any) -> None:  # Any: vLLM's OffloadingConfig
        check_stages(config)
        check_chunks(config)
        super().__init__(config)

    def get_worker(self, kv_caches: Any) -> HandlerWorker:
        if self._worker is not None:
            return self._worker
        if self.config.canonical_layout or self.replicated_layout:
            raise ConfigError(
                "canonical and replicated layouts are for vLLM's own worker; use its TieringOffloadingSpec"
            )
        rank = self.config.parallel.rank
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
