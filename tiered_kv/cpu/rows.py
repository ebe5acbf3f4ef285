"""The primary tier's rows: the row of each key, its pins, and evictions.

`TieringOffloadingManager` (`tiered_kv/tiering/manager.py`) and its parts call this, on the scheduler's thread. What
must stay true: only a block that is ready and without pins is evicted, and a row is free only once no transfer uses it.
It does not know requests: the writer of a block, and the order in which a request uses blocks, are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.orphans import Orphans, RowsOwner
from tiered_kv.cpu.policies import CachePolicy, make_policy
from tiered_kv.cpu.policies.checked import checked_policy
from tiered_kv.cpu.row_table import A_LOAD, ABSENT, in_writing, unwatched
from tiered_kv.cpu.rows_by_key import RowsByKey
from tiered_kv.cpu.writers import PROMOTED, PROMOTION, are_same

EVENTS_MAX = 1 << 16
"""Limit of events that wait for `take_events`; beyond it the oldest are lost."""
PROMOTION_ROWS_MAX = 8
"""Limit of rows that are evicted together when one block is promoted: the next blocks of its prefix find them free."""
_ROWS_SHARE = 512
"""For a promotion, at most one row in so many of the primary tier is evicted together."""
_GRANTED = OffloadKey(b"\0granted")
"""Stands for the key of a row that was granted without one."""


class PrimaryRows(RowsByKey):
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

    __slots__ = ()

    def __init__(self, backend: CPUBackend, policy: str | CachePolicy = "lru", *, enable_events: bool = False) -> None:
        super().__init__(backend.table)
        self.backend = backend
        policy = policy if isinstance(policy, CachePolicy) else make_policy(policy, self.table)
        self.policy = checked_policy(policy, self.table)
        self._ends_every_step = self.policy is not policy  # a built-in policy protects blocks only while it evicts
        self._has_evicted = False  # in this step
        self._allocated: dict[int, tuple[Sequence[OffloadKey], Sequence[int]]] = {}
        """What each writer got last, by its number, until `written_by` asks for it: keys and rows."""
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

    def find_absent(self, keys: Collection[OffloadKey]) -> tuple[list[OffloadKey], bool]:
        """Return the keys that can be stored, each once, and whether a block of another key is present.

        A present block is not evicted before the step ends, not even to store the tail of its own request.
        """
        get, step_of, step = self.index.get, self.step_of, self.step
        absent: dict[OffloadKey, None] = {}
        has_present = not self.index.keys().isdisjoint(keys)
        if has_present:
            for key in keys:
                row = get(key)
                if row is None:
                    absent[key] = None
                else:
                    step_of[row if row >= 0 else in_writing(row)] = step
        else:
            absent = dict.fromkeys(keys)
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
        if not keys:
            return []
        number = PROMOTED if writer is PROMOTION else self._writers.begin(writer, len(keys))
        rows = self.backend.allocate(keys, number, source)
        if len(rows) == 1:  # a promoted block: its hot path
            self.index[keys[0]] = in_writing(rows[0])
        else:
            self.index.update(zip(keys, [-2 - row for row in rows], strict=True))
        if number != PROMOTED:
            self._allocated[number] = list(keys), rows
            self._note_use(rows)
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
        stored, adopted, unused = list[OffloadKey](), list[int](), list[int]()
        index, key_of = self.index, self.table.key
        for key, row in zip(keys, rows, strict=True):
            if key in index or self.is_orphaned(key):
                unused.append(row)
                continue
            key_of[row] = key
            index[key] = in_writing(row)
            stored.append(key)
            adopted.append(row)
        if adopted:
            number = self._writers.begin(writer, len(adopted))
            for row in adopted:
                self.ref_cnt[row] = number
        self._note_use(adopted)
        self.policy.admit(chain.in_order(adopted, self.table), chain)
        chain.extend(adopted, self.table)
        return stored, unused

    def touch(self, keys: Collection[OffloadKey], chain: RequestChain) -> None:
        """Note that the request of `chain` uses the blocks of `keys`, in any state."""
        rows = self.ready(keys)
        if len(rows) < len(keys):
            rows = [row if row >= 0 else -2 - row for row in map(self.index.get, keys) if row is not None]
        if len(set(rows)) < len(rows):
            rows = list(dict.fromkeys(rows))
        if rows:
            self._note_use(rows)
            self.policy.use(chain.in_order(rows, self.table), chain)

    def _make_room(self, count: int, chain: RequestChain, evicted: list[OffloadKey], *, ahead: int = 0) -> bool:
        missing = count - self.backend.get_num_free_blocks()
        if missing > 0 and self.orphans.unswept:
            self.orphans.make_room(missing)
            missing = count - self.backend.get_num_free_blocks()
        if missing > 0:
            self.policy.use((), chain)
            victims = self._victims(missing, chain, ahead=ahead)
            if victims is None and self.give_way is not None and self.give_way(missing):
                victims = self._victims(missing, chain, ahead=ahead)
            if victims is None:
                return False
            key_of, index = self.table.key, self.index
            gone = [key_of[row] for row in victims]
            for key in gone:
                del index[key]
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

    def written_by(self, writer: str, keys: Collection[OffloadKey]) -> list[int]:
        """Return the rows of `keys` that this request was to write; free those that a reset has removed.

        If the engine gives positions, the returned rows are in the order of the prefix.
        """
        number, ref_cnt = self._writers.number_of(writer), self.ref_cnt
        if not number:
            return []
        allocated, rows = self._allocated.pop(number, ((), ()))
        written = list(rows) if are_same(keys, allocated) else []  # most often it names what it got last
        if self.orphans.exist or not written or [ref_cnt[row] for row in written].count(number) < len(written):
            found = map(self.index.get, dict.fromkeys(keys), repeat(ABSENT))
            written = [row for each in found if each < -1 and ref_cnt[row := -2 - each] == number]
        if self.orphans.exist:
            for row in self.orphans.rows_of(dict.fromkeys(keys)):
                if ref_cnt[row] == number and self.orphans.remove(row):
                    self.release((row,))
        chain = self.table.chain[written[0]] if written else None
        if chain is not None and chain.step > 1:
            written.sort(key=self.table.position.__getitem__)
        return written

    def commit(self, rows: Sequence[int], keys: Sequence[OffloadKey], pins: int = 0) -> None:
        """Make blocks ready that one writer has written, pinned `pins` times. `note_stored` makes the event."""
        ref_cnt = self.ref_cnt
        self._end_writing(ref_cnt[rows[0]], len(rows))
        self.index.update(zip(keys, rows, strict=True))
        for row in rows:
            ref_cnt[row] = pins
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
        if self.index.get(key) == in_writing(row):
            del self.index[key]
        else:
            self.orphans.remove(row)
        self.table.chain[row] = None

    def pin(self, rows: Collection[int]) -> None:
        """Pin ready blocks; one that appears twice is pinned twice."""
        ref_cnt = self.ref_cnt
        self.policy.remove([row for row in dict.fromkeys(rows) if not ref_cnt[row]])
        for row in rows:
            ref_cnt[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Remove one pin from each block. Without pins a block becomes evictable, or free if it was forgotten."""
        ref_cnt, unused = self.ref_cnt, list[int]()
        for row in rows:
            ref_cnt[row] = count = ref_cnt[row] - 1
            if count <= 0:
                assert not count, "unpinned more often than pinned"
                unused.append(row)
        self._end_use(unused)

    def lease(self, rows: list[int], chain: RequestChain) -> None:
        """Pin distinct ready blocks that the request of `chain` uses, until `unpin`."""
        self.pin(rows)
        self._note_use(rows)
        self.policy.use(chain.in_order(rows, self.table), chain)

    def begin_loads(self, rows: list[int], chain: RequestChain) -> None:
        """Pin distinct ready blocks that an engine loads for the request of `chain`, until `end_loads`."""
        ref_cnt, load = self.ref_cnt, A_LOAD
        self._note_use(rows)
        unused = [row for row in rows if not ref_cnt[row]]
        if unused:
            self.policy.remove(unused)
        if len(unused) == len(rows):
            for row in rows:
                ref_cnt[row] = load
        else:
            held_once = load + 1  # as a promoted block is held for its request: few objects
            for row in rows:
                count = ref_cnt[row]
                ref_cnt[row] = held_once if count == 1 else count + load
        self.policy.use(chain.in_order(rows, self.table), chain)

    def end_loads(self, keys: Iterable[OffloadKey]) -> None:
        """End one load of each block of `keys` that an engine loads. The other pins of these blocks stay."""
        ref_cnt, load, distinct = self.ref_cnt, A_LOAD, dict.fromkeys(keys)
        rows = self.ready(distinct)
        if self.orphans.exist:
            rows += self.orphans.rows_of(distinct)
        unused = []
        for row in rows:
            count = ref_cnt[row]
            if count == load:
                ref_cnt[row] = 0
                unused.append(row)
            elif count > load:
                ref_cnt[row] = count - load
        self._end_use(unused)

    def _end_use(self, rows: list[int]) -> None:
        """Make blocks evictable that have lost their last pin; free those from before a reset."""
        if self.orphans.exist:
            orphaned = list(filter(self.orphans.remove, rows))
            self.release(orphaned)
            gone = set(orphaned)
            rows = [row for row in rows if row not in gone]
        if rows:
            self.policy.add(rows)

    def release(self, rows: Collection[int]) -> None:
        """Free rows that no transfer uses, once they are in no index."""
        ref_cnt = self.ref_cnt
        for row in rows:
            if ref_cnt[row] < -1:
                self._end_writing(ref_cnt[row], 1)
        self.backend.free_rows(rows)

    def _end_writing(self, number: int, rows: int) -> None:
        if number != PROMOTED and not self._writers.end(number, rows):
            self._allocated.pop(number, None)

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
            self._note_event([key for key, row in self.index.items() if row >= 0], removed=True)
        old, self.index = self.index, unwatched({})
        self.orphans.add(old, self.policy.clear(row for row in old.values() if row >= 0 and not self.ref_cnt[row]))
        self.orphans.sweep()

    def close(self, *, unmap: bool = True) -> None:
        """Forget every block, and unmap the region. Its memory stays mapped during transfers, or while views exist.

        Args:
            unmap: False if a tier may still write into the region.
        """
        is_in_use = self.orphans.are_in_use or any(row < 0 or self.ref_cnt[row] for row in self.index.values())
        self.index.clear()
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
