"""A write budget: which requests' blocks a tier stores where it may store only so many bytes an hour."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import HOURS_A_DAY
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.tiering.admission import Admission, Selection

MINUTE_S: Final = 60.0
WINDOW_MINUTES: Final = 61
"""Any hour lies within so many minutes of the clock."""
AHEAD_MINUTES: Final = 10
"""What is left over is spent within so many minutes."""
RATE_WEIGHT: Final = 0.1
"""Weight of the last minute in the rates at which blocks are offered."""
FORGET: Final = 0.98
"""What the evidence of returns counts for, each minute: it halves in half an hour."""
PRIOR_BLOCKS: Final = 64.0
"""Blocks that the prior counts for in each group: as likely to return as those of all groups."""
LIFETIMES: Final = 11
"""Lifetimes that are told apart: two for each doubling, from the time in which as much is offered as the tier holds."""
OFFERS_MAX: Final = 1 << 16
"""Offers that are remembered, in about 20 MiB."""
REQUESTS_MAX: Final = 1 << 14
"""Requests whose decision is remembered."""
SIZES: Final = (0.5, 1.0, 2.0)
"""Limits between the numbers of new blocks that are told apart, as multiples of their mean."""
SHARED_HEAD: Final = 0.25
"""A request with fewer hits, as a part of their mean, may only share its head with others."""
MEAN_WEIGHT: Final = 0.01
"""Weight of a request in these means."""
HELD, LOST, NEW = range(3)
"""Groups: blocks that were refused and are used in the primary tier, those that it had lost, and the first new ones."""
GROUPS: Final = NEW + 2 * (len(SIZES) + 1)


def admission_of(
    settings: TierSettings, block_bytes: int, clock: Callable[[], float], moved_blocks: Callable[[], int]
) -> Admission:
    """Return what admits blocks to a tier with these settings; the rest is as for `WriteBudget`."""
    if settings.write_budget is None:
        return Admission(settings.admit_after)
    capacity = getattr(settings, "capacity", None)  # a stranger's may be anything
    capacity_bytes = capacity if isinstance(capacity, int) else None
    return WriteBudget(settings.write_budget // HOURS_A_DAY, block_bytes, capacity_bytes, clock, moved_blocks)


@dataclass(slots=True)
class _Offer:
    """Blocks that were offered together, by the one of them that is looked for.

    Attributes:
        group: Their group.
        count: How many they are.
        place: That of the one among them.
        since: How many blocks had been offered before.
        is_stored: Whether they were admitted.
        is_held: Whether they were refused, and found in the primary tier.
        has_returned: Whether the primary tier had lost one of them when it was asked for.
    """

    group: int
    count: int
    place: int
    since: int
    is_stored: bool
    is_held: bool = False
    has_returned: bool = False


@dataclass(slots=True)
class _Request:
    """What was decided of a request.

    Attributes:
        group: Of its new blocks; negative before the first.
        admitted: The groups that were decided on, and how.
        is_cut: Whether a block of it was refused, so that those behind it are worthless.
    """

    group: int = -1
    admitted: dict[int, bool] = field(default_factory=dict)
    is_cut: bool = False


class WriteBudget(Admission):
    """Admits the requests whose blocks bring most hits for their bytes, as far as the rate of storing allows.

    In no hour more than `hour_bytes` are admitted. Blocks that the tier moves count as admitted, from the next minute
    on. The budget begins as after an hour in which it was used up evenly. What was admitted before a restart is not
    known: an hour with one may have nearly twice as much.

    All blocks of a request that are in one group are admitted, or none. Behind one that is refused all of the request
    are refused: without those before them they are worthless.

    What is learned is how many blocks of each group are asked for again after the primary tier has lost them. Each
    minute the groups with most returns are chosen, as far as the budget allows. If storing less would bring more hits,
    because blocks would stay in the tier for longer, less is stored.

    Args:
        hour_bytes: The most bytes that may be stored in an hour.
        block_bytes: Bytes of a block.
        capacity_bytes: Bytes of the tier; None where nobody knows.
        clock: Seconds, of a monotonic clock.
        moved_blocks: Returns how many blocks the tier has moved, and so written again, since it was opened.
    """

    reason = "write_budget"

    def __init__(
        self,
        hour_bytes: int,
        block_bytes: int,
        capacity_bytes: int | None,
        clock: Callable[[], float],
        moved_blocks: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(admit_after=1)
        self.hour_bytes = hour_bytes
        self._block_bytes = block_bytes
        self._capacity_blocks = None if capacity_bytes is None else max(1, capacity_bytes // block_bytes)
        self._clock = clock
        self._moved_blocks, self._moved = moved_blocks, 0  # as of this minute's beginning
        self._minute = int(clock() // MINUTE_S)
        a_minute = hour_bytes // WINDOW_MINUTES
        self._stored_bytes = deque([a_minute] * (WINDOW_MINUTES - 1) + [0])  # in the last minutes, moved ones too
        self.room_bytes = hour_bytes - sum(self._stored_bytes)
        """Bytes that may be stored now; below zero once more has moved than there was room for."""
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._offers: OrderedDict[OffloadKey, _Offer] = OrderedDict()
        self._offered = 0  # blocks
        self._decided = 0  # requests with new blocks
        self._position_mean = self._count_mean = 0.0
        self._minutes_seen = 0
        self._offered_before = 0  # this minute
        self._rate = 0.0  # blocks a minute
        self._wanted = [0] * GROUPS  # in this minute, but for those behind a refused one
        self._rates = [0.0] * GROUPS  # of these
        self._seen = [0.0] * GROUPS
        self._returned = [[0.0] * LIFETIMES for _ in range(GROUPS)]  # by the lifetime that they needed
        self._parts = [1.0] * GROUPS  # of each group, that are admitted
        self._due = [0.0] * GROUPS

    def is_open(self) -> bool:
        return False

    def begin(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def select(self, offered: list[CPUBlock], room: int, req_id: str) -> Selection:
        self.tick()
        request = self._request(req_id)
        known, group = self._known(offered)
        count = self._offer(offered[:known], group, room, request) if known else 0
        if known < len(offered):
            if request.group < 0:
                request.group = self._group_of(offered[known].position, len(offered) - known)
            count += self._offer(offered[known:], request.group, room - count, request)
        stored, rest = offered[:count], offered[count:]
        return Selection(stored, [], rest) if count == room else Selection(stored, rest, [])

    def note_hits(self, keys: Sequence[OffloadKey]) -> None:
        for offer in filter(None, map(self._offers.get, keys)):
            self._count_return(offer)

    def again(self, loaded: list[CPUBlock], req_id: str) -> list[CPUBlock]:
        """Return those blocks that a request has loaded from elsewhere and that were refused before."""
        places: set[int] = set()
        for place in [place for place, block in enumerate(loaded) if block.key in self._offers]:
            offer = self._offers[loaded[place].key]
            if not offer.is_stored:
                offer.is_held = True
                start = place - offer.place
                places.update(range(max(start, 0), min(start + offer.count, len(loaded))))
        return [loaded[place] for place in sorted(places)]

    def _request(self, req_id: str) -> _Request:
        request = self._requests.get(req_id)
        if request is None:
            request = _Request()
            if req_id:
                self._requests[req_id] = request
                if len(self._requests) > REQUESTS_MAX:
                    self._requests.popitem(last=False)
        return request

    def _known(self, offered: Sequence[CPUBlock]) -> tuple[int, int]:
        """Return how many of the blocks, from the first on, were offered before, and the group of those."""
        is_promoted = bool(offered and offered[0].source)
        known, group = len(offered) if is_promoted else 0, HELD if is_promoted else LOST
        for place in [place for place, block in enumerate(offered) if block.key in self._offers]:
            offer = self._offers.pop(offered[place].key)
            known = max(known, place - offer.place + offer.count)
            if offer.is_held:
                group = HELD
            else:
                self._count_return(offer)
        return min(known, len(offered)), group

    def _group_of(self, position: int, count: int) -> int:
        """Return the group of new blocks by what a request has before them, and by their number."""
        self._decided += 1
        weight = max(MEAN_WEIGHT, 1 / self._decided)
        self._position_mean += weight * (position - self._position_mean)
        self._count_mean += weight * (count - self._count_mean)
        turn = position > self._position_mean * SHARED_HEAD
        return NEW + turn * (len(SIZES) + 1) + bisect_right(SIZES, count / self._count_mean)

    def _offer(self, offered: Sequence[CPUBlock], group: int, room: int, request: _Request) -> int:
        """Count blocks of one group, and return how many of them are stored: at most `room`."""
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
        self._offers[offered[place].key] = _Offer(group, total, place, self._offered, place < count)
        if len(self._offers) > OFFERS_MAX:
            self._offers.popitem(last=False)
        return count

    def _charge(self, blocks: int) -> None:
        """Count blocks that are written."""
        self._stored_bytes[-1] += blocks * self._block_bytes
        self.room_bytes -= blocks * self._block_bytes

    def _count_return(self, offer: _Offer) -> None:
        if not offer.has_returned:
            offer.has_returned = True
            self._returned[offer.group][self._lifetime(self._offered - offer.since)] += offer.count

    def _lifetime(self, age_blocks: int) -> int:
        """Return the number of the shortest lifetime in which a tier keeps a block for so many others."""
        number, capacity = 0, float(self._capacity_blocks or age_blocks + 1)
        while age_blocks > capacity and number < LIFETIMES - 1:
            number, capacity = number + 1, capacity * 2**0.5
        return number

    def counted(self) -> Mapping[str, int]:
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
        rates = self._rates
        for group, blocks in enumerate(self._wanted):
            rates[group] += weight * (blocks / passed - rates[group])
        self._rate += weight * ((self._offered - self._offered_before) / passed - self._rate)
        self._wanted, self._offered_before = [0] * GROUPS, self._offered
        self._plan()
        self._seen = [FORGET * blocks for blocks in self._seen]
        self._returned = [[FORGET * blocks for blocks in group] for group in self._returned]

    def _plan(self) -> None:
        """Choose the part of each group that is admitted in the next minute."""
        ahead_bytes = max(0, self.room_bytes + sum(islice(self._stored_bytes, AHEAD_MINUTES)))
        most = min(self._rate, ahead_bytes / AHEAD_MINUTES / self._block_bytes)
        best = 0.0
        for lifetime in range(LIFETIMES if self._capacity_blocks else 1):
            hits, parts = self._chosen(min(most, self._rate * 2 ** (-lifetime / 2)))
            if hits > best or not lifetime:
                best, self._parts = hits, parts

    def _chosen(self, blocks: float) -> tuple[float, list[float]]:
        """Return the hits a minute if `blocks` a minute are admitted, and the part of each group that is."""
        lifetime = 0
        while lifetime < LIFETIMES - 1 and blocks * 2 ** ((lifetime + 1) / 2) <= self._rate:
            lifetime += 1
        returned = [sum(group[: lifetime + 1]) for group in self._returned]
        mean = sum(returned) / max(1.0, sum(self._seen))
        values = [
            (count + PRIOR_BLOCKS * mean) / (seen + PRIOR_BLOCKS)
            for count, seen in zip(returned, self._seen, strict=True)
        ]
        hits, parts = 0.0, [1.0] * GROUPS
        for group in sorted(range(GROUPS), key=values.__getitem__, reverse=True):
            admitted = self._rates[group]
            if admitted > blocks + 1e-6:  # the sum of all rates may be a little more than that of all blocks
                parts[group], admitted = blocks / admitted, blocks
            hits += admitted * values[group]
            blocks -= admitted
        return hits, parts
