"""A program on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 60.0
ESCAPES = re.compile(r"\x1b(\[[0-9;?=>]*[A-Za-z]|\][^\x07\x1b]*(\x07|\x1b\\)|[=>()][B0]?)")
CTRL_C = "\x03"
TAB = "\t"


class Terminal:
    """A program on a new terminal.

    Args:
        command: The program.
        directory: Its working directory.
        environ: Added to the caller's environment.
        size: Columns and lines.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        environ: Mapping[str, str] | None = None,
        size: tuple[int, int] = (80, 24),
    ) -> None:
        self._master, slave = pty.openpty()
        self.resize(size)
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        try:
            self._process = subprocess.Popen(
                ["setsid", "--ctty", "--wait", *command],
                cwd=directory,
                env={**kept, "TERM": "xterm", **(environ or {})},
                stdin=slave,
                stdout=slave,
                stderr=slave,
            )
        finally:
            os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._master)  # hangs up
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def resize(self, size: tuple[int, int]) -> None:
        columns, lines = size
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def signal(self, number: int) -> None:
        """Send a signal to the program, which is the child of `setsid`."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        os.kill(int(children[0]) if children else self._process.pid, number)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """Return the output from now on, without escape sequences, once it contains `text`.

        Raises:
            TimeoutError: The text does not appear.
        """
        shown = self._shown_until(lambda shown: text in ESCAPES.sub("", shown), repr(text))
        return ESCAPES.sub("", shown)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the remaining output."""
        shown = self._shown_until(lambda _: self._process.poll() is not None, "the end") + self._read()
        return self._process.returncode, shown

    def _shown_until(self, is_enough: Callable[[str], bool], expected: str) -> str:
        deadline, shown = time.monotonic() + TIMEOUT_S, ""
        while not is_enough(shown):
            shown += self._read()
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {expected}, found {shown!r}")
        return shown

    def _read(self) -> str:
        part = b""
        if select.select([self._master], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # the program has gone
                part = os.read(self._master, 1 << 16)
        return part.decode(errors="replace")
