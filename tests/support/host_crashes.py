"""A host's server, its engines and their workers, of which one is killed at a system call, or any of them at random.

`crash_cases` runs `main` in place of `crash_server`: the case's tier is the role that is killed. `kill_many` is a
program of its own. Both fork all processes, since to start Python takes longer than a case. The server checks after
each pass that no row has two uses, engines check each byte that they load.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy.random  # noqa: F401  # what is imported here is not imported by the forked processes

import tiered_kv_nvme.tier  # noqa: F401
from tests.support import crash_server
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case, CrashServer, problems_of
from tests.support.host_engine import rounds
from tests.support.host_server import BLOCK_BYTES, WAIT_S, Engine, content_of, keys_of, stack_of
from tests.support.syscalls import Call, Ended, TracedChild, record, run_with_fault
from tiered_kv.server import served_stack
from tiered_kv.server.attach import Attachment
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.protocol import Hello
from tiered_kv.server.server import CacheServer, listen
from tiered_kv.server.worker import HostWorker
from tiered_kv.testing.control import wait_until
from tiered_kv.worker.handlers import WorkerHandlers

Work = Callable[[], None]
Run = Callable[[Work], Ended]

ROLES: Final = ("engine", "worker", "server")
ROWS: Final = 48
_FIRST: Final = keys_of(6)
_SURVIVORS: Final = keys_of(4, first=1000)
_POLL_S: Final = 0.005


class Board:
    """What a server says of itself, and engines of their rounds, in memory that forked processes share.

    The name of a session begins with its number: "7-engine".
    """

    ENGINES_MAX = 60

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.rounds = self._numbers[8 : 8 + self.ENGINES_MAX]
        self.loaded = self._numbers[128 : 128 + self.ENGINES_MAX]

    def clear(self) -> None:
        self._numbers[:3] = memoryview(bytes(24)).cast("q")

    def note(self, sessions: Iterable[str], unused_rows: int) -> None:
        self._numbers[1] = sum(1 << int(name.partition("-")[0]) for name in sessions)
        self._numbers[2] = unused_rows
        self._numbers[0] += 1

    @property
    def passes(self) -> int:
        return self._numbers[0]

    def has(self, number: int) -> bool:
        """Return whether the server has the session of this number."""
        return bool(self._numbers[1] >> number & 1)

    @property
    def sessions(self) -> int:
        return self._numbers[1].bit_count()

    @property
    def unused_rows(self) -> int:
        """Rows that no engine has: free, or of a block without a lease."""
        return self._numbers[2]


def serve_patiently(folder: Path, board: Board, *, until_left: bool = False) -> None:
    """Serve so that a slow machine makes engines wait, and makes no miss of a block that the tier takes or has."""
    stack = _stack_of(folder, ROWS, store_budget=ROWS * BLOCK_BYTES)
    stack["primary"]["request_wait"] = WAIT_S  # with store_budget: a store waits for a row, none is skipped
    with mock.patch.object(served_stack, "ANSWER_S", WAIT_S):
        serve(folder, board, stack, until_left=until_left)


def _stack_of(folder: Path, rows: int, **more: object) -> dict[str, Any]:
    nvme = {"type": "nvme", "path": str(folder / "kv"), "capacity": "1MiB", "segment": "64KiB", "threads": 1, **more}
    return stack_of(rows, secondary=[nvme])


def serve(folder: Path, board: Board, stack: dict[str, Any], *, until_left: bool = False) -> None:
    """Serve; with `until_left` until the first engines have ended."""
    namespaces = Namespaces(stack)
    namespaces.open_own()
    server = CacheServer(listen(folder / "s"), namespaces)
    (host,) = namespaces.stacks
    primary, was_used = host.manager.primary, False
    while not (until_left and was_used and not host.sessions):
        was_used |= bool(host.sessions)
        granted = [row for session in host.sessions.values() for row in session.granted]
        blocks = list(primary.blocks.values())
        used = {*granted, *(block.block_id for block in blocks)}
        assert len(used) == len(granted) + len(blocks), "a row has two uses"
        free = primary.backend.get_num_free_blocks()
        assert len(used) + free <= primary.backend.num_blocks, "a row is in use and free"
        board.note(host.sessions, free + sum(block.ref_cnt == 0 for block in blocks))
        server.serve_once(0.001 if host.is_busy else 0.05)
    server.close()


class CalmEngine(Engine):
    """An engine that waits in the kernel for the server, so that it makes the same calls in each run."""

    def step_until(self, is_over: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        end_s = time.monotonic() + timeout_s
        while not is_over():
            assert time.monotonic() < end_s, "it takes too long"
            self.manager.on_schedule_end()
            link = self.manager.link
            select.select([] if link is None else [link.channel.sock], [], [], _POLL_S)


def use(engine: Engine) -> int:
    """Do once whatever an engine does with its server; return how many blocks it found that were stored before."""
    keys, manager = keys_of(2 * ROWS), engine.manager
    found = engine.load(_FIRST)
    for first in range(0, len(keys), 8):  # the server evicts: rows of these blocks are given again
        engine.store(keys[first : first + 8])
    context = engine.begin()
    manager.prefetch(_FIRST, context)  # a tier has them
    engine.load(_FIRST, context)
    manager.ask_known(lambda: keys[-8:], context)
    manager.contains_many(keys[:8], context)
    engine.end(context)
    engine.look_up(keys[-8:], engine.begin())  # leases that end with the engine
    failed = engine.begin()
    output = manager.prepare_store(keys_of(4, first=500), failed)
    if output is not None:
        manager.complete_store(output.keys_to_store, failed, success=False)
    engine.end(failed)
    return found


class HostCrashServer(CrashServer):
    """Kills an engine, a worker or the server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self._folder = folder
        self._board = Board()
        self._address = f"unix:{folder / 's'}"

    def record(self, scenario: CrashScenario, names: Sequence[str], *, kills: bool) -> list[dict[str, object]]:
        calls: list[Call] = []

        def run(work: Work) -> Ended:
            calls.extend(record(work, log=self._log, names=names))
            return Ended(0, True, True, "")

        _, _, problems = self._around(scenario.tier, run)
        assert not problems, problems
        return [dataclasses.asdict(call) for call in calls]

    def case(self, case: Case) -> dict[str, object]:
        assert case.fault is not None
        ended, loaded, problems = self._around(
            case.scenario.tier, partial(run_with_fault, fault=case.fault, log=self._log)
        )
        return {"was_hit": ended.was_hit, "loaded": loaded, "answered": loaded, "problems": problems}

    def _around(self, role: str, run: Run) -> tuple[Ended, int, list[str]]:
        """Run a process of a role, then others; return its end, how many blocks these found, and what went wrong."""
        shutil.rmtree(self._folder / "kv", ignore_errors=True)
        (self._folder / "s").unlink(missing_ok=True)
        self._board.clear()
        ended, problems, loaded = Ended(0, True, False, ""), list[str](), 0
        try:
            if role == "server":
                ended, loaded = self._kill_server(run, problems)
            else:
                ended, loaded = self._kill_engine(self._engine if role == "engine" else self._worker, run, problems)
        except AssertionError:
            problems.append(traceback.format_exc(limit=-4))
        return ended, loaded, [*problems, *problems_of(ended, kills=True)]

    def _kill_engine(self, work: Work, run: Run, problems: list[str]) -> tuple[Ended, int]:
        with self._child("server", partial(serve_patiently, self._folder, self._board), problems):
            wait_until(lambda: self._board.passes)
            survivor = CalmEngine(self._address, "0-survivor")
            survivor.store(_SURVIVORS)
            lease = survivor.begin()
            assert survivor.look_up(_SURVIVORS, lease) == len(_SURVIVORS)
            rows = survivor.manager.prepare_load(_SURVIVORS, lease).block_ids
            ended = run(work)
            wait_until(lambda: not self._board.has(1))
            loaded = self._use_anew()
            contents = [bytes(survivor.region_row(row)) for row in rows]
            assert contents == [content_of(key) for key in _SURVIVORS], "rows of another engine were overwritten"
            survivor.manager.complete_load(_SURVIVORS, lease)
            survivor.close()
            wait_until(lambda: not self._board.sessions and self._board.unused_rows == ROWS)
        return ended, loaded

    def _kill_server(self, run: Run, problems: list[str]) -> tuple[Ended, int]:
        with self._child("engine", self._outlive, problems) as engine:
            ended = run(partial(serve_patiently, self._folder, self._board, until_left=True))
            self._board.clear()
            with self._child("server", partial(serve_patiently, self._folder, self._board), problems):
                engine.wait()
                wait_until(lambda: self._board.passes)
                loaded = self._use_anew()
                wait_until(lambda: not self._board.sessions and self._board.unused_rows == ROWS)
        return ended, loaded

    def _use_anew(self) -> int:
        engine = CalmEngine(self._address, "1-engine")  # the name is free
        loaded = use(engine)
        assert use(engine) == len(_FIRST), "a new engine does not find what it has stored"
        engine.close()
        return loaded

    @contextmanager
    def _child(self, name: str, work: Work, problems: list[str]) -> Iterator[TracedChild]:
        with TracedChild(work, wanted="", log=self._folder / f"{name}.log") as child:
            yield child
            if child.error:
                problems.append(f"{name}: {child.error}")

    # What a process does that is killed, or whose server is.

    def _engine(self) -> None:
        engine = CalmEngine(self._address, "1-engine")
        use(engine)
        engine.close()

    def _worker(self) -> None:
        worker_of(self._address, "1-engine").handlers.shutdown()

    def _outlive(self) -> None:
        wait_until((self._folder / "s").exists)
        engine = CalmEngine(self._address, "1-engine")
        use(engine)
        if engine.manager.counters()["host"]["lost_connections_total"] or not engine.manager.is_attached:
            engine.step_until(lambda: engine.manager.is_attached)
            use(engine)
        engine.close()


def worker_of(address: str, name: str) -> HostWorker:
    """Return a worker that maps the rows and copies nothing."""
    nothing = mock.Mock(get_finished=list)
    return HostWorker(Attachment(address, Hello(name, "worker")), lambda _: WorkerHandlers(nothing, nothing))


def main() -> None:
    """Run cases until standard input ends."""
    crash_server.serve(HostCrashServer(Path(sys.argv[1])))


class Kills:
    """Engines of which one has a worker, and a server. Each round kills or stops one."""

    ENGINES, ROWS = 4, 128

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._chosen = random.Random(seed)
        self._board = Board()
        self._numbers = itertools.cycle(range(Board.ENGINES_MAX))
        self._engines: dict[int, dict[str, TracedChild]] = {}
        self._server = self._fork("server", partial(serve, folder, self._board, _stack_of(folder, self.ROWS)))
        self.counts = Counter[str]()
        self.back_ms: list[float] = []
        """From the end of an engine's last process until its rows are back."""
        self.attach_ms: list[float] = []
        """From the kill of a server until all engines have attached to the next one, which begins at once."""

    def run(self, count: int) -> None:
        wait_until(lambda: self._board.passes)
        descriptors = self._descriptors()
        for _ in range(self.ENGINES):
            self._begin_engine()
        kinds = {self._kill_engine: 50, self._kill_worker: 15, self._stop: 30, self._kill_server: 5}
        for act in self._chosen.choices(list(kinds), list(kinds.values()), k=count):
            goal = sum(self._board.rounds) + self._chosen.randrange(4)
            wait_until(partial(self._have_made, goal))
            act()
            self.counts[act.__name__.strip("_")] += 1
        while self._engines:
            self._end_engine(self._any())
        wait_until(lambda: self._board.unused_rows == self.ROWS)
        assert self._descriptors() == descriptors, "the server has kept descriptors"
        self._kill(self._server)

    def _have_made(self, rounds: int) -> bool:
        return sum(self._board.rounds) >= rounds

    def _descriptors(self) -> int:
        """Return how many descriptors the server has that are no files: of sockets, of processes, and the like."""
        return sum(not os.readlink(each).startswith("/") for each in Path(f"/proc/{self._server.pid}/fd").iterdir())

    def _begin_engine(self) -> None:
        number = next(self._numbers)
        has_worker = not any("worker" in processes for processes in self._engines.values())
        work = partial(self._engine, number, int(has_worker))
        self._engines[number] = {"scheduler": self._fork(f"engine-{number}", work)}
        if has_worker:
            self._begin_worker(number)

    def _begin_worker(self, number: int) -> None:
        self._engines[number]["worker"] = self._fork(f"worker-{number}", partial(self._worker, number))

    def _kill_engine(self) -> None:
        self._end_engine(self._any())
        self._begin_engine()

    def _end_engine(self, number: int) -> None:
        for process in self._engines.pop(number).values():
            self._kill(process)
        began_s = time.monotonic()  # they have ended, which takes the kernel a while
        wait_until(lambda: not self._board.has(number))
        self.back_ms.append((time.monotonic() - began_s) * 1e3)

    def _kill_worker(self) -> None:
        number = next(number for number, processes in self._engines.items() if "worker" in processes)
        self._kill(self._engines[number]["worker"])
        self._begin_worker(number)

    def _kill_server(self) -> None:
        began_s = time.monotonic()
        self._kill(self._server)
        self._board.clear()
        self._server = self._fork(
            "server", partial(serve, self._folder, self._board, _stack_of(self._folder, self.ROWS))
        )
        wait_until(lambda: all(map(self._board.has, self._engines)))
        self.attach_ms.append((time.monotonic() - began_s) * 1e3)

    def _stop(self) -> None:
        """Stop a process for a moment, sometimes for as long as engines wait for an answer; the others go on."""
        processes = [self._server, *(each for engine in self._engines.values() for each in engine.values())]
        process = self._chosen.choice(processes)
        os.kill(process.pid, signal.SIGSTOP)
        is_long = process is self._server and self._chosen.random() < 0.1
        time.sleep(1.2 if is_long else 0.01 * self._chosen.random())
        os.kill(process.pid, signal.SIGCONT)

    def _kill(self, process: TracedChild) -> None:
        assert not process.error, process.error
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.status == -signal.SIGKILL, process.error

    def _any(self) -> int:
        return self._chosen.choice(list(self._engines))

    def _fork(self, name: str, work: Work) -> TracedChild:
        return TracedChild(work, wanted="", log=self._folder / f"{name}.log")

    def _engine(self, number: int, workers: int) -> None:
        engine = Engine(f"unix:{self._folder / 's'}", f"{number}-engine", workers=workers)
        for loaded in rounds(engine, str(random.random())):
            self._board.loaded[number] += loaded
            if engine.manager.is_attached:
                self._board.rounds[number] += 1
            else:
                engine.step_until(lambda: engine.manager.is_attached)

    def _worker(self, number: int) -> None:
        worker_of(f"unix:{self._folder / 's'}", f"{number}-engine")
        signal.pause()


def kill_many() -> None:
    """Kill and stop processes, so often at random from a seed, and print figures: `FOLDER COUNT SEED`."""
    kills = Kills(Path(sys.argv[1]), int(sys.argv[3]))
    kills.run(int(sys.argv[2]))
    figures = {"counts": kills.counts, "back_ms": sorted(kills.back_ms), "attach_ms": sorted(kills.attach_ms)}
    print(json.dumps({**figures, "rounds": sum(kills._board.rounds), "loaded": sum(kills._board.loaded)}))
