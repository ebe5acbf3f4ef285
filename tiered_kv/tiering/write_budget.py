"""A write budget: the choice of blocks for a tier that may write only a number of bytes an hour.

It takes the place of `Admission` in a `GuardedTier`, on the scheduler's thread. The bytes that the tier moves inside
its storage count too. What must stay true: in any hour without a restart it admits no more than the budget. It prefers
groups of blocks that requests ask for again most often.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason
from tiered_kv.tiering.admission import Admission, Offer, Selection

MINUTE_S: Final = 60.0
WINDOW_MINUTES: Final = 61
"""Calendar minutes that cover any hour."""
AHEAD_MINUTES: Final = 10
"""Minutes over which unused budget is spent, about as long as a burst."""
RATE_WEIGHT: Final = 0.1
"""Weight of the last minute in the offer rates."""
FORGET: Final = 0.98
"""Factor for the counted returns each minute: they halve in half an hour."""
PRIOR_BLOCKS: Final = 64.0
"""Weight, in blocks, of the first estimate for each group: its blocks return as often as the blocks of all groups."""
OFFERS_MAX: Final = 1 << 16
"""Offers that are remembered, in about 20 MiB."""
REQUESTS_MAX: Final = 1 << 14
"""Decisions that are remembered, by request."""
SIZES: Final = (0.5, 1.0, 2.0)
"""Bounds of the size classes of requests: their number of new blocks, as a multiple of the mean."""
SHARED_HEAD: Final = 0.25
"""A request with fewer hits than this part of the mean may only share its head with others."""
MEAN_WEIGHT: Final = 0.01
"""Weight of a request in the two means: of its hits, and of its new blocks."""
HELD, LOST, NEW = range(3)
"""Groups. `HELD`: refused blocks that were used in the primary tier. `LOST`: blocks that the primary tier has lost.

`NEW` is the first group of new blocks. A request's known and new blocks are in separate groups. In one group they lost
3 % of the hits, at a quarter of the bytes.
"""
GROUPS: Final = NEW + 2 * (len(SIZES) + 1)


@dataclass(slots=True)
class _Offer:
    """Blocks that were offered together. Only one of them, the sample, is remembered by its key."""

    group: int
    count: int
    place: int
    """The sample's index in the offer."""
    is_stored: bool
    is_held: bool = False
    """Refused, and later used in the primary tier."""
    has_returned: bool = False
    """The sample was asked for after the primary tier had lost it."""


@dataclass(slots=True)
class _Request:
    """The decisions for a request."""

    group: int = -1
    """The group of its new blocks; negative before the first."""
    admitted: dict[int, bool] = field(default_factory=dict)
    """Whether its blocks are admitted, by group."""
    is_cut: bool = False
    """A block was refused, so that later blocks of the request are worthless."""


class WriteBudget(Admission):
    """Admits the requests that bring most hits for their bytes, within a rate.

    At most `hour_bytes` are admitted in any hour. Blocks that the tier moves count too, from the next minute on. The
    budget begins as if the hour before had used it up evenly. Blocks admitted before a restart are unknown, so an hour
    with a restart may have nearly twice the budget.

    All blocks of a request in one group are admitted, or none. After a refused block, all later blocks of the request
    are refused: without that block they are worthless.

    Each block belongs to a group. The budget learns how many blocks of each group are asked for again after the primary
    tier has lost them (*returns*). Each minute it chooses the groups with most returns.

    `moved_blocks` returns how many blocks the tier has relocated, and so written again, since the tier was opened.
    """

    reason = Reason.WRITE_BUDGET
    has_clock = True

    def __init__(
        self, hour_bytes: int, block_bytes: int, clock: Callable[[], float], moved_blocks: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__(admit_after=1)
        self.hour_bytes = hour_bytes
        self._block_bytes = block_bytes
        self._clock = clock
        self._moved_blocks, self._moved = moved_blocks, 0  # as of this minute's beginning
        self._minute = int(clock() // MINUTE_S)
        a_minute = hour_bytes // WINDOW_MINUTES
        # Bytes written in each of the last minutes, with moved blocks; this minute comes last.
        self._stored_bytes = deque([a_minute] * (WINDOW_MINUTES - 1) + [0])
        self.room_bytes = hour_bytes - sum(self._stored_bytes)
        """Bytes that may be stored now; negative if the tier has moved more than that."""
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._offers: OrderedDict[OffloadKey, _Offer] = OrderedDict()
        self._offered = 0  # blocks
        self._decided = 0  # requests with new blocks
        self._position_mean = self._count_mean = 0.0  # of requests' first new position, and number of new blocks
        self._minutes_seen = 0
        self._wanted = [0] * GROUPS  # blocks offered in this minute, up to the first refused one
        self._rates = [0.0] * GROUPS  # the rates of `_wanted`, in blocks a minute
        self._seen = [0.0] * GROUPS  # blocks offered, with decay
        self._returned = [0.0] * GROUPS  # blocks that were asked for again, with decay
        self._parts = [1.0] * GROUPS  # the part of each group that is admitted
        self._due = [0.0] * GROUPS  # accumulated parts: a request is admitted at 1

    def is_open(self) -> bool:
        return False

    def begin(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def select(self, offered: Offer, room: int, req_id: str) -> Selection:
        self.tick()
        request = self._request(req_id)
        known, group = self._known(offered)
        count = self._offer(offered.keys[:known], group, room, request) if known else 0
        if known < len(offered):
            if request.group < 0:
                position = offered.position_of(offered.rows[known])
                request.group = self._group_of(position, len(offered) - known)
            count += self._offer(offered.keys[known:], request.group, room - count, request)
        stored, rest = offered.part(0, count), offered.keys[count:]
        return Selection(stored, (), rest) if count == room else Selection(stored, rest, ())

    def note_hits(self, keys: Sequence[OffloadKey]) -> None:
        for offer in filter(None, map(self._offers.get, keys)):
            self._count_return(offer)

    def again(self, loaded: Offer, req_id: str) -> Offer:
        """Return the loaded blocks that were refused before."""
        places: set[int] = set()
        for place, key in enumerate(loaded.keys):
            offer = self._offers.get(key)
            if offer is not None and not offer.is_stored:
                offer.is_held = True
                start = place - offer.place
                places.update(range(max(start, 0), min(start + offer.count, len(loaded))))
        return loaded.at(sorted(places))

    def _request(self, req_id: str) -> _Request:
        if not req_id:
            return _Request()
        request = self._requests.setdefault(req_id, _Request())
        if len(self._requests) > REQUESTS_MAX:
            self._requests.popitem(last=False)
        return request

    def _known(self, offered: Offer) -> tuple[int, int]:
        """Return how many blocks at the head of an offer were offered before, and their group."""
        is_promoted = offered.is_promoted
        known, group = len(offered) if is_promoted else 0, HELD if is_promoted else LOST
        for place, key in enumerate(offered.keys):
            if key in self._offers:
                offer = self._offers.pop(key)
                known = max(known, place - offer.place + offer.count)
                if offer.is_held:
                    group = HELD
                else:
                    self._count_return(offer)
        return min(known, len(offered)), group

    def _group_of(self, position: int, count: int) -> int:
        """Return the group of a request's `count` new blocks, which begin at `position` of its prefix."""
        self._decided += 1
        weight = max(MEAN_WEIGHT, 1 / self._decided)
        self._position_mean += weight * (position - self._position_mean)
        self._count_mean += weight * (count - self._count_mean)
        turn = position > self._position_mean * SHARED_HEAD
        return NEW + turn * (len(SIZES) + 1) + bisect_right(SIZES, count / self._count_mean)

    def _offer(self, offered: Sequence[OffloadKey], group: int, room: int, request: _Request) -> int:
        """Offer blocks of one group; return how many of them, from the first on, are stored."""
        total, count = len(offered), 0
        if not request.is_cut:
            self._wanted[group] += total
            if group not in request.admitted:
                self._due[group] += self._parts[group]
                request.admitted[group] = self._due[group] >= 1.0
                self._due[group] -= request.admitted[group]
            if request.admitted[group]:
                count = min(total, room, max(0, self.room_bytes // self._block_bytes))
            request.is_cut = count < total
        self._charge(count)
        self._offered += total
        self._seen[group] += total
        place = self._offered % total
        self._offers[offered[place]] = _Offer(group, total, place, place < count)
        if len(self._offers) > OFFERS_MAX:
            self._offers.popitem(last=False)
        return count

    def _charge(self, blocks: int) -> None:
        """Subtract written blocks from the budget."""
        self._stored_bytes[-1] += blocks * self._block_bytes
        self.room_bytes -= blocks * self._block_bytes

    def _count_return(self, offer: _Offer) -> None:
        if not offer.has_returned:
            offer.has_returned = True
            self._returned[offer.group] += offer.count

    def snapshot(self) -> Mapping[str, int]:
        return {"write_budget_bytes": self.hour_bytes, "write_budget_used_bytes": self.hour_bytes - self.room_bytes}

    # Each minute.

    def tick(self) -> None:
        passed = int(self._clock() // MINUTE_S) - self._minute
        if passed <= 0:
            return
        self._minute += passed
        for _ in range(min(passed, WINDOW_MINUTES)):
            self.room_bytes += self._stored_bytes.popleft()
            self._stored_bytes.append(0)
        before, self._moved = self._moved, max(self._moved, self._moved_blocks())
        self._charge(self._moved - before)
        self._minutes_seen += passed
        weight = max(1 - (1 - RATE_WEIGHT) ** passed, passed / self._minutes_seen)
        for group, blocks in enumerate(self._wanted):
            self._rates[group] += weight * (blocks / passed - self._rates[group])
        self._wanted = [0] * GROUPS
        self._plan()
        self._seen = [FORGET * blocks for blocks in self._seen]
        self._returned = [FORGET * blocks for blocks in self._returned]

    def _plan(self) -> None:
        """Choose the part of each group that is admitted in the next minute: the groups with most returns first."""
        ahead_bytes = max(0, self.room_bytes + sum(islice(self._stored_bytes, AHEAD_MINUTES)))
        left = ahead_bytes / AHEAD_MINUTES / self._block_bytes  # blocks a minute
        prior = PRIOR_BLOCKS * sum(self._returned) / max(1.0, sum(self._seen))
        value = [(self._returned[group] + prior) / (self._seen[group] + PRIOR_BLOCKS) for group in range(GROUPS)]
        for group in sorted(range(GROUPS), key=value.__getitem__, reverse=True):
            rate = self._rates[group]
            self._parts[group] = 1.0 if rate <= left else left / rate
            left = max(0.0, left - rate)
