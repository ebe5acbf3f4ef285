"""The built-in workload: multi-turn chats that share system prompts.

A chat starts with one of a few system prompts. Each turn appends blocks to the prompt, so it has all earlier prompts
of its chat as prefixes. Each request belongs to a random one of `active_chats` chats. A new chat replaces one that has
ended. The more chats are active, the more is stored between two turns of a chat, and the lower the tier that still has
its prefix.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tiered_kv.workload.request import Request, require_at_least

BLOCK_TOKENS = 512
"""Tokens in a block, as in the published traces."""


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """A reproducible workload: equal settings give equal requests, in every process.

    `docs/reference/command.md` describes each setting.
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
        return self.chats * self.turns

    def requests(self) -> Iterator[Request]:
        """Yield the requests, in order of arrival: ten in a second."""
        chance = random.Random(self.seed)
        waiting = (self._chat(number, chance) for number in range(self.chats))
        active = list(islice(waiting, self.active_chats))
        timestamp_ms = 0
        while active:
            chat = chance.choice(active)
            ids = next(chat, None)
            if ids is None:
                active.remove(chat)
                active += islice(waiting, 1)
            else:
                yield Request(timestamp_ms, len(ids) * BLOCK_TOKENS, BLOCK_TOKENS, ids)
                timestamp_ms += 100

    def _chat(self, number: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
        """Yield the blocks of each prompt of a chat."""
        prompt = chance.randrange(self.system_prompts)
        ids = [_block_id(self.seed, "system", prompt, index) for index in range(self.system_blocks)]
        for _ in range(self.turns):
            added = chance.randint(1, 2 * self.turn_blocks - 1)
            ids += [_block_id(self.seed, "chat", number, index) for index in range(len(ids), len(ids) + added)]
            yield tuple(ids)


def _block_id(*parts: int | str) -> int:
    """Return a 64-bit id, practically unique to these parts, and not one of the small ids of traces."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
