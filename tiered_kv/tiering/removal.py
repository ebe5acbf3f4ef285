"""Removals: a tier is taken out while the manager runs, for a disk that is replaced, and put back.

`Removals.ask` leaves a message, on any thread. All else runs on the manager's thread, which never waits: threads of
their own shut the old tier down, and open the new one (`late.py`). A tier that is out is a `GuardedTier` with a
`removal`: it gets no lookup and no job. The way of a removal:

1. draining: a `LateTier` takes the tier's place at once. The tier's jobs end, or pass their deadline. Then it is shut
   down.
2. drained: its threads have ended, its files are closed, and all its jobs are reported.
3. attaching: the `LateTier` opens the tier from its settings, until that succeeds. Then it is in use again. A tier that
   cannot be reset is shut down, and is drained again.

What must stay true: a row of a job belongs to it until the old tier has reported the job. A reset of the cache while a
tier is out is made before the first job of the tier that comes back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Final, Literal

from tiered_kv.base import ReqContext
from tiered_kv.errors import ConfigError, ResourceError
from tiered_kv.system.threads import start_thread
from tiered_kv.tiering.base import JobResult, SecondaryTierManager
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.late import LateTier

CLOSE_S: Final = 5.0
"""How long the manager's end waits for a tier that is being shut down."""


Verb = Literal["drain", "attach"]


class Stage(StrEnum):
    """The value is the word of `/status`."""

    DRAINING = "draining"
    DRAINED = "drained"
    ATTACHING = "attaching"


class Removal:
    """One tier that is out. Owned by the manager's thread; any thread may read `stage` and `note`."""

    def __init__(self, guarded: GuardedTier, requests: Iterable[ReqContext]) -> None:
        self.stage = Stage.DRAINING
        self._guarded = guarded
        for context in requests:
            guarded.call("on_request_finished", context)
        self._old: SecondaryTierManager | None = guarded.tier
        self._late = LateTier.in_place_of(guarded.tier, guarded.settings)
        guarded.replace(self._late)
        self._closing: threading.Thread | None = None

    @property
    def note(self) -> str:
        """What a draining tier waits for; of another, why it is not in use, with a path or an address. Any thread."""
        if self.stage is not Stage.DRAINING:
            return self._late.failure
        jobs = len(self._guarded.jobs)
        if not jobs:
            return "its threads have to end"
        late = "" if self._guarded.unexpired else " whose deadline has passed: a call of its storage hangs"
        return f"it has not reported {jobs} {'job' if jobs == 1 else 'jobs'}{late}"

    def get_finished(self) -> Iterable[JobResult]:
        """Return the results of the old tier's jobs; `GuardedTier` asks in each step."""
        results = [] if self._old is None else [*self._old.get_finished()]
        return [*results, *self._late.get_finished()]

    def act(self) -> bool:
        """Go on; return whether the tier is in use again."""
        if self.stage is Stage.ATTACHING:
            if self._late.is_unfit:
                self.stage = Stage.DRAINED
            return self._late.is_open
        if self.stage is Stage.DRAINING:
            if self._closing is None and not self._guarded.unexpired:
                self._shut_down()
            elif self._closing is not None and not self._closing.is_alive() and not self._guarded.jobs:
                self._old = self._closing = None
                self.stage = Stage.DRAINED
        return False

    def attach(self) -> None:
        """Begin to open the tier again, if it has been drained."""
        if self.stage is Stage.DRAINED:
            with suppress(ResourceError):  # without a thread it stays drained
                self._late.open_again(SecondaryTierFactory.create)
                self.stage = Stage.ATTACHING

    def close(self) -> None:
        """Shut the old tier down before the manager ends. It waits as long as for any tier."""
        if self._old is not None and self._closing is None:
            self._guarded.call_of(self._old, "shutdown")
        elif self._closing is not None:
            self._closing.join(CLOSE_S)

    def _shut_down(self) -> None:
        old = self._old
        assert old is not None, "a tier that drains is there"
        with suppress(ResourceError):  # without a thread the next step tries again
            name = f"tiered-kv-{self._guarded.name}-drain"
            self._closing = start_thread(self._guarded.call_of, name, old, "shutdown")


class Removals:
    """The tiers of one manager that are out, by an operator's order.

    Args:
        requests: Returns the contexts of all requests.
        places: The tiers, in the order of `tiers`. An object that takes a tier's place takes it here, too.

    Attributes:
        wake: Called, on any thread, when the manager's thread has something to do.
        exist: Whether the next step has something to do.
    """

    def __init__(
        self,
        tiers: Iterable[GuardedTier],
        requests: Callable[[], Iterable[ReqContext]],
        places: list[SecondaryTierManager],
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.exist = False
        self._by_name = {guarded.name: guarded for guarded in tiers}
        self._requests, self._places = requests, places
        self._inbox: deque[tuple[Verb, str]] = deque()  # any thread appends; with the names of tiers
        self._removals: dict[GuardedTier, Removal] = {}

    # Any thread.

    def ask(self, verb: Verb, name: str) -> None:
        """Take a tier out, or put a drained one back. Where that is done already, nothing happens.

        Raises:
            ConfigError: There is no such tier.
        """
        if name not in self._by_name:
            raise ConfigError(f"there is no tier {name!r}: there are {', '.join(self._by_name) or 'none'}")
        self._inbox.append((verb, name))
        self.exist = True
        self.wake()

    def stages(self) -> dict[str, str]:
        """Return the stage of each tier that is out, by name. A tier that is not open since the start is attaching."""
        late = dict.fromkeys(self._late_failures(), Stage.ATTACHING.value)
        return late | {guarded.name: removal.stage.value for guarded, removal in list(self._removals.items())}

    def notes(self, *, with_errors: bool) -> dict[str, str]:
        """Return why tiers are not in use, by name; `with_errors` also the notes that may have a path or an address.

        These are of tiers that cannot be opened, and of those whose breaker is not closed.
        """
        notes = {}
        if with_errors:
            notes = {name: guarded.outages.cause for name, guarded in self._by_name.items() if guarded.outages.cause}
            notes |= self._late_failures()
        for guarded, removal in list(self._removals.items()):
            if with_errors or removal.stage is Stage.DRAINING:
                notes[guarded.name] = removal.note
        return notes

    def _late_failures(self) -> dict[str, str]:
        """Return why the tiers that are not `required` are not open."""
        tiers = [(name, guarded.tier) for name, guarded in self._by_name.items()]
        return {name: tier.failure for name, tier in tiers if isinstance(tier, LateTier) and not tier.is_open}

    # The manager's thread.

    def act(self) -> None:
        """Go on with all removals, at the end of a step."""
        while self._inbox:
            verb, name = self._inbox.popleft()
            guarded = self._by_name[name]
            removal = self._removals.get(guarded)
            if verb == "attach":
                if removal is not None:
                    removal.attach()
            elif removal is None or removal.stage is Stage.ATTACHING:
                guarded.removal = self._removals[guarded] = Removal(guarded, self._requests())
                self._places[guarded.number - 1] = guarded.tier
                guarded.account.notice("draining")
        for guarded, removal in list(self._removals.items()):
            before = removal.stage
            if removal.act():
                del self._removals[guarded]
                guarded.removal = None
                guarded.breaker.succeed()  # another disk may be there
                guarded.account.notice("attached")
            elif removal.stage is not before:
                guarded.account.notice(removal.stage.value)
        # In this order: another thread appends to the inbox, and then sets it.
        self.exist = any(removal.stage is not Stage.DRAINED for removal in self._removals.values())
        if self._inbox:
            self.exist = True

    def close(self) -> None:
        """End all removals, before the tiers are shut down."""
        for removal in self._removals.values():
            removal.close()
