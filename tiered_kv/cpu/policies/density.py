"""Learned hit density, by tail: evicts what brings the fewest hits for its room and time.

After N. Beckmann, H. Chen and A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018). Their
unit is an object. Here it is a tail: the blocks that one request was the last to use. Blocks leave a tail deepest
first, and not before the tails that hang off them, so what is resident is whole prefixes. `tiered_kv/hit_density.py`
has the estimates. docs/explanation/hit-rates.md says what each part is worth, and why each number is what it is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import NO_KEY, CPUBlock, RequestChain
from tiered_kv.cpu.policies.base import CachePolicy
from tiered_kv.hints import Hints
from tiered_kv.hit_density import AGES_PER_TURNOVER, BUCKETS, EDGES, HitDensity

LEARN_EVERY = 64
"""Requests between two computations of the densities."""
DECAY = 0.94
"""What the evidence counts for, each time: it halves in 11 times."""
GHOSTS_MIN = 100
GHOST_BLOCKS = 8
"""Evicted tails that are remembered: one for so many blocks of the tier, and `GHOSTS_MIN` more."""
TURNS = 4
"""Turns that are told apart: 0, 1, 2, and more."""
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Limits between the numbers of new blocks that are told apart, as multiples of their mean."""
KINDS = 2
"""A request's own tail, and a shared one."""
KIND_GROUPS = TURNS * (len(SIZES) + 1)
SLACK_BLOCKS = 1
"""Blocks at a prompt's end that the next turn may lack: the last block of a prompt is often not full."""
CIRCLE_MAX = 100
"""Tails in the longest circle that is noticed."""
MEAN_WEIGHT = 0.01
"""Weight of a request in the mean number of new blocks, and in the mean priority."""
RETURNS_S = (2.0, 8.0, 32.0, 128.0, 512.0)
"""Limits between the times of return that are told apart where requests say them. Each is a kind of its own."""
PRIORITY_WEIGHT = 2.0
"""What a hit is worth for each priority above the mean."""
EXPIRED, EXPIRED_WEIGHT = (-1, 0), 0.1
"""The kind of tails that are older than their request said, and what their hits are worth."""


class _Tail:
    """Blocks of one request from one place in its prefix on: those that follow what it shares, or those shared.

    Attributes:
        blocks: Those that may be evicted, by position; in rising order where `is_sorted`, and `top` the highest.
        start: The first position; `end`, the first that is not resident; `lost`, how many were evicted from there on.
        number: Of the request, in the order in which they began; `since`, when it did.
        shared: Of the tail that follows it, the one that is shared.
        turn: How many requests in a row have used it.
        kind: By what its request said.
        expires_s: When it expires.
        new_blocks: How many the request added.
        share: Of the tail, what no request has used since.
        bucket: Of its age; while `is_aging`, the tail waits for the next one.
        cell: Where it waits for eviction; negative while it does not.
        parent: The key of the block that it hangs off, which was at the position `after`.
        ghost: The key by which its evicted part is known.
    """

    # fmt: off
    __slots__ = (
        "after", "blocks", "bucket", "cell", "end", "expires_s", "ghost", "group", "is_aging", "is_attached",
        "is_shared", "is_sorted", "kind", "lost", "new_blocks", "number", "parent", "share", "shared", "since", "start",
        "top", "turn",
    )
    # fmt: on

    def __init__(self, number: int, since: float, *, is_shared: bool = False, turn: int = 0) -> None:
        self.number, self.since, self.is_shared, self.turn = number, since, is_shared, turn
        self.blocks: dict[int, CPUBlock] = {}
        self.top = self.group = self.cell = -1
        self.start = self.end = self.lost = self.new_blocks = self.bucket = self.after = 0
        self.share, self.kind, self.expires_s = 1.0, int(is_shared), math.inf
        self.is_sorted, self.is_attached, self.is_aging = True, False, False
        self.shared: _Tail | None = None
        self.parent = self.ghost = NO_KEY


class DensityPolicy(CachePolicy):
    """Evicts the tail of the least hit density, as it was learned from the requests so far."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._size = 0
        self._admitted = 0
        self._begun = 0
        self._now = 0.0  # the blocks admitted, and the requests begun, in `AGES_PER_TURNOVER` of the tier
        self._new_blocks = 0  # since a request last began
        self._new_blocks_mean = 1.0
        self._protected: dict[int, CPUBlock] = {}  # by block_id: looked up in this step
        self._hanging: dict[OffloadKey, int] = {}  # tails that hang off a block, by its key
        self._blocked: dict[OffloadKey, _Tail] = {}  # left their cell, because of what hangs off the block of this key
        self._spared = 0  # the number of the request that an eviction spares
        self._ghosts: OrderedDict[OffloadKey, _Tail] = OrderedDict()
        self._aging: list[deque[_Tail]] = [deque() for _ in range(BUCKETS)]
        # Tails that wait for eviction, by group and bucket. Bit n of the mask stands for the nth cell of the order.
        self._cells: list[OrderedDict[_Tail, None]] = [OrderedDict() for _ in range(KINDS * KIND_GROUPS * BUCKETS)]
        self._mask = 0
        self._density = HitDensity(KINDS, KIND_GROUPS, decay=DECAY)
        self._learning: Iterator[bool] = iter(())
        self._kinds = {(0, 0): 0}  # of requests' own tails, by the time of return that they said, and their priority
        self._priority_mean = 0.0

    def __len__(self) -> int:
        return self._size

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        own: _Tail = chain.note or self._begin(chain)
        new = len(blocks)
        self._admitted += new
        for block in blocks if self._ghosts else ():
            tail = self._ghosts.pop(block.key, None)
            if tail is not None:
                new -= tail.lost
                own.turn = own.turn or tail.turn + 1
                self._returned(tail, tail.lost)
                tail.lost, tail.ghost = 0, NO_KEY
        own.new_blocks += new
        self._new_blocks += new

    def add(self, blocks: Iterable[CPUBlock]) -> None:
        chain: RequestChain | None = None
        tail = _Tail(0, 0.0)
        touched: dict[_Tail, None] = {}
        count = 0
        for block in blocks:
            position = block.position
            if block.chain is not chain or position < tail.start or tail.is_shared:
                chain = block.chain
                assert chain is not None
                tail = chain.note or self._begin(chain)
                if position < tail.start and tail.shared is not None:
                    tail = tail.shared
                touched[tail] = None
            tail.blocks[position] = block
            if position > tail.top:
                tail.top = position
                if position >= tail.end:
                    tail.end = position + 1
            else:
                tail.is_sorted = False
            count += 1
        self._size += count
        for tail in touched:
            self._attach(tail)
            self._file(tail)

    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        for block in blocks:
            self._discard(block)

    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        own: _Tail = chain.note or self._begin(chain)
        if all(block.chain is chain for block in blocks):
            return
        runs: list[tuple[_Tail, int, int]] = []  # whose blocks they were, the first, and one past the last
        held = []
        for index, block in enumerate(blocks):
            tail = _tail_of(block)
            if tail is None:
                continue
            if block.position in tail.blocks or block.block_id in self._protected:
                held.append(block)
            if block.chain is not chain:
                first = runs.pop()[1] if runs and runs[-1][0] is tail else index
                runs.append((tail, first, index + 1))
        held = [block for block in held if self._discard(block)]
        cut = 0
        if runs and own.end:  # as where two requests store the same at a time
            own.turn = max(own.turn, *(tail.turn + 1 for tail, _, _ in runs))
        elif runs:
            # A request that goes on from the end of another's tail takes it over. Else what it has used is shared.
            source, cut, end = runs[-1]
            if not source.is_shared and blocks[end - 1].position >= source.end - 1 - SLACK_BLOCKS:
                own.turn = source.turn + 1
                source = runs[-2][0] if len(runs) > 1 else source
            else:
                cut = end
            if cut:
                turn = source.turn + 1 if source.is_shared else 1
                own.shared = _Tail(own.number, own.since, is_shared=True, turn=turn)
        for tail, first, end in runs:
            self._returned(tail, end - first)
            self._hang(tail, blocks[end - 1])
        chain.take(blocks)
        if own.shared is not None and cut:
            self._hang(own, blocks[cut - 1])
            own.start = own.end = own.shared.end = blocks[cut - 1].position + 1
        self.add(held)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[CPUBlock] | None:
        if count > self._size:
            return None
        own: _Tail | None = spare.note if spare is not None else None
        spared = [tail for tail in (own, own and own.shared) if tail is not None]
        for tail in spared:
            self._spared = tail.number
            self._leave(tail)
        victims: list[CPUBlock] = []
        cuts: list[tuple[_Tail, int]] = []
        while len(victims) < count and (self._mask or self._unblock(spared)):
            tail = self._least()
            before = len(victims)
            self._pop(tail, count, step, victims)
            cuts.append((tail, len(victims) - before))
        self._size -= len(victims)
        is_done = len(victims) == count
        if is_done:
            self._remember(cuts, victims)
        else:
            self.add(victims)
        self._spared = 0
        for tail in spared:
            if tail.blocks:
                self._attach(tail)
                self._enter(tail)
        return victims if is_done else None

    def end_step(self) -> None:
        if self._protected:
            held, self._protected = self._protected, {}
            self._size -= len(held)
            self.add(held.values())

    # Requests, and what they tell.

    def _begin(self, chain: RequestChain) -> _Tail:
        self._begun += 1
        self._now = (self._admitted + self._begun) * AGES_PER_TURNOVER / self.num_blocks
        self._age()
        if self._begun % LEARN_EVERY == 0:
            self._weigh()
            self._learning = self._density.learning()
        if next(self._learning, False):
            self._mask = sum(1 << self._density.rank[cell] for cell, queue in enumerate(self._cells) if queue)
        weight = max(MEAN_WEIGHT, 1 / self._begun)
        self._new_blocks_mean += weight * (self._new_blocks - self._new_blocks_mean)
        self._new_blocks = 0
        tail = chain.note = _Tail(self._begun, self._now)
        hints = chain.hints
        self._priority_mean += weight * ((hints.priority if hints else 0) - self._priority_mean)
        if hints is not None:
            self._heed(tail, hints)
        return tail

    # Hints.

    def _heed(self, tail: _Tail, hints: Hints) -> None:
        returns = 0 if hints.expect_return_s is None else 1 + bisect_right(RETURNS_S, hints.expect_return_s)
        tail.kind = self._kind_of((returns, hints.priority))
        if hints.ttl_s is not None:
            expired = self._kind_of(EXPIRED)
            tail.expires_s = self.now_s + hints.ttl_s
            if not hints.ttl_s:
                tail.kind = expired

    def _kind_of(self, said: tuple[int, int]) -> int:
        """Return the kind of tails of which requests have said this; the first one adds it."""
        if said not in self._kinds:
            self._kinds[said] = self._density.add_kind()
            self._cells += [OrderedDict() for _ in range(KIND_GROUPS * BUCKETS)]
            self._weigh()
            self._learning = iter(())  # its cells are too few
            self._density.learn()
            self._mask = sum(1 << self._density.rank[cell] for cell, queue in enumerate(self._cells) if queue)
        return self._kinds[said]

    def _weigh(self) -> None:
        for said, kind in self._kinds.items():
            worth = EXPIRED_WEIGHT if said == EXPIRED else PRIORITY_WEIGHT ** (said[1] - max(0.0, self._priority_mean))
            self._density.weights[kind] = worth

    # Ages, and what they tell.

    def _age(self) -> None:
        """Move tails on whose age has passed the end of their bucket."""
        seen = self._density.seen
        for bucket in range(BUCKETS - 1):
            aging, older = self._aging[bucket], self._aging[bucket + 1]
            due = self._now - EDGES[bucket + 1]
            while aging and aging[0].since <= due:
                tail = aging.popleft()
                if tail.expires_s <= self.now_s:
                    tail.group += (self._kinds[EXPIRED] - tail.kind) * KIND_GROUPS
                    tail.kind = self._kinds[EXPIRED]
                cell = tail.group * BUCKETS + bucket
                tail.bucket = bucket + 1
                tail.is_aging = bool(tail.blocks or tail.ghost)  # a return of others would not be noticed
                if tail.is_aging:
                    if not bucket:
                        seen[cell] += tail.share
                    seen[cell + 1] += tail.share
                    older.append(tail)
                if tail.cell >= 0:
                    self._leave(tail)
                    self._enter(tail)
                if tail.shared is not None and not tail.shared.is_aging:
                    tail.shared = None
        aging = self._aging[-1]
        while aging and aging[0].since <= self._now - EDGES[-1]:
            aging.popleft()

    def _returned(self, tail: _Tail, count: int) -> None:
        """Note that a request uses `count` blocks of a tail."""
        if count and tail.group >= 0:
            part = min(tail.share, count / max(count, tail.end - tail.start + tail.lost))
            cell = tail.group * BUCKETS + tail.bucket
            self._density.hits[cell] += part
            if not tail.bucket:
                self._density.seen[cell] += part
            tail.share -= part

    def _remember(self, cuts: Sequence[tuple[_Tail, int]], victims: Sequence[CPUBlock]) -> None:
        """Keep the key of the last block that each tail lost, the first of them that a prompt needs."""
        ghosts, done = self._ghosts, 0
        for tail, count in cuts:
            if count:
                done += count
                ghosts.pop(tail.ghost, None)
                tail.ghost, tail.end = victims[done - 1].key, victims[done - 1].position
                tail.lost += count
                ghosts[tail.ghost] = tail
        while len(ghosts) > GHOSTS_MIN + self.num_blocks // GHOST_BLOCKS:
            _, tail = ghosts.popitem(last=False)
            tail.lost, tail.ghost = 0, NO_KEY

    # The order of eviction.

    def _file(self, tail: _Tail) -> None:
        """Put a tail into the cell of its group and age."""
        group = tail.kind * KIND_GROUPS + min(tail.turn, TURNS - 1) * (len(SIZES) + 1)
        if not tail.is_shared:
            group += bisect_right(SIZES, tail.new_blocks / max(1.0, self._new_blocks_mean))
        if not tail.is_aging:
            tail.is_aging = True
            self._aging[tail.bucket].append(tail)
        if group != tail.group:
            self._leave(tail)
            tail.group = group
        self._enter(tail)

    def _enter(self, tail: _Tail) -> None:
        if tail.cell < 0 and tail.blocks and tail.number != self._spared:
            tail.cell = cell = tail.group * BUCKETS + tail.bucket
            queue = self._cells[cell]
            if not queue:
                self._mask |= 1 << self._density.rank[cell]
            queue[tail] = None

    def _leave(self, tail: _Tail) -> None:
        cell = tail.cell
        if cell >= 0:
            tail.cell = -1
            queue = self._cells[cell]
            del queue[tail]
            if not queue:
                self._mask ^= 1 << self._density.rank[cell]

    def _least(self) -> _Tail:
        """Return the oldest tail of the least density."""
        order, level, mask = self._density.order, self._density.level, self._mask
        cell = order[(mask & -mask).bit_length() - 1]
        least, found = level[cell], next(iter(self._cells[cell]))
        while mask := mask & (mask - 1):
            cell = order[(mask & -mask).bit_length() - 1]
            if level[cell] > least:
                break
            tail = next(iter(self._cells[cell]))
            if tail.number < found.number:
                found = tail
        return found

    def _pop(self, tail: _Tail, count: int, step: int, victims: list[CPUBlock]) -> None:
        """Move blocks from the end of a tail to `victims`, until there are `count`, or something hangs off a block."""
        _first(tail)
        blocks, hanging = tail.blocks, self._hanging
        while blocks and len(victims) < count:
            position, block = blocks.popitem()
            if block.key in hanging and self._block(tail, block.key):
                blocks[position] = block
                break
            if block.step == step:
                self._protected[block.block_id] = block
            else:
                victims.append(block)
        if blocks:
            tail.top = next(reversed(blocks))
        else:
            self._emptied(tail)

    def _block(self, tail: _Tail, key: OffloadKey) -> bool:
        """Let a tail wait for what hangs off its block. It does not if that waits for the tail itself.

        Requests that used blocks in contradicting orders would hold them for ever.
        """
        self._blocked[key] = tail
        waiting = tail
        for _ in range(CIRCLE_MAX):
            owner = self._blocked.get(waiting.parent) if waiting.is_attached else None
            if owner is None:
                break
            if owner is tail:
                del self._blocked[key], self._hanging[key]
                return False
            waiting = owner
        self._leave(tail)
        return True

    def _discard(self, block: CPUBlock) -> bool:
        tail = _tail_of(block)
        if tail is not None and tail.blocks.get(block.position) is block:
            del tail.blocks[block.position]
            if not tail.blocks:
                self._emptied(tail)
            else:
                self._enter(tail)  # what hung off the block hangs off none of the tail's now
        elif block.block_id in self._protected:
            del self._protected[block.block_id]
        else:
            return False
        self._size -= 1
        return True

    def _emptied(self, tail: _Tail) -> None:
        tail.top, tail.is_sorted = -1, True
        tail.blocks = {}  # a dictionary does not shrink
        self._leave(tail)
        self._detach(tail)

    def _hang(self, tail: _Tail, parent: CPUBlock) -> None:
        """Note that a tail follows `parent` from now on."""
        self._detach(tail)
        tail.parent, tail.after = parent.key, parent.position
        if tail.blocks:
            self._attach(tail)

    def _attach(self, tail: _Tail) -> None:
        if not tail.parent or (tail.start <= tail.after and _first(tail) <= tail.after):
            self._detach(tail)  # blocks are back that the parent follows
        elif not tail.is_attached:
            self._hanging[tail.parent] = self._hanging.get(tail.parent, 0) + 1
            tail.is_attached = True

    def _detach(self, tail: _Tail) -> None:
        if tail.is_attached:
            tail.is_attached = False
            left = self._hanging.get(tail.parent, 1) - 1
            if left:
                self._hanging[tail.parent] = left
                return
            self._hanging.pop(tail.parent, None)
            owner = self._blocked.pop(tail.parent, None)
            if owner is not None:
                self._enter(owner)

    def _unblock(self, spared: Sequence[_Tail]) -> bool:
        """Enter a tail off which spared ones hang, or any where all wait for others."""
        for tail in spared:
            self._detach(tail)
        while self._blocked and not self._mask:
            key, tail = self._blocked.popitem()
            self._hanging.pop(key, None)
            self._enter(tail)
        return bool(self._mask)


def _tail_of(block: CPUBlock) -> _Tail | None:
    tail: _Tail | None = block.chain.note if block.chain is not None else None
    return tail.shared if tail is not None and block.position < tail.start and tail.shared is not None else tail


def _first(tail: _Tail) -> int:
    """Return the lowest position in a tail that has blocks; they are in order then."""
    if not tail.is_sorted:
        tail.blocks = dict(sorted(tail.blocks.items()))
        tail.is_sorted = True
    return next(iter(tail.blocks))
