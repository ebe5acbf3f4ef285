"""The contract of a secondary tier.

The author of a tier implements `SecondaryTierManager`; a `GuardedTier` calls it, on the scheduler's thread or on a
thread of `IsolatedTier`. These things must stay true:

- A submission does not wait. Each job is reported once, by `SecondaryTierManager.get_finished`.
- Until a job is reported its rows belong to the job: others may only read the rows of a store. Afterwards the tier uses
  none of these rows.
- A *cascade* store copies blocks from the region of the primary tier into the tier. A *promotion* load copies them
  back. A load reports only blocks with their stored bytes.

Names and signatures follow vLLM v1's `vllm.v1.kv_offload.tiering.base`. Additions of this project have defaults, so a
tier that implements only the four abstract methods works.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol, Self

import numpy as np

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.config.limits import TenantLimits
from tiered_kv.errors import ConfigError
from tiered_kv.hints import DEFAULT_TENANT
from tiered_kv.reasons import Reason

JobId = int
"""Unique within a manager, never reused."""
DIGEST_BYTES: Final = 16
"""The size of a namespace's digest."""


def _own_namespace() -> bytes:
    return secrets.token_bytes(DIGEST_BYTES)


@dataclass
class JobMetadata:
    """A batch of blocks of one request, for one tier, in one direction.

    Args:
        job_id: Identifies the job in `JobResult`.
        keys: The blocks, in the order of their request's prefix; may be empty.
        block_ids: Rows of the primary tier's region, int64 of shape (n,), in the order of `keys`.
        is_promotion: True for a load into the region, False for a store out of it.
        req_context: The request; without an id, the blocks belong to no running request.
        deadline: When the job expires, in seconds of `time.monotonic()`; None for never. A tier may cancel a job
            that cannot meet it, but must still report the job: its rows are not reused before the report.
        tenant: For whose share of the tier the blocks of a store count; `DEFAULT_TENANT` in a tier without `limits`.
    """

    job_id: JobId
    keys: Collection[OffloadKey]
    block_ids: np.ndarray[Any, np.dtype[np.int64]]
    is_promotion: bool
    req_context: ReqContext
    deadline: float | None = None
    tenant: str = DEFAULT_TENANT


@dataclass
class JobResult:
    """How a job ended. After the report the tier must not touch the job's rows any more.

    Args:
        job_id: The job.
        success: True if every key succeeded.
        successful_keys: The keys that succeeded, if not all did; None if all keys have the outcome of `success`.
        reason: Why keys failed: a `Reason`, or one word of the tier's own for the counters; empty if unknown.
        ended_s: When the job ended, in seconds of `time.monotonic()`; default the time of the report.
    """

    job_id: JobId
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    reason: str = ""
    ended_s: float | None = field(default=None, compare=False)

    @property
    def cause(self) -> Reason:
        """`reason` as the manager knows it; a word of the tier's own is `Reason.OTHER`."""
        return Reason.of(self.reason)

    @property
    def word(self) -> str:
        """`reason` as the counters name it."""
        return str(self.reason or Reason.FAILED)


class ReportsJobs(Protocol):
    """What reports the ends of jobs: a tier, or the removal of one."""

    def get_finished(self) -> Iterable[JobResult]:
        """See `SecondaryTierManager`."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The configuration that a stack passes to a tier as `offloading_spec`.

    Args:
        name: The tier's name, unique in the stack.
        block_bytes: Bytes of one block.
        namespace_digest: 16 bytes: a digest of all fields that must agree before blocks are interchangeable. By default
            it is random: no other tier has it, and this tier gets another one when it is opened again.
        namespace: The fields of the digest in readable form, to be stored beside the data.
        wants_events: Whether the tier's events are used. If not, the tier need not collect any.
        memory: If set, `JobMetadata.block_ids` are byte offsets into it, and the tier's view only has the right sizes.
            If None, they are rows of the view.
        on_finished: Called on any thread when a job has ended or lookups were answered; returns at once. Optional.
        holds_records: Whether `memory` holds records in place of blocks, for a copy between storages: the tier stores
            each as it is, and gets no loads. Only for tiers with `takes_records`.
        limits: The tenants' shares of the tier's capacity, which may change; None without shares. A stack makes them of
            the field `limits`, if the model of the tier's entry has one. `tiered_kv.toolkit.shares` follows them.
    """

    name: str
    block_bytes: int
    namespace_digest: bytes = field(default_factory=_own_namespace)
    namespace: Mapping[str, object] = field(default_factory=dict)
    wants_events: bool = False
    memory: memoryview | None = None
    on_finished: Callable[[], None] | None = None
    holds_records: bool = False
    limits: TenantLimits | None = None

    def __post_init__(self) -> None:
        digest = self.namespace_digest
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            raise ConfigError(
                f"a tier's namespace_digest is {DIGEST_BYTES} bytes, found {digest!r}; "
                "leave it out for a namespace that no other tier shares"
            )

    @classmethod
    def of(cls, offloading_spec: object, tier_type: str, primary_kv_view: memoryview) -> Self:
        """Return the configuration in a tier's `offloading_spec`, which may be an engine's own object.

        An object without a `namespace_digest` gets a namespace that no other tier shares. A constructor that needs the
        result early passes the result to `SecondaryTierManager.__init__`, in place of the object.

        Raises:
            ConfigError: The object's `namespace_digest` is not 16 bytes.
        """
        if isinstance(offloading_spec, cls):
            return offloading_spec if offloading_spec.name else replace(offloading_spec, name=tier_type)
        shape = primary_kv_view.shape
        found: dict[str, Any] = {}  # Any: arguments of this class
        for name, accepted in _OF_OTHERS.items():
            value = getattr(offloading_spec, name, None)
            if isinstance(value, accepted) or (value is not None and name == "namespace_digest"):
                found[name] = value
        if callable(on_finished := getattr(offloading_spec, "on_finished", None)):
            found["on_finished"] = on_finished
        return cls(**{"name": tier_type, "block_bytes": shape[-1] if shape else 0, **found})


_OF_OTHERS: Final[Mapping[str, type]] = {
    "name": str,
    "namespace_digest": bytes,
    "namespace": Mapping,
    "wants_events": bool,
    "memory": memoryview,
}
"""The attributes that `TierSpec.of` reads from an object of another class, if they have this type."""


class SecondaryTierManager(ABC):
    """One storage tier behind the primary tier.

    One thread calls every method but `stats`, `describe` and `has_saved_reset`. If `is_nonblocking` is True, this is
    the scheduler's thread: each call must return within microseconds and do no I/O. The base classes of
    `tiered_kv.toolkit` do so. If it is False, the tier gets its own thread, and a slow call costs hits but no scheduler
    time.

    An exception, or a value of a wrong type, is a miss or a failed job, and is counted. If `submit_store` or
    `submit_load` raises, the tier must not touch the job's rows, and must not report the job.

    Args:
        offloading_spec: The configuration. A stack passes a `TierSpec`. Engines may pass an object of their own, which
            `TierSpec.of` converts.
        primary_kv_view: The primary tier's region, writable, of shape (num_blocks, block_bytes).
        tier_type: The name under which the tier was registered, for messages and counters.

    Attributes:
        tier_spec: The tier's configuration, from any object that was passed.
    """

    is_nonblocking: ClassVar[bool] = False
    takes_offsets: bool = False
    """Whether the tier supports `TierSpec.memory`, as the toolkit's tiers do. Other tiers work only below a manager."""
    takes_records: ClassVar[bool] = False
    """Whether the tier supports `TierSpec.holds_records`, so that `tiered-kv copy` can fill its storage."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self.tier_spec = TierSpec.of(offloading_spec, tier_type, primary_kv_view)
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if the tier has the complete block, False if not, None if the answer comes later."""

    @abstractmethod
    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Begin to copy blocks that the tier lacks out of the primary tier.

        The blocks stay pinned, and unchanged, until the job is reported. Loads may go before stores, but neither
        may starve the other: whatever comes meanwhile, a job begins before its deadline if the storage is fast enough.
        """

    @abstractmethod
    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Begin to copy blocks into the primary tier. Blocks that fail verification must be reported as failed."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each exactly once."""

    @property
    def lookup_failures(self) -> int:
        """How many lookups got the answer False because the answer was unknown. The breaker watches this number."""
        return 0

    @property
    def relocated_blocks(self) -> int:
        """How many blocks the tier has moved inside its storage, such as to make room. A `write_budget` counts them.

        Reads memory only.
        """
        return 0

    def explain_failure(self, reason: str) -> str | None:
        """Return the last failure for a job's `reason` and its remedy, for the log; None if the tier knows no failure.

        An empty reason stands for lookups. Reads memory only. A tier that is not `is_nonblocking` is not asked.
        """
        return None

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return `lookup` of each key, in order."""
        lookup = self.lookup
        return [lookup(key, req_context) for key in keys]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note the use of blocks, for tiers that evict by use, or by age.

        The blocks were used in a tier above, such as the primary one, or named by the engine. A manager calls a few
        times a second, mostly with 512 blocks at most, without a request id. The last used blocks come first, and the
        blocks of one request in the order of its prefix.
        """
        return

    def take_absent(self) -> Iterable[OffloadKey]:
        """Return the touched blocks, since the last call, that the tier found to be absent. Optional.

        The manager stores them again while they are in the primary tier, some at a time.
        """
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return how the tier wants the request's blocks: each once (the default), or all of them at its end.

        "All" means every block that the request stored, loaded or touched and the primary tier still has. Other
        requests may have written some of them. One store brings them, within the budget, before `on_request_finished`.
        """
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's state, such as cached answers.

        Called once for each request, at the latest before `shutdown`. All jobs of the request have been submitted, and
        may still be in flight; none follows. The manager waits a limited time for the request's last stores. Blocks
        that come to this tier later have a context without an id.
        """
        return

    def on_schedule_end(self) -> None:
        """End a scheduler step, for tiers that gather work during it."""
        return

    def reset_cache(self) -> bool:
        """Forget every block: no block that was stored before may be found or loaded again.

        Returns:
            Whether the tier supports this. If not (the default), the manager stops using the tier.
        """
        return False

    @property
    def has_saved_reset(self) -> bool:
        """Whether the storage has recorded the last reset, for later processes too. Any thread may ask."""
        return True

    @property
    def reports_stored(self) -> bool:
        """Whether `take_events` reports each block when it is stored and when it is removed, in that order.

        If not (the default), the manager derives stored blocks from the results of jobs.
        """
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that the tier removed since the last call, and with `reports_stored` also the stored ones.

        The manager uses only `keys` and `removed`. It drops events from before a `reset_cache`, and reports the reset.
        """
        return ()

    def stats(self) -> Mapping[str, Any]:  # Any: a number, or a mapping of numbers by label
        """Return the tier's counters and gauges by name, in the form of `tiered_kv.metrics.counters.Counters.snapshot`.

        Reads memory only. If `is_nonblocking` is True, any thread may call it during a call of the scheduler's thread.
        """
        return {}

    def describe(self) -> Mapping[str, object]:
        """Return facts about the tier and its storage, for users. May do I/O; not called on the hot path.

        Raises:
            TierUnavailableError: The storage does not answer, or refuses access.
        """
        return {}

    def shutdown(self) -> None:
        """Release threads, connections and files, in bounded time. Jobs that have not ended need not be reported."""
        return
