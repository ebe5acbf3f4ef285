"""Learned hit density, by tail: evicts the blocks with the fewest expected hits for their room and time.

`PrimaryRows` calls it, on the scheduler's thread. It holds evictable blocks only, and the number of the tier's blocks
bounds its memory.

After N. Beckmann, H. Chen and A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018). Their
unit is an object. Here it is a tail (`tails.py`): the blocks that one request was the last to use.
`tiered_kv/cpu/hit_density.py` computes the estimates. The constants are round numbers, chosen on the trace and the
workloads of docs/explanation/hit-rates.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.hit_density import AGES_PER_TURNOVER, BUCKETS, EDGES, HitDensity
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.cpu.policies.tails import Tail, TailOrder, runs_of
from tiered_kv.cpu.row_table import NO_KEY, RowTable
from tiered_kv.hints import Hints

LEARN_EVERY = 64
"""Requests between two computations of the densities."""
DECAY = 0.94
"""Factor of the evidence at each computation: the evidence halves in 11 computations, about 720 requests.

With 6,000 requests, changing loads (`phases`) hit 5 % less than with `lru`; with 420, the trace hit up to 2 % less.
"""
GHOSTS_MIN = 100
GHOST_BLOCKS = 8
"""Limit of remembered evicted tails: `GHOSTS_MIN`, and one more for each `GHOST_BLOCKS` blocks of the tier.

One for 32 blocks lost up to 9 % of the hits of small tiers.
"""
TURNS = 4
"""Classes of turns: 0, 1, 2, and more. Two classes lost up to 2 % of the hits."""
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Limits between the classes of sizes, as multiples of the mean number of new blocks.

Three classes lost up to 2 % of the hits.
"""
KINDS = 2
"""Kinds at the start: tails of one request, and shared tails."""
KIND_GROUPS = TURNS * (len(SIZES) + 1)  # one group for each class of turns and of sizes
SLACK_BLOCKS = 1
"""Blocks at a prompt's end that the next turn may not use: the last block of a prompt is often not full."""
MEAN_WEIGHT = 0.01
"""Weight of a request in the mean number of new blocks, and in the mean priority."""
RETURNS_S = (2.0, 8.0, 32.0, 128.0, 512.0)
"""Limits between the classes of the hint `expect_return`. Each class is a kind. Only factors of four were tried."""
PACES_S = (8.0, 16.0, 32.0)
"""Limits between the classes of a session's pace: the mean logarithm of the gaps between its requests. The last gap
counts half.

Each class is a kind, for each class of hints. New sessions have the first class. Without the second limit, or by the
last gap alone, small tiers of coding agents hit 1 to 2 points less without hints.
"""
CORRECTED = (math.log(6.0), math.log(60.0))
"""Logarithms of two factors. A session's predictions are corrected if its returns are later or sooner than predicted by
more than the first factor. Beyond the second factor its clock says nothing: a replay may run faster than its trace.

With a first factor of 4, predictions that are wrong at random would cost 0.8 points more.
"""
SOONEST_S = 0.1
"""Least gap between two requests of a session: a shorter gap counts as this one, which is short for every class."""
PRIORITY_WEIGHT = 2.0
"""Factor of a hit's value for each priority above the mean.

The fifth of the requests with priority 1 gains 0.9 points and the others lose 0.2; with a factor of 2.7, 1.5 and 0.5.
"""
EXPIRED, EXPIRED_WEIGHT = (-1, 0, 0), 0.1
"""The kind of tails that are older than their hint `ttl`, and their hits' value. With 1 the hits are the same."""
_since = attrgetter("since")


class DensityPolicy(CachePolicy):
    """Evicts from the tail with the lowest hit density, learned from the requests so far."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._admitted = 0  # blocks since a request last began
        self._admitted_mean = 0.0
        self._begun = 0  # requests so far
        self._now = 0.0  # admitted blocks and begun requests, in units of age: `AGES_PER_TURNOVER` for each turnover
        self._new_blocks = 0  # since a request last began
        self._new_blocks_mean = 1.0
        self._ghosts: OrderedDict[OffloadKey, Tail] = OrderedDict()  # evicted tails, by their first evicted block
        self._aging: list[deque[Tail]] = [deque() for _ in range(BUCKETS)]  # tails by bucket, the oldest first
        self._density = HitDensity(KINDS, KIND_GROUPS, decay=DECAY)
        self._order = TailOrder(table, self._density.level)
        self._kinds = {(0, 0, 0): 0}  # the kinds of own tails, by class of `expect_return`, priority and pace
        self._priority_mean = 0.0

    def __len__(self) -> int:
        return self._order.size

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        own: Tail = chain.note or self._begin(chain)
        own.is_storing = own.is_storing or not rows or not self.table.source[rows[0]]
        new, key_of = len(rows), self.table.key
        self._admitted += new
        for row in rows if self._ghosts else ():
            tail = self._ghosts.pop(key_of[row], None)
            if tail is not None:
                new -= tail.lost
                if not own.turn:
                    own.turn = tail.turn + 1
                    if not tail.is_shared:  # else not of this session alone
                        self._correct(own, tail, chain.hints)
                self._returned(tail, tail.lost)
                tail.lost, tail.ghost = 0, NO_KEY
        own.new_blocks += new
        self._new_blocks += new

    def add(self, rows: Collection[int]) -> None:
        for tail in self._order.add(rows):
            self._file(tail)

    def remove(self, rows: Collection[int]) -> None:
        self._order.take_out(rows)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: the policy's own
        return self._order.clear()

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        own: Tail = chain.note or self._begin(chain)
        table = self.table
        chain_of, position_of, ref_cnt = table.chain, table.position, table.ref_cnt
        if all(chain_of[row] is chain for row in rows):
            return
        runs = [(tail, run) for tail, run in runs_of(rows, table) if chain_of[run[0]] is not chain]
        held = self._order.take_out([row for row in rows if ref_cnt[row] <= 0])
        cut = -1  # the row of the last block that is shared
        is_late = own.is_storing or own.end > 0  # others stored these blocks after it had begun: no hits
        if runs and is_late:
            own.turn = max(own.turn, *(tail.turn for tail, _ in runs))
        elif runs:
            # A request that continues from the end of another's tail takes it over. Otherwise the used part is shared.
            source, run = runs[-1]
            cut = run[-1]
            if not source.is_shared and position_of[cut] >= source.end - (1 + SLACK_BLOCKS) * source.step:
                own.turn = source.turn + 1
                self._correct(own, source, chain.hints)
                source, cut = (runs[-2][0], runs[-2][1][-1]) if len(runs) > 1 else (source, -1)
            if cut >= 0:
                turn = source.turn + 1 if source.is_shared else 1
                own.shared = Tail(own.number, own.since, is_shared=True, turn=turn, kind=1)
        for tail, run in runs:
            self._returned(tail, tail.count([position_of[row] for row in run]), is_late)
            self._order.hang(tail, run[-1])
        chain.take(rows, table)
        if own.shared is not None and cut >= 0:
            self._order.hang(own, cut)
            own.start = own.end = own.shared.end = position_of[cut] + 1
        self.add(held)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        if count > len(self):
            return None
        own: Tail | None = spare.note if spare is not None else None
        # A request that stores has loaded its blocks before. So they leave like others: the last stored first.
        spared = [] if own is None else [tail for tail in (own.shared, not own.is_storing and own) if tail]
        cuts = self._order.pop(count, step, spared)
        if cuts is None:
            return None
        self._remember(cuts)
        return [row for _, cut in cuts for row in cut]

    def end_step(self) -> None:
        self.add(self._order.end_step())

    def heat(self, row: int) -> tuple[float, float]:
        chain = self.table.chain[row]
        own: Tail | None = None if chain is None else chain.note
        if own is None:
            return -math.inf, 0.0
        heat = self._heat_of(own)
        if own.shared is not None and self.table.position[row] < own.start:
            return max(heat, self._heat_of(own.shared))  # it stays while the tail behind it does
        return heat

    def _heat_of(self, tail: Tail) -> tuple[float, float]:
        levels, cell = self._density.level, tail.group * BUCKETS + tail.bucket
        return (levels[cell] if 0 <= cell < len(levels) else -math.inf), tail.number

    # Requests.

    def _begin(self, chain: RequestChain) -> Tail:
        self._begun += 1
        weight = max(MEAN_WEIGHT, 1 / self._begun)
        self._admitted_mean += weight * (self._admitted - self._admitted_mean)
        # Hints and gaps are in seconds. The mean keeps many new blocks of one request from ageing all others at once.
        passed = 1 + (self._admitted_mean if len(self._kinds) > 1 else self._admitted)
        self._admitted = 0
        self._now += passed * AGES_PER_TURNOVER / self.num_blocks
        self._age()
        if self._begun % LEARN_EVERY == 0:
            self._learn()
        self._new_blocks_mean += weight * (self._new_blocks - self._new_blocks_mean)
        self._new_blocks = 0
        # An `OldChain` is older than all requests.
        number, since = (self._begun, self._now) if chain.last_use >= 0 else (chain.last_use, -math.inf)
        tail = chain.note = Tail(number, since, began_s=self.now_s)
        hints = chain.hints
        self._priority_mean += weight * ((hints.priority if hints else 0) - self._priority_mean)
        if hints is not None:
            self._apply_hints(tail, hints)
        return tail

    def _learn(self) -> None:
        for hinted, kind in self._kinds.items():
            priority = hinted[1] - max(0.0, self._priority_mean)
            self._density.weights[kind] = EXPIRED_WEIGHT if hinted == EXPIRED else PRIORITY_WEIGHT**priority
        self._density.learn()
        self._order.sort(self._density.level)

    # Hints.

    def _apply_hints(self, tail: Tail, hints: Hints) -> None:
        tail.kind = self._kind_of((_class_of(hints.expect_return_s), hints.priority, 0))
        tail.said_s = hints.expect_return_s or 0.0
        if hints.ttl_s is not None:
            expired = self._kind_of(EXPIRED)
            tail.expires_s = self.now_s + hints.ttl_s
            if not hints.ttl_s:
                tail.kind, tail.said_s = expired, 0.0

    def _correct(self, own: Tail, before: Tail, hints: Hints | None) -> None:
        """Compare a session's predicted return with its actual one, and correct its next prediction by the error.

        The pace of a session's requests also decides its kind, with any prediction: predictions may be false.
        """
        gap = math.log(max(self.now_s - before.began_s, SOONEST_S))
        own.late, own.pace = before.late, gap if before.pace is None else (before.pace + gap) / 2
        if before.said_s:
            own.late += (gap - math.log(before.said_s) - own.late) / 3
        if own.kind == self._kinds.get(EXPIRED):
            return
        said_s = hints.expect_return_s if hints is not None else None
        if said_s and CORRECTED[0] < abs(own.late) < CORRECTED[1]:
            said_s *= math.exp(own.late)
        priority, pace = hints.priority if hints is not None else 0, bisect_right(PACES_S, math.exp(own.pace))
        own.kind = self._kind_of((_class_of(said_s), priority, pace))

    def _kind_of(self, hinted: tuple[int, int, int]) -> int:
        """Return the kind of tails with this class of `expect_return`, priority and pace; add it if it is new."""
        if hinted not in self._kinds:
            prior = self._kind_of((*hinted[:2], 0)) if hinted[2] else 0
            self._kinds[hinted] = self._density.add_kind(prior)
            self._learn()
        return self._kinds[hinted]

    # Ages.

    def _age(self) -> None:
        """Move tails to the next bucket when they reach its age."""
        seen = self._density.seen
        for bucket in range(BUCKETS - 1):
            aging, older = self._aging[bucket], self._aging[bucket + 1]
            due = self._now - EDGES[bucket + 1]
            while aging and aging[0].since <= due:
                tail = aging.popleft()
                if tail.expires_s <= self.now_s:
                    tail.kind = self._kinds[EXPIRED]
                    tail.group = tail.kind * KIND_GROUPS + tail.group % KIND_GROUPS
                cell = tail.group * BUCKETS + bucket
                tail.bucket = bucket + 1
                tail.is_aging = bool(tail.rows or tail.ghost)  # else no return of it would be noticed
                if tail.is_aging:
                    if not bucket:
                        seen[cell] += tail.share
                    seen[cell + 1] += tail.share
                    older.append(tail)
                if tail.cell >= 0:
                    self._order.leave(tail)
                    self._order.enter(tail)
                if tail.shared is not None and not tail.shared.is_aging:
                    tail.shared = None
        aging = self._aging[-1]
        while aging and aging[0].since <= self._now - EDGES[-1]:
            aging.popleft()

    def _returned(self, tail: Tail, count: int, is_late: bool = False) -> None:
        """Note that a request uses `count` positions of a tail; with `is_late` they do not count as hits."""
        if count and tail.group >= 0:
            part = min(tail.share, count / max(count, tail.length()))
            tail.share -= part
            if not is_late and tail.number >= 0:  # the age of an `OldChain` says nothing
                cell = tail.group * BUCKETS + tail.bucket
                self._density.hits[cell] += part
                if not tail.bucket:
                    self._density.seen[cell] += part

    def _remember(self, cuts: Sequence[tuple[Tail, Sequence[int]]]) -> None:
        """Keep the key of each tail's first evicted block: a prompt that returns asks for it first."""
        ghosts, key_of, position_of = self._ghosts, self.table.key, self.table.position
        for tail, cut in cuts:
            if cut:
                positions = [position_of[row] for row in cut]
                if not tail.lost or positions[-1] < tail.end:
                    ghosts.pop(tail.ghost, None)
                    tail.ghost, tail.end = key_of[cut[-1]], positions[-1]
                    ghosts[tail.ghost] = tail
                tail.lost += tail.count(positions)
        while len(ghosts) > GHOSTS_MIN + self.num_blocks // GHOST_BLOCKS:
            _, tail = ghosts.popitem(last=False)
            tail.lost, tail.ghost = 0, NO_KEY

    def _file(self, tail: Tail) -> None:
        """Put a tail into the cell of its group and age."""
        group = tail.kind * KIND_GROUPS + min(tail.turn, TURNS - 1) * (len(SIZES) + 1)
        if not tail.is_shared:
            group += bisect_right(SIZES, tail.new_blocks / max(1.0, self._new_blocks_mean))
        if not tail.is_aging:
            tail.is_aging = True
            tail.bucket = min(bisect_right(EDGES, self._now - tail.since), BUCKETS) - 1  # it may be old already
            insort(self._aging[tail.bucket], tail, key=_since)
        if group != tail.group:
            self._order.leave(tail)
            tail.group = group
        self._order.enter(tail)


def _class_of(return_s: float | None) -> int:
    return 0 if return_s is None else 1 + bisect_right(RETURNS_S, return_s)
