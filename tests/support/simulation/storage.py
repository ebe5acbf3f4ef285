"""Simulated time, and the records and moods of a simulated tier."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.control import ManualClock
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record

WEDGED_POLL_S = 0.05
_EPOCH_S = 1_000_000.0


class World:
    """The clock, and the calls that are due at some time, in a fixed order."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.clock._now_s = _EPOCH_S  # the same moment in every run
        self.rng = Random(0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock() + seconds, next(self._numbers), call))

    def advance(self, seconds: float) -> None:
        """Advance the clock, and make the calls that become due."""
        end_s = self.clock() + seconds
        while self._due and self._due[0][0] <= end_s:
            at_s, _, call = heapq.heappop(self._due)
            self.clock.advance(at_s - self.clock())
            call()
        self.clock.advance(end_s - self.clock())


@dataclass(frozen=True, slots=True)
class Mood:
    """How a tier behaves now; verbs are probabilities from 0 to 1."""

    block_s: float = 0.005  # that a block takes, drawn evenly from 0 to twice this
    answer_s: float = 0.0  # until a lookup is answered
    is_wedged: bool = False  # transfers stop, and continue when it ends, even if their jobs have expired
    is_mute: bool = False  # nothing is reported and no lookup answered, but transfers continue
    fails: float = 0.0  # a block is not stored, or not loaded
    raises: float = 0.0
    lies: float = 0.0  # a lookup returns the opposite
    babbles: float = 0.0  # `get_finished` adds unknown results
    tears: float = 0.0  # only a part of a record is written, and called a success


class SimulatedStorage:
    """Records in a dictionary of limited size; the oldest is evicted first."""

    def __init__(self, world: World, namespace_digest: bytes, records_max: int) -> None:
        self.records: dict[OffloadKey, bytearray] = {}
        self.mood = Mood()
        self.transfers_running = 0
        self._world = world
        self._namespace_digest = namespace_digest
        self._records_max = records_max

    def transfer(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        *,
        is_load: bool,
        refusal: Callable[[], str],
        end: Callable[[list[str]], None],
    ) -> None:
        """Store or load blocks one after the other, each in its time.

        Args:
            keys, blocks: The blocks and their memory.
            is_load: Whether they are loaded.
            refusal: Returns before each block why it must not be moved; "" if it may.
            end: Called at the end with the error of each block, or "".
        """
        move = self.load if is_load else self.store
        reasons: list[str] = []

        def step() -> None:
            if self.mood.is_wedged:
                self._world.call_after(WEDGED_POLL_S, step)
            elif len(reasons) < len(keys):
                reasons.append(refusal() or move(keys[len(reasons)], blocks[len(reasons)]))
                self._world.call_after(self._block_s(), step)
            else:
                self.transfers_running -= 1
                end(reasons)

        self.transfers_running += 1
        self._world.call_after(self._block_s(), step)

    def store(self, key: OffloadKey, block: memoryview) -> str:
        """Store a block; return the error, or ""."""
        if self.chance(self.mood.fails):
            return "io_error"
        header, payload = encode_record(key, block, self._namespace_digest)
        record = bytearray(header + bytes(payload))
        if self.chance(self.mood.tears):
            del record[self._world.rng.randrange(len(record)) :]
        self.records.pop(key, None)
        while len(self.records) >= self._records_max:
            del self.records[next(iter(self.records))]
        self.records[key] = record
        return ""

    def load(self, key: OffloadKey, block: memoryview) -> str:
        """Load a block; return the error, or ""."""
        if self.chance(self.mood.fails):
            block[: len(block) // 2] = bytes(len(block) // 2)  # a transfer that breaks off leaves its beginning
            return "io_error"
        record = self.records.get(key)
        if record is None:
            return "absent"
        data = memoryview(record)
        status = decode_record(data[:HEADER_BYTES], data[HEADER_BYTES:], key, block, self._namespace_digest)
        data.release()
        if status is not RecordStatus.OK:
            del self.records[key]
        return "" if status is RecordStatus.OK else status.value

    def has(self, key: OffloadKey) -> bool:
        return (key in self.records) != self.chance(self.mood.lies)

    def damage(self, rng: Random) -> None:
        """Flip a bit of a record, cut it, or put another key's record in its place."""
        if not self.records:
            return
        keys = list(self.records)
        key, record = keys[rng.randrange(len(keys))], bytearray()
        match rng.randrange(3):
            case 0:
                record = self.records[key]
                if record:
                    record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
            case 1:
                record = self.records[key]
                del record[rng.randrange(len(record) + 1) :]
            case _:
                self.records[key] = bytearray(self.records[keys[rng.randrange(len(keys))]])

    def chance(self, probability: float) -> bool:
        return probability > 0 and self._world.rng.random() < probability

    def maybe_raise(self) -> None:
        if self.chance(self.mood.raises):
            raise TierUnavailableError("the simulated tier is not to be reached")

    def _block_s(self) -> float:
        return self._world.rng.random() * 2 * self.mood.block_s
