"""What the adapter of a tier remembers of vLLM's requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey

REQUESTS_MAX = 100_000
"""Requests whose state is kept; beyond it the oldest is forgotten."""


@dataclass(slots=True)
class RequestNotes:
    """One request, from `on_new_request` to `on_request_finished`.

    Attributes:
        failed: Keys that could not be loaded for it; it is told that they are not there.
        asked: When a key was first answered with RETRY.
        hits: How many keys it was told to be there, each of which takes a row of the primary tier.
        has_timed_out: Whether it has waited for the tier as long as it may; the tier is asked no more.
    """

    failed: set[OffloadKey] = field(default_factory=set)
    asked: dict[OffloadKey, float] = field(default_factory=dict)
    hits: int = 0
    has_timed_out: bool = False

    def may_wait(self, key: OffloadKey, now_s: float, wait_max_s: float) -> bool:
        """Return whether the request may be answered RETRY once more for `key`; False ends its wait for the tier."""
        self.has_timed_out = now_s - self.asked.setdefault(key, now_s) >= wait_max_s
        return not self.has_timed_out


class RequestBook:
    """The notes of all requests, by id. Called under vLLM's lock, by whichever thread holds it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._notes: dict[str, RequestNotes] = {}

    def of(self, req_id: str) -> RequestNotes:
        """Return the notes of a request, which begin here if it is not known."""
        notes = self._notes.get(req_id)
        if notes is None:
            if len(self._notes) >= REQUESTS_MAX:
                del self._notes[next(iter(self._notes))]
            notes = self._notes[req_id] = RequestNotes()
        return notes

    def known(self, req_id: str) -> RequestNotes | None:
        """Return the notes of a request that has not ended, or None."""
        return self._notes.get(req_id)

    def begin(self, req_id: str) -> None:
        """Begin a request; notes of an earlier one with its id are dropped."""
        self._notes.pop(req_id, None)
        self.of(req_id)

    def end(self, req_id: str) -> None:
        """Forget a request."""
        self._notes.pop(req_id, None)
