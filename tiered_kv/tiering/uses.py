"""Uses of blocks in the primary tier: they are reported to the secondary tiers, and missing blocks are offered again.

The manager notes uses, and reports them to every tier a few times a second, on its thread. Otherwise a tier never sees
the use of a block that requests find in the primary tier, and would evict the block as unused. A used block that a tier
lacks was refused, failed or evicted. It is offered again while the tier stores nothing. The keys that wait have a
limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.hints import DEFAULT_TENANT
from tiered_kv.tiering.admission import Offer
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob

INTERVAL_S: Final = 0.25
"""Seconds between two reports of uses to the tiers, at most."""
STORED_SHARE: Final = 4
"""A report comes sooner once as many blocks were stored as the primary tier has rows, divided by this. Stores make
tiers evict."""
NOTED_MAX: Final = 4096
"""Keys that are gathered for a report; the last call may exceed it. Later keys are not noted: hot blocks come again."""
TOLD_AT_ONCE: Final = 512
"""Keys of most reports. Reported keys are left out of reports until all other keys have been in a report."""
LACKED_MAX: Final = 1 << 16
"""Limit of the refused or failed blocks that are remembered for each tier; the primary tier's rows are a limit, too."""
WANTED_MAX: Final = 4096
"""Blocks that wait to be offered again to a tier."""
PAUSE_MAX_S: Final = 64.0
"""The longest pause, in seconds, after a failed store. The first pause is 1 s; each further failure doubles it."""
EVICTED_SHARE: Final = 4
"""One row in so many of the primary tier may be stored again at once because a tier has evicted its block. Over time it
is one primary tier an hour: a tier that is smaller than the hot blocks must not be written without end."""
_EVICTED_MIN: Final = 64
_HOUR_S: Final = 3600.0


class Uses:
    """Gathers uses, reports them to the tiers, and offers blocks that a tier lacks. Owned by the manager's thread."""

    def __init__(self, rows: PrimaryRows, tiers: Sequence[GuardedTier], clock: Callable[[], float]) -> None:
        self._tiers = [_Lacked(guarded, rows, clock) for guarded in tiers]
        self._noted: list[list[OffloadKey]] = []  # the keys of each call, until the next report
        self._room = NOTED_MAX if tiers else 0  # keys that may still be noted
        self._told: set[OffloadKey] = set()  # reported keys that are left out of reports for now
        self.due_s = 0.0 if tiers else math.inf
        """When `act` has something to do; in the past while blocks wait to be offered again."""
        self._tell_s = self.due_s
        self._stores_max = max(1, rows.backend.num_blocks // STORED_SHARE)
        self._stores_left = self._stores_max
        """How many further blocks must be stored before the next report comes at once."""

    def note(self, keys: Collection[OffloadKey]) -> None:
        """Note that a request uses blocks, which may be in the primary tier. Hot path: runs for each load."""
        if self._room > 0:
            self._room -= len(keys)
            self._noted.append([*keys])

    def count_stored(self, blocks: int) -> None:
        """Note that a request has stored blocks."""
        self._stores_left -= blocks
        if self._stores_left <= 0 and self._tell_s < math.inf:
            self._tell_s = self.due_s = 0.0

    def act(self, now_s: float) -> None:
        """Report uses to the tiers if a report is due, and offer missing blocks to tiers that store nothing now."""
        if now_s >= self._tell_s:
            self.tell(now_s)
        for lacked in self._tiers:
            if lacked.wanted:
                lacked.offer(now_s)
        self._set_due()

    def tell(self, now_s: float, most: int | None = TOLD_AT_ONCE) -> None:
        """Touch the noted blocks in every tier, and find out which of these blocks the tier lacks."""
        if self._tell_s == math.inf:
            return
        self._tell_s, self._stores_left = now_s + INTERVAL_S, self._stores_max
        if self._noted:
            noted, self._noted, self._room = self._noted, [], NOTED_MAX
            told = self._told
            # The last use first, each use in the order of its prefix: see `SecondaryTierManager.touch`.
            keys = [key for key in dict.fromkeys(itertools.chain.from_iterable(reversed(noted))) if key not in told]
            if most is not None and len(keys) > most and len(told) < WANTED_MAX:
                del keys[most:]
                told.update(keys)
            else:
                del keys[NOTED_MAX:]
                told.clear()
            for lacked in self._tiers:
                lacked.tell(keys)
        for lacked in self._tiers:
            lacked.take_absent(now_s)
        self._set_due()

    def clear(self) -> None:
        """Forget all blocks, at a reset."""
        if self._noted:
            self._noted, self._room = [], NOTED_MAX
        self._told.clear()
        for lacked in self._tiers:
            lacked.clear()

    def stop(self) -> None:
        """Report and offer nothing any more: the tiers are being closed."""
        self.clear()
        self._room, self._tell_s = 0, math.inf
        self.due_s = math.inf

    def _set_due(self) -> None:
        self.due_s = -math.inf if any(lacked.wanted for lacked in self._tiers) else self._tell_s


class _Lacked:
    """The used blocks that one tier lacks. This object is the `JobOwner` of their stores."""

    def __init__(
        self,
        guarded: GuardedTier,
        rows: PrimaryRows,
        clock: Callable[[], float],
    ) -> None:
        self._guarded = guarded
        self._rows = rows
        self._clock = clock
        num_rows = rows.backend.num_blocks
        self.wanted: dict[OffloadKey, None] = {}
        if guarded.admission.is_open():  # otherwise `Cascade` offers refused blocks again when they are loaded
            guarded.lacking_max = min(num_rows, LACKED_MAX)
        self._pause_s = self._after_s = 0.0  # the last pause, and when it ends
        self._evicted_max = max(num_rows // EVICTED_SHARE, _EVICTED_MIN)  # blocks; `_evicted_room` are left now
        self._evicted_room, self._evicted_s = float(self._evicted_max), clock()
        self._refill = num_rows / _HOUR_S
        """How fast `_evicted_room` grows, in blocks a second."""
        self._reports_absent = guarded.overrides("take_absent")
        self._is_told = guarded.overrides("touch")

    def tell(self, keys: list[OffloadKey]) -> None:
        if keys and self._is_told:
            self._guarded.call("touch", keys.copy(), ReqContext())
        lacking = self._guarded.lacking
        if lacking:
            self._want([key for key in keys if key in lacking])

    def take_absent(self, now_s: float) -> None:
        """Note which touched blocks the tier has not found."""
        if not self._reports_absent or not (absent := self._guarded.take_absent()):
            return
        self._evicted_room = min(
            self._evicted_max, self._evicted_room + max(0.0, now_s - self._evicted_s) * self._refill
        )
        self._evicted_s = now_s
        if self._guarded.lacking_max and self._evicted_room >= 1:
            jobs = self._guarded.jobs.values()
            in_flight = {key for job in jobs if not job.metadata.is_promotion for key in job.metadata.keys}
            new = [key for key in absent if key not in in_flight and self._may_store(key) is not None]
            del new[int(self._evicted_room) :]
            self._evicted_room -= len(new)
            self._want(new)

    def offer(self, now_s: float) -> None:
        """Submit one store of wanted blocks, if the tier stores nothing now."""
        guarded = self._guarded
        if guarded.stores.blocks or now_s < self._after_s or (room := guarded.store_room()) <= 0:
            return
        room = min(room, max(1, guarded.stores.blocks_max // 2))  # new blocks get the other half
        offer, table = Offer([], [], self._rows.table.position.__getitem__), self._rows.table
        tenant, tenant_of = "", table.tenant if guarded.has_shares else _no_tenant
        while self.wanted and len(offer) < room:
            key = next(iter(self.wanted))
            if (row := self._may_store(key)) is not None:
                if (own := tenant_of(row)) != (tenant := tenant or own):
                    break
                offer.keys.append(key)
                offer.rows.append(row)
            del self.wanted[key]
            guarded.lacking.pop(key, None)
        context = ReqContext()
        offer.is_promoted = bool(offer.rows and table.source[offer.rows[0]])
        taken = guarded.select(offer, context) if offer else offer
        if taken:
            self._rows.pin(taken.rows)
            guarded.account.offered_again(len(taken))
            if guarded.submit(taken.keys, taken.rows, context, self, is_promotion=False, tenant=tenant) is None:
                self._rows.unpin(taken.rows)
                self._pause()

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Release the blocks of a store; see `JobOwner`."""
        self._rows.unpin(job.rows)
        if result.success:
            self._pause_s = 0.0
        elif not job.is_expired:
            self._pause()

    def expired(self, job: SubmittedJob) -> None:
        """Keep the blocks pinned until the store has ended."""
        self._pause()

    def clear(self) -> None:
        self.wanted.clear()
        self._guarded.lacking.clear()

    def _pause(self) -> None:
        self._pause_s = min(max(1.0, 2 * self._pause_s), PAUSE_MAX_S)
        self._after_s = self._clock() + self._pause_s

    def _want(self, keys: Iterable[OffloadKey]) -> None:
        self.wanted.update(dict.fromkeys(keys))
        while len(self.wanted) > WANTED_MAX:
            self.wanted.popitem()

    def _may_store(self, key: OffloadKey) -> int | None:
        """Return the row of a ready block; None if there is none, or if a setting keeps it out of this tier."""
        row = self._rows.row_of(key)
        if row is None:
            return None
        is_above = self._guarded.number < self._rows.table.source[row]
        return None if is_above and not self._guarded.settings.fill_on_promotion else row


def _no_tenant(row: int) -> str:
    return DEFAULT_TENANT
