"""What a stack costs an engine that finds nothing and stores everything: one JSON object.

    python tests/performance/first_turn.py DIRECTORY --rounds 6
    python tests/performance/first_turn.py DIRECTORY --rounds 6 --attached --beside CHECKOUT

vLLM on the CPU plays the first turn of 24 chats of 4,608 tokens, six at a time, with a model that takes the time of a
GPU and computes nothing: see `tests/plugins/vllm/vllm_turns_program.py`. The engines are without a stack ("none"), with
a stack of a CPU tier and nvme, with `--attached` beside a host's server with the same tiers, and with `--beside` the
same two of another checkout. They run beside each other, and play their turns one after another. All caches are reset
before each turn.

Of each engine: the median seconds of a turn and of a first token, and both over those of "none" in the same round, with
their spread. DIRECTORY should be in memory (/dev/shm): the disk is then none that waits. Each engine takes some 3 GB.
It needs TIERED_KV_VLLM_CPU_PYTHON (see tests/support/engines.py), and two processors that do nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.performance.bench import command_line, in_turn, ratios, spread
from tests.support.engines import SOURCE, Message, Program, environment_of, interpreter, program_path
from tiered_kv.testing.control import wait_until

ENGINE = "0.32.0"
PRIMARY_BYTES, NVME_BYTES = 512 << 20, 2 << 30
PAUSE_S = 0.5  # after a turn, for what is still to be stored


class Engine:
    """An engine of a checkout; None stands for vLLM alone."""

    def __init__(self, undo: ExitStack, directory: Path, checkout: Path | None, *, is_attached: bool) -> None:
        directory.mkdir(parents=True)
        source = checkout or SOURCE
        environment = environment_of(ENGINE, directory)
        environment["PYTHONPATH"] = os.pathsep.join([str(source), str(source / "plugins")])
        python = interpreter(ENGINE)
        config = None
        if checkout is not None:
            nvme = {"type": "nvme", "path": str(directory / "nvme"), "capacity": NVME_BYTES}
            nvme |= dict.fromkeys(("store_budget", "load_budget"), PRIMARY_BYTES // 2)
            stack = {"primary": {"capacity": PRIMARY_BYTES, "prefault": True}, "secondary": [nvme]}
            extra: Message = {"stack": stack}
            if is_attached:
                socket, file = directory / "cache.sock", directory / "stack.yaml"
                file.write_text(json.dumps({"version": 1, **stack}))
                command = [python, "-m", "tiered_kv", "serve", str(file), "--socket", str(socket)]
                undo.enter_context(Program(command, directory / "server.errors", environment))
                wait_until(socket.exists)
                extra = {"attach": f"unix:{socket}"}
            config = connector_of(source, extra)
        command = [python, program_path("vllm_turns_program.py"), str(directory / "engine")]
        self._program = undo.enter_context(Program(command, directory / "engine.errors", environment))
        undo.callback(self._program.end)
        self._program.post("open", kv_transfer_config=config)

    def wait(self) -> None:
        self._program.answer()
        self.turn(-1)

    def turn(self, seed: int) -> Message:
        return self._program.tell("turn", seed=seed)


def connector_of(checkout: Path, extra: Message) -> Message:
    """Return vLLM's configuration of a checkout's connector. An older one has it within `tiered_kv`."""
    has_plugin = (checkout / "plugins" / "tiered_kv_vllm").is_dir()
    module = "tiered_kv_vllm" if has_plugin else "tiered_kv.integrations.vllm"
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieredKVOffloadingSpec",
            "spec_module_path": module,
            **extra,
        },
    }


def measure(directory: Path, beside: Path | None, rounds: int, *, attached: bool) -> dict[str, Any]:
    """Return for each engine its seconds, and their ratios to those of vLLM alone."""
    builds: dict[str, Path | None] = {"none": None, "ours": SOURCE}
    if beside is not None:
        builds["beside"] = beside
    taken: dict[str, list[Message]] = {}
    with ExitStack() as undo:
        engines: dict[str, Engine] = {}
        for name, checkout in builds.items():
            engines[name] = Engine(undo, directory / name, checkout, is_attached=False)
            if attached and checkout is not None:
                also = f"{name}-attached"
                engines[also] = Engine(undo, directory / also, checkout, is_attached=True)
        for engine in engines.values():
            engine.wait()
        for number in range(rounds):
            for name in in_turn(number, engines):
                taken.setdefault(name, []).append(engines[name].turn(number))
                time.sleep(PAUSE_S)
    seconds = {name: {of: [turn[of] for turn in turns] for of in turns[0]} for name, turns in taken.items()}
    return {
        name: {
            of: {
                "median": round(statistics.median(values), 3),
                "over_none": spread(ratios(values, seconds["none"][of])),
            }
            for of, values in measured.items()
        }
        for name, measured in seconds.items()
    }


def main() -> None:
    parser = command_line(__doc__, "directory", rounds=6, beside=Path)
    parser.add_argument("--attached", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.directory, options.beside, options.rounds, attached=options.attached)))


if __name__ == "__main__":
    main()
