"""Tiers that keep keys without bytes, in place of a stack's tiers in `tiered-kv simulate`.

The simulation makes them and calls them on its one thread. They evict as their real tiers do. A load takes as
many steps as was measured for the real tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError
from tiered_kv.hints import DEFAULT_TENANT
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.toolkit.codecs import CODEC_IDS, ENCRYPTED_IDS, CodecSettings
from tiered_kv.toolkit.encryption import ENVELOPE_BYTES
from tiered_kv.toolkit.record import HEADER_BYTES


class KeyStore:
    """The keys of a simulated tier, within its capacity and `ttl`. One thread uses it.

    By default it evicts the block that was used least recently. A tier type that evicts in another way names a subclass
    as `TierType.key_store`. Compression is not simulated.

    `settings` is the tier's YAML entry; `clock` returns the time of the requests, in seconds. `moved_blocks` counts the
    `written_blocks` that only moved inside the tier, `lookup_requests` the requests that lookups sent to a server.
    Raises `ConfigError`: the capacity does not hold a block.
    """

    evicts_by_use: ClassVar[bool] = True
    """True: evicts the block that was used least recently. False: the block that was written first."""
    renews: ClassVar[bool] = False  # whether a load past half of the `ttl` starts the `ttl` anew
    load_steps: ClassVar[int] = 2
    """Steps that a load takes after the step of its submission.

    Measured against replays: 2 agrees best with the memory and nvme tiers, 4 with fs and redis.
    """

    def __init__(self, settings: TierSettings, block_bytes: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.settings = settings
        encrypts = isinstance(settings, CodecSettings) and CODEC_IDS[settings.codec] in ENCRYPTED_IDS
        self.overhead_bytes = ENVELOPE_BYTES if encrypts else 0
        self.record_bytes = self.room_bytes(HEADER_BYTES + block_bytes + self.overhead_bytes)
        facts = settings.storage_facts()
        self.capacity_bytes, self.ttl_s = facts.capacity_bytes, facts.ttl_s
        self.written_blocks = self.moved_blocks = self.read_blocks = self.evicted_blocks = self.lookup_requests = 0
        self.tenant = DEFAULT_TENANT
        """For whose share the blocks of the next `store` count."""
        self._written_s: OrderedDict[OffloadKey, float] = OrderedDict()
        """When each block was written or renewed, by `clock`. The next block to evict is the first."""
        if self.capacity_bytes is not None and self.capacity_bytes < self.record_bytes:
            raise ConfigError(
                f"{self.capacity_bytes} bytes do not hold one block", location=settings.storage_settings.capacity
            )

    def room_bytes(self, record_bytes: int) -> int:
        """Return the bytes that a record takes of the capacity; some storage rounds them up."""
        return record_bytes

    @property
    def used_bytes(self) -> int:
        for key in list(self._written_s):
            self.has(key)
        return len(self._written_s) * self.record_bytes

    def has(self, key: OffloadKey) -> bool:
        written_s = self._written_s.get(key)
        if written_s is None:
            return False
        if self.ttl_s is not None and self.clock() - written_s >= self.ttl_s:
            del self._written_s[key]
            return False
        return True

    def note_lookup(self, count: int) -> None:
        """Count the requests to a server for a lookup of the first `count` blocks of a prompt."""

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Store blocks of one prompt, in the prompt's order. Return the keys that are stored then."""
        records = self._written_s
        for key in reversed(keys):  # the tail of a prompt is evicted before its head
            if self.has(key):
                continue
            if self.capacity_bytes is not None and (len(records) + 1) * self.record_bytes > self.capacity_bytes:
                records.popitem(last=False)
                self.evicted_blocks += 1
            records[key] = self.clock()
            self.written_blocks += 1
        return [key for key in keys if key in records]

    def load(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        loaded = [key for key in keys if self.has(key)]
        self.read_blocks += len(loaded)
        self.use(loaded)
        return loaded

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Note that blocks of the tier were used, by a load or in a tier above."""
        for key in reversed(keys):
            if self.renews and self.ttl_s is not None and self.clock() - self._written_s[key] > self.ttl_s / 2:
                self._written_s[key] = self.clock()
                self._written_s.move_to_end(key)
            elif self.evicts_by_use:
                self._written_s.move_to_end(key)


class KeysOnlyTier(SecondaryTierManager):
    """A simulated tier of one manager. The tiers of several managers may share a `KeyStore`."""

    is_nonblocking = True

    def __init__(self, keys: KeyStore, name: str) -> None:
        super().__init__(None, memoryview(b""), name)
        self._keys = keys
        self._absent: list[OffloadKey] = []
        """The blocks of the last `touch` that the tier lacks."""
        self._stores: list[JobMetadata] = []  # submitted in this step; loads go first, as in the toolkit's queue
        self._ended: list[tuple[int, JobResult]] = []  # results, each with the step that reports it
        self._step = 0
        self._noted: set[str] = set()  # requests whose lookup has been counted

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return self._keys.has(key)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if req_context.req_id not in self._noted:  # a waiting request asks again in each step
            self._noted.add(req_context.req_id)
            self._keys.note_lookup(len(keys))
        return [self._keys.has(key) for key in keys]

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._stores.append(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._end(job_metadata, self._keys.load(job_metadata.keys), "absent", self._step + self._keys.load_steps)

    def get_finished(self) -> Iterable[JobResult]:
        stores, self._stores = self._stores, []
        for job in stores:
            self._keys.tenant = job.tenant
            self._end(job, self._keys.store(list(job.keys)), "no_space", self._step)
        step, self._step = self._step, self._step + 1  # the manager asks once a step
        ended = [result for due, result in self._ended if due <= step]
        self._ended = [(due, result) for due, result in self._ended if due > step]
        return ended

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        found = [key for key in keys if self._keys.has(key)]
        self._keys.use(found)
        if len(found) < len(keys):
            self._absent = [key for key in keys if not self._keys.has(key)]

    def take_absent(self) -> Iterable[OffloadKey]:
        absent, self._absent = self._absent, []
        return absent

    @property
    def relocated_blocks(self) -> int:
        return self._keys.moved_blocks

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._noted.discard(req_context.req_id)

    def _end(self, job: JobMetadata, done: Collection[OffloadKey], reason: str, step: int) -> None:
        is_whole = len(done) == len(job.keys)
        result = JobResult(job.job_id, is_whole, None if is_whole else done, "" if is_whole else reason)
        self._ended.append((step, result))
