"""A request of a workload: the ids of its prompt's blocks, and their keys; and the built-in workload of chats."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError

HASH_ID_MAX = 2**64 - 1
BLOCK_TOKENS = 512
"""Tokens in a block, as in the published traces."""

_KEY_PERSON = b"tiered-kv replay"
_KEY_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Args:
        timestamp_ms: Arrival, in milliseconds since the workload began.
        input_length: Tokens in the prompt.
        output_length: Tokens that were generated.
        hash_ids: One id for each block of the prompt, in order. An id identifies the block and all blocks
            before it, so no id occurs twice.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def block_key(hash_id: int) -> OffloadKey:
    """Return the key of a block: the same in every process and on every machine."""
    digest = hashlib.blake2b(hash_id.to_bytes(8, "little"), digest_size=_KEY_HASH_BYTES, person=_KEY_PERSON).digest()
    return make_offload_key(digest, 0)


def require_at_least(least: int, settings: object, *names: str) -> None:
    """Raise ConfigError for the first of the named settings that is below `least`."""
    for name in names:
        if getattr(settings, name) < least:
            raise ConfigError(f"expected at least {least}, found {getattr(settings, name)}", location=name)


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Multi-turn chats that share system prompts: equal settings give equal requests, in every process.

    A chat starts with one of a few system prompts. Each turn appends blocks to the prompt, so it has all earlier
    prompts of its chat as prefixes. Each request belongs to a random one of `active_chats` chats. A new chat replaces
    one that has ended. The more chats are active, the more is stored between two turns of a chat, and the lower the
    tier that still has its prefix.

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
