"""Keyed names, which replace the keys of blocks in a tier's storage.

A key is a hash of tokens. An attacker who knows a prompt can compute it, and who also reads the tier's storage can see
whether the prompt was used. With a secret *name key* the tier gets a name instead of each key:

    BLAKE2b(key = name key, person = "tiered-kv-name-1", digest's length (1 byte) || namespace digest || block's key),
    32 bytes || group index

BLAKE2b (RFC 7693) in its keyed mode is a MAC: without the name key, nobody can compute a name, or decide which of two
keys it belongs to. A name has the form of an `OffloadKey`. The group index reveals nothing about the tokens.

BLAKE2b takes about 0.4 of the time of HMAC-SHA256 (`performance.md`). The state after the name key and the digest is
copied for each block; the rest fits one compression.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier

NAMES_MAX = 1 << 15
"""Keys whose names are cached, in about 8 MB at most: a request looks up, stores and touches the same keys."""

_PERSON = b"tiered-kv-name-1"
_NAME_BYTES = 32
_GROUP_BYTES = 4


class NameMap(dict[OffloadKey, OffloadKey]):
    """A cache of the name of each key. Used by one thread.

    A dictionary finds a cached name without a call in Python. It is cleared when it is full: computing names again is
    cheaper than tracking their use. `namespace_digest` has at most 255 bytes.
    """

    __slots__ = ("_new_mac",)

    def __init__(self, name_key: bytes, namespace_digest: bytes) -> None:
        super().__init__()
        prefix = bytes([len(namespace_digest)]) + namespace_digest  # the length separates the digest from the key
        mac = hashlib.blake2b(prefix, digest_size=_NAME_BYTES, key=name_key, person=_PERSON)
        self._new_mac = mac.copy

    # Hot path: runs on the scheduler's thread for each block. Even the call of a NewType is avoided.
    def __missing__(self, key: OffloadKey) -> OffloadKey:
        if len(self) >= NAMES_MAX:
            self.clear()
        mac = self._new_mac()
        mac.update(key)
        self[key] = name = mac.digest() + key[-_GROUP_BYTES:]  # type: ignore[assignment]
        return name  # type: ignore[return-value]

    def of(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return the names of `keys`, in order."""
        return [self[key] for key in keys]

    def __repr__(self) -> str:
        return f"<{len(self)} names>"  # keys and names must not appear in logs


class KeyedNames(WrapperTier):
    """Passes names instead of keys to the wrapped tier, and translates its results back.

    The wrapped tier's events are dropped: the keys of blocks of earlier processes are unknown.

    Args:
        inner: The wrapped tier.
        name_key: 32 bytes, secret. Processes with the same name key share blocks.
    """

    def __init__(self, inner: SecondaryTierManager, name_key: bytes) -> None:
        super().__init__(inner)
        self.is_nonblocking = inner.is_nonblocking  # type: ignore[misc]  # a ClassVar, but only the instance knows
        self._name_of = NameMap(name_key, getattr(inner._offloading_spec, "namespace_digest", bytes(16)))
        self._lookup = inner.lookup
        # Keys and names of each job in flight. The budgets of the guarded tier limit them.
        self._jobs: dict[JobId, tuple[Collection[OffloadKey], list[OffloadKey]]] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self._lookup(self._name_of[key], req_context)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return self.inner.lookup_many(self._name_of.of(keys), req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.inner.touch(self._name_of.of(keys), req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(self.inner.submit_store, job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(self.inner.submit_load, job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        results = self.inner.get_finished()
        return map(self._end, results) if results else ()  # one by one: the next may raise

    @property
    def reports_stored(self) -> bool:
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        list(self.inner.take_events())  # so that the tier's queue does not grow
        return ()

    def describe(self) -> Mapping[str, object]:
        return {**self.inner.describe(), "names": "keyed"}

    def _submit(self, submit: Callable[[JobMetadata], None], job: JobMetadata) -> None:
        names = self._name_of.of(job.keys)
        self._jobs[job.job_id] = (job.keys, names)
        try:
            submit(replace(job, keys=names))
        except BaseException:
            self._jobs.pop(job.job_id, None)
            raise

    def _end(self, result: JobResult) -> JobResult:
        """Return a result with keys instead of names. Invalid results are returned unchanged, for `GuardedTier`."""
        try:
            job = self._jobs.pop(result.job_id, None) if isinstance(result, JobResult) else None
            if job is None or result.successful_keys is None:
                return result
            key_of = dict(zip(job[1], job[0], strict=True))
            keys = [key_of[name] for name in result.successful_keys if name in key_of]
        except Exception:
            return result
        return replace(result, successful_keys=keys)
