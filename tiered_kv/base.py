"""The contract between an inference engine and an offloading store.

Keys, per-request contexts, transfer specs, events, and the classes an engine programs against: `OffloadingManager`
(the scheduler's side), `OffloadingHandler` (a worker's copies) and `OffloadingSpec`, which makes both.

Names and signatures follow vLLM v1 (`vllm.v1.kv_offload`), so that code written for it runs here unchanged; every
field this project adds has a default.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
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


@dataclass
class ReqContext:
    """What a manager is told about the request on whose behalf it is called.

    Args:
        req_id: The engine's name for the request. Calls that share a non-empty id share one request's state
            (answers, deadlines, recency). Calls without an id all belong to one anonymous request, which is
            begun anew every few seconds.
        kv_transfer_params: Parameters that came with the request, passed through to the tiers.
    """

    req_id: str = ""
    kv_transfer_params: dict[str, Any] | None = None  # Any: the engine's own, opaque here


class OffloadPolicy(Enum):
    """Which of a request's blocks a tier wants."""

    BLOCK_LEVEL = "block_level"
    """Each block once, as soon as it has been computed."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, those that were already offloaded before it included."""


@dataclass
class RequestOffloadingContext:
    """How the blocks of a request shall be offloaded; the answer to `on_new_request`."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class LoadStoreSpec(ABC):
    """Where a worker finds, or puts, the bytes of some blocks."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium that the blocks lie in, such as "CPU" or "GPU"."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Blocks that are addressed by their number in a medium.

    Args:
        block_ids: Block numbers, kept as an int64 array of shape (n,) in `self.block_ids`.
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
        block_indices: For each group, the index within the request of its first block. A worker whose
            offloaded blocks are larger than GPU blocks needs it to know how much of the first offloaded
            block to skip. None where every group starts at an offloaded block's boundary.

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
    """What a worker has to do for a store that was accepted.

    Args:
        keys_to_store: The keys that are not there yet, in the order they were asked for.
        store_spec: Where to put them; its blocks are in the order of `keys_to_store`.
        evicted_keys: Keys that lost their block to make room.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass
class OffloadingEvent:
    """Blocks that appeared in, or vanished from, a medium.

    Args:
        keys: The blocks.
        block_size: Bytes of one block.
        medium: Where, such as "CPU" or the name of a secondary tier.
        removed: True if the blocks vanished, False if they were stored.
    """

    keys: list[OffloadKey]
    block_size: int
    medium: str
    removed: bool


class OffloadingManager(ABC):
    """The scheduler's side of offloading: which blocks are where, and which may be evicted.

    All methods are called by one thread, return at once and do no I/O. The order for a load is `lookup`,
    `prepare_load`, the worker's transfer, `complete_load`; for a store `prepare_store`, the transfer,
    `complete_store`. Between prepare and complete the blocks are never evicted.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return whether the block can be loaded now: True, False, or None for "ask again later"."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks that `lookup` answered with True, and return where they lie, in the order of `keys`."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take room for those of `keys` that are not there yet.

        Returns:
            What to store and where, or None, with nothing changed, where there is no room for all of them.
        """

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note a request when the scheduler first sees it, and return how to offload its blocks."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request uses `keys`, in the order of its prefix, without loading them."""
        return

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release the pins that `prepare_load` took, whether or not the transfer succeeded."""
        return

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """End a store: its blocks become loadable, or with `success` False their room is freed."""
        return

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; transfers that it began may still be completed afterwards."""
        return

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, oldest first."""
        return ()

    def on_schedule_end(self) -> None:
        """End a scheduler step: submit what was gathered during it, collect what has finished."""
        return

    def reset_cache(self) -> None:
        """Forget every block, because what they hold is no longer valid (new weights, say)."""
        return

    def shutdown(self) -> None:
        """Release everything. The manager must not be used afterwards; a second call does nothing."""
        return


TransferSpec = tuple[object, object]
"""Where the blocks lie and where they go: the source's load/store spec and the destination's."""

TransferType = tuple[str, str]
"""The mediums of source and destination: ("GPU", "CPU") is a store, ("CPU", "GPU") a load."""


@dataclass
class TransferResult:
    """How a transfer ended. Once it is reported, nothing touches its blocks any more.

    Args:
        job_id: The job.
        success: Whether every byte was copied. After a failure the destination holds anything.
        transfer_size: Bytes of the job.
        transfer_time: Seconds from its first copy to its last, waiting in the queue left out; None if it failed.
        transfer_type: The direction.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None


class OffloadingHandler(ABC):
    """Copies blocks in one direction. One thread calls all methods; it may be another for each handler."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer, behind those that were begun before it, and return at once.

        Args:
            job_id: The job's name in its `TransferResult`; not that of a job which is still to be reported.
            spec: Source and destination.

        Returns:
            True: the transfer will be reported by `get_finished`.

        Raises:
            TypeError, ValueError: The specs do not fit each other, or name blocks that are not there. Nothing was
                copied, and nothing will be reported.
            ShutdownError: The handler was shut down.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each once, in the order of their submission."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended; `get_finished` still reports them.

        Jobs that are unknown, or were reported, are over. The wait has no timeout: a copy between two memories ends.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for the copies that run, fail the others, and release all memory. A second call does nothing."""


@dataclass
class CanonicalKVCacheTensor:
    """A KV cache tensor whose first dimension counts blocks.

    Args:
        tensor: Shape (num_blocks, ...); for layouts with the block dimension elsewhere, one of the
            views into which the raw tensor was split.
        page_size_bytes: Bytes from one block to the next, padding included.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass
class CanonicalKVCacheRef:
    """A layer's (or a group of layers') part in a `CanonicalKVCacheTensor`.

    Args:
        tensor_idx: Index into `CanonicalKVCaches.tensors`.
        page_size_bytes: Bytes of a block that the layer really uses, without padding.
    """

    tensor_idx: int
    page_size_bytes: int


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
