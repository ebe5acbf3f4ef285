"""The primary tier's rows: the block of each key, its pins, and evictions.

`TieringOffloadingManager` (`tiered_kv/tiering/manager.py`) and its parts call this, on the scheduler's thread. What
must stay true: only a block that is ready and without pins is evicted, and a row is free only once no transfer uses it.
It does not know requests: the writer of a block, and the order in which a request uses blocks, are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.cpu.backend import PROMOTION, CPUBackend, CPUBlock, RequestChain
from tiered_kv.cpu.orphans import Orphans, RowsOwner
from tiered_kv.cpu.policies import CachePolicy, make_policy
from tiered_kv.cpu.policies.checked import checked_policy

EVENTS_MAX = 1 << 16
"""Limit of events that wait for `take_events`; beyond it the oldest are lost."""
PROMOTION_ROWS_MAX = 8
"""Limit of rows that are evicted together when one block is promoted: the next blocks of its prefix find them free."""
_ROWS_SHARE = 512
"""For a promotion, at most one row in so many of the primary tier is evicted together."""
_GRANTED = OffloadKey(b"\0granted")
"""Stands for the key of a row that was granted without one."""
_position_of = attrgetter("position")


class PrimaryRows:
    """The blocks of one `CPUBackend`, by key.

    A block is absent, writing (`ref_cnt` -1), ready (0) or pinned (> 0, once for each transfer that reads it). The
    policy contains the ready blocks only, so only they can be evicted. All methods belong to the manager's thread.

    The life of a block: `allocate` takes a row, in state writing. `commit` makes it ready, or `abandon` frees it. `pin`
    and `unpin` enclose each transfer that reads it. At last `allocate` evicts it for others, or `reset` forgets it.

    Args:
        backend: Allocates the blocks.
        policy: A name for `make_policy`, or a policy for `backend.num_blocks` blocks.
        enable_events: Whether `take_events` reports stored and removed blocks.
    """

    __slots__ = ("__dict__", "blocks", "step")  # hot path: each lookup reads them

    def __init__(self, backend: CPUBackend, policy: str | CachePolicy = "lru", *, enable_events: bool = False) -> None:
        self.backend = backend
        policy = policy if isinstance(policy, CachePolicy) else make_policy(policy, backend.num_blocks)
        self.policy = checked_policy(policy, backend.num_blocks)
        self._ends_every_step = self.policy is not policy  # a built-in policy protects blocks only while it evicts
        self._has_evicted = False  # in this step
        self.blocks: dict[OffloadKey, CPUBlock] = {}
        """All blocks that are ready, pinned or being written. A reset replaces it."""
        self.step = 0
        """Number of the scheduler's step. Blocks with this `step` are not evicted before the step ends."""
        self.epoch = 0
        """The number of resets."""
        self.evicted_blocks = 0  # in all, for `snapshot`
        self._owner: RowsOwner | None = None
        self._rows_ahead = min(PROMOTION_ROWS_MAX, backend.num_blocks // _ROWS_SHARE)
        self.orphans = Orphans(backend.free_all)
        """Blocks from before a reset with rows that are not free yet."""
        self._events: deque[OffloadingEvent] | None = deque(maxlen=EVENTS_MAX) if enable_events else None

    def tell(self, owner: RowsOwner) -> None:
        """Report lost blocks to `owner` from now on."""
        self._owner = self.orphans.owner = owner

    # Which blocks there are.

    def ready(self, keys: Iterable[OffloadKey]) -> list[CPUBlock]:
        """Return the blocks of `keys` that are ready or pinned, in this order."""
        found = map(self.blocks.get, keys)
        return [block for block in found if block is not None and block.ref_cnt >= 0]

    def writing(self, keys: Iterable[OffloadKey]) -> list[CPUBlock]:
        """Return the blocks of `keys` that are being written, in this order."""
        found = map(self.blocks.get, keys)
        return [block for block in found if block is not None and block.ref_cnt < 0]

    def all_ready(self, keys: Collection[OffloadKey]) -> list[CPUBlock]:
        """Return the ready block of each key.

        Raises:
            ValueError: A key is not ready.
        """
        get = self.blocks.get
        found: list[CPUBlock] = []
        for key in keys:
            block = get(key)
            if block is None or block.ref_cnt < 0:
                raise ValueError(f"block {key.hex()} is not ready to be loaded; look keys up in the same step")
            found.append(block)
        return found

    def find_absent(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], bool]:
        """Return the keys that can be stored, each once, and whether a block of another key is present.

        A present block is not evicted before the step ends, not even to store the tail of its own request.
        """
        get, step = self.blocks.get, self.step
        absent: dict[OffloadKey, None] = {}
        has_present = False
        for key in keys:
            block = get(key)
            if block is None:
                absent[key] = None
            else:
                block.step = step
                has_present = True
        if self.orphans.exist:
            absent = dict.fromkeys(key for key in absent if key not in self.orphans)
        return list(absent), has_present

    def is_orphaned(self, key: OffloadKey) -> bool:
        """Return whether a transfer still uses a block of this key from before a reset: then it cannot be stored."""
        return self.orphans.exist and key in self.orphans

    @property
    def is_sweeping(self) -> bool:
        """Whether rows from before a reset will become free in later steps."""
        return bool(self.orphans.unswept)

    # Rows for blocks.

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
        """Allocate `count` rows, which get their keys later, by `adopt`; return None if there is no room.

        Until then the rows are in no index. `backend.free` frees them.
        """
        if not self._make_room(count, RequestChain(), []):
            return None
        return self.backend.allocate_blocks([_GRANTED] * count)

    def adopt(
        self, keys: Sequence[OffloadKey], rows: Sequence[CPUBlock], writer: str, chain: RequestChain
    ) -> list[CPUBlock]:
        """Give granted rows their keys, in state writing; `commit` follows.

        Returns:
            The rows that stay unused, because there is a block of their key.
        """
        adopted, unused = [], []
        for key, block in zip(keys, rows, strict=True):
            if key in self.blocks or self.is_orphaned(key):
                unused.append(block)
                continue
            block.key, block.writer = key, writer
            self.blocks[key] = block
            adopted.append(block)
        self.policy.admit(chain.in_order(adopted), chain)
        chain.extend(adopted)
        return unused

    def touch(self, keys: Iterable[OffloadKey], chain: RequestChain) -> None:
        """Note that the request of `chain` uses the blocks of `keys`, in any state."""
        get = self.blocks.get
        found = [block for block in map(get, dict.fromkeys(keys)) if block is not None]
        if found:
            self.policy.use(chain.in_order(found), chain)

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
            if self._owner is not None:
                self._owner.evicted(gone)
            self._note_event(gone, removed=True)
        return True

    def _victims(self, missing: int, chain: RequestChain, ahead: int) -> list[CPUBlock] | None:
        """Evict `ahead` blocks if other requests have so many, else `missing` ones; return them, or None if too few."""
        evict, step, self._has_evicted = self.policy.evict, self.step, True
        if ahead > missing and (victims := evict(ahead, step, chain)):
            return victims
        # The request's own blocks go last: its tail is worth little without its head.
        return evict(missing, step, chain) or (None if chain.spares_own else evict(missing, step))

    # Writes and pins.

    def written_by(self, writer: str, keys: Iterable[OffloadKey]) -> list[CPUBlock]:
        """Return the blocks of `keys` that this request was to write; free those that a reset has removed.

        If the engine gives positions, the returned blocks are in the order of the prefix.
        """
        get = self.blocks.get
        written = []
        for key in dict.fromkeys(keys):
            block = get(key)
            if block is None and self.orphans.exist:
                block = self.orphans.get(key)
            if block is None or block.ref_cnt >= 0 or block.writer != writer:
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
        """Make one event for blocks that became ready together. The event keeps the list."""
        self._note_event(keys, removed=False)

    def abandon(self, blocks: Iterable[CPUBlock]) -> None:
        """Forget, and free, blocks in state writing after a failed transfer."""
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

    def lease(self, blocks: list[CPUBlock], chain: RequestChain) -> None:
        """Pin distinct ready blocks that the request of `chain` uses, until `unpin`."""
        self.pin(blocks)
        self.policy.use(chain.in_order(blocks), chain)

    def end_loads(self, keys: Iterable[OffloadKey]) -> None:
        """End one load of each block of `keys` that an engine loads. The other pins of these blocks stay."""
        loaded = []
        for key in dict.fromkeys(keys):
            block = self.blocks.get(key) or self.orphans.get(key)
            if block is not None and block.loads:
                block.loads -= 1
                loaded.append(block)
        self.unpin(loaded)

    # Steps, resets and the end.

    def begin_request(self, now_s: float) -> None:
        """Note that a request begins at `now_s`, in seconds of a monotonic clock."""
        self.policy.now_s = now_s

    def end_step(self) -> None:
        """Begin the next step: blocks that were found in this one may be evicted from now on."""
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

    def take_events(self) -> list[OffloadingEvent]:
        if not self._events:
            return []
        events = list(self._events)
        self._events.clear()
        return events

    def reset(self, *, is_reported: bool = True) -> None:
        """Forget every key. The rows of running transfers become free when the transfers end, others in later steps."""
        self.epoch += 1
        if self._events is not None and is_reported:  # an engine must learn of each removed block
            self._note_event([key for key, block in self.blocks.items() if block.ref_cnt >= 0], removed=True)
        old, self.blocks = self.blocks, {}
        self.orphans.add(old, self.policy.clear(block for block in old.values() if block.ref_cnt == 0))
        self.orphans.sweep()

    def close(self, *, unmap: bool = True) -> None:
        """Forget every block, and unmap the region. Its memory stays mapped during transfers, or while views exist.

        Args:
            unmap: False if a tier may still write into the region.
        """
        is_in_use = self.orphans.are_in_use or any(block.ref_cnt for block in self.blocks.values())
        self.blocks.clear()
        if unmap and not is_in_use:
            self.backend.region.close()
        else:
            self.backend.region.unlink()

    def snapshot(self) -> dict[str, int]:
        """Return counters of blocks and bytes. Any thread may call."""
        blocks, block_bytes = len(self.blocks), self.backend.block_size
        return {
            "used_blocks": blocks,
            "used_bytes": blocks * block_bytes,
            "capacity_bytes": self.backend.num_blocks * block_bytes,
            "evicted_blocks_total": self.evicted_blocks,
        }

    def _note_event(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, self.backend.block_size, self.backend.medium, removed))
