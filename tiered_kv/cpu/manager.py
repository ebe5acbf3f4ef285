"""The primary tier's manager: the row of each key, its pins, and evictions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from tiered_kv.base import (
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from tiered_kv.cpu.backend import PROMOTION, CPUBackend, CPUBlock
from tiered_kv.cpu.orphans import Orphans
from tiered_kv.cpu.policies import CachePolicy, RequestChain, make_policy
from tiered_kv.cpu.policies.checked import checked_policy
from tiered_kv.hints import HINT_NAMES, HintReader, Hints
from tiered_kv.mediums import CPULoadStoreSpec

CHAINS_MAX = 100_000
"""Limit of requests whose recency is tracked, and of `outdated` ones; beyond it the oldest request is forgotten."""
EVENTS_MAX = 1 << 16
"""Limit of events that wait for `take_events`; beyond it the oldest are lost."""
PROMOTION_ROWS_MAX = 8
"""Limit of rows that are evicted together when one block is promoted: the next blocks of its prefix find them free."""
_ROWS_SHARE = 512
"""They are at most one row of the primary tier in so many."""
_NO_HINTS = Hints()
_GRANTED = OffloadKey(b"\0granted")
"""Stands for the key of a row that was granted without one."""
_position_of = attrgetter("position")


class CPUOffloadingManager(OffloadingManager):
    """Tracks the blocks of one `CPUBackend`.

    A block is absent, writing (`ref_cnt` -1), ready (0) or pinned (> 0, once for each transfer that reads it). The
    policy contains the ready blocks only, so only they can be evicted.

    An engine can use it without secondary tiers. `TieringOffloadingManager` uses the second half of the methods. All
    methods belong to one thread.

    Args:
        backend: Allocates the blocks.
        policy: A name for `make_policy`, or a policy for `backend.num_blocks` blocks.
        enable_events: Whether `take_events` reports stored and removed blocks.
        hints: Names of the hints that are used.
        clock: Seconds of a monotonic clock; read once a request.
    """

    def __init__(
        self,
        backend: CPUBackend,
        policy: str | CachePolicy = "lru",
        *,
        enable_events: bool = False,
        hints: Collection[str] = HINT_NAMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        policy = policy if isinstance(policy, CachePolicy) else make_policy(policy, backend.num_blocks)
        self.policy = checked_policy(policy, backend.num_blocks)
        self._ends_every_step = self.policy is not policy  # a built-in policy protects blocks only while it evicts
        self._has_evicted = False
        self.blocks: dict[OffloadKey, CPUBlock] = {}
        """All blocks that are ready, pinned or being written."""
        self.step = 0
        """Number of the scheduler's step. Blocks with this `step` are not evicted before the step ends."""
        self.evicted_blocks = 0
        self.on_evicted: Callable[[list[OffloadKey]], None] | None = None
        """If set, it is called with evicted keys."""
        self._rows_ahead = min(PROMOTION_ROWS_MAX, backend.num_blocks // _ROWS_SHARE)
        self.hint_reader = HintReader(hints)
        self.skipped_blocks = 0
        """Blocks that were not stored because their request has the hint `skip: store`."""
        self.epoch = 0
        """The number of resets."""
        self.outdated: dict[str, None] = {}
        """Requests that began before a reset and have not ended, oldest first. They store and load nothing."""
        self.load_skippers: set[str] = set()
        """Requests that load nothing: those with the hint `skip: load`, and the outdated ones."""
        self._clock = clock
        self._chains: dict[str, RequestChain] = {}
        self.orphans = Orphans(backend.free_all)
        """Blocks from before a reset whose rows are not free yet."""
        self._events: deque[OffloadingEvent] | None = deque(maxlen=EVENTS_MAX) if enable_events else None

    # The engine's interface.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        block = self.blocks.get(key)
        if block is None or (self.load_skippers and req_context.req_id in self.load_skippers):
            return False
        if block.ref_cnt < 0:
            return None
        block.step = self.step
        return True

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pin ready blocks, once each; the spec has a row for each of `keys`.

        Raises:
            ValueError: A key is not ready, or the request began before a reset; nothing was pinned.
        """
        if self.outdated and keys and req_context.req_id in self.outdated:
            raise ValueError(f"request {req_context.req_id!r} began before a reset of the cache, and loads nothing")
        found: list[CPUBlock] = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None or block.ref_cnt < 0:
                raise ValueError(f"block {key.hex()} is not ready to be loaded; look keys up in the same step")
            found.append(block)
        distinct = found if len(set(keys)) == len(found) else [self.blocks[key] for key in dict.fromkeys(keys)]
        self.lease(distinct, req_context)
        for block in distinct:
            block.loads += 1
        return CPULoadStoreSpec([block.block_id for block in found])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.unpin(self._loading_blocks(keys))

    def lease(self, blocks: list[CPUBlock], req_context: ReqContext) -> None:
        """Pin distinct ready blocks that a request uses, until `unpin`."""
        self.pin(blocks)
        chain = self.chain_of(req_context)
        self.policy.use(chain.in_order(blocks), chain)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        if self.is_outdated(req_context):  # not None, after which an engine would try again in each step
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        blocks, step = self.blocks, self.step
        absent: dict[OffloadKey, None] = {}
        has_present = False
        for key in keys:
            block = blocks.get(key)
            if block is None:
                absent[key] = None
            else:
                block.step = step  # not to be evicted for the sake of its own request's tail
                has_present = True
        if self.orphans.exist:
            absent = dict.fromkeys(key for key in absent if key not in self.orphans)
        chain = self.chain_of(req_context)
        if chain.hints is not None and chain.hints.skips_store:
            self.skipped_blocks += len(absent)
            absent = {}
        new_keys = list(absent)
        evicted: list[OffloadKey] = []
        new_blocks = self.allocate(new_keys, req_context.req_id, chain, evicted)
        if new_blocks is None:
            return None
        if has_present:
            used = [blocks[key] for key in dict.fromkeys(keys) if key in blocks]
            self.policy.use(chain.in_order(used), chain)
        else:
            chain.extend(new_blocks)
        spec = CPULoadStoreSpec([block.block_id for block in new_blocks])
        return PrepareStoreOutput(new_keys, spec, evicted)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = self.written_blocks(keys, req_context)
        if success:
            self.commit(written)
            self.note_stored([block.key for block in written])
        else:
            self.abandon(written)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        get = self.blocks.get
        found = [block for block in map(get, dict.fromkeys(keys)) if block is not None]
        if found:
            chain = self.chain_of(req_context)
            self.policy.use(chain.in_order(found), chain)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_id = req_context.req_id
        if req_id:
            if req_id in self.outdated:  # the id is used again
                self.on_request_finished(req_context)
            chain = self.chain_of(req_context)  # from now on a reset finds the request
            may_hint = req_context.kv_transfer_params or getattr(req_context, "kv_hints", None)
            hints = self.hint_reader.read(req_context) if may_hint else None
            if hints is not None:
                chain.hints = hints
                if hints.skips_load:
                    self.load_skippers.add(req_id)
        self.policy.now_s = self._clock()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.outdated.pop(req_context.req_id, None)
        self.forget_request(req_context.req_id)

    def on_schedule_end(self) -> None:
        self.step += 1
        if self._has_evicted or self._ends_every_step:
            self._has_evicted = False
            self.policy.end_step()
        if self.orphans.unswept:
            self.orphans.sweep()

    @property
    def reports_events(self) -> bool:
        """Whether `take_events` reports stored and removed blocks."""
        return self._events is not None

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events = list(self._events)
        self._events.clear()
        return events

    def reset_cache(self, *, is_reported: bool = True) -> None:
        """Forget every key. The rows of running transfers become free when the transfers end, others in later steps.

        Requests that have begun store and load nothing until they end. A call without a request id belongs to no
        request: its caller must not store blocks from before the reset.
        """
        self.epoch += 1
        self.outdate(self._chains)
        for req_id in list(self.outdated)[:-CHAINS_MAX]:
            del self.outdated[req_id]
            self.load_skippers.discard(req_id)
        if self._events is not None and is_reported:  # an engine has to know each
            self._note_event([key for key, block in self.blocks.items() if block.ref_cnt >= 0], removed=True)
        old, self.blocks = self.blocks, {}
        self.orphans.add(old, self.policy.clear(block for block in old.values() if block.ref_cnt == 0))
        self.orphans.sweep()

    def shutdown(self, *, unmap: bool = True) -> None:
        """Forget every block, and unmap the region. Its memory stays mapped during transfers, or while views exist.

        Args:
            unmap: False if a tier may still write into the region.
        """
        is_in_use = self.orphans.are_in_use or any(block.ref_cnt for block in self.blocks.values())
        self.blocks.clear()
        self._chains.clear()
        if unmap and not is_in_use:
            self.backend.region.close()
        else:
            self.backend.region.unlink()

    def snapshot(self) -> dict[str, int]:
        """Return counters of blocks, bytes and hints. Any thread may call."""
        blocks, block_bytes = len(self.blocks), self.backend.block_size
        return {
            "used_blocks": blocks,
            "used_bytes": blocks * block_bytes,
            "capacity_bytes": self.backend.num_blocks * block_bytes,
            "evicted_blocks_total": self.evicted_blocks,
            "hinted_requests_total": self.hint_reader.hinted,
            "refused_hints_total": self.hint_reader.refused,
            "ignored_hint_actions_total": self.hint_reader.ignored_actions,
        }

    # For the tiering manager only.

    def hints_of(self, req_context: ReqContext) -> Hints:
        """Return the hints of a request."""
        chain = self._chains.get(req_context.req_id)
        return _NO_HINTS if chain is None or chain.hints is None else chain.hints

    def is_outdated(self, req_context: ReqContext) -> bool:
        """Return whether a request began before a reset."""
        return req_context.req_id in self.outdated

    def outdate(self, req_ids: Iterable[str]) -> None:
        """Let requests store and load nothing until they end."""
        for req_id in req_ids:
            self.outdated[req_id] = None
            self.load_skippers.add(req_id)

    def forget_request(self, req_id: str) -> None:
        """Forget a request's state, except that it is outdated."""
        chain = self._chains.pop(req_id, None)
        if chain is not None:
            chain.finish()
        if req_id not in self.outdated:
            self.load_skippers.discard(req_id)

    def chain_of(self, req_context: ReqContext) -> RequestChain:
        """Return the chain of a request; without a request id, a new one."""
        req_id = req_context.req_id
        chain = self._chains.get(req_id)
        if chain is None:
            chain = RequestChain()
            if req_id:
                if len(self._chains) >= CHAINS_MAX:
                    self.forget_request(next(iter(self._chains)))
                self._chains[req_id] = chain
        chain.position_of = getattr(req_context, "get_offload_key_position", None)  # engines have contexts of their own
        return chain

    def allocate(
        self, keys: Sequence[OffloadKey], writer: str, chain: RequestChain, evicted: list[OffloadKey]
    ) -> list[CPUBlock] | None:
        """Allocate a block in state writing for each of `keys`, which are distinct and absent.

        `writer` is the request that will write the blocks, or `PROMOTION`. `chain` belongs to the request that needs
        them: the policy may spare its blocks while others are left. `evicted` receives evicted keys. Returns the
        blocks in order, without a chain; or None, with nothing changed, if there is no room.
        """
        if not self._make_room(len(keys), chain, evicted, ahead=self._rows_ahead if writer is PROMOTION else 0):
            return None
        blocks = self.backend.allocate_blocks(keys)
        for block in blocks:
            block.writer = writer
        self.blocks.update(zip(keys, blocks, strict=True))
        self.policy.admit(chain.in_order(blocks), chain)
        return blocks

    def grant(self, count: int) -> list[CPUBlock] | None:
        """Allocate `count` rows for blocks whose keys come later, by `adopt`; None if there is no room.

        Until then they are in no index. `backend.free` frees them.
        """
        if not self._make_room(count, RequestChain(), []):
            return None
        return self.backend.allocate_blocks([_GRANTED] * count)

    def adopt(self, keys: Sequence[OffloadKey], rows: Sequence[CPUBlock], req_context: ReqContext) -> list[CPUBlock]:
        """Give granted rows their keys, in state writing; `complete_store` ends the store.

        Returns:
            The rows that are not used: a key is stored already, or the request stores nothing.
        """
        if self.is_outdated(req_context):
            return list(rows)
        chain = self.chain_of(req_context)
        if chain.hints is not None and chain.hints.skips_store:
            self.skipped_blocks += len(keys)
            return list(rows)
        adopted, unused = [], []
        for key, block in zip(keys, rows, strict=True):
            if key in self.blocks or (self.orphans.exist and key in self.orphans):
                unused.append(block)
                continue
            block.key, block.writer = key, req_context.req_id
            self.blocks[key] = block
            adopted.append(block)
        self.policy.admit(chain.in_order(adopted), chain)
        chain.extend(adopted)
        return unused

    def _make_room(self, count: int, chain: RequestChain, evicted: list[OffloadKey], *, ahead: int = 0) -> bool:
        missing = count - self.backend.get_num_free_blocks()
        if missing > 0 and self.orphans.unswept:
            self.orphans.make_room(missing)
            missing = count - self.backend.get_num_free_blocks()
        if missing > 0:
            self.policy.use((), chain)
            victims = self._victims(missing, chain, ahead=ahead)
            if victims is None:
                return False
            gone = [block.key for block in victims]
            for key in gone:
                del self.blocks[key]
            self.backend.free_all(victims)
            evicted += gone
            self.evicted_blocks += len(gone)
            if self.on_evicted is not None:
                self.on_evicted(gone)
            self._note_event(gone, removed=True)
        return True

    def _victims(self, missing: int, chain: RequestChain, ahead: int) -> list[CPUBlock] | None:
        """Return evicted blocks: `ahead` if there are so many besides the request's own, else `missing`, or None."""
        evict, step, self._has_evicted = self.policy.evict, self.step, True
        if ahead > missing and (victims := evict(ahead, step, chain)):
            return victims
        # The request's own blocks go last: its tail is worth little without its head.
        return evict(missing, step, chain) or (None if chain.spares_own else evict(missing, step))

    def written_blocks(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[CPUBlock]:
        """Return the blocks of `keys` that this request was to write; free them if a reset has removed them.

        If the engine gives positions, they are in the order of the prefix.
        """
        req_id = req_context.req_id
        get = self.blocks.get
        written = []
        for key in dict.fromkeys(keys):
            block = get(key)
            if block is None and self.orphans.exist:
                block = self.orphans.get(key)
            if block is None or block.ref_cnt >= 0 or block.writer != req_id:
                continue
            if self.orphans.exist and self.orphans.remove(block):
                self.backend.free(block)
            else:
                written.append(block)
        chain = written[0].chain if written else None
        if chain is not None and chain.step > 1:
            written.sort(key=_position_of)
        return written

    def commit(self, blocks: Collection[CPUBlock], pins: int = 0) -> None:
        """Make written blocks ready, pinned `pins` times. `note_stored` makes the event."""
        for block in blocks:
            block.ref_cnt = pins
        if not pins:
            self.policy.add(blocks)

    def note_stored(self, keys: list[OffloadKey]) -> None:
        """Make one event for blocks that became ready together. It keeps the list."""
        self._note_event(keys, removed=False)

    def abandon(self, blocks: Iterable[CPUBlock]) -> None:
        """Forget, and free, blocks in state writing whose transfer has failed."""
        for block in blocks:
            self.forget(block)
            self.backend.free(block)

    def forget(self, block: CPUBlock) -> None:
        """Remove a block in state writing from the index; `backend.free` frees its row."""
        if self.blocks.get(block.key) is block:
            del self.blocks[block.key]
        else:
            self.orphans.remove(block)
        block.chain = None

    def pin(self, blocks: Collection[CPUBlock]) -> None:
        """Pin ready blocks; one that appears twice is pinned twice."""
        self.policy.remove([block for block in blocks if block.ref_cnt == 0])
        for block in blocks:
            block.ref_cnt += 1

    def unpin(self, blocks: Iterable[CPUBlock]) -> None:
        """Remove one pin from each block. Without pins a block becomes evictable, or free if it was forgotten."""
        evictable = []
        for block in blocks:
            count = block.ref_cnt = block.ref_cnt - 1
            assert count >= 0, "unpinned more often than pinned"
            if not count:
                if self.orphans.exist and self.orphans.remove(block):
                    self.backend.free(block)
                else:
                    evictable.append(block)
        if evictable:
            self.policy.add(evictable)

    def _loading_blocks(self, keys: Iterable[OffloadKey]) -> list[CPUBlock]:
        """Return the blocks of `keys` that an engine loads, and end one load of each."""
        found = []
        for key in dict.fromkeys(keys):
            block = self.blocks.get(key) or self.orphans.get(key)
            if block is not None and block.loads:  # the other pins are not the engine's to release
                block.loads -= 1
                found.append(block)
        return found

    def _note_event(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, self.backend.block_size, self.backend.medium, removed))
