"""A late tier: it stands for a tier that cannot be opened yet, since it is not `required`, or was taken out.

The factory makes it, and so does a removal. `GuardedTier` calls it on the scheduler's thread; a thread of its own opens
the real tier. Until then every lookup is a miss, and every job fails. A tier that opens after a reset is reset before
its first job.

opening thread:   open, until that succeeds ... hand the tier over, wake the caller
manager's thread: lookup: False ... get_finished: take the tier in, reset it if there was a reset ... pass calls on

A tier whose reset fails is not taken in, but shut down. After that, `open_again` may try once more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.config.secrets import scrub
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError, ResourceError, TierError
from tiered_kv.reasons import Reason
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.threads import start_thread
from tiered_kv.tiering.answers import checked_flag, tier_exceptions
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.isolation import IsolatedTier

RETRY_S: Final = 5.0
"""Seconds from a failed opening to the next one."""
_CLOSE_S: Final = 1.0  # how long `shutdown` waits for an opening

_log = logging.getLogger(__name__)


class LateTier(SecondaryTierManager):
    """Stands for a tier that is not open yet, and then passes calls to the open tier. The manager's thread calls it.

    A reset that came before the tier was open is made when the tier is taken in. So older blocks are never found.

    Args:
        open_it: Opens the tier, and may hang. A thread of this class calls it until it succeeds. None: `open` follows.
        takes_offsets: The attribute of the tier's class.
    """

    is_nonblocking = True

    def __init__(
        self,
        offloading_spec: Any,  # Any: see `SecondaryTierManager`
        primary_kv_view: memoryview,
        tier_type: str,
        settings: TierSettings,
        open_it: Callable[[], SecondaryTierManager] | None,
        *,
        takes_offsets: bool,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.takes_offsets = takes_offsets
        self.failure = "it has not answered yet"
        """Why the tier is not open."""
        self._refusal: ConfigError | None = None
        """The error of the first try to open the tier; None if it did not fail."""
        self._settings = settings
        self._on_finished = self.tier_spec.on_finished
        self._inner: SecondaryTierManager | None = None  # the manager's thread sets it
        self._opened: deque[SecondaryTierManager] = deque(maxlen=1)
        """The tier, handed over by the thread that opened it."""
        self._refused: list[JobResult] = []  # results of jobs that came before the tier was open
        self._announced: set[str] = set()  # requests that the tier knows
        self._resets = 0
        """How many resets this object has seen."""
        self._unfit: SecondaryTierManager | None = None  # one that could not be reset, until a thread shuts it down
        self._closing_unfit: threading.Thread | None = None
        self._tried, self._closing = threading.Event(), threading.Event()
        self._log_limit, self._failure_level = LogLimit(), logging.INFO
        self._thread: threading.Thread | None = None
        if open_it is not None:
            self.open(open_it)

    @classmethod
    def in_place_of(cls, tier: SecondaryTierManager, settings: TierSettings) -> LateTier:
        """Return an object that takes the place of a tier, until `open`."""
        late = cls(
            tier.tier_spec, tier._primary_kv_view, tier.tier_type, settings, None, takes_offsets=tier.takes_offsets
        )
        late.failure = "an operator has taken it out"
        return late

    def open(self, open_it: Callable[[], SecondaryTierManager]) -> None:
        """Begin to open the tier, on a thread. Called once, and again after `is_unfit`.

        Raises:
            ResourceError: The system gives no thread.
        """
        self._thread = start_thread(self._open, f"tiered-kv-{self._settings.name}-open", open_it)

    def open_again(self, create: Callable[[object, memoryview, TierSettings], SecondaryTierManager]) -> None:
        """Begin to open, from its settings, the tier whose place this object has taken; `create` is the factory's.

        Raises:
            ResourceError: The system gives no thread.
        """
        self.failure = "it has not answered yet"
        self._failure_level = logging.WARNING  # no `wait` follows, which would log it
        settings = self._settings.model_copy(update={"required": True})
        self.open(partial(create, self.tier_spec, self._primary_kv_view, settings))
        self._closing_unfit = None

    @property
    def is_open(self) -> bool:
        """Whether the tier was taken in. The manager's thread reads this."""
        return self._inner is not None

    @property
    def is_unfit(self) -> bool:
        """Whether the tier was opened, could not be reset, and has been shut down. The manager's thread reads this."""
        return self._closing_unfit is not None and not self._closing_unfit.is_alive()

    def wait(self, timeout_s: float) -> SecondaryTierManager | None:
        """Wait for the first try; return the tier if it is open. The thread that made this object calls this first.

        Raises:
            ConfigError: The settings cannot be used: no other try would succeed.
        """
        self._tried.wait(timeout_s)
        if self._refusal is not None:
            self._closing.set()
            raise self._refusal
        with suppress(IndexError):
            return self._opened.popleft()
        _log.warning("tier '%s': not in use until it can be opened: %s", self._settings.name, self.failure)
        return None

    # The opening's thread.

    def _open(self, open_it: Callable[[], SecondaryTierManager]) -> None:
        while not self._closing.is_set():
            try:
                tier = open_it()
            except BaseException as error:
                # A `TierError` begins with the tier's name, which each line here has.
                text = error.message if isinstance(error, TierError) else str(error)
                self.failure = scrub(text, self._settings.secret_texts()) or type(error).__name__
                if isinstance(error, ConfigError) and not self._tried.is_set():
                    self._refusal = error
                self._tried.set()
                if not self._closing.is_set() and self._log_limit.take(self.failure) is not None:
                    _log.log(self._failure_level, "tier '%s': cannot be opened: %s", self._settings.name, self.failure)
                    self._failure_level = logging.INFO
                self._closing.wait(RETRY_S)
                continue
            self._opened.append(tier)
            del tier
            self._tried.set()
            break
        if self._closing.is_set():
            self._drop()
        elif self._on_finished is not None:
            self._on_finished()

    def _drop(self) -> None:
        with suppress(IndexError):
            self._opened.popleft().shutdown()

    # The manager's thread.

    def _take_in(self) -> None:
        """Use the tier, if it is open now."""
        try:
            tier = self._opened.popleft()
        except IndexError:
            return
        if not tier.is_nonblocking:
            tier = IsolatedTier(tier, self._settings.lookup_timeout)
        if self._resets and not _has_reset(tier):
            self.failure = "it cannot reset, and may hold blocks from before a reset"
            _log.warning("tier '%s': not used: %s", self._settings.name, self.failure)
            self._unfit = tier
            return
        _log.warning("tier '%s': opened, and in use from now on", self._settings.name)
        self._inner = tier

    def _close_unfit(self, tier: SecondaryTierManager) -> None:
        with suppress(ResourceError):  # without a thread the next step tries again
            self._closing_unfit = start_thread(_shut_down, f"tiered-kv-{self._settings.name}-drop", tier)
            self._unfit = None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False if self._inner is None else self._inner.lookup(key, req_context)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [False] * len(keys) if self._inner is None else self._inner.lookup_many(keys, req_context)

    @property
    def lookup_failures(self) -> int:
        return 0 if self._inner is None else self._inner.lookup_failures

    @property
    def relocated_blocks(self) -> int:
        return 0 if self._inner is None else self._inner.relocated_blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        if self._inner is not None:
            self._inner.submit_store(job_metadata)
        else:
            self._refuse(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        if self._inner is not None:
            self._inner.submit_load(job_metadata)
        else:
            self._refuse(job_metadata)

    def _refuse(self, job: JobMetadata) -> None:
        self._refused.append(JobResult(job.job_id, False, reason=Reason.UNAVAILABLE))
        if self._on_finished is not None:
            self._on_finished()

    def get_finished(self) -> Iterable[JobResult]:
        refused, self._refused = self._refused, []
        if self._inner is None:
            self._take_in()
            if self._unfit is not None:
                self._close_unfit(self._unfit)
            return refused
        return [*refused, *self._inner.get_finished()] if refused else self._inner.get_finished()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._inner is not None:
            self._inner.touch(keys, req_context)

    def take_absent(self) -> Iterable[OffloadKey]:
        return () if self._inner is None else self._inner.take_absent()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._inner is None:
            return RequestOffloadingContext()
        self._announced.add(req_context.req_id)
        return self._inner.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._inner is not None and req_context.req_id in self._announced:
            self._announced.discard(req_context.req_id)
            self._inner.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        if self._inner is not None:
            self._inner.on_schedule_end()

    def reset_cache(self) -> bool:
        self._resets += 1
        return True if self._inner is None else self._inner.reset_cache()

    @property
    def has_saved_reset(self) -> bool:
        return not self._resets if self._inner is None else self._inner.has_saved_reset

    def take_events(self) -> Iterable[OffloadingEvent]:
        return () if self._inner is None else self._inner.take_events()

    def stats(self) -> Mapping[str, Any]:
        return {} if self._inner is None else self._inner.stats()

    def describe(self) -> Mapping[str, object]:
        if self._inner is None:
            return {"warning": f"not in use until it can be opened: {self.failure}"}
        return self._inner.describe()

    def shutdown(self) -> None:
        """Shut the tier down, even if it opens later. An opening that hangs is left to its thread."""
        self._closing.set()
        if self._inner is not None:
            self._inner.shutdown()
            return
        if self._unfit is not None:
            self._unfit.shutdown()
        for thread in (self._thread, self._closing_unfit):
            if thread is not None:
                thread.join(_CLOSE_S)
        self._drop()


def _has_reset(tier: SecondaryTierManager) -> bool:
    try:
        return checked_flag(tier.reset_cache())
    except tier_exceptions():
        return False


def _shut_down(tier: SecondaryTierManager) -> None:
    with suppress(Exception):  # of a third-party tier that is not used
        tier.shutdown()
