"""Real vLLMs that use one cache of their host."""

from __future__ import annotations

import itertools
import random
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.engines import ENGINE, Program, connector, interpreter, running
from tests.support.host_server import server_process

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(seed).choices(range(512), k=200) for seed in range(4)]
FOUND = [192]
"""Tokens of a prompt's whole blocks."""
TRIES_MAX = 20
PAUSE_S = 2.0
"""vLLM's workers take a processor each for a second after a message: on two, another replica would hardly start."""
ANSWER_S = 60.0
"""Longer than a server can be late for want of a processor; one that has ended is seen at once."""
STACK = {"primary": {"capacity": "16MiB"}, "prefill": "off"}

Served = tuple[list[list[int]], list[int]]
"""The tokens that an engine answers, and how many of the prompt it has found."""


class Host:
    """A cache server, and engines that attach to it.

    Args:
        closing: Ends all processes.
        directory: Of the socket, and of the model.
        tensor_parallel_size: Workers of each engine.
    """

    def __init__(self, closing: ExitStack, directory: Path, tensor_parallel_size: int) -> None:
        self._closing = closing
        self._directory = directory
        self._options: dict[str, object] = {"tensor_parallel_size": tensor_parallel_size}
        if tensor_parallel_size > 1:
            self._options["distributed_executor_backend"] = "mp"

    def start_server(self) -> subprocess.Popen[str]:
        return self._closing.enter_context(server_process(self._directory, STACK, ANSWER_S))

    def start_engine(self, *, alone: bool = False) -> Program:
        config = None if alone else connector(attach=f"unix:{self._directory}/cache.sock")
        engine = self._closing.enter_context(running("0.32.0", ENGINE, str(self._directory / "models")))
        engine.tell("open", kv_transfer_config=config, **self._options)
        return engine


def answer(engine: Program, prompt: list[int]) -> Served:
    told = engine.tell("serve", prompts=[prompt], tokens=6)
    return told["tokens"], told["found"]


def tokens_of_the_engine_alone(host: Host) -> list[list[list[int]]]:
    alone = host.start_engine(alone=True)
    tokens = [answer(alone, prompt)[0] for prompt in PROMPTS]
    alone.kill()
    return tokens


def served(engine: Program, prompt: list[int]) -> Served:
    """Return what an attached engine answers."""
    engine.tell("attached", wanted=True)
    return answer(engine, prompt)


def restore(engine: Program, prompt: list[int], tokens: list[list[int]]) -> None:
    """Let an engine find a prompt, after a few tries: workers that wait for each other may take all processors.

    Stores are late then: they end after the answer, or there is no room for them.
    """
    counters = []
    for _ in range(TRIES_MAX):
        answered, found = served(engine, prompt)
        assert answered == tokens
        if found == FOUND:
            return
        counters.append((found, engine.tell("counters")["host"]))
    raise AssertionError(f"a prompt is never found: {counters}")


def test_engines_share_a_cache_that_outlives_them(tmp_path: Path, closing: ExitStack) -> None:
    interpreter("0.32.0")
    host = Host(closing, tmp_path, tensor_parallel_size=1)
    expected = tokens_of_the_engine_alone(host)
    host.start_server()
    first, second = host.start_engine(), host.start_engine()
    for prompt, tokens in zip(PROMPTS[:3], expected, strict=False):
        assert served(first, prompt) == (tokens, [0])
    for prompt, tokens in zip(PROMPTS[:3], expected, strict=False):
        restore(first, prompt, tokens)
        assert served(second, prompt) == (tokens, FOUND)
    second.kill()
    assert served(first, PROMPTS[3]) == (expected[3], [0])
    restore(first, PROMPTS[3], expected[3])  # an engine that is killed at once may not have stored it
    first.kill()
    again = host.start_engine()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert served(again, prompt) == (tokens, FOUND)


@contextmanager
def loaded(engine: Program, expected: list[list[list[int]]]) -> Iterator[None]:
    """Serve prompts meanwhile, and check the tokens."""
    over, answers = threading.Event(), list[tuple[int, Served]]()

    def serve() -> None:
        for number in itertools.cycle(range(len(PROMPTS))):
            answers.append((number, answer(engine, PROMPTS[number])))
            if over.wait(PAUSE_S):
                return

    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(serve)
        try:
            yield
        finally:
            over.set()
    serving.result()
    assert answers
    assert all(tokens == expected[number] for number, (tokens, _) in answers)


@pytest.mark.full
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_replicas_are_restarted_in_turns_under_load(
    tensor_parallel_size: int, tmp_path: Path, closing: ExitStack
) -> None:
    interpreter("0.32.0")
    host = Host(closing, tmp_path, tensor_parallel_size)
    expected = tokens_of_the_engine_alone(host)
    host.start_server()
    engines = [host.start_engine(), host.start_engine()]
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        restore(engines[0], prompt, tokens)
    for number in range(2):
        with loaded(engines[1 - number], expected):
            engines[number].kill()
            engines[number] = host.start_engine()
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                restore(engines[number], prompt, tokens)


@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_engine_runs_on_while_the_server_is_away_and_attaches_again(
    tensor_parallel_size: int, tmp_path: Path, closing: ExitStack
) -> None:
    interpreter("0.32.0")
    host = Host(closing, tmp_path, tensor_parallel_size)
    server, engine = host.start_server(), host.start_engine()
    computed = [served(engine, prompt) for prompt in PROMPTS]
    assert [found for _, found in computed] == [[0]] * len(PROMPTS)
    for prompt, (tokens, _) in zip(PROMPTS, computed, strict=True):
        restore(engine, prompt, tokens)
    server.kill()
    assert [answer(engine, prompt) for prompt in PROMPTS] == computed
    host.start_server()
    assert [served(engine, prompt) for prompt in PROMPTS] == computed, "the memory is lost"
    for prompt, (tokens, _) in zip(PROMPTS, computed, strict=True):
        restore(engine, prompt, tokens)
