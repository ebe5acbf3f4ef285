"""Loads and stores of nvme over shared memory, beside those of another build and of private memory: one JSON object.

    python tests/performance/shared_memory.py DIRECTORY --before ENVIRONMENT/bin/python --block-bytes 65536
    python tests/performance/shared_memory.py DIRECTORY --kinds server --rounds 5

Each side is a process of its own, which opens its memory once; they move the same blocks in turn. `before` is the build
of the environment that `--before` names, `head` is this one, and `private` is this one with memory of its own, in
transparent huge pages. The kinds:

- server: tiers over the rows of a host's server, within its process
- workers: tiers over the region that an engine's processes share
- attached: a program that puts and gets blocks through `tiered-kv serve`
- engine: the manager of a shared stack, with a worker that copies between a KV cache and the rows

Before the rounds, each side has filled its directory, so that stores overwrite. `open_s` is the time until the memory
can be used, and `whole_s` until all of it is allocated and on huge pages, or left on small ones: both of fresh memory,
once a round. CPU time is that of the side's processes, the kernel's part included. Blocks are compared. GB = 1e9 bytes.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

import tiered_kv
from tests.performance.bench import Sample, Taken, block_key, command_line, in_turn, sample, summary, timed
from tests.support.host_server import server_process
from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadKey,
    ReqContext,
)
from tiered_kv.cpu.region import Geometry, PrimaryRegion
from tiered_kv.server.connect import HostStack, connect
from tiered_kv.server.memory import HostRegion
from tiered_kv.worker.shared import SCHEDULER, SharedRegion, SharedStack
from tiered_kv.worker.shared_file import SharedFile

KINDS = ("server", "workers", "attached", "engine")
LEFT_OUT = {("engine", "private")}
"""An engine's processes have no private rows."""
JOB_BYTES = 8 << 20
_TIMEOUT_S = 100.0


def main() -> None:
    parser = command_line(__doc__, "directory", before=str, block_bytes=65536, rounds=5, mib=256, side=str)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    size_bytes = arguments.mib << 20
    if arguments.side:
        Side(arguments.directory, arguments.side, arguments.kinds[0], arguments.block_bytes, size_bytes).serve()
        return
    programs = {"before": arguments.before, "head": sys.executable, "private": sys.executable}
    found: dict[str, object] = {}
    for kind in arguments.kinds:
        sides = {side: program for side, program in programs.items() if program and (kind, side) not in LEFT_OUT}
        options = ["--kinds", kind, "--block-bytes", str(arguments.block_bytes), "--mib", str(arguments.mib)]
        measured = measure(arguments.directory, sides, options, arguments.rounds)
        found |= {f"{kind}_{name}": value for name, value in measured.items()}
    print(json.dumps(found))


def measure(directory: Path, sides: dict[str, str], options: list[str], rounds: int) -> dict[str, object]:
    taken: defaultdict[str, list[Sample]] = defaultdict(list)
    with ExitStack() as opened:
        processes = {}
        for side, program in sides.items():
            folder = opened.enter_context(tempfile.TemporaryDirectory(dir=directory))
            command = [program, __file__, folder, "--side", side, *options]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder)  # its own package
            opened.callback(process.wait, _TIMEOUT_S)
            assert process.stdin is not None
            opened.callback(process.stdin.close)  # it ends itself
            processes[side] = process
            answer_of(process)
        for number in range(rounds):
            for side in in_turn(number, sides):
                print("go", file=processes[side].stdin, flush=True)
                taken[side].append(answer_of(processes[side]))
    return summary(taken, [("head", side) for side in ("before", "private") if side in sides])


def answer_of(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a side has failed"
    answer: dict[str, float] = json.loads(line)
    return answer


class Side:
    """One side of one kind: it moves blocks, once for each line that comes in, and prints the figures."""

    def __init__(self, directory: Path, side: str, kind: str, block_bytes: int, size_bytes: int) -> None:
        self._directory, self._side, self._kind = directory, side, kind
        self._block_bytes, self._size_bytes = block_bytes, size_bytes

    def serve(self) -> None:
        with self._opened() as move:
            for _ in range(4):  # more than the directory holds
                move()
            print(json.dumps({}), flush=True)
            for _ in sys.stdin:
                print(json.dumps({**move(), **self._opening()}), flush=True)

    def _stack(self, directory: Path) -> dict[str, Any]:  # Any: as in a stack's file
        return {
            "namespace": {"model": "measured"},
            "block": {"bytes": self._block_bytes},
            "primary": {"capacity": self._size_bytes // 2, "prefault": True},
            "secondary": [{"type": "nvme", "path": str(directory / "nvme"), "capacity": 3 * self._size_bytes}],
        }

    @contextmanager
    def _opened(self) -> Iterator[Callable[[], Sample]]:
        stack, blocks = self._stack(self._directory), Blocks(self._block_bytes, self._size_bytes)
        if self._kind == "attached" and self._side == "private":
            with tiered_kv.open_stack(stack) as own:
                yield lambda: moved_by(own, blocks, time.process_time)
        elif self._kind == "attached":
            with (
                server_process(self._directory, stack) as server,
                connect(f"unix:{self._directory}/cache.sock") as cache,
            ):
                time.sleep(3)  # all rows are allocated
                yield lambda: moved_by(cache, blocks, lambda: time.process_time() + cpu_s_of(server.pid))
        elif self._kind == "engine":
            with Engine({**stack, "primary": {"capacity": self._size_bytes // 2}}, blocks) as engine:
                yield engine.move
        else:
            with closing(self._region(self._block_bytes)) as region:
                wait_for_pages(region)
                namespace, tiers = tiered_kv.Namespace(model="measured"), stack["secondary"]
                with tiered_kv.DirectTiers(
                    region.flat, block_bytes=self._block_bytes, tiers=tiers, namespace=namespace
                ) as direct:
                    yield lambda: moved_directly(direct, region, blocks)

    def _region(self, block_bytes: int) -> PrimaryRegion:
        blocks = self._size_bytes // block_bytes
        if self._side == "private":
            return PrimaryRegion(blocks, block_bytes, prefault=True)
        if self._kind == "server":
            return server_region(blocks, block_bytes)
        name = f"measured-{secrets.token_hex(8)}"
        region = SharedRegion.join(SharedFile(name, SCHEDULER, [SCHEDULER]), Geometry(blocks, block_bytes))
        if hasattr(region, "collapse_behind"):  # not in earlier builds
            region.collapse_behind()
        return region

    def _opening(self) -> Sample:
        """Return how long fresh memory takes to open."""
        begin = time.perf_counter()
        if self._kind == "engine" or (self._kind, self._side) == ("attached", "private"):
            return {}
        if self._kind == "attached":
            with (
                tempfile.TemporaryDirectory(dir=self._directory) as folder,
                server_process(Path(folder), self._stack(Path(folder))),
                connect(f"unix:{folder}/cache.sock"),
            ):
                return {"open_s": time.perf_counter() - begin}
        with closing(self._region(1 << 20)) as region:
            open_s = time.perf_counter() - begin
            wait_for_pages(region)
            region.flat[:: mmap.PAGESIZE] = bytes(len(range(0, self._size_bytes, mmap.PAGESIZE)))  # as blocks do
            return {"open_s": open_s, "whole_s": time.perf_counter() - begin}


def server_region(blocks: int, block_bytes: int) -> PrimaryRegion:
    """Open a server's rows, which have their pages from `prefault`: an argument, in earlier builds a method."""
    if "prefault" in signature(HostRegion.__init__).parameters:
        return HostRegion(blocks, block_bytes, prefault=True)
    region: Any = HostRegion(blocks, block_bytes)  # Any: of another build
    region.prefault()
    return region  # type: ignore[no-any-return]  # of another build


def wait_for_pages(region: PrimaryRegion) -> None:
    """Wait until all memory is allocated, and on huge pages if it gets any."""
    threads = getattr(region, "_threads", [])  # of an earlier build
    while (
        getattr(region, "is_allocating", False)
        or getattr(region, "is_collapsing", False)
        or any(thread.is_alive() for thread in threads)
    ):
        time.sleep(0.001)


class Blocks:
    """Keys and contents that no round has seen, and the parts in which they move."""

    def __init__(self, block_bytes: int, size_bytes: int) -> None:
        self.block_bytes, self.count = block_bytes, size_bytes // block_bytes
        self.batch = max(1, min(JOB_BYTES, size_bytes // 16) // block_bytes)
        self.parts = [slice(at, min(at + self.batch, self.count)) for at in range(0, self.count, self.batch)]
        self._numbers = itertools.count()

    def fresh(self) -> tuple[list[OffloadKey], np.ndarray[Any, np.dtype[np.uint8]]]:
        content = np.empty((self.count, self.block_bytes), np.uint8)
        content[:] = np.random.default_rng(0).integers(0, 256, self.block_bytes, dtype=np.uint8)
        content[:, :8] = np.frombuffer(secrets.token_bytes(8 * self.count), np.uint8).reshape(-1, 8)
        return [block_key(next(self._numbers)) for _ in range(self.count)], content


def moved_directly(tiers: tiered_kv.DirectTiers, region: PrimaryRegion, blocks: Blocks) -> Sample:
    keys, content = blocks.fresh()
    offsets = [at * blocks.block_bytes for at in range(blocks.count)]
    region.array[:] = content

    def run(method: Callable[..., None]) -> None:
        answered: SimpleQueue[Sequence[bool]] = SimpleQueue()
        for part in blocks.parts:
            method(keys[part], offsets[part], answered.put)
        for _ in blocks.parts:
            assert all(answered.get(timeout=_TIMEOUT_S))

    store = timed(lambda: run(tiers.store))
    region.array[:] = 0
    load = timed(lambda: run(tiers.load))
    assert np.array_equal(region.array, content), "wrong bytes"
    return sample(content.nbytes / 1e9, store, load)


def moved_by(stack: tiered_kv.Stack | HostStack, blocks: Blocks, cpu_s: Callable[[], float]) -> Sample:
    keys, content = blocks.fresh()
    found = np.zeros_like(content)

    def put() -> None:
        for part in blocks.parts:
            assert stack.put(keys[part], content[part], timeout=_TIMEOUT_S) == len(keys[part])
            assert stack.flush(_TIMEOUT_S)

    def get() -> None:
        for part in blocks.parts:
            assert stack.get(keys[part], found[part], timeout=_TIMEOUT_S) == len(keys[part])

    taken = []
    for work in (put, get):
        before_s = cpu_s()
        wall_s = timed(work).wall_s
        taken.append(Taken(wall_s, cpu_s() - before_s))
    assert np.array_equal(content, found), "wrong bytes"
    return sample(content.nbytes / 1e9, *taken)


def cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Engine:
    """A scheduler and one worker, whose KV cache is in CPU memory."""

    def __init__(self, stack: dict[str, Any], blocks: Blocks) -> None:  # Any: as in a stack's file
        import torch  # the other kinds need none

        name = f"measured-{secrets.token_hex(8)}"
        shared = SharedStack(stack, name=name, bytes_per_worker=blocks.block_bytes)
        self._blocks = blocks
        self._cache = torch.zeros((blocks.count, blocks.block_bytes), dtype=torch.uint8)
        tensor = CanonicalKVCacheTensor(self._cache, blocks.block_bytes)
        caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, blocks.block_bytes)]])
        self._stack = shared.open_engine_stack()
        self._handlers = shared.open_handlers(caches)
        wait_for_pages(self._stack.region)
        self._numbers = itertools.count()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.shutdown()
        self._stack.close()

    def move(self) -> Sample:
        keys, content = self._blocks.fresh()
        cache = self._cache.numpy()
        cache[:] = content

        def store() -> None:
            for part in self._blocks.parts:
                self._store(keys[part], range(*part.indices(len(keys))))

        def load() -> None:
            for part in self._blocks.parts:
                self._load(keys[part], range(*part.indices(len(keys))))

        stored = timed(store)
        cache[:] = 0
        taken = sample(content.nbytes / 1e9, stored, timed(load))
        assert np.array_equal(content, cache), "wrong bytes"
        return taken

    @contextmanager
    def _request(self) -> Iterator[ReqContext]:
        context = ReqContext(f"request-{next(self._numbers)}")
        self._stack.manager.on_new_request(context)
        yield context
        self._stack.manager.on_request_finished(context)
        self._stack.manager.on_schedule_end()

    def _store(self, keys: Sequence[OffloadKey], cached: Sequence[int]) -> None:
        manager = self._stack.manager
        with self._request() as context:
            output = manager.prepare_store(keys, context)
            assert output is not None
            self._transfer(self._handlers.store, cached, output.store_spec, is_store=True)
            manager.complete_store(keys, context)
        while manager.jobs_in_flight:
            manager.on_schedule_end()
            time.sleep(0.0005)

    def _load(self, keys: Sequence[OffloadKey], cached: Sequence[int]) -> None:
        manager = self._stack.manager
        with self._request() as context:
            while None in (answers := [manager.lookup(key, context) for key in keys]):
                manager.on_schedule_end()
                time.sleep(0.0005)
            assert all(answers)
            self._transfer(self._handlers.load, cached, manager.prepare_load(keys, context), is_store=False)
            manager.complete_load(keys, context)

    def _transfer(
        self,
        handler: OffloadingHandler,
        cached: Sequence[int],
        rows: LoadStoreSpec,
        *,
        is_store: bool,
    ) -> None:
        spec = (GPULoadStoreSpec(list(cached), [len(cached)]), rows)
        number = next(self._numbers)
        handler.transfer_async(number, spec if is_store else (spec[1], spec[0]))
        handler.wait([number])
        assert all(result.success for result in handler.get_finished())


if __name__ == "__main__":
    main()
