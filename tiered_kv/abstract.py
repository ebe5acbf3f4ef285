"""The hash-list interface: whole prefixes of plain block hashes instead of single keys.

The first generation of vLLM's offloading interface (`vllm.v1.kv_offload.abstract`) has no requests, no steps and
no groups: `lookup` takes the hashes of a prompt and answers how many of them, from the first one on, can be loaded.
`PrefixOffloadingManager` is that interface over a manager of today.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from tiered_kv import base
from tiered_kv.base import LoadStoreSpec, OffloadKey, ReqContext, get_offload_block_hash, make_offload_key

BlockHash = bytes
"""Names the tokens of one block and of all blocks before it."""

__all__ = [
    "BlockHash",
    "LoadStoreSpec",
    "OffloadingEvent",
    "OffloadingManager",
    "PrefixOffloadingManager",
    "PrepareStoreOutput",
]


@dataclass
class PrepareStoreOutput:
    """The transfer of a store that was accepted; see `tiered_kv.base.PrepareStoreOutput`."""

    block_hashes_to_store: list[BlockHash]
    store_spec: LoadStoreSpec
    block_hashes_evicted: list[BlockHash]


@dataclass
class OffloadingEvent:
    """Blocks that were stored in, or `removed` from, a medium; `block_size` is in bytes."""

    block_hashes: list[BlockHash]
    block_size: int
    medium: str
    removed: bool


class OffloadingManager(ABC):
    """Tracks offloaded blocks by hash. One thread calls; nothing waits."""

    @abstractmethod
    def lookup(self, block_hashes: Iterable[BlockHash]) -> int:
        """Return how many of `block_hashes`, from the first one on without a gap, can be loaded now."""

    @abstractmethod
    def prepare_load(self, block_hashes: Iterable[BlockHash]) -> LoadStoreSpec:
        """Pin blocks that `lookup` has just counted, and return their places, in order."""

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note that blocks are used without being loaded."""
        return

    def complete_load(self, block_hashes: Iterable[BlockHash]) -> None:
        """Release the pins of `prepare_load`."""
        return

    @abstractmethod
    def prepare_store(self, block_hashes: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        """Allocate blocks for hashes that are not stored yet; None, with nothing changed, if there is no room."""

    def complete_store(self, block_hashes: Iterable[BlockHash], success: bool = True) -> None:
        """End a store: its blocks become ready, or without `success` are freed."""
        return

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""
        return ()


class PrefixOffloadingManager(OffloadingManager):
    """Gives an `OffloadingManager` of `tiered_kv.base` the hash-list interface.

    Each `lookup` is one scheduler step. It ends the step before it, which submits and collects transfers. The blocks
    that it counts stay loadable until the next `lookup`. A block that is being promoted ends the prefix; a later
    `lookup` finds it. Lookups belong to one request until no lookup waits for a tier any more. So the manager does not
    know whose blocks are stored: let all requests end before its `reset_cache`.

    Args:
        manager: The manager; only this object may call it.
        group_idx: The KV cache group of the hashes.
    """

    def __init__(self, manager: base.OffloadingManager, group_idx: int = 0) -> None:
        self.manager = manager
        self._group_idx = group_idx
        self._num_requests = 0
        self._req_context = self._begin_request()
        self._is_waiting = False
        # The request of each store in flight: it may be completed after other lookups.
        self._storing: dict[OffloadKey, ReqContext] = {}

    def lookup(self, block_hashes: Iterable[BlockHash]) -> int:
        self.manager.on_schedule_end()
        if not self._is_waiting:
            self.manager.on_request_finished(self._req_context)
            self._req_context = self._begin_request()
        # Blocks after a miss are looked up too, so that their promotion begins.
        answers = [self.manager.lookup(key, self._req_context) for key in self._keys(block_hashes)]
        self._is_waiting = None in answers
        return next((length for length, answer in enumerate(answers) if not answer), len(answers))

    def prepare_load(self, block_hashes: Iterable[BlockHash]) -> LoadStoreSpec:
        return self.manager.prepare_load(self._keys(block_hashes), self._req_context)

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        self.manager.touch(self._keys(block_hashes), self._req_context)

    def complete_load(self, block_hashes: Iterable[BlockHash]) -> None:
        self.manager.complete_load(self._keys(block_hashes), self._req_context)

    def prepare_store(self, block_hashes: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        output = self.manager.prepare_store(self._keys(block_hashes), self._req_context)
        if output is None:
            return None
        self._storing.update(dict.fromkeys(output.keys_to_store, self._req_context))
        return PrepareStoreOutput(
            [get_offload_block_hash(key) for key in output.keys_to_store],
            output.store_spec,
            [get_offload_block_hash(key) for key in output.evicted_keys],
        )

    def complete_store(self, block_hashes: Iterable[BlockHash], success: bool = True) -> None:
        requests: dict[str, tuple[ReqContext, list[OffloadKey]]] = {}
        for key in self._keys(block_hashes):
            req_context = self._storing.pop(key, self._req_context)
            requests.setdefault(req_context.req_id, (req_context, []))[1].append(key)
        for req_context, keys in requests.values():
            self.manager.complete_store(keys, req_context, success)

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self.manager.take_events():
            hashes = [get_offload_block_hash(key) for key in event.keys]
            yield OffloadingEvent(hashes, event.block_size, event.medium, event.removed)

    def _keys(self, block_hashes: Iterable[BlockHash]) -> list[OffloadKey]:
        return [make_offload_key(block_hash, self._group_idx) for block_hash in block_hashes]

    def _begin_request(self) -> ReqContext:
        self._num_requests += 1
        req_context = ReqContext(req_id=f"prefix-{self._num_requests}")
        self.manager.on_new_request(req_context)
        return req_context
