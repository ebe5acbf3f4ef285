"""The manager of lists of block hashes (`tiered_kv.abstract`), over a manager of single keys.

An engine's scheduler thread calls it, as it would call the manager below it. It has no other caller. What must stay
true: the blocks that `lookup` counted can be loaded until the next `lookup`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.abstract import BlockHash, OffloadingEvent, OffloadingManager, PrepareStoreOutput
from tiered_kv.base import LoadStoreSpec, OffloadKey, ReqContext, get_offload_block_hash, make_offload_key
from tiered_kv.tiering.interface import CacheManager


class PrefixOffloadingManager(OffloadingManager):
    """Tracks whole prefixes of block hashes, for an engine without requests and steps (`tiered_kv.abstract`).

    `lookup` counts the blocks, from the first one on, that can be loaded now. They stay loadable until the next
    `lookup`. A block that is being promoted ends the prefix: a later `lookup` of the same hashes counts the block.
    `prepare_load` pins blocks that were counted, until `complete_load`. `prepare_store` takes room for all hashes that
    are not stored, or returns None and changes nothing. `complete_store` without `success` frees that room.

    One thread calls, and nothing waits. Each `lookup` is one step of the manager below. It also begins a new request of
    that manager, unless the last one waits for a secondary tier. Complete all loads and stores before you call
    `reset_cache` of the manager below. Shut that manager down yourself.

    Args:
        manager: See `EngineStack.manager`. Open its stack with `enable_events` for `take_events`.
        group_idx: The KV cache group of the hashes.
    """

    def __init__(self, manager: CacheManager, group_idx: int = 0) -> None:
        self.manager = manager
        self._group_idx = group_idx
        self._num_requests = 0
        self._context = self._begin_request()
        self._is_waiting = False
        self._storing: dict[OffloadKey, ReqContext] = {}
        """The request of each block that is being stored: other lookups may come before the store is complete."""

    def lookup(self, block_hashes: Iterable[BlockHash]) -> int:
        self.manager.on_schedule_end()
        if not self._is_waiting:
            self.manager.on_request_finished(self._context)
            self._context = self._begin_request()
        # Also the blocks behind one that has to be promoted, so that all are promoted together.
        answers = self.manager.lookup_many(self._keys(block_hashes), self._context)
        self._is_waiting = None in answers
        return next((length for length, answer in enumerate(answers) if not answer), len(answers))

    def prepare_load(self, block_hashes: Iterable[BlockHash]) -> LoadStoreSpec:
        return self.manager.prepare_load(self._keys(block_hashes), self._context)

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        self.manager.touch(self._keys(block_hashes), self._context)

    def complete_load(self, block_hashes: Iterable[BlockHash]) -> None:
        self.manager.complete_load(self._keys(block_hashes), self._context)

    def prepare_store(self, block_hashes: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        keys = self._keys(block_hashes)
        output = self.manager.prepare_store(keys, self._context)
        if output is None:
            self.manager.poll()  # ends stores to tiers, after which their blocks may be evicted
            output = self.manager.prepare_store(keys, self._context)
        if output is None:
            return None
        self._storing.update(dict.fromkeys(output.keys_to_store, self._context))
        stored, evicted = (
            [get_offload_block_hash(key) for key in keys] for keys in (output.keys_to_store, output.evicted_keys)
        )
        return PrepareStoreOutput(stored, output.store_spec, evicted)

    def complete_store(self, block_hashes: Iterable[BlockHash], success: bool = True) -> None:
        of_request: dict[str, tuple[ReqContext, list[OffloadKey]]] = {}
        for key in self._keys(block_hashes):
            if (context := self._storing.pop(key, None)) is not None:
                of_request.setdefault(context.req_id, (context, []))[1].append(key)
        for context, keys in of_request.values():
            self.manager.complete_store(keys, context, success)

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self.manager.take_events():
            hashes = [get_offload_block_hash(key) for key in event.keys]
            yield OffloadingEvent(hashes, event.block_size, event.medium, event.removed)

    def _keys(self, block_hashes: Iterable[BlockHash]) -> list[OffloadKey]:
        return [make_offload_key(block_hash, self._group_idx) for block_hash in block_hashes]

    def _begin_request(self) -> ReqContext:
        self._num_requests += 1
        context = ReqContext(req_id=f"prefix-{self._num_requests}")
        self.manager.on_new_request(context)
        return context
