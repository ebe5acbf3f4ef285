"""Real vLLMs that use one cache of their host."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Message, Program, interpreter, running

pytestmark = pytest.mark.slow

PROMPTS = [[seed, 200] for seed in range(4)]
FOUND = 192
"""Tokens of a prompt's whole blocks."""
TRIES_MAX = 20
PAUSE_S = 2.0
"""vLLM's workers take a processor each for a second after a message: on two, another replica would hardly start."""
STACK = {"primary": {"capacity": "16MiB"}, "prefill": "off"}


class Talk:
    """A program that is told what to do.

    Args:
        program: The running program, which says that it is ready.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._messages: Iterator[Message] = program.messages()
        self.said = next(self._messages)

    def ask(self, **message: Any) -> Message:
        self.program.go_on(message)
        return next(self._messages)


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
        self._engine: dict[str, object] = {"tensor_parallel_size": tensor_parallel_size}
        if tensor_parallel_size > 1:
            self._engine["distributed_executor_backend"] = "mp"
        (directory / "stack.yaml").write_text(json.dumps(STACK))

    def start_server(self) -> Program:
        socket = str(self._directory / "cache.sock")
        command = [sys.executable, "-c", "from tiered_kv.cli import main; raise SystemExit(main())"]
        command += ["serve", "stack.yaml", "--socket", socket]
        log = self._directory / "server.errors"
        server = self._closing.enter_context(Program(command, log, dict(os.environ)))
        assert server.line().startswith("serving"), server.log()
        return server

    def start_engine(self, *, alone: bool = False) -> Talk:
        extra = {
            "spec_name": "TieredKVOffloadingSpec",
            "spec_module_path": "tiered_kv.integrations.vllm",
            "attach": f"unix:{self._directory}/cache.sock",
        }
        config = {
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "tiered_kv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        options = {"engine": self._engine, "kv_transfer_config": None if alone else config}
        model = str(self._directory / "model")
        return Talk(
            self._closing.enter_context(running("0.32.0", "vllm_attached_program.py", model, json.dumps(options)))
        )


def tokens_of_the_engine_alone(host: Host) -> list[list[list[int]]]:
    alone = host.start_engine(alone=True)
    tokens = [alone.ask(prompts=[prompt])["tokens"] for prompt in PROMPTS]
    alone.program.kill()
    return tokens


def served(engine: Talk, prompt: list[int]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens that an attached engine answers, and how many of the prompt it has found."""
    engine.ask(attached=True)
    answer = engine.ask(prompts=[prompt])
    return answer["tokens"], answer["found"]


def restore(engine: Talk, prompt: list[int], tokens: list[list[int]]) -> None:
    """Let an engine find a prompt, after a few tries: workers that wait for each other may take all processors.

    The server is late then, so that a prompt is computed, or its blocks are not stored.
    """
    counters = []
    for _ in range(TRIES_MAX):
        engine.ask(attached=True)
        answer = engine.ask(prompts=[prompt])
        assert answer["tokens"] == tokens
        if answer["found"] == [FOUND]:
            return
        counters.append((answer["found"], answer["counters"]))
    raise AssertionError(f"a prompt is never found: {counters}")


def test_engines_share_a_cache_that_outlives_them(tmp_path: Path, closing: ExitStack) -> None:
    interpreter("0.32.0")
    host = Host(closing, tmp_path, tensor_parallel_size=1)
    expected = tokens_of_the_engine_alone(host)
    host.start_server()
    first, second = host.start_engine(), host.start_engine()
    for engine, hit in ((first, 0), (second, FOUND)):
        for prompt, tokens in zip(PROMPTS[:3], expected, strict=False):
            assert served(engine, prompt) == (tokens, [hit])
    second.program.kill()
    assert served(first, PROMPTS[3]) == (expected[3], [0])
    restore(first, PROMPTS[3], expected[3])  # an engine that is killed at once may not have stored it
    first.program.kill()
    again = host.start_engine()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert served(again, prompt) == (tokens, [FOUND])


@contextmanager
def loaded(engine: Talk, expected: list[list[list[int]]]) -> Iterator[None]:
    """Serve prompts meanwhile, and check the tokens."""
    over, answers = threading.Event(), list[tuple[int, Message]]()

    def serve() -> None:
        for number in itertools.cycle(range(len(PROMPTS))):
            answers.append((number, engine.ask(prompts=[PROMPTS[number]])))
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
    assert all(answer["tokens"] == expected[number] for number, answer in answers)


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
            engines[number].program.kill()
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
    away = [engine.ask(prompts=[prompt]) for prompt in PROMPTS]
    assert [(answer["tokens"], answer["found"]) for answer in away] == computed
    host.start_server()
    assert [served(engine, prompt) for prompt in PROMPTS] == computed, "the memory is lost"
    for prompt, (tokens, _) in zip(PROMPTS, computed, strict=True):
        restore(engine, prompt, tokens)
