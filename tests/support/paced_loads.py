"""Requests for a paced engine, and a tier on a disk of a known rate.

The requests are chats that return, and mixes in which a cache gains little. The disk works in the time of
`time.monotonic`, which may be a program's own clock.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager

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


_END_S = 1e-9


class PacedTier(SecondaryTierManager):
    """Knows which blocks it has, and moves no bytes.

    Its disk serves loads and stores each in their order, and each kind gets half of the rate while both wait. A block
    that the disk has is not stored again.
    """

    is_nonblocking = True

    def __init__(self, spec: Any, view: memoryview, tier_type: str, *, bytes_per_s: float) -> None:
        super().__init__(spec, view, tier_type)
        assert view.strides is not None
        self._block_s = view.strides[0] / bytes_per_s
        self._keys: set[OffloadKey] = set()
        self._stores: deque[tuple[float, JobMetadata]] = deque()
        self._loads: deque[tuple[float, JobMetadata]] = deque()
        self._results: list[JobResult] = []
        self._now_s = time.monotonic()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self._keys

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._advance()
        new = sum(key not in self._keys for key in job_metadata.keys)
        self._stores.append((new * self._block_s, job_metadata))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._advance()
        self._loads.append((len(job_metadata.keys) * self._block_s, job_metadata))

    def get_finished(self) -> list[JobResult]:
        self._advance()
        results, self._results = self._results, []
        return results

    def _advance(self) -> None:
        """Let the disk work until now."""
        now_s = time.monotonic()
        while queues := [queue for queue in (self._stores, self._loads) if queue]:
            work_s = min((now_s - self._now_s) / len(queues), *(queue[0][0] for queue in queues))
            self._now_s += work_s * len(queues)
            for queue in queues:
                left_s, job = queue.popleft()
                if left_s - work_s > _END_S:
                    queue.appendleft((left_s - work_s, job))
                    continue
                if not job.is_promotion:
                    self._keys.update(job.keys)
                self._results.append(JobResult(job.job_id, True, ended_s=self._now_s))
            if now_s - self._now_s <= _END_S:
                break
        self._now_s = now_s
