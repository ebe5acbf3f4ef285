"""LMCache's `adapter_params`; and the tiers of one model and layout of blocks, opened when they may have blocks.

The adapter calls `TierSet.use` on LMCache's threads. A thread of the set opens its tiers. The tiers' threads call back.
`TierSet._lock` guards a set's fields, and no thread holds it across I/O or a callback.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import lmcache
from pydantic import Field, field_validator

from tiered_kv.base import OffloadKey
from tiered_kv.config.entries import tier_type_of
from tiered_kv.config.namespace import Label, Namespace, Seed
from tiered_kv.config.reading import fill_variables
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import Count
from tiered_kv.config.validation import validate
from tiered_kv.direct import DirectTiers
from tiered_kv.direct.tiers import part_of
from tiered_kv.engines.settings import CallerSettings, UserNamespace
from tiered_kv.errors import ConfigError, ResourceError, ShutdownError, TieredKVError, TierError
from tiered_kv.system.threads import start_thread

_log = logging.getLogger(__name__)

LOCATION = "adapter_params"

QUEUE_S_MAX = 60.0
JOB_TIMEOUT_S_MAX = 120.0
"""LMCache reuses an object's memory when its lock is 300 s old (a store) or 600 s (a load), even while a
tier uses it. So an object waits at most `QUEUE_S_MAX` for a tier, and no tier begins work on it after `job_timeout`."""


class AdapterNamespace(UserNamespace):
    """The user's part of the namespace: numbers that LMCache does not report."""

    unknown_key_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("model", "dtype", "layout", "layers", "groups", "parallel"), "LMCache sets it"
    )

    revision: Label = Field(
        description="Names the state of the weights and of all else that LMCache does not report: change it with them."
    )
    hash_algorithm: Label | None = Field(default=None, description="The server's --hash-algorithm.")
    hash_seed: Seed | None = Field(default=None, description="The seed of that hash: text, or an integer.")


class AdapterSettings(CallerSettings):
    """The tiers below LMCache's L1, and the facts that shape the bytes."""

    location = LOCATION

    namespace: AdapterNamespace = Field(description="What LMCache does not report of a block's bytes.")
    sets: Count = Field(
        default=1,
        ge=1,
        le=64,
        description="How many models and layouts of blocks may be kept; each gets an equal part of a capacity.",
    )

    @field_validator("tiers")
    @classmethod
    def _jobs_end_in_time(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        for number, tier in enumerate(tiers):
            if tier.job_timeout > JOB_TIMEOUT_S_MAX:
                raise ConfigError(
                    f"expected at most {JOB_TIMEOUT_S_MAX:g}s, found {tier.job_timeout:g}s: LMCache takes an object's "
                    "memory back when its lock is 300 s old",
                    location=f"{LOCATION}.tiers.{number}.job_timeout",
                )
        return tiers


def read_settings(params: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> AdapterSettings:
    """Return `adapter_params` as settings; `${NAME}` in texts stands for a variable of the environment."""
    return validate(AdapterSettings, fill_variables(params, environ), (LOCATION,))


RETRY_S = 10.0
"""The pause before tiers are opened again, if they could not be opened or can have no block."""
OPEN_S_MAX = 10.0
"""How long tasks wait for the tiers to open. Meanwhile a task holds objects of L1, or a request waits for it."""
CLOSE_TIMEOUT_S = 30.0  # how long closing waits for a thread that opens tiers, and then for tasks in flight
SHARED_SETS_MAX = 16
"""The least limit of open sets if all tiers share their storage. No capacity is divided: it limits threads only."""
KNOWN_MAX = 1 << 20
"""The most stored blocks of a set that LMCache counts, in some 200 MiB. Most tiers report no removed blocks."""
_DIGEST_CHARACTERS = 12
_DIRECTORY = re.compile(rf"[0-9a-f]{{{_DIGEST_CHARACTERS}}}")

Task = Callable[[DirectTiers | None], None]
"""Called with the tiers, or with None if they cannot be opened."""


class Places:
    """Limits the open sets: to `sets`. If no capacity is divided, at least `SHARED_SETS_MAX` may be open."""

    def __init__(self, settings: AdapterSettings) -> None:
        self.opening = threading.Lock()  # held while a set opens: two sets must not take the last room in a directory
        divides = any(not tier_type_of(tier).is_shared for tier in settings.tiers)
        self.count = settings.sets if divides else max(settings.sets, SHARED_SETS_MAX)
        self.free = self.count
        """How many more sets may open. Only the holder of `opening` changes it."""


class TierSet:
    """The tiers of a layout, and the blocks in them that LMCache counts. Any thread may call.

    A store opens the tiers. A lookup or a load opens them only if they may have blocks: in shared storage, or in a
    directory of this layout.

    Args:
        layout: Data type and shape of each array of an object, as text.
        block_bytes: Bytes of an object, with the padding of LMCache's allocator.
        memory: Address and size of LMCache's L1.
        places: Shared by all sets.
        on_removed: Called with blocks that no tier has any more.
    """

    def __init__(
        self,
        model: str,
        layout: str,
        block_bytes: int,
        settings: AdapterSettings,
        memory: tuple[int, int],
        places: Places,
        on_removed: Callable[[TierSet, Sequence[OffloadKey]], None],
    ) -> None:
        self.model = model
        self.layout = layout
        self.block_bytes = block_bytes
        self._settings = settings
        self._memory = memory
        self._places = places
        self._on_removed = on_removed
        self._tiers: DirectTiers | None = None
        self._lock = threading.Lock()  # never held across I/O or a callback
        self._known: OrderedDict[OffloadKey, bool] = OrderedDict()  # all True, in the order of use
        self._waiting: list[Task] = []  # tasks until the tiers are open
        self._opener: threading.Thread | None = None  # the thread that opens the tiers now
        self._is_closed = False
        self._stores = False  # a store has been submitted
        self._retry_at_s = 0.0  # no task opens the tiers before, by `time.monotonic`
        self._error = ""

    def use(self, task: Task, *, stores: bool) -> None:
        """Call `task` with the tiers: at once, or when they have been opened."""
        is_new = False  # whether there is a new error to log
        with self._lock:
            if stores and not self._stores:
                self._stores = True
                if self._opener is None:
                    self._retry_at_s = 0.0
            tiers = None if self._is_closed else self._tiers
            if tiers is None and not self._is_closed and time.monotonic() >= self._retry_at_s:
                try:
                    if self._opener is None:
                        self._opener = start_thread(self._open, "tiered-kv-open")
                    self._waiting.append(task)
                    return
                except ResourceError as error:
                    # A later task tries again. An exception would let LMCache reuse the memory of its whole task, while
                    # another set may still read or write parts of it.
                    is_new, self._error = not self._error, str(error)
        if is_new:
            _log.error("no tiers for %s: %s", self._what, self._error)
        task(tiers)

    def _open(self) -> None:
        timer = threading.Timer(OPEN_S_MAX, self._stop_waiting)
        timer.daemon = True
        tiers, error = None, ""
        try:
            timer.start()
            with self._places.opening:
                tiers = self._open_tiers()
        except BaseException as raised:  # LMCache goes on without the tiers, and its tasks end
            # A client library may have put a password into the text of its errors.
            error = str(raised) if isinstance(raised, TieredKVError) else type(raised).__name__
        timer.cancel()
        if error:
            _log.error("no tiers for %s; trying again in %g s: %s", self._what, RETRY_S, error)
        with self._lock:
            late, self._tiers = (tiers, None) if self._is_closed else (None, tiers)
            self._error, self._opener = error, None
            # A store that was submitted meanwhile fails, and the next one opens the tiers.
            is_wanted = tiers is not None or (self._stores and not error)
            self._retry_at_s = 0.0 if is_wanted else time.monotonic() + RETRY_S
        if late is not None:
            late.close()
        self._end_waiting()

    def _open_tiers(self) -> DirectTiers | None:
        """Return the tiers, or None if there is nothing to store and no tier can have a block."""
        settings = self._settings
        namespace = namespace_of(self.model, self.layout, settings)
        digest = namespace.identify(block_bytes=self.block_bytes, block_tokens=1).digest.hex()
        directory = digest[:_DIGEST_CHARACTERS]
        if not may_have_blocks(settings.tiers, directory) and not self._stores:
            return None
        if not self._places.free:
            raise ConfigError(
                f"{self._places.count} other models or layouts use the tiers already; raise {LOCATION}.sets"
            )
        tiers = DirectTiers(
            self._memory,
            block_bytes=self.block_bytes,
            tiers=[own_part(tier, directory, settings.sets) for tier in settings.tiers],
            namespace=namespace,
            on_removed=self._removed,
            wait_s_max=QUEUE_S_MAX,
        )
        self._places.free -= 1
        return tiers

    def _stop_waiting(self) -> None:
        """End the tasks that wait, as the tiers take too long to open. Later tasks use the tiers once they are open."""
        with self._lock:
            if self._opener is None:
                return
            self._retry_at_s = math.inf
            self._error = f"the tiers have not opened in {OPEN_S_MAX:g} s"
        _log.error("no tiers for %s yet: %s", self._what, self._error)
        self._end_waiting()

    def _end_waiting(self) -> None:
        with self._lock:
            tiers = self._tiers
            waiting, self._waiting = self._waiting, []
        for task in waiting:
            task(tiers)

    @property
    def _what(self) -> str:
        return f"model '{self.model}' with objects of {self.layout}"

    # The blocks that LMCache counts.

    def learn(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Note stored blocks; return the ones that LMCache does not count yet."""
        with self._lock:
            new = {key for key in keys if key not in self._known}
            for key in keys:
                self._known[key] = True
                self._known.move_to_end(key)
        return new

    def too_many(self) -> list[OffloadKey]:
        """Return the blocks over `KNOWN_MAX`, the least recently used."""
        with self._lock:
            return list(islice(self._known, max(len(self._known) - KNOWN_MAX, 0)))

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget blocks; return the ones that LMCache has counted."""
        with self._lock:
            return [key for key in keys if self._known.pop(key, False)]

    def _removed(self, _: str, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            known = [key for key in keys if key in self._known]
        tiers = self._tiers
        if len(self._settings.tiers) == 1:
            self._on_removed(self, known)
        elif known and tiers is not None:  # another tier may have the block

            def report(answers: list[bool]) -> None:
                self._on_removed(self, [key for key, is_found in zip(known, answers, strict=True) if not is_found])

            with suppress(ShutdownError):
                tiers.contains(known, report)

    def status(self) -> dict[str, Any]:  # Any: as `DirectTiers.counters`
        tiers = self._tiers
        shown: dict[str, Any] = {"model": self.model, "layout": self.layout, "block_bytes": self.block_bytes}
        if tiers is not None:
            shown["counters"] = tiers.counters()
        if tiers is None or self._error:
            shown["error"] = self._error
        return shown

    def close(self) -> None:
        """Close the tiers when no task is in flight any more, or after `CLOSE_TIMEOUT_S`."""
        with self._lock:
            self._is_closed = True
            opener = self._opener
        if opener is not None:
            opener.join(CLOSE_TIMEOUT_S)
        if self._tiers is not None and not self._tiers.close(CLOSE_TIMEOUT_S):
            _log.error(
                "a tier of model '%s' still uses LMCache's memory after %g s; end the process",
                self.model,
                CLOSE_TIMEOUT_S,
            )


def namespace_of(model: str, layout: str, settings: AdapterSettings) -> Namespace:
    facts = {"engine": "lmcache", "lmcache": str(lmcache.__version__)}
    return settings.namespace.complete("LMCache", {"model": model, "layout": layout}, facts, (LOCATION, "namespace"))


def may_have_blocks(tiers: Sequence[TierSettings], directory: str) -> bool:
    """Return whether there may be blocks of a layout: in shared storage, or in its `directory`."""
    for tier in tiers:
        place = part_of(tier, directory, Fraction(1)).storage_facts().directory
        if tier_type_of(tier).is_shared or (Path(place).exists() if place else tier_type_of(tier).is_lasting):
            return True
    return False


def own_part(tier: TierSettings, directory: str, sets: int) -> TierSettings:
    """Return a tier's settings for one of `sets` layouts: a part of the capacity, and a directory."""
    own = part_of(tier, directory, Fraction(1, sets))
    path = Path(tier.storage_facts().directory or "")
    if own is not tier and path.name and path.is_dir():
        others = sorted(
            each.name for each in path.iterdir() if _DIRECTORY.fullmatch(each.name) and each.name != directory
        )
        if len(others) >= sets:
            raise TierError(
                f"{path} has room for the blocks of {sets} {'model or layout' if sets == 1 else 'models or layouts'}, "
                f"and has those of others: {', '.join(others)}; remove these directories, or raise "
                "adapter_params.sets",
                tier=tier.name,
                operation="open",
            )
    return own
