"""The nvme tier: adapts the segment store to the contract of secondary tiers.

The stack opens it. A `GuardedTier` calls it on the scheduler's thread, and no such call does I/O. The toolkit's workers
call `store_blocks` and `load_blocks`. A block that a job has stored is found by later lookups, unless a reset came
between; a failed block is reported by its key.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.claimed import Identity, absolute, as_line
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv.toolkit.queued import block_bytes_of
from tiered_kv.toolkit.record import codecs_of
from tiered_kv_nvme.disk import address_of
from tiered_kv_nvme.layout import PAGE_BYTES
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.sizing import Sizing, descriptors_left, room_bytes_of
from tiered_kv_nvme.store import SegmentStore, StoreOptions, open_segments_max

PART_BYTES = 2 << 20  # bytes of one part of a job
PART_BLOCKS_MIN = 16
"""The least number of blocks of a part, of any size: each part costs some handoffs of the interpreter lock. With
compressed or encrypted blocks the least is 1, since each thread has a buffer for a part of them."""
STORE_PART_BLOCKS_MIN = 64  # in a store: no request waits for it. With 16 a server that only stored took 3 % longer.
ABSENT_MAX: Final = 4096  # touched blocks that the directory lacks, until they are taken
_ROOM_TIMEOUT_MAX_S: Final = 5.0  # how long a store waits for a free segment, at most
_SHUTDOWN_TIMEOUT_S: Final = 2.0
_SHUTDOWN_SPARE_S: Final = 0.3  # of this time, for what follows the saving of the index

_log = logging.getLogger("tiered_kv.nvme")


class NvmeTier(BlockingTier):
    """Blocks in a directory of segment files on a local disk.

    The constructor opens the directory and reads its index. Lookups are answered from memory.

    Raises:
        ConfigError: The sizes do not fit the blocks, or the codec's library or a key file cannot be used.
        TierBusyError, FormatError, TierUnavailableError: The directory cannot be used; see `SegmentDirectory`.
    """

    takes_records = True

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: NvmeSettings
    ) -> None:
        # Steps that may fail come first: a tier that was not opened must hold no view of the region.
        spec = TierSpec.of(offloading_spec, tier_type, primary_kv_view)
        self._store = _open_store(spec, primary_kv_view, settings)
        try:
            super().__init__(
                spec,
                primary_kv_view,
                tier_type,
                threads=settings.threads,
                part_bytes=PART_BYTES,
                part_blocks_min=PART_BLOCKS_MIN if settings.codec == "raw" else 1,
                store_part_blocks_min=STORE_PART_BLOCKS_MIN if settings.codec == "raw" else 1,
                lookup_timeout_s=settings.lookup_timeout,
                shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
            )
        except BaseException:
            self._store.close()
            raise
        self.epoch = self._store.epoch
        self._absent: deque[OffloadKey] = deque(maxlen=ABSENT_MAX)  # touched; the scheduler's thread owns it
        self._save_until_s = math.inf
        self._index = self._store.pool.index  # saves two attribute lookups per call of `lookup`

    # The scheduler's thread.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return self._index.answers[key]

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [*self._store.contains(keys)]

    def explain_failure(self, reason: str) -> str | None:
        return self._store.counters.explain(reason) or super().explain_failure(reason)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._absent.extend(self._store.touch(keys))

    def take_absent(self) -> Iterable[OffloadKey]:
        absent = list(self._absent)
        self._absent.clear()
        return absent

    @property
    def has_saved_reset(self) -> bool:
        return self._store.has_saved_reset

    def reset_cache(self) -> bool:
        self.begin_epoch(self._store.reset())
        return True

    @property
    def reports_stored(self) -> bool:
        return True

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._store.pool.events.take(self.block_bytes, self.name)

    @property
    def relocated_blocks(self) -> int:
        return self._store.counters["relocated_blocks_total"]

    def stats(self) -> Mapping[str, Any]:
        return {**super().stats(), **self._store.stats()}

    def describe(self) -> Mapping[str, object]:
        return self._store.describe()

    def shutdown(self) -> None:
        self._save_until_s = time.monotonic() + _SHUTDOWN_TIMEOUT_S - _SHUTDOWN_SPARE_S
        self._store.stop_stores()  # a worker that waits for room would exceed the time for closing
        super().shutdown()

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._store.store(keys, blocks, self.part_epoch, self.part_deadline, self.part_tenant)

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._store.load(keys, blocks, self.part_deadline)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._store.contains(keys)

    def close(self) -> None:
        self._store.close(save_until_s=self._save_until_s)


def _open_store(spec: TierSpec, primary_kv_view: memoryview, settings: NvmeSettings) -> SegmentStore:
    block_bytes = block_bytes_of(primary_kv_view)
    identity = Identity(spec.namespace_digest, spec.namespace, block_bytes)
    codecs = codecs_of(spec, settings)
    options = StoreOptions(
        sizing=Sizing.of(
            settings.capacity,
            block_bytes,
            settings.segment,
            overhead_bytes=codecs.overhead_bytes,
            room_bytes=room_bytes_of(absolute(settings.path)),
            descriptors_max=descriptors_left(open_segments_max()),
        ),
        want_direct=settings.direct,
        codecs=codecs,
        threads=settings.threads,
        room_timeout_s=min(_ROOM_TIMEOUT_MAX_S, settings.job_timeout / 2),
        private=settings.private,
        required_mount=settings.required_mount,
        wants_events=spec.wants_events,
        limits=spec.limits,
        is_in_pages=spec.memory is None
        and block_bytes % PAGE_BYTES == 0
        and address_of(primary_kv_view) % PAGE_BYTES == 0,
    )
    tier = spec.name
    store = SegmentStore(settings.path, identity, options, tier=tier)
    with suppress(OSError):  # the first store meets it too
        description = store.describe()
        _log.info("tier '%s': opened; %s", tier, as_line(description))
        if warning := description.get("warning"):
            _log.warning("tier '%s': %s", tier, warning)
    return store
