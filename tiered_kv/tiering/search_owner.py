"""The receiver of the search's events: the interface between `Search` and the history of blocks.

`Search` calls it on the manager's thread, in the order of the events. What must stay true: `miss` is one function of C,
since it runs for each block that no tier has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tiered_kv.base import OffloadKey
from tiered_kv.metrics.history.ledger import RequestLog


class SearchOwner(Protocol):
    """Receives the questions and misses of requests: first the request, then its blocks. `BlockHistory` is one."""

    miss: Callable[[OffloadKey], None]
    """Takes note of a block that the request misses. Hot path: a function of C."""

    def asks(self, log: RequestLog, because: bytes | None, *, is_ahead: bool) -> None:
        """Take note of the request that asks from now on, `is_ahead` for its prefetch.

        `because` has a `Fate` for each tier that is not asked; None if it is as before.
        """

    def found(self, key: OffloadKey) -> None:
        """Take note of a block that the request begins to wait for."""

    def append_gathered(self) -> None:
        """Append what was gathered for the asking request to the queue: the request asks no more in this pass."""
