"""The base of tiers that keep blocks as objects in a bucket: what is the same for every server and client library.

A tier subclasses `ObjectTier`, and gives it a store and a control (`store`). A `GuardedTier` calls it on the
scheduler's thread, and no such call does I/O. The toolkit's workers store, load and look up; the sweeper has a thread
of its own. A load verifies the record.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.reasons import UNREADABLE, Reason
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.codecs import ThreadBuffer
from tiered_kv.toolkit.epoch import Epoch
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.objects.epoch import EpochObject
from tiered_kv.toolkit.objects.failures import RequestFailures
from tiered_kv.toolkit.objects.naming import Naming
from tiered_kv.toolkit.objects.presence import Presence
from tiered_kv.toolkit.objects.probe import BucketProbe
from tiered_kv.toolkit.objects.settings import ObjectSettings
from tiered_kv.toolkit.objects.store import ObjectControl, ObjectStore
from tiered_kv.toolkit.objects.sweeper import Sweeper
from tiered_kv.toolkit.objects.verdict import ABSENCE, UNHEARD, BucketError, Verdict
from tiered_kv.toolkit.queued import block_bytes_of
from tiered_kv.toolkit.record import (
    HEADER_BYTES,
    RecordStatus,
    codecs_of,
    decode_record,
    encode_record,
    record_bytes_max,
)
from tiered_kv.toolkit.touches import Touches

_PART_BYTES = 1  # one block a part: a job takes mostly the server's time to answer, so its blocks travel in parallel
_SHUTDOWN_S = 2.0
_PROBE_S = 10.0  # how long `describe` waits for the epoch's mark
_TOUCH_S = 60.0
"""Seconds after which a use of the same block in a tier above counts again."""
_SAVE_S = 10.0  # how long a reset tries to write its mark in the background; after that the next store writes it
_JOB_SHARE = 0.9  # a part ends a tenth of its time early, so that one stalled block does not make its job expire
_STAYS = UNREADABLE | {RecordStatus.BAD_VERSION}
"""States of records that other processes may read. They are misses here until the next store of the block, and are not
deleted. Unlike a directory, a bucket has no mark of the format version of its blocks."""


BlockFailure: TypeAlias = Reason | Verdict


class ObjectTier(BlockingTier):
    """Blocks as objects in a bucket, shared by all stacks of one namespace.

    Args:
        offloading_spec, primary_kv_view, tier_type: As in `SecondaryTierManager`.
        settings: The tier's.

    Raises:
        ConfigError: The settings do not go together, the client library refuses them, or a key file cannot be used. A
            server that does not answer is no error.
    """

    takes_records = True

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: ObjectSettings
    ) -> None:
        spec = TierSpec.of(offloading_spec, tier_type, primary_kv_view)
        name = spec.name
        self._settings = settings
        self._codecs = codecs_of(spec, settings)
        self._room = ThreadBuffer()
        """Buffers for compressed or encrypted payloads."""
        record_bytes = HEADER_BYTES + block_bytes_of(primary_kv_view) + self._codecs.overhead_bytes
        if settings.capacity is not None and settings.capacity < record_bytes:
            what = f"{settings.capacity} bytes do not hold one record of {record_bytes} bytes"
            raise ConfigError(what, location="capacity")
        self._naming = Naming(settings.prefix, spec.namespace_digest)
        self._store, self._control, self._failures = self.connect(name, record_bytes)
        self._counters = self._failures.counters
        super().__init__(
            spec,
            primary_kv_view,
            tier_type,
            threads=settings.connections,
            part_bytes=_PART_BYTES,
            lookup_timeout_s=settings.lookup_timeout,
            shutdown_timeout_s=_SHUTDOWN_S,
        )
        self._epoch = Epoch(EpochObject(self._store, self._naming.epoch, name), tier=name)
        self._probe = BucketProbe(
            self._store, self._naming.no_block, settings.lookup_timeout, f"tiered-kv-{name}-probe"
        )
        self._presence = Presence(self._store, self._counters, settings.presence_ttl, self._probe.note_silence)
        self._loaded_s = -math.inf
        """When the bucket last answered a load, in seconds of `time.monotonic()`."""
        self._is_described = False
        self._saving = BackgroundTask(partial(self._epoch.try_to_save, _SAVE_S), f"tiered-kv-{name}-reset")
        self._sweeper = Sweeper(
            self._control, self._naming, self._presence, self._counters, settings, f"tiered-kv-{name}-sweeper"
        )
        every_s = min(_TOUCH_S, settings.sweep_interval / 2, (settings.ttl or math.inf) / 4)
        self._touches = Touches(self._note_uses, f"tiered-kv-{name}-touches", every_s)

    @abstractmethod
    def connect(self, name: str, record_bytes: int) -> tuple[ObjectStore, ObjectControl, RequestFailures]:
        """Return the store and the control of the tier `name`, and what counts their failures; without I/O.

        The constructor calls it once, before the rest of the tier exists. The counters have `OBJECT_METRICS`.
        A record has `record_bytes` at most, unless it is compressed.
        """

    def explain_failure(self, reason: str) -> str | None:
        return self._failures.texts.of(reason) or super().explain_failure(reason)

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._transfer_one(self._store_one, keys, blocks)

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._transfer_one(self._load_one, keys, blocks)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        if self._probe.is_silent():
            self._counters.add("unanswered_lookups_total", count=len(keys))
            return [False] * len(keys)
        silences, asked_s = self._probe.silences, time.monotonic()
        deadline = asked_s + self._settings.lookup_timeout
        prefixes: dict[tuple[str, bytes], list[str]] = {}  # names of blocks, by request and KV cache group
        try:
            epoch = self._epoch.value(deadline)
            names = [self._naming.block(epoch, key) for key in keys]
            for req_id, key, name in zip(self.probe_req_ids, keys, names, strict=True):
                prefixes.setdefault((req_id, key[-4:]), []).append(name)
            existing = self._presence.ask([*prefixes.values()], deadline)
            if self._probe.silences == silences:
                self._probe.silences = 0
            return [name in existing for name in names]
        except Exception as error:
            self._counters.add("unanswered_lookups_total", count=len(keys))
            is_silence = isinstance(error, (TierUnavailableError, TimeoutError))
            if (
                is_silence
                and (not isinstance(error, BucketError) or error.reason in UNHEARD)
                and self._store.heard_s < asked_s
            ):
                self._probe.note_silence()  # no answer for the epoch's mark, or from the provider of credentials
            if isinstance(error, BucketError):  # the request's failure is logged
                return [False] * len(keys)
            raise

    def _note_uses(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        epoch = self._epoch.value(time.monotonic() + _SHUTDOWN_S / 4)
        names = [self._naming.block(epoch, key) for key in keys]
        gone = self._sweeper.note_uses(names)
        found = zip(keys, names, strict=True)
        return [key for key, name in found if name in gone or self._presence.known(name) in ABSENCE]

    def close(self) -> None:
        self._store.close()

    # The scheduler's thread.

    @property
    def lookup_failures(self) -> int:
        return super().lookup_failures + self._counters["unanswered_lookups_total"]

    @property
    def has_saved_reset(self) -> bool:
        return self._epoch.is_saved

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self._touches.clear()
        self._epoch.renew()  # after `begin_epoch`: an older store that reads this value finds itself outdated
        self._presence.forget()
        self._saving.ask()
        return True

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._touches.note(keys)

    def take_absent(self) -> list[OffloadKey]:
        return self._touches.take_absent()

    def stats(self) -> Mapping[str, Any]:
        stats = {**super().stats(), **self._counters.snapshot(), "epoch_repairs_total": self._epoch.repairs}
        if self._settings.capacity is not None:
            stats |= {"used_bytes": self._sweeper.used_bytes, "capacity_bytes": self._settings.capacity}
        return stats

    def check_bucket(self) -> None:
        """Raise unless the bucket can be read, listed, and, where a limit needs it, deleted from; for `describe`."""
        self._epoch.value(time.monotonic() + _PROBE_S)  # raises if its mark has another format version
        next(self._control.listed(self._naming.blocks), None)
        has_limit = self._settings.ttl or self._settings.capacity
        if has_limit and (refusals := self._control.delete([self._naming.no_block])):
            said = self._failures.sentence(refusals[0], "", "delete")
            what = f"{said}; without deletes, ttl and capacity cannot be kept"
            raise BucketError(what, refusals[0], tier=self.name, operation="delete")

    def shutdown(self) -> None:
        self._sweeper.stop()
        self._touches.stop(_SHUTDOWN_S / 4)
        self._epoch.try_to_save(_SHUTDOWN_S / 2)
        self._store.close()  # makes the requests in flight fail, so that the threads end
        super().shutdown()
        self._saving.join(_SHUTDOWN_S)
        self._probe.stop(_SHUTDOWN_S)
        self._sweeper.join(_SHUTDOWN_S)
        self._control.close()

    # One block.

    def _transfer_one(
        self,
        transfer: Callable[[OffloadKey, memoryview, float], BlockFailure | None],
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> Outcome:
        (key,), (block,) = keys, blocks
        now_s = time.monotonic()
        left_s = min(self.part_deadline, now_s + self._settings.job_timeout) - now_s
        reason: str | None  # the server's word if the request was for another object, such as the epoch's mark
        try:
            reason = transfer(key, block, now_s + _JOB_SHARE * left_s)
        except BucketError as error:
            reason = error.reason
        return ALL_DONE if reason is None else Outcome((), reason)

    def _store_one(self, key: OffloadKey, block: memoryview, deadline: float) -> BlockFailure | None:
        """Store one block; return why that failed."""
        epoch = self._epoch.saved_value(deadline)
        if self.part_epoch != self.epoch:  # a reset came after the block was submitted
            return Reason.RESET
        self._describe_namespace(deadline)
        name = self._naming.block(epoch, key)
        if self._presence.known(name) is Verdict.DONE:
            self._counters.add("present_blocks_total")
            return None
        header, payload = encode_record(key, block, self.tier_spec.namespace_digest, self._codecs, self._room.take)
        verdict = self._store.put(name, [header, payload], deadline)
        if verdict is not Verdict.DONE:
            return verdict
        self._presence.note(name, Verdict.DONE, time.monotonic())
        self._sweeper.uses.note_stored(name)
        self._sweeper.note_stored(len(header) + len(payload))
        return None

    def _load_one(self, key: OffloadKey, block: memoryview, deadline: float) -> BlockFailure | None:
        """Load one block; return why that failed."""
        name = self._naming.block(self._epoch.value(deadline), key)
        asked_s = time.monotonic()
        header, payload, status = bytearray(HEADER_BYTES), block, RecordStatus.OK
        ages: list[float] = []

        def sink(size_bytes: int) -> list[memoryview] | None:
            nonlocal payload
            if not HEADER_BYTES <= size_bytes <= record_bytes_max(len(block)):
                return None
            is_raw = size_bytes - HEADER_BYTES == len(block)  # if not, the payload is compressed, encrypted or damaged
            payload = block if is_raw else self._room.take(size_bytes - HEADER_BYTES)
            return [memoryview(header), payload]

        for _ in range(2):  # the second time if the first record was damaged, perhaps on its way
            verdict = self._store.get(name, sink, record_bytes_max(len(block)), deadline, on_age=ages.append)
            if verdict is not Verdict.DONE:
                return self._note_failed_get(name, verdict, asked_s, deadline)
            self._loaded_s = time.monotonic()
            status = decode_record(header, payload, key, block, self.tier_spec.namespace_digest, self._codecs)
            if status is RecordStatus.OK:
                self._presence.note(name, Verdict.DONE, asked_s)
                self._sweeper.note_load(name, ages[-1])
                return None
        if status in _STAYS:
            kind = "unreadable_blocks_total" if status in UNREADABLE else "corrupt_blocks_total"
            self._counters.add(kind, status.value)
            self._presence.note(name, Verdict.UNREADABLE, time.monotonic())
        else:
            self._remove_damaged(name, status, deadline)
        return status.reason

    def _note_failed_get(self, name: str, verdict: Verdict, asked_s: float, deadline: float) -> BlockFailure:
        if verdict is Verdict.OVERSIZED:
            self._remove_damaged(name, RecordStatus.BAD_LENGTH, deadline)
            return Reason.CHECKSUM
        if verdict not in ABSENCE:
            if self._loaded_s < asked_s:  # the bucket has answered no load since
                return verdict
            self._counters.add("unanswered_blocks_total")
            self._presence.note(name, Verdict.UNANSWERED, time.monotonic())
            return Verdict.UNANSWERED
        self._loaded_s = time.monotonic()
        self._counters.add("expired_blocks_total", count=verdict is Verdict.EXPIRED)
        self._presence.note(name, verdict, asked_s)
        return Reason.ABSENT

    def _remove_damaged(self, name: str, status: RecordStatus, deadline: float) -> None:
        """Delete an object that is not the block's record; it is a miss here even if it cannot be deleted."""
        self._counters.add("corrupt_blocks_total", status.value)
        is_deleted = self._store.delete(name, deadline) is Verdict.DONE  # this process may lack the right
        self._presence.note(name, Verdict.ABSENT if is_deleted else Verdict.UNREADABLE, time.monotonic())

    # The namespace's objects.

    def _describe_namespace(self, deadline: float) -> None:
        """Store the namespace's readable form once; workers that come meanwhile do not wait."""
        if self._is_described:
            return
        self._is_described, verdict = True, Verdict.UNAVAILABLE
        text = json.dumps(
            {"format": 1, "namespace": dict(self.tier_spec.namespace)}, indent=1, sort_keys=True, default=str
        )
        try:
            verdict = self._store.put(self._naming.namespace, [text.encode()], deadline)
        finally:
            self._is_described = verdict in (Verdict.DONE, Verdict.DENIED, Verdict.REFUSED)
