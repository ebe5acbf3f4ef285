"""Processes that run a function of the tests, or a program with another engine version.

with Child(store_until_input, "alice") as child:
    assert child.line() == "begun"
    last_line = child.finish(60.0)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self


class Child:
    """A Python process that runs a function of a module; killed at the end of the context if it still runs.

    Args:
        function: It finds `arguments` in `sys.argv`. The end of its input asks it to end.
        within: Returns the command that runs a command, such as one with its own mount namespace.
    """

    def __init__(
        self, function: Callable[[], None], *arguments: str, within: Callable[[list[str]], Sequence[str]] = list
    ) -> None:
        program = f"from {function.__module__} import {function.__name__} as main; main()"
        # Without a buffer: `communicate` would not see what a line was read with.
        self._process = subprocess.Popen(
            within([sys.executable, "-c", program, *arguments]), 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._last = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def line(self) -> str:
        """Return the next line that it prints; "" if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._last = line or self._last
        return line.decode().rstrip("\n")

    def finish(self, timeout_s: float) -> str | None:
        """Close its input and return the last line that it printed; None if it was killed."""
        printed, _ = self._process.communicate(timeout=timeout_s)
        if self._process.returncode == -signal.SIGKILL:
            return None
        assert self._process.returncode == 0, f"it ended with {self._process.returncode}"
        return (self._last + printed).decode().rstrip("\n").rpartition("\n")[2]

    def kill(self) -> None:
        self._process.kill()


def output_with_engine(
    directory: Path, engine: str, version: str | None, program: str, *arguments: str, **variables: str
) -> str:
    """Return what `program` prints if the module `engine` has this version; without a version it is not installed."""
    missing = f"raise ModuleNotFoundError(name={engine!r})"
    (directory / f"{engine}.py").write_text(missing if version is None else f"__version__ = {version!r}")
    search = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **variables, "PYTHONPATH": search}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout.strip()
