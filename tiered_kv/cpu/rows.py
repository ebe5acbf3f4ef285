"""The primary tier's rows: the row of each key, its pins, and evictions.

`TieringOffloadingManager` (`tiered_kv/tiering/manager.py`) and its parts call this, on the scheduler's thread. What
must stay true: only a block that is ready and without pins is evicted, and a row is free only once no transfer uses it.
It does not know requests: the writer of a block, and the order in which a request uses blocks, are arguments.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.cpu.backend import CPUBackend, CPUBlock
from tiered_kv.cpu.blocks_view import BlocksView
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.key_index import KeyIndex
from tiered_kv.cpu.orphans import Orphans, RowsOwner
from tiered_kv.cpu.policies import CachePolicy, make_policy
from tiered_kv.cpu.policies.checked import checked_policy

PROMOTION: Final = "\0promotion"
"""The writer of a block that is loaded from a secondary tier; no request has this id."""
EVENTS_MAX = 1 << 16
"""Limit of events that wait for `take_events`; beyond it the oldest are lost."""
PROMOTION_ROWS_MAX = 8
"""Limit of rows that are evicted together when one block is promoted: the next blocks of its prefix find them free."""
_ROWS_SHARE = 512
"""For a promotion, at most one row in so many of the primary tier is evicted together."""
_GRANTED = OffloadKey(b"\0granted")
"""Stands for the key of a row that was granted without one."""


class PrimaryRows:
    """The rows of one `CPUBackend`, by key.

    A block is absent, being written, ready or pinned (once for each transfer that reads it). The policy contains the
    ready blocks only, so only they can be evicted. All methods are for the manager's thread, and take rows by number.

    The life of a block: `allocate` takes a row, which is written. `commit` makes it ready, or `abandon` frees it. `pin`
    and `unpin` enclose each transfer that reads it. At last `allocate` evicts it for others, or `reset` forgets it.

    Args:
        backend: Allocates the rows.
        policy: A name for `make_policy`, or a policy over `backend.table`.
        enable_events: Whether `take_events` reports stored and removed blocks.
    """

    __slots__ = ("__dict__", "index", "step", "table", "writing")  # hot path: each lookup reads them

    def __init__(self, backend: CPUBackend, policy: str | CachePolicy = "lru", *, enable_events: bool = False) -> None:
        self.backend, self.table = backend, backend.table
        policy = policy if isinstance(policy, CachePolicy) else make_policy(policy, self.table)
        self.policy = checked_policy(policy, self.table)
        self._ends_every_step = self.policy is not policy  # a built-in policy protects blocks only while it evicts
        self._has_evicted = False  # in this step
        self.index = KeyIndex()  # of ready and pinned blocks
        self.writing: dict[OffloadKey, int] = {}  # of blocks that are being written, which are few
        self.writers: dict[int, str] = {}
        """The request that writes each row in state writing, or `PROMOTION`; also of rows from before a reset."""
        self._loads: Counter[int] = Counter()
        """How many of a row's pins are an engine's loads, for the rows that have some."""
        self.step = 0
        """Number of the scheduler's step. Blocks with this `step` are not evicted before the step ends."""
        self.epoch = 0
        """The number of resets."""
        self.evicted_blocks = 0  # in all, for `snapshot`
        self._owner: RowsOwner | None = None
        self._rows_ahead = min(PROMOTION_ROWS_MAX, backend.num_blocks // _ROWS_SHARE)
        self.orphans = Orphans(self.table, self.release)
        self._events: deque[OffloadingEvent] | None = deque(maxlen=EVENTS_MAX) if enable_events else None

    def tell(self, owner: RowsOwner) -> None:
        """Report lost blocks to `owner` from now on."""
        self._owner = self.orphans.owner = owner

    # Which blocks there are.

    def __len__(self) -> int:
        """Return the number of blocks that are ready, pinned or being written. Any thread."""
        return len(self.index) + len(self.writing)

    def __contains__(self, key: OffloadKey) -> bool:
        return self.row_of(key) is not None

    def row_of(self, key: OffloadKey) -> int | None:
        """Return the row of a block in any state; None if it is absent."""
        row = self.index.get(key)
        return self.writing.get(key) if row is None else row

    @property
    def blocks(self) -> Mapping[OffloadKey, CPUBlock]:
        """A view of all blocks that are ready, pinned or being written."""
        return BlocksView(self.index, self.writing, self.table)

    def ready(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the rows of those `keys` that are ready or pinned, in this order."""
        return [row for row in self.index.get_many(keys) if row is not None]

    def all_ready(self, keys: Collection[OffloadKey]) -> list[int]:
        """Return the row of each key.

        Raises:
            ValueError: A key is not ready.
        """
        found = self.ready(keys)
        if len(found) < len(keys):
            key = next(key for key in keys if self.index.get(key) is None)
            raise ValueError(f"block {key.hex()} is not ready to be loaded; look keys up in the same step")
        return found

    def find_absent(self, keys: Collection[OffloadKey]) -> tuple[list[OffloadKey], bool]:
        """Return the keys that can be stored, each once, and whether a block of another key is present.

        A present block is not evicted before the step ends, not even to store the tail of its own request.
        """
        writing, step_of, step = self.writing, self.table.step, self.step
        absent: dict[OffloadKey, None] = {}
        has_present = False
        for key, row in zip(keys, self.index.get_many(keys), strict=True):
            if row is None and (not writing or (row := writing.get(key)) is None):
                absent[key] = None
            else:
                step_of[row] = step
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
        self, keys: Sequence[OffloadKey], writer: str, chain: RequestChain, evicted: list[OffloadKey], source: int = 0
    ) -> list[int] | None:
        """Allocate a row in state writing for each of `keys`, which are distinct and absent.

        `writer` is the request that will write the blocks, or `PROMOTION`; `source` is the number of the tier that a
        promotion comes from. `chain` belongs to the request that needs the rows: the policy may spare its blocks while
        others are left. `evicted` receives evicted keys. Returns the rows in order, without a chain; or None, with
        nothing changed, if there is no room.
        """
        if not self._make_room(len(keys), chain, evicted, ahead=self._rows_ahead if writer is PROMOTION else 0):
            return None
        rows = self.backend.allocate(keys)
        self.writing.update(zip(keys, rows, strict=True))
        self.writers.update(dict.fromkeys(rows, writer))
        source_of = self.table.source
        for row in rows:
            source_of[row] = source
        self.policy.admit(chain.in_order(rows, self.table), chain)
        return rows

    def grant(self, count: int) -> list[int] | None:
        """Allocate `count` rows, which get their keys later, by `adopt`; return None if there is no room.

        Until then the rows are in no index. `backend.free_rows` frees them.
        """
        if not self._make_room(count, RequestChain(), []):
            return None
        return self.backend.allocate([_GRANTED] * count)

    def adopt(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], writer: str, chain: RequestChain
    ) -> tuple[list[OffloadKey], list[int]]:
        """Give granted rows their keys, in state writing; `commit` follows.

        Returns:
            The keys that have got a row; and the rows that stay unused, because there is a block of their key.
        """
        stored, adopted, unused = [], [], []
        key_of, source_of = self.table.key, self.table.source
        for key, row in zip(keys, rows, strict=True):
            if key in self or self.is_orphaned(key):
                unused.append(row)
                continue
            key_of[row], source_of[row] = key, 0
            self.writing[key], self.writers[row] = row, writer
            stored.append(key)
            adopted.append(row)
        self.policy.admit(chain.in_order(adopted, self.table), chain)
        chain.extend(adopted, self.table)
        return stored, unused

    def touch(self, keys: Iterable[OffloadKey], chain: RequestChain) -> None:
        """Note that the request of `chain` uses the blocks of `keys`, in any state."""
        distinct = dict.fromkeys(keys)
        found = self.index.get_many(distinct)
        if self.writing and None in found:
            get = self.writing.get
            found = [get(key) if row is None else row for key, row in zip(distinct, found, strict=True)]
        if rows := [row for row in found if row is not None]:
            self.policy.use(chain.in_order(rows, self.table), chain)

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
            key_of = self.table.key
            gone = [key_of[row] for row in victims]
            self.index.remove(gone)
            self.backend.free_rows(victims)
            evicted += gone
            self.evicted_blocks += len(gone)
            if self._owner is not None:
                self._owner.evicted(gone)
            self._note_event(gone, removed=True)
        return True

    def _victims(self, missing: int, chain: RequestChain, ahead: int) -> list[int] | None:
        """Evict `ahead` blocks if other requests have so many, else `missing` ones; return them, or None if too few."""
        evict, step, self._has_evicted = self.policy.evict, self.step, True
        if ahead > missing and (victims := evict(ahead, step, chain)):
            return victims
        # The request's own blocks go last: its tail is worth little without its head.
        return evict(missing, step, chain) or (None if chain.spares_own else evict(missing, step))

    # Writes and pins.

    def written_by(self, writer: str, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the rows of `keys` that this request was to write; free those that a reset has removed.

        If the engine gives positions, the returned rows are in the order of the prefix.
        """
        get, writers = self.writing.get, self.writers
        written = []
        for key in dict.fromkeys(keys):
            row = get(key)
            if row is None:
                if not self.orphans.exist or (row := self.orphans.get(key)) is None:
                    continue
                if writers.get(row) == writer and self.orphans.remove(row):
                    self.release((row,))
            elif writers[row] == writer:
                written.append(row)
        chain = self.table.chain[written[0]] if written else None
        if chain is not None and chain.step > 1:
            written.sort(key=self.table.position.__getitem__)
        return written

    def commit(self, rows: Collection[int], keys: Iterable[OffloadKey], pins: int = 0) -> None:
        """Make written blocks ready, pinned `pins` times; `keys` are theirs. `note_stored` makes the event."""
        ref_cnt, writing, writers = self.table.ref_cnt, self.writing, self.writers
        self.index.add(keys, rows)
        for row, key in zip(rows, keys, strict=True):
            ref_cnt[row] = pins
            del writing[key], writers[row]
        if not pins:
            self.policy.add(rows)

    def note_stored(self, keys: list[OffloadKey]) -> None:
        """Make one event for blocks that became ready together. The event keeps the list."""
        self._note_event(keys, removed=False)

    def abandon(self, rows: Collection[int]) -> None:
        """Forget, and free, rows in state writing after a failed transfer."""
        for row in rows:
            self.forget(row)
        self.release(rows)

    def forget(self, row: int) -> None:
        """Remove the block of a row in state writing; `release` frees the row."""
        key = self.table.key[row]
        if self.writing.get(key) == row:
            del self.writing[key]
        else:
            self.orphans.remove(row)
        self.table.chain[row] = None

    def pin(self, rows: Collection[int]) -> None:
        """Pin ready blocks; one that appears twice is pinned twice."""
        ref_cnt = self.table.ref_cnt
        self.policy.remove([row for row in rows if not ref_cnt[row]])
        for row in rows:
            ref_cnt[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Remove one pin from each block. Without pins a block becomes evictable, or free if it was forgotten."""
        ref_cnt, orphans = self.table.ref_cnt, self.orphans
        evictable = []
        for row in rows:
            ref_cnt[row] = count = ref_cnt[row] - 1
            if count <= 0:
                assert not count, "unpinned more often than pinned"
                if orphans.exist and orphans.remove(row):
                    self.release((row,))
                else:
                    evictable.append(row)
        if evictable:
            self.policy.add(evictable)

    def lease(self, rows: list[int], chain: RequestChain) -> None:
        """Pin distinct ready blocks that the request of `chain` uses, until `unpin`."""
        self.pin(rows)
        self.policy.use(chain.in_order(rows, self.table), chain)

    def begin_loads(self, rows: Iterable[int]) -> None:
        """Note that an engine loads pinned blocks, until `end_loads`."""
        self._loads.update(rows)

    def end_loads(self, keys: Iterable[OffloadKey]) -> None:
        """End one load of each block of `keys` that an engine loads. The other pins of these blocks stay."""
        distinct = dict.fromkeys(keys)
        found = zip(distinct, self.index.get_many(distinct), strict=True)
        rows = [self.orphans.get(key) if row is None else row for key, row in found]
        loaded = [row for row in rows if row is not None and self._loads[row]]
        for row in loaded:
            self._loads[row] -= 1
            if not self._loads[row]:
                del self._loads[row]
        self.unpin(loaded)

    def release(self, rows: Collection[int]) -> None:
        """Free rows that no transfer uses, once they are in no index."""
        if self.writers:
            for row in rows:
                self.writers.pop(row, None)
        self.backend.free_rows(rows)

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
        events = list(self._events or ())
        if self._events:
            self._events.clear()
        return events

    def reset(self, *, is_reported: bool = True) -> None:
        """Forget every key. The rows of running transfers become free when the transfers end, others in later steps."""
        self.epoch += 1
        if self._events is not None and is_reported:  # an engine must learn of each removed block
            self._note_event([key for key, _ in self.index.items()], removed=True)
        old = self.index.take_all()
        ref_cnt = self.table.ref_cnt
        remains = self.policy.clear(row for _, row in old.items() if not ref_cnt[row])
        old.add(self.writing, self.writing.values())
        self.writing.clear()
        self.orphans.add(old, remains)
        self.orphans.sweep()

    def close(self, *, unmap: bool = True) -> None:
        """Forget every block, and unmap the region. Its memory stays mapped during transfers, or while views exist.

        Args:
            unmap: False if a tier may still write into the region.
        """
        is_in_use = self.orphans.are_in_use or bool(self.writing) or max(self.table.ref_cnt, default=0) > 0
        self.index.take_all()
        self.writing.clear()
        if unmap and not is_in_use:
            self.backend.region.close()
        else:
            self.backend.region.unlink()

    def snapshot(self) -> dict[str, int]:
        """Return counters of blocks and bytes. Any thread may call."""
        blocks, capacity = len(self), self.backend.num_blocks
        return {
            "used_blocks": blocks,
            "used_bytes": blocks * self.backend.block_size,
            "capacity_bytes": capacity * self.backend.block_size,
            "evicted_blocks_total": self.evicted_blocks,
        }

    def _note_event(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, self.backend.block_size, self.backend.medium, removed))
