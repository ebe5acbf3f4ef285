"""The toolkit's jobs: divided into parts that run in parallel, and reported when the last part has ended."""

from __future__ import annotations

import errno
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.errors import FormatError, TierBusyError, TierError, TierUnavailableError
from tiered_kv.tiering.base import JobMetadata, JobResult

_REASONS: tuple[tuple[type[TierError], str], ...] = (
    (TierBusyError, "busy"),
    (FormatError, "format"),
    (TierUnavailableError, "unavailable"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a batch of blocks; an author's `store_blocks` and `load_blocks` return it.

    Args:
        successful_keys: The keys that succeeded; None for all of them.
        reason: One word for the counters if some did not, such as "checksum", "absent" or "no_space".
    """

    successful_keys: Collection[OffloadKey] | None = None
    reason: str = ""


ALL_DONE = Outcome()
"""Every block succeeded."""


@dataclass(slots=True, eq=False)
class Job:
    """A job on its way through a `PartQueue`.

    The fields up to `part_blocks` never change. The cursors belong to the queue and are read and written
    under its lock; `failed_parts` is only appended to until the last part has ended.
    """

    metadata: JobMetadata
    keys: Sequence[OffloadKey]
    """The job's, in a sequence."""
    epoch: int
    """The tier's epoch when the job was submitted; see `QueuedTier.begin_epoch`."""
    part_blocks: int
    """Blocks in one part, at most."""
    end_block: int
    """Blocks from here on never run: the number of keys, or of those started when the rest was cancelled."""
    next_block: int = 0
    """Blocks before this one have been started."""
    ended_blocks: int = 0
    drop_reason: str = ""
    failed_parts: list[tuple[Part, Outcome]] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: JobMetadata, epoch: int, part_blocks: int) -> Job:
        """Return the job that `metadata` describes, in the same time for any number of keys in a sequence."""
        keys = metadata.keys if isinstance(metadata.keys, Sequence) else tuple(metadata.keys)
        return cls(metadata, keys, epoch, part_blocks, end_block=len(keys))

    @property
    def deadline(self) -> float:
        """Seconds of the tier's clock; infinite for never."""
        return math.inf if self.metadata.deadline is None else self.metadata.deadline

    def result(self) -> JobResult:
        """Return how the job ended. Call it once its last part has ended."""
        if not self.failed_parts and self.end_block == len(self.keys):
            return JobResult(self.metadata.job_id, True)
        successful: list[OffloadKey] = []
        reason = self.drop_reason
        position = 0
        for part, outcome in sorted(self.failed_parts, key=lambda failed: failed[0].start):
            successful += self.keys[position : part.start]
            successful += outcome.successful_keys or ()
            position = part.stop
            reason = reason or outcome.reason
        successful += self.keys[position : self.end_block]
        return JobResult(self.metadata.job_id, False, successful, reason)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Blocks `start` to `stop` (exclusive) of a job, for one worker."""

    job: Job
    start: int
    stop: int

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """Its blocks' keys."""
        return self.job.keys[self.start : self.stop]


def checked_outcome(returned: object, keys: Sequence[OffloadKey]) -> Outcome:
    """Return the result `returned` by an author's method for `keys`, without keys that were not requested."""
    if not isinstance(returned, Outcome):
        return Outcome((), "bad_outcome")
    if returned.successful_keys is None:
        return ALL_DONE
    claimed = frozenset(returned.successful_keys)
    successful = [key for key in keys if key in claimed]
    return ALL_DONE if len(successful) == len(keys) else Outcome(successful, returned.reason or "error")


def checked_answers(returned: object, keys: Sequence[OffloadKey]) -> list[bool]:
    """Return the answers of `contains_blocks` for `keys`; all False if they are invalid."""
    if not isinstance(returned, Sequence | np.ndarray) or len(returned) != len(keys):
        return [False] * len(keys)
    return [bool(answer) for answer in returned]


def failure_reason(error: BaseException) -> str:
    """Return the word for `error` in the counters."""
    if isinstance(error, TierError):
        return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "error")
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError):
        return "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error"
    return "error"
