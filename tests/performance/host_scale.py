"""A host's server with many engines and many rows, builds side by side.

    python tests/performance/host_scale.py --build old=OLD/bin/python --build new=NEW/bin/python --rounds 5

Each round starts a server of every build, in turn, with engines of the same build, and measures

- connect: seconds until 1,000 engines are attached, one after another; CPU seconds of both sides; the memory and the
  descriptors that the server has for each;
- step: 10 engines that each ask for the rows of 512 keys in turn, beside no other engines (`step`) or 990 idle ones;
- ends: pings of another process while 1,000 engines, each with leased and granted rows, are killed at once;
- fill: pings while one engine stores a block in each row (`fill`), and then half as many again (`evict`); the memory of
  a row;
- reset: from RESET to its answer with all rows in use, and pings meanwhile and in the next two seconds.

A thousand ends keep the processors busy: `ends_ping_alone_max_ms` leaves out what the two main threads stood ready in
the run queue (Linux, schedstat). It prints medians of the rounds, and the ratio of each build to the first with its
spread. `--parts` chooses parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.performance.bench import Sample, command_line, in_turn, summary

ROW_BYTES = 512
ENGINES, ACTIVE = 1000, 10
_CLIENT = Path(__file__).with_name("host_scale_client.py")
_SETTLE_S = 2.0


class Program:
    """A process of `host_scale_client.py`."""

    def __init__(self, python: str, what: str, socket_path: str, number: int = 0) -> None:
        command = [python, str(_CLIENT), what, socket_path, str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def go_on(self) -> Sample:
        """Let the process do its next part, and return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Sample:
        assert self._process.stdout is not None
        found: Sample = json.loads(self._process.stdout.readline())
        return found


class Server:
    """A server of a build."""

    def __init__(self, python: str, rows: int) -> None:
        self.python, self.rows = python, rows
        self._folder = tempfile.TemporaryDirectory()
        self.path = f"{self._folder.name}/cache.sock"
        file = Path(self._folder.name) / "stack.yaml"
        stack = {"namespace": {"model": "m"}, "block": {"bytes": ROW_BYTES}, "primary": {"capacity": rows * ROW_BYTES}}
        file.write_text(json.dumps(stack))
        command = [python, "-m", "tiered_kv", "serve", str(file), "--socket", self.path]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self._folder.name,  # else Python takes the package of this folder, whatever the build
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def program(self, what: str, number: int = 0) -> Program:
        return Program(self.python, what, self.path, number)

    def own_bytes(self) -> int:
        """Return the server's memory, without the rows."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))


def of_connections(server: Server) -> Iterator[tuple[str, float]]:
    for count, name in ((ACTIVE, "step"), (ENGINES, "step_of_1000")):
        memory, descriptors, cpu_s = server.own_bytes(), server.descriptors(), server.cpu_s()
        with server.program("engines", count) as engines:
            if count == ENGINES:
                yield "connect_s", engines.ready["connect_s"]
                yield "connect_cpu_s", engines.ready["connect_cpu_s"] + server.cpu_s() - cpu_s
                yield "connection_bytes", (server.own_bytes() - memory) / count
                yield "connection_descriptors", (server.descriptors() - descriptors) / count
            for figure, value in engines.go_on().items():
                yield figure.replace("step", name), value


def of_ends(server: Server) -> Iterator[tuple[str, float]]:
    with server.program("crowd", ENGINES) as crowd, server.program("ping") as pings:
        crowd.go_on()
        time.sleep(_SETTLE_S)
        for figure, value in pings.go_on().items():
            yield f"ends_{figure}", value


def of_rows(server: Server) -> Iterator[tuple[str, float]]:
    memory = server.own_bytes()
    with server.program("fill", server.rows) as filler:
        for part in ("fill", "evict"):
            with server.program("ping") as pings:
                yield from filler.go_on().items()
                for figure, value in pings.go_on().items():
                    yield f"{part}_{figure}", value
            yield f"{part}_row_bytes", (server.own_bytes() - memory) / server.rows
        with server.program("ping") as pings, server.program("reset") as resetting:
            yield from resetting.go_on().items()
            time.sleep(_SETTLE_S)
            yield "reset_ping_max_ms", pings.go_on()["ping_max_ms"]


PARTS: dict[str, Callable[[Server], Iterator[tuple[str, float]]]] = {
    "connections": of_connections,
    "ends": of_ends,
    "rows": of_rows,
}


@contextmanager
def serving(python: str, rows: int) -> Iterator[Server]:
    server = Server(python, rows)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    parser = command_line(__doc__, rounds=5, rows=1_000_000)
    parser.add_argument("--build", metavar="NAME=PYTHON", action="append", type=_named)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    arguments = parser.parse_args()
    builds: dict[str, str] = dict(arguments.build or [("this", sys.executable)])
    samples: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(arguments.rounds):
        for name in in_turn(number, builds):
            taken: dict[str, Any] = {}
            for part in arguments.parts:
                with serving(builds[name], arguments.rows) as server:
                    taken |= dict(PARTS[part](server))
            samples[name].append(taken)
            print(name, {figure: round(value, 3) for figure, value in taken.items()}, file=sys.stderr)
    first, *others = builds
    print(json.dumps(summary(samples, [(each, first) for each in others]), indent=2))


def _named(text: str) -> tuple[str, str]:
    name, found, python = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"expected NAME=PYTHON, found {text!r}")
    return name, python


if __name__ == "__main__":
    main()
