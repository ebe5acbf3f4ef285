"""Comparing two copies of a block: the audited request, spare rows for the second copy, and how far copies differ.

A spare row is a row of the primary tier for a second copy of a block. `audit.Audit` calls this file on the scheduler's
thread; only `SpareRows._difference` runs on a thread of its own. What must stay true: no lookup finds a spare row, and
a spare row is freed only when no job and no comparison uses it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, get_offload_group_idx
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.cpu.writers import PROMOTION
from tiered_kv.errors import ResourceError
from tiered_kv.system.threads import DaemonThreads
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.requests import RequestTable

BLOCKS_MAX: Final = 64
"""Spare rows at one time, and blocks of one request that are compared."""
ROWS_SHARE: Final = 8
"""Limit of the spare rows: one row in this number of the primary tier's rows."""

_SPARE_KEY: Final = b"\0tiered-kv audit "

STRETCH_VALUES: Final = 256
"""Values in a stretch: about one token of one head."""
SCALE_SHARE: Final = 0.1
"""A stretch whose magnitude is below this share of the block's average is measured against this share."""
_PIECE_BYTES: Final = 1 << 18

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Values = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class AuditedGroup:
    """The KV cache group that is audited, if an engine has several."""

    number: int
    """The number of the group in keys."""
    tokens: int
    """Tokens of a whole block. A shorter block has a key of its own, and leaves the rest of its row as it was."""
    used_bytes: int
    """Bytes that a block fills, from the beginning of each part of its row. The rest of the part stays as it was."""
    parts: int  # equal parts of a row

    def has(self, key: OffloadKey) -> bool:
        return get_offload_group_idx(key) == self.number

    def is_whole(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether a block has all its tokens: it ends at a multiple of `tokens` in the prompt."""
        position = req_context.get_offload_key_position(key)
        return position is not None and position % self.tokens == 0

    def used(self, row: Bytes) -> Bytes:
        """Return the bytes that a block fills, one after the other."""
        part_bytes = len(row) // self.parts
        return row[: self.parts * part_bytes].reshape(self.parts, part_bytes)[:, : self.used_bytes].reshape(-1)


@dataclass(slots=True, eq=False)
class Audited:
    """The request that is being audited."""

    req_id: str
    context: ReqContext
    """The audit's own request towards the tiers, so that their answers outlive the audited request."""
    until_s: float
    first_key: OffloadKey | None = None
    """The first key that was withheld. An engine looks up blocks that it has neither computed nor kept. So the blocks
    that it stores from this key on, in the same group, are computed anew."""
    storer: str | None = None
    """The request that stores `first_key`. The facade's `get` and `put` are two requests."""
    is_finished: bool = False
    """Whether the request has ended; only then may another one be the storer."""
    is_taking: bool = True
    """Whether further blocks will be compared."""
    taken: set[OffloadKey] = field(default_factory=set)
    asked: dict[OffloadKey, GuardedTier | None] = field(default_factory=dict)
    """Blocks that the storer is storing, with the tier that has them; None while that is unknown."""
    compared: int = 0
    different: list[OffloadKey] = field(default_factory=list)
    largest: float = 0.0
    """The largest difference so far."""

    def computed(self, req_id: str, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those `keys` of a store whose blocks were computed anew, without those in `taken`."""
        if not req_id or not self.is_taking or self.first_key is None:
            return []
        if self.storer is None and (req_id == self.req_id or self.is_finished) and self.first_key in keys:
            self.storer = req_id
        if self.storer != req_id:
            return []
        ordered, group = list(dict.fromkeys(keys)), get_offload_group_idx(self.first_key)
        first = ordered.index(self.first_key) if self.first_key in ordered else 0
        return [key for key in ordered[first:] if get_offload_group_idx(key) == group and key not in self.taken]


@dataclass(slots=True, eq=False)
class Pair:
    """Two copies of a block: in `row`, under its key and pinned, and in `spare`, a spare row."""

    audited: Audited
    tier: str
    """The tier of the stored copy."""
    key: OffloadKey
    row: int
    spare: int
    writer: str
    """The request whose store fills the spare row, or `PROMOTION` if a tier's load fills it."""


class SpareRows:
    """Pairs blocks of the primary tier with spare rows, and compares both on a separate thread.

    No lookup finds a spare row: it has a special key, and stays in state writing. Owned by the manager's thread.
    """

    def __init__(self, primary: PrimaryRows, requests: RequestTable, tiers: Sequence[GuardedTier], dtype: str) -> None:
        self._names = {0: PRIMARY_NAME, **{guarded.number: guarded.name for guarded in tiers}}
        self._primary = primary
        self._requests = requests
        self._dtype = dtype
        self.group: AuditedGroup | None = None
        self._thread = DaemonThreads("tiered-kv-audit", 1)  # begins with the first comparison
        self._comparing: deque[tuple[Pair, Future[float]]] = deque()
        self._rows_max = max(min(BLOCKS_MAX, primary.backend.num_blocks // ROWS_SHARE), 1)
        self._pairs: set[Pair] = set()
        self._expired_rows = 0
        self._numbers = itertools.count()

    @property
    def room(self) -> int:
        return self._rows_max - len(self._pairs) - self._expired_rows

    @property
    def in_flight(self) -> int:
        return len(self._comparing)

    def pending(self, audited: Audited) -> int:
        """Return how many pairs of a request are not compared yet."""
        return sum(pair.audited is audited for pair in self._pairs)

    def pair(
        self,
        audited: Audited,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        evicted: list[OffloadKey],
        guarded: GuardedTier | None = None,
    ) -> list[Pair]:
        """Pin ready blocks and give each a spare row; return [] if there is no room for all of them.

        If a tier is given, a load of it fills the spare rows. Otherwise the store of `req_context` fills them, and the
        blocks of `keys` are the stored copies. `evicted` receives the keys of evicted blocks; those of `req_context` go
        last.
        """
        rows = self._primary.all_ready(keys)
        self._primary.pin(rows)
        names = [OffloadKey(_SPARE_KEY + next(self._numbers).to_bytes(8, "big")) for _ in rows]
        writer = PROMOTION if guarded is not None else req_context.req_id
        chain = self._requests.state_of(req_context).chain_in(req_context)
        source = 0 if guarded is None else guarded.number
        spares = self._primary.allocate(names, writer, chain, evicted, source=source)
        if spares is None:
            self._primary.unpin(rows)
            return []
        source_of = self._primary.table.source
        pairs = [
            Pair(audited, self._names[source or source_of[row]], key, row, spare, writer)
            for key, row, spare in zip(keys, rows, spares, strict=True)
        ]
        self._pairs.update(pairs)
        return pairs

    def compare(self, pair: Pair) -> None:
        """Begin to compare two complete copies; `take` releases them."""
        rows = pair.spare, pair.row
        stored_row, computed_row = rows if pair.writer is PROMOTION else reversed(rows)
        try:
            difference = self._thread.submit(self._difference, stored_row, computed_row)
        except ResourceError as error:
            difference = Future()
            difference.set_exception(error)
        self._comparing.append((pair, difference))

    def take(self) -> list[tuple[Pair, float | None]]:
        """Release the pairs compared since the last call, and return their differences; None after an error."""
        compared: list[tuple[Pair, float | None]] = []
        while self._comparing and self._comparing[0][1].done():
            pair, future = self._comparing.popleft()
            self.release(pair)
            compared.append((pair, None if future.exception() else future.result()))  # e.g. MemoryError
        return compared

    def release(self, pair: Pair) -> None:
        """Unpin a block, and free its spare row, which no job uses."""
        self._primary.abandon([pair.spare])
        self._primary.unpin([pair.row])
        self._pairs.remove(pair)

    def expire(self, pair: Pair) -> None:
        """Unpin a block whose spare row a tier may still be writing. When the load has ended, call `free`."""
        self._primary.forget(pair.spare)
        self._primary.unpin([pair.row])
        self._pairs.remove(pair)
        self._expired_rows += 1

    def free(self, pair: Pair) -> None:
        """Free the spare row of an expired load that has ended."""
        self._primary.release([pair.spare])
        self._expired_rows -= 1

    def stop(self, timeout_s: float) -> None:
        """End the thread; wait at most `timeout_s` for the last comparison."""
        running = wait([future for _, future in self._comparing], timeout_s).not_done
        self._thread.shutdown()
        if not running:
            self._thread.join(time.monotonic() + timeout_s)

    def _difference(self, stored_row: int, computed_row: int) -> float:
        region = self._primary.backend.region  # no variable for an array: it would keep the memory mapped
        used = (lambda row: row) if self.group is None else self.group.used
        return difference_of(used(region.array[stored_row]), used(region.array[computed_row]), self._dtype)


def difference_of(stored: Bytes, computed: Bytes, dtype: str) -> float:
    """Return the largest difference of a stretch: 0 if all values agree, about 1 if they are unrelated.

    The difference of a stretch of 256 values is the sum of |stored - computed| over the sum of the larger magnitudes.
    A value that is not finite agrees only with the same bits. Both copies are contiguous, and equally long. `dtype` is
    that of a namespace. Bytes of an unknown type agree or differ infinitely.
    """
    if np.array_equal(stored, computed):
        return 0.0
    known = _type_of(dtype)
    if known is None or len(stored) % known.bytes:
        return float("inf")
    sums = [
        _sums_of_stretches(stored[first : first + _PIECE_BYTES], computed[first : first + _PIECE_BYTES], known)
        for first in range(0, len(stored), _PIECE_BYTES)
    ]
    differences, magnitudes = (np.concatenate(parts) for parts in zip(*sums, strict=True))
    if not np.isfinite(differences).all():
        return float("inf")
    if not magnitudes.any():  # zeros that differ in their sign
        return 0.0
    return float((differences / np.maximum(magnitudes, SCALE_SHARE * magnitudes.mean())).max())


def is_known(dtype: str) -> bool:
    """Return whether values of this type can be compared as numbers."""
    return _type_of(dtype) is not None


class _Type(NamedTuple):
    bytes: int
    decode: Callable[[Bytes], Values]


def _type_of(dtype: str) -> _Type | None:
    return _TYPES.get(dtype.lower().removeprefix("torch."))


def _sums_of_stretches(stored: Bytes, computed: Bytes, known: _Type) -> tuple[Values, Values]:
    """Return the sum of the differences, and of the larger magnitudes, of each stretch."""
    with np.errstate(invalid="ignore", over="ignore"):
        before, after = known.decode(stored), known.decode(computed)
        differences = np.abs(before - after)
        magnitudes = np.maximum(np.abs(before), np.abs(after))
    same = (stored.reshape(-1, known.bytes) == computed.reshape(-1, known.bytes)).all(axis=1)
    differences[same] = 0.0
    differences[~np.isfinite(differences)] = np.inf
    magnitudes[~np.isfinite(magnitudes)] = 0.0
    return _add_up(differences), _add_up(magnitudes)


def _add_up(values: Values) -> Values:
    sums: Values = np.add.reduceat(values, np.arange(0, len(values), STRETCH_VALUES), dtype=np.float64)
    return sums


def _e4m3_table() -> Values:
    """Return the value of each byte: a sign, 4 bits of exponent (bias 7), 3 of fraction, no infinity (OCP OFP8)."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    values[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -values, values).astype(np.float32)


_E4M3 = _e4m3_table()
_BFLOAT16 = _Type(2, lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32))
_FLOAT16 = _Type(2, lambda raw: raw.view("<f2").astype(np.float32))
_FLOAT32 = _Type(4, lambda raw: raw.view("<f4").astype(np.float32))
_FP8_E4M3 = _Type(1, lambda raw: _E4M3[raw])
_FP8_E5M2 = _Type(1, lambda raw: (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32))  # half a float16

_TYPES: Mapping[str, _Type] = {
    **dict.fromkeys(("bfloat16", "bf16"), _BFLOAT16),
    **dict.fromkeys(("float16", "fp16", "half"), _FLOAT16),
    **dict.fromkeys(("float32", "fp32", "float"), _FLOAT32),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"), _FP8_E4M3),
    **dict.fromkeys(("fp8_e5m2", "float8_e5m2"), _FP8_E5M2),
}
"""The types of values, by their names in vLLM and PyTorch, and by common names; `fp8` is e4m3, as in vLLM."""
