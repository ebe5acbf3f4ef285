"""What a simulated tier keeps, and the moods in which it does."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.support.simulation.world import World
from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record


@dataclass(slots=True)
class Mood:
    """How a tier behaves just now; probabilities are from 0 to 1.

    Attributes:
        block_s: Seconds that a block takes, drawn evenly from 0 to twice this.
        answer_s: Seconds until a lookup is answered; 0 for at once.
        is_wedged: Transfers stand still. Those that have begun go on when it ends, whatever has expired meanwhile.
        is_mute: Nothing is reported and no lookup answered, though transfers go on.
        fails: How likely a block is not stored, or not loaded.
        raises: How likely a call raises.
        lies: How likely a lookup is answered with the contrary of what is true.
        babbles: How likely `get_finished` adds results that nobody waits for.
        tears: How likely only a part of a record is written, and called a success.
    """

    block_s: float = 0.005
    answer_s: float = 0.0
    is_wedged: bool = False
    is_mute: bool = False
    fails: float = 0.0
    raises: float = 0.0
    lies: float = 0.0
    babbles: float = 0.0
    tears: float = 0.0


class SimulatedStorage:
    """Records in a dictionary of limited size, the oldest out first."""

    def __init__(self, world: World, namespace_digest: bytes, records_max: int) -> None:
        self.records: dict[OffloadKey, bytearray] = {}
        self.mood = Mood()
        self._world = world
        self._namespace_digest = namespace_digest
        self._records_max = records_max

    def store(self, key: OffloadKey, block: memoryview) -> str:
        """Keep a block; return why it was not, or nothing."""
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
        """Bring a block back; return why it could not be, or nothing."""
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
        """Return whether a block is here, or a lie."""
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
