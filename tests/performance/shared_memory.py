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

import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

import tiered_kv
from tests.performance.bench import Sample, block_key, command_line, in_turn, sample, summary, timed
from tests.support.host_server import server_process
from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec, ReqContext
from tiered_kv.cpu.region import Geometry, PrimaryRegion
from tiered_kv.server.connect import connect
from tiered_kv.server.memory import HostRegion
from tiered_kv.worker.shared import SCHEDULER, SharedRegion, SharedStack
from tiered_kv.worker.shared_file import SharedFile

KINDS = ("server", "workers", "attached", "engine")
MOVED_BYTES, REGION_BYTES = 256 << 20, 256 << 20
JOB_BYTES = 32 << 20
_TIMEOUT_S = 100.0


def main() -> None:
    parser = command_line(__doc__, "directory", before=str, block_bytes=65536, rounds=5, side=str)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    if arguments.side:
        serve_side(arguments.directory, arguments.side, arguments.kinds[0], arguments.block_bytes)
        return
    sides = {"before": arguments.before, "head": sys.executable, "private": sys.executable}
    given = {side: program for side, program in sides.items() if program}
    print(
        json.dumps(
            {
                kind: measure(arguments.directory, kind, given, arguments.block_bytes, arguments.rounds)
                for kind in arguments.kinds
            }
        )
    )


def measure(directory: Path, kind: str, sides: dict[str, str], block_bytes: int, rounds: int) -> dict[str, object]:
    taken: defaultdict[str, list[Sample]] = defaultdict(list)
    with ExitStack() as opened:
        processes = {}
        for side, program in sides.items():
            folder = opened.enter_context(tempfile.TemporaryDirectory(dir=directory))
            command = [program, __file__, folder, "--side", side, "--kinds", kind, "--block-bytes", str(block_bytes)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            opened.callback(process.wait, _TIMEOUT_S)
            assert process.stdin is not None
            opened.callback(process.stdin.close)  # it ends itself
            processes[side] = process
            answer_of(process)
        for number in range(rounds):
            for side in in_turn(number, sides):
                processes[side].stdin.write("go\n")  # type: ignore[union-attr]  # a pipe, as said above
                processes[side].stdin.flush()  # type: ignore[union-attr]
                taken[side].append(answer_of(processes[side]))
    return summary(taken, [pair for pair in (("head", "before"), ("head", "private")) if pair[1] in sides])


def answer_of(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a side has failed"
    answer: dict[str, float] = json.loads(line)
    return answer


def serve_side(directory: Path, side: str, kind: str, block_bytes: int) -> None:
    """Move blocks, once for each line that comes in, and print the figures."""
    with open_side(directory, side, kind, block_bytes) as move:
        for _ in range(4):  # more than fits into the directory
            move()
        print(json.dumps({}), flush=True)
        for _ in sys.stdin:
            opened = opening(kind, side) if kind in ("server", "workers") else {}
            print(json.dumps({**move(), **opened}), flush=True)


@contextmanager
def open_side(directory: Path, side: str, kind: str, block_bytes: int) -> Iterator[Callable[[], Sample]]:
    primary_bytes = REGION_BYTES // 4
    stack = {
        "namespace": {"model": "measured"},
        "block": {"bytes": block_bytes},
        "primary": {"capacity": primary_bytes, "prefault": True},
        "secondary": [{"type": "nvme", "path": str(directory / "nvme"), "capacity": 3 * MOVED_BYTES}],
    }
    if kind == "attached" and side == "private":
        with tiered_kv.open_stack(stack) as own:
            yield lambda: moved_by(own, block_bytes, own_cpu_s)
    elif kind == "attached":
        with server_process(directory, stack) as server, connect(f"unix:{directory}/cache.sock") as cache:
            time.sleep(3)  # all rows are allocated
            yield lambda: moved_by(cache, block_bytes, lambda: own_cpu_s() + cpu_s_of(server.pid))
    elif kind == "engine":
        if side == "private":
            raise SystemExit("an engine's processes have no private rows")
        with Engine(stack, block_bytes) as engine:
            yield engine.move
    else:
        with closing(open_region(kind, side, REGION_BYTES, block_bytes)) as region:
            wait_for_pages(region)
            with tiered_kv.DirectTiers(
                region.flat,
                block_bytes=block_bytes,
                tiers=stack["secondary"],  # type: ignore[arg-type]  # a list of entries
                namespace=tiered_kv.Namespace(model="measured"),
            ) as tiers:
                yield lambda: moved_directly(tiers, region, block_bytes)


def open_region(kind: str, side: str, size_bytes: int, block_bytes: int) -> PrimaryRegion:
    blocks = size_bytes // block_bytes
    if side == "private":
        return PrimaryRegion(blocks, block_bytes, prefault=True)
    if kind == "server" and side == "before":
        return opened_before(blocks, block_bytes)
    if kind == "server":
        return HostRegion(blocks, block_bytes, prefault=True)
    region = SharedRegion.join(
        SharedFile(f"measured-{secrets.token_hex(8)}", SCHEDULER, [SCHEDULER]), Geometry(blocks, block_bytes)
    )
    if hasattr(region, "collapse_behind"):  # not in earlier builds
        region.collapse_behind()
    return region


def opened_before(blocks: int, block_bytes: int) -> PrimaryRegion:
    """Open a server's rows in a build whose `HostRegion` has `prefault` as an argument, or as an earlier method."""
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


def opening(kind: str, side: str) -> Sample:
    begin = time.perf_counter()
    with closing(open_region(kind, side, REGION_BYTES, 1 << 20)) as region:
        open_s = time.perf_counter() - begin
        wait_for_pages(region)
        region.flat[::4096] = bytes(len(range(0, REGION_BYTES, 4096)))  # as the first blocks do
        return {"open_s": open_s, "whole_s": time.perf_counter() - begin}


_first = itertools.count(0, 1 << 20)


def keys_of(block_bytes: int) -> list[Any]:
    first = next(_first)
    return [block_key(first + at) for at in range(MOVED_BYTES // block_bytes)]


def content_of(block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    content = np.empty((MOVED_BYTES // block_bytes, block_bytes), np.uint8)
    content[:] = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
    content[:, :8] = np.frombuffer(secrets.token_bytes(8 * len(content)), np.uint8).reshape(-1, 8)
    return content


def parts_of(items: Sequence[Any], block_bytes: int) -> list[slice]:
    count = max(1, JOB_BYTES // block_bytes)
    return [slice(at, min(at + count, len(items))) for at in range(0, len(items), count)]


def moved_directly(tiers: tiered_kv.DirectTiers, region: PrimaryRegion, block_bytes: int) -> Sample:
    keys, content = keys_of(block_bytes), content_of(block_bytes)
    offsets = [at * block_bytes for at in range(len(keys))]
    region.array[:] = content

    def run(method: Callable[..., None]) -> None:
        left, all_done = [len(parts_of(keys, block_bytes))], threading.Event()

        def done(answers: Sequence[bool]) -> None:
            assert all(answers)
            left[0] -= 1
            if not left[0]:
                all_done.set()

        for part in parts_of(keys, block_bytes):
            method(keys[part], offsets[part], done)
        assert all_done.wait(_TIMEOUT_S)

    store = timed(lambda: run(tiers.store))
    region.array[:] = 0
    load = timed(lambda: run(tiers.load))
    assert np.array_equal(region.array, content), "wrong bytes"
    return sample(content.nbytes / 1e9, store, load)


def moved_by(stack: Any, block_bytes: int, cpu_s: Callable[[], float]) -> Sample:  # Any: a stack, or an attached one
    keys, content = keys_of(block_bytes), content_of(block_bytes)
    found = np.zeros_like(content)

    def put() -> None:
        for part in parts_of(keys, block_bytes):
            assert stack.put(keys[part], content[part], timeout=_TIMEOUT_S) == len(keys[part])
            assert stack.flush(_TIMEOUT_S)

    def get() -> None:
        for part in parts_of(keys, block_bytes):
            assert stack.get(keys[part], found[part], timeout=_TIMEOUT_S) == len(keys[part])

    taken = [timed_of(work, cpu_s) for work in (put, get)]
    assert np.array_equal(content, found), "wrong bytes"
    return sample(content.nbytes / 1e9, *taken)


def own_cpu_s() -> float:
    return time.process_time()


def cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed_of(work: Callable[[], None], cpu_s: Callable[[], float]) -> Any:  # Any: of `bench`
    before_s = cpu_s()
    taken = timed(work)
    return type(taken)(taken.wall_s, cpu_s() - before_s)


class Engine:
    """A scheduler and one worker, whose KV cache is in CPU memory."""

    def __init__(self, stack: dict[str, object], block_bytes: int) -> None:
        import torch  # the other kinds need none

        name = f"measured-{secrets.token_hex(8)}"
        shared = SharedStack(stack, name=name, bytes_per_worker=block_bytes)
        self._block_bytes = block_bytes
        self._blocks = max(1, JOB_BYTES // block_bytes)
        self._cache = torch.zeros((self._blocks, block_bytes), dtype=torch.uint8)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self._cache, block_bytes)], [[CanonicalKVCacheRef(0, block_bytes)]]
        )
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
        keys, content = keys_of(self._block_bytes), content_of(self._block_bytes)
        found = np.zeros_like(content)
        parts, view = parts_of(keys, self._block_bytes), self._cache.numpy()

        def store() -> None:
            for part in parts:
                view[: len(keys[part])] = content[part]
                self._store(keys[part])

        def load() -> None:
            for part in parts:
                self._load(keys[part])
                found[part] = view[: len(keys[part])]

        taken = sample(content.nbytes / 1e9, timed(store), timed(load))
        assert np.array_equal(content, found), "wrong bytes"
        return taken

    @contextmanager
    def _request(self) -> Iterator[ReqContext]:
        context = ReqContext(f"request-{next(self._numbers)}")
        self._stack.manager.on_new_request(context)
        yield context
        self._stack.manager.on_request_finished(context)
        self._stack.manager.on_schedule_end()

    def _store(self, keys: Sequence[Any]) -> None:
        manager = self._stack.manager
        with self._request() as context:
            output = manager.prepare_store(keys, context)
            assert output is not None
            self._transfer(self._handlers.store, len(keys), output.store_spec, is_store=True)
            manager.complete_store(keys, context)
        while manager.jobs_in_flight:
            manager.on_schedule_end()
            time.sleep(0.0005)

    def _load(self, keys: Sequence[Any]) -> None:
        manager = self._stack.manager
        with self._request() as context:
            while None in (answers := [manager.lookup(key, context) for key in keys]):
                manager.on_schedule_end()
                time.sleep(0.0005)
            assert all(answers)
            self._transfer(self._handlers.load, len(keys), manager.prepare_load(keys, context), is_store=False)
            manager.complete_load(keys, context)

    def _transfer(self, handler: Any, count: int, rows: Any, *, is_store: bool) -> None:  # Any: of the interface
        spec = (GPULoadStoreSpec(list(range(count)), [count]), rows)
        number = next(self._numbers)
        handler.transfer_async(number, spec if is_store else spec[::-1])
        handler.wait([number])
        assert all(result.success for result in handler.get_finished())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
