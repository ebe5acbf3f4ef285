"""The contract of a secondary tier.

A secondary tier never sees GPU memory. A *cascade* store copies blocks out of the primary tier's CPU region
into the tier; a *promotion* load copies them back. Both are jobs: submitted without waiting, reported once by
`SecondaryTierManager.get_finished`.

Names and signatures follow vLLM v1's `vllm.v1.kv_offload.tiering.base`. Additions of this project have defaults,
so a tier that implements only the four abstract methods works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext

JobId = int
"""Names a job; unique within a manager, never reused."""


@dataclass
class JobMetadata:
    """A batch of blocks of one request, for one tier, in one direction.

    Args:
        job_id: The job's name in `JobResult`.
        keys: The blocks, in the order of their request's prefix.
        block_ids: Rows of the primary tier's region, int64 of shape (n,), in the order of `keys`.
        is_promotion: True for a load into the region, False for a store out of it.
        req_context: The request.
        deadline: When the job expires, in seconds of `time.monotonic()`; None for never. A tier
            may cancel work that cannot meet it, but must still report the job: its blocks are not reused
            until it does.
    """

    job_id: JobId
    keys: Collection[OffloadKey]
    block_ids: np.ndarray[Any, np.dtype[np.int64]]
    is_promotion: bool
    req_context: ReqContext
    deadline: float | None = None


@dataclass
class JobResult:
    """How a job ended. After the report no code of the tier touches the job's blocks any more.

    Args:
        job_id: The job.
        success: True if every key succeeded.
        successful_keys: If not all keys succeeded, those that did; None if `success` holds for all of
            them.
        reason: One word for the counters where something failed, such as "checksum", "io_error", "no_space".
        ended_s: When the job ended, in seconds of `time.monotonic()`; None for when it is reported.
    """

    job_id: JobId
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    reason: str = ""
    ended_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A stack's description of a tier's data, for the tier's `offloading_spec`.

    Args:
        name: The tier's name in the stack, unique in it.
        block_bytes: Bytes of one block.
        namespace_digest: 16 bytes, a digest of all fields that must agree before blocks are interchangeable.
        namespace: The same in readable form, to be kept beside the data.
        wants_events: Whether somebody takes the tier's events; if not, it need not collect any.
        memory: Where blocks begin at any byte: then `JobMetadata.block_ids` are byte offsets into it, and the view that
            the tier gets tells only the sizes. None where they are rows of that view.
        on_finished: Called by any thread when a job has ended or lookups were answered, so that nobody needs to poll.
            It returns at once. None where nobody wants it.
    """

    name: str
    block_bytes: int
    namespace_digest: bytes = bytes(16)
    namespace: Mapping[str, object] = field(default_factory=dict)
    wants_events: bool = False
    memory: memoryview | None = None
    on_finished: Callable[[], None] | None = None


class SecondaryTierManager(ABC):
    """One storage tier behind the primary tier.

    The manager calls every method from one thread. If `is_nonblocking` is True that thread is the scheduler's,
    and each call must return within microseconds and do no I/O; the toolkit's bases
    (`tiered_kv.toolkit`) take care of that. If it is False the manager gives the tier a thread of its
    own, so that a slow call costs hits and never the scheduler's time.

    Args:
        offloading_spec: The configuration that the tier is opened for. The stack passes a `TierSpec`;
            engines pass their own; a tier that needs none accepts anything. For the built-in tiers, all stacks without
            a `TierSpec` that have one block size share a namespace.
        primary_kv_view: The primary tier's region, writable, of shape (num_blocks, block_bytes).
        tier_type: The name under which the tier was registered, used in messages and counters.
    """

    is_nonblocking: ClassVar[bool] = False
    takes_offsets: bool = False
    """Whether the tier heeds `TierSpec.memory`, as the toolkit's do; one that does not works below a manager only."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if the tier has the complete block, False if not, None if it does not know yet."""

    @abstractmethod
    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Begin to copy blocks out of the primary tier, except those that the tier already has.

        The blocks stay pinned, and unchanged, until the job is reported.
        """

    @abstractmethod
    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Begin to copy blocks into the primary tier. Bytes that fail verification must be reported as failed."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each exactly once."""

    @property
    def lookup_failures(self) -> int:
        """How many lookups this tier has answered with False because it could not know; the breaker watches it."""
        return 0

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return `lookup` of each key, in order."""
        lookup = self.lookup
        return [lookup(key, req_context) for key in keys]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that `keys` were used, for tiers that evict by use."""
        return

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return how this tier wants the request's blocks: each once (the default), or all of them at its end."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's state, such as cached answers."""
        return

    def on_schedule_end(self) -> None:
        """End a scheduler step, for tiers that gather work during it."""
        return

    def reset_cache(self) -> bool:
        """Forget every block: none that was stored before may be found or loaded again.

        Returns:
            Whether this tier can. If not (the default), the manager stops using it: blocks that are no
            longer valid must not come back.
        """
        return False

    @property
    def tells_stored(self) -> bool:
        """Whether `take_events` reports each block when it is stored and when it is removed, in that order.

        If not (the default), the manager derives stored blocks from the results of jobs.
        """
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what this tier removed since the last call, and with `tells_stored` also what it stored.

        The manager uses the keys and `removed`. It forgets the events from before a `reset_cache`, and tells of the
        reset itself.
        """
        return ()

    def stats(self) -> Mapping[str, Any]:  # Any: a number, or for what has labels a mapping of numbers by label
        """Return the tier's own counters and gauges by name, as `tiered_kv.counters` says; any thread may call."""
        return {}

    def describe(self) -> Mapping[str, object]:
        """Return facts about the tier and its surroundings, for users. May do I/O; never called on the hot path.

        Raises:
            TierUnavailableError: The storage does not answer, or refuses.
        """
        return {}

    def shutdown(self) -> None:
        """Release threads, connections and files. Bounded in time; jobs that have not ended are reported or void."""
        return
