"""Requests for a paced engine: chats that return, and mixes in which a cache gains little."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

VOCABULARY = 500
ANSWER = 32


class Prompt(NamedTuple):
    name: str
    tokens: list[int]
    answer: int = ANSWER


class Turn(NamedTuple):
    """Requests, of which so many are in flight until all have been answered."""

    prompts: list[Prompt]
    in_flight: int


Requests = Callable[[random.Random], Iterator[Turn]]


def tokens_of(chance: random.Random, count: int) -> list[int]:
    return chance.choices(range(VOCABULARY), k=count)


def chats(in_flight: int, *, first: int = 4096, add: int = 512, answer: int = ANSWER) -> Requests:
    """Return 24 chats of four turns. Four system prompts make a quarter of the first turn."""

    def requests(chance: random.Random) -> Iterator[Turn]:
        systems = [tokens_of(chance, first // 4) for _ in range(4)]
        histories = [systems[chat % 4] + tokens_of(chance, first - first // 4) for chat in range(24)]
        for turn in range(4):
            prompts = []
            for chat in chance.sample(range(24), 24):
                histories[chat] = histories[chat] + tokens_of(chance, add)
                prompts.append(Prompt(f"{turn}-{chat}", histories[chat], answer))
                histories[chat] = histories[chat] + tokens_of(chance, answer)  # other ones than the engine's
            yield Turn(prompts, in_flight)

    return requests


def strangers(chance: random.Random) -> Iterator[Turn]:
    """Prompts that nobody sends twice."""
    yield Turn([Prompt(f"{number}", tokens_of(chance, chance.randrange(2048, 6144))) for number in range(64)], 6)


def one_hot_prompt(chance: random.Random) -> Iterator[Turn]:
    """Each eighth prompt begins with the same 6,144 tokens. The others have nothing in common, and push it out."""
    hot = tokens_of(chance, 6144)
    lengths = [chance.randrange(2048, 6144) for _ in range(96)]
    prompts = [tokens_of(chance, each) if at % 8 else hot + tokens_of(chance, 512) for at, each in enumerate(lengths)]
    yield Turn([Prompt(f"{number}", tokens) for number, tokens in enumerate(prompts)], 6)


def all_lengths(chance: random.Random) -> Iterator[Turn]:
    """Prompts of 64 to 32,768 tokens, each sent three times."""
    lengths = [int(64 * 512 ** chance.random()) for _ in range(48)]
    prompts = [tokens_of(chance, length) for length in lengths]
    for turn in range(3):
        order = chance.sample(range(len(prompts)), len(prompts))
        yield Turn([Prompt(f"{turn}-{each}", prompts[each] + tokens_of(chance, 16)) for each in order], 6)


@dataclass(frozen=True)
class Mix:
    requests: Requests
    engine: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the engine other than the default."""
    first_token_max: float = 1.05
    """Of the mean time to the first token without a stack."""


MIXES = {
    "chats": Mix(chats(6)),
    "bursts": Mix(chats(24)),
    "more requests than places": Mix(chats(24), {"places": 4}),
    "long answers": Mix(chats(12, first=1024, add=256, answer=256), {"gpu_blocks": 2000}),
    "all lengths": Mix(all_lengths, {"gpu_blocks": 6000}),
    # A load ends within a step, so its request is computed together with the next one: both wait for the longer step,
    # while all others generate sooner. This is so with hits in the CPU tier alone.
    "one hot prompt": Mix(one_hot_prompt, {"gpu_blocks": 2000}, first_token_max=1.15),
    "strangers": Mix(strangers),
}
