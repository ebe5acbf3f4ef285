"""The contract between an inference engine and an offloading store.

It has keys, per-request contexts, transfer specs, events, and the classes that an engine calls: `OffloadingManager` (on
the scheduler's thread), `OffloadingHandler` (on a worker's thread) and `OffloadingSpec`, which makes both.

What must stay true: names and signatures follow vLLM v1 (`vllm.v1.kv_offload`), so that code for vLLM runs here
unchanged. Every field that this project adds has a default.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NewType

import numpy as np

if TYPE_CHECKING:
    import torch

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash of any length, followed by the index of its KV cache group as a big-endian uint32."""

_GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return the key of the block with `block_hash` in KV cache group `group_idx` (0 to 2**32 - 1)."""
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the block hash that `key` was made from."""
    return key[:-_GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV cache group index that `key` was made from."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


group_of = itemgetter(slice(-_GROUP_BYTES, None))
"""Returns the KV cache group of a key as its four bytes: hot paths need no number."""


@dataclass
class ReqContext:
    """The request for which a manager is called.

    Args:
        req_id: The engine's id of the request. Calls with one id share the state of a request (answers, deadlines,
            recency). Calls without an id share an anonymous request, which is replaced after some time. A reset does
            not end it, so do not use it to store blocks from before a reset.
        kv_transfer_params: Parameters of the request, passed to the tiers.
        kv_hints: A router's hints: vLLM's or SGLang's `KvHintsEnvelope`, or its JSON form.
    """

    req_id: str = ""
    kv_transfer_params: dict[str, Any] | None = None  # Any: the engine's own, opaque here
    kv_hints: Any = None
    _offload_key_positions: dict[OffloadKey, int] = field(default_factory=dict, repr=False, init=False, compare=False)

    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None:
        """Set where a block ends in the request, in tokens. Then its position does not depend on the order of calls.

        Set it for all blocks of a request, of every KV cache group, or for none.
        """
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        """Return where a block ends in the request, in tokens; None if the engine does not give it."""
        return self._offload_key_positions.get(key)


class OffloadPolicy(Enum):
    """Which blocks of a request a tier stores."""

    BLOCK_LEVEL = "block_level"
    """Each block once, as soon as it has been computed."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, also the blocks that were offloaded before this request."""


@dataclass
class RequestOffloadingContext:
    """How to offload the blocks of a request; the answer to `on_new_request`."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class LoadStoreSpec(ABC):
    """The places of blocks from which a worker reads, or to which it writes."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the blocks' medium, such as "CPU" or "GPU"."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Blocks by their numbers in a medium.

    Args:
        block_ids: Block numbers, kept as an int64 array of shape (n,) in `self.block_ids`. The scheduler's thread
            passes a list: numpy would release the interpreter while it copies an array of more than 500 numbers.
    """

    def __init__(self, block_ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.block_ids = np.array(block_ids, dtype=np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks in GPU memory, ordered by KV cache group.

    Args:
        block_ids: GPU block numbers, all groups one after the other.
        group_sizes: How many of `block_ids` belong to each group; sums to `len(block_ids)`.
        block_indices: For each group, the index of its first block within the request. If offloaded blocks are larger
            than GPU blocks, it says how much of the first offloaded block to skip. None if every group begins with a
            whole offloaded block.

    Raises:
        ValueError: The sizes do not add up.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]],
        group_sizes: Sequence[int],
        block_indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(block_ids):
            raise ValueError(f"group_sizes sum to {sum(group_sizes)}, but there are {len(block_ids)} block_ids")
        if block_indices is not None and len(block_indices) != len(group_sizes):
            raise ValueError(f"{len(block_indices)} block_indices for {len(group_sizes)} groups")
        self.group_sizes: Sequence[int] = group_sizes
        self.block_indices: Sequence[int] | None = block_indices

    @staticmethod
    def medium() -> str:
        return "GPU"


@dataclass
class PrepareStoreOutput:
    """The transfer of a store that was accepted.

    Args:
        keys_to_store: Keys that are not stored yet, in the given order.
        store_spec: The blocks to write, in the order of `keys_to_store`.
        evicted_keys: Keys of the blocks that were evicted to make room.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass
class OffloadingEvent:
    """Blocks that were stored in, or removed from, a medium.

    Args:
        keys: The blocks.
        block_size: Bytes of one block.
        medium: "CPU", or the name of a secondary tier.
        removed: True if the blocks were removed, False if they were stored.
    """

    keys: list[OffloadKey]
    block_size: int
    medium: str
    removed: bool


class OffloadingManager(ABC):
    """The scheduler's side of offloading: it tracks where blocks are, and which may be evicted.

    One thread calls all methods. They return at once and do no I/O. A load is `lookup`, `prepare_load`, the worker's
    transfer, `complete_load`. A store is `prepare_store`, the transfer, `complete_store`. Between prepare and complete
    the blocks are not evicted.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if the block can be loaded now, False if not, None if the answer comes later."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks that `lookup` answered with True, and return their places, in the order of `keys`."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Allocate blocks for the keys that are not stored yet.

        Returns:
            The transfer; it has no block if the request began before a reset. None if there is no room for all blocks:
            then nothing has changed.
        """

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request when the scheduler first sees it, and return how to offload its blocks."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request uses `keys`, in the order of its prefix, without loading them."""
        return

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release the pins that `prepare_load` took, whether or not the transfer succeeded."""
        return

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """End a store: its blocks become ready, or with `success` False are freed."""
        return

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End the request; its transfers may still be completed afterwards."""
        return

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, oldest first."""
        return ()

    def on_schedule_end(self) -> None:
        """End a scheduler step: submit its jobs, and collect the finished ones."""
        return

    def reset_cache(self) -> None:
        """Forget every block, because their contents are no longer valid: the model has new weights, for example.

        A request that has begun stores and loads nothing until it ends.
        """
        return

    def shutdown(self) -> None:
        """Release everything. The manager must not be used afterwards; a second call does nothing."""
        return


TransferSpec = tuple[object, object]
"""The load/store specs of source and destination."""

TransferType = tuple[str, str]
"""The mediums of source and destination: ("GPU", "CPU") is a store, ("CPU", "GPU") a load."""


@dataclass
class TransferResult:
    """How a transfer ended. After the report no code touches its blocks any more.

    Args:
        job_id: The job.
        success: Whether every byte was copied. After a failure the contents of the destination are undefined.
        transfer_size: Bytes of the job.
        transfer_time: Seconds from its first copy to its last, without its time in the queue; None if it failed.
        transfer_type: The direction.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None


class OffloadingHandler(ABC):
    """Copies blocks in one direction. One thread calls all methods; each handler may have a thread of its own."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Queue a transfer, and return at once. Transfers run in the order of their submission.

        Args:
            job_id: Identifies the job in its `TransferResult`; different from all jobs that are not reported yet.
            spec: Source and destination.

        Returns:
            True: the transfer will be reported by `get_finished`.

        Raises:
            TypeError, ValueError: The specs do not fit each other, or a block does not exist. Nothing was copied, and
                nothing will be reported.
            ShutdownError: The handler was shut down.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each once, in the order of their submission."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended; `get_finished` still reports them.

        Unknown and reported jobs are ignored. There is no timeout: a copy between two memories ends.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for running copies, fail queued ones, and release all memory. A second call does nothing."""


@dataclass
class CanonicalKVCacheTensor:
    """A KV cache tensor; its first dimension counts blocks.

    Args:
        tensor: Shape (num_blocks, ...). If a layout has its block dimension elsewhere, this is one of the views into
            which the raw tensor was split.
        page_size_bytes: Bytes from one block to the next, padding included.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True)
class CopyRun:
    """Fragments of a worker's page, and their places in the canonical page; in either page at equal distances.

    Args:
        local_offset, canonical_offset: Bytes before the first fragment in either page.
        fragment_size: Bytes of each fragment.
        num_fragments: The number of fragments.
        local_stride, canonical_stride: Bytes from a fragment to the next in either page.
    """

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class CanonicalPageMapping:
    """The place of a worker's page in the canonical page, which the pages of all workers make up.

    Args:
        canonical_page_size_bytes: Bytes of the canonical page, of all workers together.
        local_page_size_bytes: Bytes of the worker's page, without padding.
        runs: The places of all fragments; together these are the worker's whole page.
        num_writers: The number of workers that have the same bytes.
        writer_index: The index of this worker among these workers; the worker with index 0 stores.
        parallelism_agnostic: Whether the canonical bytes are the same under any split of the model.
    """

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool


@dataclass
class CanonicalKVCacheRef:
    """A layer's (or a group of layers') part in a `CanonicalKVCacheTensor`.

    Args:
        tensor_idx: Index into `CanonicalKVCaches.tensors`.
        page_size_bytes: Bytes of a block that the layer uses, without padding.
        mapping: The place of these bytes in a canonical page; None if the worker's own page is offloaded.
    """

    tensor_idx: int
    page_size_bytes: int
    mapping: CanonicalPageMapping | None = None


@dataclass
class CanonicalKVCaches:
    """A worker's KV caches, one row per block.

    Args:
        tensors: The distinct tensors, each of shape (num_blocks, page_size_bytes) and int8.
        group_data_refs: For each KV cache group, the parts that make up one block of it, in order.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]] = field(default_factory=list)


class OffloadingSpec(ABC):
    """Builds the manager (in the scheduler) and the transfer handlers (in each worker) from one configuration.

    Args:
        vllm_config: Any object with `kv_transfer_config.kv_connector_extra_config` (a mapping) and
            `parallel_config.decode_context_parallel_size` and `.prefill_context_parallel_size`. If it has a
            `cache_config` with `hash_block_size`, that overrides the size derived here.
        kv_cache_config: Any object with `kv_cache_groups`, each with `kv_cache_spec.block_size` in tokens.

    Attributes:
        extra_config: The connector's own settings.
        offload_prompt_only: Whether blocks that were generated after the prompt are left out.
        gpu_block_size: Tokens in a GPU block, for each group, context parallelism included.
        hash_block_size: Tokens that one block hash covers: the greatest size that divides every group's.
        block_size_factor: GPU blocks in one offloaded block (`extra_config["block_size"]` tokens).

    Raises:
        ValueError: The block sizes do not fit each other.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:  # Any: the engine's own classes
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        if vllm_config.kv_transfer_config is None:
            raise ValueError("offloading needs a kv_transfer_config, and the engine's configuration has none")
        self.extra_config: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.offload_prompt_only = bool(self.extra_config.get("offload_prompt_only", True))

        parallel = vllm_config.parallel_config
        context_parallel = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        self.gpu_block_size: tuple[int, ...] = tuple(
            group.kv_cache_spec.block_size * context_parallel for group in kv_cache_config.kv_cache_groups
        )
        self.hash_block_size = self._resolve_hash_block_size()
        self.block_size_factor = self._resolve_block_size_factor()

    def _resolve_hash_block_size(self) -> int:
        cache_config = getattr(self.vllm_config, "cache_config", None)
        override = getattr(cache_config, "hash_block_size", None)
        size = int(override) if override else math.gcd(*self.gpu_block_size)
        for block_size in self.gpu_block_size:
            if block_size % size:
                raise ValueError(
                    f"a GPU block of {block_size} tokens is not a multiple of the hash block of {size} tokens; "
                    "with several KV cache groups, enable prefix caching so that the engine aligns them"
                )
        return size

    def _resolve_block_size_factor(self) -> int:
        offloaded = self.extra_config.get("block_size")
        if offloaded is None:
            return 1
        sizes = set(self.gpu_block_size)
        if len(sizes) != 1:
            raise ValueError(
                f"'block_size' needs KV cache groups of one block size, and they are {sorted(sizes)} tokens"
            )
        (gpu_block_size,) = sizes
        factor, rest = divmod(int(offloaded), gpu_block_size)
        if rest or factor < 1:
            raise ValueError(f"'block_size' {offloaded} is not a multiple of the GPU block of {gpu_block_size} tokens")
        return factor

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager that the scheduler will use."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield (source spec type, destination spec type, handler) for each direction a worker can copy in."""
