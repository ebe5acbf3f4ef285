"""Questions of engines: whether a tier has blocks, and when no job of a tier is in flight.

Each `Session` owns a `Questions`, and calls it on the server's thread. An answer comes in a later step. A request gets
its answers in the order of its questions. The number of open questions is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.server.protocol import ProtocolError
from tiered_kv.server.session_request import SessionRequest

QUESTIONS_MAX: Final = 4096
"""Limit of open questions of one session, and of its PINGs."""
KEYS_MAX: Final = 1 << 17
"""Limit of the keys in all open questions of one session."""
KEYS_A_STEP: Final = 4096
"""A step asks the tiers the oldest questions, until these have so many keys. The others wait for a later step."""
ASKS_AGAIN_S: Final = 60.0
"""After how many seconds a tier that did not answer at once is asked again by `QuickTiers`."""


class Questions:
    """A session's questions that have no answer yet.

    Attributes:
        idle_pings: Numbers of the PINGs that wait until no job is in flight.
    """

    def __init__(self) -> None:
        self.idle_pings: list[int] = []
        self._asked: list[tuple[SessionRequest, list[OffloadKey]]] = []
        self._keys = 0

    def __bool__(self) -> bool:
        return bool(self._asked or self.idle_pings)

    def ask(self, request: SessionRequest, keys: list[OffloadKey]) -> None:
        """Note that a request asks whether any tier has blocks.

        Raises:
            ProtocolError: Too many questions wait for an answer.
        """
        if len(self._asked) >= QUESTIONS_MAX or self._keys + len(keys) > KEYS_MAX:
            raise ProtocolError(f"more than {QUESTIONS_MAX} questions, or {KEYS_MAX} keys, wait for an answer")
        self._asked.append((request, keys))
        self._keys += len(keys)

    def ask_idle(self, number: int) -> None:
        """Note a PING that waits until no job is in flight; raises: see `ask`."""
        if len(self.idle_pings) >= QUESTIONS_MAX:
            raise ProtocolError(f"more than {QUESTIONS_MAX} questions wait for an answer")
        self.idle_pings.append(number)

    def answer(self, tell: Callable[[SessionRequest, list[OffloadKey]], bool]) -> None:
        """Call `tell` for the oldest questions; `tell` returns whether it has answered the question."""
        if not self._asked:
            return
        left: list[tuple[SessionRequest, list[OffloadKey]]] = []
        blocked: set[int] = set()  # a client knows a request's answers by their order
        asked_keys = 0
        for at, (request, keys) in enumerate(self._asked):
            if asked_keys >= KEYS_A_STEP:
                left += self._asked[at:]
                break
            asked_keys += len(keys)
            if request.number in blocked or not tell(request, keys):
                blocked.add(request.number)
                left.append((request, keys))
        self._keep(left)

    def forget(self, request: SessionRequest) -> None:
        """Remove the questions of a request that ends: tiers would keep their answers to later lookups."""
        if self._asked:
            self._keep([each for each in self._asked if each[0] is not request])

    def _keep(self, left: list[tuple[SessionRequest, list[OffloadKey]]]) -> None:
        self._asked, self._keys = left, sum(len(keys) for _, keys in left)


class QuickTiers:
    """Says whether all tiers lack a block, as long as they answer at once.

    After a tier that has to ask its server, none is asked for `ASKS_AGAIN_S`: the prefetch of a prompt asks for many
    blocks in one round trip.

    Args:
        contains_many: See `CalledManager.contains_many`.
    """

    def __init__(self, contains_many: Callable[[Sequence[OffloadKey], ReqContext], list[bool | None]]) -> None:
        self._contains_many = contains_many
        self._asks_again_s = 0.0

    def lack(self, key: OffloadKey, context: ReqContext) -> bool:
        """Return whether all tiers have said that they lack a block. The manager knows the request of `context`."""
        now_s = time.monotonic()
        if now_s < self._asks_again_s:
            return False
        (answer,) = self._contains_many([key], context)
        if answer is None:
            self._asks_again_s = now_s + ASKS_AGAIN_S
        return answer is False
