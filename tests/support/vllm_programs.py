"""Programs in environments of vLLM's, beside the tests of its integration; what they print is read here.

`.ci/engines DIRECTORY` builds the environments; TIERED_KV_VLLM_CPU_PYTHON and TIERED_KV_VLLM_PYTHON name their
interpreters.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2]
TIMEOUT_S = 900.0
LMCACHE = "0.32.0 with LMCache"
VARIABLES = {
    "0.32.0": "TIERED_KV_VLLM_CPU_PYTHON",
    "0.33.0": "TIERED_KV_VLLM_PYTHON",
    LMCACHE: "TIERED_KV_LMCACHE_PYTHON",
}
"""Of each version, what names its interpreter."""
VERSIONS = [pytest.param("0.32.0", marks=pytest.mark.full), pytest.param("0.33.0")]
"""The versions, of which a sample of the tests takes the newest."""

Message = dict[str, Any]


def interpreter(version: str) -> str:
    """Return the Python of the environment with a version of vLLM, or skip."""
    found = os.environ.get(VARIABLES[version])
    if not found or not Path(found).exists():
        pytest.skip(f"vLLM {version} is not here: run .ci/engines DIRECTORY, and set {VARIABLES[version]}")
    return found


def environment_of_programs(directory: Path) -> dict[str, str]:
    """Return the variables for a program in an environment of vLLM's, whose temporary files go to `directory`."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "TMPDIR": str(directory)}
    environment.pop("PYTHONPATH", None)
    if (SOURCE / "plugins").is_dir():
        # Not installed: the tiered_kv of vLLM's environment tells the plugins, and this checkout's is run.
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(SOURCE / "plugins")])
    return environment


def run_example(version: str, name: str, directory: Path, *arguments: str) -> str:
    """Run an example to its end and return what it prints."""
    done = subprocess.run(
        [interpreter(version), str(SOURCE / "examples" / name / "run.py"), *arguments],
        cwd=directory,
        env=environment_of_programs(directory),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


class Program:
    """A program in an environment of vLLM's; its lines of JSON are read one by one."""

    def __init__(self, version: str, program: Path, *arguments: str) -> None:
        environment = environment_of_programs(Path(arguments[0]).parent)
        self._errors = Path(arguments[0]).with_suffix(".errors")
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [interpreter(version), str(program), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=self._errors.parent,
            )

        # A program that hangs ends, and with it what it says.
        self._watchdog = threading.Timer(TIMEOUT_S, self._process.kill)
        self._watchdog.start()

    def messages(self) -> Iterator[Message]:
        """Yield what the program says, until it ends; fail if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        status = self._process.wait()
        assert status == 0, f"the program ended with {status}:\n{self._errors.read_text()[-4000:]}"

    def go_on(self, message: Message | None = None) -> None:
        """Let a program that waits go on, with a message if it reads one."""
        assert self._process.stdin is not None
        self._process.stdin.write(("" if message is None else json.dumps(message)) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Let a program that reads messages end by itself, with its engine's processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        self._process.wait()

    def close(self) -> None:
        self._watchdog.cancel()
        self._watchdog.join()
        self._process.kill()
        self._process.communicate()


@contextmanager
def running(version: str, path: Path, *arguments: str) -> Iterator[Program]:
    program = Program(version, path, *arguments)
    try:
        yield program
    finally:
        program.close()


def passed_checks(version: str, path: Path, directory: Path, *arguments: str) -> list[str]:
    """Run a program of checks in `directory`, and return their names; none may fail."""
    with running(version, path, str(directory), *arguments) as program:
        errors = {result["check"]: result["error"] for result in program.messages()}
    assert {name: error for name, error in errors.items() if error} == {}
    return list(errors)


def our_spec(primary_bytes: int, tiers: Sequence[Mapping[str, object]]) -> Message:
    """Return what vLLM is told of its connector: our stack, with these secondary tiers."""
    stack = {"primary": {"capacity": primary_bytes}, "secondary": list(tiers)}
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieredKVOffloadingSpec",
            "spec_module_path": "tiered_kv.integrations.vllm",
            "stack": stack,
        },
    }


def damage_segments(directory: Path) -> None:
    """Flip a byte in each 32 KiB of the segments of nvme tiers, their first 16 KiB left out."""
    segments = sorted(directory.rglob("*.kv"))
    assert segments
    for path in segments:
        with path.open("r+b") as file:
            for offset in range(16 << 10, path.stat().st_size, 32 << 10):
                file.seek(offset)
                (byte,) = file.read(1) or b"\0"
                file.seek(offset)
                file.write(bytes([byte ^ 0xFF]))
