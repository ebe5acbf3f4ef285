"""The built-in workload: multi-turn chats that share system prompts.

A chat starts with one of a few system prompts. Each turn appends blocks to the prompt (the last answer, the
next question), so a turn's prompt has all earlier prompts of its chat as prefixes. `active_chats` chats are
active at once, and each request is of a random one. A chat that has ended is replaced by a new one. So the
number of active chats determines how much is stored between two turns of one chat. That decides in which tier the
second turn finds its prefix.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tiered_kv.workload.request import Request, require_at_least

BLOCK_TOKENS = 512
"""Tokens in a block, as in the published traces."""


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """A reproducible workload: equal settings give equal requests, in every process.

    Args:
        seed: Chooses the turns' lengths, their order, and the blocks' ids.
        chats: Chats in all. The workload has `chats * turns` requests.
        turns: Requests in a chat.
        active_chats: Chats that are active at once.
        turn_blocks: Blocks that a turn appends on average; uniform from 1 to `2 * turn_blocks - 1`.
        system_prompts: Distinct system prompts; each chat begins with one of them.
        system_blocks: Length of a system prompt, in blocks; 0 for none.

    Raises:
        ConfigError: A number is out of its range.
    """

    seed: int = 0
    chats: int = 240
    turns: int = 8
    active_chats: int = 64
    turn_blocks: int = 5
    system_prompts: int = 4
    system_blocks: int = 8

    def __post_init__(self) -> None:
        require_at_least(1, self, "chats", "turns", "active_chats", "turn_blocks", "system_prompts")
        require_at_least(0, self, "system_blocks")

    @property
    def requests_total(self) -> int:
        """How many requests `requests` yields."""
        return self.chats * self.turns

    def requests(self) -> Iterator[Request]:
        """Yield the requests, in order of arrival: ten in a second."""
        chance = random.Random(self.seed)
        waiting = iter(range(self.chats))
        active = [self._begin(chat, chance) for _, chat in zip(range(self.active_chats), waiting, strict=False)]
        timestamp_ms = 0
        while active:
            slot = chance.randrange(len(active))
            chat = active[slot]
            request = chat.next_turn(chance, self.turn_blocks, timestamp_ms)
            timestamp_ms += 100
            if chat.turns_taken == self.turns:
                successor = next(waiting, None)
                if successor is None:
                    active.pop(slot)
                else:
                    active[slot] = self._begin(successor, chance)
            yield request

    def _begin(self, number: int, chance: random.Random) -> _Chat:
        prompt = chance.randrange(self.system_prompts)
        system = [_block_id(self.seed, "system", prompt, index) for index in range(self.system_blocks)]
        return _Chat(self.seed, number, system)


class _Chat:
    """One chat and the ids of its prompt so far."""

    def __init__(self, seed: int, number: int, system_ids: list[int]) -> None:
        self.turns_taken = 0
        self._seed = seed
        self._number = number
        self._ids = system_ids

    def next_turn(self, chance: random.Random, turn_blocks: int, timestamp_ms: int) -> Request:
        added = chance.randint(1, 2 * turn_blocks - 1)
        first = len(self._ids)
        self._ids += [_block_id(self._seed, "chat", self._number, first + index) for index in range(added)]
        self.turns_taken += 1
        return Request(timestamp_ms, len(self._ids) * BLOCK_TOKENS, BLOCK_TOKENS, tuple(self._ids))


def _block_id(*parts: int | str) -> int:
    """Return a 64-bit id that chats, prompts, seeds and numbered traces practically never share."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
