"""Keyed names: the names of blocks in a tier's storage, in place of their keys.

A key is a hash of tokens. An attacker who knows a prompt can compute it. If the attacker also reads the tier's storage,
the key shows whether the prompt was used. With a *name key* a tier never sees a key. It sees a name:

    BLAKE2b(key = name key, person = "tiered-kv-name-1", digest's length (1 byte) || namespace digest || block's key),
    32 bytes || group index

BLAKE2b (RFC 7693) in its keyed mode is a MAC. Without the name key nobody can compute a name, or decide which of two
keys it stands for. A name has the form of an `OffloadKey`. It keeps the group's index, which reveals nothing about the
tokens.

BLAKE2b takes about 0.4 of the time of HMAC-SHA256 (`performance.md`). The state after the name key and the digest is
copied for each block, and the rest fits one compression.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier

NAMES_MAX = 1 << 15
"""Keys whose names are remembered; a request asks for, stores and touches the same ones. At most about 8 MB."""

_PERSON = b"tiered-kv-name-1"
_NAME_BYTES = 32
_GROUP_BYTES = 4


class NameMap(dict[OffloadKey, OffloadKey]):
    """The name of each key, computed when it is first asked for. One thread.

    A dictionary, so that a known name is found without a call in Python. It is cleared when it is full: to track the
    use of entries would cost more than to compute them again. `namespace_digest` has at most 255 bytes.
    """

    __slots__ = ("_new_mac",)

    def __init__(self, name_key: bytes, namespace_digest: bytes) -> None:
        super().__init__()
        prefix = bytes([len(namespace_digest)]) + namespace_digest  # with the length, digest and key cannot be confused
        mac = hashlib.blake2b(prefix, digest_size=_NAME_BYTES, key=name_key, person=_PERSON)
        self._new_mac = mac.copy

    # On the scheduler's thread, for each block: nothing that can be avoided, a NewType's call included.
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
        return f"<{len(self)} names>"  # and not what is stored, and under what


class KeyedNames(WrapperTier):
    """Wraps a tier, which gets names instead of keys, so that its callers see keys.

    Calls are as cheap and as thread-bound as those of the wrapped tier. Its events are dropped: they name blocks whose
    keys may not be known, such as those of earlier processes.

    Args:
        inner: The tier, opened; it is shut down with this one.
        name_key: 32 bytes, secret. Two processes share blocks if theirs are the same.
    """

    def __init__(self, inner: SecondaryTierManager, name_key: bytes) -> None:
        super().__init__(inner)
        self.is_nonblocking = inner.is_nonblocking  # type: ignore[misc]  # what a class says, an instance may say too
        self._name_of = NameMap(name_key, getattr(inner._offloading_spec, "namespace_digest", bytes(16)))
        self._lookup = inner.lookup
        # Keys and names of each job in flight, as many as its guarded tier lets in.
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
    def tells_stored(self) -> bool:
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        list(self.inner.take_events())  # so that they do not pile up
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
        """Return a result in terms of keys; nonsense, and that of nobody's job, as it is: the guarded tier judges."""
        try:
            job = self._jobs.pop(result.job_id, None) if isinstance(result, JobResult) else None
            if job is None or result.successful_keys is None:
                return result
            key_of = dict(zip(job[1], job[0], strict=True))
            # A name that was not in the job counts as failed.
            keys = [key_of[name] for name in result.successful_keys if name in key_of]
        except Exception:
            return result
        return replace(result, successful_keys=keys)
