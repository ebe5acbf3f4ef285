"""The requests that a recorder has seen begin, until their lines are written.

The recorder's thread owns them. What must stay true: requests are written in the order in which they began, since a
simulation takes the lines in their order. A request that runs long holds the others up for `HOLD_S` at most.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from tiered_kv.base import OffloadKey, group_of
from tiered_kv.hints import Hints

HOLD_S: Final = 60.0
"""After so many seconds a request is written with the blocks that it has used by then: the rest are its outputs."""
REQUESTS_MAX: Final = 1 << 14
"""Requests that are kept. Beyond it the oldest is written as it is."""
KEYS_MAX: Final = 1 << 19
"""Keys of these requests. Beyond it, too, the oldest is written as it is."""


@dataclass(slots=True, eq=False)
class AskedRequest:
    """What one request asked for.

    Args:
        req_id: The engine's id of the request; it is never written.
        began_s: When it began, by the manager's clock.
        session: The session that its parameters name; empty if they name none.
        hints: Its hints.
        is_ended: Whether the engine has finished it.
    """

    req_id: str
    began_s: float
    session: str
    hints: Hints
    is_ended: bool = False
    _parts: list[Collection[OffloadKey]] = field(default_factory=list)
    _keys: int = 0
    _repeated_from: int = 1024
    """The number of keys from which on repetitions are looked for: a request that waits for room names keys again."""

    def use(self, keys: Collection[OffloadKey]) -> int:
        """Note keys that it loads or stores; return by how many keys it has grown."""
        before = self._keys
        self._parts.append(keys)
        self._keys += len(keys)
        if self._keys > self._repeated_from:
            distinct = self.keys
            self._parts, self._keys = [distinct], len(distinct)
            self._repeated_from = 2 * self._keys
        return self._keys - before

    @property
    def size(self) -> int:
        """How many keys are kept."""
        return self._keys

    @property
    def keys(self) -> list[OffloadKey]:
        """The distinct keys, in the order of their first use."""
        return list(dict.fromkeys(chain.from_iterable(self._parts)))


def positions(keys: Collection[OffloadKey]) -> int:
    """Return how many blocks of tokens these keys cover: a token has a block in each KV cache group."""
    return max(Counter(map(group_of, keys)).values(), default=0)


class OpenRequests:
    """The requests that are not written yet, in the order of their begins."""

    def __init__(self) -> None:
        self._waiting: deque[AskedRequest] = deque()
        self._by_id: dict[str, AskedRequest] = {}
        """Those that have not ended. Calls for other ids are left out: their requests are written, or were lost."""
        self._keys = 0

    def begin(self, request: AskedRequest) -> None:
        self.end(request.req_id)  # the engine uses the id again
        self._waiting.append(request)
        self._by_id[request.req_id] = request

    def use(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        request = self._by_id.get(req_id)
        if request is not None:
            self._keys += request.use(keys)

    def end(self, req_id: str) -> None:
        request = self._by_id.pop(req_id, None)
        if request is not None:
            request.is_ended = True

    def take(self, now_s: float, *, is_last: bool = False) -> AskedRequest | None:
        """Return the next request to write; None if it has to wait. With `is_last` none waits."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        is_full = len(self._waiting) > REQUESTS_MAX or self._keys > KEYS_MAX
        if not (first.is_ended or is_last or is_full or now_s - first.began_s > HOLD_S):
            return None
        self._waiting.popleft()
        if self._by_id.get(first.req_id) is first:
            del self._by_id[first.req_id]
        self._keys -= first.size
        return first

    def drop_running(self) -> int:
        """Forget the requests that have not ended, of which calls were lost; return how many these are."""
        running = len(self._by_id)
        self._by_id.clear()
        self._waiting = deque(request for request in self._waiting if request.is_ended)
        self._keys = sum(request.size for request in self._waiting)
        return running
