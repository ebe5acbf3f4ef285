"""Requests of a workload, the built-in chats, and the keys of their blocks. `trace` reads requests from a file.

Commands, the replay and the simulation call it, on one thread. Equal arguments give equal results in every process.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError

HASH_ID_MAX = 2**64 - 1
BLOCK_TOKENS = 512
"""Tokens in a block, as in the published traces."""

_KEY_PERSON = b"tiered-kv replay"
_KEY_HASH_BYTES = 16
_COMMON_REQUESTS_MIN = 50
_COMMON_SHARE = 0.01
"""A block belongs to no session if more requests have it than this number, and than this share of all requests."""
_ROUGH_S = (1, 4, 16, 64, 256, 1024)
"""The seconds to which `hints_from_sessions` rounds times."""
_BLOCK_TOKENS = [1 << power for power in range(17)]  # sizes that `block_tokens` tries
_SURE_SHARE = 0.9
"""A size of blocks is sure if at least this share of the prompts fits it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Args:
        timestamp_ms: Arrival, in milliseconds since the workload began.
        input_length: Tokens in the prompt.
        output_length: Tokens that were generated.
        hash_ids: One id for each block of the prompt, in order. An id identifies the block and all blocks
            before it, so no id occurs twice.
        session: Name of its session, whose requests run one after another; empty if unknown.
        hints: The request's hints, as `Hints.parse` takes them.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str = ""
    hints: Mapping[str, object] | None = None


def block_key(hash_id: int) -> OffloadKey:
    """Return the key of a block: the same in every process and on every machine."""
    digest = hashlib.blake2b(hash_id.to_bytes(8, "little"), digest_size=_KEY_HASH_BYTES, person=_KEY_PERSON).digest()
    return make_offload_key(digest, 0)


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Multi-turn chats that share system prompts: equal settings give equal requests, in every process.

    A chat starts with one of a few system prompts. Each turn appends blocks to the prompt, so it has all earlier
    prompts of its chat as prefixes. Each request belongs to a random one of `active_chats` chats. A new chat replaces
    one that has ended. The more chats are active, the more blocks are stored between two turns of a chat.
    Then only a lower tier still has the chat's prefix.

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
        for name in ("chats", "turns", "active_chats", "turn_blocks", "system_prompts", "system_blocks"):
            found, least = getattr(self, name), 0 if name == "system_blocks" else 1
            if found < least:
                raise ConfigError(f"expected at least {least}, found {found}", location=name)

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


def id_number(hash_id: object) -> int:
    """Return an id of a trace as a number: the value of a text of digits, or the hash of another text."""
    if isinstance(hash_id, float) and hash_id.is_integer():
        return int(hash_id)
    if not isinstance(hash_id, str) or not hash_id:
        raise ValueError("expected ids that are whole numbers or texts")
    is_number = hash_id.isascii() and hash_id.isdecimal()
    if is_number and str(number := int(hash_id[:20])) == hash_id and number <= HASH_ID_MAX:
        return number
    return int.from_bytes(hashlib.blake2b(hash_id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def block_tokens(requests: Sequence[Request]) -> int:
    """Return how many tokens a block has, by the lengths of the prompts; 0 if these do not show it."""
    lengths = Counter((request.input_length, len(request.hash_ids)) for request in requests if request.hash_ids)
    fits = {
        size: sum(count for (tokens, blocks), count in lengths.items() if abs(tokens / size - blocks) < 1)
        for size in _BLOCK_TOKENS
    }
    best = max(fits, key=fits.__getitem__)
    return best if lengths and fits[best] >= _SURE_SHARE * lengths.total() else 0


def sessions(requests: Sequence[Request]) -> list[int]:
    """Return the session of each request: its first block that is in few requests; if there is none, its last block."""
    uses = Counter(each for request in requests for each in request.hash_ids)
    limit = max(_COMMON_REQUESTS_MIN, _COMMON_SHARE * len(requests))
    common = {each for each, count in uses.items() if count > limit}
    prompts = (request.hash_ids for request in requests)
    return [next((each for each in ids if each not in common), ids[-1] if ids else 0) for ids in prompts]


def session_names(requests: Sequence[Request]) -> list[str | int]:
    """Return the session of each request: as the trace names it, or else the block that `sessions` returns."""
    return [request.session or root for request, root in zip(requests, sessions(requests), strict=True)]


def numbered(session: str | int) -> int:
    """Return a number of 64 bits for a session."""
    return id_number(f"session {session}") if isinstance(session, str) else session


def hints_from_sessions(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the hints of clients that know roughly when their session returns, and when it ends."""
    names = session_names(requests)
    returns_ms: dict[str | int, int] = {}
    hinted = []
    for request, name in zip(reversed(requests), reversed(names), strict=True):
        hints: dict[str, object] = {"ttl": 0}
        if name in returns_ms:
            wait_s = max(returns_ms[name] - request.timestamp_ms, 1) / 1000
            hints = {"expect_return": min(_ROUGH_S, key=lambda rough_s: abs(math.log(wait_s / rough_s)))}
        returns_ms[name] = request.timestamp_ms
        hinted.append(replace(request, hints=hints))
    return hinted[::-1]
